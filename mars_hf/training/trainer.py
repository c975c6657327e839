"""MarsTrainer, and the same for every other class of trainers."""

from __future__ import annotations

import inspect

from transformers.trainer import Trainer

from mars_hf.training.trainer_with_mars import TrainerWithMars


class MarsTrainer(TrainerWithMars, Trainer):
    """Train with MARS: with the optimizer given, or with one made of TrainingArguments.

    Without an optimizer it makes its own as `optimizer_cls_and_kwargs=mars_hf.factory(args, **mars_kwargs)` does:
    learning rate, betas, eps and weight decay are those of TrainingArguments. `TrainingArguments(optim="mars_m")`, or
    another name of `register`, chooses the rule; `optim` left at its default means mars-adamw, or the rule of
    `mars_kwargs`.

    Trainer drops `optimizers=(optimizer, scheduler)` under DeepSpeed and refuses it under FSDP. MarsTrainer uses that
    optimizer wherever Trainer would build its own. For a Mars it also adds a LastGradientCallback, which stops the run
    at its start if another optimizer would step.

    A Mars clips by `max_grad_norm` inside its step: it takes the global norm and scales in passes over the gradients
    that it makes anyway. Trainer logs `grad_norm` as usual. Callbacks see unclipped gradients before the step and none
    after it, because the step turns them into last gradients (`take_grad`). Trainer's own clipping applies with a
    gradient scaler (fp16), under DeepSpeed, in exact mode, and if the optimizer lacks some of the model's trainable
    parameters. The optimizer's `max_grad_norm` overrides that of TrainingArguments if the latter is the default. When
    `train()` returns or raises, the optimizer's `max_grad_norm` and `take_grad` are restored.

    A NonFiniteCallback, with its defaults unless `callbacks` has one, reports non-finite losses and gradients and stops
    the run after three in a row.

    Args:
        *args: see Trainer.
        mars_kwargs: settings as for `factory`, such as `{"gamma": 0.05, "is_approx": False}`; None for the defaults.
        **kwargs: see Trainer. The model must be the one that the optimizer was built from.

    Raises:
        ValueError: an optimizer is given together with `model_init` or `optimizer_cls_and_kwargs`, which build others,
            or with `mars_kwargs`; TrainingArguments name another optimizer in `optim`; a setting as in `factory`;
            or Mars and TrainingArguments have different values of `max_grad_norm`.
        RuntimeError: another optimizer would step, such as one that an overridden `create_optimizer` or DeepSpeed's
            JSON makes; raised when training starts.
        NotImplementedError: exact MARS under DeepSpeed, or in a trainer that generates its batches; raised when
            training starts.
        NonFiniteError: too many steps in a row with a non-finite loss or gradient; raised in training.

    Source of the exact form: Algorithms 1 and 2 of arXiv 2411.10438.
    """


def with_mars(trainer_class: type[Trainer]) -> type[Trainer]:
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
            f"with_mars({trainer_class!r}): give a class of trainers, transformers.Trainer or a subclass of it; an "
            "instance cannot be changed afterwards"
        )
    if issubclass(trainer_class, TrainerWithMars):
        return trainer_class
    if trainer_class not in _combined:
        namespace = {"__doc__": f"{trainer_class.__name__} with MARS; see mars_hf.MarsTrainer.", "__module__": __name__}
        made = type(f"Mars{trainer_class.__name__}", (TrainerWithMars, trainer_class), namespace)
        signature = inspect.signature(trainer_class)
        own = inspect.Parameter("mars_kwargs", inspect.Parameter.KEYWORD_ONLY, default=None)
        params = sorted([*signature.parameters.values(), own], key=lambda param: param.kind)
        made.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
        _combined[trainer_class] = made
    return _combined[trainer_class]


_combined: dict[type, type[Trainer]] = {Trainer: MarsTrainer}
