"""What the optimizer keeps for a parameter: which buffers its rule needs, and in which dtype."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from mars_hf import hyperparameters
from mars_hf.param_groups import rule_of, takes_mars

LOW_PRECISION = (torch.float16, torch.bfloat16)


def dtype_of(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.dtype:
    """The dtype of the moments: the one they were loaded with, `state_dtype`, or at least float32."""
    if "exp_avg" in state:
        return state["exp_avg"].dtype
    if group["state_dtype"] is not None:
        return hyperparameters.dtype_of(group["state_dtype"])
    return torch.float32 if param.dtype in LOW_PRECISION else param.dtype


def last_grad_dtype(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.dtype:
    """The dtype of last gradients."""
    if "last_grad" in state:
        return state["last_grad"].dtype
    if group["last_grad_dtype"] is not None:
        return hyperparameters.dtype_of(group["last_grad_dtype"])
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


def fill(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Add the buffers that the rule needs and the state does not have yet: zeros."""
    if "step" not in state:
        device = param.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    dtype = dtype_of(param, group, state)
    needed = {"exp_avg": dtype}
    if has_squares(group):
        needed["exp_avg_sq"] = dtype
        if group["amsgrad"]:
            needed["max_exp_avg_sq"] = dtype
    if takes_mars(group) and not is_recursive(group, state):
        needed["last_grad"] = last_grad_dtype(param, group, state)
    if group["rounding"] == "kahan" and param.dtype == torch.bfloat16:
        needed["compensation"] = param.dtype
    for key, of in needed.items():
        if key not in state:
            state[key] = torch.zeros_like(param, dtype=of, memory_format=torch.preserve_format)
    return state
