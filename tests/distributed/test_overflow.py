"""A step skipped by fp16's dynamic loss scale leaves no trace, and non-finite values on one rank stop every rank."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import train
from launching import Launches, from_all_ranks, import_deepspeed, leave
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from train import DeepSpeedRun, TorchRun
from transformers import default_data_collator
from workload import ACCUMULATION, CASES, MICRO_BATCH, Case, TinyGPT2, Tokens, build_model

import mars_hf
from mars_hf.distributed.tensors import local

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ATTEMPTS = 9
POISONED = 6  # this attempt, on the last rank
SCALE_POWER = 20  # a few powers too high
Snapshot = dict[str, Tensor]


class OneInfinity(torch.autograd.Function):
    """Return the input unchanged, and put one infinity into its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = torch.inf
        return grad


def poisoned(model: TinyGPT2) -> Any:
    """Put one infinity into the gradient of one matrix, inside a `with`."""
    layer = model.wide
    return mock.patch.object(
        layer, "forward", lambda x: nn.functional.linear(x, OneInfinity.apply(layer.weight), layer.bias)
    )


class Torch(TorchRun):
    """DDP or FSDP2 with torch's GradScaler."""

    def make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**SCALE_POWER, growth_interval=2)

    def build(self) -> TinyGPT2:
        model = build_model(self.case)
        if self.engine == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
            train.shard(model, (dist.get_world_size(),), mp_policy=policy)
        return model

    def attempt(self, micro_batches: list[Tensor], scale: Any) -> Any:
        """Attempt a step at a given loss scale, or at the current one; return the scale."""
        if scale is not None:
            self.scaler.scale(torch.zeros(()))  # creates its scale, which update() replaces
            self.scaler.update(scale)
        for ids in micro_batches:
            with torch.autocast("cpu", torch.float16, enabled=self.engine == "ddp"):
                loss = self.wrapped(ids, ids)["loss"] / ACCUMULATION
            self.scaler.scale(loss).backward()
        used = self.scaler.get_scale()
        self.scaler.unscale_(self.mars)
        self.clip()
        self.scaler.step(self.mars)
        self.scaler.update()
        self.mars.zero_grad()
        return used

    def snapshot(self) -> Snapshot:
        tensors = {f"param.{name}": param for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            tensors |= {f"{key}.{name}": value for key, value in self.mars.state.get(param, {}).items()}
        return {name: local(tensor.detach()).clone() for name, tensor in tensors.items()}


class DeepSpeed(DeepSpeedRun):
    """ZeRO with DeepSpeed's own scaler."""

    def __init__(self, engine: str, case: Case) -> None:
        fp16 = {"enabled": True, "initial_scale_power": SCALE_POWER, "loss_scale_window": 2, "hysteresis": 1}
        super().__init__(engine, case, fp16=fp16)

    def attempt(self, micro_batches: list[Tensor], scale: Any) -> Any:
        # DeepSpeed 0.19 divides gradients by the next step's scale, so the time of its growth is part of the scale.
        parts = ("cur_scale", "cur_iter", "last_overflow_iter")
        scaler = self.engine.optimizer.loss_scaler
        if scale is not None:
            vars(scaler).update(scale)
        used = {part: getattr(scaler, part) for part in parts}
        for ids in micro_batches:
            self.engine.backward(self.engine(ids, ids)["loss"])
            self.engine.step()
        return used

    def snapshot(self) -> Snapshot:
        tensors = {f"param.{name}": getattr(p, "ds_tensor", p) for name, p in self.model.named_parameters()}
        zero = self.engine.optimizer
        stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups):
            tensors[f"master.{i}"] = flat
            tensors |= {f"{key}.{i}": value for key, value in self.mars.state.get(flat, {}).items()}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differing(before: Snapshot, after: Snapshot) -> list[str]:
    """Return what differs in any bit on any rank."""
    here = [
        name
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    ]
    return sorted({name for names in from_all_ranks(here) for name in names})


def run(spec: str, file: Path) -> None:
    """Do one run: a training that overflows, and one that does not."""
    engine, case = spec.split("/")
    if engine.startswith("trainer_"):
        return leave(file, from_all_ranks(train_on_poisoned_data(engine.removeprefix("trainer_"), case)))
    make: Callable[..., Any] = Torch if engine in ("ddp", "fsdp2") else DeepSpeed
    rank, world, tokens = dist.get_rank(), dist.get_world_size(), Tokens(ATTEMPTS)

    def batch(attempt: int) -> list[Tensor]:
        return [tokens.micro_batch(attempt, micro, rank, world) for micro in range(ACCUMULATION)]

    overflowing, attempts, taken = make(engine, CASES[case]), [], []
    for attempt in range(ATTEMPTS):
        before, calls = overflowing.snapshot(), len(overflowing.watched.calls)
        is_poisoned = attempt == POISONED and rank == world - 1
        with poisoned(overflowing.model) if is_poisoned else contextlib.nullcontext():
            scale = overflowing.attempt(batch(attempt), None)
        after, skipped = overflowing.snapshot(), len(overflowing.watched.calls) == calls
        attempts.append({"skipped": skipped, "scale": scale, "changed": differing(before, after)})
        if not skipped:
            taken.append((attempt, scale, after))
    clean, differences = make(engine, CASES[case]), []
    for attempt, scale, after in taken:
        clean.attempt(batch(attempt), scale)
        differences.append(differing(after, clean.snapshot()))
    return leave(file, {"attempts": attempts, "differences": differences})


# --- MarsTrainer on poisoned data ---------------------------------------------------------------------------------

STEPS = 7
BAD = (3, 4, 5)  # steps with poison, counted from 1


def rows(kind: str) -> list[dict[str, Tensor]]:
    """Return the rows of the run; those of bad steps are poisoned in a micro-batch of the last rank."""
    size, kinds = ACCUMULATION * MICRO_BATCH, {"loss": 1, "gradient": 2}
    poisoned = {step * size - MICRO_BATCH // dist.get_world_size() for step in BAD}
    return [
        {"input_ids": ids, "labels": ids, "kind": torch.tensor(kinds[kind] if row in poisoned else 0)}
        for row, ids in enumerate(Tokens().ids[: STEPS * size])
    ]


class Model(TinyGPT2):
    """A model that a batch can poison: its loss, or one of its gradients."""

    def forward(self, input_ids: Tensor, labels: Tensor, kind: Tensor) -> dict[str, Tensor]:
        loss = super().forward(input_ids, labels)["loss"]
        if 2 in kind:
            loss = loss + 0 * OneInfinity.apply(self.wide.weight).sum()
        return {"loss": loss + torch.full_like(loss, torch.inf) if 1 in kind else loss}


def train_on_poisoned_data(engine: str, kind: str) -> dict[str, Any]:
    zero = None
    if engine.startswith("zero"):
        import_deepspeed()
        zero = {**train.deepspeed_config(engine, dist.get_world_size()), "gradient_clipping": "auto"}
    torch.manual_seed(0)
    model = Model(build_model(CASES["adamw"]).config)
    outcome: dict[str, Any] = {"reports": [], "error": None}

    def keep_warnings(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            outcome["reports"].append(record.getMessage())

    reports = mock.patch.object(logging.getLogger("mars_hf"), "handle", keep_warnings)
    with train.fresh_accelerate(), reports, tempfile.TemporaryDirectory() as folder:
        args = train.training_arguments(
            folder, CASES["adamw"], zero, max_steps=STEPS, remove_unused_columns=False, bf16=engine.endswith("bf16")
        )
        kind_of_trainer = train.Fsdp2Trainer if engine == "fsdp2" else mars_hf.MarsTrainer
        data = {"train_dataset": rows(kind), "data_collator": default_data_collator}
        trainer = kind_of_trainer(model, args, **data, optimizers=(CASES["adamw"].create(model), None))
        try:
            trainer.train()
        except mars_hf.NonFiniteError as error:
            outcome["error"] = str(error).replace(folder, "FOLDER")
        train.check_wrapper(engine, trainer.model_wrapped)
        outcome["step"] = trainer.state.global_step
    return outcome


# --- tests ----------------------------------------------------------------------------------------------------------

RUNS = {
    "torch": ("ddp/adamw", "ddp/lion_1d", "ddp/m", "fsdp2/adamw_1d", "fsdp2/lion", "fsdp2/m"),
    "deepspeed": (
        "zero1/adamw",
        "zero1/lion",
        "zero2/adamw_1d",
        "zero2/lion",
        "zero3/adamw",
        "zero3/lion_1d",
        "zero2_offload/adamw",
        "zero3_offload/adamw",
        # The rules that orthogonalize: a momentum with an overflow in it would never recover.
        "zero1/m",
        "zero2/shampoo",
        "zero3/m",
        "zero2_offload/m",
    ),
}
POISONED_RUNS = {
    "torch": ("trainer_ddp/loss", "trainer_ddp/gradient", "trainer_fsdp2/loss", "trainer_fsdp2/gradient"),
    "deepspeed": ("trainer_zero1/loss", *(f"trainer_{engine}/gradient" for engine in ("zero2", "zero3", "zero3_bf16"))),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Return a run's records; the first request starts all runs of its kind."""
    launches = Launches(run, tmp_path_factory)
    return lambda kind, run: launches.get(kind, [*RUNS[kind], *POISONED_RUNS[kind]], 2, run).notes


@pytest.mark.parametrize(("kind", "run"), [(kind, run) for kind, runs in RUNS.items() for run in runs])
def test_skipped_steps(trained, kind, run):
    notes = trained(kind, run)
    skipped = [attempt["skipped"] for attempt in notes["attempts"]]
    assert len(skipped) == ATTEMPTS
    assert skipped[:2] == [True, True] and skipped[POISONED] and not skipped[POISONED + 1]
    assert not skipped[POISONED - 1]  # so that there is a last gradient to damage
    for attempt in notes["attempts"]:
        if attempt["skipped"]:
            assert attempt["changed"] == []
        else:
            changed = {name.split(".")[0] for name in attempt["changed"]}
            assert {"param", "exp_avg", "last_grad", "step"} <= changed
    # Training without the batches of skipped steps is identical after each step.
    assert notes["differences"] == [[]] * skipped.count(False)


@pytest.mark.parametrize(("kind", "run"), [(kind, run) for kind, runs in POISONED_RUNS.items() for run in runs])
def test_nonfinite_values_of_one_rank(trained, kind, run):
    """At the same step; only the first one reports."""
    first, second = trained(kind, run)
    assert first["error"].startswith("3 steps in a row") and first["error"] == second["error"]
    assert first["step"] == second["step"] == BAD[-1] - 1
    assert [line.split(":")[0] for line in first["reports"]] == [f"step {step}" for step in BAD]
    assert second["reports"] == []
    assert ("loss inf" if "loss" in run else "gradient") in first["reports"][0]
