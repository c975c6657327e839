"""Draw the figures of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pretraining.comparison import Run, baseline_of, by_contender, mean_curve

_BASELINE_COLOR = "0.25"


def loss_curve(history: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and evaluation loss over steps.

    Args:
        history: `trainer.state.log_history`.
        path: PNG file to write.
        title: title above the axes.
    """
    train = [(row["step"], row["loss"]) for row in history if "loss" in row]
    held_out = [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1.2, color="#9ecae1", label="train")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", markersize=4, color="#08519c", label="held out")
        step, loss = held_out[-1]
        axes.annotate(
            f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(-4, 8), ha="right", color="#08519c"
        )
    axes.set(xlabel="step", ylabel="cross-entropy loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def comparison(runs: Sequence[Run], path: Path) -> None:
    """Draw held-out loss over steps, and the final losses against the baseline's, as a PNG file.

    Bars show differences and start at zero. Bars of whole losses would start at zero too and hide differences of a
    hundredth.
    """
    by_name = by_contender(runs)
    baseline = baseline_of(list(by_name))
    colors = _colors(list(by_name), baseline)
    goal = statistics.fmean(run.eval_loss for run in by_name[baseline])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", width_ratios=[1.2, 1])
    for name, own in by_name.items():
        if len(own) > 1:
            for run in own:
                left.plot(*zip(*run.curve, strict=True), linewidth=0.6, alpha=0.45, color=colors[name])
        left.plot(*zip(*mean_curve(own), strict=True), linewidth=1.8, marker=".", color=colors[name], label=name)
    title = "mean of seeds; thin: each seed" if len(runs) > len(by_name) else "over steps"
    left.set(xlabel="step", ylabel="held-out loss (nats per token)", title=title)
    left.set_ylim(*_window([mean_curve(own) for own in by_name.values()]))
    left.grid(alpha=0.3)
    left.legend()

    for place, (name, own) in enumerate(by_name.items()):
        gaps = [run.eval_loss - goal for run in own]
        right.barh(place, statistics.fmean(gaps), height=0.55, color=colors[name], alpha=0.6)
        right.scatter(gaps, [place] * len(gaps), s=14, color="black", zorder=3)
    right.axvline(0, color=_BASELINE_COLOR, linewidth=1)
    right.set_yticks(range(len(by_name)), list(by_name))
    right.invert_yaxis()
    right.set(xlabel="nats per token; dots are seeds", title=f"final loss against {baseline}'s {goal:.3f}")
    right.grid(alpha=0.3, axis="x")
    right.set_axisbelow(True)
    _save(figure, path)


def _window(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return axis limits that show the ends of the curves; the much higher start runs off the top."""
    late = [loss for curve in curves for step, loss in curve if step >= 0.2 * curve[-1][0] and math.isfinite(loss)]
    low, high = min(late, default=0.0), max(late, default=1.0)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def _colors(names: Sequence[str], baseline: str) -> dict[str, str]:
    others = [name for name in names if name != baseline]
    return {name: f"C{index}" for index, name in enumerate(others)} | {baseline: _BASELINE_COLOR}


def _save(figure: Figure, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
    plt.close(figure)
