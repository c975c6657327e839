"""`mars_type="muon"`: torch.optim.Muon's update, by every way into a Trainer."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers import arguments, gpt2, mars_trainer, trainer
from torch import nn

import mars_hf
from mars_hf.groups import saved_settings
from mars_hf.groups.settings import MUON

MEANING = {"mars_type": "mars-m", "gamma": pytest.approx(0.05), "clip_threshold": None}


@pytest.mark.parametrize("beta1", [0.95, 0.8])
def test_torch_muon(beta1):
    """Momentum buffers to float32's rounding; weights to that of bfloat16, in which torch's Muon iterates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48, bias=False), nn.Tanh(), nn.Linear(48, 24, bias=False))
    twin = copy.deepcopy(model)
    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (beta1, 0.99), "ns_dtype": "bfloat16"}
    mars = mars_hf.create(
        model, mars_type=MUON, param_rules=[("2.weight", {"role": "matrix"})], **{"lr": 3e-3, **settings}
    )
    muon = torch.optim.Muon(twin.parameters(), 0.01, 0.1, momentum=beta1, adjust_lr_fn="match_rms_adamw")
    for _ in range(6):
        x = torch.randn(128, 24)
        for module in (model, twin):
            module.zero_grad()
            (module(x) - x).square().sum().backward()
        before = [param.detach().clone() for param in model.parameters()]
        mars.step()
        muon.step()
        for param, other, old in zip(model.parameters(), twin.parameters(), before, strict=True):
            assert mars.state[param].keys() == {"step", "exp_avg"}  # one buffer
            torch.testing.assert_close(mars.state[param]["exp_avg"], muon.state[other]["momentum_buffer"])
            assert (param - other).norm() <= 0.05 * (param - old).norm()  # both round in bfloat16
        twin.load_state_dict(model.state_dict())  # the same gradients in the next step


def test_fused_weights_stay_whole():
    mars = mars_hf.create(gpt2(), mars_type=MUON, lr=3e-3)
    groups = {group["role"]: group for group in mars.param_groups}
    stated = {"gamma": 0.0, "clip_threshold": 1.0, "betas": (0.9, 0.99)}
    assert stated.items() <= mars_hf.create(gpt2(), mars_type=MUON, **{"lr": 3e-3, **stated}).param_groups[0].items()
    assert all("parts" not in (group["layout"] or {}) or not group["layout"]["parts"] for group in mars.param_groups)
    assert MEANING.items() <= groups["matrix"].items() and "transformer.wte.weight" in groups["adamw"]["param_names"]


@pytest.mark.parametrize("door", ["create", "factory", "muon", "mars_muon", "mars_trainer", "like", "groups"])
def test_muon_at_every_door(door, tmp_path, caplog):
    mars_hf.register()
    model, given = gpt2(), {}
    args = arguments(tmp_path / "run", max_steps=1, **({"optim": door} if door in ("muon", "mars_muon") else {}))
    factory = mars_hf.factory(args, mars_type=MUON)
    if door == "create":
        given = {"optimizers": (mars_hf.create(model, mars_type=MUON, lr=3e-3), None)}
    elif door == "like":
        saved_settings.write(tmp_path, "0", mars_hf.create(gpt2(), mars_type=MUON, lr=3e-3).created_with, [])
        given = {"optimizers": (mars_hf.create(model, like=tmp_path), None)}
    elif door == "factory":
        given = {"optimizer_cls_and_kwargs": factory}
    elif door == "groups":
        given = {"optimizers": (factory[0](model.named_parameters(), model=model), None)}
    elif door == "mars_trainer":
        given = {"mars_kwargs": {"mars_type": MUON}}
    run = (mars_trainer if door == "mars_trainer" else trainer)(args, model, **given)
    run.train()
    assert "muon (approximate, gamma=0.05, " in caplog.text
    assert MEANING.items() <= run.optimizer.param_groups[0].items()
    run.save_model(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / saved_settings.FILE).read_text())["create"].items()
    assert {"mars_type": MUON, "split_fused": "none", "clip_threshold": None}.items() <= kept


def test_name_of_no_rule(tmp_path):
    with pytest.raises(ValueError, match=r"mars_type='muon' is not valid; accepted: .*; 'muon' in create"):
        mars_hf.Mars(gpt2().parameters(), mars_type=MUON)
    saved_settings.write(tmp_path, "0", mars_hf.create(gpt2(), mars_type="mars-m", lr=3e-3).created_with, [])
    with pytest.raises(ValueError, match=r"mars_type='muon' and like=.*, settings of mars-m, contradict each other"):
        mars_hf.create(gpt2(), mars_type=MUON, like=tmp_path)
