"""LastGradientCallback: guard a run with Mars, commit its last gradient, log its settings and metrics.

Importing this module gives one to every Trainer made from then on; it does nothing in runs without Mars.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.state import is_initialized as accelerate_is_initialized
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.trainer import Trainer
from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.training_args import OptimizerNames, TrainingArguments

from mars_hf import _compat, log
from mars_hf.distributed.tensors import is_dtensor
from mars_hf.groups import saved_settings
from mars_hf.groups.settings import MARS_TYPES, MUON
from mars_hf.groups.summary import one_line_summary
from mars_hf.optimizer import Mars
from mars_hf.step.states import name_steps
from mars_hf.training import converted_weights, guard, hub

# Values of `TrainingArguments.optim`, after `register`.
OPTIM_NAMES = {**{rule.replace("-", "_"): rule for rule in MARS_TYPES}, "mars_muon": MUON}
if MUON not in [member.value for member in OptimizerNames]:  # a later transformers may have its own
    OPTIM_NAMES[MUON] = MUON


# Of `state_dict`, by the Mars that a run has.
_HOOKS: WeakKeyDictionary[Mars, RemovableHandle] = WeakKeyDictionary()


class LastGradientCallback(TrainerCallback):
    """Make sure that MARS steps and trains the model, commit its last gradient and log metrics.

    Every Trainer made after `create`, `factory`, `register` or MarsTrainer has one. Passing it also demands that the
    run has a Mars, or the one given. It logs one line about the groups on rank 0, calls `Mars.update_last_grad()` after
    each step, and adds up to five `mars/` metrics of the step just taken (`metrics.StepMetrics.read` defines them) to
    every log line with a training loss. Only steps that will be logged are measured; with `logging_strategy="epoch"`
    all.

    Args:
        optimizer: the Mars that must be the one that steps; None accepts any Mars.
        required: False leaves runs alone that neither have a Mars nor ask for one.

    Raises:
        RuntimeError: at train begin, if another optimizer would step or is scheduled, if Mars lacks trainable
            parameters of the model, if trainable adapters of PEFT are merged, or for exact MARS without MarsTrainer.
            Also before a step, if the optimizer has been replaced, if adapters have been merged, or others made active
            that the optimizer lacks; at a log line or the end of an epoch, if layers have been unfrozen that an
            optimizer of the Trainer's own making lacks; and after a first step, if a loss trains weights that
            `factory` has not seen.
    """

    trainer: Trainer | None = None  # where it is a Trainer's first callback
    optimizer_is_given = False  # to the Trainer, by its user
    resumes_from: str | None = None  # the folder whose weights the Trainer has loaded for the run that begins

    def __init__(self, optimizer: Mars | None = None, *, required: bool = True) -> None:
        """See the class."""
        self.optimizer = optimizer
        self.required = required
        self._mars: Mars | None = None
        self._known_missing = ""
        self._known_missing_of_loss = ""
        self._has_seen_loss = False  # its first backward in this run
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
        _give_back_state(self._mars)  # of a run that was interrupted
        self._mars = None
        has_mars = isinstance(guard.unwrap_optimizer(optimizer), Mars)
        if self.required or has_mars or _asks_for_mars(args, self.trainer):
            self._mars = guard.require_mars(optimizer, self.optimizer)
            self._begin_with(kwargs["model"])
            self._check_run(args, self._mars, optimizer)
            guard.require_scheduler(kwargs.get("lr_scheduler"), self._mars)
            _share_work_of_ranks(self._mars)
            self.restore_weights(self.resumes_from)
        self.resumes_from = None
        changed_settings = guard.follow_checkpoint(state, optimizer)
        if self._mars is None:
            return
        missing_states = guard.require_state_of(state, self._mars)
        if missing_states is not None:
            log.warning(missing_states)
        _give_back_state(self._mars)  # that run may have had another callback
        if _saves_plain_states(self.trainer, self._mars):
            _HOOKS[self._mars] = self._mars.register_state_dict_post_hook(name_steps)
        if self.trainer is not None:
            hub.attach_card(self.trainer)
        if state.is_world_process_zero:
            asked_for = (self._mars.created_with or {}).get("mars_type")
            log.info(one_line_summary(self._mars.param_groups, self._model, asked_for))
            if changed_settings is not None:
                log.warning(changed_settings)

    def restore_weights(self, folder: str | None) -> None:
        """Load what Trainer has not loaded of a folder's weights; engines have formats of their own."""
        if self._mars is None or folder is None or self.trainer is None:
            return
        if self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled:
            return
        if converted_weights.restore(self.trainer.model, folder) and self.trainer.is_world_process_zero():
            log.info(f"loaded weights of {folder} that transformers saves under other names; none is missing")

    def _begin_with(self, model: Any) -> None:
        """Note the model of the run that begins, and forget what was seen of another."""
        self._model = model
        self._adapted = [layer for layer in model.modules() if _is_adapted(layer)]
        self._active = None
        self._has_seen_loss = False

    def _check_run(self, args: TrainingArguments, mars: Mars, optimizer: Any) -> None:
        """Raise RuntimeError if MARS would not train the model as it was asked to."""
        guard.require_named_rule(mars, _named_rule(args), args.optim_args if self.optimizer_is_given else None)
        guard.require_scaled_losses(optimizer)
        guard.require_supplied_gradients(mars)
        guard.require_one_gradient(mars, args)
        self._check_parameters(optimizer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Measure this step if it will be logged, and stop the run if its adapters cannot be trained any more."""
        if self._mars is None:
            return
        self._check_parameters(optimizer)
        self._mars.collect_metrics(_will_log(args, state))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop the run if the optimizer that is about to step has come in the place of Mars."""
        if self._mars is not None and self.trainer is not None:
            guard.require_same(self.trainer.optimizer, self._mars)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Commit the last gradient, and see after a first step whether all weights of the loss are trained."""
        if self._mars is None:
            return
        self._mars.update_last_grad()
        guard.note_steps(state, self._mars)
        if not self._has_seen_loss:
            self._has_seen_loss = True
            self._check_loss(optimizer, state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Look for what is not trained in runs that log seldom, or never."""
        if self._mars is not None:
            self._check_unfrozen(optimizer, state)
            self._check_loss(optimizer, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Put the metrics of the last step where trackers and the history see them."""
        if self._mars is not None and "loss" in logs:
            self._check_unfrozen(optimizer, state)
            self._check_loss(optimizer, state)
            if self._mars._release is not None:  # Trainer takes the norm of no gradients: 0
                for line in (logs, *state.log_history[-1:]):
                    line.pop("grad_norm", None)
            metrics = self._mars.pop_metrics()
            logs.update(metrics)
            if state.is_world_process_zero and math.isnan(logs.get("grad_norm", 0)):  # losses are logged without NaN
                log.warning(f"step {state.global_step}: NaN gradients; lower the learning rate, check the data")
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
            hub.write_card(self.trainer)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the card and mars.json; the optimizer's state is the user's again."""
        self.on_push_begin(args, state, control)
        _give_back_state(self._mars)

    def _check_unfrozen(self, optimizer: Any, state: TrainerState) -> None:
        """Stop a run whose optimizer lacks layers that have been unfrozen; the owner of an instance is warned, once."""
        missing = guard.missing_parameters(optimizer, self._model)
        if not missing or missing == self._known_missing:
            return
        message = (
            f"step {state.global_step}: {missing}: they were unfrozen in training, and have not moved. Unfreeze them "
            "before, or hand them to optimizer.add_param_group, and the rates of the new groups to the scheduler "
            "(base_lrs and lr_lambdas), without which torch's schedulers stop"
        )
        if not self.optimizer_is_given:
            raise RuntimeError(message)
        self._known_missing = missing
        if state.is_world_process_zero:
            log.warning(message)

    def _check_loss(self, optimizer: Any, state: TrainerState) -> None:
        """Stop a run of `factory`, which sees the model alone, if a loss has weights too; others are warned, once."""
        missing = guard.missing_parameters_of_loss(optimizer, getattr(self.trainer, "loss", None), self._model)
        if not missing or missing == self._known_missing_of_loss:
            return
        message = (
            f"step {state.global_step}: the optimizer lacks weights of the loss that get gradients ({missing}): they "
            "have not moved. Use optim='mars_adamw' or mars_hf.with_mars(...), which train them, or create([model, "
            "loss]); freeze them if they are not to be trained"
        )
        if _uses_factory(self.trainer):
            raise RuntimeError(message)
        self._known_missing_of_loss = missing
        if state.is_world_process_zero:
            log.warning(message)

    def _check_parameters(self, optimizer: Any) -> None:
        """Raise RuntimeError if the optimizer lacks parameters, or adapters are merged; costs microseconds a layer."""
        merged = [layer for layer in self._adapted if layer.merged and _trains_adapters(layer)]
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


def _give_back_state(mars: Mars | None) -> None:
    """Let `state_dict` of an optimizer that a run had return what any other does."""
    hook = None if mars is None else _HOOKS.pop(mars, None)
    if hook is not None:
        hook.remove()


def attach_callback(trainer: Trainer) -> None:
    """Make one LastGradientCallback the first of a Trainer's: its metrics must reach the trackers among the others."""
    if _uses_factory(trainer):
        made_by: Any = trainer.optimizer_cls_and_kwargs
        make, kwargs = made_by
        trainer.optimizer_cls_and_kwargs = (make.of_trainer(trainer.args), kwargs)
    callback = _callback_of(trainer)
    if callback is None:
        # Noted now, because DeepSpeed drops an instance before training begins.
        callback = LastGradientCallback(required=isinstance(trainer.optimizer, Mars))
    callback.trainer = trainer
    callback.optimizer_is_given = isinstance(trainer.optimizer, Mars)
    handler = trainer.callback_handler
    handler.callbacks = [callback, *(other for other in handler.callbacks if other is not callback)]


def _callback_of(trainer: Trainer) -> LastGradientCallback | None:
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, LastGradientCallback)), None)


def _note_folder(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_and_note(self: Trainer, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        load(self, resume_from_checkpoint, *args, **kwargs)
        callback = _callback_of(self)
        if callback is not None:
            callback.resumes_from = resume_from_checkpoint

    return load_and_note


def _name_damaged_file(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_or_name(self: Trainer, checkpoint: str | None) -> None:
        try:
            load(self, checkpoint)
        except Exception as error:
            runs_mars = isinstance(guard.unwrap_optimizer(self.optimizer), Mars)
            file = guard.damaged_file(checkpoint) if runs_mars and checkpoint is not None else None
            if file is None:
                raise
            raise ValueError(
                f"{file} is damaged: its writing or copying seems to have been interrupted. Resume from "
                "another checkpoint, or go on from its weights alone, without its optimizer.pt and scheduler.pt"
            ) from error

    return load_or_name


def _restore_best_model(trainer: Trainer) -> None:
    callback = _callback_of(trainer)
    if callback is not None:
        callback.restore_weights(trainer.state.best_model_checkpoint)


_compat.call_after(Trainer, "__init__", attach_callback)
_compat.replace_once(Trainer, "_load_from_checkpoint", _note_folder)
_compat.replace_once(Trainer, "_load_optimizer_and_scheduler", _name_damaged_file)
_compat.call_after(Trainer, "_load_best_model", _restore_best_model)


def _asks_for_mars(args: TrainingArguments, trainer: Trainer | None) -> bool:
    """Return whether a run asks for MARS by a name of `optim`, or by `factory`."""
    return _named_rule(args) is not None or _uses_factory(trainer)


def _named_rule(args: TrainingArguments) -> str | None:
    """Return the rule that `optim` names; None for another optimizer."""
    return OPTIM_NAMES.get(str(getattr(args.optim, "value", args.optim)))


def _uses_factory(trainer: Trainer | None) -> bool:
    """Return whether `factory` makes the optimizer; its class is known by name, since its module imports this one."""
    made_by = getattr(trainer, "optimizer_cls_and_kwargs", None)
    return made_by is not None and type(made_by[0]).__name__ == "MarsFactory"


def _saves_plain_states(trainer: Trainer | None, mars: Mars) -> bool:
    """Return whether a Trainer saves the optimizer's state_dict as it is: engines have formats of their own."""
    if trainer is None or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return False
    return not any(is_dtensor(param) for group in mars.param_groups for param in group["params"])


def _share_work_of_ranks(mars: Mars) -> None:
    """Name the ranks that accelerate's DistributedDataParallel keeps alike, unless the user has named others."""
    has_ranks = dist.is_available() and dist.is_initialized()
    if mars.process_group is not None or not has_ranks or not accelerate_is_initialized():
        return
    if AcceleratorState().distributed_type.name.startswith("MULTI_"):
        mars.process_group = dist.group.WORLD


def _is_adapted(layer: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a layer; PEFT itself may not be installed."""
    return any(kind.__name__ == "BaseTunerLayer" for kind in type(layer).__mro__)


def _trains_adapters(layer: nn.Module) -> bool:
    of_adapters = [param for name, param in layer.named_parameters() if not name.startswith("base_layer.")]
    return any(param.requires_grad for param in of_adapters)


def _will_log(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that begins now will be logged; as DefaultFlowCallback decides at its end."""
    state = copy.copy(state)
    state.global_step += 1
    control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
    return control.should_log or args.logging_strategy == IntervalStrategy.EPOCH
