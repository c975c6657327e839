"""Decide what the optimizer keeps per parameter: the buffers that its rule needs, and their dtypes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from mars_hf.param_groups import rule_of, takes_mars
from mars_hf.settings import dtype_of as dtype_of_name

LOW_PRECISION = (torch.float16, torch.bfloat16)
# Tensors of a state that have the parameter's shape.
BUFFERS = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad", "compensation"),
    *("previous_grad", "previous_param"),
)


class UnfitStateError(ValueError, RuntimeError):
    """Raised for a state that does not fit its parameter: a ValueError on loading, a RuntimeError in a step."""


def dtype_of(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the moments: the loaded one, else `state_dtype`, else at least float32."""
    if "exp_avg" in state:
        return state["exp_avg"].dtype
    if group["state_dtype"] is not None:
        return dtype_of_name(group["state_dtype"])
    return torch.float32 if param.dtype in LOW_PRECISION else param.dtype


def last_grad_dtype(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of last gradients: the loaded one, else that of the moments."""
    return state["last_grad"].dtype if "last_grad" in state else dtype_of(param, group, state)


def has_squares(group: dict[str, Any]) -> bool:
    """Return whether the rule has a second moment."""
    return rule_of(group) in ("adamw", "mars-adamw")


def is_recursive(group: dict[str, Any], state: Container[str]) -> bool:
    """Return whether the first moment follows from averages of the gradients alone, without a last gradient.

    A state that already has a last gradient keeps using it. Only the state's keys are needed.
    """
    without_squares = not has_squares(group) or group["second_moment"] == "gradient"
    unclipped = group["is_approx"] and group["clip_threshold"] is None
    return takes_mars(group) and unclipped and without_squares and "last_grad" not in state


def lacks_last_grad(group: dict[str, Any], state: Container[str]) -> bool:
    """Return whether a state lacks the last gradient that belongs to its first moment; only keys are needed."""
    expected = takes_mars(group) and group["is_approx"] and not is_recursive(group, state)
    return expected and "exp_avg" in state and "last_grad" not in state


def needed(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, torch.dtype]:
    """Return the buffers that a step of this rule reads and writes, with dtypes; all have the parameter's shape."""
    dtype = dtype_of(param, group, state)
    keys = {"exp_avg": dtype}
    if has_squares(group):
        keys["exp_avg_sq"] = dtype
        if group["amsgrad"]:
            keys["max_exp_avg_sq"] = dtype
    if takes_mars(group) and not is_recursive(group, state):
        keys["last_grad"] = last_grad_dtype(param, group, state)
    if group["rounding"] == "kahan" and param.dtype == torch.bfloat16:
        keys["compensation"] = param.dtype
    return {key: state[key].dtype if key in state else of for key, of in keys.items()}


def step_of(value: Any) -> Tensor:
    """Return a step count as a 0-d float32 tensor; one that already is one is returned itself."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.ndim == 0:
        return value
    return torch.full((), float(value), dtype=torch.float32, device="cpu")


def fill(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, torch.dtype]:
    """Add the buffers that the state lacks, filled with zeros; return what `needed` returns."""
    state["step"] = step_of(state.get("step", 0))
    keys = needed(param, group, state)
    for key, of in keys.items():
        if key not in state:
            state[key] = torch.zeros_like(param, dtype=of, memory_format=torch.preserve_format)
    return keys


def check(
    param: Tensor, state: dict[str, Any], what: str = "the state of a parameter", *, anywhere: bool = False
) -> None:
    """Raise UnfitStateError unless every tensor of a state fits its parameter.

    Args:
        param: the parameter.
        state: its state.
        what: name of the state in the message.
        anywhere: whether tensors may be on another device than the parameter, as while loading.
    """
    for key, value in state.items():
        if key in ("step", "last_grad_scale"):
            number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
            if not number:
                raise UnfitStateError(
                    f"{what} of shape {tuple(param.shape)} has {key}={_look(value)}; a number is needed"
                )
        elif key in BUFFERS:
            fits = isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point()
            if not (fits and (anywhere or value.device == param.device)):
                raise UnfitStateError(
                    f"{what} of shape {tuple(param.shape)} on {param.device} has {key} of {_look(value)}; a floating "
                    "point tensor of the parameter's shape and device is needed. A checkpoint of a model of another "
                    "size cannot be resumed: start with a fresh optimizer"
                )
            if value.is_neg():
                raise UnfitStateError(
                    f"{key} of a parameter of shape {tuple(param.shape)} is a negated view; replace it with its "
                    ".resolve_neg()"
                )
            if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
                raise UnfitStateError(
                    f"{key} of a parameter of shape {tuple(param.shape)} is expanded (strides {value.stride()}): its "
                    "elements share memory and cannot be updated; replace it with its .clone()"
                )


def _look(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    return repr(value)
