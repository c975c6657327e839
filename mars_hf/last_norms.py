"""Norms of last gradients, which the step that took these has known already."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.batches import Batch

_States = Mapping[Tensor, dict[str, Any]]


class _Known(NamedTuple):
    last: weakref.ref[Tensor]
    version: int  # of that tensor
    norms: Tensor
    place: int  # of its norm among them

    def holds(self, last: Tensor) -> bool:
        return self.last() is last and self.version == last._version


class LastNorms:
    """Remembers the norms of last gradients as long as these are the tensors that a step has left, unchanged.

    With them and the norm of the gradient the triangle inequality mostly tells that a corrected gradient is not to be
    clipped, without another pass over the last gradients. All of it happens on the device, which nobody waits for.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._known: dict[int, _Known] = {}  # by id of the owner; `_Known.holds` finds out if that is another tensor

    def of(self, batch: Batch, states: _States) -> Tensor | None:
        """Norms of a batch's last gradients, NaN where unknown; None where nothing follows from them.

        Under a CUDA graph nobody would look whether a last gradient is still the same.
        """
        group = batch.group
        fits = batch.engine.skips and batch.mars and bool(batch.last_grads) and not batch.is_sharded
        if not fits or group["clip_threshold"] is None or not group["is_approx"] or group["capturable"]:
            return None
        found = [self._norm(owner, states[owner]) for owner in batch.owners]
        first = found[0]
        if isinstance(first, _Known) and len(first.norms) == len(found):
            norms = first.norms
            if all(isinstance(one, _Known) and one.norms is norms and one.place == i for i, one in enumerate(found)):
                return norms.clone()
        device = batch.gradients[0].device
        values = [one.norms[one.place] if isinstance(one, _Known) else one for one in found]
        return torch.stack([torch.full((), one, device=device) if isinstance(one, float) else one for one in values])

    def keep(self, batch: Batch, states: _States) -> None:
        """Remember, after a step, the norms it has taken of what are last gradients now."""
        if batch.last_norms is not None:
            for place, owner in enumerate(batch.owners):
                last = states[owner]["last_grad"]
                self._known[id(owner)] = _Known(weakref.ref(last), last._version, batch.last_norms, place)

    def _norm(self, owner: Tensor, state: Mapping[str, Any]) -> _Known | float:
        known = self._known.get(id(owner))
        if known is not None and known.holds(state["last_grad"]):
            return known
        return 0.0 if float(state["step"]) == 0 else float("nan")  # last gradients are zeros at first
