"""Build the optimizer of a run as Trainer accepts it: a factory and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mars_hf
from mars_hf.groups.from_model import from_model
from mars_hf.groups.settings import ORTHOGONAL_KEYS, ORTHOGONAL_TYPES, read
from pretraining.mistakes import Mistake, one_line

if TYPE_CHECKING:
    from pretraining.agreement import Origins
    from pretraining.arguments import OptimizerArguments, PretrainingArguments

# Settings that AdamW has too.
_SHARED = ("beta1", "beta2", "eps", "no_decay")
_ORTHOGONAL_OPTIMIZERS = tuple(kind.replace("-", "_") for kind in ORTHOGONAL_TYPES)


class AdamWFactory:
    """Make torch's AdamW with the same decay groups as MARS."""

    def __call__(self, model: nn.Module, *, no_decay: list[str], **settings: Any) -> torch.optim.AdamW:
        """Make AdamW; vectors and the matrices of `no_decay` do not decay."""
        decay = {"matrix": settings["weight_decay"], "vector": 0.0}
        groups = [
            {"params": group["params"], "weight_decay": group.get("weight_decay", decay[group["role"]])}
            for group in from_model(model, no_decay=no_decay)
        ]
        return torch.optim.AdamW(groups, **settings)


def check(arguments: OptimizerArguments, origins: Origins) -> None:
    """Raise Mistake for settings that the chosen optimizer does not have."""
    chosen = arguments.optimizer
    given = [name for name, value in vars(arguments).items() if name != "optimizer" and value is not None]
    if chosen == "adamw":
        foreign = [name for name in given if name not in _SHARED]
        has = f"it takes {', '.join(_SHARED)}"
    else:
        foreign = [] if chosen in _ORTHOGONAL_OPTIMIZERS else [name for name in given if name in ORTHOGONAL_KEYS]
        has = f"which {' and '.join(_ORTHOGONAL_OPTIMIZERS)} have"
    if foreign:
        punctuation = ";" if chosen == "adamw" else ","
        raise Mistake(f"{origins(foreign[0])}: optimizer {chosen} has no {', '.join(foreign)}{punctuation} {has}")


def for_trainer(arguments: OptimizerArguments, training: PretrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Return the value for `Trainer(optimizer_cls_and_kwargs=...)`, from arguments that `check` has passed.

    Raises:
        Mistake: MARS cannot use a setting's value, or two of them together.
    """
    settings = {name: value for name, value in vars(arguments).items() if name != "optimizer" and value is not None}
    shared = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if arguments.optimizer == "adamw":
        return AdamWFactory, {
            **shared,
            "betas": (settings.get("beta1", training.adam_beta1), settings.get("beta2", training.adam_beta2)),
            "eps": settings.get("eps", training.adam_epsilon),
            "no_decay": settings.get("no_decay", []),
        }
    settings = {name: read(name, value) if isinstance(value, str) else value for name, value in settings.items()}
    if settings.get("clip_threshold") == 0:
        settings["clip_threshold"] = None
    try:
        return mars_hf.factory(training, mars_type=arguments.optimizer.replace("_", "-"), **shared, **settings)
    except ValueError as error:
        raise Mistake(one_line(error)) from error
