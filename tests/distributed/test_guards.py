"""Replacing MARS, or giving it unknown tensors, raises on every rank before any step."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
from launching import Launches, error_of, launch, needs_deepspeed
from packaging.version import parse

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

DROPPED = r"would step is AdamW, not Mars.*use mars_hf\.MarsTrainer.*a JSON without 'optimizer' section"
REPLACED = r'would step is DeepSpeedCPUAdam, not Mars.*set "zero_force_ds_cpu_optimizer": false'
UNSCALED = r'fp16 under DeepSpeed without ZeRO.*"stage": 1'
SWAPS = {
    # Plain Trainer keeps no instance under DeepSpeed.
    **dict.fromkeys(("instance/zero2", "instance/zero3"), DROPPED),
    **{f"{way}/zero2_json_optimizer": DROPPED for way in ("instance", "factory", "optim", "own", "mars_trainer")},
    **{f"{way}/zero2_offload_forced": REPLACED for way in ("instance", "factory", "optim", "mars_trainer")},
    "factory/zero3_offload_forced": REPLACED,
    **dict.fromkeys(("factory/fp16", "mars_trainer/fp16"), UNSCALED),
}
# Launched last: DeepSpeed keeps the process groups of tensor parallelism.
DIVIDED = dict.fromkeys(
    ("autotp/zero0", "autotp/zero0_bf16", "autotp/zero1"), r"has marked as one part.*ZeRO without AutoTP"
)
KEPT = ("factory/zero3", "optim/zero2", "own/zero3", "mars_trainer/zero2_offload")
BF16_WITHOUT_ZERO = "mars_trainer/bf16"
LAYOUTS = {
    "layout/fsdp1_after_create": "FSDP1 has flattened.*use FSDP2",
    "layout/fsdp1_before_create": "FSDP1 has flattened.*use FSDP2",
    "layout/fully_shard_after_create": "has replaced .* parameters of the model after create.*would not train",
    "layout/zero_redundancy_optimizer": "ZeroRedundancyOptimizer.*fully_shard",
    "layout/partial_sums": r"Partial\(sum\).*a placement other than Shard and Replicate is not supported",
    "layout/flat_buffer": "a flat tensor of shape .* none of the parameters Mars was built with",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return each rank's outcome of a run; the first request starts all runs of its kind."""
    launches = Launches("guards.py", tmp_path_factory)

    def get(run: str) -> list[dict[str, Any]]:
        if run in LAYOUTS:
            return launches.get("layouts", list(LAYOUTS), 2, run).notes
        needs_deepspeed()
        return launches.get("deepspeed", [*SWAPS, *KEPT, BF16_WITHOUT_ZERO, *DIVIDED], 2, run).notes

    return get


@pytest.mark.parametrize(("run", "message"), [*SWAPS.items(), *DIVIDED.items(), *LAYOUTS.items()])
def test_stops_before_the_first_step(outcomes, run, message):
    for outcome in outcomes(run):
        assert re.search(message, outcome["error"])
        assert outcome["steps"] == (message is UNSCALED)  # where DeepSpeed makes states by a step with zeros


@pytest.mark.parametrize("run", KEPT)
def test_goes_on_with_mars_where_the_remedy_was_taken(outcomes, run):
    for outcome in outcomes(run):
        assert outcome["error"] is None
        assert outcome["steps"] > 0


def test_bf16_without_zero_stops_where_deepspeed_divides_it_too(outcomes):
    for outcome in outcomes(BF16_WITHOUT_ZERO):
        if parse(version("deepspeed")) < parse("0.19"):
            assert re.search(UNSCALED, outcome["error"])
        else:
            assert outcome["error"] is None and outcome["steps"] > 0


def test_a_launch_that_hangs_fails_soon(tmp_path):
    """All launches here have this limit, at 60 s."""
    run = "ddp/adamw/hang"
    launch("train.py", tmp_path, [run], 2, "--wait", "8")
    assert "imed out" in error_of(tmp_path, run)


def test_a_launch_that_hangs_where_no_wait_is_limited_fails_soon(tmp_path):
    """And this one, at 100 s."""
    run = "ddp/adamw/hang"
    launch("train.py", tmp_path, [run], 2, "--limit", "5")
    errors = [file.read_text() for file in tmp_path.glob("*.error*")]  # one rank's end may be the other's error
    assert any("not done after 5 seconds" in error and "train.py" in error for error in errors)  # where it hung
