"""Mars against trajectories of the official implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mars_hf

GOLDEN = Path(__file__).parent / "golden"
FILES = ("small_grads", "clipped_grads")


def implemented(settings: dict) -> bool:
    return settings["optimizer"] == "MARS" and settings["mars_type"] in ("mars-adamw", "mars-lion")


def cases() -> list:
    found = []
    for name in FILES:
        for case, settings in json.loads((GOLDEN / f"{name}.json").read_text())["cases"].items():
            if implemented(settings):
                found.append(pytest.param(name, case, id=f"{name}-{case}"))
    return found


def test_every_implemented_case_is_found():
    assert len(cases()) == 2 * 9


def set_gradients(params: list, tensors: dict, name: str) -> None:
    for i, param in enumerate(params):
        param.grad = tensors[f"{name}.p{i}"].clone()


@pytest.mark.parametrize("foreach", [False, True], ids=["per-tensor", "foreach"])
@pytest.mark.parametrize(("file", "case"), cases())
def test_trajectory_of_the_official_code(file: str, case: str, foreach: bool):
    tensors = load_file(GOLDEN / f"{file}.safetensors")
    description = json.loads((GOLDEN / f"{file}.json").read_text())
    settings = {key: value for key, value in description["cases"][case].items() if key != "optimizer"}
    params = [torch.nn.Parameter(tensors[f"init.p{i}"].clone()) for i in range(len(description["shapes"]))]
    optimizer = mars_hf.Mars(params, matrix_ndim="==2", foreach=foreach, **settings)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for t in range(description["steps"]):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - 0.5 * t / description["steps"])
        if not settings["is_approx"] and t + 1 < description["steps"]:  # one step ahead, as the official loop
            set_gradients(params, tensors, f"stale.{t + 1}")
            optimizer.update_previous_grad()
        set_gradients(params, tensors, f"grad.{t}")
        optimizer.step()
        optimizer.update_last_grad()
        for i, param in enumerate(params):
            torch.testing.assert_close(param.detach(), tensors[f"{case}.{t}.p{i}"], rtol=1e-6, atol=1e-7)

    compared = 0
    for key, expected in tensors.items():
        if not key.startswith(f"{case}.state."):
            continue
        name, _, index = key.removeprefix(f"{case}.state.").rpartition(".p")
        state = optimizer.state[params[int(index)]]
        if name in state:
            torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-7)
            compared += 1
        else:  # a buffer the official code allocates and never writes
            assert name == "exp_avg_sq"
            assert settings["mars_type"] == "mars-lion"
            assert not expected.any()
    assert compared >= len(params)
