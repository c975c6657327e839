"""Exact MARS on two processes matches the straight-line algorithm on one."""

from __future__ import annotations

import json
from pathlib import Path

import exact
import pytest
import straight_line
import torch
from launching import error_of, launch, needs_deepspeed
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BAR = 5e-5
ORTHOGONALIZED = ("ddp-2-m", "ddp-2-shampoo", "fsdp2-2-m", "fsdp2-2-shampoo")
RUNS = (
    *("ddp-1", "ddp-4", "ddp_view-2", "ddp_static-1", "fsdp2-1", "fsdp2-4", "ddp-4-resumed", "fsdp2-1-resumed"),
    "tp-2",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exact")
    launch("exact.py", output, [*RUNS, *ORTHOGONALIZED], 2)
    return output


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exact_alone")
    launch("exact.py", output, [run for run in ORTHOGONALIZED if run.startswith("ddp")], 1)
    return output


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


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_are_the_algorithm_in_straight_lines(trained, expected, run):
    assert not error_of(trained, run), error_of(trained, run)
    engine, accumulation, *_ = run.split("-")
    weights = expected[f"{'llama' if engine == 'tp' else 'gpt2'}-{accumulation}"]
    found = load_file(trained / f"{run}.safetensors")
    differences = {name: ((found[name] - x).abs().max() / x.abs().max()).item() for name, x in weights.items()}
    assert max(differences.values()) <= BAR, sorted(differences.items(), key=lambda item: item[1])[-3:]


@pytest.mark.parametrize("run", ORTHOGONALIZED)
def test_matrices_are_orthogonalized_as_by_one_process(trained, alone, expected, run):
    """The weights equal those of one process, and differ from MARS-AdamW's."""
    for folder, name in ((trained, run), (alone, run.replace("fsdp2", "ddp"))):
        assert not error_of(folder, name), error_of(folder, name)
    found, wanted = (
        load_file(f / f"{n}.safetensors") for f, n in ((trained, run), (alone, run.replace("fsdp2", "ddp")))
    )
    differences = {name: ((found[name] - x).abs().max() / x.abs().max()).item() for name, x in wanted.items()}
    assert max(differences.values()) <= BAR, sorted(differences.items(), key=lambda item: item[1])[-3:]
    matrix = "transformer.h.0.mlp.c_fc.weight"
    assert (found[matrix] - expected["gpt2-2"][matrix]).abs().max() > 0.01 * found[matrix].abs().max()


def test_deepspeed_is_refused_at_the_start(tmp_path):
    needs_deepspeed()
    launch("exact.py", tmp_path, ["refused"], 2)
    assert not error_of(tmp_path, "refused"), error_of(tmp_path, "refused")
    assert "is_approx=False under DeepSpeed" in json.loads((tmp_path / "refused.json").read_text())["refused"]
