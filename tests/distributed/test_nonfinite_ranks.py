"""One rank has non-finite values, under DDP, FSDP2 and DeepSpeed: all decide alike; skipped steps leave no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from launching import error_of, launch, needs_deepspeed
from nonfinite_ranks import BAD, MANY, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SKIPPED = (
    *("ddp/adamw/skip/both", "ddp/adamw/skip/loss", "ddp/m/skip/both", "ddp/adamw-exact/skip/gradient"),
    *("fsdp2/adamw/skip/both", "fsdp2/m/skip/gradient", "fsdp2/adamw-exact/skip/both"),
    *("zero1/adamw/skip/both", "zero2/adamw/skip/gradient", "zero3/adamw/skip/both"),
    *("zero2_bf16/adamw/skip/both", "zero3_bf16/adamw/skip/both"),
)
STOPPED = ("ddp/adamw/stop/both", "fsdp2/adamw/stop/loss", "zero2/adamw/stop/both")
TAKEN = "zero2/adamw/skip/loss"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a run's records; the first request starts all runs of its kind."""
    folders: dict[bool, Any] = {}

    def get(run: str) -> Any:
        deepspeed = run.startswith("zero")
        if deepspeed:
            needs_deepspeed()
        if deepspeed not in folders:
            folders[deepspeed] = tmp_path_factory.mktemp("nonfinite")
            runs = [own for own in (*SKIPPED, *STOPPED, TAKEN) if own.startswith("zero") == deepspeed]
            launch("nonfinite_ranks.py", folders[deepspeed], runs, 2)
        error = error_of(folders[deepspeed], run)
        assert error is None, error
        return json.loads((folders[deepspeed] / f"{run.replace('/', '-')}.json").read_text())

    return get


@pytest.mark.parametrize("run", SKIPPED)
def test_a_skipped_step_leaves_no_trace(outcomes, run):
    """Weights, states, rates and random state, on every rank."""
    found = outcomes(run)
    assert found["different"] == []
    for rank in found["ranks"]:
        assert rank["error"] is None and rank["step"] == STEPS
    first, second = (rank["reports"] for rank in found["ranks"])
    assert [line.split(":")[0] for line in first] == [f"step {step + 1}" for step in BAD] and second == []
    for line in first:
        assert ("loss" in line) == (not run.endswith("gradient"))
        assert "loss" not in line or "on rank 1" in line
        assert "The step is left out (1 in a row" in line


@pytest.mark.parametrize("run", STOPPED)
def test_every_rank_stops(outcomes, run):
    for rank in outcomes(run)["ranks"]:
        assert rank["error"].startswith("NonFiniteError: 3 steps in a row")
        assert "step 5: non-finite loss" in rank["error"] and "on rank 1" in rank["error"]
        assert rank["step"] == MANY[-1] + 1 and rank["finite"]


def test_a_step_that_deepspeed_has_taken_is_not_called_skipped(outcomes):
    """Its own check looks at gradients; this step has an infinite loss with finite ones."""
    for rank in outcomes(TAKEN)["ranks"]:
        assert rank["error"].startswith("NonFiniteError: on_nonfinite='skip', but DeepSpeed has taken step 3: ")
