"""Stop a run at its start if another optimizer would step, or if Mars would not train the model."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from mars_hf import _compat
from mars_hf.distributed.placement import shape_of
from mars_hf.optimizer import Mars
from mars_hf.training import provenance as origins

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState

_MARK = "mars_hf"  # among the states of callbacks, which every checkpoint keeps


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps, below all wrappers (accelerate's, DeepSpeed's) and their `.optimizer`."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def calling_trainer() -> Trainer | None:
    """Return the Trainer whose method is on the call stack, or None."""
    from transformers import Trainer  # not above: importing it imports callbacks.py, which imports this file

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None


def is_flattened(optimizer: Any) -> bool:
    """Return whether an engine has put tensors of its own into the groups of the optimizer it wraps."""
    return "DeepSpeed" in type(optimizer).__name__


def require_mars(optimizer: Any, given: Mars | None) -> Mars:
    """Return the Mars that will step.

    Args:
        optimizer: Trainer's optimizer, wrappers included.
        given: the Mars that must step; None accepts any.

    Raises:
        RuntimeError: another optimizer would step; the message has the remedy.
    """
    steps = innermost(optimizer)
    if isinstance(steps, Mars) and (given is None or steps is given):
        return steps
    found = "another Mars than the one given" if isinstance(steps, Mars) else f"{type(steps).__name__}, not Mars"
    if type(steps).__name__ == "DeepSpeedCPUAdam":
        remedy = (
            'offload_optimizer replaced it; set "zero_force_ds_cpu_optimizer": false in a DeepSpeed JSON, as '
            "accelerate_configs/zero2_offload.yaml does"
        )
    elif is_flattened(optimizer):
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


def refuse_mars_checkpoint(state: TrainerState, optimizer: Any) -> None:
    """Raise RuntimeError if another optimizer resumes from a checkpoint of MARS, whose betas it would take over.

    Args:
        state: the Trainer's; `mark_checkpoints` has marked that of MARS.
        optimizer: Trainer's optimizer, wrappers included.
    """
    states: Any = state.stateful_callbacks or {}  # a dict, whatever its annotation says
    saved_by = states.pop(_MARK, None)  # what is saved from now on is not of MARS
    if saved_by is not None and innermost(optimizer).state:  # else the checkpoint had no state of an optimizer
        raise RuntimeError(
            f"MARS saved the checkpoint of step {state.global_step}, and {type(innermost(optimizer)).__name__} would "
            f"resume it with MARS's settings; resume with optim={saved_by['mars_type'].replace('-', '_')!r} (after "
            "mars_hf.register()) or the optimizer that saved it, or load the checkpoint as the model, with "
            "from_pretrained, and start a new run"
        )


def mark_checkpoints(state: TrainerState, mars: Mars) -> None:
    """Note in trainer_state.json of all checkpoints to come that MARS saved them."""
    states: Any = state.stateful_callbacks
    states[_MARK] = {"mars_type": mars.defaults["mars_type"]}


def require_scaled_losses(optimizer: Any) -> None:
    """Raise RuntimeError where DeepSpeed without ZeRO divides gradients by a scale that no loss had: half precision.

    Args:
        optimizer: Trainer's optimizer, wrappers included.
    """
    while optimizer is not None:
        if _compat.divides_by_unused_scale(optimizer):
            raise RuntimeError(
                "fp16 under DeepSpeed without ZeRO (bf16 too before 0.19): its engine divides gradients by a loss "
                "scale that its backward has not applied, so they are far too small; set "
                '"zero_optimization": {"stage": 1} in the JSON'
            )
        optimizer = getattr(optimizer, "optimizer", None)


def require_stale_gradients(mars: Mars) -> None:
    """Raise RuntimeError for an exact Mars whose loop supplies no stale gradients."""
    if mars.is_exact and not mars.expects_stale_gradients:
        raise RuntimeError(
            "is_approx=False: exact MARS takes two gradients a step, and Trainer takes one; use mars_hf.MarsTrainer in "
            "its place, mars_hf.with_mars(...) for a subclass, python -m mars_hf run for a script, or is_approx=True"
        )


def require_parameters(mars: Mars, model: nn.Module, *, flattened: bool = False) -> None:
    """Raise RuntimeError unless the optimizer has every trainable parameter of the model.

    It may have others too: weights of a loss, or parameters frozen after it was built.

    Args:
        mars: the optimizer that will step.
        model: the model as it will be trained.
        flattened: whether an engine has put other tensors into the groups; then the original parameters are compared.
    """
    if flattened and not origins.is_known(mars):
        return
    if flattened:
        known = {id(param) for reference in origins.of(mars).params if (param := reference()) is not None}
    else:
        known = {id(param) for group in mars.param_groups for param in group["params"]}
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    missing = [(name, tuple(shape_of(param))) for name, param in trainable if id(param) not in known]
    if not missing:
        return
    name, shape = missing[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise RuntimeError(
        f"the optimizer has {len(trainable) - len(missing) or 'none'} of the model's {len(trainable)} trainable "
        f"parameters; it lacks {name} of shape {shape}{more}. The model got them after the optimizer was made (LoRA, "
        "a new head, another copy of the model), or they were frozen then. Make the optimizer from the "
        "model as it is trained: optimizer_cls_and_kwargs=mars_hf.factory(...), or create(model) after the change. Set "
        "requires_grad=False on parameters that are not to be trained"
    )
