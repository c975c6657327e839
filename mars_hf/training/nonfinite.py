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
from transformers.utils import logging

from mars_hf.distributed.shards import local

logger = logging.get_logger(__name__)

_NAMES_SHOWN = 3


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


class NonFiniteCallback(TrainerCallback):
    """Report non-finite losses and gradients, and stop the run after several bad steps in a row.

    MarsTrainer has one. Pass one to change its patience, or to use it in another transformers.Trainer, where it looks
    at gradients alone. A step is bad if a loss or a gradient is NaN or infinite on any rank. The step has been taken by
    then. Rank 0 logs one line: the step, the losses or norms and the first parameters with a non-finite gradient. No
    checkpoint is written after a bad step, so the older ones stay.

    fp16: while a loss scale is searched for, a non-finite gradient of a finite loss does not count.

    Args:
        patience: number of bad steps in a row, >= 1, after which the run stops.

    Raises:
        ValueError: a patience below 1.
        NonFiniteError: in training, on every rank, after `patience` bad steps in a row; names the newest checkpoint.
    """

    def __init__(self, patience: int = 3) -> None:
        """See the class."""
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience={patience!r}: give the number of bad steps in a row that stop a run, >= 1")
        self.patience = patience
        self._bad_in_a_row = 0
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def watch_loss(self, loss: Tensor) -> None:
        """Look at the loss of a micro-batch when the step has been taken; MarsTrainer calls this."""
        self._losses.append(local(loss.detach()))

    def watch_norm(self, norm: Tensor | float) -> None:
        """Look at a norm of gradients when the step has been taken; MarsTrainer calls this."""
        self._norms.append(local(torch.as_tensor(norm)))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count from zero."""
        self._bad_in_a_row = 0
        self._losses, self._norms = [], []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Take the largest gradient, unless the Trainer has handed over a norm."""
        if not self._norms:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [local(param.grad) for param in params if param.grad is not None]
            self.watch_norm(nn.utils.get_total_norm([grad for grad in grads if grad.numel()], torch.inf))

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Report a bad step while its gradients are there, and raise NonFiniteError after too many."""
        losses, norms = self._losses, self._norms
        self._losses, self._norms = [], []
        was_skipped = getattr(optimizer, "step_was_skipped", False)  # by a gradient scaler, or by DeepSpeed
        if _is_searching_scale(args, optimizer):
            norms, was_skipped = [], False
        flags = [torch.isfinite(value).to(args.device) for value in (*losses, *norms)]
        is_bad = torch.tensor(was_skipped, device=args.device)
        if flags:
            is_bad = is_bad | ~torch.stack(flags).all()
        if not _any_rank(is_bad):
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        report = f"step {state.global_step + 1}: non-finite {_describe(losses, norms, model, optimizer)}"
        if state.is_world_process_zero:
            logger.warning(f"{report} ({self._bad_in_a_row} in a row, the run stops at {self.patience})")
        if self._bad_in_a_row >= self.patience:
            folder = Path(str(args.output_dir))
            checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
            raise NonFiniteError(
                f"{self._bad_in_a_row} steps in a row with a non-finite loss or gradient; the last: {report}. "
                + (f"Resume from {checkpoint}" if checkpoint else f"{folder} has no checkpoint: start again")
                + " with a lower learning rate or other data"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Turn down a checkpoint after a bad step."""
        if control.should_save and self._bad_in_a_row:
            control.should_save = False
            if state.is_world_process_zero:
                logger.warning(f"checkpoint-{state.global_step} is not written: the last step was not finite")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Turn down a checkpoint after a bad step."""
        self.on_step_end(args, state, control, **kwargs)


def _is_searching_scale(args: TrainingArguments, optimizer: Any) -> bool:
    """Return whether a loss scale answers for non-finite gradients; DeepSpeed stops by itself at its smallest one."""
    scaler = getattr(optimizer, "scaler", None)
    return args.fp16 if scaler is None else scaler.is_enabled() and scaler.get_scale() >= 1


def _any_rank(flag: Tensor) -> bool:
    """Return whether a flag is set on any rank; waits for the device."""
    if dist.is_available() and dist.is_initialized():
        flag = flag.to(torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _describe(losses: list[Tensor], norms: list[Tensor], model: nn.Module, optimizer: Any) -> str:
    """Return in words what the ranks have found; every rank calls this."""
    values = [("loss", loss.item()) for loss in losses] + [("gradient norm", norm.item()) for norm in norms]
    texts = [f"{name} {value:g}" for name, value in values if not abs(value) < float("inf")]
    names = [
        name
        for name, param in model.named_parameters()
        # MarsTrainer lets the step move gradients into the state.
        for grad in (param.grad, optimizer.state.get(param, {}).get("last_grad"))
        if grad is not None and not torch.isfinite(local(grad)).all()
    ]
    found = gather_object([(texts, names)])
    texts = list(dict.fromkeys(text for rank_texts, _ in found for text in rank_texts))
    names = list(dict.fromkeys(name for _, rank_names in found for name in rank_names))
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return ", ".join(texts or ["gradient"]) + (f" in {len(names)} parameters: {shown}" if names else "")
