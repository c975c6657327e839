"""One rank has non-finite values, under DDP, FSDP2 and DeepSpeed: every rank stops, at the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import error_of, launch, needs_deepspeed
from nonfinite_ranks import BAD

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

RUNS = {
    "torch": ("ddp/loss", "ddp/gradient", "fsdp2/loss", "fsdp2/gradient"),
    "deepspeed": ("zero1/loss", "zero2/gradient", "zero3/gradient", "zero3_bf16/gradient"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_every_rank_stops(tmp_path: Path, kind: str) -> None:
    if kind == "deepspeed":
        needs_deepspeed()
    launch("nonfinite_ranks.py", tmp_path, list(RUNS[kind]), 2)
    for run in RUNS[kind]:
        assert (error := error_of(tmp_path, run)) is None, error
        first, second = json.loads((tmp_path / f"{run.replace('/', '-')}.json").read_text())
        assert first["error"].startswith("3 steps in a row") and first["error"] == second["error"], run
        assert first["step"] == second["step"] == BAD[-1] - 1, run
        assert [line.split(":")[0] for line in first["reports"]] == [f"step {step}" for step in BAD], run
        assert second["reports"] == []
        assert ("loss inf" if "loss" in run else "gradient") in first["reports"][0], run
