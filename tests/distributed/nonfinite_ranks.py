"""Train with MarsTrainer while one rank's data is poisoned; see test_nonfinite_ranks.py.

    torchrun --nproc_per_node 2 nonfinite_ranks.py OUTPUT ENGINE/KIND ...

Each run writes OUTPUT/<run>.json: for each rank the reports, the error (null if there was none) and its steps.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overflow import OneInfinity
from torch import Tensor
from torch.utils.data import Dataset
from train import deepspeed_config, fresh_accelerate, training_arguments, use_fsdp2_on_cpu
from transformers import default_data_collator
from worker import import_deepspeed, main
from workload import ACCUMULATION, CASES, MICRO_BATCH, TinyGPT2, Tokens, build_model

import mars_hf

STEPS = 7
BAD = (3, 4, 5)  # steps, counted from 1


class Poisoned(Dataset):
    """The rows of the run; those of bad steps are poisoned in a micro-batch of the last rank."""

    def __init__(self, kind: str) -> None:
        size = ACCUMULATION * MICRO_BATCH
        poisoned = {step * size - MICRO_BATCH // dist.get_world_size() for step in BAD}
        self._ids = Tokens().ids[: STEPS * size]
        self._kinds = [{"loss": 1, "gradient": 2}[kind] if row in poisoned else 0 for row in range(STEPS * size)]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._ids[index]
        return {"input_ids": ids, "labels": ids, "kind": torch.tensor(self._kinds[index])}


class Model(TinyGPT2):
    """A model that a batch can poison: its loss, or one of its gradients."""

    def forward(self, input_ids: Tensor, labels: Tensor, kind: Tensor) -> dict[str, Tensor]:
        loss = super().forward(input_ids, labels)["loss"]
        if 2 in kind:
            loss = loss + 0 * OneInfinity.apply(self.wide.weight).sum()
        return {"loss": loss + torch.full_like(loss, torch.inf) if 1 in kind else loss}


class Fsdp2Trainer(mars_hf.MarsTrainer):
    """Set up FSDP2 as accelerate does on accelerators; on CPUs accelerate would fall back to DDP."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp2_on_cpu(self.accelerator)
        self.is_fsdp_enabled = True


class Reports(logging.Handler):
    """Collect what the callback logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(engine: str, kind: str) -> dict[str, Any]:
    zero = None
    if engine.startswith("zero"):
        import_deepspeed().init_distributed("gloo")
        zero = {**deepspeed_config(engine, dist.get_world_size()), "gradient_clipping": "auto"}
    torch.manual_seed(0)
    model = Model(build_model(CASES["adamw"]).config)
    reports, logger = Reports(), logging.getLogger("mars_hf.training.nonfinite")
    logger.addHandler(reports)
    outcome: dict[str, Any] = {"reports": reports.lines, "error": None}
    with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        args = training_arguments(
            folder, CASES["adamw"], zero, remove_unused_columns=False, bf16=engine.endswith("bf16")
        )
        args.max_steps = STEPS
        trainer = (Fsdp2Trainer if engine == "fsdp2" else mars_hf.MarsTrainer)(
            model,
            args,
            train_dataset=Poisoned(kind),
            data_collator=default_data_collator,
            optimizers=(CASES["adamw"].create(model), None),
        )
        try:
            trainer.train()
        except mars_hf.NonFiniteError as error:
            outcome["error"] = str(error).replace(folder, "FOLDER")
        wrapped = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModel"}.get(engine, "DeepSpeedEngine")
        if type(trainer.model_wrapped).__name__ != wrapped:
            raise RuntimeError(f"the model is wrapped in {type(trainer.model_wrapped).__name__}, not {wrapped}")
        outcome["step"] = trainer.state.global_step
    logger.removeHandler(reports)
    return outcome


def run(spec: str, file: Path) -> None:
    """Do one run."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, train(*spec.split("/")))
    if dist.get_rank() == 0:
        Path(f"{file}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(run)
