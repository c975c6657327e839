"""Compare optimizers on one job: rows, table and verdicts from their runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Run:
    """One finished run.

    Args:
        contender: the optimizer and its form.
        seed: seed of the initial weights and of the data order.
        learning_rate: peak of its schedule.
        eval_loss: held-out loss after the last step.
        tokens_per_second: training throughput, without evaluations.
        curve: step and held-out loss of every evaluation, in order.
    """

    contender: str
    seed: int
    learning_rate: float
    eval_loss: float
    tokens_per_second: float
    curve: tuple[tuple[int, float], ...]


class Row(NamedTuple):
    """Result of one contender over its runs.

    `against_baseline` is the difference of the mean losses, `steps_to_baseline` the first evaluated step whose mean
    loss is not above the baseline's final one (None: never), `speed` the ratio of tokens per second to the baseline's.
    """

    contender: str
    learning_rate: float
    seeds: int
    loss: float
    lowest: float
    highest: float
    against_baseline: float
    steps: int
    steps_to_baseline: int | None
    speed: float


def baseline_of(contenders: Sequence[str]) -> str:
    """Return the contender that the others are compared with: adamw, or the first."""
    return "adamw" if "adamw" in contenders else contenders[0]


def mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return one contender's mean loss at the steps that all its runs evaluated; a resumed run has extra ones."""
    curves = [dict(run.curve) for run in runs]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]


def summarize(runs: Sequence[Run]) -> list[Row]:
    """Return one row per contender, in the order of their first runs."""
    by_name = by_contender(runs)
    base = by_name[baseline_of(list(by_name))]
    goal = statistics.fmean(run.eval_loss for run in base)
    base_speed = statistics.median(run.tokens_per_second for run in base)
    rows = []
    for name, own in by_name.items():
        losses = [run.eval_loss for run in own]
        curve = mean_curve(own)
        rows.append(
            Row(
                contender=name,
                learning_rate=own[0].learning_rate,
                seeds=len(own),
                loss=statistics.fmean(losses),
                lowest=min(losses),
                highest=max(losses),
                against_baseline=statistics.fmean(losses) - goal,
                steps=curve[-1][0],
                steps_to_baseline=next((step for step, loss in curve if loss <= goal), None),
                speed=statistics.median(run.tokens_per_second for run in own) / base_speed,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table that also reads well in a terminal."""
    baseline = baseline_of([row.contender for row in rows])
    cells = [
        (
            "optimizer",
            "learning rate",
            "held-out loss (lowest-highest)",
            f"against {baseline}",
            f"steps to {baseline}'s loss",
            f"tokens per second against {baseline}",
        )
    ]
    for row in rows:
        is_baseline = row.contender == baseline
        reached = row.steps_to_baseline
        seeds = f" ({row.lowest:.3f}-{row.highest:.3f})" if row.seeds > 1 else ""
        cells.append(
            (
                row.contender,
                f"{row.learning_rate:g}",
                f"{row.loss:.3f}{seeds}",
                "-" if is_baseline else f"{row.against_baseline:+.3f}",
                "not reached" if reached is None else f"{reached} of {row.steps} ({reached / row.steps:.0%})",
                "-" if is_baseline else f"{row.speed:.2f}x",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return one sentence per contender but the baseline; a lead counts if it exceeds the seed spread of both."""
    names = [row.contender for row in rows]
    base = rows[names.index(baseline_of(names))]
    return [_verdict(row, base) for row in rows if row is not base]


def _verdict(row: Row, base: Row) -> str:
    for one in (base, row):
        if not math.isfinite(one.loss):
            return f"{row.contender}: nothing to compare, {one.contender} diverged (held-out loss {one.loss})"
    gap = abs(row.against_baseline)
    side = "ahead of" if row.against_baseline < 0 else "behind"
    if min(row.seeds, base.seeds) == 1:
        return f"{row.contender}: {gap:.3f} nats per token {side} {base.contender}, with one seed: no spread known"
    spread = max(row.highest - row.lowest, base.highest - base.lowest)
    seeds = f"(seeds differ by up to {spread:.3f})"
    if gap > spread:
        return f"{row.contender}: {side} {base.contender} by {gap:.3f} nats per token {seeds}"
    return f"{row.contender}: no difference from {base.contender} shown; the means are {gap:.3f} apart {seeds}"


def by_contender(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by contender, in the order of their first runs."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.contender, []).append(run)
    return by_name
