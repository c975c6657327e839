"""What the optimizer keeps for a parameter: which buffers its rule needs, and in which dtype."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from mars_hf.groups.roles import rule_of, takes_mars
from mars_hf.groups.values import dtype_of as dtype_of_name

LOW_PRECISION = (torch.float16, torch.bfloat16)
# Tensors of a state that look like the parameter.
BUFFERS = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad", "compensation"),
    *("previous_grad", "previous_param"),
)


class UnfitStateError(ValueError, RuntimeError):
    """A state that does not fit its parameter: a ValueError where it is loaded, a RuntimeError in a step."""


def dtype_of(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the moments: the one they were loaded with, `state_dtype`, or at least float32."""
    if "exp_avg" in state:
        return state["exp_avg"].dtype
    if group["state_dtype"] is not None:
        return dtype_of_name(group["state_dtype"])
    return torch.float32 if param.dtype in LOW_PRECISION else param.dtype


def last_grad_dtype(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> torch.dtype:
    """The dtype of last gradients."""
    if "last_grad" in state:
        return state["last_grad"].dtype
    if group["last_grad_dtype"] is not None:
        return dtype_of_name(group["last_grad_dtype"])
    return dtype_of(param, group, state)


def has_squares(group: dict[str, Any]) -> bool:
    """Whether the rule has a second moment."""
    return rule_of(group) in ("adamw", "mars-adamw")


def is_recursive(group: dict[str, Any], state: Container[str]) -> bool:
    """Whether the first moment follows from averages of the gradients alone, so that no last gradient is kept.

    Only from the first step on: a state with a last gradient goes on with it. Of the state its keys will do.
    """
    without_squares = not has_squares(group) or group["second_moment"] == "gradient"
    unclipped = group["is_approx"] and group["clip_threshold"] is None
    return takes_mars(group) and unclipped and without_squares and "last_grad" not in state


def lacks_last_grad(group: dict[str, Any], state: Container[str]) -> bool:
    """Whether a state has lost the last gradient that goes with its first moment. Of the state its keys will do."""
    expected = takes_mars(group) and group["is_approx"] and not is_recursive(group, state)
    return expected and "exp_avg" in state and "last_grad" not in state


def needed(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, torch.dtype]:
    """Return the dtypes of the buffers that a step of this rule reads and writes; all have the parameter's shape."""
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
    """Return a number of steps as the state has it, 0-d float32: itself if it is that."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.ndim == 0:
        return value
    return torch.full((), float(value), dtype=torch.float32, device="cpu")


def fill(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, torch.dtype]:
    """Add what `needed` names and the state does not have yet: zeros. Returns what is needed."""
    step = step_of(state.get("step", 0))
    state["step"] = step.to(param.device) if group["capturable"] else step
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
        what: how the message calls the state.
        anywhere: whether tensors may be on another device than the parameter: of states to be loaded.
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
