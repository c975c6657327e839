"""Files that others wrote run nothing, whatever they hold, and damaged ones are named in one line."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from zero_checkpoint import SIZES, Net, save_zero, stand_in_for_deepspeed, trained

import mars_hf
from mars_hf import universal
from mars_hf.__main__ import main

ZERO = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
MODEL = "mp_rank_00_model_states.pt"
READ_BY_CONVERTING = (*ZERO, MODEL)
READ_BY_LOADING = ("optimizer_state.pt", *(f"weight/{key}.pt" for key in ("fp32", "exp_avg", "last_grad", "step")))


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path, call: Callable) -> None:
        self.marker, self.call = marker, call

    def __reduce__(self):
        return self.call, (f"mkdir {self.marker}" if self.call is os.system else str(self.marker),)


CALLS = {"posix.mkdir": os.mkdir, "posix.system": os.system, "os.makedirs": os.makedirs}


@pytest.fixture(autouse=True)
def deepspeed(request, monkeypatch):
    if "slow" not in request.keywords:
        stand_in_for_deepspeed(monkeypatch)


@pytest.fixture
def marker(tmp_path) -> Path:
    """Return what a payload makes."""
    return tmp_path / "executed"


@pytest.fixture
def zero2(tmp_path) -> Path:
    return save_zero(tmp_path / "step2", *trained())


@pytest.fixture
def converted(tmp_path, zero2) -> Path:
    universal.to_universal(zero2, tmp_path / "universal")
    return tmp_path / "universal"


def arm(file: Path, marker: Path, call: Callable = os.mkdir, **settings) -> None:
    """Put a payload into a file beside what it holds, and prove that the file executes it."""
    content = torch.load(file, weights_only=False)
    content = content if isinstance(content, dict) else {"param": content}
    torch.save({**content, "payload": Payload(marker, call)}, file, **settings)
    torch.load(file, weights_only=False)
    marker.rmdir()


def refused(read: Callable[[], object], file: Path, marker: Path) -> str:
    """Check that reading is one line that names the file, and that nothing ran; return the line."""
    with pytest.raises(ValueError) as error:
        read()
    assert not marker.exists()
    line = str(error.value)
    assert "\n" not in line and str(file) in line and len(line) < 600
    return line


def in_one_process(folder: Path) -> None:
    model = Net()
    mars = mars_hf.create(model)
    before = [param.clone() for param in model.parameters()]
    try:
        universal.load(folder, model, mars)
    except ValueError:
        assert not mars.state and all(map(torch.equal, model.parameters(), before))
        raise


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", READ_BY_CONVERTING)
def test_a_zero_checkpoint_runs_nothing(zero2, marker, name, call):
    arm(zero2 / name, marker, CALLS[call])
    target = marker.parent / "universal"
    line = refused(lambda: universal.to_universal(zero2, target), zero2 / name, marker)
    assert f"holds {call}, which may run code" in line and "torch.serialization.add_safe_globals first" in line
    assert "LossScaler" in line and not target.exists()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", READ_BY_LOADING)
def test_a_universal_checkpoint_runs_nothing(converted, marker, name, call):
    file = converted / "zero" / name
    arm(file, marker, CALLS[call])
    assert f"holds {call}, which may run code" in refused(lambda: in_one_process(converted), file, marker)


def test_the_command_runs_nothing(zero2, marker, capsys):
    arm(zero2 / ZERO[1], marker)
    with pytest.raises(SystemExit) as stopped:
        main(["to_universal", str(zero2), str(marker.parent / "universal")])
    assert stopped.value.code == 2 and not marker.exists()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(zero2 / ZERO[1]) in line and "posix.mkdir" in line


@pytest.mark.parametrize(
    "settings", [{"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}], ids=["protocol 4", "older format"]
)
def test_other_formats_run_nothing(zero2, marker, settings):
    arm(zero2 / ZERO[0], marker, **settings)
    refused(lambda: universal.to_universal(zero2, marker.parent / "universal"), zero2 / ZERO[0], marker)


def test_a_plain_pickle_runs_nothing(zero2, marker):
    (zero2 / MODEL).write_bytes(pickle.dumps(Payload(marker, os.mkdir)))
    refused(lambda: universal.to_universal(zero2, marker.parent / "universal"), zero2 / MODEL, marker)


def test_a_class_that_the_user_trusts_is_read(zero2, marker):
    model, _ = trained()
    before = set(torch.serialization.get_safe_globals())
    content = torch.load(zero2 / MODEL, weights_only=True)
    torch.save({**content, "payload": SimpleNamespace(anything=1)}, zero2 / MODEL)
    line = refused(lambda: universal.to_universal(zero2, marker.parent / "universal"), zero2 / MODEL, marker)
    assert "types.SimpleNamespace" in line
    with torch.serialization.safe_globals([SimpleNamespace]):
        universal.to_universal(zero2, marker.parent / "universal")
        assert SimpleNamespace in torch.serialization.get_safe_globals()
    assert set(torch.serialization.get_safe_globals()) == before
    universal.load(marker.parent / "universal", fresh := Net(), mars_hf.create(fresh))
    assert torch.equal(fresh.weight, model.weight)


def test_without_deepspeed_its_classes_are_asked_for(zero2, monkeypatch, tmp_path):
    for name in ("deepspeed", *[name for name in sys.modules if name.startswith("deepspeed.")]):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"holds classes of DeepSpeed.*pip install 'mars_hf\[deepspeed\]'"):
        universal.to_universal(zero2, tmp_path / "universal")


# --- the loaders that DeepSpeed is given -------------------------------------------------------------------------


class Engine:
    """Reads as DeepSpeed's ZeRO-1/2 and ZeRO-3 do."""

    before_reading = staticmethod(lambda: None)

    def __init__(self, model: Net, mars: mars_hf.Mars) -> None:
        self.optimizer, self.swap_optimizer = mars, False
        self.param_names = {param: name for name, param in model.named_parameters()}
        self.fp16_groups = [[getattr(model, name)] for name in SIZES]
        self.fp32_partitioned_groups_flat = [params[0].detach().clone().flatten() for params in self.fp16_groups]
        self.sub_group_to_group_id = {0: 0, 1: 1}

    def load_hp_checkpoint_state_from_checkpoint_dir(self, groups_name: str, folder: str) -> None:
        self.before_reading()
        torch.load(os.path.join(folder, "zero", "optimizer_state.pt"), weights_only=False)

    def load_hp_checkpoint_state(self, folder: str, key: str, param=None) -> torch.Tensor:
        return torch.load(os.path.join(folder, f"{key}.pt"), weights_only=False)["param"].flatten()

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, folder: str) -> None:
        self.before_reading()
        torch.load(os.path.join(folder, "zero", "optimizer_state.pt"), weights_only=False)
        for param, name in self.param_names.items():
            self.load_hp_checkpoint_state(os.path.join(folder, "zero", name), "fp32", param=param)


@pytest.fixture
def kind(monkeypatch) -> type[Engine]:
    """Return a class of engine with the loaders that `import mars_hf` installs."""
    kind = type("Extended", (Engine,), dict(vars(Engine)))
    for place, name in (
        ("deepspeed.runtime.base_optimizer", "ZeROOptimizer"),
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ):
        module = ModuleType(place)
        setattr(module, name, kind)
        monkeypatch.setitem(sys.modules, place, module)
    universal.extend_deepspeed()
    return kind


LOADERS = {
    2: lambda engine, folder: engine.load_hp_checkpoint_state_from_checkpoint_dir("fp16_groups", str(folder)),
    3: lambda engine, folder: engine.load_hp_checkpoint_state_from_checkpoint_dir_stage3(str(folder)),
}


@pytest.mark.parametrize("stage", LOADERS)
@pytest.mark.parametrize("name", READ_BY_LOADING)
def test_deepspeeds_loaders_run_nothing(converted, marker, kind, name, stage):
    model = Net()
    engine = kind(model, mars_hf.create(model))
    LOADERS[stage](engine, converted)
    file = converted / "zero" / name
    arm(file, marker)
    refused(lambda: LOADERS[stage](engine, converted), file, marker)


@pytest.mark.parametrize("stage", LOADERS)
def test_a_file_that_changes_after_its_check_runs_nothing(converted, marker, kind, stage, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    kind.before_reading = staticmethod(lambda: arm_aside(converted / "zero" / "optimizer_state.pt", marker))
    model, before = Net(), set(torch.serialization.get_safe_globals())
    with pytest.raises(pickle.UnpicklingError):
        LOADERS[stage](kind(model, mars_hf.create(model)), converted)
    assert not marker.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert set(torch.serialization.get_safe_globals()) == before


def arm_aside(file: Path, marker: Path) -> None:
    torch.save({"param_groups": Payload(marker, os.mkdir)}, file)


@pytest.mark.parametrize("stage", LOADERS)
def test_other_optimizers_are_loaded_as_ever(converted, marker, kind, stage):
    model = Net()
    arm(converted / "zero" / "optimizer_state.pt", marker)
    engine = kind(model, mars_hf.create(model))
    engine.optimizer = torch.optim.AdamW(model.parameters())
    LOADERS[stage](engine, converted)
    assert marker.exists()  # DeepSpeed's own way; SECURITY.md says so


# --- names that become paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "a/../../../escaped", "..", "", "a\0b", 7])
def test_a_parameter_cannot_be_written_elsewhere(tmp_path, zero2, name):
    model = torch.load(zero2 / MODEL, weights_only=False)
    model["param_shapes"][0] = {name: torch.Size((3, 5))}
    torch.save(model, zero2 / MODEL)
    rename_parameter(zero2, name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        universal.to_universal(zero2, tmp_path / "universal")
    assert sorted(tmp_path.rglob("*")) == before


def rename_parameter(zero2: Path, name: object) -> None:
    for file in ZERO:
        saved = torch.load(zero2 / file, weights_only=False)
        places = saved["optimizer_state_dict"]["param_slice_mappings"]
        places[0] = {name: places[0]["weight"]}
        torch.save(saved, zero2 / file)


def test_a_state_cannot_be_written_elsewhere(tmp_path, zero2):
    for file in ZERO:
        saved = torch.load(zero2 / file, weights_only=False)
        states = saved["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["../../../escaped"] = states[0]["exp_avg"]
        torch.save(saved, zero2 / file)
    with pytest.raises(ValueError, match=r"escaped', which cannot be the name of a file"):
        universal.to_universal(zero2, tmp_path / "universal")
    assert not list(tmp_path.rglob("*escaped*"))


# --- damaged files -----------------------------------------------------------------------------------------------


def damages(content: bytes) -> dict[str, bytes]:
    noise = random.Random(3).randbytes(5000)
    lengths = {"one byte": 1, "a few bytes": 100, "half": len(content) // 2, "all but one byte": len(content) - 1}
    cut = {name: content[:length] for name, length in lengths.items()}
    return {**cut, "empty": b"", "noise": noise, "text": b"no checkpoint", "a zip of nothing": b"PK\5\6" + bytes(18)}


@pytest.mark.parametrize("name", READ_BY_CONVERTING)
def test_damaged_files_are_named_by_converting(zero2, marker, name):
    file, target = zero2 / name, marker.parent / "universal"
    for damaged in damages(file.read_bytes()).values():
        file.write_bytes(damaged)
        line = refused(lambda: universal.to_universal(zero2, target), file, marker)
        assert "take another checkpoint" in line and "weights_only" not in line


@pytest.mark.parametrize("name", READ_BY_LOADING)
def test_damaged_files_are_named_by_loading(converted, marker, name):
    file = converted / "zero" / name
    for damaged in damages(file.read_bytes()).values():
        file.write_bytes(damaged)
        assert "take another checkpoint" in refused(lambda: in_one_process(converted), file, marker)


OTHER_CONTENTS = {"a list": [1], "a number": 5, "other keys": {"a": 1}, "a tensor": torch.zeros(2), "nothing": None}


@pytest.mark.parametrize("content", OTHER_CONTENTS)
def test_files_of_another_kind_are_named(zero2, converted, marker, content):
    for name in READ_BY_CONVERTING:
        whole = (zero2 / name).read_bytes()
        torch.save(OTHER_CONTENTS[content], zero2 / name)
        refused(lambda: universal.to_universal(zero2, marker.parent / "other"), zero2 / name, marker)
        (zero2 / name).write_bytes(whole)
    for name in READ_BY_LOADING:
        file = converted / "zero" / name
        whole = file.read_bytes()
        torch.save({"param": OTHER_CONTENTS[content]}, file)
        if not (name.endswith("step.pt") and content == "a number"):
            with pytest.raises(ValueError, match=r"weight|optimizer_state") as error:
                in_one_process(converted)
            assert "\n" not in str(error.value)
        file.write_bytes(whole)


BAD_SETTINGS = {"lr": "fast", "betas": 5, "eps": None, "gamma": float("nan"), "weight_decay": [1], "ns_steps": -1}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_mars_cannot_use_are_named(converted, marker, name):
    file = converted / "zero" / "optimizer_state.pt"
    content = torch.load(file, weights_only=False)
    content["param_groups"][1][name] = BAD_SETTINGS[name]
    torch.save(content, file)
    line = refused(lambda: in_one_process(converted), file, marker)
    assert f"optimizer_state.pt, param group 1: {name}={BAD_SETTINGS[name]!r}" in line


def test_changed_bytes_are_an_error_or_no_more_than_other_values(zero2, tmp_path):
    """A pickle with changed bytes raises any kind of error inside; outside it is a ValueError."""
    file = zero2 / ZERO[0]
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        entry = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
    places = range(entry.header_offset, entry.header_offset + entry.file_size)
    generator = random.Random(5)
    errors = 0
    for attempt in range(150):
        changed = bytearray(whole)
        for _ in range(3):
            changed[generator.choice(places)] = generator.randrange(256)
        file.write_bytes(changed)
        try:
            universal.to_universal(zero2, tmp_path / f"universal{attempt}")
        except ValueError as error:
            errors += 1
            assert "\n" not in str(error)
    assert errors > 50


def test_a_pipe_is_not_waited_for(zero2, marker):
    (zero2 / ZERO[0]).unlink()
    os.mkfifo(zero2 / ZERO[0])
    line = refused(lambda: universal.to_universal(zero2, marker.parent / "universal"), zero2 / ZERO[0], marker)
    assert "is no file" in line


# --- what is saved elsewhere -------------------------------------------------------------------------------------

SETTINGS = {
    "adamw": {},
    "lion": {"mars_type": "mars-lion"},
    "shampoo": {"mars_type": "mars-shampoo"},
    "m": {"mars_type": "mars-m"},
    "exact": {"is_approx": False},
    "amsgrad": {"amsgrad": True},
    "bfloat16 states": {"state_dtype": "bfloat16"},
    "stochastic": {"rounding": "stochastic"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_states_of_mars_are_read_with_weights_only(tmp_path, settings):
    """As transformers reads optimizer.pt."""
    torch.manual_seed(1)
    model = Net()
    mars = mars_hf.create(model, **SETTINGS[settings])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    mars.step()
    torch.save(mars.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert loaded["param_groups"] == mars.state_dict()["param_groups"] and loaded["state"]
    mars_hf.create(Net(), **SETTINGS[settings]).load_state_dict(loaded)


# --- DeepSpeed itself --------------------------------------------------------------------------------------------

REAL = """
import copy, os, sys, torch, mars_hf
from pathlib import Path
from mars_hf import _compat, universal
from mars_hf.universal import safe_load
folder = Path(sys.argv[1])
found = _compat.checkpoint_classes()
assert [f"{kind.__module__}.{kind.__qualname__}" for kind in found] == list(_compat.CHECKPOINT_CLASSES)
constant, dynamic, stage, address = found
content = [constant(2.0), dynamic(2.0, 2.0, 1, 1.0, 1, False, False), stage(2), address(numel=3, start=1)]
torch.save(content, folder / "classes.pt")
read = safe_load.read(folder / "classes.pt")
assert [type(one) for one in read] == found and read[2:] == content[2:]
assert [vars(one) for one in read[:2]] == [vars(one) for one in content[:2]]

torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
sys.path.append(sys.argv[2])
import worker
deepspeed = worker.import_deepspeed()

class Payload:
    def __reduce__(self):
        return os.mkdir, (str(folder / "executed"),)

def engine(stage, load_universal):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": load_universal},
    }
    return deepspeed.initialize(model=model, optimizer=mars_hf.create(model), config=config)[0]

for stage in (2, 3):
    saved = folder / f"zero{stage}"
    trained = engine(stage, False)
    for _ in range(2):
        trained.backward(trained(torch.ones(1, 4)).square().sum())
        trained.step()
    trained.save_checkpoint(saved, tag="saved")
    universal.to_universal(saved / "saved", saved / "universal")
    engine(stage, True).load_checkpoint(saved)
    for name in ("optimizer_state.pt", "weight/last_grad.pt"):
        file = saved / "universal" / "zero" / name
        whole = file.read_bytes()
        with torch.serialization.safe_globals(found):
            content = torch.load(file, weights_only=True)
        torch.save({**content, "more": Payload()}, file)
        try:
            engine(stage, True).load_checkpoint(saved)
        except ValueError as error:
            assert str(file) in str(error) and "mkdir" in str(error), error
        else:
            raise SystemExit(f"{file} was loaded")
        assert not (folder / "executed").exists()
        file.write_bytes(whole)
print("done")
"""


@pytest.mark.slow
def test_deepspeed_itself(tmp_path):
    pytest.importorskip("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    distributed = Path(__file__).parents[1] / "distributed"
    finished = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path), str(distributed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.stdout.rstrip().endswith("done"), finished.stderr[-3000:]
