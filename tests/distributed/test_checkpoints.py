"""A resumed run equals an uninterrupted one, under every engine and with more or fewer processes.

Runs are ENGINE/CASE[/FLAG]. Without a flag, a run trains to its end, then once more with a stop in the middle; its
checkpoint stays in checkpoints/ENGINE-CASE, beside the launch's folder. Flags:

    from:ENGINE  resume the checkpoint of ENGINE, with any number of processes
    forgetful    lose the last gradients at the stop: wrong on purpose, to prove that the comparison notices
    stock        load the output of DeepSpeed's own converter
    unextended   load with DeepSpeed's own loader for ZeRO-3, and train
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import train
from launching import Launches, Run, leave
from test_parity import BAR, apart, check_same
from torch import Tensor
from workload import CASES, STEPS, Case

from mars_hf import universal

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

HALF = STEPS // 2
UNIVERSAL = {"checkpoint": {"load_universal": True}}  # of DeepSpeed's config
Results = dict[str, Tensor]


def cycle_trainer(
    engine: str, case: Case, folder: Path, origin: Path, notes: dict[str, Any], flag: str
) -> dict[str, Results]:
    """Run MarsTrainer under ZeRO-2 or DDP, from the start and from a checkpoint, or from another run's."""
    checkpoint = origin / f"checkpoint-{HALF}"
    if flag:
        return {"resumed": train.train_way_in(engine, case, folder, checkpoint, UNIVERSAL)}
    whole = train.train_way_in(engine, case, folder, save_strategy="steps", save_steps=HALF)
    if engine.endswith("zero2") and dist.get_rank() == 0:
        saved = checkpoint / f"global_step{HALF}"
        universal.to_universal(saved, saved.with_name(f"{saved.name}_universal"))
    dist.barrier()
    return {"whole": whole, "resumed": train.train_way_in(engine, case, folder / "resumed", checkpoint)}


def cycle(engine: str, case: Case, folder: Path, origin: Path, notes: dict[str, Any], flag: str) -> dict[str, Results]:
    """Train, stop and resume, or resume another run's checkpoint."""
    parts = {}
    if not flag:
        whole = train.build_run(engine, case)
        whole.train(0, STEPS)
        parts["whole"] = whole.results()
        whole.close()
        if engine == "single":  # to compare with
            return parts
        stopped = train.build_run(engine, case)
        stopped.train(0, HALF)
        stopped.save(folder)
        parts["saved"] = stopped.results()
        notes["saved_groups"] = train.settings_of(stopped.mars)
        stopped.close()
    run = train.build_run(engine, case, **(UNIVERSAL if flag and engine in train.DEEPSPEED else {}))
    run.load(origin)
    parts["loaded"] = run.results()
    notes["loaded_groups"] = train.settings_of(run.mars)
    if flag == "forgetful":
        for state in run.mars.state.values():
            if "last_grad" in state:
                state["last_grad"].zero_()
    run.train(HALF, STEPS)
    parts["resumed"] = run.results()
    run.close()
    return parts


def refused(engine: str, case: Case, folder: Path, origin: Path, notes: dict[str, Any], flag: str) -> dict[str, Any]:
    """Note the error for a universal checkpoint without all of MARS's state."""
    deepspeed_run = train.DeepSpeedRun(engine, case, **UNIVERSAL)
    try:
        if flag == "stock":
            from deepspeed.checkpoint import ds_to_universal

            # In a folder of its own: it names what it has made as the newest one, for whoever loads from there.
            paths = ["--input_folder", str(origin / "saved"), "--output_folder", str(folder / "stock")]
            workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
            with mock.patch("sys.argv", ["ds_to_universal", *paths, *workers]):
                ds_to_universal.main(ds_to_universal.parse_arguments())
            deepspeed_run.engine.load_checkpoint(folder, tag="stock")
        else:
            kind = type(deepspeed_run.engine.optimizer)
            name = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
            with mock.patch.object(kind, name, getattr(kind, name).__wrapped__):
                deepspeed_run.load(origin)
            deepspeed_run.train(HALF, STEPS)
    except (ValueError, RuntimeError) as error:
        notes["error"] = f"{type(error).__name__}: {error}"
    return {}


def run(spec: str, file: Path) -> None:
    """Do one run."""
    engine, case, flag = (*spec.split("/"), "")[:3]
    folder = file.parent.parent / "checkpoints" / (file.name if flag else f"{engine}-{case}")
    origin = folder.with_name(f"{flag[5:] if flag.startswith('from:') else engine}-{case}")
    notes: dict[str, Any] = {}
    do = cycle_trainer if engine.startswith("trainer") else refused if flag in ("stock", "unextended") else cycle
    parts = do(engine, CASES[case], folder, origin, notes, flag)
    tensors = {f"{part}.{name}": value for part, results in parts.items() for name, value in results.items()}
    leave(file, notes, tensors or None)


# --- tests ----------------------------------------------------------------------------------------------------------

SAME_BAR = 1e-6  # relative to the largest element of the tensor; 0 was measured
BF16 = ("zero2_bf16/adamw_1d", "zero1_bf16_fp32accum/adamw", "zero2_bf16/m")
RESUMED = (
    "ddp/lion_1d",
    "fsdp2/adamw",
    "fsdp2/lion",
    "fsdp2/adamw_8bit",
    "zero1/lion_8bit",
    "zero2/adamw_8bit",
    "zero3/m_8bit",
    "fsdp2/m_rows",
    "zero3/m_rows",
    "trainer_ddp/adamw",
    "zero1/adamw_1d",
    "zero1/lion_1d_frozen",
    "zero2/adamw",
    "zero2/lion",
    "zero2_offload/adamw",
    "zero3/adamw",
    "zero3/lion_1d",
    *BF16,
    "trainer_zero2/adamw",
    "ddp/shampoo",
    "fsdp2/m",
    "zero1/m",
    "zero2/shampoo",
    "zero3/m",
    "zero2/m_unclipped",
)
# Checkpoints of two processes, resumed by four and by one.
TAKEN_UP = {
    4: (
        "fsdp2/adamw/from:fsdp2",
        "fsdp2/lion/from:fsdp2",
        "zero1/adamw_1d/from:zero1",
        "zero1/lion_1d_frozen/from:zero1",
        "zero2/adamw/from:zero2",
        "zero3/adamw/from:zero3",
        "zero3/lion_1d/from:zero3",
        "zero3/adamw/from:zero2",
        "zero2_bf16/adamw_1d/from:zero2_bf16",
        "fsdp2/m/from:fsdp2",
        "fsdp2/m_rows/from:fsdp2",
        "zero2/m/from:zero1",
        "zero3/m/from:zero3",
        "fsdp2/adamw_8bit/from:fsdp2",
        "zero2/adamw_8bit/from:zero2",
    ),
    1: (
        "fsdp2/adamw/from:fsdp2",
        "zero1/adamw_1d/from:zero1",
        "zero2/adamw/from:zero2",
        "zero2/lion/from:zero2",
        "zero3/adamw/from:zero3",
        "zero2/adamw/from:zero3",
        "trainer_zero2/adamw/from:trainer_zero2",
        "single/adamw/from:zero2",
        "single/lion_1d/from:zero3",
        "fsdp2/m/from:fsdp2",
        "fsdp2/adamw_8bit/from:fsdp2",
        "single/adamw_8bit/from:zero2",
        "zero3/m_8bit/from:zero3",
        "zero2/shampoo/from:zero2",
        "single/m/from:zero3",
        "zero2/m_unclipped/from:zero2",
        "zero1_bf16_fp32accum/adamw/from:zero1_bf16_fp32accum",
    ),
}
LOST = ("zero2/adamw/stock", "zero3/adamw/stock", "zero3/adamw/unextended")
REFERENCES = tuple(
    f"single/{case}"
    for case in (
        "adamw",
        "adamw_1d",
        "lion",
        "lion_1d",
        "lion_1d_frozen",
        "shampoo",
        "m",
        "m_unclipped",
        "m_rows",
        "adamw_8bit",
        "m_8bit",
    )
)
SPECS = {
    2: (*RESUMED, "fsdp2/adamw/forgetful"),
    4: TAKEN_UP[4],
    1: (*REFERENCES, *TAKEN_UP[1], *LOST),
}
BY_HAND = [pytest.param(2, run, id=f"2-{run}") for run in RESUMED if not run.startswith("trainer")]
CHANGES = [pytest.param(world, run, id=f"{world}-{run}") for world, runs in TAKEN_UP.items() for run in runs]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Run]:
    """Return the results of a run; the first request trains all runs with as many processes."""
    launches = Launches(run, tmp_path_factory)

    def get(world: int, run: str) -> Run:
        if world != 2:
            launches.get("2", SPECS[2], 2, "ddp/lion_1d")  # writes the checkpoints that the others resume
        return launches.get(str(world), SPECS[world], world, run)

    return get


def without_counters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeepSpeed has one step counter per partition, and the number of partitions is free."""
    return {name: x for name, x in tensors.items() if not name.startswith("step.")}


@pytest.mark.parametrize("run", RESUMED)
def test_resumed_equals_uninterrupted(trained, run):
    result = trained(2, run)
    expected, found = result.named("whole"), result.named("resumed")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=SAME_BAR * x.abs().max().item(), msg=name)


def test_lost_last_gradients_are_noticed(trained):
    whole, resumed = trained(2, "fsdp2/adamw"), trained(2, "fsdp2/adamw/forgetful")
    assert max(apart(whole.named("whole.weight"), resumed.named("resumed.weight")).values()) > 20 * BAR


# Trainer trains right after loading.
@pytest.mark.parametrize(("world", "run"), BY_HAND + [change for change in CHANGES if "trainer" not in change.id])
def test_loaded_equals_saved(trained, world, run):
    _, case, *origin = run.split("/")
    result = trained(world, run)
    source = trained(2, f"{origin[0].removeprefix('from:')}/{case}") if origin else result
    saved, loaded = without_counters(source.named("saved")), without_counters(result.named("loaded"))
    assert loaded.keys() == saved.keys()
    states = [x for name, x in saved.items() if name.startswith("exp_avg." if case == "m_unclipped" else "last_grad.")]
    assert len(states) >= 10 and all(x.any() for x in states)  # as many matrices
    assert [name for name, x in saved.items() if not torch.equal(loaded[name], x)] == []
    assert result.notes["loaded_groups"] == source.notes["saved_groups"]
    roles = [group["role"] for group in result.notes["loaded_groups"]]
    assert {"matrix", "vector"} <= set(roles)  # otherwise the line above could not tell groups apart


@pytest.mark.parametrize(("world", "run"), [change for change in CHANGES if "bf16" not in change.id])
def test_elastic_resume(trained, world, run):
    engine, case, _ = run.split("/")
    expected, found = trained(1, f"single/{case}"), trained(world, run)
    for kind in ("weight",) if engine.startswith("trainer") else ("weight", "exp_avg", "last_grad"):
        if case == "m_unclipped" and kind == "last_grad":
            assert expected.named(f"whole.{kind}") == found.named(f"resumed.{kind}") == {}
        else:
            check_same(expected, found, kind, case, ("whole.", "resumed."))
    counters = found.named("resumed.step").values()
    assert {value.item() for value in counters} <= {STEPS}


@pytest.mark.parametrize("run", LOST)
def test_universal_checkpoint_without_last_gradients(trained, run):
    error = trained(1, run).notes["error"]
    assert error.startswith("RuntimeError" if run.endswith("unextended") else "ValueError")
    assert "python -m mars_hf to_universal" in error
