"""Compare the runs of several arms, seed by seed.

Runs of one seed begin with the same weights and read the same data in the same order: arms are compared within seeds.
They share one residual variance: three seeds of one arm hardly tell a spread. A difference is shown if Student's t over
these residuals, corrected for the number of arms by Holm's method, has p < 0.05.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.05
# Intervals are wider than the seeds' spread, which does not know that seeds chose the rates; a simulation sets by how
# much (tests/compare/test_simulation.py).
_WIDER = 1.2
# An arm keeps its own spread where seven of ten equal ones would scatter less, against the others.
_UNEQUAL = 0.7


@dataclass(frozen=True)
class FinishedRun:
    """One finished run; `value` of a run that diverged is NaN and its curve is empty.

    Args:
        arm: its name.
        rate: peak of its schedule.
        seed: of the weights and of the data order.
        value: the metric at the end.
        seconds_per_step: without evaluations.
        memory: bytes at the peak, of a GPU.
        curve: step and metric of every evaluation, in order.
        weights: fingerprint of the first weights; `batch`: of the first batch.
    """

    arm: str
    rate: float
    seed: int
    value: float
    seconds_per_step: float = math.nan
    memory: float = math.nan
    curve: tuple[tuple[int, float], ...] = ()
    weights: str | None = None
    batch: str | None = None


class Difference(NamedTuple):
    """Mean difference of two arms over the seeds of both, half of its 95% interval and two-sided p value.

    `holm` is the p value after Holm's correction, `would_show` the least difference that so many seeds with this spread
    show. With one seed, or if a run diverged, they are infinite or NaN.
    """

    arm: str
    against: str
    mean: float
    seeds: int
    half: float = math.inf
    p: float = math.nan
    holm: float = math.nan
    would_show: float = math.inf

    @property
    def is_shown(self) -> bool:
        """Return whether there is a difference, whatever its sign."""
        return self.holm < LEVEL


class _Spread(NamedTuple):
    """Standard error of a difference of two arms' means, and the degrees of freedom behind it."""

    error: float
    free: int


def differences(runs: Sequence[FinishedRun], baseline: str, pairs: Sequence[tuple[str, str]] = ()) -> list[Difference]:
    """Return the difference of each arm to the baseline, and of each further pair that shares a seed."""
    values = {name: {run.seed: run.value for run in members} for name, members in by_arm(runs).items()}
    asked = dict.fromkeys([*((name, baseline) for name in values if name != baseline), *pairs])
    found = []
    for one, other in asked:
        seeds = sorted(values.get(one, {}).keys() & values.get(other, {}).keys())
        if seeds:
            mean = statistics.fmean(values[one][seed] - values[other][seed] for seed in seeds)
            spread = _spread(values, one, other, seeds)
            found.append(_difference(one, other, mean, len(seeds), spread, len(asked)))
    corrected = holm([gap.p for gap in found])
    return [gap._replace(holm=p) for gap, p in zip(found, corrected, strict=True)]


def _spread(values: dict[str, dict[int, float]], one: str, other: str, seeds: Sequence[int]) -> _Spread | None:
    """Return how far a difference over these seeds may be off by chance; None if nothing tells it.

    Residuals are those of runs less the means of their arm and of their seed, over all arms that have these seeds. With
    two arms that is the paired t test. A pair whose own spread is much larger than that of the others keeps its own.
    """
    table = np.array([[own.get(seed, math.nan) for seed in seeds] for own in values.values()])
    table = table[np.isfinite(table).all(axis=1)]
    gaps = np.array([values[one][seed] - values[other][seed] for seed in seeds])
    if len(seeds) < 2 or not np.isfinite(gaps).all():
        return None
    residuals = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    free, own_free = (len(table) - 1) * (len(seeds) - 1), len(seeds) - 1
    variance, own_variance = float((residuals**2).sum()) / free, float(gaps.var(ddof=1)) / 2
    if own_variance > variance * stats.f.ppf(_UNEQUAL, own_free, free):
        variance, free = own_variance, own_free
    return _Spread(_WIDER * math.sqrt(2 * variance / len(seeds)), free)


def _difference(one: str, other: str, mean: float, seeds: int, spread: _Spread | None, tests: int) -> Difference:
    if spread is None:
        return Difference(one, other, mean, seeds)
    error, free = spread
    p = 2 * float(stats.t.sf(abs(mean) / error, free)) if error else float(mean == 0)
    half, would_show = (float(stats.t.isf(level / 2, free)) * error for level in (LEVEL, LEVEL / tests))
    return Difference(one, other, mean, seeds, half, p, would_show=would_show)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm, 1979); NaN stays NaN and counts as a test."""
    order = np.argsort(p_values)  # NaN last
    corrected = np.empty(len(p_values))
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0) if len(p_values) else scaled
    return [float(p) for p in corrected]


def mean_curve(runs: Sequence[FinishedRun]) -> list[tuple[int, float]]:
    """Return one arm's mean metric at the steps that all its runs evaluated."""
    curves = [dict(run.curve) for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]


def steps_to(goal: float, curve: Sequence[tuple[int, float]], *, sign: int = 1) -> int | None:
    """Return the first step at which a curve is as good as a value, on lines between its points; None: never."""
    curve, goal = [(step, sign * value) for step, value in curve], sign * goal
    if curve and curve[0][1] <= goal:
        return curve[0][0]
    for (start, above), (end, below) in itertools.pairwise(curve):
        if below <= goal:
            return round(start + (end - start) * (above - goal) / (above - below))
    return None


def by_arm(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Group runs by arm, in the order of their first runs."""
    names = dict.fromkeys(run.arm for run in runs)
    return {name: [run for run in runs if run.arm == name] for name in names}


def ended_alike(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a line for each arm whose seeds gave one value: what looks certain there is not."""
    found = []
    for name, members in by_arm(runs).items():
        values = {run.value for run in members if math.isfinite(run.value)}
        if len(members) > 1 and len(values) == 1:
            began = {(run.weights, run.batch) for run in members}
            why = "the seeds changed nothing" if len(began) == 1 else "the metric is too coarse to tell them apart"
            found.append(f"all runs of {name} ended alike, {why}")
    return found
