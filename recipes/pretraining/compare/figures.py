"""Draw the figures of a comparison."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pretraining.compare.comparison import Difference, Run, by_contender

BASELINE_COLOR = "0.25"
# An optimizer has one color in every picture.
COLORS = {
    "adamw": "0.35",
    "adamw_torch": "0.35",
    "nadamw": "tab:brown",
    "mars_adamw": "tab:blue",
    "mars_lion": "tab:orange",
    "mars_shampoo": "tab:purple",
    "mars_m": "tab:red",
    "muon": "tab:green",
}


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each arm's line: its optimizer's color, dashed for further arms of one optimizer."""
    optimizers = [re.split(r"\W", name)[0] for name in names]
    dashes = ["-", "--", ":", "-."]
    return {
        name: {
            "color": COLORS.get(optimizer, f"C{index}"),
            "linestyle": dashes[optimizers[:index].count(optimizer) % len(dashes)],
        }
        for index, (name, optimizer) in enumerate(zip(names, optimizers, strict=True))
    }


def comparison(runs: Sequence[Run], gaps: Sequence[Difference], baseline: str, path: Path) -> None:
    """Draw the paired differences of final held-out losses to the baseline's, as a PNG file.

    Bars show mean differences, whiskers are 95% intervals, dots are seeds.
    """
    arms = by_contender(runs)
    figure, axes = plt.subplots(figsize=(7.5, max(3, 1.2 + 0.32 * len(arms))), layout="constrained")
    losses = {run.seed: run.eval_loss for run in arms[baseline]}
    intervals = {gap.contender: gap for gap in gaps if gap.against == baseline}
    arm_styles = styles(list(arms))
    for place, (name, members) in enumerate(arms.items()):
        if gap := intervals.get(name):
            axes.barh(place, gap.mean, height=0.6, color=arm_styles[name]["color"], alpha=0.6)
            if math.isfinite(gap.low):
                axes.plot([gap.low, gap.high], [place, place], linewidth=1.4, color="black")
        dots = [run.eval_loss - losses[run.seed] for run in members]
        axes.scatter(dots, [place] * len(dots), s=9, color="black", zorder=3)
    axes.axvline(0, color=BASELINE_COLOR, linewidth=1)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set(
        xlabel="final held-out loss, nats per token (line: 95% interval, dots: seeds)",
        title=f"difference to {baseline}",
    )
    axes.grid(alpha=0.3, axis="x")
    save(figure, path)


def along_axis(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], axis: str, path: Path) -> None:
    """Draw final held-out loss over a setting, one line each, with every seed as a dot, as a PNG file.

    Args:
        lines: name to the places on the axis, each with its losses.
        axis: name of the setting.
        path: PNG file to write.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    line_styles = styles(list(lines))
    for name, line in lines.items():
        ordered, style = sorted(line), line_styles[name]
        means = [statistics.fmean(losses) for _, losses in ordered]
        axes.plot([place for place, _ in ordered], means, marker=".", label=name, **style)
        for place, losses in ordered:
            axes.scatter([place] * len(losses), losses, s=8, color=style["color"], alpha=0.6)
    places = sorted({place for line in lines.values() for place, _ in line})
    if axis.startswith("beta"):  # by the length of the average
        axes.set_xscale("function", functions=(lambda beta: -np.log1p(-beta), lambda place: -np.expm1(-place)))
    elif places[0] > 0 and places[-1] >= 4 * places[0]:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=axis, ylabel="final held-out loss (nats per token)", title="mean of seeds; dots: seeds")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
    plt.close(figure)
