"""Draw the figures of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretraining.compare.comparison import Difference, Run, by_contender, mean_curve

BASELINE_COLOR = "0.25"
_COLORS = [*matplotlib.color_sequences["tab10"], *matplotlib.color_sequences["Dark2"]]


def comparison(runs: Sequence[Run], gaps: Sequence[Difference], baseline: str, path: Path) -> None:
    """Draw mean held-out loss over steps, and the paired differences to the baseline, as a PNG file.

    Bars show mean differences, whiskers are 95% intervals, dots are seeds. The names stand beside the bars, in the
    curves' colors.
    """
    arms = by_contender(runs)
    others = [name for name in arms if name != baseline]
    colors = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(others)} | {baseline: BASELINE_COLOR}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, max(3.8, 1.2 + 0.32 * len(arms))), layout="constrained", width_ratios=[1.1, 1]
    )
    curves = {name: mean_curve(members) for name, members in arms.items()}
    for name, curve in curves.items():
        left.plot(*zip(*curve, strict=True), linewidth=1.6, marker=".", markersize=4, color=colors[name])
    left.set(xlabel="step", ylabel="held-out loss (nats per token)", title="mean of seeds")
    late = [loss for curve in curves.values() for step, loss in curve if step >= 0.2 * curve[-1][0]]
    late = [loss for loss in late if math.isfinite(loss)]
    if late:  # the much higher start runs off the top
        margin = 0.05 * (max(late) - min(late)) or 0.05
        left.set_ylim(min(late) - margin, max(late) + margin)
    left.grid(alpha=0.3)

    losses = {run.seed: run.eval_loss for run in arms[baseline]}
    intervals = {gap.contender: gap for gap in gaps if gap.against == baseline}
    for place, (name, members) in enumerate(arms.items()):
        if gap := intervals.get(name):
            right.barh(place, gap.mean, height=0.6, color=colors[name], alpha=0.6)
            if math.isfinite(gap.low):
                right.plot([gap.low, gap.high], [place, place], linewidth=1.4, color="black")
        dots = [run.eval_loss - losses[run.seed] for run in members if run.seed in losses]
        right.scatter(dots, [place] * len(dots), s=9, color="black", zorder=3)
    right.axvline(0, color=BASELINE_COLOR, linewidth=1)
    right.set_yticks(range(len(arms)), list(arms))
    for label, name in zip(right.get_yticklabels(), arms, strict=True):
        label.set(color=colors[name], fontweight="bold")
    right.invert_yaxis()
    right.set(xlabel="nats per token (line: 95%, dots: seeds)", title=f"final loss against {baseline}")
    right.grid(alpha=0.3, axis="x")
    save(figure, path)


def along_axis(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], axis: str, path: Path) -> None:
    """Draw final held-out loss over a setting, one line each, with every seed as a dot, as a PNG file.

    Args:
        lines: name to the places on the axis, each with its losses.
        axis: name of the setting.
        path: PNG file to write.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for index, (name, line) in enumerate(lines.items()):
        ordered = sorted(line)
        means = [statistics.fmean(losses) for _, losses in ordered]
        axes.plot([place for place, _ in ordered], means, ".-", color=f"C{index}", label=name)
        for place, losses in ordered:
            axes.scatter([place] * len(losses), losses, s=8, color=f"C{index}", alpha=0.6)
    places = sorted({place for line in lines.values() for place, _ in line})
    _scale(axes, axis, places)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=axis, ylabel="final held-out loss (nats per token)", title="mean of seeds; dots: seeds")
    axes.grid(alpha=0.3)
    if any(lines):
        figure.legend(loc="outside lower center", ncols=2)
    save(figure, path)


def _scale(axes: Axes, axis: str, places: Sequence[float]) -> None:
    """Space betas by the length of their averages, and positive settings that span a factor of four by logarithms."""
    if axis.startswith("beta") and places[-1] < 1:
        axes.set_xscale("function", functions=(lambda beta: -np.log1p(-beta), lambda place: -np.expm1(-place)))
    elif places[0] > 0 and places[-1] >= 4 * places[0]:
        axes.set_xscale("log")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
    plt.close(figure)
