"""A Trainer for MARS: it steps with the optimizer it was given, under every engine, and knows the exact form."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback

from mars_hf.distributed.replicas import note_wrapper
from mars_hf.optimizer import Mars
from mars_hf.training import provenance as origins
from mars_hf.training.callbacks import LastGradientCallback
from mars_hf.training.guard import innermost
from mars_hf.training.stale_pass import StalePass, StalePassCallback


class _Adopted(NamedTuple):
    """An optimizer and what MarsTrainer changes about it while it trains."""

    mars: Mars
    max_grad_norm: float | None
    take_grad: list[bool]
    expects_stale_gradients: bool


class MarsTrainer(Trainer):
    """transformers.Trainer that keeps its optimizer and runs exact MARS.

    Trainer drops an instance handed over as `optimizers=(optimizer, scheduler)` under DeepSpeed and refuses it under
    FSDP. This one hands it over where Trainer would make its own. If it is a Mars, LastGradientCallback is added with
    it, so that a run in which another optimizer would step stops at its beginning.

    With a Mars, clipping by `max_grad_norm` is part of its step: it takes the global norm and scales in passes over the
    gradients that it makes anyway, and `grad_norm` is logged as ever. Callbacks that look at gradients before the step
    see them unclipped, and after it not at all, since they have become last gradients (`take_grad`). With a gradient
    scaler (fp16), with DeepSpeed, in exact mode, and if the model has trainable parameters that the optimizer does not
    know, Trainer's own clipping is used. `max_grad_norm` of the optimizer counts before that of TrainingArguments where
    the latter is the default. When `train()` returns or raises, `max_grad_norm` and `take_grad` of the optimizer are
    again what they were.

    Args:
        *args: as Trainer.
        **kwargs: as Trainer. The model must be the one that the optimizer was built from.

    Raises:
        ValueError: an optimizer is given together with `model_init` or `optimizer_cls_and_kwargs`, which make others.
            Also if Mars and TrainingArguments state different values of `max_grad_norm`.
        NotImplementedError: when training begins, exact MARS under DeepSpeed.

    Source of the exact form: Algorithm 1 and 2 of arXiv 2411.10438.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See the class."""
        signature = inspect.signature(super().__init__)  # Trainer's, or that of a class between, such as trl's
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if "optimizers" not in signature.parameters:  # a class between that passes on what it does not know
            given = next(
                (value for value in given.values() if isinstance(value, dict) and "optimizers" in value), given
            )
        kept: tuple[Any, Any] = given.pop("optimizers", None) or (None, None)
        self._kept_optimizer, self._kept_scheduler = kept
        if self._kept_optimizer is not None:
            for name in ("model_init", "optimizer_cls_and_kwargs"):
                if given.get(name) is not None:
                    raise ValueError(
                        f"optimizers=({type(self._kept_optimizer).__name__}, ...) and {name} are both given, and each "
                        "would make the optimizer; with model_init use optimizer_cls_and_kwargs=mars_hf.factory(...)"
                    )
        if isinstance(self._kept_optimizer, Mars):
            given["callbacks"] = _guarded(given.get("callbacks"), self._kept_optimizer)
            origins.remember(self._kept_optimizer)
        self._is_training = False
        self._adopted: _Adopted | None = None
        self._stale_pass = StalePass(self, self._clips_at)
        super().__init__(*bound.args, **bound.kwargs)
        self.add_callback(StalePassCallback(self._stale_pass))

    @property
    def in_stale_pass(self) -> bool:
        """Whether `compute_loss` is being called for the stale gradient: for losses that keep count of something."""
        return self._stale_pass.running

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; the optimizer is afterwards set as it was handed over."""
        self._is_training = True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._is_training = False
            self._stale_pass.forget()
            self._give_back()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer that was given, or what Trainer makes."""
        if self.optimizer is None and self._kept_optimizer is not None:
            self.optimizer = self._kept_optimizer
        optimizer = super().create_optimizer(model)
        mars = innermost(optimizer)
        if isinstance(mars, Mars) and self._is_training and self._adopted is None:
            self._adopt(mars)
        return optimizer

    def _adopt(self, mars: Mars) -> None:
        """Take over, for one call of `train()`, what only the owner of the loop can do for a Mars."""
        if mars.is_exact and self.is_deepspeed_enabled:
            raise NotImplementedError(
                "is_approx=False under DeepSpeed: its engine accumulates and partitions one gradient a step, and exact "
                "MARS needs two; use DDP or FSDP2, or is_approx=True"
            )
        own, given = mars.max_grad_norm, self.args.max_grad_norm
        unset = given == type(self.args).__dataclass_fields__["max_grad_norm"].default
        if own is not None and given != own and (not unset or self.is_deepspeed_enabled):
            raise ValueError(
                f"max_grad_norm={given!r} in TrainingArguments and {own!r} for MARS contradict each other; give one"
                + (", in TrainingArguments, which DeepSpeed reads" if self.is_deepspeed_enabled else "")
            )
        take_grad = [group["take_grad"] for group in mars.param_groups]
        self._adopted = _Adopted(mars, own, take_grad, mars.expects_stale_gradients)
        mars.expects_stale_gradients = mars.is_exact
        if own is not None:  # until a step is found in which it can clip
            mars.max_grad_norm = None
        self._take_gradients()

    def _give_back(self) -> None:
        """Leave an adopted optimizer as it was handed over."""
        if self._adopted is None:
            return
        adopted, self._adopted = self._adopted, None
        mars = adopted.mars
        mars.expects_stale_gradients = adopted.expects_stale_gradients
        mars.max_grad_norm = adopted.max_grad_norm
        for index, group in enumerate(mars.param_groups):
            group["take_grad"] = adopted.take_grad[min(index, len(adopted.take_grad) - 1)]  # some may be new

    def _take_gradients(self) -> None:
        """Have every group, a new one too, take its gradients."""
        if self._adopted is not None:
            for group in self._adopted.mars.param_groups:
                group["take_grad"] = True

    def _clips_at(self) -> float:
        """Return the largest global norm of a gradient: the optimizer's own, or TrainingArguments'; 0 for none."""
        own = None if self._adopted is None else self._adopted.max_grad_norm
        return self.args.max_grad_norm if own is None else own

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the scheduler that was given, or what Trainer makes."""
        if self.lr_scheduler is None and self._kept_scheduler is not None:
            self.lr_scheduler = self._kept_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Leave the clipping to the step where it can do it; what is returned holds the norm after it."""
        mars = innermost(self.optimizer)
        if not isinstance(mars, Mars) or self._adopted is None or self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        if self._can_fold(mars, model):
            mars.max_grad_norm = self._clips_at()
            return mars.grad_norm
        mars.max_grad_norm = None
        given = self.args.max_grad_norm
        self.args.max_grad_norm = self._clips_at()
        try:
            return super()._clip_grad_norm(model)
        finally:
            self.args.max_grad_norm = given

    def _can_fold(self, mars: Mars, model: Any) -> bool:
        # Exact MARS clips two gradients, which are treated alike.
        if mars.is_exact or self.accelerator.scaler is not None:
            return False
        known = {id(param) for group in mars.param_groups for param in group["params"]}
        return all(id(param) in known for param in model.parameters() if param.grad is not None)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, as Trainer collects them."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._stale_pass.hold(batches, num_items)
        return batches, num_items

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a micro-batch."""
        self._take_gradients()
        note_wrapper(model)
        with self._stale_pass.micro_batch():
            return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, once a batch: not for the pass that takes its stale gradient."""
        if not self.in_stale_pass:
            super().log(logs, *args, **kwargs)


def _guarded(callbacks: list[Any] | None, optimizer: Mars) -> list[TrainerCallback | type[TrainerCallback]]:
    """Callbacks with a LastGradientCallback among them."""
    callbacks = list(callbacks or [])
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        # By name too: a reloaded module (a notebook's autoreload) makes a new class.
        if issubclass(kind, LastGradientCallback) or kind.__name__ == LastGradientCallback.__name__:
            return callbacks
    return [*callbacks, LastGradientCallback(optimizer)]
