"""Draw the figures of a comparison and of a measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretraining.compare.comparison import Run, baseline_of, by_contender, difference, mean_curve
from pretraining.compare.tracking_probe import median, shown_clip

_BASELINE_COLOR = "0.25"
# With more contenders than this, thin lines for each seed would hide the means.
_FEW = 6


def comparison(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """Draw held-out loss over steps, and the paired differences to the baseline, as a PNG file.

    Bars show mean differences and start at zero, whiskers are 95% intervals, dots are seeds. Bars of whole losses would
    start at zero too and hide differences of a hundredth. The names stand beside the bars, in the curves' colors. Runs
    with one evaluation have no curves, so the picture has the bars alone.

    Args:
        runs: all runs.
        path: PNG file to write.
        baseline: None takes `baseline_of`.
    """
    by_name = by_contender(runs)
    baseline = baseline or baseline_of(list(by_name))
    colors = _colors(list(by_name), baseline)
    height = max(3.8, 1.2 + 0.32 * len(by_name))
    if any(len(mean_curve(own)) > 1 for own in by_name.values()):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, height), layout="constrained", width_ratios=[1.1, 1])
        _draw_curves(left, by_name, colors)
    else:
        figure, right = plt.subplots(figsize=(6.8, height), layout="constrained")
    _draw_differences(right, by_name, baseline, colors)
    _save(figure, path)


def _draw_curves(axes: Axes, by_name: Mapping[str, Sequence[Run]], colors: Mapping[str, str]) -> None:
    for name, own in by_name.items():
        if len(own) > 1 and len(by_name) <= _FEW:
            for run in own:
                axes.plot(*zip(*run.curve, strict=True), linewidth=0.6, alpha=0.45, color=colors[name])
        axes.plot(*zip(*mean_curve(own), strict=True), linewidth=1.6, marker=".", markersize=4, color=colors[name])
    several = any(len(own) > 1 for own in by_name.values())
    title = "over steps" if not several else "mean of seeds" + ("; thin: each seed" if len(by_name) <= _FEW else "")
    axes.set(xlabel="step", ylabel="held-out loss (nats per token)", title=title)
    axes.set_ylim(*_window([mean_curve(own) for own in by_name.values()]))
    axes.grid(alpha=0.3)


def _draw_differences(
    axes: Axes, by_name: Mapping[str, Sequence[Run]], baseline: str, colors: Mapping[str, str]
) -> None:
    theirs = {run.seed: run.eval_loss for run in by_name[baseline]}
    goal = statistics.fmean(theirs.values())
    for place, (name, own) in enumerate(by_name.items()):
        gaps = [run.eval_loss - theirs[run.seed] for run in own if run.seed in theirs]
        gap = difference(own, by_name[baseline])
        axes.barh(place, gap.mean, height=0.6, color=colors[name], alpha=0.6)
        if math.isfinite(gap.low) and name != baseline:
            axes.plot([gap.low, gap.high], [place, place], linewidth=1.4, color="black")
        axes.scatter(gaps, [place] * len(gaps), s=9, color="black", zorder=3)
    axes.axvline(0, color=_BASELINE_COLOR, linewidth=1)
    axes.set_yticks(range(len(by_name)), [_plain(name) for name in by_name])
    for label, name in zip(axes.get_yticklabels(), by_name, strict=True):
        label.set_color(colors[name])
        label.set_fontweight("bold")
    axes.invert_yaxis()
    against = f"{baseline}'s {goal:.3f}" if math.isfinite(goal) else f"{baseline}, which diverged"
    axes.set(xlabel="nats per token (line: 95%, dots: seeds)", title=_plain(f"final loss against {against}"))
    axes.locator_params(axis="x", nbins=6)  # labels with signs are wide
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)


def along_axis(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], path: Path, axis: str) -> None:
    """Draw final held-out loss over a setting, one line each, with every seed as a dot, as a PNG file.

    Args:
        lines: name to the places on the axis, each with its losses.
        path: PNG file to write.
        axis: name of the setting; a positive one that spans a factor of four has a logarithmic axis, and betas stand
            as far apart as the logarithms of 1 / (1 - beta), the length of their averages.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    places = sorted({place for line in lines.values() for place, _ in line})
    for index, (name, line) in enumerate(lines.items()):
        ordered = sorted(line)
        means = [statistics.fmean(losses) for _, losses in ordered]
        axes.plot(
            [place for place, _ in ordered], means, marker="o", markersize=4, color=f"C{index}", label=_plain(name)
        )
        for place, losses in ordered:
            axes.scatter([place] * len(losses), losses, s=8, color=f"C{index}", alpha=0.6)
    if axis.startswith("beta") and places[-1] < 1:
        axes.set_xscale("function", functions=(lambda beta: -np.log1p(-beta), lambda place: -np.expm1(-place)))
    elif places[0] > 0 and places[-1] >= 4 * places[0]:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=axis, ylabel="final held-out loss (nats per token)")
    if any(len(losses) > 1 for line in lines.values() for _, losses in line):
        axes.set_title("mean of seeds; dots: seeds")
    axes.grid(alpha=0.3)
    if any(lines):
        figure.legend(loc="outside lower center", ncols=3 if max(map(len, lines)) < 20 else 2)
    _save(figure, path)


def tracking(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the tracking error over gamma, split in lag and noise, for each beta1 and form, and the cosine, as a PNG.

    Args:
        rows: of a TrackingProbe; those of the whole model without clipping (else with the largest threshold) are drawn,
            as medians over the steps.
        path: PNG file to write.
    """
    clip = shown_clip(rows)
    drawn = [row for row in rows if row["scope"] == "all" and row["clip"] == clip]
    betas = sorted({row["beta1"] for row in drawn})
    forms = sorted({row["form"] for row in drawn if row["gamma"]} or {row["form"] for row in drawn})
    scale = "log" if _is_positive(drawn) else "linear"  # an estimate of lag may be below 0
    figure, panels = plt.subplots(
        2, len(betas), figsize=(max(5.5, 3.4 * len(betas)), 6), layout="constrained", sharex=True, squeeze=False
    )
    for column, beta1 in enumerate(betas):
        for index, form in enumerate(forms):
            own = [row for row in drawn if row["beta1"] == beta1 and (row["form"] == form or not row["gamma"])]
            gammas = sorted({row["gamma"] for row in own})
            for name, style in (("error", "-"), ("lag", "--"), ("noise", ":")):
                panels[0, column].plot(
                    gammas, _medians(own, gammas, name), style, marker=".", color=f"C{index}", label=f"{form}: {name}"
                )
            panels[1, column].plot(gammas, _medians(own, gammas, "cosine"), marker=".", color=f"C{index}")
        panels[0, column].set(title=f"beta1 {beta1:g}", yscale=scale)
        panels[1, column].set(xlabel="gamma")
        for axes in panels[:, column]:
            axes.axvline(1 - beta1, color=_BASELINE_COLOR, linewidth=0.8, linestyle=(0, (1, 3)))
            axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("relative squared error")
    panels[1, 0].set_ylabel("cosine with gradient")
    lines, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside lower center", ncols=3, title="vertical line: gamma = 1 - beta1 (Nesterov)"
    )
    _save(figure, path)


def _is_positive(rows: Sequence[Mapping[str, Any]]) -> bool:
    lines = {(row["beta1"], row["form"], row["gamma"]) for row in rows}
    return all(
        not median(row[name] for row in rows if (row["beta1"], row["form"], row["gamma"]) == line) <= 0
        for line in lines
        for name in ("error", "lag", "noise")
    )


def _plain(name: str) -> str:
    """Return a name as matplotlib shows it unchanged: neither mathematics nor, with _ ahead, left out of legends."""
    return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")


def _medians(rows: Sequence[Mapping[str, Any]], gammas: Sequence[float], name: str) -> list[float]:
    return [median(row[name] for row in rows if row["gamma"] == gamma) for gamma in gammas]


def _window(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return axis limits that show the ends of the curves; the much higher start runs off the top."""
    late = [loss for curve in curves for step, loss in curve if step >= 0.2 * curve[-1][0] and math.isfinite(loss)]
    low, high = min(late, default=0.0), max(late, default=1.0)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def _colors(names: Sequence[str], baseline: str) -> dict[str, str]:
    others = [name for name in names if name != baseline]
    palette = [
        matplotlib.colors.to_hex(color)
        for color in (*matplotlib.color_sequences["tab10"], *matplotlib.color_sequences["Dark2"])
    ]
    return {name: palette[index % len(palette)] for index, name in enumerate(others)} | {baseline: _BASELINE_COLOR}


def _save(figure: Figure, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
    plt.close(figure)
