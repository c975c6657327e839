"""Exact MARS on two processes matches the straight-line algorithm on one.

Runs are ENGINE-ACCUMULATION[-resumed][-m|-shampoo]. The engine `tp` trains a Llama that transformers' own plan divides;
parameters outside the plan are plain tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs, ParallelismConfig
from launching import Launches, Run, import_deepspeed, leave
from torch.distributed.tensor import DTensor
from train import Fsdp2Trainer, check_wrapper, deepspeed_config, fresh_accelerate, training_arguments
from transformers import GPT2LMHeadModel, default_data_collator
from workload import CASES, MICRO_BATCH, STEPS, build_llama
from workload import build_model as build_gpt2

import mars_hf

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ROWS = 48
SETTINGS = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "gamma": 0.1, "clip_threshold": 0.3}
LR_1D = 1e-3
# Flags of runs with another rule.
RULES = {
    "m": {"mars_type": "mars-m", "ns_dtype": "float32"},
    "shampoo": {"mars_type": "mars-shampoo", "ns_dtype": "float32"},
}


def rows() -> list[dict[str, torch.Tensor]]:
    """Return rows with different numbers of labels, so that the mean over ranks is not the mean over labels."""
    ids = torch.randint(0, 61, (ROWS, 12), generator=torch.Generator().manual_seed(7))
    hidden = torch.arange(12) < 1 + torch.arange(ROWS)[:, None] % 7
    labels = ids.masked_fill(hidden, -100)
    return [{"input_ids": row, "labels": of_row} for row, of_row in zip(ids, labels, strict=True)]


def build_model(is_llama: bool, divided: bool = False) -> Any:
    """Return a model with odd sizes, so that shards are uneven, or a Llama."""
    return build_llama(divided) if is_llama else GPT2LMHeadModel(build_gpt2(CASES["adamw"]).config)


class DividedTrainer(mars_hf.MarsTrainer):
    """Let accelerate take tensor parallelism, which it refuses on CPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
            super().create_accelerator_and_postprocess()


def make_trainer(
    engine: str, accumulation: int, folder: Path, rule: dict[str, Any] | None = None, zero: Any = None, **settings: Any
) -> mars_hf.MarsTrainer:
    model = build_model(engine == "tp", divided=True)
    settings |= {"gradient_accumulation_steps": accumulation, "lr_scheduler_type": "constant"}
    if engine == "tp":
        settings["per_device_train_batch_size"] = MICRO_BATCH
    arguments = training_arguments(str(folder), CASES["adamw"], zero, **settings)
    options: dict[str, Any] = {**SETTINGS, **(rule or {}), "lr_1d": LR_1D, "is_approx": False}
    # One that evaluates makes its optimizer itself, and stops if that lacks parameters of the model.
    if arguments.eval_strategy == "no":
        made = {"optimizers": (mars_hf.create(model, **options), None)}
    else:
        made = {"mars_kwargs": options, "eval_dataset": rows()[:4]}
    kind = {"fsdp2": Fsdp2Trainer, "tp": DividedTrainer}.get(engine, mars_hf.MarsTrainer)
    return kind(model, arguments, train_dataset=rows(), data_collator=default_data_collator, **made)


def train(spec: str, folder: Path) -> dict[str, torch.Tensor]:
    name, accumulation, *flags = spec.split("-")
    engine, _, option = name.partition("_")
    settings: dict[str, Any] = {"ddp_static_graph": True} if option == "static" else {}
    if "evaluated" in flags:  # after each step; FSDP2 leaves a part of the model gathered
        settings = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": SETTINGS["lr"]}
    if "resumed" in flags:
        make_trainer(engine, int(accumulation), folder, save_strategy="steps", save_steps=5).train()
        dist.barrier()
        trainer = make_trainer(engine, int(accumulation), folder)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    else:
        rule = next((RULES[flag] for flag in flags if flag in RULES), None)
        trainer = make_trainer(engine, int(accumulation), folder, rule, **settings)
        if option == "view":
            trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        trainer.train()
    if dist.get_world_size() > 1 and engine != "tp":
        check_wrapper(engine, trainer.model_wrapped)
    found = dict(trainer.model.named_parameters())
    return {key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for key, p in found.items()}


def refused(folder: Path) -> str:
    """Return the error of MarsTrainer under DeepSpeed."""
    import_deepspeed()
    trainer = make_trainer("ddp", 2, folder, zero=deepspeed_config("zero2", dist.get_world_size()))
    with pytest.raises(NotImplementedError) as refusal:
        trainer.train()
    return str(refusal.value)


def run(spec: str, file: Path) -> None:
    """Do one run."""
    folder = Path(f"{file}-checkpoints")
    with fresh_accelerate():
        if spec == "zero2-refused":
            leave(file, refused(folder))
        else:
            leave(file, None, train(spec, folder))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


# --- tests ----------------------------------------------------------------------------------------------------------

BAR = 5e-5
ORTHOGONALIZED = ("ddp-2-m", "ddp-2-shampoo", "fsdp2-2-m", "fsdp2-2-shampoo")
RUNS = (
    "ddp-1",
    "ddp-4",
    "ddp_view-2",
    "ddp_static-1",
    "fsdp2-1",
    "fsdp2-4",
    "ddp-1-evaluated",
    "fsdp2-1-evaluated",
    "ddp-4-resumed",
    "fsdp2-1-resumed",
    "tp-2",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Run]:
    launches = Launches(run, tmp_path_factory)
    runs = {1: ("ddp-2-m", "ddp-2-shampoo"), 2: (*RUNS, *ORTHOGONALIZED, "zero2-refused")}
    return lambda world, run: launches.get(str(world), runs[world], world, run)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    """Return the parameters after the last step, by model and number of accumulation steps."""
    results = {}
    for of in ("gpt2-1", "gpt2-2", "gpt2-4", "llama-2"):
        kind, accumulation = of.split("-")
        steps = reference.batches(rows(), MICRO_BATCH, int(accumulation), 7)[:STEPS]
        model = build_model(kind == "llama").train()
        trajectory = reference.train(model, steps, settings=SETTINGS, lr_1d=LR_1D)
        results[of] = trajectory[-1]
    return results


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(((found[name] - x).abs().max() / x.abs().max()).item() for name, x in expected.items())


@pytest.mark.parametrize("run", RUNS)
def test_exact_parity(trained, expected, run):
    engine, accumulation, *_ = run.split("-")
    weights = expected[f"{'llama' if engine == 'tp' else 'gpt2'}-{accumulation}"]
    assert worst(trained(2, run).tensors, weights) <= BAR


@pytest.mark.parametrize("run", ORTHOGONALIZED)
def test_exact_matrix_parity(trained, expected, run):
    """The weights equal those of one process, and differ from MARS-AdamW's."""
    found = trained(2, run).tensors
    assert worst(found, trained(1, run.replace("fsdp2", "ddp")).tensors) <= BAR
    matrix = "transformer.h.0.mlp.c_fc.weight"
    assert (found[matrix] - expected["gpt2-2"][matrix]).abs().max() > 0.01 * found[matrix].abs().max()


def test_deepspeed_is_refused(trained):
    assert "is_approx=False under DeepSpeed" in trained(2, "zero2-refused").notes
