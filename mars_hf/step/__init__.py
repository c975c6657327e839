"""One step of MARS, on the tensors of this rank."""
