"""Integration with transformers: the Trainer, its callbacks, `--optim`, the stale pass and the model card."""
