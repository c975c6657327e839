"""Train with MarsTrainer while one rank's data is poisoned; see test_nonfinite_ranks.py.

    torchrun --nproc_per_node 2 nonfinite_ranks.py OUTPUT ENGINE/CASE/MODE/KIND ...

Each run trains twice, with the poisoned steps and without their batches, and writes OUTPUT/<run>.json: for each rank
the reports, the error (null if there was none) and the steps it had taken, and what differs between the trainings.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overflow import OneInfinity, Snapshot, differing
from torch import Tensor
from torch.utils.data import Dataset
from train import deepspeed_config, fresh_accelerate, training_arguments, use_fsdp2_on_cpu
from transformers import default_data_collator
from worker import import_deepspeed, main
from workload import ACCUMULATION, CASES, MICRO_BATCH, TinyGPT2, Tokens, build_model

import mars_hf
from mars_hf.distributed import dtensors
from mars_hf.training.guard import innermost

STEPS = 7
BAD = (2, 4)  # steps
MANY = (2, 3, 4)


class Poisoned(Dataset):
    """The rows of the run; those of bad steps are poisoned in a micro-batch of the last rank, or left out."""

    def __init__(self, bad: tuple[int, ...], kind: str, *, left_out: bool) -> None:
        size = ACCUMULATION * MICRO_BATCH
        own = MICRO_BATCH // dist.get_world_size()
        poisoned = {step * size + MICRO_BATCH - own for step in bad}
        rows = [row for row in range(STEPS * size) if not left_out or row // size not in bad]
        kinds = [{"loss": 1, "gradient": 2, "both": 3}[kind] if row in poisoned else 0 for row in rows]
        self._ids, self._kinds = Tokens().ids[rows], kinds

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._ids[index]
        return {"input_ids": ids, "labels": ids, "kind": torch.tensor(self._kinds[index])}


class Model(TinyGPT2):
    """A model that a batch can poison: its loss, one of its gradients, or all of them."""

    def forward(self, input_ids: Tensor, labels: Tensor, kind: Tensor) -> dict[str, Tensor]:
        kinds = set(kind.tolist())
        loss = super().forward(input_ids, labels)["loss"]
        if 2 in kinds:
            loss = loss + 0 * OneInfinity.apply(self.wide.weight).sum()
        if 1 in kinds:
            loss = loss + torch.full_like(loss, torch.inf)
        return {"loss": loss * torch.nan if 3 in kinds else loss}


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


def snapshot(trainer: Any) -> Snapshot:
    mars = innermost(trainer.optimizer)
    tensors: dict[str, Any] = {}
    for name, param in trainer.model.named_parameters():
        tensors[f"param.{name}"] = getattr(param, "ds_tensor", param)
    for i, param in enumerate(param for group in mars.param_groups for param in group["params"]):
        tensors[f"optimized.{i}"] = param
        tensors |= {f"{key}.{i}": value for key, value in mars.state.get(param, {}).items()}
    found = {name: dtensors.local(tensor.detach()).clone() for name, tensor in tensors.items()}
    rates = torch.tensor([group["lr"] for group in mars.param_groups], dtype=torch.float64)
    return {**found, "rates": rates, "random": torch.get_rng_state()}


def train(engine: str, case: str, mode: str, kind: str, *, left_out: bool) -> tuple[Snapshot, dict[str, Any]]:
    bad = MANY if mode == "stop" else BAD
    zero = None
    if engine.startswith("zero"):
        import_deepspeed().init_distributed("gloo")
        zero = {**deepspeed_config(engine, dist.get_world_size()), "gradient_clipping": "auto"}
    form, exact, _ = case.partition("-exact")
    torch.manual_seed(0)
    model = Model(build_model(CASES[form]).config)
    settings = {**CASES[form].hyperparameters(), "is_approx": not exact}
    reports, logger = Reports(), logging.getLogger("mars_hf.training.nonfinite")
    logger.addHandler(reports)
    found: dict[str, Any] = {"reports": reports.lines, "error": None}
    with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, CASES[form], zero, remove_unused_columns=False, bf16="bf16" in engine)
        args.max_steps = STEPS - len(bad) * left_out
        args.lr_scheduler_type, args.warmup_steps = type(args.lr_scheduler_type)("inverse_sqrt"), 2
        trainer = (Fsdp2Trainer if engine == "fsdp2" else mars_hf.MarsTrainer)(
            model,
            args,
            train_dataset=Poisoned(bad, kind, left_out=left_out),
            data_collator=default_data_collator,
            optimizers=(mars_hf.create(model, **settings), None),
            callbacks=[mars_hf.NonFiniteCallback(mode)],
        )
        try:
            trainer.train()
        except (mars_hf.NonFiniteError, ValueError) as error:
            found["error"] = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
        wrapped = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModel"}.get(engine, "DeepSpeedEngine")
        if type(trainer.model_wrapped).__name__ != wrapped:
            raise RuntimeError(f"the model is wrapped in {type(trainer.model_wrapped).__name__}, not {wrapped}")
        found["step"] = trainer.state.global_step
        found["finite"] = all(torch.isfinite(param).all().item() for param in model.parameters())
        end = snapshot(trainer)
    logger.removeHandler(reports)
    return end, found


def run(spec: str, file: Path) -> None:
    """Do one run: a training with bad steps, and one without them."""
    poisoned, found = train(*spec.split("/"), left_out=False)
    clean, _ = train(*spec.split("/"), left_out=True)
    different = differing(poisoned, clean)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        Path(f"{file}.json").write_text(json.dumps({"ranks": everywhere, "different": different}))


if __name__ == "__main__":
    main(run)
