"""In the process of a run: set what the comparison asks for in TrainingArguments, however a script makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import OptimizerNames, TrainingArguments

from mars_hf.compare.order import Order

EVALUATIONS = 5  # in a training that has none
_SILENT = ("output_dir", "push_to_hub", "save_strategy")  # of no interest on the page


class Refused(ValueError):
    """The comparison cannot be made on this script; the message is the line for the user."""


def apply(order: Order, args: TrainingArguments) -> None:
    """Change TrainingArguments that are being made, before they check themselves."""
    for name, value in changes(order, args).items():
        setattr(args, name, value)


def apply_again(order: Order, args: TrainingArguments) -> list[str]:
    """Change what a script has set after it made its TrainingArguments, and return a line about each."""
    notes = []
    for name, value in changes(order, args).items():
        there = getattr(args, name)
        if str(plain(there)) == str(value) or name in ("report_to", "disable_tqdm"):
            continue
        if name not in _SILENT:
            said = f"the script set {name}={plain(there)!r} in its TrainingArguments afterwards"
            notes.append(f"{said}; it was set to {value!r}")
        if name == "optim":
            value = OptimizerNames(value)
        elif isinstance(there, Enum):
            value = type(there)(value)
        setattr(args, name, value)
    return notes


def changes(order: Order, args: TrainingArguments) -> dict[str, Any]:
    """Return what is set in all TrainingArguments of a script.

    Raises:
        Refused: a name that they do not have.
    """
    # Checkpoints of many runs fill a disk.
    saving = {"save_total_limit": 1} if args.load_best_model_at_end else {"save_strategy": "no"}
    own = {"output_dir": str(Path(order.folder) / "output"), "report_to": "none", "push_to_hub": False}
    found = {**own, "disable_tqdm": True, **saving, **order.shared, **order.arm}
    for name in found:
        if not hasattr(args, name):
            raise Refused(f"--set {name}: {type(args).__name__}, the script's TrainingArguments, has no such field")
    return found


def evaluate_in_training(order: Order, args: TrainingArguments) -> str:
    """Let a Trainer with an eval_dataset evaluate where the script does not; return a line if that is a change."""
    if args.eval_strategy != IntervalStrategy.NO or not order.evaluates or "eval_strategy" in order.shared:
        return ""
    if getattr(args, "predict_with_generate", False):
        return "the script generates in evaluations, so the comparison evaluates once, at the end"
    args.eval_strategy, args.eval_steps, args.do_eval = IntervalStrategy.STEPS, 1 / EVALUATIONS, True
    return f"the script does not evaluate in training; the comparison does, {EVALUATIONS} times, on its eval_dataset"


def plain(value: Any) -> Any:
    """Return a value as JSON has it: enums as their values, other objects as text."""
    value = getattr(value, "value", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int, type(None))):  # bool too
        return value
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return str(value)
