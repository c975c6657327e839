"""The formulas of `mars_hf.rules`, fast: one pass over memory for the sums, one for the update."""
