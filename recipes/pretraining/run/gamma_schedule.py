"""Let MARS's gamma fall over the run."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mars_hf.training.guard import innermost


class GammaSchedule(TrainerCallback):
    """Multiply gamma by a factor that falls from 1 to 0 over the run.

    Args:
        shape: `linear` or `cosine`; `constant` or None leave gamma alone.
    """

    def __init__(self, shape: str | None = None) -> None:
        """Choose the shape."""
        self._shape = shape

    def factor(self, progress: float) -> float:
        """Return the factor at a share of the run, from 0 to 1."""
        if self._shape == "linear":
            return 1 - progress
        return (1 + math.cos(math.pi * progress)) / 2 if self._shape == "cosine" else 1.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the first gamma, for what is announced; a checkpoint has that of its step."""
        for group in innermost(kwargs["optimizer"]).param_groups:
            group["gamma"] = group.get("initial_gamma", group["gamma"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the gamma of the step to come; groups keep the first one, so a resumed run goes on with it."""
        if self._shape in (None, "constant"):
            return
        mars = innermost(kwargs["optimizer"])
        for group in mars.param_groups:
            group.setdefault("initial_gamma", group["gamma"])
            group["gamma"] = group["initial_gamma"] * self.factor(state.global_step / state.max_steps)
