"""One step: state, buckets, norms, directions and metrics."""
