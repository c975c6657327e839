"""DeepSpeed's universal checkpoints with all of an optimizer's state, for another number of processes.

DeepSpeed's own converter writes Adam's two moments only, which loses the last gradient. Its loader for ZeRO-1/2 takes
what `to_universal` writes; that for ZeRO-3 takes Adam's states alone and gives every group the settings of the
first, which `extend_deepspeed` mends. Nothing in the files runs: `torch.load(weights_only=True)` reads them, with four
classes of DeepSpeed.
"""

from __future__ import annotations

from mars_hf.universal.checkpoint import load
from mars_hf.universal.convert import to_universal
from mars_hf.universal.engines import extend_deepspeed

__all__ = ["extend_deepspeed", "load", "to_universal"]
