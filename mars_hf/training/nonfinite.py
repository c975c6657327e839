"""Report non-finite losses and gradients, and stop a run that gives nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import TrainingArguments

from mars_hf import log
from mars_hf.distributed.tensors import local
from mars_hf.training.guard import unwrap_optimizer


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


class NonFiniteCallback(TrainerCallback):
    """Report non-finite losses and gradients, and stop the run after several bad steps in a row.

    MarsTrainer has one. Pass one to change its patience, or to use it in another transformers.Trainer, where it looks
    at gradients alone. A step is bad if a loss or a gradient is NaN or infinite on any rank. The step has been taken by
    then. Rank 0 logs one line: the step, and the losses or norms of all ranks. No checkpoint is written after a bad
    step, so the older ones stay.

    fp16: while a loss scale is searched for, a non-finite gradient of a finite loss does not count.

    Args:
        patience: number of bad steps in a row, >= 1, after which the run stops.

    Raises:
        ValueError: a patience below 1.
        NonFiniteError: in training, on every rank, after `patience` bad steps in a row; names the newest checkpoint.
    """

    def __init__(self, patience: int = 3) -> None:
        """See the class."""
        if type(patience) is not int or patience < 1:
            raise ValueError(f"patience={patience!r}: give the number of bad steps in a row that stop a run, >= 1")
        self.patience = patience
        self._bad_in_a_row = 0
        self._values: list[tuple[str, Tensor]] = []

    def watch(self, name: str, value: Tensor | float) -> None:
        """Look at a "loss" or "gradient norm" when the step has been taken; MarsTrainer calls this."""
        self._values.append((name, local(torch.as_tensor(value).detach())))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Count from zero, and have released gradients looked at."""
        self._bad_in_a_row, self._values = 0, []
        release = getattr(unwrap_optimizer(optimizer), "_release", None)
        if release is not None:
            release.largest = []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Take the largest gradient, unless the Trainer has handed over a norm."""
        has_norm = any(name == "gradient norm" for name, _ in self._values)
        if not has_norm:
            self.watch("gradient norm", _largest_gradient(optimizer))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Report a bad step, and raise NonFiniteError after too many."""
        values, self._values = self._values, []
        was_skipped = getattr(optimizer, "step_was_skipped", False)  # by a gradient scaler, or by DeepSpeed
        if _is_searching_scale(args, optimizer):
            values = [(name, value) for name, value in values if name == "loss"]
            was_skipped = False
        if not _is_bad_on_any_rank(values, was_skipped, args.device):
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        bad = gather_object([f"{name} {value.item():g}" for name, value in values if not torch.isfinite(value)])
        each_once = list(dict.fromkeys(bad)) or ["gradient"]
        report = f"step {state.global_step + 1}: non-finite {', '.join(each_once)}"
        if state.is_world_process_zero:
            log.warning(f"{report} ({self._bad_in_a_row} in a row, the run stops at {self.patience})")
        if self._bad_in_a_row >= self.patience:
            raise NonFiniteError(
                f"{self._bad_in_a_row} steps in a row with a non-finite loss or gradient; the last: {report}. "
                f"{_advice(Path(str(args.output_dir)))}"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Turn down a checkpoint after a bad step."""
        if control.should_save and self._bad_in_a_row:
            control.should_save = False
            if state.is_world_process_zero:
                log.warning(f"checkpoint-{state.global_step} is not written: the last step was not finite")

    on_epoch_end = on_step_end


def _largest_gradient(optimizer: Any) -> Tensor:
    """Return the largest absolute value in all gradients of this rank, released ones too."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [local(param.grad) for param in params if param.grad is not None]
    release = getattr(unwrap_optimizer(optimizer), "_release", None)
    if release is not None:
        grads += release.largest or []
    return nn.utils.get_total_norm([grad for grad in grads if grad.numel()], torch.inf)


def _is_searching_scale(args: TrainingArguments, optimizer: Any) -> bool:
    """Return whether a loss scale is searched for, so that gradients may overflow."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None:
        return args.fp16  # of DeepSpeed, which stops by itself at its smallest scale
    return scaler.is_enabled() and scaler.get_scale() >= 1


def _is_bad_on_any_rank(values: list[tuple[str, Tensor]], was_skipped: bool, device: torch.device) -> bool:
    flags = [torch.tensor(was_skipped, device=device)]
    flags += [~torch.isfinite(value).to(device) for _, value in values]
    is_bad = torch.stack(flags).any().int()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
    return bool(is_bad.item())


def _advice(folder: Path) -> str:
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if checkpoint is None:
        return f"{folder} has no checkpoint: start again with a lower learning rate or other data"
    return (
        f"For a lower learning rate, start a new run from the weights in {checkpoint} (resuming keeps its rate); with "
        "other data, resume from it"
    )
