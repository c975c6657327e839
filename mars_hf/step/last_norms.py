"""Norms of last gradients that a step has taken, for the next one: they bound ||c|| without reading a last gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mars_hf.arithmetic import eight_bits


class _Remembered(NamedTuple):
    address: int
    version: int  # changes with the values, but for writes through `.data`
    norm: float


class LastNorms:
    """Remember the norms of tensors, each for as long as its tensor stays as it is."""

    def __init__(self) -> None:
        """Start with none."""
        self._remembered = WeakTensorKeyDictionary()

    def remember(self, last_grads: Sequence[Tensor], squares: Tensor) -> None:
        """Remember the squares of the norms of last gradients."""
        for last, norm in zip(last_grads, squares.sqrt().tolist(), strict=True):
            most = norm * eight_bits.LARGEST_GROWTH if last.dtype == torch.int8 else norm
            self._remembered[last] = _Remembered(last.data_ptr(), last._version, most)

    def clip_bounds(self, last_grads: Sequence[Tensor], clip_threshold: float, k: float) -> list[float]:
        """Return, for each last gradient, the largest <g, g> at which c is surely not clipped; -1 if nothing is sure.

        From ||c|| <= (1 + k) ||g|| + k ||last||.
        """
        bounds = []
        for last in last_grads:
            # The margin is for last gradients that a state has rounded.
            slack = min(clip_threshold, 1e150) / 1.01 - k * self._norm_of(last)
            bounds.append((slack / (1 + k)) ** 2 if slack >= 0 else -1.0)
        return bounds

    def _norm_of(self, last: Tensor) -> float:
        """Return the norm of a last gradient, infinity if it is not known."""
        known = self._remembered.get(last)
        if known is None:
            return math.inf
        is_unchanged = known.address == last.data_ptr() and known.version == last._version
        return known.norm if is_unchanged else math.inf
