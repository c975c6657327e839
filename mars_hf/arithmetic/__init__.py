"""The paper's formulas on lists of tensors, and the backends that run them."""
