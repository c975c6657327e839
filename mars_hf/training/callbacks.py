"""Trainer callbacks: guard the run, commit the last gradient, log what MARS does.

Importing this module adds one callback to transformers' DEFAULT_CALLBACKS, which is inert without Mars. Trainer calls
its default callbacks before its reporters and a user's callbacks after them, so this is the one place from which
metrics reach every tracker. `import mars_hf` imports it as soon as transformers.trainer is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import trainer as transformers_trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from mars_hf.groups import saved_settings
from mars_hf.optimizer import Mars
from mars_hf.training import announcement, guard, hub
from mars_hf.training import provenance as origins
from mars_hf.training.adapter_watch import AdapterWatch
from mars_hf.training.guard import innermost

logger = logging.get_logger(__name__)


class LastGradientCallback(TrainerCallback):
    """Make sure that MARS steps and trains the model, commit its last gradient and log four metrics.

    Every Trainer that steps a Mars has it by itself, as one of transformers' default callbacks. Passing it also demands
    that the run has a Mars, or the one given.

    - At train begin it walks down to the optimizer that will step and raises if that is not Mars, if it lacks trainable
      parameters of the model, if trainable adapters of PEFT are merged, or if it is an exact Mars (`is_approx=False`)
      in a Trainer that takes no stale gradients. Then it logs one line on rank 0: rule, groups, learning rates, betas,
      and which settings are MARS's defaults.
    - Before each step it raises if adapters have been merged, or others made active that the optimizer lacks.
    - After each optimizer step it calls `Mars.update_last_grad()` (nothing to do in approx mode).
    - On every log line with a training loss it adds `mars/clip_fraction`, `mars/corrected_norm_ratio`,
      `mars/grad_cosine` and `mars/update_rms` of the step just taken (`metrics.StepMetrics.read` defines them). They
      reach the console, `state.log_history` and every tracker of `report_to`. They are measured on the steps that will
      be logged only, and the device is waited for on those only; with `logging_strategy="epoch"` each step is measured,
      since its last one is not known beforehand.

    Args:
        optimizer: the Mars that must be the one that steps; None accepts any Mars.

    Raises:
        RuntimeError: at train begin, when another optimizer would step, parameters are missing, or exact MARS without
            MarsTrainer; the message says how to mend it.
    """

    _ahead_of_reporters = False

    def __init__(self, optimizer: Mars | None = None) -> None:
        """See the class."""
        self._given = optimizer
        self._mars: Mars | None = None
        self._adapters: AdapterWatch | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Find the Mars that will step and introduce it, or raise."""
        self._mars = guard.require_mars(optimizer, self._given)
        if not _has_default_callback(guard.calling_trainer()):  # which has come before
            self._adapters = _begin(self._mars, args, state, model, optimizer, lr_scheduler)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure this step if it will be logged, and stop the run if its adapters cannot be trained any more."""
        if self._mars is not None:
            if self._adapters is not None:
                self._adapters.check(self._mars)
            self._mars.collect_metrics(_will_log(args, state))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Commit the last gradient."""
        if self._mars is not None:
            self._mars.update_last_grad()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Put the metrics where printers and the history see them, and reporters if they come after this callback.

        DefaultMarsCallback does it ahead of them, unless the Trainer was made before this module was imported.
        """
        if _merge_metrics(optimizer, logs, state) and not self._ahead_of_reporters:
            logger.warning_once(
                "LastGradientCallback was imported after the Trainer was made: its metrics are in state.log_history "
                "but trackers do not see them. Pass it as Trainer(callbacks=[mars_hf.LastGradientCallback()])."
            )


class DefaultMarsCallback(LastGradientCallback):
    """What every Trainer runs once this module is imported: inert unless the run is to step a Mars.

    It does all of LastGradientCallback's work in runs that step a Mars. It stops runs that were given a Mars, or asked
    for one by factory or by name (`optim="mars_adamw"`), and would step another optimizer, and runs in which another
    optimizer resumes from a checkpoint of MARS. It leaves a model card in the output folder and mars.json wherever the
    Trainer saves weights.
    """

    _ahead_of_reporters = True

    def __init__(self) -> None:
        """Nothing is known yet."""
        super().__init__()
        self._has_instance = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Note an instance: DeepSpeed drops it before training begins."""
        self._has_instance = isinstance(optimizer, Mars)
        if isinstance(optimizer, Mars):
            origins.remember(optimizer)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Guard and introduce the Mars that will step, if the run has one or is to have one."""
        if self._has_instance or _asks_for_mars(args, guard.calling_trainer()):
            self._mars = guard.require_mars(optimizer, None)
        else:
            self._mars = innermost(optimizer) if isinstance(innermost(optimizer), Mars) else None
        if self._mars is not None:
            self._adapters = _begin(self._mars, args, state, model, optimizer, lr_scheduler)
            self._do(hub.attach)
            guard.mark_checkpoints(state, self._mars)
        else:
            guard.refuse_mars_checkpoint(state, optimizer)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write mars.json into a checkpoint of sharded weights, whose folder `save_model` has not made."""
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not (folder / saved_settings.FILE).exists():
            self._do(hub.save_settings, folder)

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write what a push is to include: Trainer's pushes of checkpoints have no card."""
        self._do(hub.leave)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the card and mars.json."""
        self._do(hub.leave)

    def _do(self, work: Callable[..., None], *given: Any) -> None:
        """Call a function on the Trainer of a run with Mars."""
        trainer = guard.calling_trainer() if self._mars is not None else None
        if trainer is not None:
            work(trainer, *given)


def _begin(
    mars: Mars, args: TrainingArguments, state: TrainerState, model: Any, optimizer: Any, lr_scheduler: Any
) -> AdapterWatch | None:
    """Check the Mars that will step, say on rank 0 what it is, and return what watches the model's adapters."""
    flattened = guard.is_flattened(optimizer)
    guard.require_scaled_losses(optimizer)
    guard.require_stale_gradients(mars)
    watch = None
    if model is not None:
        guard.require_parameters(mars, model, flattened=flattened)
        watch = AdapterWatch(model, flattened=flattened)
        watch.check(mars)
    if state.global_step > 0:
        origins.follow_checkpoint(mars)
    if not state.is_world_process_zero:
        return watch
    logger.warning(announcement.introduce(mars, args, flattened=flattened))
    notes = [announcement.lost_ratio(mars, lr_scheduler), announcement.clipped_before(mars, args)]
    if state.global_step > 0:
        notes.append(announcement.saved_settings_that_win(mars))
    for note in notes:
        if note is not None:
            logger.warning(note)
    return watch


def _asks_for_mars(args: TrainingArguments, trainer: Any) -> bool:
    """Whether a Trainer is to make a Mars: by name, or with `factory()`."""
    made_by = (getattr(trainer, "optimizer_cls_and_kwargs", None) or (None,))[0]
    by_name = str(getattr(args.optim, "value", args.optim)).startswith("mars_")
    # By name, because registry need not be imported and a reloaded module makes a new class.
    return by_name or "MarsFactory" in [kind.__name__ for kind in getattr(made_by, "__mro__", ())]


def _has_default_callback(trainer: Any) -> bool:
    handler = getattr(trainer, "callback_handler", None)
    return any(
        type(callback).__name__ == DefaultMarsCallback.__name__ for callback in getattr(handler, "callbacks", ())
    )


def _merge_metrics(optimizer: Any, logs: dict[str, float] | None, state: TrainerState) -> bool:
    """Add the metrics of the last step to a training log line; True if there were any."""
    mars = innermost(optimizer)
    if not isinstance(mars, Mars) or logs is None or "loss" not in logs:
        return False
    metrics = mars.pop_metrics()
    if state.is_world_process_zero and not math.isfinite(metrics.get("mars/update_rms", 0.0)):
        logger.warning_once(
            "the last update of MARS was not finite, so the weights are not either; mars_hf.NonFiniteCallback stops "
            "such a run"
        )
    logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)  # Trainer keeps a copy made before the callbacks ran
    return bool(metrics)


def _will_log(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that begins now will be logged; as DefaultFlowCallback decides at its end."""
    step = state.global_step + 1
    if step == 1 and args.logging_first_step:
        return True
    if args.logging_strategy == IntervalStrategy.STEPS:
        return step % state.logging_steps == 0
    return args.logging_strategy == IntervalStrategy.EPOCH


def install() -> None:
    """Add the default callback to transformers; safe to call twice."""
    # By name, because a reloaded module (a notebook's autoreload) makes a new class.
    if DefaultMarsCallback.__name__ not in [known.__name__ for known in transformers_trainer.DEFAULT_CALLBACKS]:
        transformers_trainer.DEFAULT_CALLBACKS.append(DefaultMarsCallback)  # type: ignore[arg-type]


install()
