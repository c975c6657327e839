"""The shipped reference is MARS: against the official trajectories, and `Mars` against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mars_hf import Mars, reference
from mars_hf.reference import MarsReference
from mars_hf.settings import MARS_TYPES

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


def gradient(shape: tuple[int, ...], step: int, size: float) -> torch.Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def test_it_is_short():
    assert len(Path(reference.__file__).read_text().splitlines()) <= 80


@pytest.mark.parametrize("size", [0.01, 1.0], ids=["small gradients", "clipped gradients"])
@pytest.mark.parametrize("shape", [(7, 5), (3, 8), (6, 6)], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["approx", "exact"])
@pytest.mark.parametrize("rule", MARS_TYPES)
def test_mars_is_held_to_it(rule, exact, shape, size):
    start = gradient(shape, 100, 1.0)
    plain = MarsReference(start.clone(), rule, **SETTINGS)
    param = nn.Parameter(start.clone())
    mars = Mars([param], mars_type=rule, is_approx=not exact, fused=False, ns_dtype="float64", **SETTINGS)
    for step in range(12):
        g, stale = gradient(shape, step, size), gradient(shape, 50 + step, size)
        if exact and step:
            param.grad = stale.clone()
            mars.update_previous_grad()
            mars.update_last_grad()
        param.grad = g.clone()
        mars.step()
        plain.step(g, stale if exact and step else torch.zeros_like(g) if exact else None)
        torch.testing.assert_close(param.detach(), plain.x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("file", ["small_grads", "clipped_grads"])
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("exact", [False, True], ids=["approx", "exact"])
def test_it_is_the_official_code(rule, exact, file):
    description = json.loads((GOLDEN / f"{file}.json").read_text())
    tensors = load_file(GOLDEN / f"{file}.safetensors")
    case = f"{rule}.exact" if exact else f"{rule}.1d_adamw"
    settings = description["cases"][case]
    assert settings["gamma"] == reference.GAMMA
    for index in range(3):  # the matrices
        x = tensors[f"init.p{index}"].clone()
        plain = MarsReference(x, rule, settings["lr"], tuple(settings["betas"]), settings["weight_decay"])
        for t in range(description["steps"]):
            plain.lr = settings["lr"] * (1 - 0.5 * t / description["steps"])
            stale = tensors[f"stale.{t}.p{index}"] if t else torch.zeros_like(x)
            plain.step(tensors[f"grad.{t}.p{index}"], stale if exact else None)
            torch.testing.assert_close(x, tensors[f"{case}.{t}.p{index}"], rtol=1e-6, atol=1e-6)


def test_an_unknown_rule_is_refused():
    plain = MarsReference(torch.ones(3, 3), "mars-muon", **SETTINGS)
    with pytest.raises(ValueError, match="rule='mars-muon' is unknown; accepted: mars-adamw, mars-lion"):
        plain.step(torch.ones(3, 3))
    assert torch.equal(plain.x, torch.ones(3, 3))
