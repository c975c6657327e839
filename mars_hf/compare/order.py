"""What the process of one run is asked to do, and how that is set in TrainingArguments, however a script makes them.

The command writes the order into the environment, and the process reads it there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import TrainingArguments

from mars_hf.compare.files import plain

VARIABLE = "MARS_HF_COMPARE"  # of the environment
EVALUATIONS = 5  # in a training that has none
_SILENT = ("output_dir", "push_to_hub", "save_strategy", "report_to", "disable_tqdm")  # of no interest on the page
_MADE = "made_by_comparison"  # attribute of TrainingArguments: the changed values, as their own checks have left them


class Refused(ValueError):
    """The comparison cannot be made on this script; the message is the line for the user."""


@dataclass(frozen=True)
class Order:
    """One run."""

    script: str  # path, or the name of a module
    is_module: bool = False
    text_hash: str = ""  # of the script's or module's own file, which may be edited between two runs
    arguments: Sequence[str] = ()  # of the script's command line
    launcher: Sequence[str] = ()  # what starts a module; (): this Python
    folder: str = ""  # for result.json; the script's own output folder is `output` in it
    shared: Mapping[str, Any] = field(default_factory=dict)  # TrainingArguments of all arms, the seed among them
    arm: Mapping[str, Any] = field(default_factory=dict)  # those that make the arm: optimizer, rate, decay, betas
    with_mars: bool = False  # whether Trainer becomes MarsTrainer, as under `python -m mars_hf run`
    evaluates: bool = True  # False where the training loss is compared, and nobody asks for an evaluation

    @property
    def command(self) -> list[str]:
        """Return what follows `python` where the script runs alone."""
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]

    def text(self) -> str:
        """Return the order as a line of JSON: the arguments of another Order."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def is_of_this_text(self) -> bool:
        """Return whether the script is as it was when the order was made."""
        return self.text_hash == hash_of(self.script, self.is_module)

    def what_trains(self) -> dict[str, Any]:
        """Return all that decides a run's numbers: a finished run with another is not this run."""
        whole = json.loads(self.text())
        return {name: value for name, value in whole.items() if name not in ("folder", "evaluates")}

    # --- in the process of the run ------------------------------------------------------------------------------------

    def apply(self, args: TrainingArguments) -> None:
        """Change TrainingArguments that are being made, before they check themselves."""
        for name, value in self._changes(args).items():
            setattr(args, name, value)

    def remember(self, args: TrainingArguments) -> None:
        """Remember the changed values as the checks of TrainingArguments have left them, such as an enum of a name."""
        setattr(args, _MADE, {name: getattr(args, name) for name in self._changes(args)})

    def apply_again(self, args: TrainingArguments) -> list[str]:
        """Change what a script has set after it made its TrainingArguments, and return a line about each."""
        notes = []
        for name, value in getattr(args, _MADE, self._changes(args)).items():  # loaded ones have made no checks here
            there = getattr(args, name)
            if there != value and name not in _SILENT:
                said = f"the script set {name}={plain(there)!r} in its TrainingArguments afterwards"
                notes.append(f"{said}; it was set to {plain(value)!r}")
            setattr(args, name, value)
        return notes

    def _changes(self, args: TrainingArguments) -> dict[str, Any]:
        asked = {**self.shared, **self.arm}
        # Checkpoints of many runs fill a disk.
        keeps_best = asked.get("load_best_model_at_end", args.load_best_model_at_end)
        saving = {"save_total_limit": 1} if keeps_best else {"save_strategy": "no"}
        own = {"output_dir": str(Path(self.folder) / "output"), "report_to": "none", "push_to_hub": False}
        found = {**own, "disable_tqdm": True, **saving, **asked}
        for name in found:
            if not hasattr(args, name):
                raise Refused(f"--set {name}: {type(args).__name__}, the script's TrainingArguments, has no such field")
        return found

    def evaluate_in_training(self, args: TrainingArguments) -> str:
        """Let a Trainer with an eval_dataset evaluate where the script does not; return a line if that is a change."""
        if args.eval_strategy != IntervalStrategy.NO or not self.evaluates or "eval_strategy" in self.shared:
            return ""
        if getattr(args, "predict_with_generate", False):
            return "the script generates in evaluations, so the comparison evaluates once, at the end"
        args.eval_strategy, args.eval_steps, args.do_eval = IntervalStrategy.STEPS, 1 / EVALUATIONS, True
        return (
            f"the script does not evaluate in training; the comparison does, {EVALUATIONS} times, on its eval_dataset"
        )


def hash_of(script: str, is_module: bool) -> str:
    """Return what tells the file of a script or module from edited ones; packages around a module are imported.

    Raises:
        Refused: there is no such script or module.
    """
    path = _file_of(script) if is_module else script
    if path is None or not os.path.isfile(path):
        remedy = "a name that python -m can run" if is_module else "a path, or -m MODULE"
        raise Refused(f"no such {'module' if is_module else 'script'}: {script!r} (give {remedy})")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _file_of(module: str) -> str | None:
    """Return the file that python -m runs, which is the __main__ of a package; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ImportError as error:
        raise Refused(f"-m {module}: {type(error).__name__}: {error}") from error
    return None if spec is None else spec.origin
