"""Norms of last gradients, which the step that took these has known already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf.batches import Batch


class LastNorms:
    """Remembers the norms of last gradients as long as these are the tensors that a step has left, unchanged.

    With them and the norm of the gradient the triangle inequality mostly tells that a corrected gradient is not to be
    clipped, without another pass over the last gradients. On CPUs only: elsewhere a decision would wait for the device.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, batch: Batch, states: Mapping[Tensor, dict[str, Any]]) -> Tensor | None:
        """Norms of a batch's last gradients, float64, NaN where unknown; None where nothing follows from them."""
        fits = batch.engine.clips and batch.mars and bool(batch.last_grads) and not batch.is_sharded
        if not fits or batch.group["clip_threshold"] is None or not batch.group["is_approx"]:
            return None
        return torch.tensor([self._norm(states[owner]) for owner in batch.owners], dtype=torch.float64)

    def keep(self, batch: Batch, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Remember, after a step, the norms it has taken of what are last gradients now."""
        if batch.last_norms is not None:
            for owner, norm in zip(batch.owners, batch.last_norms.tolist(), strict=True):
                last = states[owner]["last_grad"]
                self._known[last] = (last._version, norm)

    def _norm(self, state: Mapping[str, Any]) -> float:
        if float(state["step"]) == 0:
            return 0.0  # zeros
        version, norm = self._known.get(state["last_grad"], (None, float("nan")))
        return norm if version == state["last_grad"]._version else float("nan")
