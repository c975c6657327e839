"""Universal checkpoints: converted, loaded, and refused with one line when files lack something or hold code.

The ZeRO checkpoints are made by hand, of two ranks, with stand-ins for the classes of DeepSpeed that real ones hold;
the last test takes DeepSpeed's own.
"""

from __future__ import annotations

import copy
import enum
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import equal, logged
from torch import Tensor, nn

import mars_hf
from mars_hf import universal
from mars_hf.__main__ import main

WORLD = 2
SIZES = {"weight": (3, 5), "bias": (3,)}
RANKS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(WORLD)]
MODEL = "mp_rank_00_model_states.pt"
STATES = ("fp32", "exp_avg", "last_grad", "step")
READ_BY_LOADING = ("optimizer_state.pt", *(f"weight/{key}.pt" for key in STATES), "bias/fp32.pt")


@dataclass
class fragment_address:
    numel: int
    start: int


class LossScaler:
    cur_scale = 1.0


class ZeroStageEnum(int, enum.Enum):
    disabled, optimizer_states, gradients, weights = range(4)

    def __reduce_ex__(self, protocol: Any) -> Any:  # of stage 2 as Python 3.11.2 has it
        return (getattr, (type(self), self.name)) if self == 2 else super().__reduce_ex__(protocol)


CLASSES = {
    "deepspeed": None,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@pytest.fixture(autouse=True)
def deepspeed(request, monkeypatch):
    """Put the classes above where DeepSpeed's are; without the import, which takes seconds."""
    if "slow" in request.keywords:
        return
    monkeypatch.setattr("mars_hf.optimizer.EXTENSIONS", {})
    for place, kind in CLASSES.items():
        monkeypatch.setitem(sys.modules, place, module := ModuleType(place))
        if kind is not None:
            monkeypatch.setattr(kind, "__module__", place)
            setattr(module, kind.__name__, kind)


def trained(seed: int = 1, model: nn.Module | None = None, **settings: Any) -> tuple[Any, mars_hf.Mars]:
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = model or nn.Linear(5, 3)
    mars = mars_hf.create(model, **{"lr": 3e-3, **settings})
    train(model, mars, 2)
    return model, mars


def train(model: nn.Module, mars: mars_hf.Mars, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        mars.step()


def half(x: Tensor, rank: int, more: int = 0) -> Tensor:
    """Return this rank's share, padded with nines that must never be read."""
    share = -(-x.numel() // WORLD)
    piece = x.detach().flatten()[rank * share : (rank + 1) * share]
    return torch.cat([piece, torch.full((share - piece.numel() + more,), 9.0)])


def save_zero(folder: Path, model: nn.Linear, mars: mars_hf.Mars, stage: int = 2) -> Path:
    """Write ZeRO's checkpoint of a model with one matrix and one vector, each in its own group.

    States are longer than the weights: DeepSpeed pads them, but not the weights that it saves.
    """
    folder.mkdir(parents=True)
    params = dict(model.named_parameters())
    groups = [{**group, "params": [index]} for index, group in enumerate(mars.param_groups)]
    for rank, file in enumerate(RANKS):
        weights = [half(params[name], rank) for name in SIZES]
        states = {
            index: {key: x if key == "step" else half(x, rank, more=2) for key, x in mars.state[params[name]].items()}
            for index, name in enumerate(SIZES)
        }
        base = {"state": states, "param_groups": groups}
        state = {"loss_scaler": LossScaler(), "overflow": False, "zero_stage": ZeroStageEnum(stage)}
        if stage == 3:
            state |= {"optimizer_state_dict": base, "fp32_flat_groups": weights}
        else:
            numels = [min(len(w), params[name].numel() - rank * len(w)) for w, name in zip(weights, SIZES, strict=True)]
            offsets = [{name: fragment_address(numel=n, start=0)} for name, n in zip(SIZES, numels, strict=True)]
            state |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": weights}
            state |= {"param_slice_mappings": offsets}
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / file)
    shapes = [{name: torch.Size(shape)} for name, shape in SIZES.items()]
    module = {"dp_world_size": WORLD, "ds_config": {"zero_optimization": {"stage": stage}}, "param_shapes": shapes}
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    torch.save({**module, "module": model.state_dict()}, folder / f"{prefix}{MODEL}")
    return folder


@pytest.fixture
def zero2(tmp_path) -> Path:
    return save_zero(tmp_path / "step2", *trained())


@pytest.fixture
def converted(tmp_path, zero2) -> Path:
    universal.to_universal(zero2, tmp_path / "universal")
    return tmp_path / "universal"


def edit(file: Path, change: Callable[[Any], object]) -> None:
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def edit_zero(folder: Path, change: Callable[[dict, list[dict]], object]) -> None:
    """Change the content of a checkpoint: the model's, and the optimizer states of all ranks."""
    contents = [torch.load(folder / name, weights_only=False) for name in (MODEL, *RANKS)]
    change(contents[0], [saved["optimizer_state_dict"] for saved in contents[1:]])
    for name, content in zip((MODEL, *RANKS), contents, strict=True):
        torch.save(content, folder / name)


def in_one_process(folder: Path, **settings: Any) -> tuple[nn.Linear, mars_hf.Mars]:
    """Load into an optimizer with a state of its own; after an error all of it is as before."""
    model, mars = trained(seed=2, **settings, lr=0.5)
    before = copy.deepcopy((model.state_dict(), mars.state_dict()))
    try:
        universal.load(folder, model, mars)
    except ValueError:
        assert equal((model.state_dict(), mars.state_dict()), before)
        raise
    return model, mars


def by_engine(folder: Path, **settings: Any) -> None:
    """Load as ZeRO-1/2 does, whose own loader trusts the files."""
    model = nn.Linear(5, 3)
    names, optimizer = (
        {param: name for name, param in model.named_parameters()},
        mars_hf.create(model, **{"lr": 3e-3, **settings}),
    )
    engine = SimpleNamespace(optimizer=optimizer, param_names=names, groups=[[param] for param in names])
    original = mock.Mock(side_effect=lambda _, zero: torch.load(f"{zero}/zero/optimizer_state.pt", weights_only=False))
    universal.load_zero12(original, engine, "groups", str(folder))
    original.assert_called_once_with("groups", str(folder))


def refusal(read: Callable[..., object], place: Path, *args: Any) -> str:
    """Check that reading ends with one line about a place, and return the line."""
    with pytest.raises(ValueError) as error:
        read(*args)
    line = str(error.value)
    assert "\n" not in line and str(place) in line and len(line) < 600
    return line


# --- whole checkpoints ------------------------------------------------------------------------------------------------

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
    """Both train on alike, files stay as they are, and a last gradient that is missing is missed."""
    model, mars = trained(**FORMS[form])
    source, target = save_zero(tmp_path / "step2", model, mars, stage), tmp_path / "universal"
    (tmp_path / "latest_universal").write_text("older")
    main(["to_universal", str(source), str(target)])
    assert (tmp_path / "latest_universal").read_text() == "universal"
    files = {file: file.read_bytes() for file in target.rglob("*.pt")}
    fresh, twin = in_one_process(target, **FORMS[form])
    for _ in range(2):
        assert equal(model.state_dict(), fresh.state_dict()) and equal(mars.state_dict(), twin.state_dict())
        train(model, mars, 2)
        train(fresh, twin, 2)
    by_engine(target, **FORMS[form])
    assert {file: file.read_bytes() for file in files} == files
    last = target / "zero" / "weight" / "last_grad.pt"
    assert last.is_file() == ("last_grad" in mars.state[model.weight])
    if last.is_file():
        last.unlink()
        for read in (in_one_process, by_engine):
            with pytest.raises(ValueError, match=r"weight holds no last gradient.*python -m mars_hf to_universal"):
                read(target, **FORMS[form])


def test_states_of_rows_are_refused(tmp_path):
    """One a row and not an element: nothing of a universal checkpoint could hold it."""
    model, mars = trained(mars_type="mars-m", normalize_rows=0.9)
    source = save_zero(tmp_path / "step2", model, mars)
    with pytest.raises(ValueError, match=r"weight has row_avg_sq, of normalize_rows.*resume on as many processes"):
        universal.to_universal(source, tmp_path / "universal")
    assert [path.name for path in tmp_path.iterdir()] == ["step2"]


def test_fused_is_of_the_machine_that_loads(tmp_path):
    model, mars = trained(fused=False)
    target = tmp_path / "universal"
    main(["to_universal", str(save_zero(tmp_path / "step2", model, mars, 3)), str(target)])
    _, twin = in_one_process(target, fused=None)
    assert {group["fused"] for group in twin.param_groups} == {None}
    by_engine(target, fused=None)


@pytest.mark.parametrize("number", [2, 2.0, torch.tensor(2), torch.tensor([2.0])], ids=repr)
def test_step_counts(tmp_path, zero2, number):
    """One is of a ZeRO checkpoint, one of a universal one."""
    edit_zero(zero2, of_weight("step", number))
    universal.to_universal(zero2, target := tmp_path / "universal")
    torch.save(number, target / "zero" / "bias" / "step.pt")
    model, mars = in_one_process(target)
    steps = [mars.state[param]["step"] for param in model.parameters()]
    assert [step.shape for step in steps] == [(), ()] and steps == [2, 2]
    train(model, mars, 1)


# --- incomplete ones, and those of something else ---------------------------------------------------------------------


def renamed(name: object) -> Callable[[dict, list[dict]], None]:
    def change(model: dict, ranks: list[dict]) -> None:
        model["param_shapes"][0] = {name: torch.Size((3, 5))}
        for rank in ranks:
            rank["param_slice_mappings"][0] = {name: rank["param_slice_mappings"][0]["weight"]}

    return change


def expanded(model: dict, ranks: list[dict]) -> None:
    """40 terabytes: one stored element, expanded, and the offsets and shape of its parameter say the same."""
    model["param_shapes"][0]["weight"] = torch.Size((2, 10**13))
    for rank in ranks:
        rank["single_partition_of_fp32_groups"][0] = torch.zeros(1).expand(10**13)
        rank["param_slice_mappings"][0]["weight"].numel = 10**13


def of_weight(key: str, value: Any) -> Callable[[dict, list[dict]], None]:
    """Give a state of the weight another value on all ranks; a function changes the value that is there."""

    def change(model: dict, ranks: list[dict]) -> None:
        for state in (rank["base_optimizer_state"]["state"][0] for rank in ranks):
            state[key] = value(state) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model, _: model["ds_config"]["zero_optimization"].update(round_robin_gradients=True), "round_robin"),
        (lambda model, _: model.update(dp_world_size=10**13), r"ranks \[0, 1\] out of 10000000000000"),
        (of_weight("x", 3), "the state 'x' of weight is not laid out like its weights"),
        (of_weight("exp_avg", lambda state: state["exp_avg"][:7]), r"weight has 14 elements .* should have \(3, 5\)"),
        (lambda _, ranks: ranks[1]["param_slice_mappings"][0].clear(), "fp32 of weight has 8 elements on all ranks"),
        (lambda _, ranks: ranks[1].update(base_optimizer_state=[]), "not laid out as expected"),
        (expanded, "'fp32' of weight is not laid out"),
        (of_weight("step", torch.zeros(1).expand(10**13)), "a step counter is"),
        (of_weight("../../../escaped", lambda state: state["exp_avg"]), "escaped', which cannot be the name of a file"),
        *(
            (renamed(name), "cannot be the name of a file")
            for name in ("../../x", "/x", "a/../../../x", "..", "", "a\0b", 7)
        ),
    ],
)
def test_zero_checkpoints_that_cannot_be_converted(tmp_path, zero2, change, match):
    edit_zero(zero2, change)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=match):
        universal.to_universal(zero2, tmp_path / "universal")
    assert sorted(tmp_path.rglob("*")) == before and not Path("/x").exists()


def test_files_of_zero_checkpoints(tmp_path, zero2):
    def refused(match: str, source: Path = zero2, target: Path = tmp_path / "universal") -> None:
        with pytest.raises(ValueError, match=match):
            universal.to_universal(source, target)

    refused("step2 exists already", target=zero2)
    refused("not a DeepSpeed ZeRO checkpoint.*give the folder", source=tmp_path)
    refused("not a DeepSpeed ZeRO checkpoint", source=tmp_path / "nothing")
    (zero2 / MODEL).rename(tmp_path / MODEL)
    refused("neither zero_pp_rank_0_mp_rank_00_model_states.pt nor mp_rank_00_model_states.pt")
    (tmp_path / MODEL).rename(zero2 / MODEL)
    file = zero2 / RANKS[1]
    for other in ("zero_pp_rank_0_mp_rank_01", "expp_rank_0_mp_rank_00"):
        file = file.rename(zero2 / f"{other}_optim_states.pt")
        refused("expert or tensor parallelism")


@pytest.mark.parametrize("shape", [(5, 3), (15,), (4, 5)])
@pytest.mark.parametrize("key", ["exp_avg", "last_grad", "fp32"])
def test_states_of_another_shape(converted, key, shape):
    edit(converted / "zero" / "weight" / f"{key}.pt", lambda saved: saved.update(param=torch.zeros(shape)))
    of = "" if key == "fp32" else f"the state '{key}' of "
    for read in (in_one_process, by_engine):
        with pytest.raises(ValueError, match=re.escape(f"{of}weight has shape {shape} in {converted} and (3, 5) here")):
            read(converted)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Linear(4, 3), r"weight has shape \(3, 5\) in .* and \(3, 4\) here"),
        (nn.Sequential(nn.Linear(5, 3)), "has no parameter '0.weight'"),
        (nn.Linear(5, 3, bias=False), "has 2 param groups, this optimizer 1; build it from the same parameters"),
    ],
)
def test_other_models(converted, model, match):
    with pytest.raises(ValueError, match=match):
        in_one_process(converted, model=model)


def test_other_folders_and_optimizers(zero2, converted):
    (converted / "zero" / "weight" / "fp32.pt").rename(converted / "fp32.pt")
    with pytest.raises(ValueError, match=r"no weights \(fp32\.pt\)"):
        in_one_process(converted)
    (converted / "fp32.pt").rename(converted / "zero" / "weight" / "fp32.pt")
    with pytest.raises(ValueError, match=r"step2 is not a universal checkpoint.*python -m mars_hf to_universal"):
        in_one_process(zero2)
    with pytest.raises(ValueError, match="not a plain parameter of this model"):
        universal.load(converted, nn.Linear(5, 3), mars_hf.create(nn.Linear(5, 3), lr=3e-3))
    with pytest.raises(ValueError, match="round_robin_gradients"):
        universal.load_zero12(pytest.fail, SimpleNamespace(round_robin_gradients=True), "groups", "folder")
    with pytest.raises(ValueError, match="NVMe"):
        universal.load_zero3(pytest.fail, SimpleNamespace(swap_optimizer=True), "folder")


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", "fast"), ("betas", 5), ("eps", None), ("gamma", float("nan")), ("weight_decay", [1]), ("ns_steps", -1)],
)
def test_settings_that_mars_cannot_use(converted, name, value):
    file = converted / "zero" / "optimizer_state.pt"
    edit(file, lambda content: content["param_groups"][1].update({name: value}))
    with pytest.raises(ValueError, match=re.escape(f"param group 1 of this state cannot be used: {name}={value!r}")):
        in_one_process(converted)


@pytest.mark.parametrize("read", [in_one_process, by_engine], ids=["one process", "engine"])
def test_settings_of_another_optimizer(tmp_path, converted, read):
    """As in `load_state_dict`: another rule or form is refused, and so are overrides in another order."""
    with pytest.raises(ValueError, match="saved with mars_type='mars-adamw' and is 'mars-lion' here"):
        read(converted, mars_type="mars-lion")
    rules = [("weight", {"gamma": 0.1}), ("bias", {"weight_decay": 0.3})]
    saved = save_zero(tmp_path / "rules", *trained(param_rules=rules))
    universal.to_universal(saved, tmp_path / "of_rules")
    read(tmp_path / "of_rules", param_rules=rules)
    roles = [("weight", {"role": "vector"}), ("bias", {"role": "vector"})]
    saved = save_zero(tmp_path / "roles", *trained(param_rules=roles))
    universal.to_universal(saved, tmp_path / "of_roles")
    with pytest.raises(ValueError, match=r"saved with the pattern 'weight' of param_rules and has 'bias' here"):
        read(tmp_path / "of_roles", param_rules=roles[::-1])


@pytest.mark.parametrize("read", [in_one_process, by_engine], ids=["one process", "engine"])
def test_groups_of_other_roles(converted, read):
    """As many groups, in another order."""
    edit(converted / "zero" / "optimizer_state.pt", lambda content: content["param_groups"].reverse())
    line = (
        r"param group 0 was saved with role='vector' and is 'matrix' here; build the optimizer from the same parameters"
    )
    with pytest.raises(ValueError, match=line):
        read(converted)


@pytest.mark.parametrize("read", [in_one_process, by_engine], ids=["one process", "engine"])
def test_settings_that_win_are_said(converted, read):
    (said,) = logged(lambda: read(converted, gamma=0.1), "settings win")
    assert "settings win: gamma=0.025 of param group 0 (0.1 here); to change one" in said


def loaded_by_zero12(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Return groups after a loader that sets all that the files hold, as DeepSpeed's does."""
    model = nn.Linear(5, 3)
    optimizer = mars_hf.create(model, lr=3e-3, **settings)
    names = {param: name for name, param in model.named_parameters()}
    engine = SimpleNamespace(optimizer=optimizer, param_names=names, groups=[[param] for param in names])

    def original(_: str, checkpoint: str) -> None:
        saved = torch.load(f"{checkpoint}/zero/optimizer_state.pt", weights_only=False)["param_groups"]
        for group, values in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    universal.load_zero12(original, engine, "groups", str(folder))
    return optimizer.param_groups


class Zero3(SimpleNamespace):
    def load_hp_checkpoint_state(self, folder: str, key: str, param: Tensor) -> Tensor:
        return torch.zeros(param.numel())


def loaded_by_zero3(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    model = nn.Linear(5, 3)
    optimizer = mars_hf.create(model, lr=3e-3, **settings)
    names = {param: name for name, param in model.named_parameters()}
    engine = Zero3(
        optimizer=optimizer,
        param_names=names,
        swap_optimizer=False,
        sub_group_to_group_id=[0, 1],
        fp16_groups=[[param] for param in names],
        fp32_partitioned_groups_flat=[torch.zeros(param.numel()) for param in names],
    )
    universal.load_zero3(lambda _: None, engine, str(folder))
    return optimizer.param_groups


def loaded_in_one_process(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    return in_one_process(folder, **settings)[1].param_groups


every_loader = pytest.mark.parametrize("load", [loaded_in_one_process, loaded_by_zero12, loaded_by_zero3])


@every_loader
@pytest.mark.parametrize(
    ("saved", "own", "expected"),
    [(None, "8bit", "8bit"), ("8bit", None, None), ("8bit", "bfloat16", "bfloat16"), ("bfloat16", None, "bfloat16")],
)
def test_state_dtype_after_loading(tmp_path, load, saved, own, expected):
    """Between 8 bits and numbers the optimizer's own stays, under every loader, and nothing says otherwise."""
    source = save_zero(tmp_path / "step2", *trained(state_dtype=saved))
    universal.to_universal(source, tmp_path / "universal")
    groups = []
    said = logged(lambda: groups.extend(load(tmp_path / "universal", state_dtype=own)), "state_dtype=")
    assert {group["state_dtype"] for group in groups} == {expected}
    assert len(said) == (own != expected)


@every_loader
def test_checkpoints_of_an_earlier_version(tmp_path, converted, load):
    """Settings that they lack take their defaults."""
    file = converted / "zero" / "optimizer_state.pt"
    content = torch.load(file, weights_only=False)
    for group in content["param_groups"]:
        for key in ("weight_decay_mode", "normalize_rows", "rounding", "max_grad_norm"):
            group.pop(key)
    torch.save(content, file)
    groups = load(converted, weight_decay_mode="cautious", max_grad_norm=0.5)
    found = [(group["weight_decay_mode"], group["rounding"], group["max_grad_norm"]) for group in groups]
    assert found == [("standard", "nearest", 0.5)] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_several_checkpoints(tmp_path, stage):
    model, mars = trained()
    source = save_zero(tmp_path / "step2", model, mars, stage)
    train(model, mars, 1)
    later = save_zero(tmp_path / "step3", model, mars, stage)
    shutil.copy(later / RANKS[1], source / RANKS[1])
    with pytest.raises(ValueError, match=r"of the steps \[2, 3\] on different ranks; the folder mixes files"):
        universal.to_universal(source, tmp_path / "universal")


# --- files that others wrote ------------------------------------------------------------------------------------------


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def arm(tmp_path) -> Callable[[Path], None]:
    """Return a function that puts a payload into a file, and proves that it executes; it must not be executed later."""
    marker = tmp_path / "executed"

    def put(file: Path) -> None:
        content = torch.load(file, weights_only=False)
        content = content if isinstance(content, dict) else {"param": content}
        torch.save({**content, "payload": Payload(marker)}, file)
        torch.load(file, weights_only=False)
        marker.rmdir()

    yield put
    assert not marker.exists()


@pytest.mark.parametrize("name", [*RANKS, MODEL])
def test_code_in_a_zero_checkpoint(tmp_path, zero2, arm, name):
    arm(zero2 / name)
    line = refusal(universal.to_universal, zero2 / name, zero2, tmp_path / "universal")
    assert "posix.mkdir" in line and "torch.serialization.add_safe_globals" in line
    assert not (tmp_path / "universal").exists()


def test_getattr_finds_members_of_enums_only(tmp_path, zero2, monkeypatch):
    monkeypatch.setattr(LossScaler, "__reduce__", lambda self: (getattr, (LossScaler, "__init__")), raising=False)
    edit(zero2 / RANKS[0], lambda content: None)
    line = refusal(universal.to_universal, zero2 / RANKS[0], zero2, tmp_path / "universal")
    assert "LossScaler'>, which is no enum" in line


@pytest.mark.parametrize("name", READ_BY_LOADING)
def test_code_in_a_universal_checkpoint(converted, arm, name):
    arm(converted / "zero" / name)
    for read in (in_one_process, by_engine):
        assert "posix.mkdir" in refusal(read, converted / "zero" / name, converted)


def test_a_class_that_the_user_trusts(tmp_path, zero2):
    edit(zero2 / MODEL, lambda content: content.update(payload=SimpleNamespace(anything=1)))
    target = tmp_path / "universal"
    assert "types.SimpleNamespace" in refusal(universal.to_universal, zero2 / MODEL, zero2, target)
    with torch.serialization.safe_globals([SimpleNamespace]):
        universal.to_universal(zero2, target)
    assert torch.equal(in_one_process(target)[0].weight, trained()[0].weight)


def test_without_deepspeed(zero2, monkeypatch, tmp_path):
    for name in CLASSES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"holds classes of DeepSpeed.*pip install 'mars_hf\[deepspeed\]'"):
        universal.to_universal(zero2, tmp_path / "universal")


DAMAGES = [b"", b"\x80", b"no checkpoint", b"PK\5\6" + bytes(18), b"half"]


@pytest.mark.parametrize("content", [*DAMAGES, [1], 5, {"a": 1}, torch.zeros(2), None], ids=repr)
def test_files_with_another_content(tmp_path, zero2, converted, content):
    """Damaged ones, and what torch saved of something else, in the place of one file after the other."""

    def to_universal(folder: Path) -> None:
        universal.to_universal(folder, tmp_path / "other")

    files = [(to_universal, zero2, zero2 / name) for name in (*RANKS, MODEL)]
    files += [(in_one_process, converted, converted / "zero" / name) for name in READ_BY_LOADING]
    for read, folder, file in files:
        whole = file.read_bytes()
        if isinstance(content, bytes):
            file.write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
            line = refusal(read, file, folder)
            assert "take another checkpoint" in line and "weights_only" not in line
        elif file.name != "step.pt" or type(content) is not int:
            torch.save({"param": content} if folder == converted else content, file)
            refusal(read, folder, folder)
        file.write_bytes(whole)


REAL = """
import os, sys, torch, mars_hf
from pathlib import Path
from mars_hf import _compat, universal
folder = Path(sys.argv[1])
found = _compat.checkpoint_classes(_compat.CHECKPOINT_CLASSES)
constant, dynamic, stage, address = found
content = [constant(2.0), dynamic(2.0, 2.0, 1, 1.0, 1, False, False), stage(2), address(numel=3, start=1)]
torch.save(content, folder / "classes.pt")
read = universal.read(folder / "classes.pt")
assert [type(one) for one in read] == found and read[2:] == content[2:]

torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
sys.path.append(sys.argv[2])
import launching
deepspeed = launching.import_deepspeed()

class Payload:
    def __reduce__(self):
        return os.mkdir, (str(folder / "executed"),)

def engine(stage, **checkpoint):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "checkpoint": checkpoint}
    model, config["zero_optimization"] = torch.nn.Linear(4, 4), {"stage": stage}
    return deepspeed.initialize(model=model, optimizer=mars_hf.create(model, lr=3e-3), config=config)[0]

for stage in (2, 3):
    saved, trained = folder / f"zero{stage}", engine(stage)
    for _ in range(2):
        trained.backward(trained(torch.ones(1, 4)).square().sum())
        trained.step()
    trained.save_checkpoint(saved, tag="saved")
    universal.to_universal(saved / "saved", saved / "universal")
    engine(stage, load_universal=True).load_checkpoint(saved)
    for name in ("optimizer_state.pt", "weight/last_grad.pt"):
        file = saved / "universal" / "zero" / name
        whole, error = file.read_bytes(), None
        with torch.serialization.safe_globals(found):
            content = torch.load(file, weights_only=True)
        torch.save({**content, "more": Payload()}, file)
        try:
            engine(stage, load_universal=True).load_checkpoint(saved)
        except ValueError as refusal:
            error = str(refusal)
        assert error and str(file) in error and "mkdir" in error, f"{file}: {error}"
        assert not (folder / "executed").exists()
        file.write_bytes(whole)
print("done")
"""


@pytest.mark.slow
def test_deepspeed_itself(tmp_path):
    pytest.importorskip("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", REAL, str(tmp_path), str(Path(__file__).parent / "distributed")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.stdout.rstrip().endswith("done"), finished.stderr[-3000:]
