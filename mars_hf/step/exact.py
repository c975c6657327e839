"""Exact MARS: keep x_{t-1} and the stale gradients that the training loop supplies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf.arithmetic.formulas import SCALES
from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.distributed.shards import place_gradients
from mars_hf.distributed.tensors import local
from mars_hf.step import states
from mars_hf.step.lists import check_gradient

# The optimizer's state: one dict per parameter.
States = MutableMapping[Tensor, Any]
Groups = Iterable[Mapping[str, Any]]


def corrected_params(param_groups: Groups) -> dict[Tensor, Mapping[str, Any]]:
    """Return the parameters whose gradients a stale gradient corrects, with their groups."""
    group_of = {}
    for group in param_groups:
        is_corrected = update_rule(group).corrects and not group["is_approx"]
        if is_corrected:
            group_of.update(dict.fromkeys(group["params"], group))
    return group_of


def all_params(param_groups: Groups) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in param_groups for param in group["params"]]


def require_stale_gradients(param_groups: Groups, all_states: States, were_approx: Groups, were_supplied: bool) -> None:
    """Raise RuntimeError in an exact step, other than the first, without stale gradients.

    Args:
        param_groups: the optimizer's groups.
        all_states: the optimizer's states.
        were_approx: groups whose step before was approximate: their last gradients are no stale ones.
        were_supplied: whether the loop has supplied stale gradients, even if no parameter had a gradient then.
    """
    keys: set[str] = set()  # of the states of the parameters that this step corrects
    for param in corrected_params(param_groups):
        if param.grad is not None:
            keys.update(all_states.get(param, ()))
    is_first_step = "step" not in keys
    if is_first_step or were_supplied:
        return
    last_step_was_approx = bool(corrected_params(were_approx))
    if last_step_was_approx or "last_grad" not in keys:
        raise RuntimeError(
            "is_approx=False, and no stale gradient was supplied since the last step: use mars_hf.MarsTrainer, or "
            "call update_previous_grad() and update_last_grad() in your loop, or take is_approx=True"
        )


def keep_params(param_groups: Groups, all_states: States) -> None:
    """Keep a copy of x_t before the update; skipped if the loop computes stale gradients ahead of time."""
    if any("previous_grad" in state for state in all_states.values()):
        return
    for param in all_params(param_groups):
        state = all_states.get(param, {})
        if "previous_param" in state:
            state["previous_param"].copy_(param)
        elif param.grad is not None:
            all_states[param]["previous_param"] = param.detach().clone(memory_format=torch.preserve_format)


@torch.no_grad()
def exchange_params(param_groups: Groups, all_states: States) -> None:
    """Exchange x_t and x_{t-1} in place, for parameters that have both."""
    for param in all_params(param_groups):
        state = all_states.get(param, {})
        if "previous_param" not in state:
            continue
        current = local(param)
        previous = local(state["previous_param"])
        copy = current.clone()
        current.copy_(previous)
        previous.copy_(copy)


@torch.no_grad()
def keep_stale_gradients(param_groups: Sequence[Mapping[str, Any]], all_states: States) -> bool:
    """Copy the gradients as this batch's stale gradients; return whether any parameter uses one."""
    place_gradients(param_groups)
    corrected = corrected_params(param_groups)
    for param, group in corrected.items():
        all_states.get(param, {}).pop("previous_grad", None)
        if param.grad is not None:
            check_gradient(param, param.grad)
            all_states[param]["previous_grad"] = _kept_gradient(param, group, all_states[param])
    return bool(corrected)


def _kept_gradient(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Return a copy of a parameter's gradient as a step would use it."""
    kept = torch.zeros_like(param, dtype=states.buffer_dtype(param, group, state), memory_format=torch.preserve_format)
    local(kept).add_(local(param.grad), alpha=-1 if group["maximize"] else 1)
    return kept


def commit_stale_gradients(param_groups: Groups, all_states: States) -> None:
    """Make the kept stale gradients the last gradients of the next step."""
    supplied = []
    for param in corrected_params(param_groups):
        state = all_states.get(param, {})
        if "previous_grad" in state:
            supplied.append(state)
    if not supplied:
        return
    drop_stale_gradients(param_groups, all_states)  # of an earlier batch, also where this one has none
    for state in supplied:
        state["last_grad"] = state.pop("previous_grad")


def drop_stale_gradients(param_groups: Groups, all_states: States) -> None:
    """Drop the stale gradients that a step has used."""
    for param in corrected_params(param_groups):
        for key in ("last_grad", SCALES["last_grad"]):
            all_states.get(param, {}).pop(key, None)
