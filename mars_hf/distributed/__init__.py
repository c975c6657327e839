"""Placement of parameters on ranks, and the work on whole parameters that ranks share."""
