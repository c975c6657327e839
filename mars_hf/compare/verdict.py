"""What a comparison has found, and what its differences show, in words that a person believes."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mars_hf.compare.differences import Difference, FinishedRun, by_arm, differences, mean_curve, steps_to
from mars_hf.compare.metric import Metric


@dataclass(frozen=True)
class Findings:
    """What is known of a comparison: its page, its picture and its verdicts show this."""

    title: str
    metric: Metric
    baseline: str  # the arm that the others are compared with
    runs: Sequence[FinishedRun]  # with the seeds of the comparison, at the best rates
    search: Mapping[str, Mapping[float, Sequence[float]]]  # arm -> rate -> metric of each seed, [] if one diverged
    best: Mapping[str, float]  # rate of each arm whose search has ended
    pairs: Sequence[tuple[str, str]] = ()  # to compare besides each arm with the baseline

    @functools.cached_property
    def arms(self) -> dict[str, list[FinishedRun]]:
        """Return the runs of each arm."""
        return by_arm(self.runs)

    @functools.cached_property
    def gaps(self) -> list[Difference]:
        """Return the differences of the pairs and of each arm to the baseline."""
        return differences(self.runs, self.baseline, self.pairs)

    def answer(self, gap: Difference) -> str:
        """Return the verdict in one or two words."""
        if self._why_none(gap):
            return "no verdict"
        return "shown" if gap.is_shown else "not shown"

    def verdict(self, gap: Difference) -> str:
        """Return what a difference shows, or why it shows nothing."""
        reason = self._why_none(gap)
        if not math.isfinite(gap.mean):
            return f"**{gap.arm}: no verdict**, {reason}."
        side = "above" if gap.mean > 0 else "below"
        how = f"{self.metric.shown_name}, {count(gap.seeds, 'seed')}"
        if math.isfinite(gap.half):
            how += ", paired, 95 %, Holm"
        what = f"ends {size(gap)} {side} {gap.against} ({how})"
        if reason:
            return f"**{gap.arm}: no verdict**, {reason}. It {what}."
        if not gap.is_shown:
            would = f"these seeds would have shown {gap.would_show:.2g}"
            return f"**{gap.arm}: no difference shown**: it {what}; {would}."
        if gap.mean * self.metric.sign > 0:
            return f"**{gap.arm} HURTS**: it {what}: shown."
        return f"**{gap.arm} helps**: it {what}: shown{self._reached(gap)}."

    def _why_none(self, gap: Difference) -> str:
        """Return why there is no verdict; "" if there is one."""
        if not math.isfinite(gap.mean):
            members = {arm: self.arms[arm] for arm in (gap.arm, gap.against)}
            lost = {arm: sum(math.isnan(run.value) for run in runs) for arm, runs in members.items()}
            return "runs diverged: " + ", ".join(f"{number} of {arm}" for arm, number in lost.items() if number)
        if not self.search:
            return "because nobody searched the rates, and one of them may be badly chosen"
        if not math.isfinite(gap.half):
            return "because one seed shows no spread"
        alike = ended_alike([*self.arms[gap.arm], *self.arms[gap.against]])
        return f"because {alike[0]}" if alike else ""

    def _reached(self, gap: Difference) -> str:
        """Return how early an arm is where the other ends."""
        ours, theirs = self.arms[gap.arm], self.arms[gap.against]
        goal = statistics.fmean(run.value for run in theirs)
        step = steps_to(goal, mean_curve(ours), sign=self.metric.sign)
        last = max((step for step, _ in mean_curve(theirs)), default=0)
        if step is None or not last:
            return ""
        text = f"; it reaches {gap.against}'s end in {step / last:.0%} of the steps"
        ratio = median(run.seconds_per_step for run in ours) / median(run.seconds_per_step for run in theirs)
        return f"{text}, {step / last * ratio:.0%} of the seconds" if math.isfinite(ratio) else text

    def doubts(self) -> list[str]:
        """Return what is wrong with the pairs: runs of a seed that began differently, seeds that changed nothing."""
        found = []
        for what, name in (("weights", "weights"), ("batch", "first batch")):
            began = sorted({(run.seed, getattr(run, what)) for run in self.runs if getattr(run, what) is not None})
            seeds = [seed for seed, _ in began]
            odd = [seed for seed in seeds if seeds.count(seed) > 1]
            if odd:
                found.append(f"Not paired: runs of seed {odd[0]} began with different {name}; intervals are too wide.")
            elif len(seeds) > 1 and len({mark for _, mark in began}) == 1:
                found.append(
                    f"All seeds began with the same {name}, which the script seeds itself: intervals tell the rest "
                    "alone."
                )
        return [*found, *(f"No interval means anything: {line}." for line in ended_alike(self.runs))]


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


def size(gap: Difference) -> str:
    """Return a difference without its sign, with the digits that its interval gives a meaning."""
    if not math.isfinite(gap.half) or gap.half <= 0:
        return f"{abs(gap.mean):.3g}"
    decimals = max(0, 1 - math.floor(math.log10(gap.half)))
    return f"{abs(gap.mean):.{decimals}f} ± {gap.half:.{decimals}f}"


def count(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def median(values: Iterable[float]) -> float:
    """Return the median of finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
