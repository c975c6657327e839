"""One run: arguments, model, optimizer, checkpoints, resuming, report."""
