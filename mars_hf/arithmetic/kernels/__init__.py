"""Fast kernels for `mars_hf.arithmetic.rules`: one pass over memory for the sums, one for the update."""
