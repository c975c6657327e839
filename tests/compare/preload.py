"""What a run's process imports: the server that runs are forked from has it already."""

import contextlib
import gc

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401  (accelerate imports it in every run)

import mars_hf.compare.child  # noqa: F401

gc.collect()
gc.freeze()
