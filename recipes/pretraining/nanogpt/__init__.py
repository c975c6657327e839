"""Checkpoints of nanoGPT, both ways."""
