"""Modules that the recipes share."""
