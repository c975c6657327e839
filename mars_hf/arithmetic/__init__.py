"""Numbers only: rules, their formulas, and the orthogonalization of matrices."""
