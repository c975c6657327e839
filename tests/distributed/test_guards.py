"""Replacing MARS, or giving it unknown tensors, raises on every rank before any step."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launching import Launches, from_all_ranks, import_deepspeed, launch, leave, needs_deepspeed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from train import deepspeed_config, fresh_accelerate, make_trainer
from workload import CASES, Tokens, build_llama, build_model

import mars_hf

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

CASE = CASES["adamw"]
FORCED = {"zero_force_ds_cpu_optimizer": True}  # DeepSpeed's default
# torch_adam, because DeepSpeed would compile its own Adam.
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
DEEPSPEED: dict[str, tuple[str, dict[str, Any]]] = {  # by name: an engine of train.py, and further keys of its JSON
    "zero2_offload_forced": ("zero2_offload", FORCED),
    "zero3_offload_forced": ("zero3_offload", FORCED),
    "fp16": ("zero2", {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}}),
    "bf16": ("zero2", {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}),
    "zero2_json_optimizer": ("zero2", {"optimizer": ADAMW}),
}


def train_with_deepspeed(way: str, config: str, model: nn.Module) -> None:
    import_deepspeed(fp16=True)
    from deepspeed.ops.op_builder import CPUAdamBuilder

    engine, more = DEEPSPEED.get(config, (config, {}))
    zero = {**deepspeed_config(engine, dist.get_world_size()), **more, "gradient_clipping": "auto"}
    half = {config: True} if config in ("fp16", "bf16") else {}
    # DeepSpeed's CPU Adam takes over a minute to compile; this one can be built but not step.
    adam = SimpleNamespace(create_adam=lambda *_: None, destroy_adam=lambda *_: None)
    no_compilation = mock.patch.object(CPUAdamBuilder, "load", lambda _: adam)
    with fresh_accelerate(), tempfile.TemporaryDirectory() as folder, no_compilation:
        # An unused optimizer is noticed without a callback where MARS was registered, or the trainer is MARS's.
        callbacks = [mars_hf.LastGradientCallback()] if way in ("factory", "instance") else []
        make_trainer(way, model, CASE, folder, zero, callbacks, **half).train()


def train_with_autotp(stage: int, *, bf16: bool) -> None:
    """Take a step of a Llama (GPT-2 is not supported there) whose matrices DeepSpeed has divided."""
    deepspeed = import_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": dist.get_world_size()},
        "bf16": {"enabled": bf16},
    }
    model = build_llama()
    mars = CASE.create(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=mars, config=config)
    ids = torch.arange(8)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def run(spec: str, file: Path) -> None:
    """Run one launch that should stop."""
    way, config = spec.split("/")
    model = build_model(CASE)
    error, steps = None, []
    counting = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    try:
        if way == "layout":
            mars, ids = CASE.create(model), Tokens().micro_batch(0, 0, dist.get_rank(), dist.get_world_size())
            LAYOUTS[spec][0](model)(ids, ids)["loss"].backward()
            mars.step()
        elif way == "autotp":
            train_with_autotp(int(config[4]), bf16=config.endswith("bf16"))
        else:
            train_with_deepspeed(way, config, model)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        counting.remove()
    leave(file, from_all_ranks({"error": error, "steps": len(steps)}))


def hang(spec: str, file: Path) -> None:
    """Wait in vain."""
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.barrier()


# --- tests ----------------------------------------------------------------------------------------------------------

DROPPED = r"would step is AdamW, not Mars.*use mars_hf\.MarsTrainer.*a JSON without 'optimizer' section"
REPLACED = r'would step is DeepSpeedCPUAdam, not Mars.*set "zero_force_ds_cpu_optimizer": false'
UNSCALED = r'fp16 under DeepSpeed without ZeRO.*"stage": 1'
SWAPS = {
    # Plain Trainer keeps no instance under DeepSpeed.
    **dict.fromkeys(("instance/zero2", "instance/zero3"), DROPPED),
    **{f"{way}/zero2_json_optimizer": DROPPED for way in ("instance", "factory", "optim", "own", "trainer")},
    **{f"{way}/zero2_offload_forced": REPLACED for way in ("instance", "factory", "optim", "trainer")},
    "factory/zero3_offload_forced": REPLACED,
    **dict.fromkeys(("factory/fp16", "trainer/fp16"), UNSCALED),
}
# Launched last: DeepSpeed keeps the process groups of tensor parallelism.
DIVIDED = dict.fromkeys(
    ("autotp/zero0", "autotp/zero0_bf16", "autotp/zero1"), r"has marked as one part.*ZeRO without AutoTP"
)
KEPT = ("factory/zero3", "optim/zero2", "own/zero3", "trainer/zero2_offload", "trainer/bf16")
LAYOUTS = {  # after create
    "layout/fsdp1": (
        lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
        "FSDP1 has flattened.*use FSDP2",
    ),
    "layout/fsdp2": (
        lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
        "has replaced .* parameters of the model after create.*would not train",
    ),
}
STOPPED = {**SWAPS, **DIVIDED, **{run: message for run, (_, message) in LAYOUTS.items()}}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return each rank's outcome of a run; the first request starts all runs of its kind."""
    launches = Launches(run, tmp_path_factory)

    def get(run: str) -> list[dict[str, Any]]:
        if run in LAYOUTS:
            return launches.get("layouts", list(LAYOUTS), 2, run).notes
        needs_deepspeed()
        return launches.get("deepspeed", [*SWAPS, *KEPT, *DIVIDED], 2, run).notes

    return get


@pytest.mark.parametrize(("run", "message"), STOPPED.items(), ids=STOPPED)
def test_stop_before_the_first_step(outcomes, run, message):
    for outcome in outcomes(run):
        assert re.search(message, outcome["error"])
        assert outcome["steps"] == (message is UNSCALED)  # where DeepSpeed makes states by a step with zeros


@pytest.mark.parametrize("run", KEPT)
def test_remedies_of_guards(outcomes, run):
    for outcome in outcomes(run):
        assert outcome["error"] is None
        assert outcome["steps"] > 0


@pytest.mark.parametrize(
    ("kind", "texts"), [("wait", ["imed out"]), ("limit", ["Timeout (0:00:03)", "test_guards.py"])]
)
def test_hanging_launch(tmp_path, kind, texts):
    """All launches here have these limits, at 60 s and 100 s; the first is the process group's own."""
    launch(hang, tmp_path, ["hang"], 2, **{kind: 3})
    errors = [file.read_text() for file in tmp_path.glob("*.error*")]  # one rank's end may be the other's error
    assert any(all(text in error for text in texts) for error in errors)  # the last one says where it hung
