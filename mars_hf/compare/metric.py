"""What is compared: held-out loss where a script evaluates, another metric by name, else the training loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAINING_LOSS = "loss"
_SHOWN = 5  # other metrics that the line names: TRL's trainers have a dozen


@dataclass(frozen=True)
class Metric:
    """What is compared."""

    name: str  # key of an evaluation, or "loss" for the mean training loss of the last tenth of the steps
    greater_is_better: bool = False
    best: bool = False  # whether the best evaluation of a run counts (`load_best_model_at_end`), or the last

    @property
    def sign(self) -> int:
        """Return 1 where lower is better, else -1."""
        return -1 if self.greater_is_better else 1

    @property
    def shown_name(self) -> str:
        """Return the name as people read it."""
        return "training loss" if self.name == TRAINING_LOSS else self.name

    def curve(self, training: Mapping[str, Any]) -> list[tuple[int, float]]:
        """Return step and value of each evaluation; of training losses, means of twentieths."""
        if self.name != TRAINING_LOSS:
            return [(row["step"], _number(row[self.name])) for row in training["evaluations"] if self.name in row]
        losses = list(map(_number, training["losses"]))
        size = max(1, len(losses) // 20)
        return [(end, statistics.fmean(losses[end - size : end])) for end in range(size, len(losses) + 1, size)]

    def value(self, training: Mapping[str, Any]) -> float | None:
        """Return the metric of a training; None where it has none."""
        if self.name == TRAINING_LOSS:
            losses = list(map(_number, training["losses"]))
            return statistics.fmean(losses[-max(1, len(losses) // 10) :]) if losses else None
        values = [value for _, value in self.curve(training)]
        if not values:
            return None
        return self.sign * min(self.sign * value for value in values) if self.best else values[-1]


def find_metric(training: Mapping[str, Any], asked: str | None, greater_is_better: bool) -> tuple[Metric, str]:
    """Return the metric of a script, from its first run, and a line about it.

    Raises:
        ValueError: the script has no such metric.
    """
    seen = list(dict.fromkeys(key for row in training["evaluations"] for key in row if key != "step"))
    best = bool(training["arguments"].get("load_best_model_at_end"))
    how = "the best of each run, because of load_best_model_at_end" if best else "the last of each run"
    if asked == TRAINING_LOSS:
        return Metric(TRAINING_LOSS), "metric: the mean training loss of the last tenth of the steps, as asked for"
    args = training["arguments"]
    chosen = f"eval_{str(args.get('metric_for_best_model')).removeprefix('eval_')}"
    if chosen in seen and asked in (None, chosen, chosen.removeprefix("eval_")):
        line = f"metric: {chosen}, the script's metric_for_best_model, {how}"
        return Metric(chosen, bool(args.get("greater_is_better")), best), line
    if asked is None:
        return _of_losses(seen, best, how)
    name = asked if asked in seen else f"eval_{asked}"
    if name not in seen:
        raise ValueError(f"--metric {asked}: the script's evaluations have {', '.join(seen) or 'nothing'}")
    better = "greater" if greater_is_better else "lower"
    return Metric(name, greater_is_better, best), f"metric: {name}, {better} is better, {how}"


def _of_losses(seen: list[str], best: bool, how: str) -> tuple[Metric, str]:
    """Return a held-out loss, or the training loss."""
    losses = sorted((key for key in seen if key.endswith("_loss")), key=lambda key: key != "eval_loss")
    if losses:
        others = ", ".join([key for key in seen if key != losses[0]][:_SHOWN])
        return Metric(losses[0], best=best), f"metric: {losses[0]}, {how}" + (
            f" (--metric: {others})" if others else ""
        )
    why, remedy = "the script evaluates nothing", "an eval_dataset, or --set eval_strategy=steps eval_steps=0.2"
    if seen:
        why, remedy = "its evaluations have no loss", f"--metric {' or '.join(seen)}"
    line = f"metric: THE TRAINING LOSS, because {why}: it tells nothing of held-out data; give {remedy}"
    return Metric(TRAINING_LOSS), line


def _number(value: float | None) -> float:
    return math.nan if value is None else value
