"""Build the optimizer of a run as Trainer accepts it: a factory and its settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mars_hf
from mars_hf.groups.from_model import from_model
from mars_hf.groups.settings import ORTHOGONAL_KEYS, ORTHOGONAL_TYPES, read
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


def for_trainer(arguments: OptimizerArguments, training: PretrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Return the value for `Trainer(optimizer_cls_and_kwargs=...)`.

    Raises:
        ValueError: the optimizer does not have a given setting.
    """
    settings = {name: value for name, value in vars(arguments).items() if name != "optimizer" and value is not None}
    shared = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if arguments.optimizer == "adamw":
        foreign = [name for name in settings if name not in _SHARED]
        if foreign:
            raise ValueError(f"optimizer=adamw has no {', '.join(foreign)}; it takes {', '.join(_SHARED)}")
        return AdamWFactory, {
            **shared,
            "betas": (settings.get("beta1", training.adam_beta1), settings.get("beta2", training.adam_beta2)),
            "eps": settings.get("eps", training.adam_epsilon),
            "no_decay": settings.get("no_decay", []),
        }
    foreign = [name for name in settings if name in ORTHOGONAL_KEYS]
    if foreign and arguments.optimizer not in _ORTHOGONAL_OPTIMIZERS:
        owners = " and ".join(_ORTHOGONAL_OPTIMIZERS)
        raise ValueError(f"optimizer={arguments.optimizer} has no {', '.join(foreign)}, which {owners} have")
    settings = {name: read(name, value) if isinstance(value, str) else value for name, value in settings.items()}
    if settings.get("clip_threshold") == 0:
        settings["clip_threshold"] = None
    return mars_hf.factory(training, mars_type=arguments.optimizer.replace("_", "-"), **shared, **settings)
