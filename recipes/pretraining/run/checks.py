"""Refuse values that no run can have, before it begins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._inductor import list_mode_options
from transformers import get_scheduler
from transformers.integrations import get_available_reporting_integrations

_LARGEST_COUNT = 2**31
# Least values of integers that are no counts; None: any. Counts are at least 1, other numbers at least 0.
_LEAST = {
    "data_seed": 0,
    "dataloader_num_workers": 0,
    "eval_delay": 0,
    "local_rank": None,
    "max_steps": None,  # -1 counts epochs
    "num_fewshot": 0,
    "sample_tokens": 0,
    "save_total_limit": None,  # 0 keeps all
    "seed": 0,
    "tokens_per_step": 0,  # any number
    "warmup_steps": 0,
    "world_size": 0,
}
# Small data may have fewer sequences than a usual batch; a larger batch than this is a slip, and fills the memory.
_USUAL_BATCH = 1024


def numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that is not finite, too large, or below what any setting of its kind can be."""
    for name, value in values.items():
        if name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int):
            _check_integer(name, value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"--{name} {value}: give a finite number")
            if value < 0:
                raise ValueError(f"--{name} {value}: give a number from 0 on")


def _check_integer(name: str, value: int) -> None:
    if abs(value) >= 2**53:
        raise ValueError(f"--{name} {value}: give a number below 2^53")
    least = _LEAST.get(name, 1)
    is_count = name not in _LEAST
    if least is not None and (value < least or (is_count and value >= _LARGEST_COUNT)):
        raise ValueError(f"--{name} {value}: give an integer from {least} on{', below 2^31' if is_count else ''}")


def batch(name: str, size: int, sequences: int) -> None:
    """Raise ValueError for a batch that is larger than the data and than any that is usual."""
    if size > max(sequences, _USUAL_BATCH):
        raise ValueError(f"--{name} {size}: the data have {sequences:,} sequences; give at most {sequences}")


def reports(report_to: str | Iterable[str] | None) -> None:
    """Raise ValueError for a tracker that is unknown or not installed."""
    available = get_available_reporting_integrations()
    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in names:
        if name not in ("all", "none", *available):
            raise ValueError(f"--report_to {name}: unknown, or not installed; here are: {', '.join(available)}, none")


def words(values: Mapping[str, Any]) -> None:
    """Raise ValueError for words that transformers passes on, and that fail only in the first step."""
    reports(values.get("report_to"))
    config = values.get("deepspeed")
    if isinstance(config, str) and not config.lstrip().startswith("{") and not Path(config).is_file():
        raise ValueError(f"--deepspeed {config}: no such file; give a JSON file, or start with accelerate launch")
    labels = values.get("label_names")
    if labels and list(labels) != ["labels"]:
        raise ValueError(f"--label_names {' '.join(labels)}: the recipe's data have labels alone; leave the flag out")
    modes = list(list_mode_options())
    mode = values.get("torch_compile_mode")
    if mode is not None and mode not in modes:
        raise ValueError(f"--torch_compile_mode {mode}: accepted: {', '.join(modes)}")


def schedule(kind: Any, settings: Any) -> None:
    """Raise ValueError for settings that the schedule does not take: make it for a parameter of its own, and run it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        settings = json.loads(settings) if isinstance(settings, str) else settings
        made = get_scheduler(kind, optimizer, 1, 10, scheduler_specific_kwargs=settings)
        for factor in getattr(made, "lr_lambdas", ()):
            for step in range(11):
                factor(step)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"--lr_scheduler_type {kind} with {settings!r:.200}: {error}; give --lr_scheduler_kwargs "
            "'{\"NAME\": VALUE}', or '{}' for none"
        ) from None
