"""A step skipped by fp16's dynamic loss scale leaves no trace: every bit, on every rank, as without its batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from launching import error_of, launch, needs_deepspeed
from overflow import ATTEMPTS, POISONED

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

RUNS = {
    "torch": ("ddp/adamw", "ddp/lion_1d", "ddp/m", "fsdp2/adamw_1d", "fsdp2/lion", "fsdp2/m"),
    "deepspeed": (
        *("zero1/adamw", "zero1/lion", "zero2/adamw_1d", "zero2/lion", "zero3/adamw", "zero3/lion_1d"),
        *("zero2_offload/adamw", "zero3_offload/adamw"),
        # The rules that orthogonalize: a momentum with an overflow in it would never recover.
        *("zero1/m", "zero2/shampoo", "zero3/m", "zero2_offload/m"),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Return a run's records; the first request starts all runs of its kind."""
    folders: dict[str, Any] = {}

    def get(kind: str, run: str) -> Any:
        if kind == "deepspeed":
            needs_deepspeed()
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            launch("overflow.py", folders[kind], list(RUNS[kind]), 2)
        error = error_of(folders[kind], run)
        assert error is None, error
        return json.loads((folders[kind] / f"{run.replace('/', '-')}.json").read_text())

    return get


@pytest.mark.parametrize(("kind", "run"), [(kind, run) for kind, runs in RUNS.items() for run in runs])
def test_a_skipped_step_leaves_no_trace(trained, kind, run):
    notes = trained(kind, run)
    skipped = [attempt["skipped"] for attempt in notes["attempts"]]
    assert len(skipped) == ATTEMPTS
    assert skipped[:2] == [True, True] and skipped[POISONED] and not skipped[POISONED + 1]
    assert not skipped[POISONED - 1]  # so that there is a last gradient to damage
    for attempt in notes["attempts"]:
        if attempt["skipped"]:
            assert attempt["changed"] == []
        else:
            changed = {name.split(".")[0] for name in attempt["changed"]}
            assert {"param", "exp_avg", "last_grad", "step"} <= changed
    # Training without the batches of skipped steps is identical after each step.
    assert notes["differences"] == [[]] * skipped.count(False)
