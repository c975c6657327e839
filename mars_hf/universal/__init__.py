"""DeepSpeed's universal checkpoints with all of an optimizer's state, for another number of processes.

DeepSpeed's own converter writes the two moments of Adam and nothing else, so that the last gradient would be lost, and
fails on mars-lion, which has one moment. What `to_universal` writes is laid out as DeepSpeed's loaders expect. ZeRO-1/2
take every state found there; ZeRO-3 takes Adam's, and gives all groups the settings of the first, which
`extend_deepspeed` mends.

No file is trusted: `safe_load` reads tensors, plain values and four classes of DeepSpeed, and nothing in a file runs.
"""

from __future__ import annotations

from mars_hf.universal.convert import to_universal
from mars_hf.universal.engines import extend_deepspeed
from mars_hf.universal.one_process import load

__all__ = ["extend_deepspeed", "load", "to_universal"]
