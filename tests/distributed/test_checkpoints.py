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
from launching import Launches, Run, import_deepspeed, leave
from test_parity import BAR, apart, check_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workload import CASES, STEPS, Case, build_model

from mars_hf import __main__ as command_line
from mars_hf import universal

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

HALF = STEPS // 2
Results = dict[str, Tensor]


class TorchRun(train.TorchRun):
    """One process, DDP or FSDP2."""

    def results(self) -> Results:
        """Return whole weights and states."""
        results = {}
        for name, param in trainable(self.model):
            results[f"weight.{name}"] = param
            results |= {f"{key}.{name}": value for key, value in self.mars.state.get(param, {}).items()}
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}
        return {name: x.detach().clone() for name, x in whole.items()}


class DeepSpeedRun(train.DeepSpeedRun):
    """ZeRO of any stage."""

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder, tag="saved")
        if dist.get_rank() == 0:
            command_line.main(["to_universal", str(folder / "saved"), str(folder / "universal")])
        dist.barrier()

    def load(self, folder: Path) -> None:
        path, _ = self.engine.load_checkpoint(folder)  # the tag is in `latest` or `latest_universal`
        assert path is not None

    def results(self) -> Results:
        """Return whole fp32 weights and states, with this rank's step counters."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        train.link_states(self.engine)
        results = {}
        for name, param in trainable(self.model):
            results[f"weight.{name}"] = safe_get_full_fp32_param(param)
            for key in states_of(name, getattr(param, "ds_shape", param.shape), self.case):
                results[f"{key}.{name}"] = safe_get_full_optimizer_state(param, key)
        for index, state in enumerate(self.mars.state.values()):
            results[f"step.{index}"] = state["step"]
        return {name: value.detach().clone() for name, value in results.items()}


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def states_of(name: str, shape: torch.Size, case: Case) -> list[str]:
    orthogonalized = case.mars_type in ("mars-shampoo", "mars-m")
    embedding = orthogonalized and name.startswith(("transformer.wte", "transformer.wpe"))
    mars = (len(shape) > 1 or case.optimize_1d) and not embedding
    squares = not mars or case.mars_type == "mars-adamw" or (orthogonalized and len(shape) == 1)
    last = mars and not (orthogonalized and case.clip_threshold is None)
    return ["exp_avg", *(["exp_avg_sq"] if squares else []), *(["last_grad"] if last else [])]


def build(engine: str, case: Case, **settings: Any) -> TorchRun | DeepSpeedRun:
    if engine in train.DEEPSPEED:
        return DeepSpeedRun(engine, case, **settings)
    return TorchRun(engine, case)


# --- Trainer -----------------------------------------------------------------------------------------------------


def train_trainer(engine: str, case: Case, folder: Path, resume: Path | None = None, **zero: Any) -> Results:
    """Run MarsTrainer under ZeRO-2 or DDP, from the start or from a checkpoint."""
    config = None
    if engine.endswith("zero2"):
        import_deepspeed()
        config = train.deepspeed_config("zero2", dist.get_world_size()) | zero
    model = build_model(case)
    with train.fresh_accelerate():
        trainer = train.make_trainer(
            "trainer", model, case, str(folder), config, save_strategy="steps", save_steps=HALF
        )
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return {f"weight.{name}": param.detach().float().clone() for name, param in model.named_parameters()}


def cycle_trainer(engine: str, case: Case, folder: Path, origin: Path, notes: dict[str, Any], flag: str) -> Results:
    checkpoint = origin / f"checkpoint-{HALF}"
    if flag:
        resumed = train_trainer(engine, case, folder, checkpoint, checkpoint={"load_universal": True})
        return {f"resumed.{name}": value for name, value in resumed.items()}
    whole = train_trainer(engine, case, folder)
    if engine.endswith("zero2") and dist.get_rank() == 0:
        saved = checkpoint / f"global_step{HALF}"
        universal.to_universal(saved, saved.with_name(f"{saved.name}_universal"))
    dist.barrier()
    resumed = train_trainer(engine, case, folder / "resumed", checkpoint)
    return labelled(whole=whole, resumed=resumed)


# --- the runs ----------------------------------------------------------------------------------------------------


def cycle(engine: str, case: Case, folder: Path, origin: Path, notes: dict[str, Any], flag: str) -> Results:
    """Train, stop and resume, or resume another run's checkpoint."""
    if flag.startswith("from:"):
        run = build(engine, case, **({"load_universal": True} if engine in train.DEEPSPEED else {}))
        run.load(origin)
        parts = {"loaded": run.results()}
    else:
        whole = build(engine, case)
        whole.train(0, STEPS)
        parts = {"whole": whole.results()}
        whole.close()
        run = build(engine, case)
        run.train(0, HALF)
        run.save(folder)
        parts["saved"] = run.results()
        notes["saved_groups"] = train.settings_of(run.mars)
        run.close()
        run = build(engine, case)
        run.load(folder)
        parts["loaded"] = run.results()
    notes["loaded_groups"] = train.settings_of(run.mars)
    if flag == "forgetful":
        for state in run.mars.state.values():
            if "last_grad" in state:
                state["last_grad"].zero_()
    run.train(HALF, STEPS)
    parts["resumed"] = run.results()
    run.close()
    return labelled(**parts)


def refused(engine: str, case: Case, folder: Path, origin: Path, notes: dict[str, Any], flag: str) -> Results:
    """Return the error for a universal checkpoint without all of MARS's state."""
    deepspeed_run = DeepSpeedRun(engine, case, load_universal=True)
    try:
        if flag == "stock":
            from deepspeed.checkpoint import ds_to_universal

            names = ["--input_folder", "saved", "--output_folder", "stock"]
            paths = [str(origin / name) if name[0] != "-" else name for name in names]
            workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
            with mock.patch("sys.argv", ["ds_to_universal", *paths, *workers]):
                ds_to_universal.main(ds_to_universal.parse_arguments())
            deepspeed_run.engine.load_checkpoint(origin, tag="stock")
        else:
            kind = type(deepspeed_run.engine.optimizer)
            name = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
            with mock.patch.object(kind, name, getattr(kind, name).__wrapped__):
                deepspeed_run.load(origin)
            deepspeed_run.train(HALF, STEPS)
    except (ValueError, RuntimeError) as error:
        notes["error"] = f"{type(error).__name__}: {error}"
    return {"nothing": torch.zeros(1)}


def labelled(**parts: Results) -> Results:
    return {f"{part}.{name}": value for part, results in parts.items() for name, value in results.items()}


def run(spec: str, file: Path) -> None:
    """Do one run."""
    engine, case, flag = (*spec.split("/"), "")[:3]
    folder = file.parent.parent / "checkpoints" / (file.name if flag else f"{engine}-{case}")
    origin = folder.with_name(f"{flag[5:] if flag.startswith('from:') else engine}-{case}")
    notes: dict[str, Any] = {}
    do = cycle_trainer if engine.startswith("trainer") else refused if flag in ("stock", "unextended") else cycle
    results = do(engine, CASES[case], folder, origin, notes, flag)
    leave(file, notes, results)


# --- tests ----------------------------------------------------------------------------------------------------------

SAME_BAR = 1e-6  # relative to the largest element of the tensor; 0 was measured
BF16 = ("zero2_bf16/adamw_1d", "zero1_bf16_fp32accum/adamw", "zero2_bf16/m")
RESUMED = (
    *("ddp/lion_1d", "fsdp2/adamw", "fsdp2/lion", "trainer_ddp/adamw"),
    *("zero1/adamw_1d", "zero1/lion_1d_frozen", "zero2/adamw", "zero2/lion", "zero2_offload/adamw"),
    *("zero3/adamw", "zero3/lion_1d", *BF16, "trainer_zero2/adamw"),
    *("ddp/shampoo", "fsdp2/m", "zero1/m", "zero2/shampoo", "zero3/m", "zero2/m_unclipped"),
)
# Checkpoints of two processes, resumed by four and by one.
TAKEN_UP = {
    4: (
        *("fsdp2/adamw/from:fsdp2", "fsdp2/lion/from:fsdp2", "zero1/adamw_1d/from:zero1"),
        *("zero1/lion_1d_frozen/from:zero1", "zero2/adamw/from:zero2", "zero3/adamw/from:zero3"),
        *("zero3/lion_1d/from:zero3", "zero3/adamw/from:zero2", "zero2_bf16/adamw_1d/from:zero2_bf16"),
        *("fsdp2/m/from:fsdp2", "zero2/m/from:zero1", "zero3/m/from:zero3"),
    ),
    1: (
        *("fsdp2/adamw/from:fsdp2", "zero1/adamw_1d/from:zero1", "zero2/adamw/from:zero2", "zero2/lion/from:zero2"),
        *("zero3/adamw/from:zero3", "zero2/adamw/from:zero3", "trainer_zero2/adamw/from:trainer_zero2"),
        *("single/adamw/from:zero2", "single/lion_1d/from:zero3"),
        *("fsdp2/m/from:fsdp2", "zero2/shampoo/from:zero2", "single/m/from:zero3", "zero2/m_unclipped/from:zero2"),
        "zero1_bf16_fp32accum/adamw/from:zero1_bf16_fp32accum",
    ),
}
LOST = ("zero2/adamw/stock", "zero3/adamw/stock", "zero3/adamw/unextended")
REFERENCES = tuple(
    f"single/{case}"
    for case in ("adamw", "adamw_1d", "lion", "lion_1d", "lion_1d_frozen", "shampoo", "m", "m_unclipped")
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
    result = trained(2, "fsdp2/adamw/forgetful")
    assert max(apart(result.named("whole.weight"), result.named("resumed.weight")).values()) > 20 * BAR


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
