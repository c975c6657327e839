"""What the process of one run is asked to do; the command writes it into the environment, the process reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "MARS_HF_COMPARE"  # of the environment


@dataclass(frozen=True)
class Order:
    """One run.

    Args:
        script: path, or the name of a module.
        is_module: whether it is a module.
        arguments: of the script's command line.
        launcher: what starts a module; (): this Python.
        folder: for result.json; the script's own output folder is `output` in it.
        shared: values of TrainingArguments that all arms have, the seed among them.
        arm: those that make the arm: optimizer, learning rate, decay, betas.
        with_mars: whether Trainer becomes MarsTrainer, as under `python -m mars_hf run`.
        is_searched: whether the learning rate must reach the optimizer.
        evaluates: False where nobody asks for an evaluation, because the training loss is compared.
    """

    script: str
    is_module: bool = False
    arguments: Sequence[str] = ()
    launcher: Sequence[str] = ()
    folder: str = ""
    shared: Mapping[str, Any] = field(default_factory=dict)
    arm: Mapping[str, Any] = field(default_factory=dict)
    with_mars: bool = False
    is_searched: bool = True
    evaluates: bool = True

    @property
    def command(self) -> list[str]:
        """Return what follows `python` where the script runs alone."""
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]

    def text(self) -> str:
        """Return the order as a line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Order:
        """Return what `text` wrote."""
        return cls(**json.loads(text))

    def what_trains(self) -> dict[str, Any]:
        """Return all that decides a run's numbers: a finished run with another is not this run."""
        whole = json.loads(self.text())
        return {name: value for name, value in whole.items() if name not in ("folder", "is_searched", "evaluates")}
