"""LastGradientCallback: guard a run with Mars, commit its last gradient, log its settings and metrics.

Importing this module gives one to every Trainer made from then on; it does nothing in runs without Mars.
"""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, is_initialized
from transformers.trainer import Trainer
from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.training_args import OptimizerNames, TrainingArguments

from mars_hf import _compat, saved_settings
from mars_hf.optimizer import Mars
from mars_hf.settings import MARS_TYPES, MUON
from mars_hf.summary import line
from mars_hf.training import guard, hub

# Values of `TrainingArguments.optim`, after `register`.
OPTIM_NAMES = {**{rule.replace("-", "_"): rule for rule in MARS_TYPES}, "mars_muon": MUON}
if MUON not in [member.value for member in OptimizerNames]:  # a later transformers may have its own
    OPTIM_NAMES[MUON] = MUON


class LastGradientCallback(TrainerCallback):
    """Make sure that MARS steps and trains the model, commit its last gradient and log four metrics.

    Every Trainer made after `create`, `factory`, `register` or MarsTrainer has one. Passing it also demands that the
    run has a Mars, or the one given. It logs one line about the groups on rank 0, calls `Mars.update_last_grad()` after
    each step, and adds `mars/clip_fraction`, `mars/corrected_norm_ratio`, `mars/grad_cosine` and `mars/update_rms` of
    the step just taken (`metrics.StepMetrics.read` defines them) to every log line with a training loss. Only steps
    that will be logged are measured; with `logging_strategy="epoch"` all.

    Args:
        optimizer: the Mars that must be the one that steps; None accepts any Mars.
        required: False leaves runs alone that neither have a Mars nor ask for one.

    Raises:
        RuntimeError: at train begin, if another optimizer would step, if Mars lacks trainable parameters of the model,
            if trainable adapters of PEFT are merged, or for exact MARS without MarsTrainer. Also before a step, if
            adapters have been merged, or others made active that the optimizer lacks.
    """

    trainer: Trainer | None = None  # where it is a Trainer's first callback

    def __init__(self, optimizer: Mars | None = None, *, required: bool = True) -> None:
        """See the class."""
        self.optimizer = optimizer
        self.required = required
        self._mars: Mars | None = None
        self._active: list[Any] | None = None  # adapters of each layer for which the parameters have been checked

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Find the Mars that will step, check it and log its settings, if the run has one or is to have one."""
        self._mars = None
        made_by = (getattr(self.trainer, "optimizer_cls_and_kwargs", None) or [None])[0]
        asks = {str(getattr(args.optim, "value", args.optim)), type(made_by).__name__} & {*OPTIM_NAMES, "MarsFactory"}
        if self.required or asks or isinstance(guard.innermost(optimizer), Mars):
            self._mars = guard.require_mars(optimizer, self.optimizer)
            self._model = kwargs["model"]
            self._adapted = [
                layer
                for layer in self._model.modules()
                if any(kind.__name__ == "BaseTunerLayer" for kind in type(layer).__mro__)
            ]
            self._active = None
            guard.require_scaled_losses(optimizer)
            guard.require_stale_gradients(self._mars)
            guard.require_one_gradient(self._mars, args)
            self._check_parameters(optimizer)
            # The ranks that accelerate's DistributedDataParallel keeps alike.
            kind = AcceleratorState().distributed_type.name if is_initialized() else "NO"
            if self._mars.process_group is None and kind.startswith("MULTI_") and dist.is_initialized():
                self._mars.process_group = dist.group.WORLD
        warnings = guard.follow_checkpoint(state, optimizer)
        if self._mars is None:
            return
        if self.trainer is not None:
            hub.attach(self.trainer)
        if state.is_world_process_zero:
            _log(
                logging.INFO,
                line(self._mars.param_groups, self._model, (self._mars.created_with or {}).get("mars_type")),
            )
            for warning in warnings:
                _log(logging.WARNING, warning)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Measure this step if it will be logged, and stop the run if its adapters cannot be trained any more."""
        if self._mars is None:
            return
        self._check_parameters(optimizer)
        self._mars.collect_metrics(_will_log(args, state))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Commit the last gradient."""
        if self._mars is not None:
            self._mars.update_last_grad()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Put the metrics of the last step where trackers and the history see them."""
        if self._mars is not None and "loss" in logs:
            metrics = self._mars.pop_metrics()
            logs.update(metrics)
            if state.is_world_process_zero and math.isnan(logs.get("grad_norm", 0)):  # losses are logged without NaN
                _log(
                    logging.WARNING, f"step {state.global_step}: NaN gradients; lower the learning rate, check the data"
                )
            if state.log_history:
                state.log_history[-1].update(metrics)  # Trainer keeps a copy made before the callbacks ran

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write mars.json into a checkpoint of sharded weights, whose folder `save_model` has not made."""
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self._mars is not None and self.trainer is not None and not (folder / saved_settings.FILE).exists():
            hub.save_settings(self.trainer, folder)

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the card and mars.json: Trainer's pushes of checkpoints have no card."""
        if self._mars is not None and self.trainer is not None:
            hub.leave(self.trainer)

    on_train_end = on_push_begin

    def _check_parameters(self, optimizer: Any) -> None:
        """Raise RuntimeError if the optimizer lacks parameters, or adapters are merged; costs microseconds a layer."""
        merged = [
            layer
            for layer in self._adapted
            if layer.merged
            and any(p.requires_grad for name, p in layer.named_parameters() if not name.startswith("base_layer."))
        ]
        if merged:
            names = sorted({name for layer in merged for name in layer.merged_adapters})
            raise RuntimeError(
                f"adapter {', '.join(map(repr, names))} is merged into the base weights of {len(merged)} layers, where "
                "its parameters get no gradients; call unmerge_adapter() before training"
            )
        active = [tuple(layer.active_adapters) for layer in self._adapted]
        if active != self._active:
            guard.require_parameters(optimizer, self._model)
            self._active = active


def attach(trainer: Trainer) -> None:
    """Make one LastGradientCallback the first of a Trainer's: its metrics must reach the trackers among the others."""
    handler = trainer.callback_handler
    callback = next((each for each in handler.callbacks if isinstance(each, LastGradientCallback)), None)
    if callback is None:
        # Noted now, because DeepSpeed drops an instance before training begins.
        callback = LastGradientCallback(required=isinstance(trainer.optimizer, Mars))
    callback.trainer = trainer
    handler.callbacks = [callback, *(other for other in handler.callbacks if other is not callback)]


_compat.call_after(Trainer, "__init__", attach)


def _log(level: int, message: str) -> None:
    """Log a line that shows by default, as transformers' lines do; `logging.getLogger("mars_hf")` decides."""
    logger = logging.getLogger("mars_hf")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.log(level, message)


def _will_log(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that begins now will be logged; as DefaultFlowCallback decides at its end."""
    state = copy.copy(state)
    state.global_step += 1
    control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
    return control.should_log or args.logging_strategy == IntervalStrategy.EPOCH
