"""The optimizer of a run, as Trainer takes it: a class or factory and its settings."""

from __future__ import annotations

from typing import Any

import torch

import mars_hf
from pretraining.arguments import OptimizerArguments, PretrainingArguments

# Settings that torch.optim.AdamW has too.
_SHARED = ("beta1", "beta2", "eps")


def for_trainer(arguments: OptimizerArguments, training: PretrainingArguments) -> tuple[Any, dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=...)` takes.

    Raises:
        ValueError: a setting of MARS was given for AdamW.
    """
    settings = {name: value for name, value in vars(arguments).items() if name != "optimizer" and value is not None}
    if arguments.optimizer == "adamw":
        foreign = [name for name in settings if name not in _SHARED]
        if foreign:
            raise ValueError(f"optimizer=adamw has no {', '.join(foreign)}; it takes {', '.join(_SHARED)}")
        betas = (settings.get("beta1", 0.9), settings.get("beta2", 0.999))
        return torch.optim.AdamW, {
            "lr": training.learning_rate,
            "weight_decay": training.weight_decay,
            "betas": betas,
            "eps": settings.get("eps", 1e-8),
        }
    if settings.get("clip_threshold") == 0:
        settings["clip_threshold"] = None
    return mars_hf.factory(
        mars_type=arguments.optimizer.replace("_", "-"),
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        **settings,
    )
