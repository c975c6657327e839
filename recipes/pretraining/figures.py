"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def loss_curve(history: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and evaluation loss over steps.

    Args:
        history: `trainer.state.log_history`.
        path: PNG file to write.
        title: above the axes.
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
    figure.savefig(path, dpi=120)
    plt.close(figure)
