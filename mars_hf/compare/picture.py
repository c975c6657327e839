"""Draw a comparison: the metric over the learning rate of each arm, and what remains at the best rates."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mars_hf.compare.verdict import Findings

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


def figure_of(found: Findings) -> Figure:
    """Return the search, if any, and below it the differences, so that a phone's width shows both."""
    gaps = [gap for gap in found.gaps if gap.against == found.baseline]
    panes = [(3.6, _draw_search)] if found.search else []
    if gaps or not panes:
        panes.append((1.5 + 0.5 * len(gaps), _draw_differences))
    heights = [height for height, _ in panes]
    figure = Figure(figsize=(6.4, 0.4 + sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panes), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(textwrap.fill(found.title, 68), fontsize="medium")
    chosen = colors(list(dict.fromkeys([*found.search, *found.arms])))
    for axes, (_, draw) in zip(all_axes, panes, strict=True):
        draw(axes, found, chosen)
    return figure


def _draw_search(axes: Any, found: Findings, chosen: Mapping[str, str]) -> None:
    shown: list[float] = []
    for arm, by_rate in found.search.items():
        means = {rate: statistics.fmean(values) for rate, values in by_rate.items() if values}
        axes.plot(list(means), list(means.values()), "o-", color=chosen[arm], label=arm, markersize=5)
        shown += means.values()
        for rate in by_rate.keys() - means.keys():
            axes.plot([rate], [_DIVERGED], "x", color=chosen[arm], transform=axes.get_xaxis_transform())
        best = found.best.get(arm)
        if best in means:
            axes.plot([best], [means[best]], "o", color=chosen[arm], markersize=12, fillstyle="none")
    _leave_out_far_worse(axes, shown, found.metric.sign)
    axes.set_xscale("log")
    ticks = _apart(sorted(set().union(*found.search.values())))
    axes.set_xticks(ticks, [f"{rate:.2g}" for rate in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    good = "higher" if found.metric.greater_is_better else "lower"
    axes.set(
        xlabel="learning rate (ring: the best, x: diverged)", ylabel=f"{found.metric.shown_name}, {good} is better"
    )
    axes.set_title("search of the rate: the mean of its seeds", fontsize="medium")
    axes.legend()


def _leave_out_far_worse(axes: Any, values: Sequence[float], sign: int) -> None:
    """Let lines leave the picture to values far worse than most, which would flatten all others."""
    losses = [sign * value for value in values]
    best = min(losses, default=math.nan)
    reach = 4 * (statistics.median(losses or [math.nan]) - best)
    if max(losses, default=math.nan) - best > reach > 0:
        limits = sign * (best - 0.1 * reach), sign * (best + reach)
        axes.set_ylim(min(limits), max(limits))


def _apart(rates: Sequence[float]) -> list[float]:
    """Return rates that are far enough from each other to be read on an axis."""
    apart: list[float] = []
    for rate in rates:
        if not apart or rate >= 1.5 * apart[-1]:
            apart.append(rate)
    return apart[:: 1 + len(apart) // 9]


def _draw_differences(axes: Any, found: Findings, chosen: Mapping[str, str]) -> None:
    gaps = [gap for gap in reversed(found.gaps) if gap.against == found.baseline]
    theirs = {run.seed: run.value for run in found.runs if run.arm == found.baseline}
    for at, gap in enumerate(gaps):
        points = [run.value - theirs[run.seed] for run in found.arms[gap.arm] if run.seed in theirs]
        if math.isfinite(gap.mean):
            half = gap.half if math.isfinite(gap.half) else 0
            axes.errorbar([gap.mean], [at], xerr=[half], fmt="s", color=chosen[gap.arm], capsize=5, markersize=7)
        axes.plot(points, [at + 0.2] * len(points), ".", color="black", markersize=5)
    axes.axvline(0, color="0.35", linewidth=1)
    axes.set_yticks(range(len(gaps)), [f"{gap.arm}\n{found.answer(gap)}" for gap in gaps])
    axes.set_ylim(-0.6, max(0.6, len(gaps) - 0.4))
    axes.set_xlabel(f"{found.metric.shown_name} less {found.baseline}'s (bars: 95 %, dots: seeds)")
    left = "worse" if found.metric.greater_is_better else "better"
    axes.set_title(f"at the best rates: left of the line is {left}", fontsize="medium")
