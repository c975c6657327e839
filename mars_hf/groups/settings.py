"""The hyperparameters of MARS: their names, their defaults and what values they accept."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mars_hf.arithmetic.newton_schulz import SCHEDULES, Coefficients
from mars_hf.groups import matrix_layouts as layouts

MARS_TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
ORTHOGONAL_TYPES = ("mars-shampoo", "mars-m")  # orthogonalize the first moment of their matrices
ROLES = ("matrix", "vector", "embedding")
MATRIX_NDIMS = (">=2", "==2")
SECOND_MOMENTS = ("corrected", "gradient")
ROUNDINGS = ("nearest", "stochastic", "kahan")
DTYPES = ("float16", "bfloat16", "float32", "float64")
NS_DTYPES = DTYPES[1:]  # the entries of a first moment are below what float16 holds

# What a parameter group may state besides its parameters. `*_1d` settings are consumed when the group is split by
# role: the vector group's own lr, betas and weight_decay take their values, so that schedulers see one of each.
GROUP_KEYS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "gamma",
    "mars_type",
    "is_approx",
    "clip_threshold",
    "amsgrad",
    "optimize_1d",
    "matrix_ndim",
    "second_moment",
    "ns_steps",
    "ns_coefficients",
    "ns_dtype",
    "layout",
    "max_grad_norm",
    "take_grad",
    "last_grad_dtype",
    "state_dtype",
    "rounding",
    "maximize",
    "foreach",
    "fused",
    "capturable",
)
KEYS_1D = ("lr_1d", "betas_1d", "weight_decay_1d")
# Bookkeeping of groups, ours and torch's; it changes no arithmetic. `gamma_of_average` is the gamma of the steps behind
# exp_avg, where no last gradient is kept; `left_out` says which matrices are not orthogonalized, and why.
LABEL_KEYS = ("params", "param_names", "role", "name", "initial_lr", "gamma_of_average", "left_out")
# What other libraries call our settings: carried as a label they would be ignored silently.
_OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "step_size"), "lr"),
    **dict.fromkeys(("wd", "adam_weight_decay"), "weight_decay"),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2", "momentum", "b1", "b2"), "betas"),
    **dict.fromkeys(("epsilon", "adam_epsilon"), "eps"),
    **dict.fromkeys(("max_norm", "clip_grad", "grad_clip", "clip_grad_norm"), "max_grad_norm"),
}


class UnknownHyperparameterError(TypeError, ValueError):
    """A setting MARS does not have: as a keyword a TypeError, as a key of a group or of `optim_args` a ValueError."""


def reject_unknown(names: Iterable[str], accepted: Iterable[str], where: str) -> None:
    """Raise UnknownHyperparameterError, naming the accepted ones, if `names` holds any other."""
    accepted = tuple(accepted)
    unknown = [name for name in names if name not in accepted]
    if unknown:
        raise UnknownHyperparameterError(
            f"{where}: unknown {', '.join(map(repr, unknown))}; accepted are {', '.join(accepted)}"
        )


def reject_misspelled(names: Iterable[str], where: str) -> None:
    """Raise UnknownHyperparameterError for names that are nearly those of settings; others are somebody's labels.

    Schedulers and wrappers put keys of their own into groups (`lr_scale`, `rho`, `max_lr`), which torch carries along.
    """
    settings = (*GROUP_KEYS, *KEYS_1D, "role")
    for name in names:
        if name in settings or name in LABEL_KEYS:
            continue
        plain = str(name).lower().replace("-", "_")
        close = difflib.get_close_matches(plain, settings, n=1, cutoff=0.8)
        meant = _OTHER_NAMES.get(plain) or (close[0] if close else None)
        if meant is not None:
            raise UnknownHyperparameterError(
                f"{where}: unknown {name!r}; did you mean {meant!r}? Settings are {', '.join(settings)}"
            )


def _number(name: str, value: Any, accepted: str, ok: Callable[[float], bool]) -> None:
    if isinstance(value, torch.Tensor):
        if name not in ("lr", "lr_1d"):
            raise ValueError(
                f"{name}={value!r} is a tensor; accepted: {accepted}, as a number (lr alone may be a tensor)"
            )
        if value.numel() != 1:
            raise ValueError(
                f"{name}={tuple(value.shape)}-shaped tensor: a number or a tensor of one element is needed"
            )
    if isinstance(value, (str, bytes, bool)):
        raise ValueError(f"{name}={value!r} is not a number; accepted: {accepted}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a number; accepted: {accepted}") from None
    if not (math.isfinite(number) and ok(number)):
        raise ValueError(f"{name}={value!r} is out of range; accepted: {accepted}")


def _non_negative(name: str, value: Any) -> None:
    _number(name, value, "a finite number >= 0", lambda number: number >= 0)


def _optional_non_negative(name: str, value: Any) -> None:
    if value is not None:
        _non_negative(name, value)


def _threshold(name: str, value: Any) -> None:
    if value is not None:
        _number(name, value, "a finite number > 0, or None for no clipping", lambda number: number > 0)


def _betas(name: str, value: Any) -> None:
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
        raise ValueError(f"{name}={value!r} is not a pair; accepted: two numbers in [0, 1)")
    for index, beta in enumerate(value):
        _number(f"{name}[{index}]", beta, "a number in [0, 1)", lambda number: 0 <= number < 1)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a bool; accepted: True, False")


def _optional_flag(name: str, value: Any) -> None:
    if value is not None:
        _flag(name, value)


def _one_of(accepted: tuple[str, ...]) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is unknown; accepted: {', '.join(map(repr, accepted))}")

    return check


def dtype_of(value: str | torch.dtype) -> torch.dtype:
    """The dtype that a setting names ("bfloat16", "torch.bfloat16"), or is."""
    return value if isinstance(value, torch.dtype) else getattr(torch, value.removeprefix("torch."))


def _optional_dtype(accepted: tuple[str, ...]) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value is not None and str(value).removeprefix("torch.") not in accepted:
            raise ValueError(f"{name}={value!r} is unknown; accepted: {', '.join(map(repr, accepted))}, or None")

    return check


def _positive_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is out of range; accepted: an integer >= 1")


def _coefficients(name: str, value: Any) -> None:
    triples = isinstance(value, (list, tuple)) and len(value) > 0 and all(map(_is_triple, value))
    if not (triples or _is_triple(value) or (isinstance(value, str) and value in SCHEDULES)):
        raise ValueError(
            f"{name}={value!r} is unknown; accepted: {', '.join(map(repr, SCHEDULES))}, three finite numbers, or a "
            "list of such triples, one a step"
        )


def _is_triple(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    return all(isinstance(number, (int, float)) and math.isfinite(number) for number in value)


def ns_coefficients(settings: Mapping[str, Any]) -> tuple[Coefficients, ...]:
    """The coefficients of each Newton-Schulz step, from `ns_coefficients` and `ns_steps`.

    Raises:
        ValueError: a schedule whose length is not `ns_steps`.
    """
    given, steps = settings["ns_coefficients"], settings["ns_steps"]
    schedule: Any = SCHEDULES[given] if isinstance(given, str) else given
    if _is_triple(schedule):
        schedule = [schedule] * steps
    if len(schedule) != steps:
        raise ValueError(
            f"ns_coefficients={given!r} is a schedule of {len(schedule)} steps and ns_steps={steps!r}; give as many "
            "triples as steps, or one for all"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in schedule)


def _layout(name: str, value: Any) -> None:
    try:
        layouts.from_plain(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}={value!r} is not a layout ({error}); accepted: a MatrixLayout, a dict of its fields, or None"
        ) from None


_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "lr": _non_negative,
    "betas": _betas,
    "eps": _non_negative,
    "weight_decay": _non_negative,
    "gamma": _non_negative,
    "mars_type": _one_of(MARS_TYPES),
    "is_approx": _flag,
    "clip_threshold": _threshold,
    "amsgrad": _flag,
    "optimize_1d": _flag,
    "lr_1d": _optional_non_negative,
    "betas_1d": _betas,
    "weight_decay_1d": _non_negative,
    "matrix_ndim": _one_of(MATRIX_NDIMS),
    "second_moment": _one_of(SECOND_MOMENTS),
    "ns_steps": _positive_integer,
    "ns_coefficients": _coefficients,
    "ns_dtype": _optional_dtype(NS_DTYPES),
    "layout": _layout,
    "max_grad_norm": _threshold,
    "take_grad": _flag,
    "last_grad_dtype": _optional_dtype(DTYPES),
    "state_dtype": _optional_dtype(DTYPES),
    "rounding": _one_of(ROUNDINGS),
    "maximize": _flag,
    "foreach": _optional_flag,
    "fused": _optional_flag,
    "capturable": _flag,
    "role": _one_of(ROLES),
}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked settings in types that any checkpoint can hold: NumPy's numbers become Python's, pairs tuples."""
    return {name: _plain(name, value) for name, value in settings.items()}


def _plain(name: str, value: Any) -> Any:
    if name in ("betas", "betas_1d"):
        return tuple(_plain("beta", beta) for beta in value)
    if type(value) in (int, float, bool, str, type(None)) or isinstance(value, torch.Tensor):
        return value
    if name == "beta" or _CHECKS.get(name) in (_non_negative, _optional_non_negative, _threshold):
        return float(value)
    return value


def check(settings: Mapping[str, Any]) -> None:
    """Raise ValueError at the first setting with a value MARS cannot use."""
    for name, value in settings.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)
    if settings.get("foreach") and settings.get("fused"):
        raise ValueError("foreach=True and fused=True contradict each other; give one of them")
    if settings.get("capturable") and settings.get("rounding") == "stochastic":
        raise ValueError("capturable=True and rounding='stochastic' cannot be had together; rounding='kahan' can")
    if "ns_steps" in settings and "ns_coefficients" in settings:
        ns_coefficients(settings)


def lr_1d_ratio(mars_type: str) -> float:
    """The share of lr that lr_1d=None stands for: that of every published configuration."""
    return 1.0 if mars_type == "mars-m" else 0.5
