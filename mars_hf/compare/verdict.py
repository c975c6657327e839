"""Put a difference in words that a person believes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from mars_hf.compare import differences
from mars_hf.compare.differences import Difference, FinishedRun
from mars_hf.compare.metric import Metric


def verdict(
    gap: Difference, runs: Sequence[FinishedRun], metric: Metric, *, was_searched: bool, has_speeds: bool
) -> str:
    """Return what a difference shows, or why it shows nothing.

    Args:
        gap: the difference.
        runs: with the seeds of the comparison.
        metric: what is compared.
        was_searched: whether rates were; else a difference may be one of rates alone.
        has_speeds: whether seconds mean something.
    """
    arms = differences.by_arm(runs)
    ours, theirs = arms[gap.arm], arms[gap.against]
    reason = _why_none(gap, ours, theirs, was_searched)
    if not math.isfinite(gap.mean):
        return f"**{gap.arm}: no verdict**, {reason}."
    side = "above" if gap.mean > 0 else "below"
    what = f"ends {_size(gap)} {side} {gap.against}"
    how = f"{metric.shown_name}, {count(gap.seeds, 'seed')}"
    if math.isfinite(gap.half):
        how += ", paired, 95 %, Holm"
    if reason:
        return f"**{gap.arm}: no verdict**, {reason}. It {what} ({how})."
    if not gap.is_shown:
        would = f"these seeds would have shown {gap.would_show:.2g}"
        return f"**{gap.arm}: no difference shown**: it {what} ({how}); {would}."
    helps = gap.mean * metric.sign < 0
    reached = _reached(ours, theirs, metric, has_speeds) if helps else ""
    return f"**{gap.arm} {'helps' if helps else 'HURTS'}**: it {what} ({how}): shown{reached}."


def _size(gap: Difference) -> str:
    """Return a difference without its sign, with the digits that its interval gives a meaning."""
    if not math.isfinite(gap.half) or gap.half <= 0:
        return f"{abs(gap.mean):.3g}"
    decimals = max(0, 1 - math.floor(math.log10(gap.half)))
    return f"{abs(gap.mean):.{decimals}f} ± {gap.half:.{decimals}f}"


def _why_none(gap: Difference, ours: Sequence[FinishedRun], theirs: Sequence[FinishedRun], was_searched: bool) -> str:
    """Return why there is no verdict; "" if there is one."""
    if not math.isfinite(gap.mean):
        lost = {runs[0].arm: sum(not math.isfinite(run.value) for run in runs) for runs in (ours, theirs)}
        return "runs diverged: " + ", ".join(f"{count} of {arm}" for arm, count in lost.items() if count)
    if not was_searched:
        return "because nobody searched the rates, and one of them may be badly chosen"
    if not math.isfinite(gap.half):
        return "because one seed shows no spread"
    if coarse := differences.ended_alike([*ours, *theirs]):
        return f"because {coarse[0]}"
    return ""


def _reached(ours: Sequence[FinishedRun], theirs: Sequence[FinishedRun], metric: Metric, has_speeds: bool) -> str:
    """Return how early an arm is where the other ends."""
    goal = statistics.fmean(run.value for run in theirs)
    curve, other = differences.mean_curve(ours), differences.mean_curve(theirs)
    step = differences.steps_to(goal, curve, sign=metric.sign)
    if step is None or not other or not other[-1][0]:
        return ""
    share = step / other[-1][0]
    text = f"; it reaches {theirs[0].arm}'s end in {share:.0%} of the steps"
    ratio = median(run.seconds_per_step for run in ours) / median(run.seconds_per_step for run in theirs)
    return f"{text}, {share * ratio:.0%} of the seconds" if has_speeds and math.isfinite(ratio) else text


def doubts(runs: Sequence[FinishedRun]) -> list[str]:
    """Return what is wrong with the pairs: runs of a seed that began differently, seeds that changed nothing."""
    found = []
    for what, name in (("weights", "weights"), ("batch", "first batch")):
        by_seed: dict[int, set[str]] = {}
        for run in runs:
            if getattr(run, what) is not None:
                by_seed.setdefault(run.seed, set()).add(getattr(run, what))
        odd = [seed for seed, prints in by_seed.items() if len(prints) > 1]
        if odd:
            found.append(f"Not paired: runs of seed {odd[0]} began with different {name}; the intervals are too wide.")
        elif len(by_seed) > 1 and len(set().union(*by_seed.values())) == 1:
            found.append(
                f"All seeds began with the same {name}, which the script seeds itself: intervals tell the rest alone."
            )
    found += [f"No interval means anything: {line}." for line in differences.ended_alike(runs)]
    return found


def count(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def median(values: Iterable[float]) -> float:
    """Return the median of finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
