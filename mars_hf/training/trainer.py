"""MarsTrainer, and the same for every other class of trainers."""

from __future__ import annotations

import copyreg
import functools
import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback

from mars_hf import _compat
from mars_hf.groups.settings import PAIR_KEYS, SETTINGS, FactorySettings, shown
from mars_hf.optimizer import Mars
from mars_hf.training.callback import LastGradientCallback
from mars_hf.training.guard import unwrap_optimizer
from mars_hf.training.nonfinite import NonFiniteCallback
from mars_hf.training.registry import args_with_mars_optim, checked_settings, register, trainer_settings
from mars_hf.training.stale_pass import StalePass

# A mixin: the methods' `super()` is the trainer class that it is combined with.
if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

register()  # TrainingArguments(optim="mars_m") needs no call of it

# Methods of trl's trainers that always generate inside the step. Others are stopped when their inputs differ.
_GENERATE = ("_generate_and_score_completions", "_generate_student_completions", "_generate")
# What MarsTrainer sets in a Mars while it trains.
_OF_THE_LOOP = ("max_grad_norm", "expects_stale_gradients")


class TrainerWithMars(_Base):
    """The methods that MARS adds to a class of trainers; `with_mars` combines the two, `MarsTrainer` documents them."""

    requires_mars = True

    def __init__(
        self, *args: Any, mars_kwargs: FactorySettings | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Build the Trainer; see the class."""
        self._check_keywords(kwargs)
        optimizers: Any = kwargs.pop("optimizers", None) or (None, None)
        if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
            raise TypeError(f"optimizers is a {type(optimizers).__name__}; give a pair: optimizers=(optimizer, None)")
        self._given_optimizer, self._given_scheduler = optimizers
        if self._given_optimizer is not None:
            for name in ("model_init", "optimizer_cls_and_kwargs"):
                if kwargs.get(name) is not None:
                    raise ValueError(
                        f"optimizers=({type(self._given_optimizer).__name__}, ...) and {name} are both given, and each "
                        "would make the optimizer; with model_init use optimizer_cls_and_kwargs=mars_hf.factory(...)"
                    )
        self._is_training = False
        self._taken_over: Mars | None = None
        self._settings_before: dict[str, Any] = {}  # of the Mars that is taken over
        self._stale_pass = StalePass(self)
        self._mars_kwargs = checked_settings(mars_kwargs or {}, "mars_kwargs")  # read again later: no iterator
        super().__init__(*args, **kwargs)
        mars = self._given_optimizer if isinstance(self._given_optimizer, Mars) else None
        callback: LastGradientCallback = self._callbacks_of(LastGradientCallback)[0]
        callback.required |= self.requires_mars
        callback.optimizer_is_given |= mars is not None
        if self._makes_mars:
            self._resolve_settings()  # complains at once of what it cannot read
        callback.optimizer = callback.optimizer or mars
        self.add_callback(self._stale_pass)
        if not self._callbacks_of(NonFiniteCallback):
            self.add_callback(NonFiniteCallback())

    def _check_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Raise TypeError for settings of MARS among the Trainer's keywords, unless the trainer has such keywords."""
        known = inspect.signature(super().__init__).parameters
        for name, value in keywords.items():
            if name in known or name not in (*SETTINGS, *PAIR_KEYS, "like"):
                continue
            remedy = f"mars_kwargs={{{name!r}: {value!r}}}"
            if name == "lr":
                remedy = f"learning_rate={value!r} in TrainingArguments"
            raise TypeError(f"{type(self).__name__} takes no {name}; give {remedy}")

    @functools.cached_property  # read by __init__, or before by a class that makes its optimizer at once
    def _makes_mars(self) -> bool:
        """Whether this trainer makes a Mars, since no optimizer is given."""
        if all(each is None for each in (self._given_optimizer, self.optimizer, self.optimizer_cls_and_kwargs)):
            return True
        if self._mars_kwargs:
            raise ValueError(
                f"mars_kwargs={self._mars_kwargs!r} and an optimizer are both given; give the settings where the "
                "optimizer is made, or remove the optimizer"
            )
        return False

    def _resolve_settings(self) -> dict[str, Any]:
        """Return the settings of the Mars to make, anew each time: a search changes TrainingArguments in between."""
        return trainer_settings(self.args, self._mars_kwargs, type(self).__name__)

    @property
    def in_stale_pass(self) -> bool:
        """Return whether `compute_loss` runs for the stale gradient; for losses that count something."""
        return self._stale_pass.running

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; the optimizer is afterwards set as it was handed over."""
        self._is_training = True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._is_training = False
            self._stale_pass.clear()
            for name, value in self._settings_before.items():
                setattr(self._taken_over, name, value)
            self._taken_over, self._settings_before = None, {}

    def _callbacks_of(self, kind: type) -> list[Any]:
        """Return the callbacks of a class and of its subclasses."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, kind)]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the given optimizer, or else make MARS as `optim="mars_adamw"` does: overrides see that name."""
        makes_mars = self._makes_mars
        self.optimizer = self.optimizer or self._given_optimizer
        args = self.args
        if makes_mars:
            self.args = args_with_mars_optim(args, self._resolve_settings(), model or self.model)
        try:
            optimizer = super().create_optimizer(model)
        finally:
            self.args = args
        mars = unwrap_optimizer(optimizer)
        if isinstance(mars, Mars) and self._is_training and self._taken_over is None:
            self._take_over(mars)
        return optimizer

    def _take_over(self, mars: Mars) -> None:
        """Apply, for one call of `train()`, the settings of a Mars that only the owner of the loop may use."""
        if mars.is_exact and self.is_deepspeed_enabled:
            raise NotImplementedError(
                "is_approx=False under DeepSpeed: its engine accumulates and partitions one gradient a step, and exact "
                "MARS needs two; use DDP or FSDP2, or is_approx=True"
            )
        generating = [name for name in _GENERATE if hasattr(self, name)]
        if mars.is_exact and generating:
            raise NotImplementedError(
                f"is_approx=False with {type(self).__name__}: exact MARS takes two gradients of one batch, and "
                f"{generating[0]} makes new completions for each; use is_approx=True"
            )
        if mars.max_grad_norm not in (None, self.args.max_grad_norm):
            raise ValueError(
                f"max_grad_norm={self.args.max_grad_norm!r} in TrainingArguments and {mars.max_grad_norm!r} for MARS "
                "contradict each other; give it in TrainingArguments alone"
            )
        self._taken_over = mars
        self._settings_before = {name: getattr(mars, name) for name in _OF_THE_LOOP}
        mars.expects_stale_gradients = mars.is_exact
        mars.max_grad_norm = None  # until a step in which it can clip

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the given scheduler, or the one that Trainer builds."""
        self.lr_scheduler = self.lr_scheduler or self._given_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Leave clipping to the step if it can clip; the returned tensor holds the norm after the step."""
        mars = self._taken_over
        if mars is None or self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        if not self._can_clip_in_step(mars, model):
            mars.max_grad_norm = None
            return super()._clip_grad_norm(model)
        mars.max_grad_norm = self.args.max_grad_norm
        return mars.grad_norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm as Trainer does; NonFiniteCallback looks at it, and at that of the stale gradient.

        None if gradients are released: Trainer would take the norm of those that are left, and the callback would not
        look at the others.
        """
        if self._taken_over is not None and self._taken_over._release is not None:
            return None
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        for callback in self._callbacks_of(NonFiniteCallback):
            for norm in (grad_norm, self._stale_pass.norm):
                if norm is not None:
                    callback.watch("gradient norm", norm)
        return grad_norm

    def _can_clip_in_step(self, mars: Mars, model: Any) -> bool:
        # Exact MARS clips two gradients, and both the same way.
        if mars.is_exact or self.accelerator.scaler is not None:
            return False
        if math.isinf(self.args.max_grad_norm):  # the norm is logged, and nothing clipped
            return False
        if self._overrides_clipping() or self._somebody_sees_gradients(mars):
            return False
        of_mars = {id(param) for group in mars.param_groups for param in group["params"] if param.grad is not None}
        # Trainer's norm is that of the model: not of weights in a loss.
        return of_mars == {id(param) for param in model.parameters() if param.grad is not None}

    def _overrides_clipping(self) -> bool:
        """Return whether a class between this one and Trainer, or the instance, clips itself or uses the norm."""
        classes = [kind for kind in type(self).__mro__ if kind not in (TrainerWithMars, Trainer)]
        names = ("_clip_grad_norm", "_get_grad_norm")
        return any(name in vars(owner) for owner in [self, *classes] for name in names)

    def _somebody_sees_gradients(self, mars: Mars) -> bool:
        """Return whether anything but MARS reads gradients between Trainer's clipping and the end of the step."""
        if _compat.has_step_hooks(mars) or getattr(self.optimizer, "optimizer", None) is not mars:
            return True
        callbacks = [type(callback) for callback in self.callback_handler.callbacks]
        others = [
            kind for kind in callbacks if not issubclass(kind, (LastGradientCallback, NonFiniteCallback, StalePass))
        ]
        return any(
            kind.on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
            or kind.on_optimizer_step is not TrainerCallback.on_optimizer_step
            for kind in others
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step from Trainer, and keep them for the stale pass."""
        if self._taken_over is not None and not self.is_deepspeed_enabled:  # whose partitions keep their gradients
            self._taken_over.zero_grad()  # Trainer's model.zero_grad() leaves the weights of a loss out
            self._taken_over.max_grad_norm = None  # a callback may set that of the arguments to 0: no clipping then
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._stale_pass.buffer_batches(batches, num_items)
        return batches, num_items

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a micro-batch."""
        with self._stale_pass.micro_batch():
            loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.in_stale_pass:
            for callback in self._callbacks_of(NonFiniteCallback):
                callback.watch("loss", loss)
        return loss


class MarsTrainer(TrainerWithMars, Trainer):
    """Train with MARS: with the optimizer given, or with one made of TrainingArguments.

    Without an optimizer it makes its own as `optimizer_cls_and_kwargs=mars_hf.factory(args, **mars_kwargs)` does:
    learning rate, betas, eps and weight decay are those of TrainingArguments. `TrainingArguments(optim="mars_m")`, or
    another name of `register`, chooses the rule; `optim` left at its default means mars-adamw, or the rule of
    `mars_kwargs`. `optimizers=(optimizer, scheduler)` are used under every engine, also where Trainer drops or refuses
    them (DeepSpeed, FSDP).

    A Mars clips by `max_grad_norm` inside its step, in passes over the gradients that it makes anyway. Trainer's own
    clipping applies with a gradient scaler (fp16), under DeepSpeed, in exact mode, for a norm of infinity, if the
    optimizer lacks some of the model's trainable parameters, and if something may look at gradients around the step: a
    callback with `on_pre_optimizer_step` or `on_optimizer_step`, a hook or wrapper of the optimizer, an override of
    Trainer's clipping. After `train()` the optimizer's own settings are restored.

    It has a LastGradientCallback, and a NonFiniteCallback unless `callbacks` has one.

    A run in which another optimizer would step is stopped when it starts. A subclass with `requires_mars = False`
    trains whatever optimizer it is given, such as the baseline of a comparison.

    Args:
        *args: see Trainer.
        mars_kwargs: settings as for `factory`, such as `{"gamma": 0.05, "is_approx": False}`; None for the defaults.
        **kwargs: see Trainer. The model must be the one that the optimizer was built from.

    Raises:
        ValueError: an optimizer is given together with `model_init`, `optimizer_cls_and_kwargs` or `mars_kwargs`;
            TrainingArguments name another optimizer in `optim`; a setting as in `factory`; or Mars and
            TrainingArguments have different values of `max_grad_norm`.
        RuntimeError: another optimizer would step; raised when training starts.
        NotImplementedError: exact MARS under DeepSpeed, or in a trainer that generates its batches; raised when
            training starts.
        NonFiniteError: too many steps in a row with a non-finite loss or gradient; raised in training.

    Source of the exact form: Algorithms 1 and 2 of arXiv 2411.10438.
    """


def with_mars(trainer_class: type[Trainer]) -> type[Any]:
    """Return a class of trainers with everything that MarsTrainer adds to Trainer.

    `with_mars(Trainer)` is MarsTrainer. The class is a subclass of `trainer_class`, trains MARS like MarsTrainer, takes
    the class's arguments and `mars_kwargs`, and keeps its overrides: they run inside of what MARS adds. A trainer that
    overrides `_clip_grad_norm` clips itself, before the step. `class Mine(MarsTrainer, SFTTrainer)` has
    the same methods; the other order takes no `mars_kwargs`.

    Args:
        trainer_class: `transformers.Trainer` or a subclass, such as trl's `SFTTrainer` or `Seq2SeqTrainer`.

    Returns:
        The same class for the same argument; `trainer_class` itself if it has MARS already.

    Raises:
        TypeError: not a class of trainers.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(
            f"with_mars({shown(trainer_class)}): give a class of trainers, transformers.Trainer or a subclass of it; "
            "an instance cannot be changed afterwards"
        )
    if issubclass(trainer_class, TrainerWithMars):
        return trainer_class
    if trainer_class not in _combined:
        namespace = {"__doc__": f"{trainer_class.__name__} with MARS; see mars_hf.MarsTrainer.", "__module__": __name__}
        metaclass: Any = _picklable(type(trainer_class))
        combined = metaclass(f"Mars{trainer_class.__name__}", (TrainerWithMars, trainer_class), namespace)
        signature = inspect.signature(trainer_class)
        mars_kwargs = inspect.Parameter("mars_kwargs", inspect.Parameter.KEYWORD_ONLY, default=None)
        params = sorted([*signature.parameters.values(), mars_kwargs], key=lambda param: param.kind)
        combined.__signature__ = signature.replace(parameters=params)
        _combined[trainer_class] = combined
    return _combined[trainer_class]


_combined: dict[type, type[Any]] = {Trainer: MarsTrainer}


def _picklable(metaclass: type) -> type:
    """Return a metaclass of classes that no module holds, which are pickled as calls of `with_mars`: Ray sends them."""
    derived = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(derived, _reduce)
    return derived


def _reduce(trainer_class: type) -> str | tuple[Any, ...]:
    """Return what pickle writes of a class of `with_mars`, or of a subclass of one, which its module holds."""
    if trainer_class in _combined.values():
        return with_mars, (trainer_class.__bases__[1],)
    return trainer_class.__qualname__
