"""Universal checkpoints without DeepSpeed: hand-made files of two ranks (tests/distributed has real ones)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from zero_checkpoint import SIZES, Net, save_zero, stand_in_for_deepspeed, train, trained

import mars_hf
from mars_hf import universal
from mars_hf.__main__ import main
from mars_hf.universal import engines


@pytest.fixture(autouse=True)
def deepspeed(request, monkeypatch):
    """Stand in for the classes of DeepSpeed, whose import takes seconds."""
    stand_in_for_deepspeed(monkeypatch)


@pytest.fixture
def zero2(tmp_path) -> Path:
    return save_zero(tmp_path / "step2", *trained())


# Covers the states that a checkpoint may hold, and the groups.
FORMS = {
    "two moments": {},
    "one moment": {"mars_type": "mars-lion"},
    "orthogonalized": {"mars_type": "mars-shampoo"},
    "adamw": {"mars_type": "mars-m", "param_rules": [("weight", {"role": "adamw"})]},
    "no last gradient": {"mars_type": "mars-lion", "clip_threshold": None},
    "no last gradient, orthogonalized": {"mars_type": "mars-m", "clip_threshold": None},
    "no last gradient, two moments": {"second_moment": "gradient", "clip_threshold": None},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_one_process(tmp_path, stage, form):
    model, mars = trained(**FORMS[form])
    source = save_zero(tmp_path / "step2", model, mars, stage)
    main(["to_universal", str(source), str(tmp_path / "universal")])
    assert (tmp_path / "latest_universal").read_text() == "universal"
    fresh = Net()
    twin = mars_hf.create(fresh, **FORMS[form], lr=1.0)  # the saved rate counts
    universal.load(tmp_path / "universal", fresh, twin)
    for _ in range(2):
        for (name, param), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
            assert torch.equal(param, other), name
            assert mars.state[param].keys() == twin.state[other].keys()
            assert all(torch.equal(value, twin.state[other][key]) for key, value in mars.state[param].items())
        train(model, mars, 2)
        train(fresh, twin, 2)


def test_files_stay_as_they_are(tmp_path, zero2):
    universal.to_universal(zero2, tmp_path / "universal")
    files = {file: file.read_bytes() for file in (tmp_path / "universal").rglob("*.pt")}
    model = Net()
    mars = mars_hf.create(model)
    universal.load(tmp_path / "universal", model, mars)
    train(model, mars, 1)
    assert {file: file.read_bytes() for file in files} == files


def edit(file: Path, change) -> None:
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def test_incomplete_zero_checkpoints(tmp_path, zero2):
    def refused(match: str, source: Path = zero2, target: Path = tmp_path / "universal") -> None:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=match):
            universal.to_universal(source, target)
        assert sorted(tmp_path.iterdir()) == before

    refused("step2 exists already", target=zero2)
    refused("not a DeepSpeed ZeRO checkpoint.*give the folder", source=tmp_path)
    refused("not a DeepSpeed ZeRO checkpoint", source=tmp_path / "nothing")
    model_file, optimizer_file = (
        zero2 / "mp_rank_00_model_states.pt",
        zero2 / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    whole = model_file.read_bytes()
    edit(model_file, lambda model: model["ds_config"]["zero_optimization"].update(round_robin_gradients=True))
    refused("round_robin_gradients")
    edit(model_file, lambda model: model.update(ds_config={}, dp_world_size=10**13))  # and no list of as many
    refused(r"ranks \[0, 1\] out of 10000000000000")
    model_file.unlink()
    refused("neither zero_pp_rank_0_mp_rank_00_model_states.pt nor mp_rank_00_model_states.pt")
    model_file.write_bytes(whole)
    edit(optimizer_file, lambda saved: saved["optimizer_state_dict"]["base_optimizer_state"]["state"][1].update(x=3))
    edit(
        zero2 / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda saved: saved["optimizer_state_dict"]["base_optimizer_state"]["state"][1].update(x=3),
    )
    refused("the state 'x' of bias is not laid out like its weights")
    edit(optimizer_file, lambda saved: saved["optimizer_state_dict"]["param_slice_mappings"][0].clear())
    refused("fp32 of weight has 8 elements on all ranks")  # after the temporary folder was created
    edit(optimizer_file, lambda saved: saved["optimizer_state_dict"].update(base_optimizer_state=[]))
    refused("not laid out as expected")
    for other in ("zero_pp_rank_0_mp_rank_01", "expp_rank_0_mp_rank_00"):
        optimizer_file = optimizer_file.rename(zero2 / f"{other}_optim_states.pt")
        refused("expert or tensor parallelism")


def reshape(file: Path, shape: tuple[int, ...]) -> None:
    edit(file, lambda saved: saved.update(param=torch.zeros(shape)))


@pytest.mark.parametrize("shape", [(5, 3), (15,), (4, 5)])
@pytest.mark.parametrize("key", ["exp_avg", "last_grad", "fp32"])
def test_states_of_another_shape(tmp_path, zero2, key, shape):
    target = tmp_path / "universal"
    universal.to_universal(zero2, target)
    reshape(target / "zero" / "weight" / f"{key}.pt", shape)
    model, mars = trained(lr=0.5)
    weights = [param.clone() for param in model.parameters()]
    states = [{name: x.clone() for name, x in mars.state[param].items()} for param in model.parameters()]
    of = "" if key == "fp32" else f"the state '{key}' of "
    message = re.escape(f"{of}weight has shape {shape} in {target} and (3, 5) here")
    with pytest.raises(ValueError, match=message):
        universal.load(target, model, mars)
    assert mars.param_groups[0]["lr"] == 0.5
    for param, weight, state in zip(model.parameters(), weights, states, strict=True):
        assert torch.equal(param, weight)
        assert all(torch.equal(mars.state[param][name], x) for name, x in state.items())
    engine = SimpleNamespace(
        optimizer=mars,
        param_names={param: name for name, param in model.named_parameters()},
        groups=[[getattr(model, name)] for name in SIZES],
    )
    with pytest.raises(ValueError, match=message):
        engines.load_zero12(pytest.fail, engine, "groups", str(target))


@pytest.mark.parametrize("lacking", ["last_grad", "fp32"])
def test_incomplete_universal_checkpoint(tmp_path, zero2, lacking):
    target = tmp_path / "universal"
    universal.to_universal(zero2, target)
    (target / "zero" / "weight" / f"{lacking}.pt").unlink()
    model = Net()
    mars = mars_hf.create(model)
    with pytest.raises(ValueError, match="no last gradient" if lacking == "last_grad" else r"no weights \(fp32\.pt\)"):
        universal.load(target, model, mars)
    assert not mars.state


@pytest.mark.parametrize("number", [2, 2.0, torch.tensor(2), torch.tensor([2.0])], ids=repr)
@pytest.mark.parametrize("where", ["zero", "universal"])
def test_step_counts(tmp_path, number, where):
    model, mars = trained()
    source, target = save_zero(tmp_path / "step2", model, mars), tmp_path / "universal"
    if where == "zero":
        for file in source.glob("*_optim_states.pt"):
            edit(file, lambda saved: count(saved["optimizer_state_dict"]["base_optimizer_state"]["state"], number))
    universal.to_universal(source, target)
    if where == "universal":
        for name in SIZES:
            torch.save(number, target / "zero" / name / "step.pt")
    fresh = Net()
    twin = mars_hf.create(fresh)
    universal.load(target, fresh, twin)
    train(model, mars, 1)
    train(fresh, twin, 1)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
        assert twin.state[other]["step"].shape == () and twin.state[other]["step"].item() == 3


def count(states: dict, number: object) -> None:
    for state in states.values():
        state["step"] = number


def test_partition_sizes(tmp_path, zero2):
    """Longer ones are padded: DeepSpeed pads states but not the weights that it saves."""
    model, _ = trained()
    files = list(zero2.glob("*_optim_states.pt"))
    for file in files:
        edit(file, lengthen)
    universal.to_universal(zero2, tmp_path / "universal")
    universal.load(tmp_path / "universal", fresh := Net(), mars_hf.create(fresh))
    assert torch.equal(fresh.weight, model.weight)
    for file in files:
        edit(file, shorten)
    with pytest.raises(ValueError, match=r"exp_avg of weight has 14 elements on all ranks and should have \(3, 5\)"):
        universal.to_universal(zero2, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def lengthen(saved: dict) -> None:
    state = saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    state["exp_avg"] = torch.cat([state["exp_avg"], torch.zeros(2)])


def shorten(saved: dict) -> None:
    state = saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    state["exp_avg"] = state["exp_avg"][:7]


def test_latest_universal(tmp_path, zero2, monkeypatch):
    (tmp_path / "latest_universal").write_text("older")

    def full(file, target):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            universal.to_universal(zero2, tmp_path / "universal")
    assert (tmp_path / "latest_universal").read_text() == "older"
    universal.to_universal(zero2, tmp_path / "newer")
    assert (tmp_path / "latest_universal").read_text() == "newer"


def test_other_models_and_optimizers(tmp_path, zero2):
    target = tmp_path / "universal"
    universal.to_universal(zero2, target)

    def refused(match: str, model: nn.Module, folder: Path = target, **settings) -> None:
        mars = mars_hf.create(model, **settings)
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(ValueError, match=match):
            universal.load(folder, model, mars)
        assert not mars.state
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))

    refused("step2 is not a universal checkpoint.*python -m mars_hf to_universal", Net(), zero2)
    refused(r"weight has shape \(3, 5\) in .* and \(3, 4\) here", nn.Linear(4, 3))
    refused("has no parameter '0.weight'", nn.Sequential(Net()))
    refused(r"groups of roles \['matrix', 'vector'\], this optimizer of \['matrix'\]", nn.Linear(5, 3, bias=False))
    model, other = Net(), Net()
    with pytest.raises(ValueError, match="not a plain parameter of this model"):
        universal.load(target, model, mars_hf.create(other))


@pytest.mark.slow
def test_deepspeed_is_extended():
    code = """
import deepspeed, mars_hf, torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
mars_hf.Mars([torch.nn.Parameter(torch.ones(2, 2))])
assert hasattr(ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir, "__wrapped__")
assert hasattr(DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3, "__wrapped__")
"""
    finished = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("form", FORMS)
def test_engine_without_last_gradient(tmp_path, form):
    model, mars = trained(**FORMS[form])
    target = tmp_path / "universal"
    universal.to_universal(save_zero(tmp_path / "step2", model, mars), target)
    groups = [[getattr(model, name)] for name in SIZES]
    names = {param: name for name, param in model.named_parameters()}
    engine = SimpleNamespace(optimizer=mars, param_names=names, groups=groups)
    loaded = []
    engines.load_zero12(lambda *args: loaded.append(args), engine, "groups", str(target))
    assert loaded == [("groups", str(target))]
    last = target / "zero" / "weight" / "last_grad.pt"
    assert last.is_file() == ("last_grad" in mars.state[model.weight])
    if last.is_file():
        last.unlink()
        with pytest.raises(ValueError, match=r"weight holds no last gradient.*python -m mars_hf to_universal"):
            engines.load_zero12(pytest.fail, engine, "groups", str(target))


def test_engines_that_cannot_load():
    with pytest.raises(ValueError, match="round_robin_gradients"):
        engines.load_zero12(pytest.fail, SimpleNamespace(round_robin_gradients=True), "groups", "folder")
    with pytest.raises(ValueError, match="NVMe"):
        engines.load_zero3(pytest.fail, SimpleNamespace(swap_optimizer=True), "folder")
