"""The formulas of `mars_hf.arithmetic.rules`, fast: one pass over memory for the sums, one for the update."""
