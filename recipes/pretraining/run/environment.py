"""Names that one process of the recipes gives to another."""

LAUNCHED_BY = "MARS_HF_LAUNCHED_BY"  # pid of a script that starts runs, such as compare_optimizers.py
