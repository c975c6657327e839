"""Tokens: sources, preparation, token files, the folder that holds them."""
