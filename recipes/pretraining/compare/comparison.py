"""Compare optimizers on one job: paired differences, table and verdicts from their runs.

Runs of one seed start from the same weights and read the same data in the same order, so their losses are compared seed
by seed. A difference is claimed only where its 95% interval, Student's t over the seeds, excludes 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.stats import chi, norm
from scipy.stats import t as student

from pretraining.run import report


@dataclass(frozen=True)
class Run:
    """One finished run.

    Args:
        contender: the optimizer and its form.
        seed: seed of the initial weights and of the data order.
        learning_rate: peak of its schedule.
        eval_loss: held-out loss after the last step; NaN for a run that diverged.
        tokens_per_second: training throughput, without evaluations; NaN for a run that diverged.
        curve: step and held-out loss of every evaluation, in order; empty for a run that diverged.
    """

    contender: str
    seed: int
    learning_rate: float
    eval_loss: float
    tokens_per_second: float
    curve: tuple[tuple[int, float], ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name; None where a number is not finite."""
        found: dict[str, Any] = report.finite(dataclasses.asdict(self))
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """Return the run that `as_json` described; None becomes NaN."""
        found: dict[str, Any] = {name: math.nan if value is None else value for name, value in fields.items()}
        found["curve"] = tuple((step, math.nan if loss is None else loss) for step, loss in fields["curve"])
        return cls(**found)

    def __str__(self) -> str:
        """Return one line."""
        result = f"{self.eval_loss:.4f}" if math.isfinite(self.eval_loss) else "diverged"
        return f"{self.contender}, seed {self.seed}: {result}"


class Difference(NamedTuple):
    """Mean of the paired differences of two contenders' losses, and its 95% interval.

    `detectable` is the difference that this many seeds with this spread would show four times out of five, `p` the
    two-sided p value of the paired t-test. With one seed the interval is all numbers, so is what stays open, and `p` is
    NaN.
    """

    mean: float
    low: float
    high: float
    seeds: int
    detectable: float
    p: float

    @property
    def is_shown(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name; None where a number is not finite."""
        found: dict[str, Any] = report.finite(self._asdict())
        return found

    def __str__(self) -> str:
        """Return the interval in words."""
        if self.seeds < 2:
            return "one seed, no interval"
        return f"95% interval {self.low:+.3f} to {self.high:+.3f}, {self.seeds} seeds"


class Row(NamedTuple):
    """Result of one contender over its runs.

    `against_baseline` is the paired difference to the baseline's losses, `steps_to_baseline` the first evaluated step
    whose mean loss is not above the baseline's final one (None: never), `speed` the ratio of tokens per second to the
    baseline's. If a run diverged, numbers are NaN, `lowest` and `highest` those of the others, and `steps` is 0.
    """

    contender: str
    learning_rate: float
    seeds: int
    diverged: int
    loss: float
    lowest: float
    highest: float
    against_baseline: Difference
    steps: int
    steps_to_baseline: int | None
    speed: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name; None where a number is not finite."""
        found: dict[str, Any] = report.finite({**self._asdict(), "against_baseline": self.against_baseline._asdict()})
        return found


def difference(runs: Sequence[Run], against: Sequence[Run]) -> Difference:
    """Return the difference of final held-out losses over the seeds that both contenders have.

    Raises:
        ValueError: they have none in common.
    """
    theirs = {run.seed: run.eval_loss for run in against}
    gaps = [run.eval_loss - theirs[run.seed] for run in runs if run.seed in theirs]
    if not gaps:
        raise ValueError(f"{runs[0].contender} and {against[0].contender} have no seed in common")
    mean = statistics.fmean(gaps)
    if len(gaps) < 2 or not math.isfinite(mean):
        return Difference(mean, -math.inf, math.inf, len(gaps), math.inf, math.nan)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    half = float(student.ppf(0.975, len(gaps) - 1))
    ratio = abs(mean) / error if error else math.inf if mean else 0.0
    p = 2 * float(student.sf(ratio, len(gaps) - 1))
    return Difference(mean, mean - half * error, mean + half * error, len(gaps), _detectable(len(gaps)) * error, p)


@functools.cache
def _detectable(seeds: int) -> float:
    """Return the true difference, in standard errors, whose interval excludes 0 four times out of five.

    The mean is normal around it, and the estimate of its standard error follows a chi distribution. (Their ratio is
    noncentral t, which scipy computes as NaN far out.)
    """
    free = seeds - 1
    limit = float(student.ppf(0.975, free))
    estimates = chi(free, scale=1 / math.sqrt(free))

    def missed(away: float) -> float:
        return float(estimates.expect(lambda error: norm.cdf(limit * error - away) - norm.cdf(-limit * error - away)))

    return float(brentq(lambda away: missed(away) - 0.2, 0.0, 2 * limit))


class Compared(NamedTuple):
    """Two contenders, how far they are apart, and the p value by Holm's correction over all that was asked."""

    contender: str
    against: str
    gap: Difference
    holm: float

    @property
    def shown(self) -> str:
        """Return whether a difference is shown: yes, not by Holm's correction, or no."""
        if not self.gap.is_shown:
            return "no"
        return "yes" if self.holm < 0.05 else "not by Holm"

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name; None where a number is not finite."""
        found: dict[str, Any] = report.finite({**self._asdict(), "gap": self.gap._asdict(), "shown": self.shown})
        return found


def compared(runs: Sequence[Run], baseline: str | None = None, pairs: Sequence[tuple[str, str]] = ()) -> list[Compared]:
    """Return the difference of each contender to the baseline, and of each further pair that shares a seed.

    Args:
        runs: all runs.
        baseline: None takes `baseline_of`.
        pairs: contenders, and what each is measured against.
    """
    by_name = by_contender(runs)
    base = baseline or baseline_of(list(by_name))
    asked = [*((name, base) for name in by_name if name != base), *pairs]
    seeds = {name: {run.seed for run in own} for name, own in by_name.items()}
    shared = [pair for pair in dict.fromkeys(asked) if set.intersection(*(seeds.get(name, set()) for name in pair))]
    gaps = [difference(by_name[one], by_name[other]) for one, other in shared]
    corrected = holm([gap.p for gap in gaps])
    return [Compared(*pair, gap, p) for pair, gap, p in zip(shared, gaps, corrected, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm, 1979); NaN stays NaN and counts as a test."""
    order = sorted(range(len(p_values)), key=lambda index: (math.isnan(p_values[index]), p_values[index]))
    found = list(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        if not math.isnan(p_values[index]):
            highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
            found[index] = highest
    return found


def baseline_of(contenders: Sequence[str]) -> str:
    """Return the contender that the others are compared with: adamw, or the first."""
    return "adamw" if "adamw" in contenders else contenders[0]


def mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return one contender's mean loss at the steps that all its runs evaluated; a resumed run has extra ones."""
    curves = [dict(run.curve) for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]


def summarize(runs: Sequence[Run], baseline: str | None = None) -> list[Row]:
    """Return one row per contender, in the order of their first runs; None takes `baseline_of`."""
    by_name = by_contender(runs)
    base = by_name[baseline or baseline_of(list(by_name))]
    goal = statistics.fmean(run.eval_loss for run in base)
    base_speed = _median_speed(base)
    rows = []
    for name, own in by_name.items():
        losses = [run.eval_loss for run in own]
        curve = mean_curve(own)
        rows.append(
            Row(
                contender=name,
                learning_rate=own[0].learning_rate,
                seeds=len(own),
                diverged=_diverged(own),
                loss=statistics.fmean(losses),
                lowest=min(filter(math.isfinite, losses), default=math.nan),
                highest=max(filter(math.isfinite, losses), default=math.nan),
                against_baseline=difference(own, base),
                steps=curve[-1][0] if curve else 0,
                steps_to_baseline=next((step for step, loss in curve if loss <= goal), None),
                speed=_median_speed(own) / base_speed,
            )
        )
    return rows


def _diverged(runs: Sequence[Run]) -> int:
    return sum(not math.isfinite(run.eval_loss) for run in runs)


def _median_speed(runs: Sequence[Run]) -> float:
    speeds = [run.tokens_per_second for run in runs if math.isfinite(run.tokens_per_second)]
    return statistics.median(speeds) if speeds else math.nan


def verdicts(runs: Sequence[Run], baseline: str | None = None, pairs: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Return one sentence for each of `compared`."""
    by_name = by_contender(runs)
    return [verdict(by_name[one.contender], by_name[one.against]) for one in compared(runs, baseline, pairs)]


def verdict(runs: Sequence[Run], against: Sequence[Run]) -> str:
    """Return what the runs of two contenders show."""
    one, other = runs[0].contender, against[0].contender
    for name, own in ((other, against), (one, runs)):
        if diverged := _diverged(own):
            return f"{one}: nothing to compare, {name} diverged with {diverged} of {len(own)} seeds"
    gap = difference(runs, against)
    side = "ahead of" if gap.mean < 0 else "behind"
    if gap.is_shown:
        return f"{one}: {side} {other} by {abs(gap.mean):.3f} nats per token ({gap})"
    open_below = f"; differences below {gap.detectable:.3f} stay open" if gap.seeds > 1 else ""
    return f"{one}: no difference from {other} shown; {gap.mean:+.3f} ({gap}){open_below}"


def sensitivity(losses: Mapping[float, float], start: float) -> float:
    """Return how much loss a wrong learning rate costs, on average over the rates tried.

    The mean of min(loss, loss before training) less the best loss, in nats per token (arXiv 2309.14322, section 2.3);
    a rate that diverges counts as no training.

    Args:
        losses: final loss of each learning rate.
        start: loss before training.
    """
    found = [min(loss, start) if math.isfinite(loss) else start for loss in losses.values()]
    return statistics.fmean(found) - min(found)


def by_contender(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by contender, in the order of their first runs."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.contender, []).append(run)
    return by_name
