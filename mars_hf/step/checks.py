"""Reject gradients, states and settings that a step cannot use, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf.distributed import dtensors
from mars_hf.param_groups import takes_mars
from mars_hf.step import looks, states


def check_averages(
    param_groups: Sequence[Mapping[str, Any]], all_states: Mapping[Tensor, Mapping[str, Any]], indices: Iterable[int]
) -> None:
    """Raise RuntimeError if gamma has changed in groups that keep no last gradient."""
    for index in indices:
        group = param_groups[index]
        gamma, before = group["gamma"], group.get("gamma_of_average")
        if not takes_mars(group) or before is None or gamma == before:
            continue
        if any("exp_avg" in all_states.get(param, ()) for param in group["params"]):
            raise RuntimeError(
                f"gamma={gamma} after steps with {before}: without clipping this rule keeps no last gradient, "
                "which the next step needs then; keep gamma, or build Mars with clip_threshold=1e30, which "
                "clips nothing and keeps the last gradient"
            )


def check_gradient(param: Tensor) -> None:
    """Raise RuntimeError for a gradient that MARS cannot use; place a DTensor's like its parameter."""
    grad = param.grad
    if grad is None:
        return
    shape = tuple(param.shape)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of layout {grad.layout} for a parameter of shape {shape}: MARS takes dense (torch.strided) "
            "gradients only; build the embedding with sparse=False"
        )
    if not grad.is_floating_point():
        raise RuntimeError(
            f"gradient of dtype {grad.dtype} for a parameter of shape {shape}: MARS takes real floating point "
            "gradients only (float16, bfloat16, float32, float64)"
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"gradient of shape {tuple(grad.shape)} on {grad.device} for a parameter of shape {shape} on "
            f"{param.device}: the parameter has been changed since backward(); compute the gradient again"
        )
    for what, tensor in (("parameter", param), ("gradient", grad)):
        here = dtensors.local(tensor)
        if looks.is_plain(here) and not looks.has_memory(here):
            raise RuntimeError(f"the memory of a {what} of shape {shape} has been freed; restore it before step()")
    if param.is_neg():
        raise RuntimeError(f"a parameter of shape {shape} is a negated view; use its .resolve_neg()")
    if any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise RuntimeError(
            f"a parameter of shape {shape} is expanded (strides {param.stride()}): its elements share memory and "
            "cannot be updated; use its .clone()"
        )
    dtensors.place_gradient(param, grad)


def check_state(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise RuntimeError for a state that does not fit its parameter or lacks its last gradient."""
    states.check(param, state)
    if not states.lacks_last_grad(group, state):
        return
    shape = tuple(param.shape)
    if "gamma_of_average" in group:
        raise RuntimeError(
            f"clip_threshold={group['clip_threshold']!r} and second_moment={group['second_moment']!r} need the last "
            f"gradient of a parameter of shape {shape}, and the steps before did without it: keep clip_threshold=None "
            "and their second_moment, or build Mars with clip_threshold=1e30, which clips nothing and keeps the last "
            "gradient"
        )
    raise RuntimeError(
        f"the state of a parameter of shape {shape} has a first moment and no last gradient: it was loaded by code "
        "that knows Adam's states only. For DeepSpeed's universal checkpoints, convert with "
        "python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
    )
