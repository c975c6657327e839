"""Stop a run at its start if another optimizer would step, or if Mars would not train the model."""

from __future__ import annotations

import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME

from mars_hf import _compat, log
from mars_hf.distributed.shards import reshard
from mars_hf.distributed.tensors import shape_of
from mars_hf.groups import saved_settings
from mars_hf.groups.settings import check_arguments, shown
from mars_hf.optimizer import EXTENSIONS, Mars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import TrainerState, TrainingArguments

_MARK = "mars_hf"  # among the states of callbacks in trainer_state.json


class StepWatch:
    """A hook before each step of every optimizer of a process in which MARS is to train.

    It stops the first step of another one while no Mars has been made. Beside a Mars another one may train, such as
    that of a discriminator, and is told once.
    """

    mars_has_stepped = False  # any Mars

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._mars_is_made = False
        self._refused = ""
        self._others: list[str] = []  # names of the classes that have taken steps

    @classmethod
    @contextmanager
    def of_process(cls) -> Iterator[StepWatch]:
        """Watch all optimizers of this process until the block ends."""
        watch = cls()
        EXTENSIONS["torch"] = watch._note_made  # at each Mars: torch is always imported
        _compat.OWN_HOOKS.append(watch)
        hook = register_optimizer_step_pre_hook(watch)
        try:
            yield watch
        finally:
            hook.remove()
            _compat.OWN_HOOKS.remove(watch)
            del EXTENSIONS["torch"]

    def _note_made(self) -> None:
        self._mars_is_made = True

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError if another optimizer would step, and no Mars has been made."""
        name = type(optimizer).__name__
        if isinstance(optimizer, Mars):
            self.mars_has_stepped = True
        elif not self._mars_is_made:
            self._refused = self._refused or name
            raise RuntimeError(f"python -m mars_hf run: {self.problem()}")
        elif name not in self._others:
            self._others.append(name)
            log.warning(f"{name} trains, too: the script makes this optimizer itself, out of reach of --optim")

    def problem(self) -> str | None:
        """Return why what has trained, or would have, is not MARS; None if it is, or nothing has trained."""
        if self._refused:
            return (
                f"{self._refused} would take this step, and MARS has taken none. The script makes that optimizer "
                "itself, out of reach of --optim. Make it with mars_hf.create(model, lr=...) in the script, or train "
                "with transformers.Trainer and leave its optimizer to --optim"
            )
        if self._others and not self.mars_has_stepped:
            return (
                f"{' and '.join(self._others)} trained, and the Mars that was made has taken no step: hand it to the "
                "loop (accelerator.prepare(model, optimizer)), without an optimizer in DeepSpeed's JSON"
            )
        return None


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that steps, below all wrappers (accelerate's, DeepSpeed's) and their `.optimizer`."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def require_mars(optimizer: Any, expected: Mars | None) -> Mars:
    """Return the Mars that will step; RuntimeError if it is another one, or not the expected Mars."""
    inner = unwrap_optimizer(optimizer)
    if isinstance(inner, Mars) and (expected is None or inner is expected):
        return inner
    name = "another Mars than the one given" if isinstance(inner, Mars) else f"{type(inner).__name__}, not Mars"
    raise RuntimeError(f"the optimizer that would step is {name}; {_how_to_have_mars(inner, optimizer)}")


def require_named_rule(mars: Mars, named: str | None, ignored: str | None) -> None:
    """Raise RuntimeError if `optim` names another rule than the one that the given optimizer was created with.

    Args:
        mars: the optimizer that will step.
        named: rule; None for another optimizer.
        ignored: `optim_args` that do not reach it, because the Trainer was given the optimizer; None if they do.
    """
    created = (mars.created_with or {}).get("mars_type")
    if None not in (named, created) and named != created:
        raise RuntimeError(
            f"optim names {named}, and the optimizer that is given to the Trainer, which would step, is {created}; "
            "leave one of them out"
        )
    if named is not None and ignored:
        raise RuntimeError(
            f"optim_args={shown(ignored)} does not reach the optimizer that is given to the Trainer, which would step; "
            "move these settings to mars_hf.create, or leave the optimizer out"
        )


def require_same(optimizer: Any, mars: Mars) -> None:
    """Raise RuntimeError if Trainer's optimizer has been replaced in training; its scheduler would go on as before."""
    inner = unwrap_optimizer(optimizer)
    if inner is not mars:
        raise RuntimeError(
            f"the Trainer's optimizer has been replaced by {type(inner).__name__} in training, which neither its "
            "scheduler nor its clipping follow; hand new parameters to optimizer.add_param_group, or end this run and "
            "train again"
        )


def _how_to_have_mars(inner: Any, optimizer: Any) -> str:
    """Return the remedy, by the optimizer that would step and the wrappers around it."""
    if type(inner).__name__ == "DeepSpeedCPUAdam":
        return (
            'offload_optimizer replaced it; set "zero_force_ds_cpu_optimizer": false in a DeepSpeed JSON, as '
            "accelerate_configs/zero2_offload.yaml does"
        )
    if "DeepSpeed" in type(optimizer).__name__:
        return (
            "DeepSpeed drops optimizers=(...), and prefers its JSON's 'optimizer' section; use mars_hf.MarsTrainer, or "
            "Trainer with optimizer_cls_and_kwargs=mars_hf.factory(...) or optim='mars_adamw', and a JSON without "
            "'optimizer' section"
        )
    return (
        "pass Trainer(optimizers=(mars_hf.create(model, ...), None)), "
        "Trainer(optimizer_cls_and_kwargs=mars_hf.factory(...)), or mars_hf.register() and optim='mars_adamw'; "
        f"MarsTrainer, with_mars(...) and python -m mars_hf run make MARS, unless given a {type(inner).__name__}"
    )


def follow_checkpoint(state: TrainerState, optimizer: Any) -> str | None:
    """Make the settings of a checkpoint, which its loading has put into the groups, the arguments of the optimizer.

    They are kept in the Trainer's state for all checkpoints to come.

    Returns:
        A line about settings of the checkpoint that win over those given now; None if there are none.

    Raises:
        RuntimeError: MARS saved the checkpoint, and another optimizer has loaded it.
    """
    states: Any = state.stateful_callbacks  # a dict, whatever its annotation says
    inner = unwrap_optimizer(optimizer)
    saved = states.pop(_MARK, None)
    resumes = saved is not None and inner.state  # else the checkpoint held weights only
    if not isinstance(inner, Mars):
        if not resumes:
            return None
        raise RuntimeError(
            f"MARS saved the checkpoint of step {state.global_step}, and {type(inner).__name__} would resume it with "
            f"MARS's settings; resume with optim={saved['mars_type'].replace('-', '_')!r} (after mars_hf.register()) "
            "or the optimizer that saved it, or load the checkpoint as the model, with from_pretrained"
        )
    mars = inner
    settings = saved_settings.to_json(mars.created_with)
    changed = []
    if resumes and saved["create"] is not None and settings is not None:
        create = saved_settings.as_loaded(saved["create"], settings)
        for name, value in settings.items():
            if create[name] != value:
                changed.append(f"{name}={create[name]} (given: {value})")
        mars.created_with = check_arguments(create)
    states[_MARK] = {"mars_type": mars.defaults["mars_type"], "create": saved_settings.to_json(mars.created_with)}
    if resumes:
        states[_MARK]["steps"] = saved.get("steps")
    if not changed:
        return None
    return f"resuming with the checkpoint's {', '.join(changed)}; to change one, start a new run from the model"


def require_state_of(state: TrainerState, mars: Mars) -> str | None:
    """Compare the loaded states of a resumed run with the step of its checkpoint.

    Returns:
        A line about a run that goes on without the optimizer's states; None if it has them.

    Raises:
        RuntimeError: the states are of another step: the checkpoint mixes files of several.
    """
    if state.global_step == 0:  # a new run
        return None
    states: Any = state.stateful_callbacks
    saved = states[_MARK].get("steps")
    found = steps_of_first(mars)
    if found is None:
        return (
            f"resuming at step {state.global_step} without states of the optimizer: the checkpoint has none that could "
            "be loaded (no optimizer.pt or scheduler.pt, or save_only_model=True). The weights go on; all moments and "
            "last gradients begin anew"
        )
    if saved is not None and saved != found:
        raise RuntimeError(
            f"the optimizer's states are of step {found}, and the checkpoint of step {state.global_step} was saved "
            f"with states of step {saved}: its files come from several checkpoints. Resume from another one"
        )
    return None


def note_steps(state: TrainerState, mars: Mars) -> None:
    """Keep the step count of the optimizer's states in the Trainer's state, which checkpoints save."""
    states: Any = state.stateful_callbacks
    if _MARK in states:
        states[_MARK]["steps"] = steps_of_first(mars)


def steps_of_first(mars: Mars) -> int | None:
    """Return the step count of the first parameter that has one; ZeRO-3 takes the parameters out of the groups."""
    in_groups = [param for group in mars.param_groups for param in group["params"]]
    for param in in_groups or mars.state:
        if "step" in mars.state.get(param, ()):
            return int(mars.state[param]["step"])
    return None


def damaged_file(checkpoint: str) -> Path | None:
    """Return the file of a checkpoint's optimizer or scheduler that is damaged; None if all are whole or missing."""
    for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME):
        file = Path(checkpoint) / name
        if file.is_file() and _is_damaged(file):
            return file
    return None


def _is_damaged(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is not None
    except (zipfile.BadZipFile, OSError, EOFError):
        return True


def require_scaled_losses(optimizer: Any) -> None:
    """Raise RuntimeError where DeepSpeed without ZeRO divides gradients by a scale that no loss had: half precision."""
    while optimizer is not None:
        is_without_zero = type(optimizer).__name__ in ("FP16_Optimizer", "FP16_UnfusedOptimizer")
        if is_without_zero and _divides_by_a_scale(optimizer):
            raise RuntimeError(
                "fp16 under DeepSpeed without ZeRO (bf16 too before 0.19): its engine divides gradients by a loss "
                'scale that its backward has not applied; set "zero_optimization": {"stage": 1} in the JSON'
            )
        optimizer = getattr(optimizer, "optimizer", None)


def _divides_by_a_scale(optimizer: Any) -> bool:
    config = getattr(optimizer, "loss_scale_config", None)  # from DeepSpeed 0.19 on; none for bf16 there
    if config is None:
        return getattr(optimizer, "cur_scale", 1) != 1
    return config.use_grad_scaling


def require_supplied_gradients(mars: Mars) -> None:
    """Raise RuntimeError for an exact Mars whose loop supplies no stale gradients."""
    if mars.is_exact and not mars.expects_stale_gradients:
        raise RuntimeError(
            "is_approx=False: exact MARS takes two gradients a step, and Trainer takes one; use mars_hf.MarsTrainer, "
            "mars_hf.with_mars(...) for a subclass, python -m mars_hf run for a script, or is_approx=True. An override "
            "of MarsTrainer's create_optimizer has to end with super().create_optimizer(model)"
        )


def require_one_gradient(mars: Mars, args: TrainingArguments) -> None:
    """Raise RuntimeError for a Mars that steps inside backward, in a Trainer that changes gradients afterwards."""
    changes_gradients = args.max_grad_norm or args.gradient_accumulation_steps > 1 or args.fp16
    if mars._release is not None and changes_gradients:
        raise RuntimeError(
            f"release_gradients=True with max_grad_norm={args.max_grad_norm}, gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}, fp16={args.fp16}: parameters step inside backward(); use "
            "max_grad_norm=0, gradient_accumulation_steps=1 and no fp16"
        )


def require_scheduler(scheduler: Any, mars: Mars) -> None:
    """Raise RuntimeError if Trainer's scheduler was made for another optimizer, whose rates never reach Mars."""
    while getattr(scheduler, "scheduler", None) is not None:  # accelerate's wrappers
        scheduler = scheduler.scheduler
    scheduled = unwrap_optimizer(getattr(scheduler, "optimizer", None))
    groups = getattr(scheduled, "param_groups", None)
    if groups is None:  # it does not say what it schedules
        return
    of_mars = {id(group) for group in mars.param_groups}
    if not any(id(group) in of_mars for group in groups):
        rate = float(mars.param_groups[0]["lr"])
        other = "another Mars" if isinstance(scheduled, Mars) else type(scheduled).__name__
        raise RuntimeError(
            f"the scheduler {type(scheduler).__name__} was made for {other}: its rates would be logged, and MARS would "
            f"train at lr={rate:g} to the end; make it from the optimizer that steps, or leave it to Trainer with "
            "optimizers=(optimizer, None)"
        )


def require_parameters(optimizer: Any, model: nn.Module) -> None:
    """Raise RuntimeError unless Trainer's optimizer has every trainable parameter of the model; it may have others."""
    missing = missing_parameters(optimizer, model)
    if missing:
        raise RuntimeError(
            f"{missing}. Make it after LoRA or other changes to the model: create(model) last, or "
            "optimizer_cls_and_kwargs=mars_hf.factory(...); a Trainer that has made its own makes another after "
            "trainer.optimizer = None. Freeze what is not to be trained"
        )


def missing_parameters(optimizer: Any, model: nn.Module) -> str:
    """Return which trainable parameters of the model Trainer's optimizer lacks, in words; empty if it has all."""
    reshard(model)  # an evaluation leaves whole parameters in the place of shards
    param_ids = _ids_of_parameters(optimizer)
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    missing = [(name, tuple(shape_of(param))) for name, param in trainable if id(param) not in param_ids]
    if not missing:
        return ""
    name, shape = missing[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"the optimizer holds {len(trainable) - len(missing)} of the model's {len(trainable)} trainable parameters "
        f"(missing: {name} of shape {shape}{more})"
    )


def missing_parameters_of_loss(optimizer: Any, loss: Any, model: nn.Module) -> str:
    """Return the names of a loss's weights that get gradients and are not in Trainer's optimizer; empty if none.

    sentence-transformers' Trainer has a module, or a dict of modules, as its loss, which may have weights outside the
    model. A guide or teacher in a loss gets no gradients.
    """
    losses = list(loss.values()) if isinstance(loss, dict) else [loss]
    param_ids = _ids_of_parameters(optimizer) | {id(param) for param in model.parameters()}
    missing = []
    for module in losses:
        if not isinstance(module, nn.Module):
            continue
        for name, param in module.named_parameters():
            if param.requires_grad and param.grad is not None and id(param) not in param_ids:
                missing.append(f"{type(module).__name__}.{name}")
    return ", ".join(dict.fromkeys(missing))


def _ids_of_parameters(optimizer: Any) -> set[int]:
    """Return the ids of the parameters in an optimizer and its wrappers."""
    param_ids = {id(param) for group in unwrap_optimizer(optimizer).param_groups for param in group["params"]}
    while optimizer is not None:
        for name in ("fp16_groups", "bit16_groups", "bf16_groups"):  # DeepSpeed's, of a model's parameters in any dtype
            for group in getattr(optimizer, name, ()):
                param_ids |= {id(param) for param in group}
        optimizer = getattr(optimizer, "optimizer", None)
    return param_ids
