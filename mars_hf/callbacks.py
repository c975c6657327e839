"""Trainer callbacks: guard the run, commit the last gradient, log what MARS does.

Importing this module adds one inert callback to transformers' DEFAULT_CALLBACKS. Trainer calls its default callbacks
before its reporters and a user's callbacks after them, so this is the one place from which metrics reach every tracker.
"""

from __future__ import annotations

from typing import Any

from transformers import trainer as transformers_trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from mars_hf.optimizer import Mars

logger = logging.get_logger(__name__)


def innermost(optimizer: Any) -> Any:
    """The optimizer that steps, below every wrapper (accelerate's, DeepSpeed's) that keeps it as `.optimizer`."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


class LastGradientCallback(TrainerCallback):
    """Makes sure that MARS is what steps, commits its last gradient and logs four metrics.

    - At train begin it walks down to the optimizer that will step and raises if that is not Mars, or an exact Mars
      (`is_approx=False`) in a Trainer that does not take stale gradients.
    - After each optimizer step it calls `Mars.update_last_grad()` (nothing to do in approx mode).
    - On every log line with a training loss it adds `mars/clip_fraction`, `mars/corrected_norm_ratio`,
      `mars/grad_cosine` and `mars/update_rms` of the step just taken (`metrics.StepMetrics.read` defines them). They
      reach the console, `state.log_history` and every tracker of `report_to`. They are measured on the steps that will
      be logged only, and the device is waited for on those only; with `logging_strategy="epoch"` each step is measured,
      since its last one is not known beforehand.

    Args:
        optimizer: the Mars that must be the one that steps; None accepts any Mars.

    Raises:
        RuntimeError: at train begin, when another optimizer would step, or exact MARS without MarsTrainer; the message
            says how to mend it.
    """

    _ahead_of_reporters = False

    def __init__(self, optimizer: Mars | None = None) -> None:
        """See the class."""
        self._given = optimizer
        self._mars: Mars | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Find the Mars that will step, or raise."""
        self._mars = _require_mars(optimizer, self._given)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure this step if it will be logged."""
        if self._mars is not None:
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

        DefaultMarsCallback does it ahead of them, unless the Trainer was made before mars_hf.callbacks was imported.
        """
        if _merge_metrics(optimizer, logs, state) and not self._ahead_of_reporters:
            logger.warning_once(
                "LastGradientCallback was imported after the Trainer was made: its metrics are in state.log_history "
                "but trackers do not see them. Pass it as Trainer(callbacks=[mars_hf.LastGradientCallback()])."
            )


class DefaultMarsCallback(LastGradientCallback):
    """What every Trainer runs once mars_hf.callbacks is imported: inert unless the run has a Mars in it.

    It merges metrics into the log line ahead of the reporters, and does all of LastGradientCallback's work in runs
    that chose MARS by name (`optim="mars_adamw"`), whose scripts know nothing of callbacks.
    """

    _ahead_of_reporters = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Guard runs that asked for MARS by name, and exact ones."""
        asked_by_name = str(getattr(args.optim, "value", args.optim)).startswith("mars_")
        self._mars = _require_mars(optimizer, None) if asked_by_name else None
        if isinstance(innermost(optimizer), Mars):
            _require_stale_gradients(innermost(optimizer))


def _merge_metrics(optimizer: Any, logs: dict[str, float] | None, state: TrainerState) -> bool:
    """Add the metrics of the last step to a training log line; True if there were any."""
    mars = innermost(optimizer)
    if not isinstance(mars, Mars) or logs is None or "loss" not in logs:
        return False
    metrics = mars.pop_metrics()
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


def _require_mars(optimizer: Any, given: Mars | None) -> Mars:
    """The Mars that will step; RuntimeError with the remedy if there is none, or not the one given."""
    steps = innermost(optimizer)
    if isinstance(steps, Mars) and (given is None or steps is given):
        _require_stale_gradients(steps)
        return steps
    found = "another Mars than the one given" if isinstance(steps, Mars) else f"{type(steps).__name__}, not Mars"
    if type(steps).__name__ == "DeepSpeedCPUAdam":
        remedy = (
            'offload_optimizer replaced it; set "zero_force_ds_cpu_optimizer": false in a DeepSpeed JSON, as '
            "accelerate_configs/ds_config/zero2_offload.json does"
        )
    elif "DeepSpeed" in type(optimizer).__name__:
        remedy = (
            "DeepSpeed drops an optimizer handed over as optimizers=(...), and takes one of its JSON's 'optimizer' "
            "section before any other; use mars_hf.MarsTrainer, or Trainer with optimizer_cls_and_kwargs="
            "mars_hf.factory(...) or optim='mars_adamw', and a JSON without 'optimizer' section"
        )
    else:
        remedy = (
            "pass Trainer(optimizers=(mars_hf.create(model, ...), None)), "
            "Trainer(optimizer_cls_and_kwargs=mars_hf.factory(...)), or mars_hf.register() and optim='mars_adamw'"
        )
    raise RuntimeError(f"the optimizer that would step is {found}; {remedy}")


def _require_stale_gradients(mars: Mars) -> None:
    """RuntimeError for an exact Mars that nobody supplies with stale gradients."""
    if mars.is_exact and not mars.expects_stale_gradients:
        raise RuntimeError(
            "is_approx=False: exact MARS takes two gradients a step, and Trainer takes one; use mars_hf.MarsTrainer in "
            "its place, or is_approx=True"
        )


# By name, because a reloaded module (a notebook's autoreload) makes a new class.
if DefaultMarsCallback.__name__ not in [known.__name__ for known in transformers_trainer.DEFAULT_CALLBACKS]:
    transformers_trainer.DEFAULT_CALLBACKS.append(DefaultMarsCallback)  # type: ignore[arg-type]
