"""Draw a comparison: the metric over the learning rate of each arm, and what remains at the best rates."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from mars_hf.compare.differences import Difference, FinishedRun, by_arm
from mars_hf.compare.metric import Metric

# An optimizer has one color in every picture; pictures give no other meaning to these colors.
COLORS = {
    "adamw": "0.35",
    "adamw_torch": "0.35",
    "adamw_torch_fused": "0.35",
    "script": "0.35",
    "nadamw": "tab:brown",
    "mars": "tab:blue",
    "mars_adamw": "tab:blue",
    "mars_lion": "tab:orange",
    "mars_shampoo": "tab:purple",
    "mars_m": "tab:red",
    "muon": "tab:green",
    "mars_muon": "tab:green",
}
_OTHERS = ("tab:pink", "tab:olive", "tab:cyan", "black")
_DIVERGED = 0.97  # height in the axes

Searched = Mapping[str, Mapping[float, Sequence[float]]]  # arm -> rate -> metric of each seed, [] if one diverged


def color(name: str) -> str:
    """Return the color of the first optimizer that a name has among its words; pink if none."""
    words = name.lower().replace("-", "_").replace(",", " ").replace(":", " ").split()
    return next((COLORS[word] for word in words if word in COLORS), "pink")


def colors(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each arm; of arms of one optimizer, the first has that optimizer's."""
    found: dict[str, str] = {}
    others = iter(_OTHERS * len(names))
    for name in names:
        own = color(name)
        found[name] = next(others) if own == "pink" or own in found.values() else own
    return found


def draw(
    path: Path,
    title: str,
    searched: Searched,
    best_rates: Mapping[str, float],
    runs: Sequence[FinishedRun],
    gaps: Sequence[Difference],
    metric: Metric,
    baseline: str,
) -> None:
    """Draw both into a file; see `figure_of`."""
    figure_of(title, searched, best_rates, runs, gaps, metric, baseline).savefig(path, dpi=160)


def figure_of(
    title: str,
    searched: Searched,
    best_rates: Mapping[str, float],
    runs: Sequence[FinishedRun],
    gaps: Sequence[Difference],
    metric: Metric,
    baseline: str,
) -> Figure:
    """Return both, one below the other, so that a phone's width shows them: the search, if any, and the differences.

    Args:
        title: of the whole.
        searched: runs of the search.
        best_rates: of each arm whose search has ended.
        runs: with the seeds of the comparison.
        gaps: differences between them.
        metric: what is compared.
        baseline: the arm that others are compared with.
    """
    shown = [gap for gap in gaps if gap.against == baseline]
    heights = [3.6] * bool(searched) + [1.5 + 0.5 * len(shown)]
    figure = Figure(figsize=(6.4, 0.4 + sum(heights)), layout="constrained")
    *upper, lower = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(textwrap.fill(title, 68), fontsize="medium")
    chosen = colors(list(dict.fromkeys([*searched, *by_arm(runs)])))
    for axes in upper:
        _draw_search(axes, searched, best_rates, metric, chosen)
    _draw_differences(lower, runs, shown, metric, baseline, chosen)
    return figure


def _draw_search(
    axes: Any, searched: Searched, best_rates: Mapping[str, float], metric: Metric, chosen: Mapping[str, str]
) -> None:
    for arm, by_rate in searched.items():
        means = {rate: statistics.fmean(values) for rate, values in by_rate.items() if values}
        axes.plot(list(means), list(means.values()), "o-", color=chosen[arm], label=arm, markersize=5)
        for rate in by_rate.keys() - means.keys():
            axes.plot([rate], [_DIVERGED], "x", color=chosen[arm], transform=axes.get_xaxis_transform())
        best = best_rates.get(arm)
        if best in means:
            axes.plot([best], [means[best]], "o", color=chosen[arm], markersize=12, fillstyle="none")
    axes.set_xscale("log")
    rates = sorted(set().union(*searched.values()))
    ticks = _apart(rates)
    axes.set_xticks(ticks, [f"{rate:.2g}" for rate in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    good = "higher" if metric.greater_is_better else "lower"
    axes.set(xlabel="learning rate (ring: the best, x: diverged)", ylabel=f"{metric.shown_name}, {good} is better")
    axes.set_title("search of the rate: the mean of its seeds", fontsize="medium")
    axes.legend()


def _apart(rates: Sequence[float]) -> list[float]:
    """Return rates that are far enough from each other to be read on an axis."""
    found: list[float] = []
    for rate in rates:
        if not found or rate >= 1.5 * found[-1]:
            found.append(rate)
    return found[:: 1 + len(found) // 9]


def _draw_differences(
    axes: Any,
    runs: Sequence[FinishedRun],
    gaps: Sequence[Difference],
    metric: Metric,
    baseline: str,
    chosen: Mapping[str, str],
) -> None:
    theirs = {run.seed: run.value for run in runs if run.arm == baseline}
    for at, gap in enumerate(reversed(gaps)):
        points = [run.value - theirs[run.seed] for run in runs if run.arm == gap.arm and run.seed in theirs]
        points = [point for point in points if math.isfinite(point)]
        if math.isfinite(gap.mean):
            half = gap.half if math.isfinite(gap.half) else 0
            axes.errorbar([gap.mean], [at], xerr=[half], fmt="s", color=chosen[gap.arm], capsize=5, markersize=7)
        axes.plot(points, [at + 0.2] * len(points), ".", color="black", markersize=5)
    axes.axvline(0, color="0.35", linewidth=1)
    axes.set_yticks(range(len(gaps)), [_label(gap) for gap in reversed(gaps)])
    axes.set_ylim(-0.6, max(0.6, len(gaps) - 0.4))
    axes.set_xlabel(f"{metric.shown_name} less {baseline}'s (bars: 95 %, dots: seeds)")
    axes.set_title(
        f"at the best rates: left of the line is {'worse' if metric.sign < 0 else 'better'}", fontsize="medium"
    )


def _label(gap: Difference) -> str:
    return f"{gap.arm}\n{'shown' if gap.is_shown else 'not shown'}"
