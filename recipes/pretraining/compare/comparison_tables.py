"""Write the results of a comparison as Markdown tables that also read well in a terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from pretraining.compare import comparison


def table(rows: Sequence[comparison.Row], baseline: str | None = None) -> str:
    """Return the rows as a Markdown table that also reads well in a terminal."""
    baseline = baseline or comparison.baseline_of([row.contender for row in rows])
    goal = next((row.loss for row in rows if row.contender == baseline), math.nan)
    cells = [
        (
            "optimizer",
            "learning rate",
            "held-out loss (lowest-highest)",
            f"against {baseline} (95% interval)",
            f"steps to {baseline}'s loss",
            f"tokens per second against {baseline}",
        )
    ]
    for row in rows:
        is_baseline = row.contender == baseline
        spread = f"{row.lowest:.3f}-{row.highest:.3f}"
        seeds = f" ({spread})" if row.seeds > 1 else ""
        gap = row.against_baseline
        interval = f" ({gap.low:+.3f} to {gap.high:+.3f})" if math.isfinite(gap.low) else ""
        if row.diverged:
            many = f"{row.diverged} of {row.seeds} diverged" if row.seeds > 1 else "diverged"
            others = f" (others {spread})" if row.diverged < row.seeds else ""
            cells.append((row.contender, f"{row.learning_rate:g}", many + others, "-", "-", "-"))
            continue
        cells.append(
            (
                row.contender,
                f"{row.learning_rate:g}",
                f"{row.loss:.3f}{seeds}",
                "-" if is_baseline or not math.isfinite(gap.mean) else f"{gap.mean:+.3f}{interval}",
                _reached(row) if math.isfinite(goal) else "-",
                "-" if is_baseline or not math.isfinite(row.speed) else f"{row.speed:.2f}x",
            )
        )
    return _markdown(cells)


def _reached(row: comparison.Row) -> str:
    step, steps = row.steps_to_baseline, row.steps
    return f"not reached in {steps}" if step is None else f"{step} of {steps} ({step / steps:.0%})"


def grid(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], axis: str) -> str:
    """Return the mean losses along an axis as a Markdown table: one row for each line, one column for each place.

    Args:
        lines: name to the places on the axis, each with its losses; a place may be missing.
        axis: name of the setting.
    """
    places = sorted({place for line in lines.values() for place, _ in line})
    cells = [(axis, *(f"{place:g}" for place in places))]
    for name, line in lines.items():
        means = {place: statistics.fmean(losses) for place, losses in line}
        shown = {place: f"{mean:.3f}" if math.isfinite(mean) else "diverged" for place, mean in means.items()}
        cells.append((name, *(shown.get(place, "") for place in places)))
    return _markdown(cells)


def differences_table(differences: Sequence[comparison.Compared]) -> str:
    """Return differences as a Markdown table; the last column is what this many seeds show four times out of five."""
    cells = [("arm", "measured against", "difference (95% interval)", "shown", "would show")]
    for one in differences:
        gap = one.gap
        if not math.isfinite(gap.mean):
            cells.append((one.contender, one.against, "diverged", "", ""))
        elif gap.seeds < 2:
            cells.append((one.contender, one.against, f"{gap.mean:+.3f} (one seed)", "", ""))
        else:
            interval = f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
            cells.append((one.contender, one.against, interval, one.shown, f"{gap.detectable:.3f}"))
    return _markdown(cells, left=2)


def _markdown(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first columns, as many as `left`, are words."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [cell.ljust(width) if index < left else cell.rjust(width) for index, (cell, width) in enumerate(row)]
        for row in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    lines.insert(1, ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
