"""Modules that the recipes for other data and tasks share."""
