"""Norms of last gradients that a step has taken, for the next one: they bound ||c|| without reading a last gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits

_version_of = attrgetter("_version")  # changes with the values, but for writes through `.data`


class LastNorms:
    """Remember the norms of tensors, each for as long as its tensor stays as it is."""

    def __init__(self) -> None:
        """Start with none."""
        self._norms: dict[tuple[int, int, int], float] = {}  # by `_marks`
        self._tensors: list[Tensor] = []  # live as long as this does, so that no other has the id of one

    def remember(self, last_grads: Sequence[Tensor], squares: Tensor) -> None:
        """Remember the squares of the norms of last gradients, all in 8 bits or none."""
        growth = eight_bits.LARGEST_GROWTH if last_grads[0].dtype == torch.int8 else 1.0
        norms = (squares.sqrt() * growth).tolist()
        self._tensors += last_grads
        self._norms.update(zip(_marks(last_grads), norms, strict=True))

    def clip_bounds(self, last_grads: Sequence[Tensor], clip_threshold: float, k: float) -> list[float]:
        """Return, for each last gradient, the largest <g, g> at which c is surely not clipped; -1 if nothing is sure.

        From ||c|| <= (1 + k) ||g|| + k ||last||.
        """
        bounds = []
        most = min(clip_threshold, 1e150) / 1.01  # with a margin for last gradients that a state has rounded
        for norm in map(self._norms.get, _marks(last_grads), itertools.repeat(math.inf)):
            slack = most - k * norm
            bounds.append((slack / (1 + k)) ** 2 if slack >= 0 else -1.0)
        return bounds


def _marks(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, int]]:
    """Return what stays the same while a tensor and its values do: its id, address and version."""
    return zip(map(id, tensors), map(Tensor.data_ptr, tensors), map(_version_of, tensors), strict=True)
