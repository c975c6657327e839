"""What users reported of DeepSpeed's own Muon does not happen to mars-m and mars-shampoo; see docs/distributed.md.

test_overflow.py, test_checkpoints.py and test_parity.py cover the reports that are not here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from launching import error_of, launch, needs_deepspeed
from packaging.version import parse
from torch import nn

import mars_hf

# The largest difference of a weight, relative to its largest element; bf16 rounds gradients to 8 bits.
RUNS = {"stage0": 1e-6, "stage0_bf16": 3e-2, "zero3_init": 1e-5, "zero3_groups": 1e-5}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a run's notes; the first request starts all runs."""
    folders: list[Any] = []

    def get(run: str) -> dict[str, Any]:
        needs_deepspeed()
        if not folders:
            folders.append(tmp_path_factory.mktemp("reports"))
            launch("muon_reports.py", folders[0], list(RUNS), 1)
        error = error_of(folders[0], run)
        assert error is None, error
        return json.loads((folders[0] / f"{run}.json").read_text())

    return get


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("run", RUNS)
def test_matrices_are_orthogonalized_once_per_step(trained, run):
    """Without ZeRO (8441), under `zero.Init` (8438), with groups (8440), for two micro-batches (8443)."""
    if run == "stage0_bf16" and parse(version("deepspeed")) < parse("0.19"):
        pytest.skip("DeepSpeed 0.18 divides bf16 gradients by a scale that no loss had; Trainer runs are refused there")
    notes = trained(run)
    assert max(notes["apart"].values()) <= RUNS[run], sorted(notes["apart"].items(), key=lambda item: item[1])[-3:]
    found, expected = notes["orthogonalized"]
    assert found == expected > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_groups_keep_their_settings(trained):
    """8440."""
    found, expected = trained("zero3_groups")["groups"]
    assert found == expected
    assert {(group["lr"], group["weight_decay"]) for group in found} == {(4e-3, 0.2), (1e-3, 0.0)}


@pytest.mark.parametrize("mars_type", ["mars-m", "mars-shampoo"])
def test_clipping_gradients_does_not_shorten_the_step(mars_type):
    """8439: at any width, since gradients are clipped, not what Newton-Schulz makes of them."""
    lengths = []
    for width in (16, 64):
        for limit in (torch.inf, 1.0):
            torch.manual_seed(0)
            param = nn.Parameter(torch.zeros(width, width))
            optimizer = mars_hf.Mars([param], mars_type=mars_type, lr=1e-2, weight_decay=0.0, ns_dtype="float32")
            param.grad = torch.randn(width, width)
            assert nn.utils.clip_grad_norm_([param], limit) > 10
            optimizer.step()
            lengths.append(param.detach().norm().item())
    narrow, clipped_narrow, wide, clipped_wide = lengths
    assert clipped_narrow == pytest.approx(narrow, rel=1e-4)
    assert clipped_wide == pytest.approx(wide, rel=1e-4)
    assert wide > 1.5 * narrow  # the step grows with the matrix; a clipped one would not


@pytest.mark.parametrize("mars_type", ["mars-m", "mars-shampoo"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_run_in_half_precision_resumes_from_states_in_float32(mars_type, dtype):
    """7746: states load with their values, and the next step runs."""
    param = nn.Parameter(torch.randn(6, 4).to(dtype))
    optimizer = mars_hf.Mars([param], mars_type=mars_type)
    param.grad = torch.randn(6, 4).to(dtype)
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({name: value.float() for name, value in state.items()})
    fresh = mars_hf.Mars([param], mars_type=mars_type)
    fresh.load_state_dict(saved)
    for name, value in optimizer.state[param].items():
        assert fresh.state[param][name].dtype == value.dtype
        assert torch.equal(fresh.state[param][name], value)
    param.grad = torch.randn(6, 4).to(dtype)
    fresh.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("mars_type", ["mars-m", "mars-shampoo"])
def test_the_scaler_keeps_an_overflow_out_of_the_momentum(mars_type):
    """8432: momentum, last gradient and weights stay, and the next step is that of a run without the overflow."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    gradients = [torch.randn(6, 4) for _ in range(2)]
    optimizers = [mars_hf.Mars([param], mars_type=mars_type) for param in params]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # the scaler starts with its first loss
    for step in range(4):
        for param, optimizer, overflows in zip(params, optimizers, (True, False), strict=True):
            if step % 2 == 0:  # every other batch overflows in one of the two runs
                param.grad = gradients[step // 2].clone()
                optimizer.step()
            elif overflows:
                param.grad = torch.full((6, 4), torch.inf)
                scaler.step(optimizer)
                scaler.update()
    assert torch.equal(*params)
    for name, value in optimizers[0].state[params[0]].items():
        assert torch.equal(value, optimizers[1].state[params[1]][name])
