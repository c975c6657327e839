"""A step skipped by fp16's dynamic loss scale leaves no trace, and non-finite values on one rank stop every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launching import Launches
from overflow import ATTEMPTS, BAD, POISONED

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


POISONED_RUNS = {
    "torch": ("trainer_ddp/loss", "trainer_ddp/gradient", "trainer_fsdp2/loss", "trainer_fsdp2/gradient"),
    "deepspeed": ("trainer_zero1/loss", *(f"trainer_{engine}/gradient" for engine in ("zero2", "zero3", "zero3_bf16"))),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Return a run's records; the first request starts all runs of its kind."""
    launches = Launches("overflow.py", tmp_path_factory)
    return lambda kind, run: launches.get(kind, [*RUNS[kind], *POISONED_RUNS[kind]], 2, run).notes


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


@pytest.mark.parametrize(("kind", "run"), [(kind, run) for kind, runs in POISONED_RUNS.items() for run in runs])
def test_non_finite_values_of_one_rank_stop_every_rank(trained, kind, run):
    """At the same step; only the first one reports."""
    first, second = trained(kind, run)
    assert first["error"].startswith("3 steps in a row") and first["error"] == second["error"]
    assert first["step"] == second["step"] == BAD[-1] - 1
    assert [line.split(":")[0] for line in first["reports"]] == [f"step {step}" for step in BAD]
    assert second["reports"] == []
    assert ("loss inf" if "loss" in run else "gradient") in first["reports"][0]
