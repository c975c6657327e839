"""Define the kinds of values that settings accept: how to check each and how to parse it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mars_hf import matrix_layouts
from mars_hf.newton_schulz import SCHEDULES

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Kind:
    """Describe one kind of value.

    Attributes:
        check: raises ValueError, naming setting and value, for a value of another kind.
        type: type of one value on a command line; None if a command line cannot hold it.
        read: parses a value from a string.
        is_number: whether other number types (NumPy's) become floats.
    """

    check: Callable[[str, Any], None]
    type: Any = str
    read: Callable[[str, str], Any] = lambda name, text: text
    is_number: bool = False


def dtype_of(value: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a setting: a torch.dtype, or its name ("bfloat16", "torch.bfloat16")."""
    return value if isinstance(value, torch.dtype) else getattr(torch, value.removeprefix("torch."))


def is_triple(value: Any) -> bool:
    """Return whether a value is three finite numbers: the coefficients of one Newton-Schulz step."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    return all(isinstance(number, (int, float)) and math.isfinite(number) for number in value)


def one_of(*accepted: str) -> Kind:
    """Return a kind that accepts a few names."""

    def check(name: str, value: Any) -> None:
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is unknown; accepted: {', '.join(map(repr, accepted))}")

    return Kind(check)


def optional(kind: Kind) -> Kind:
    """Return a kind that also accepts None."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            kind.check(name, value)

    return Kind(check, kind.type, kind.read, kind.is_number)


def optional_dtype(*accepted: str) -> Kind:
    """Return a kind that accepts a dtype, its name, or None."""

    def check(name: str, value: Any) -> None:
        if value is not None and str(value).removeprefix("torch.") not in accepted:
            raise ValueError(f"{name}={value!r} is unknown; accepted: {', '.join(map(repr, accepted))}, or None")

    return Kind(check)


def _check_number(name: str, value: Any, accepted: str, ok: Callable[[float], bool]) -> None:
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
    _check_number(name, value, "a finite number >= 0", lambda number: number >= 0)


def _threshold(name: str, value: Any) -> None:
    if value is not None:
        _check_number(name, value, "a finite number > 0, or None for no clipping", lambda number: number > 0)


def _betas(name: str, value: Any) -> None:
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
        raise ValueError(f"{name}={value!r} is not a pair; accepted: two numbers in [0, 1)")
    for index, beta in enumerate(value):
        _check_number(f"{name}[{index}]", beta, "a number in [0, 1)", lambda number: 0 <= number < 1)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a bool; accepted: True, False")


def _positive_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is out of range; accepted: an integer >= 1")


def _coefficients(name: str, value: Any) -> None:
    triples = isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_triple, value))
    if not (triples or is_triple(value) or (isinstance(value, str) and value in SCHEDULES)):
        raise ValueError(
            f"{name}={value!r} is unknown; accepted: {', '.join(map(repr, SCHEDULES))}, three finite numbers, or a "
            "list of such triples, one a step"
        )


def _layout(name: str, value: Any) -> None:
    try:
        matrix_layouts.from_plain(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}={value!r} is not a layout ({error}); accepted: a MatrixLayout, a dict of its fields, or None"
        ) from None


def _unchecked(name: str, value: Any) -> None:
    """Accept anything; the function that uses the value checks it."""


def _read_number(kind: Callable[[str], float]) -> Callable[[str, str], Any]:
    def read(name: str, text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"optim_args: {name}={text!r} is not a number") from None

    return read


def _read_flag(name: str, text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError(f"optim_args: {name}={text!r} is not a bool; accepted: true, false")
    return words[text.lower()]


NON_NEGATIVE = Kind(_non_negative, float, _read_number(float), is_number=True)
THRESHOLD = Kind(_threshold, float, _read_number(float), is_number=True)
BETAS = Kind(_betas, None)
FLAG = Kind(_flag, bool, _read_flag)
POSITIVE_INTEGER = Kind(_positive_integer, int, _read_number(int))
COEFFICIENTS = Kind(_coefficients)
LAYOUT = Kind(_layout, None)
SPLIT_FUSED = Kind(_unchecked)
