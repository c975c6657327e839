"""Refuse numbers and reports that no run can have, before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.integrations import get_available_reporting_integrations

_LARGEST_COUNT = 2**31


def numbers(values: Mapping[str, Any], counts: Iterable[str]) -> None:
    """Raise ValueError for a number that is not finite or too large, or one of `counts` that is less than 1."""
    for name, value in values.items():
        if isinstance(value, int) and abs(value) >= 2**53:
            raise ValueError(f"--{name} {value}: give a number below 2^53")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name} {value}: give a finite number")
    for name in counts:
        value = values.get(name)
        if value is not None and not 1 <= value < _LARGEST_COUNT:
            raise ValueError(f"--{name} {value}: give an integer from 1 on, below 2^31")


def reports(report_to: str | Iterable[str] | None) -> None:
    """Raise ValueError for a tracker that is unknown or not installed."""
    available = get_available_reporting_integrations()
    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in names:
        if name not in ("all", "none", *available):
            raise ValueError(f"--report_to {name}: unknown, or not installed; here are: {', '.join(available)}, none")
