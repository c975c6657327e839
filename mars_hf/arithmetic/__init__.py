"""Numbers only: rules, and the orthogonalization of matrices."""
