"""The quick set has every check of the contract, on every fourth of its cases; the whole has all cases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        if item.path.parent == HERE and isinstance(item, pytest.Function):
            check = f"{item.path}::{item.originalname}"
            if cases[check] % 4:
                item.add_marker(pytest.mark.slow)
            cases[check] += 1
