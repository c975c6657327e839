"""Write the result of a comparison: a page of tables, a picture, and its numbers as JSON."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pretraining import files
from pretraining.compare import comparison
from pretraining.compare.comparison import Difference, FinishedRun, Row
from pretraining.compare.launch import describe_machine
from pretraining.compare.presets import Preset

# An optimizer has one color in every picture; pictures give no other meaning to these colors.
COLORS = {
    "adamw": "0.35",
    "adamw_torch": "0.35",
    "nadamw": "tab:brown",
    "mars": "tab:blue",
    "mars_adamw": "tab:blue",
    "mars_lion": "tab:orange",
    "mars_shampoo": "tab:purple",
    "mars_m": "tab:red",
    "muon": "tab:green",
}


def write(
    output: Path,
    preset: Preset,
    runs: Sequence[FinishedRun],
    *,
    missing: int = 0,
    data: Sequence[Mapping[str, Any]] = (),
    arguments: Sequence[str] = (),
) -> str:
    """Write comparison.json, .md and .png, and return the tables.

    Args:
        output: folder to write to.
        preset: the arms.
        runs: finished ones; those of seeds that the baseline has finished are compared.
        missing: number of runs that are not finished.
        data: name and hashes of each data set that runs read.
        arguments: of all runs, from the command line.
    """
    seeds = [run.seed for run in runs if run.contender == preset.baseline]
    compared = [run for run in runs if run.seed in seeds]
    rows = comparison.summarize(compared, preset.baseline)
    gaps = comparison.differences(compared, preset.baseline, preset.pairs)
    lines = lines_of(compared, preset)
    tables = [rows_table(rows, preset.baseline)]
    if lines:
        tables.insert(0, grid_table(lines, str(preset.axis)))
    if gaps:
        tables.append(differences_table(gaps))
    text = "\n\n".join(tables)
    machine = describe_machine()
    names = dict.fromkeys(f" Data: {one['dataset']}, SHA-256 {str(one['train tokens'])[:12]}." for one in data)
    about = (
        f"Seeds {', '.join(map(str, seeds))}; settings: {shlex.join(arguments) or 'those of the default job'}."
        f"{''.join(names)} {machine['cpu']}, torch {machine['torch']}, transformers {machine['transformers']}."
    )

    unfinished = f"{len(runs)} of {len(runs) + missing} runs so far." if missing else ""
    draw(compared, preset.baseline, output / "comparison.png")
    page = filter(None, [preset.about, unfinished, text, about, "![Losses](comparison.png)"])
    files.write_text(output / "comparison.md", "\n\n".join(page) + "\n")
    files.write_json(
        output / "comparison.json",
        {
            "machine": machine,
            "arguments": list(arguments),
            "data": [one for index, one in enumerate(data) if one not in data[:index]],
            "arms": {name: dict(settings) for name, settings in preset.arms.items()},
            "rows": [row._asdict() for row in rows],
            "differences": [{**gap._asdict(), "shown": gap.shown} for gap in gaps],
            "runs": [dataclasses.asdict(run) for run in runs],
        },
    )
    return text


def color(name: str) -> str:
    """Return the color of the first optimizer that a name has among its words, like "timm Mars"; pink if none."""
    words = name.lower().replace("-", "_").replace(",", "").split()
    return next((COLORS[word] for word in words if word in COLORS), "pink")


def draw(runs: Sequence[FinishedRun], baseline: str, path: Path) -> None:
    """Draw final held-out losses less the baseline's of the same seed: means as bars, seeds as dots."""
    losses = {run.seed: run.eval_loss for run in runs if run.contender == baseline}
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for name, members in reversed(comparison.by_contender(runs).items()):
        gaps = [run.eval_loss - losses[run.seed] for run in members if math.isfinite(run.eval_loss)]
        axes.barh(name, statistics.fmean(gaps or [0.0]), color=color(name), alpha=0.6)
        axes.plot(gaps, [name] * len(gaps), ".", color="black")
    axes.set(xlabel="nats per token; bars: means, dots: seeds", title=f"final held-out loss, difference to {baseline}")
    figure.savefig(path, dpi=120)


def lines_of(runs: Sequence[FinishedRun], preset: Preset) -> dict[str, list[tuple[float, list[float]]]]:
    """Return the lines of a table over the preset's axis: places and the losses of all seeds."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for name, members in comparison.by_contender(runs).items():
        position = preset.position_of(name)
        if position is not None:
            line, at = position
            lines.setdefault(line, []).append((at, [run.eval_loss for run in members]))
    return lines


def rows_table(rows: Sequence[Row], baseline: str) -> str:
    """Return the result of each arm as a Markdown table."""
    steps, speed = f"steps to {baseline}'s loss", f"tokens per second against {baseline}"
    cells = [("optimizer", "learning rate", "held-out loss (lowest-highest)", steps, speed)]
    for row in rows:
        rate, spread = f"{row.learning_rate:g}", f"{row.lowest:.3f}-{row.highest:.3f}"
        if row.diverged:
            count = f"{row.diverged} of {row.seeds} diverged"
            others = f" (others {spread})" if row.diverged < row.seeds else ""
            cells.append((row.contender, rate, count + others, "-", "-"))
            continue
        loss = f"{row.loss:.3f}" + (f" ({spread})" if row.seeds > 1 else "")
        step = row.steps_to_baseline
        reached = f"not reached in {row.steps}" if step is None else f"{step} of {row.steps} ({step / row.steps:.0%})"
        cells.append((row.contender, rate, loss, reached, f"{row.speed:.2f}x" if math.isfinite(row.speed) else "-"))
    return markdown(cells)


def differences_table(gaps: Sequence[Difference]) -> str:
    """Return differences as a Markdown table."""
    cells = [("arm", "measured against", "difference (95% interval)", "shown")]
    for gap in gaps:
        interval = f"({gap.low:+.3f} to {gap.high:+.3f})" if math.isfinite(gap.low) else "(one seed)"
        text = f"{gap.mean:+.3f} {interval}" if math.isfinite(gap.mean) else "diverged"
        cells.append((gap.contender, gap.against, text, gap.shown if math.isfinite(gap.low) else ""))
    return markdown(cells, left=2)


def grid_table(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], axis: str) -> str:
    """Return the mean losses along an axis as a Markdown table: a row for each place, a column for each line."""
    columns = {name: {place: statistics.fmean(losses) for place, losses in line} for name, line in lines.items()}
    cells = [(axis.replace("_", " "), *columns)]
    for place in sorted(set().union(*columns.values())):
        means = [column.get(place) for column in columns.values()]
        texts = ["" if mean is None else f"{mean:.3f}" if math.isfinite(mean) else "diverged" for mean in means]
        cells.append((f"{place:g}", *texts))
    return markdown(cells)


def markdown(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a padded Markdown table whose first columns, as many as `left`, are words."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    padded = [
        [cell.ljust(width) if index < left else cell.rjust(width) for index, (cell, width) in enumerate(row)]
        for row in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))
