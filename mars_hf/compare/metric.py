"""What is compared: held-out loss where a script evaluates, another metric by name, else the training loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRAINING_LOSS = "loss"
_SHOWN = 5  # other metrics that the line names: TRL's trainers have a dozen


@dataclass(frozen=True)
class Metric:
    """What is compared.

    Args:
        name: key of an evaluation, or "loss" for the mean training loss of the last tenth of the steps.
        greater_is_better: False for losses.
        best: True takes the best evaluation of a run (`load_best_model_at_end`), False the last.
    """

    name: str
    greater_is_better: bool = False
    best: bool = False

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
            rows = [row for row in training["evaluations"] if self.name in row]
            return [(row["step"], _number(row[self.name])) for row in rows]
        losses = [_number(loss) for loss in training["losses"]]
        size = max(1, len(losses) // 20)
        starts = range(0, len(losses) - size + 1, size)
        return [(start + size, statistics.fmean(losses[start : start + size])) for start in starts]

    def value(self, training: Mapping[str, Any]) -> float | None:
        """Return the metric of a training; None where it has none."""
        if self.name == TRAINING_LOSS:
            losses = [_number(loss) for loss in training["losses"]]
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
        metric, line = Metric(TRAINING_LOSS), "the mean training loss of the last tenth of the steps, as asked for"
    elif asked is not None:
        metric = Metric(_name_among(seen, asked), greater_is_better, best)
        line = f"{metric.name}, {'greater' if greater_is_better else 'lower'} is better, {how}"
    else:
        metric, line = _of_script(training, seen, best, how)
    if metric.value(training) is None:
        raise ValueError(f"the first run has no {metric.shown_name}: choose another with --metric")
    return metric, f"metric: {line}"


def _name_among(seen: Sequence[str], asked: str) -> str:
    """Return the metric's name in evaluations, where it has a prefix."""
    for name in (asked, f"eval_{asked}"):
        if name in seen:
            return name
    raise ValueError(f"--metric {asked}: the script's evaluations have {', '.join(seen) or 'nothing'}")


def _of_script(training: Mapping[str, Any], seen: Sequence[str], best: bool, how: str) -> tuple[Metric, str]:
    """Return the metric that the script chooses its best model by, or a held-out loss, or the training loss."""
    chosen = training["arguments"].get("metric_for_best_model")
    name = f"eval_{str(chosen).removeprefix('eval_')}"
    if chosen and name in seen:
        greater = bool(training["arguments"].get("greater_is_better"))
        return Metric(name, greater, best), f"{name}, the script's metric_for_best_model, {how}"
    losses = sorted((key for key in seen if key.endswith("_loss")), key=lambda key: key != "eval_loss")
    if losses:
        others = ", ".join([key for key in seen if key != losses[0]][:_SHOWN])
        return Metric(losses[0], False, best), f"{losses[0]}, {how}" + (f" (--metric: {others})" if others else "")
    why, remedy = "the script evaluates nothing", "an eval_dataset, or --set eval_strategy=steps eval_steps=0.2"
    if seen:
        why, remedy = "its evaluations have no loss", f"--metric {' or '.join(seen)}"
    return Metric(TRAINING_LOSS), f"THE TRAINING LOSS, because {why}: it tells nothing of held-out data; give {remedy}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value
