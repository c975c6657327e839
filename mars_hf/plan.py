"""What one step knows of the next: batches are sorted once, as long as nothing changes that they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mars_hf.batches import Batch, last_scales_of, may_move

# Settings of a group that say how its tensors are sorted.
_STRUCTURE = (
    *("role", "mars_type", "is_approx", "clip_threshold", "second_moment", "amsgrad", "optimize_1d", "maximize"),
    *("take_grad", "last_grad_dtype", "state_dtype", "rounding", "foreach", "fused", "capturable"),
)
_States = Mapping[Tensor, dict[str, Any]]


class Plan:
    """The batches of a step, to be had again with the gradients of another.

    Sorting some hundred tensors takes milliseconds; as long as a GPU needs for the update itself.
    """

    def __init__(self, batches: Sequence[Batch], param_groups: Sequence[dict[str, Any]], states: _States) -> None:
        """Remember batches that `batches.gather` has just made, before anything is set in them."""
        self._batches = [replace(batch) for batch in batches]
        self._owned = [[states[owner] for owner in batch.owners] for batch in batches]
        self._structure = _structure(param_groups)
        self._seen = _look(param_groups, states)

    @staticmethod
    def covers(batches: Sequence[Batch]) -> bool:
        """Whether batches can be had again: of whole, plain tensors, with gradients in their parameters' order."""
        return all(
            batch.group["is_approx"]
            and not batch.is_sharded
            and type(owner) in (Tensor, nn.Parameter)
            and owner.grad is not None
            and owner.grad.stride() == owner.stride()
            for batch in batches
            for owner in batch.owners
        )

    def batches(self, param_groups: Sequence[dict[str, Any]], states: _States) -> list[Batch] | None:
        """The batches of this step, or None if they have to be made anew."""
        if _structure(param_groups) != self._structure:
            return None
        seen = _look(param_groups, states)
        if seen.looks != self._seen.looks or not all(map(is_, seen.tensors, self._seen.tensors)):
            return None
        return [_refilled(batch, owned) for batch, owned in zip(self._batches, self._owned, strict=True)]


def _refilled(batch: Batch, owned: Sequence[dict[str, Any]]) -> Batch:
    # Engines that are flat look at memory only, and gradients lie there as the parameters do.
    lists: dict[str, Any] = {"gradients": [owner.grad for owner in batch.owners]}
    if batch.moves_gradients:
        lists["last_grads"] = [state["last_grad"] for state in owned]
    lists["last_scales"] = last_scales_of(owned)
    return replace(batch, **lists)


class _Seen(NamedTuple):
    tensors: list[Tensor | None]  # parameters and the states that stay the same tensors from step to step
    looks: list[Any]  # of each parameter and its gradient; equal as long as none lies elsewhere or looks different


def _look(param_groups: Sequence[dict[str, Any]], states: _States) -> _Seen:
    tensors: list[Tensor | None] = []
    looks: list[Any] = []
    for group in param_groups:
        takes = group["take_grad"]  # then last gradients are others at every step
        for param in group["params"]:
            state, grad = states[param], param.grad
            last = state.get("last_grad")
            tensors += (param, state.get("exp_avg"), None if takes else last)
            if grad is None:
                looks.append(None)
            elif type(grad) is not Tensor or grad.layout is not torch.strided:
                looks.append(object())  # equal to nothing
            else:
                moves = takes and (last is not None, may_move(param, group, state))
                looks.append((param.data_ptr(), grad.dtype, grad.stride(), moves))
    return _Seen(tensors, looks)


def _structure(param_groups: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(len(group["params"]), *(group[name] for name in _STRUCTURE)) for group in param_groups]
