"""Capture and restore random state, so that two passes draw the same random numbers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """State of the generators that a forward pass may use: Python's, NumPy's, torch's on CPU and on one device."""

    python: Any
    numpy: Any
    cpu: Tensor
    accelerator: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Capture the current state.

        Args:
            device: device of the pass; its generator is captured besides the CPU's.
        """
        import numpy  # optional for torch, required by transformers

        on_accelerator = device.type not in ("cpu", "meta")
        return cls(
            random.getstate(),
            numpy.random.get_state(),
            torch.get_rng_state(),
            torch.get_device_module(device).get_rng_state(device) if on_accelerator else None,
            device,
        )

    def restore(self) -> None:
        """Restore the captured state."""
        import numpy

        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)
