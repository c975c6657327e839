"""What one step knows of the next: batches are sorted once, as long as nothing changes that they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
        self._params = _params(param_groups)
        self._kept = _kept(param_groups, states)
        self._marks = _marks(param_groups, states)

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
        params = _params(param_groups)
        same = len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True))
        if not same or _structure(param_groups) != self._structure:
            return None
        if any(a is not b for a, b in zip(_kept(param_groups, states), self._kept, strict=True)):
            return None
        if _marks(param_groups, states) != self._marks:
            return None
        return [_refilled(batch, owned) for batch, owned in zip(self._batches, self._owned, strict=True)]


def _refilled(batch: Batch, owned: Sequence[dict[str, Any]]) -> Batch:
    lists: dict[str, Any] = {"gradients": [owner.grad for owner in batch.owners]}
    if batch.moves_gradients:
        lists["last_grads"] = [state["last_grad"] for state in owned]
    if batch.engine.is_flat:  # in the order of memory, which is the parameters'
        lists = {name: [t.as_strided((t.numel(),), (1,)) for t in tensors] for name, tensors in lists.items()}
    lists["last_scales"] = last_scales_of(owned)
    return replace(batch, **lists)


def _params(param_groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [param for group in param_groups for param in group["params"]]


def _kept(param_groups: Sequence[dict[str, Any]], states: _States) -> list[Any]:
    """The states that stay the same tensors from step to step; others are made and lost with them."""
    found: list[Any] = []
    for group in param_groups:
        for param in group["params"]:
            state = states[param]
            last = state.get("last_grad")
            found += [state.get("exp_avg"), last is not None if group["take_grad"] else last]
    return found


def _structure(param_groups: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(group[name] for name in _STRUCTURE) for group in param_groups]


def _marks(param_groups: Sequence[dict[str, Any]], states: _States) -> list[Any]:
    """What shows that a parameter or its gradient lies elsewhere or looks different; equal as long as none does."""
    marks: list[Any] = []
    for group in param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                marks.append(None)
            elif type(grad) is not Tensor or grad.layout is not torch.strided:
                marks.append(object())  # equal to nothing
            else:
                moves = group["take_grad"] and may_move(param, group, states[param])
                marks.append((param.data_ptr(), grad.dtype, grad.stride(), moves))
    return marks
