"""Describe Mars as PyTorch's own optimizer tests do: an `OptimizerInfo`."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import needs_compiler
from torch import Tensor, nn
from torch.optim import lr_scheduler

from mars_hf import Mars


@contextmanager
def _importable() -> Iterator[None]:
    """Import PyTorch's test utilities without their side effects on the process.

    They derive their TestCase, unused here, from a package that torch does not install, and they forbid
    everyone in the process to set backend flags.
    """
    with mock.patch("torch.backends.disable_global_flags"):
        if "expecttest" in sys.modules:
            yield
            return
        placeholder = types.ModuleType("expecttest")
        placeholder.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        with mock.patch.dict(sys.modules):
            sys.modules["expecttest"] = placeholder
            from torch.testing._internal import common_optimizers  # noqa: F401

            kept = {name: module for name, module in sys.modules.items() if name != "expecttest"}
        sys.modules.update(kept)
        yield


with _importable():
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
    )


# PyTorch's tests switch between these implementations.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"fused": False},
    "fused": {"fused": True},
    "auto": {},
}
EVERY_IMPLEMENTATION = [
    pytest.param(name, marks=needs_compiler) if name == "fused" else name for name in IMPLEMENTATIONS
]

# Functions, because schedulers write into a rate that is a tensor.
CONFIGURATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": lambda: {},
    "lr": lambda: {"lr": 0.01},
    "tensor lr": lambda: {"lr": torch.tensor(0.001, dtype=torch.float32)},
    "lr_1d": lambda: {"lr": 0.01, "lr_1d": 0.001},
    "betas": lambda: {"betas": (0.9, 0.999)},
    "betas_1d": lambda: {"betas_1d": (0.5, 0.6)},
    "zero betas": lambda: {"betas": (0.0, 0.0), "betas_1d": (0.0, 0.0)},
    "eps": lambda: {"eps": 1e-3},
    "weight_decay": lambda: {"weight_decay": 0.1},
    "weight_decay_1d": lambda: {"weight_decay": 0.1, "weight_decay_1d": 0.2},
    "maximize": lambda: {"weight_decay": 0.1, "maximize": True},
    "amsgrad": lambda: {"weight_decay": 0.1, "amsgrad": True},
    "gamma 0": lambda: {"gamma": 0.0},
    "gamma 0 without clipping": lambda: {"gamma": 0.0, "clip_threshold": None},
    "gamma 1": lambda: {"gamma": 1.0},
    "without clipping": lambda: {"clip_threshold": None},
    "tight clipping": lambda: {"clip_threshold": 0.1},
    "second moment of the gradient": lambda: {"second_moment": "gradient"},
    "recursive": lambda: {"second_moment": "gradient", "clip_threshold": None},
    "optimize_1d": lambda: {"optimize_1d": True},
    "optimize_1d without clipping": lambda: {"optimize_1d": True, "clip_threshold": None},
    "optimize_1d, amsgrad, maximize": lambda: {"optimize_1d": True, "amsgrad": True, "maximize": True},
    "max_grad_norm": lambda: {"max_grad_norm": 1.0},
    "small max_grad_norm": lambda: {"max_grad_norm": 0.01, "clip_threshold": 0.01},
    "max_grad_norm, maximize": lambda: {"max_grad_norm": 1.0, "maximize": True},
    "states in bfloat16": lambda: {"state_dtype": torch.bfloat16},
    "states in float64": lambda: {"state_dtype": "float64"},
    "stochastic rounding": lambda: {"rounding": "stochastic"},
    "kahan": lambda: {"rounding": "kahan"},
    "amsgrad, tensor lr": lambda: {
        "amsgrad": True,
        "lr": torch.tensor(0.001, dtype=torch.float32),
    },
    "mars-lion": lambda: {"mars_type": "mars-lion"},
    "mars-lion, maximize": lambda: {"mars_type": "mars-lion", "weight_decay": 0.1, "maximize": True},
    "mars-lion, recursive": lambda: {"mars_type": "mars-lion", "clip_threshold": None},
    "mars-lion, optimize_1d": lambda: {"mars_type": "mars-lion", "optimize_1d": True},
    "mars-lion, max_grad_norm": lambda: {"mars_type": "mars-lion", "max_grad_norm": 1.0},
    "mars-shampoo": lambda: {"mars_type": "mars-shampoo"},
    "mars-shampoo, maximize": lambda: {"mars_type": "mars-shampoo", "weight_decay": 0.1, "maximize": True},
    "mars-shampoo, recursive": lambda: {"mars_type": "mars-shampoo", "clip_threshold": None},
    "mars-shampoo, optimize_1d": lambda: {"mars_type": "mars-shampoo", "optimize_1d": True, "amsgrad": True},
    "mars-m": lambda: {"mars_type": "mars-m"},
    "mars-m, maximize": lambda: {"mars_type": "mars-m", "weight_decay": 0.1, "maximize": True},
    "mars-m, recursive": lambda: {"mars_type": "mars-m", "clip_threshold": None},
    "mars-m, polar-express": lambda: {"mars_type": "mars-m", "ns_coefficients": "polar-express"},
    "mars-m, three steps in float64": lambda: {"mars_type": "mars-m", "ns_steps": 3, "ns_dtype": "float64"},
    "mars-m, max_grad_norm": lambda: {"mars_type": "mars-m", "max_grad_norm": 1.0},
}

# Each configuration with two of the implementations in turn, for checks that do not depend on them.
PAIRS = [
    pytest.param(configuration, name, marks=needs_compiler if name == "fused" else ())
    for index, configuration in enumerate(CONFIGURATIONS)
    for name in (list(IMPLEMENTATIONS)[index % 3], list(IMPLEMENTATIONS)[(index + 1 + index // 3 % 2) % 3])
]


def settings_of(configuration: str, implementation: str = "auto") -> dict[str, Any]:
    """Return fresh keywords of Mars."""
    return {**CONFIGURATIONS[configuration](), **IMPLEMENTATIONS[implementation]}


def equal(one: Any, other: Any) -> bool:
    """Return whether two state dicts are bit-identical."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def inputs(device: Any, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    """Return every configuration in the form of `OptimizerInfo`."""
    return [OptimizerInput(params=None, kwargs=made(), desc=name) for name, made in CONFIGURATIONS.items()]


def _refused(desc: str, error: type[Exception], regex: str, params: Any = None, **settings: Any) -> ErrorOptimizerInput:
    params = [nn.Parameter(torch.ones(2, 2))] if params is None else params
    given = OptimizerInput(params=params, kwargs=settings, desc=desc)
    return ErrorOptimizerInput(given, error_type=error, error_regex=regex)


def _refused_in_step(desc: str, regex: str, gradient: Tensor, **settings: Any) -> ErrorOptimizerInput:
    param = nn.Parameter(torch.ones(gradient.shape, dtype=gradient.dtype))
    param.grad = gradient
    given = OptimizerInput(params=[param], kwargs=settings, desc=desc)
    return ErrorOptimizerInput(
        given, error_on=OptimizerErrorEnum.STEP_ERROR, error_type=RuntimeError, error_regex=regex
    )


def error_inputs(device: Any, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    """Return cases that construction or a step must refuse, with the words of the message."""
    one, two = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1, 1))
    return [
        _refused("a bare parameter", TypeError, "should be an iterable of Tensors or dicts", params=one),
        _refused("a parameter twice", UserWarning, "a parameter group with duplicate parameters", params=[one, one]),
        _refused(
            "a parameter in two groups",
            ValueError,
            "some parameters appear in more than one parameter group",
            params=[{"params": one}, {"params": one}],
        ),
        _refused(
            "some parameters with names",
            ValueError,
            "all optimizer params should be with/without names. Some param names are missing",
            params=[("weight", one), two],
        ),
        _refused(
            "some groups with names",
            ValueError,
            "all optimizer param groups should be with/without names",
            params=[{"params": [one], "lr": 1e-2}, {"params": [("weight", two)]}],
        ),
        _refused("an integer", TypeError, "got int", params=[one, 1]),
        _refused("a set", TypeError, "set", params=[{"params": {one}}]),
        _refused("no parameters", ValueError, "empty parameter list", params=[]),
        _refused("not a leaf", ValueError, "non-leaf", params=[one * 2]),
        _refused("two rates", ValueError, "or a tensor of one element", lr=torch.tensor([0.001, 0.001])),
        _refused("negative lr", ValueError, "lr=-0.01", lr=-0.01),
        _refused("lr that is no number", ValueError, "lr=nan", lr=float("nan")),
        _refused("negative eps", ValueError, "eps=-1e-06", eps=-1e-6),
        _refused("negative weight_decay", ValueError, "weight_decay=-1", weight_decay=-1),
        _refused("negative weight_decay_1d", ValueError, "weight_decay_1d=-1", weight_decay_1d=-1),
        _refused("beta1 of 1", ValueError, r"betas=\(1.0, 0.0\)", betas=(1.0, 0.0)),
        _refused("beta2 below 0", ValueError, r"betas=\(0.9, -0.1\)", betas=(0.9, -0.1)),
        _refused("betas_1d of 1", ValueError, r"betas_1d=\(1.0, 0.0\)", betas_1d=(1.0, 0.0)),
        _refused("negative gamma", ValueError, "gamma=-1", gamma=-1),
        _refused("threshold of 0", ValueError, "clip_threshold=0", clip_threshold=0),
        _refused("negative max_grad_norm", ValueError, "max_grad_norm=-1", max_grad_norm=-1),
        _refused("unknown rule", ValueError, "mars_type='mars'", mars_type="mars"),
        _refused("unknown rounding", ValueError, "rounding='up'", rounding="up"),
        _refused("integer states", ValueError, "state_dtype=torch.int8", state_dtype=torch.int8),
        _refused("no Newton-Schulz steps", ValueError, "ns_steps=0", ns_steps=0),
        _refused("differentiable", TypeError, "differentiable", differentiable=True),
        _refused("misspelt setting", TypeError, "weigth_decay", weigth_decay=0.1),
        _refused(
            "misspelt setting of a group", ValueError, "weigth_decay", params=[{"params": [one], "weigth_decay": 0.1}]
        ),
        _refused_in_step("sparse gradient", "torch.sparse_coo", torch.ones(2, 2).to_sparse()),
        _refused_in_step("complex gradient", "complex64", torch.ones(2, 2, dtype=torch.complex64)),
    ]


MARS = OptimizerInfo(
    Mars,
    optim_inputs_func=inputs,
    optim_error_inputs_func=error_inputs,
    scheduler_inputs=(
        [lambda opt: lr_scheduler.StepLR(opt, gamma=0.9, step_size=10)],
        [
            lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.4, total_iters=4),
            lambda opt: lr_scheduler.ReduceLROnPlateau(opt),
        ],
        [lambda opt: lr_scheduler.PolynomialLR(opt, power=0.9, total_iters=40)],
    ),
    supported_impls=("fused",),
    # Settings newer than the first checkpoints of Mars.
    not_og_supported_flags=(
        *("fused", "maximize", "max_grad_norm"),
        *("state_dtype", "rounding", "ns_dtype", "ns_coefficients", "ns_steps", "layout"),
    ),
    supports_complex=False,
    supports_fused_on=("cpu", "cuda"),
)

__all__ = [
    "CONFIGURATIONS",
    "EVERY_IMPLEMENTATION",
    "IMPLEMENTATIONS",
    "MARS",
    "PAIRS",
    "OptimizerErrorEnum",
    "equal",
    "needs_compiler",
    "settings_of",
]
