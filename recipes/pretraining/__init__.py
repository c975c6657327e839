"""Modules of the GPT-2 pretraining recipe."""
