"""Draw the losses of a run."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_hf.groups.saved_settings import write_whole

FILE = "loss_curve.png"
_HELD_OUT = re.compile(r"eval_(?:(.+)_)?loss")
_FEWEST = 6  # points, below which there is no curve to see; drawing takes longer than the rest of a card


def draw(history: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draw training and held-out loss over steps, as a PNG file.

    Args:
        history: `trainer.state.log_history`.
        path: the file.
        title: title above the axes.

    Returns:
        False, and no file, with fewer than six finite losses or without matplotlib.
    """
    train = points(history, "loss")
    held_out = {name: points(history, name) for name in dict.fromkeys(name for row in history for name in row)}
    held_out = {name: own for name, own in held_out.items() if is_held_out_loss(name) and own}
    if len(train) + sum(map(len, held_out.values())) < _FEWEST:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")  # without pyplot, which chooses a window system
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1.2, color="#9ecae1", label="train")
    for index, (name, own) in enumerate(held_out.items()):
        color = "#08519c" if len(held_out) == 1 else f"C{index}"
        found = _HELD_OUT.fullmatch(name)
        label = found[1] if found and found[1] else "held out"
        axes.plot(*zip(*own, strict=True), marker="o", markersize=4, color=color, label=label)
        axes.annotate(f"{own[-1][1]:.3f}", own[-1], textcoords="offset points", xytext=(-4, 8), ha="right", color=color)
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(title, fontsize=9)  # it names model, data and rule
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())
    return True


def is_held_out_loss(name: str) -> bool:
    """Return whether an entry of a log line is a loss of an evaluation."""
    return _HELD_OUT.fullmatch(name) is not None


def points(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return the steps and finite values of an entry of the log."""
    rows = ((row.get("step"), row.get(name)) for row in history)
    return [
        (step, float(value))
        for step, value in rows
        if isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value)
    ]
