"""Exact MARS on two processes matches the straight-line algorithm on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exact
import pytest
import straight_line
import torch
from launching import Launches, error_of, launch, needs_deepspeed

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BAR = 5e-5
ORTHOGONALIZED = ("ddp-2-m", "ddp-2-shampoo", "fsdp2-2-m", "fsdp2-2-shampoo")
RUNS = (
    *("ddp-1", "ddp-4", "ddp_view-2", "ddp_static-1", "fsdp2-1", "fsdp2-4", "ddp-4-resumed", "fsdp2-1-resumed"),
    "tp-2",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Any]:
    launches = Launches("exact.py", tmp_path_factory)
    runs = {1: ("ddp-2-m", "ddp-2-shampoo"), 2: (*RUNS, *ORTHOGONALIZED)}
    return lambda world, run: launches.get(str(world), runs[world], world, run).tensors


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    """Return the parameters after the last step, by model and number of accumulation steps."""
    results = {}
    for of in ("gpt2-1", "gpt2-2", "gpt2-4", "llama-2"):
        kind, accumulation = of.split("-")
        steps = straight_line.batches(exact.Rows(), exact.MICRO_BATCH, int(accumulation), 7)[: exact.STEPS]
        model = (exact.build_llama() if kind == "llama" else exact.build_model()).train()
        trajectory = straight_line.train(model, steps, settings=exact.SETTINGS, lr_1d=exact.LR_1D)
        results[of] = trajectory[-1]
    return results


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(((found[name] - x).abs().max() / x.abs().max()).item() for name, x in expected.items())


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_against_straight_lines(trained, expected, run):
    engine, accumulation, *_ = run.split("-")
    weights = expected[f"{'llama' if engine == 'tp' else 'gpt2'}-{accumulation}"]
    assert worst(trained(2, run), weights) <= BAR


@pytest.mark.parametrize("run", ORTHOGONALIZED)
def test_orthogonalized_as_by_one_process(trained, expected, run):
    """The weights equal those of one process, and differ from MARS-AdamW's."""
    found = trained(2, run)
    assert worst(found, trained(1, run.replace("fsdp2", "ddp"))) <= BAR
    matrix = "transformer.h.0.mlp.c_fc.weight"
    assert (found[matrix] - expected["gpt2-2"][matrix]).abs().max() > 0.01 * found[matrix].abs().max()


def test_deepspeed_is_refused_at_the_start(tmp_path):
    needs_deepspeed()
    launch("exact.py", tmp_path, ["refused"], 2)
    assert not error_of(tmp_path, "refused"), error_of(tmp_path, "refused")
    assert "is_approx=False under DeepSpeed" in (tmp_path / "refused.json").read_text()
