"""Norms of last gradients that a step has taken, for the next one: they bound ||c|| without reading a last gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits

_version_of = attrgetter("_version")  # changes with the values, but for writes through `.data`


class LastNorms:
    """Remember the norms of tensors, each for as long as its tensor stays as it is."""

    def __init__(self) -> None:
        """Start with none."""
        # By id: the tensor, which lives as long as this does, so that no other has its id; address, version and norm.
        self._by_id: dict[int, tuple[Tensor, int, int, float]] = {}

    def remember(self, last_grads: Sequence[Tensor], squares: Tensor) -> None:
        """Remember the squares of the norms of last gradients, all in 8 bits or none."""
        growth = eight_bits.LARGEST_GROWTH if last_grads[0].dtype == torch.int8 else 1.0
        norms = (squares.sqrt() * growth).tolist()
        remembered = zip(last_grads, map(Tensor.data_ptr, last_grads), map(_version_of, last_grads), norms, strict=True)
        self._by_id.update(zip(map(id, last_grads), remembered, strict=True))

    def clip_bounds(self, last_grads: Sequence[Tensor], clip_threshold: float, k: float) -> list[float]:
        """Return, for each last gradient, the largest <g, g> at which c is surely not clipped; -1 if nothing is sure.

        From ||c|| <= (1 + k) ||g|| + k ||last||.
        """
        bounds = []
        most = min(clip_threshold, 1e150) / 1.01  # with a margin for last gradients that a state has rounded
        for last in last_grads:
            slack = most - k * self._norm_of(last)
            bounds.append((slack / (1 + k)) ** 2 if slack >= 0 else -1.0)
        return bounds

    def _norm_of(self, last: Tensor) -> float:
        """Return the norm of a last gradient, infinity if it is not known."""
        known = self._by_id.get(id(last))
        if known is None:
            return math.inf
        _, address, version, norm = known
        return norm if address == last.data_ptr() and version == last._version else math.inf
