"""The random numbers of a pass, so that another one can draw the same."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """State of every generator a forward pass may draw from: Python's, NumPy's, torch's on CPU and on one device."""

    python: Any
    numpy: Any
    cpu: Tensor
    accelerator: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The state now.

        Args:
            device: where the pass runs; its generator is kept besides the CPU's.
        """
        import numpy  # torch does without it, transformers does not

        on_accelerator = device.type not in ("cpu", "meta")
        return cls(
            random.getstate(),
            numpy.random.get_state(),
            torch.get_rng_state(),
            torch.get_device_module(device).get_rng_state(device) if on_accelerator else None,
            device,
        )

    def restore(self) -> None:
        """Go back to it."""
        import numpy

        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)
