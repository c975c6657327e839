"""Files that others wrote run nothing, whatever they hold, and damaged ones are named in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zero_checkpoint import SIZES, Net, save_zero, stand_in_for_deepspeed, trained

import mars_hf
from mars_hf import universal
from mars_hf.__main__ import main
from mars_hf.universal import engines

ZERO = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
MODEL = "mp_rank_00_model_states.pt"
READ_BY_CONVERTING = (*ZERO, MODEL)
READ_BY_LOADING = ("optimizer_state.pt", *(f"weight/{key}.pt" for key in ("fp32", "exp_avg", "last_grad", "step")))


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


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


def arm(file: Path, marker: Path) -> None:
    """Put a payload into a file beside what it holds, and prove that the file executes it."""
    content = torch.load(file, weights_only=False)
    content = content if isinstance(content, dict) else {"param": content}
    torch.save({**content, "payload": Payload(marker)}, file)
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


def by_engine(folder: Path) -> None:
    """Load as ZeRO-1/2 does, whose own loader trusts the files."""
    model = Net()
    names = {param: name for name, param in model.named_parameters()}
    engine = SimpleNamespace(optimizer=mars_hf.create(model), param_names=names)
    engine.groups = [[getattr(model, name)] for name in SIZES]
    engines.load_zero12(
        lambda *_: torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False), engine, "groups", str(folder)
    )


@pytest.mark.parametrize("name", READ_BY_CONVERTING)
def test_a_zero_checkpoint_runs_nothing(zero2, marker, name, capsys):
    arm(zero2 / name, marker)
    target = marker.parent / "universal"
    line = refused(lambda: universal.to_universal(zero2, target), zero2 / name, marker)
    assert "posix.mkdir" in line and "torch.serialization.add_safe_globals" in line and not target.exists()
    with pytest.raises(SystemExit) as stopped:
        main(["to_universal", str(zero2), str(target)])
    assert stopped.value.code == 2 and not marker.exists()
    assert "posix.mkdir" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("read", [in_one_process, by_engine])
@pytest.mark.parametrize("name", READ_BY_LOADING)
def test_a_universal_checkpoint_runs_nothing(converted, marker, name, read):
    read(converted)
    file = converted / "zero" / name
    arm(file, marker)
    assert "posix.mkdir" in refused(lambda: read(converted), file, marker)


def test_a_class_that_the_user_trusts_is_read(zero2, marker):
    model, _ = trained()
    content = torch.load(zero2 / MODEL, weights_only=True)
    torch.save({**content, "payload": SimpleNamespace(anything=1)}, zero2 / MODEL)
    line = refused(lambda: universal.to_universal(zero2, marker.parent / "universal"), zero2 / MODEL, marker)
    assert "types.SimpleNamespace" in line
    with torch.serialization.safe_globals([SimpleNamespace]):
        universal.to_universal(zero2, marker.parent / "universal")
    universal.load(marker.parent / "universal", fresh := Net(), mars_hf.create(fresh))
    assert torch.equal(fresh.weight, model.weight)


def test_without_deepspeed_its_classes_are_asked_for(zero2, monkeypatch, tmp_path):
    for name in ("deepspeed", *[name for name in sys.modules if name.startswith("deepspeed.")]):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"holds classes of DeepSpeed.*pip install 'mars_hf\[deepspeed\]'"):
        universal.to_universal(zero2, tmp_path / "universal")


@pytest.mark.parametrize("key", ["fp32", "step"])
def test_a_file_cannot_ask_for_more_memory_than_it_has(tmp_path, zero2, key):
    """40 terabytes: one stored element, expanded, and the places and shape of its parameter say the same."""
    numel = 10**13
    for name in ZERO:
        saved = torch.load(zero2 / name, weights_only=False)
        state = saved["optimizer_state_dict"]
        if key == "fp32":
            state["single_partition_of_fp32_groups"][0] = torch.zeros(1).expand(numel)
            state["param_slice_mappings"][0]["weight"].numel = numel
        else:
            state["base_optimizer_state"]["state"][0]["step"] = torch.zeros(1, dtype=torch.float64).expand(numel)
        torch.save(saved, zero2 / name)
    model = torch.load(zero2 / MODEL, weights_only=False)
    model["param_shapes"][0]["weight"] = torch.Size((2, numel)) if key == "fp32" else torch.Size((3, 5))
    torch.save(model, zero2 / MODEL)
    with pytest.raises(ValueError, match="'fp32' of weight is not laid out" if key == "fp32" else "a step counter is"):
        universal.to_universal(zero2, tmp_path / "universal")


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


@pytest.mark.parametrize("content", [b"", b"\x80", b"no checkpoint", b"PK\5\6" + bytes(18), None])
def test_damaged_files_are_named(zero2, converted, marker, content):
    for name in READ_BY_CONVERTING:
        file = zero2 / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if content is None else content)
        line = refused(lambda: universal.to_universal(zero2, marker.parent / "other"), file, marker)
        assert "take another checkpoint" in line and "weights_only" not in line
        file.write_bytes(whole)
    for name in READ_BY_LOADING:
        file = converted / "zero" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if content is None else content)
        assert "take another checkpoint" in refused(lambda: in_one_process(converted), file, marker)
        file.write_bytes(whole)


OTHER_CONTENTS = {"a list": [1], "a number": 5, "other keys": {"a": 1}, "a tensor": torch.zeros(2), "nothing": None}


@pytest.mark.parametrize("content", OTHER_CONTENTS)
def test_files_of_another_kind_are_one_line(zero2, converted, marker, content):
    for name in READ_BY_CONVERTING:
        whole = (zero2 / name).read_bytes()
        torch.save(OTHER_CONTENTS[content], zero2 / name)
        refused(lambda: universal.to_universal(zero2, marker.parent / "other"), zero2, marker)
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


REAL = """
import os, sys, torch, mars_hf
from pathlib import Path
from mars_hf import _compat, universal
from mars_hf.universal import checkpoint
folder = Path(sys.argv[1])
found = _compat.checkpoint_classes(_compat.CHECKPOINT_CLASSES)
assert [f"{kind.__module__}.{kind.__qualname__}" for kind in found] == list(_compat.CHECKPOINT_CLASSES)
constant, dynamic, stage, address = found
content = [constant(2.0), dynamic(2.0, 2.0, 1, 1.0, 1, False, False), stage(2), address(numel=3, start=1)]
torch.save(content, folder / "classes.pt")
read = checkpoint.read(folder / "classes.pt")
assert [type(one) for one in read] == found and read[2:] == content[2:]
assert [vars(one) for one in read[:2]] == [vars(one) for one in content[:2]]

torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
sys.path.append(sys.argv[2])
import launching
deepspeed = launching.import_deepspeed()

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
