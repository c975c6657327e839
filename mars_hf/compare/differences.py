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
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.05
# Intervals are wider than the seeds' spread, which does not know that seeds chose the rates; a simulation sets by how
# much (tests/compare/test_simulation.py).
_WIDER = 1.2
# An arm keeps its own spread where seven of ten equal ones would scatter less, against the others.
_UNEQUAL = 0.7


class FinishedRun(NamedTuple):
    """One finished run."""

    arm: str
    rate: float  # peak of its schedule
    seed: int  # of the weights and of the data order
    value: float  # the metric at the end; NaN if it diverged
    seconds_per_step: float = math.nan  # without evaluations; NaN where runs shared a device
    memory: float = math.nan  # bytes at the peak, of a GPU
    curve: Sequence[tuple[int, float]] = ()  # step and metric of every evaluation, in order
    weights: str | None = None  # fingerprint of the first weights
    batch: str | None = None  # and of the first batch


class Difference(NamedTuple):
    """Mean difference of two arms over the seeds of both; one seed, or a run that diverged, tells no interval."""

    arm: str
    against: str
    mean: float
    seeds: int
    half: float = math.inf  # of its 95% interval
    p: float = math.nan  # two-sided
    holm: float = math.nan  # p after Holm's correction
    would_show: float = math.inf  # the least difference that so many seeds with this spread show

    @property
    def is_shown(self) -> bool:
        """Return whether there is a difference, whatever its sign."""
        return self.holm < LEVEL


def differences(runs: Sequence[FinishedRun], baseline: str, pairs: Sequence[tuple[str, str]] = ()) -> list[Difference]:
    """Return the difference of each arm to the baseline, and of each further pair that shares a seed."""
    values = {name: {run.seed: run.value for run in members} for name, members in by_arm(runs).items()}
    asked = dict.fromkeys([*((name, baseline) for name in values if name != baseline), *pairs])
    found = []
    for one, other in asked:
        seeds = sorted(values.get(one, {}).keys() & values.get(other, {}).keys())
        if seeds:
            gaps = [values[one][seed] - values[other][seed] for seed in seeds]
            gap = Difference(one, other, statistics.fmean(gaps), len(seeds))
            table = np.array([[own.get(seed, math.nan) for seed in seeds] for own in values.values()])
            found.append(_tested(gap, np.array(gaps), table, len(asked)))
    corrected = holm([gap.p for gap in found])
    return [gap._replace(holm=p) for gap, p in zip(found, corrected, strict=True)]


def _tested(gap: Difference, gaps: np.ndarray, table: np.ndarray, tests: int) -> Difference:
    """Return a difference with its interval and p value, where its seeds tell them.

    Args:
        gap: the difference.
        gaps: of each of its seeds.
        table: a row for each arm with the values of these seeds, NaN where there is none. Residuals are its values less
            the means of their arm and of their seed; with two arms, that is the paired t test.
        tests: number of differences.
    """
    if gap.seeds < 2 or not np.isfinite(gaps).all():
        return gap
    table = table[np.isfinite(table).all(axis=1)]
    residuals = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    free, own_free = (len(table) - 1) * (gap.seeds - 1), gap.seeds - 1
    variance, own_variance = float((residuals**2).sum()) / free, float(gaps.var(ddof=1)) / 2
    if own_variance > variance * stats.f.ppf(_UNEQUAL, own_free, free):
        variance, free = own_variance, own_free
    error = _WIDER * math.sqrt(2 * variance / gap.seeds)
    p = 2 * float(stats.t.sf(abs(gap.mean) / error, free)) if error else float(gap.mean == 0)
    half, would_show = (float(stats.t.isf(level / 2, free)) * error for level in (LEVEL, LEVEL / tests))
    return gap._replace(half=half, p=p, would_show=would_show)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm, 1979); NaN stays NaN and counts as a test."""
    order = np.argsort(p_values)  # NaN last
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected: list[float] = np.minimum(np.maximum.accumulate(scaled), 1.0)[np.argsort(order)].tolist()
    return corrected


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
    found: dict[str, list[FinishedRun]] = {}
    for run in runs:
        found.setdefault(run.arm, []).append(run)
    return found
