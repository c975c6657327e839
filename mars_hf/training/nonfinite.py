"""Report non-finite losses and gradients, keep them away from the weights, and stop a run that gives nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from mars_hf import _compat
from mars_hf.distributed import dtensors
from mars_hf.optimizer import Mars
from mars_hf.training import finite, guard
from mars_hf.training.good_checkpoints import newest_good
from mars_hf.training.guard import innermost
from mars_hf.training.random_state import RandomState
from mars_hf.training.snapshots import attribute_set, keep_buffers

logger = logging.get_logger(__name__)

MODES = ("stop", "skip", "ignore")
# accelerate's engines whose clipping is not torch's.
_CLIP_THEMSELVES = ("DEEPSPEED", "XLA", "MEGATRON_LM")


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


class NonFiniteCallback(TrainerCallback):
    """Report non-finite losses and gradients, and stop the run after several in a row.

    MarsTrainer has one with these defaults; pass one to change them, or to any other transformers.Trainer. A step is
    bad if the loss of a micro-batch or a gradient is NaN or infinite, on any rank. Each bad step is reported at once,
    in one line on rank 0: the step, the losses and their ranks, and the first parameters with a non-finite gradient.

    | `on_nonfinite` | a bad step | after `patience` bad steps in a row |
    | --- | --- | --- |
    | `"stop"` | changes neither weights, states nor buffers; it counts, and the schedule goes on | NonFiniteError |
    | `"skip"` | is as if its batches had not been in the data | NonFiniteError |
    | `"ignore"` | is taken, as without this callback | training goes on |

    With `"skip"` schedule, gradient scaler and random state are also those of a run without the step's batches, and so
    is the logged loss. `global_step` still counts it: it says where in the data a resumed run begins.

    A log line with a bad loss shows it: `loss` is NaN or infinite, whatever `logging_nan_inf_filter` says. With
    `"skip"` it is the mean of the other steps, NaN if there are none. `nonfinite_steps` is the number of bad steps.

    A checkpoint is written only if all weights and buffers are finite and the last step was good. One that falls due at
    a bad step is written after the next good one. So older checkpoints stay, `save_total_limit` included.

    With a gradient scaler (fp16) a non-finite gradient of a finite loss belongs to the search for the scale and does
    not count, unless the scale is 1 or less. DeepSpeed's engine steps before callbacks run: bad steps are reported
    after it, and it leaves those with a non-finite gradient out by its own check.

    Args:
        on_nonfinite: `"stop"`, `"skip"` or `"ignore"`.
        patience: number of bad steps in a row, >= 1, after which the run stops.

    Raises:
        ValueError: an unknown mode or a patience below 1; at train begin, `"skip"` under DeepSpeed whose own check is
            off.
        NonFiniteError: in training, after `patience` bad steps in a row; the message names the newest good checkpoint.
            Under DeepSpeed also if its engine takes a step that `"skip"` should have left out.
    """

    def __init__(self, on_nonfinite: str = "stop", patience: int = 3) -> None:
        """See the class."""
        if on_nonfinite not in MODES:
            raise ValueError(f"on_nonfinite={on_nonfinite!r} is unknown; accepted: {', '.join(MODES)}")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience={patience!r}: give the number of bad steps in a row that stop a run, >= 1")
        self.on_nonfinite = on_nonfinite
        self.patience = patience
        self._trainer: Any = None
        self._engine: Any = None  # DeepSpeed's
        self._hooks = contextlib.ExitStack()
        self._restore_buffers: Callable[[], None] | None = None

    # --- the run -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Watch the losses, norms, log lines and checkpoints of the Trainer that begins to train."""
        self.detach()
        trainer = guard.calling_trainer()
        if trainer is None:
            raise RuntimeError("NonFiniteCallback watches a transformers.Trainer, and none is training")
        self._trainer = trainer
        self._engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
        if self._engine is not None and self.on_nonfinite == "skip":
            _require_own_check(trainer)
        model: Any = trainer.model
        self._modules = [module for module in model.modules() if _compat.own_buffers(module)]
        self._in_a_row = 0
        self._bad_in_line, self._bad_in_run = _Tally(), _Tally()
        self._save_is_due = False
        self._may_save: tuple[int, bool] | None = None
        self._begin_step()
        for holder, name, made in (
            (trainer, "training_step", self._watch_losses),
            (trainer.accelerator, "clip_grad_norm_", self._watch_clipping),
            (trainer, _compat.CLIPS_SEVERAL_MESHES, self._watch_clipping_of_meshes),
            (trainer, "log", self._show_losses),
            (trainer, _compat.SAVES_CHECKPOINT, self._keep_checkpoints),
        ):
            if hasattr(holder, name):
                self._hooks.enter_context(attribute_set(holder, name, made(getattr(holder, name))))

    def detach(self) -> None:
        """Leave the Trainer as it was; for whoever ends a run before its end."""
        self._hooks.close()
        mars = innermost(getattr(self._trainer, "optimizer", None))
        if isinstance(mars, Mars):
            mars.refuses = None
        self._trainer = self._restore_buffers = None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the Trainer as it was."""
        self.detach()

    # --- one step ----------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._is_decided = self._is_bad = self._is_left_out = False
        self._restore_buffers = None
        self._random_state: RandomState | None = None
        self._loss_before: Tensor | None = None
        self._scaler_before: dict[str, Any] | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep what a bad step must not change."""
        self._begin_step()
        if self._bad_in_line.begin is None:  # not at train begin, where other callbacks may still set what was logged
            self._bad_in_line.begin, self._bad_in_run.begin = _compat.losses_since(self._trainer)
        if self.on_nonfinite == "ignore":
            return
        self._restore_buffers = keep_buffers(self._modules, counters=False)
        if self.on_nonfinite == "skip":
            self._random_state = RandomState.capture(args.device)
            losses = _compat.loss_sum(self._trainer)
            self._loss_before = None if losses is None else losses.clone()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Decide whether the step is bad, or have Mars ask for it once it has the norm; drop bad gradients."""
        mars = innermost(optimizer)
        if not self._is_decided:
            if self._engine is None and isinstance(mars, Mars) and mars.max_grad_norm is not None:
                mars.refuses = self._refuses
                return
            self._decide(self._norm if self._norm is not None else finite.total_norm(self._params()))
        if self._is_left_out and self._engine is None:
            scaler = self._trainer.accelerator.scaler
            if scaler is not None and self.on_nonfinite == "skip":
                self._scaler_before = scaler.state_dict()
            for param in self._params():
                param.grad = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Undo what else a step that is left out has changed."""
        mars = innermost(optimizer)
        if isinstance(mars, Mars):
            mars.refuses = None
        if not self._is_decided:  # no parameter had a gradient
            self._decide(None)
        if not self._is_left_out:
            return
        if self._restore_buffers is not None:
            self._restore_buffers()
        if self.on_nonfinite != "skip":
            return
        _compat.mark_step_skipped(optimizer, True)
        if self._scaler_before is not None:
            self._trainer.accelerator.scaler.load_state_dict(self._scaler_before)
        if self._random_state is not None:
            self._random_state.restore()
        losses = _compat.loss_sum(self._trainer)
        if losses is not None and self._loss_before is not None:
            losses.copy_(self._loss_before)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Stop after too many bad steps, and put off a checkpoint that falls due at a bad one."""
        mars = innermost(optimizer)
        if self._is_left_out and self._engine is None and isinstance(mars, Mars):
            mars.leave_step_out()
        if self._is_left_out and self._engine is None and self._trainer.accelerator.scaler is None:
            _compat.mark_step_skipped(optimizer, False)
        if self._is_bad and self.on_nonfinite != "ignore" and self._in_a_row >= self.patience:
            self._stop(args, state)
        if self._save_is_due and not self._is_bad:
            control.should_save = True
        self._hold_back(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Put off a checkpoint that falls due after a bad step."""
        self._hold_back(args, state, control)

    # --- the verdict -------------------------------------------------------------------------------------------------

    def _refuses(self, norm: Tensor) -> bool:
        """Answer a Mars that is about to step."""
        self._decide(norm)
        return self._is_left_out

    def _decide(self, norm: Tensor | None) -> None:
        """Find out, alike on every rank, whether the step is bad; report it if it is."""
        self._is_decided = True
        norms = [own for own in (norm, getattr(self._trainer, "stale_grad_norm", None)) if own is not None]
        if not finite.any_nonfinite([*self._losses, *norms], self._trainer.args.device):
            self._in_a_row = 0
            return
        # A norm may also overflow where all gradients are finite, so it does not decide by itself.
        gone = norms if self._engine is not None else []
        found = finite.from_all_ranks(finite.look(self._losses, self._gradients(), gone))
        if self._is_searching_scale():
            found = [replace(one, bad=0, norms=()) for one in found]
        self._is_bad = any(found)
        if not self._is_bad:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._engine is not None:
            self._is_left_out = not self._engine.was_step_applied()
        else:
            self._is_left_out = self.on_nonfinite != "ignore"
        left_out = self._is_left_out and self.on_nonfinite == "skip"
        for tally in (self._bad_in_line, self._bad_in_run):
            tally.add(found, left_out=left_out)
        self._report(finite.describe(found))
        if self.on_nonfinite == "skip" and not left_out:
            self._stop_at_taken_step()

    def _is_searching_scale(self) -> bool:
        """Return whether a gradient scaler answers for non-finite gradients."""
        if self._engine is not None:
            return bool(self._engine.fp16_enabled())
        scaler = self._trainer.accelerator.scaler
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield gradients with the names of their parameters, stale ones included."""
        names: dict[Tensor, str] = {param: name for name, param in self._trainer.model.named_parameters()}
        mars = innermost(self._trainer.optimizer)
        exact = isinstance(mars, Mars) and mars.is_exact
        for index, param in enumerate(self._params()):
            name = names.get(param, f"parameter {index}")
            if param.grad is not None:
                yield name, param.grad
            if exact and "last_grad" in mars.state.get(param, ()):
                yield f"{name} (stale)", mars.state[param]["last_grad"]

    def _params(self) -> list[Tensor]:
        """Return the parameters of the model and of the optimizer, each once."""
        groups = self._trainer.optimizer.param_groups
        own = [*self._trainer.model.parameters(), *(param for group in groups for param in group["params"])]
        return list(dict.fromkeys(own))

    def _report(self, what: str) -> None:
        """Say on rank 0 what was found and what is done about it."""
        step = self._trainer.state.global_step + 1
        self._last_report = f"step {step}: non-finite {what}"
        if self._trainer.state.is_world_process_zero:
            done = "left out" if self._is_left_out else "taken"
            limit = "" if self.on_nonfinite == "ignore" else f", the run stops at {self.patience}"
            logger.warning(f"{self._last_report}. The step is {done} ({self._in_a_row} in a row{limit})")

    def _stop(self, args: TrainingArguments, state: TrainerState) -> None:
        folder = Path(str(args.output_dir))
        good = finite.from_rank_zero(lambda: newest_good(folder))
        first = state.global_step - self._in_a_row + 1
        if good is not None:
            remedy = f"The newest good checkpoint is {good}: resume from it with a lower learning rate or other data"
        elif first == 1:
            remedy = "The first step was bad already: check the data and the model's weights"
        else:
            remedy = f"{folder} has no good checkpoint: set save_strategy='steps' and save_steps below {first}"
        self.detach()
        raise NonFiniteError(
            f"{self._in_a_row} steps in a row with a non-finite loss or gradient (on_nonfinite={self.on_nonfinite!r}); "
            f"the last: {self._last_report}. {remedy}"
        )

    def _stop_at_taken_step(self) -> None:
        self.detach()
        raise NonFiniteError(
            f"on_nonfinite='skip', but DeepSpeed has taken {self._last_report}. Its own check leaves out steps with a "
            "non-finite gradient only; use on_nonfinite='stop', or DDP or FSDP2"
        )

    # --- what the Trainer does ---------------------------------------------------------------------------------------

    def _watch_losses(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            if not getattr(self._trainer, "in_stale_pass", False):
                self._losses.append(loss.detach())
            return loss

        return watched

    def _watch_clipping(self, clip_grad_norm_: Callable[..., Any]) -> Callable[..., Any]:
        accelerator = self._trainer.accelerator

        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            """Decide between taking the norm and scaling by it, which spreads NaN over all gradients."""
            params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._is_decided or args or kwargs or not _clips_like_torch(accelerator, params):
                norm = clip_grad_norm_(params, max_norm, *args, **kwargs)
                if self._engine is not None and norm is not None:
                    self._norm = torch.as_tensor(norm)
                return norm
            accelerator.unscale_gradients()
            found: Any = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
            self._decide(found.full_tensor() if dtensors.is_dtensor(found) else found)
            if not self._is_left_out:
                nn.utils.clip_grads_with_norm_(params, max_norm, found)
            return found

        return clip

    def _watch_clipping_of_meshes(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Do the same for gradients on several meshes, which Trainer clips without accelerate."""

        def watched(model: nn.Module, max_norm: float) -> Any:
            if not self._is_decided:
                norm = finite.total_norm(model.parameters())
                self._decide(norm)
                if self._is_left_out:
                    return norm
            return clip(model, max_norm)

        return watched

    def _show_losses(self, log: Callable[..., None]) -> Callable[..., None]:
        def shown(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if not getattr(self._trainer, "in_stale_pass", False):
                step = self._trainer.state.global_step
                if "loss" in logs:
                    self._bad_in_line.correct(logs, "loss", step)
                    self._bad_in_line = _Tally(step)
                    losses = _compat.loss_sum(self._trainer)
                    if losses is not None:  # Trainer subtracts it from itself, which leaves NaN as it is
                        losses.nan_to_num_(0.0, 0.0, 0.0)
                if "train_loss" in logs:
                    self._bad_in_run.correct(logs, "train_loss", step)
            log(logs, *args, **kwargs)

        return shown

    def _keep_checkpoints(self, save_checkpoint: Callable[..., None]) -> Callable[..., None]:
        def save(*args: Any, **kwargs: Any) -> None:
            if self._is_worth_saving(self._trainer.args, self._trainer.state):
                self._save_is_due = False
                save_checkpoint(*args, **kwargs)

        return save

    def _hold_back(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Turn down a checkpoint that would be poisoned."""
        if control.should_save and not self._is_worth_saving(args, state):
            control.should_save = False
            self._save_is_due = self._is_bad

    def _is_worth_saving(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return whether the last step was good and the weights are finite; one line on rank 0 if not."""
        if self._may_save is not None and self._may_save[0] == state.global_step:
            return self._may_save[1]
        reason = "the last step was not finite; the next good step makes up for it" if self._is_bad else None
        if reason is None:
            names = finite.nonfinite_weights(self._trainer.model)
            if finite.any_rank(torch.tensor(bool(names), device=args.device)):
                more = ", ..." if len(names) > 1 else ""
                reason = f"weights are not finite ({names[0]}{more})" if names else "weights are not finite"
        if reason is not None and state.is_world_process_zero:
            logger.warning(f"checkpoint-{state.global_step} is not written: {reason}. Older checkpoints are kept")
        self._may_save = (state.global_step, reason is None)
        return reason is None


class _Tally:
    """Count the bad steps of a stretch of training, for its log line."""

    def __init__(self, begin: int | None = None) -> None:
        self.begin = begin
        self._bad = self._left_out = 0
        self._losses: list[float] = []

    def add(self, found: Sequence[finite.Found], *, left_out: bool) -> None:
        """Count a step; one that is left out does not count in the mean."""
        self._bad += 1
        self._left_out += left_out
        if not left_out:
            self._losses += [loss for one in found for loss in one.losses]

    def correct(self, logs: dict[str, float], key: str, end: int) -> None:
        """Make the mean loss of a log line that of the steps that count, and show what was not finite."""
        if not self._bad:
            return
        logs["nonfinite_steps"] = self._bad
        steps = end - (self.begin or 0)
        if self._left_out:
            counted = steps - self._left_out
            logs[key] = logs[key] * steps / counted if counted else float("nan")
        if self._losses:
            logs[key] = sum(self._losses)  # infinite, or NaN


def _clips_like_torch(accelerator: Any, params: Sequence[Tensor]) -> bool:
    """Return whether accelerate clips these gradients by torch.nn.utils.clip_grad_norm_."""
    if accelerator.distributed_type.name in _CLIP_THEMSELVES:
        return False
    if accelerator.distributed_type.name == "FSDP" and not accelerator.is_fsdp2:
        return False
    meshes = {getattr(param.grad, "device_mesh", None) for param in params if param.grad is not None}
    return len(meshes) == 1


def _require_own_check(trainer: Any) -> None:
    """Raise ValueError if DeepSpeed does not look for non-finite gradients before it steps."""
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    if config.get("bf16", {}).get("check_grad_overflow") is False:
        raise ValueError(
            "on_nonfinite='skip' under DeepSpeed with \"check_grad_overflow\": false: its engine steps by itself and "
            'would take bad steps; set "bf16": {"check_grad_overflow": true} in its JSON, or on_nonfinite=\'stop\''
        )
