"""The settings that a run's weights depend on, and what a resume may change of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from pretraining.run.arguments import DataArguments, ModelArguments, OptimizerArguments, RunArguments

# A resume takes these from the checkpoint: state, group settings and base rates are loaded.
_OPTIMIZER = ("learning_rate", "weight_decay", "adam_epsilon")
# A resume takes these as given, and says so.
_TRAINING = (
    *("max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "bf16", "fp16", "tf32"),
)
_FREE_MODEL = ("dropout", "attn_implementation")


def settings_of(run: RunArguments, data: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the settings of a run in three sections: model and data, optimizer, training.

    Args:
        run: parsed arguments.
        data: what identifies the tokens.
        world_size: number of processes.
    """
    model = dataclasses.asdict(run.model)
    training = {key: getattr(run.training, key) for key in _TRAINING}
    sections = {
        "model": {key: value for key, value in model.items() if key not in _FREE_MODEL},
        "data": data,
        "optimizer": dataclasses.asdict(run.optimizer) | {key: getattr(run.training, key) for key in _OPTIMIZER},
        "training": training | {key: model[key] for key in _FREE_MODEL} | {"processes": world_size},
    }
    plain: dict[str, Any] = json.loads(json.dumps(sections, default=str))  # as they are read back
    return plain


def chosen(values: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a run that is not started yet, by name, the data as it is named; see `arguments.read`."""
    kinds = (ModelArguments, DataArguments, OptimizerArguments)
    names = [field.name for kind in kinds for field in dataclasses.fields(kind) if field.init]
    found = {name: getattr(values, name) for name in (*names, *_OPTIMIZER, *_TRAINING)}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def refused(saved: dict[str, Any], given: dict[str, Any], where: Path) -> str | None:
    """Return a line if a run cannot go on with the given settings; None if it can."""
    changes = [
        f"{key}={_text(old)} (now {_text(new)})"
        for section in ("model", "data", "optimizer")
        for key, old, new in _changes(saved, given, section)
    ]
    if not changes:
        return None
    return (
        f"{where} was trained with {', '.join(changes)}; resume with the same settings, or start a new run in another "
        "--output_dir"
    )


def changed(saved: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Return one line for each setting that a resume takes as given although another was saved."""
    return [
        f"resuming: {key}={_text(new)} trains, not {_text(old)}" for key, old, new in _changes(saved, given, "training")
    ]


def _changes(saved: dict[str, Any], given: dict[str, Any], section: str) -> list[tuple[str, Any, Any]]:
    before, now = saved.get(section, {}), given[section]
    return [(key, before[key], now[key]) for key in now if key in before and before[key] != now[key]]


def _text(value: Any) -> str:
    return (
        f"{value:g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, dict) else str(value)[:40]
    )
