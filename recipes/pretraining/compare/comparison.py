"""Compare the runs of several arms, seed by seed.

Runs of one seed start from the same weights and read the same data in the same order. A difference is shown if its 95%
interval (Student's t over the seeds) excludes 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import ttest_rel


@dataclass(frozen=True)
class FinishedRun:
    """One finished run; numbers of a run that diverged are NaN and its curve is empty.

    Args:
        contender: the arm.
        seed: seed of the initial weights and of the data order.
        learning_rate: peak of its schedule.
        eval_loss: held-out loss after the last step.
        tokens_per_second: training throughput, without evaluations.
        curve: step and held-out loss of every evaluation, in order.
    """

    contender: str
    seed: int
    learning_rate: float
    eval_loss: float
    tokens_per_second: float
    curve: tuple[tuple[int, float], ...] = ()


class Difference(NamedTuple):
    """Mean difference of two arms' losses, its 95% interval and two-sided p value, paired by seed.

    `holm` is the p value after Holm's correction. With one seed, or if a run diverged, the interval has no end and p is
    NaN.
    """

    contender: str
    against: str
    mean: float
    low: float = -math.inf
    high: float = math.inf
    p: float = math.nan
    holm: float = math.nan

    @property
    def shown(self) -> str:
        """Return whether a difference is shown: yes, not by Holm's correction, or no."""
        if self.low <= 0 <= self.high:
            return "no"
        return "yes" if self.holm < 0.05 else "not by Holm"


class Row(NamedTuple):
    """Result of one arm over its runs.

    `steps_to_baseline` is where the mean loss reaches the baseline's final one, on lines between evaluations (None:
    never), `speed` the ratio of tokens per second to the baseline's. If a run diverged, `loss` is NaN, `lowest` and
    `highest` are those of the others, and `steps` is 0.
    """

    contender: str
    learning_rate: float
    seeds: int
    diverged: int
    loss: float
    lowest: float
    highest: float
    steps: int
    steps_to_baseline: int | None
    speed: float


def difference(runs: Sequence[FinishedRun], against: Sequence[FinishedRun]) -> Difference:
    """Return the difference of final held-out losses over the seeds that both arms have."""
    theirs = {run.seed: run.eval_loss for run in against}
    losses = np.array([(run.eval_loss, theirs[run.seed]) for run in runs if run.seed in theirs])
    names = runs[0].contender, against[0].contender
    mean = float(np.mean(losses[:, 0] - losses[:, 1]))
    if len(losses) < 2 or not math.isfinite(mean):
        return Difference(*names, mean)
    test = ttest_rel(losses[:, 0], losses[:, 1])
    low, high = map(float, test.confidence_interval(0.95))
    return Difference(*names, mean, low, high, float(test.pvalue))


def differences(runs: Sequence[FinishedRun], baseline: str, pairs: Sequence[tuple[str, str]] = ()) -> list[Difference]:
    """Return the difference of each arm to the baseline, and of each further pair that shares a seed."""
    arms = by_contender(runs)
    asked = dict.fromkeys([*((name, baseline) for name in arms if name != baseline), *pairs])
    seeds = {name: {run.seed for run in members} for name, members in arms.items()}
    gaps = [
        difference(arms[one], arms[other]) for one, other in asked if seeds.get(one, set()) & seeds.get(other, set())
    ]
    return [gap._replace(holm=p) for gap, p in zip(gaps, holm([gap.p for gap in gaps]), strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm, 1979); NaN stays NaN and counts as a test."""
    order = np.argsort(p_values)  # NaN last
    corrected = np.empty(len(p_values))
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(p) for p in corrected]


def mean_curve(runs: Sequence[FinishedRun]) -> list[tuple[int, float]]:
    """Return one arm's mean loss at the steps that all its runs evaluated; a resumed run has extra ones."""
    curves = [dict(run.curve) for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]


def steps_to(goal: float, curve: Sequence[tuple[int, float]]) -> int | None:
    """Return the first step at which a curve is not above a loss, on lines between its points; None: never."""
    if curve and curve[0][1] <= goal:
        return curve[0][0]
    for (start, above), (end, below) in itertools.pairwise(curve):
        if below <= goal:
            return round(start + (end - start) * (above - goal) / (above - below))
    return None


def summarize(runs: Sequence[FinishedRun], baseline: str) -> list[Row]:
    """Return one row per arm, in the order of their first runs."""
    arms = by_contender(runs)
    goal = statistics.fmean(run.eval_loss for run in arms[baseline])
    speeds = {
        name: statistics.median([run.tokens_per_second for run in members if run.curve] or [math.nan])
        for name, members in arms.items()
    }
    rows = []
    for name, members in arms.items():
        losses = [run.eval_loss for run in members]
        finite = [loss for loss in losses if math.isfinite(loss)]
        curve = mean_curve(members)
        rows.append(
            Row(
                contender=name,
                learning_rate=members[0].learning_rate,
                seeds=len(members),
                diverged=len(losses) - len(finite),
                loss=statistics.fmean(losses),
                lowest=min(finite, default=math.nan),
                highest=max(finite, default=math.nan),
                steps=curve[-1][0] if curve else 0,
                steps_to_baseline=steps_to(goal, curve),
                speed=speeds[name] / speeds[baseline],
            )
        )
    return rows


def by_contender(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Group runs by arm, in the order of their first runs."""
    names = dict.fromkeys(run.contender for run in runs)
    return {name: [run for run in runs if run.contender == name] for name in names}
