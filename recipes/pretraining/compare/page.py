"""Write the result of a comparison: a page of tables, its numbers as JSON and its pictures."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pretraining import files
from pretraining.compare import comparison
from pretraining.compare.comparison import Difference, Row, Run
from pretraining.compare.launch import describe_machine
from pretraining.compare.presets import Preset

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


def write(
    output: Path,
    preset: Preset,
    runs: Sequence[Run],
    *,
    missing: int = 0,
    data: Sequence[Mapping[str, Any]] = (),
    arguments: Sequence[str] = (),
) -> str:
    """Write comparison.json, .md and .png, and axis.png along an axis; return the tables.

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
    text = "\n\n".join(
        [
            *([grid_table(lines, str(preset.axis))] if lines else []),
            rows_table(rows, preset.baseline),
            *([differences_table(gaps)] if gaps else []),
        ]
    )
    machine = describe_machine()
    about = f"Seeds {', '.join(map(str, seeds))}; settings: {shlex.join(arguments) or 'those of the default job'}."
    about += "".join(f" Data: {one['dataset']}, SHA-256 {str(one['train tokens'])[:12]}." for one in data)
    about += f" {machine['cpu']}, torch {machine['torch']}, transformers {machine['transformers']}."

    draw_comparison(compared, gaps, preset.baseline, output / "comparison.png")
    pictures = "![Losses](comparison.png)"
    if lines:
        draw_along_axis(lines, str(preset.axis), output / "axis.png")
        pictures += "\n\n![Losses along the axis](axis.png)"
    unfinished = f"{len(runs)} of {len(runs) + missing} runs so far." if missing else ""
    page = [preset.about, unfinished, text, about, pictures]
    files.write_text(output / "comparison.md", "\n\n".join(filter(None, page)) + "\n")
    files.write_json(
        output / "comparison.json",
        {
            "machine": machine,
            "arguments": list(arguments),
            "data": list(data),
            "arms": {name: dict(settings) for name, settings in preset.arms.items()},
            "rows": [row._asdict() for row in rows],
            "differences": [{**gap._asdict(), "shown": gap.shown} for gap in gaps],
            "runs": [dataclasses.asdict(run) for run in runs],
        },
    )
    return text


def lines_of(runs: Sequence[Run], preset: Preset) -> dict[str, list[tuple[float, list[float]]]]:
    """Return the lines of a picture over the preset's axis: places and the losses of all seeds."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for name, members in comparison.by_contender(runs).items():
        if place := preset.place(name):
            lines.setdefault(place[0], []).append((place[1], [run.eval_loss for run in members]))
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
        names = (gap.contender, gap.against)
        if not math.isfinite(gap.mean):
            cells.append((*names, "diverged", ""))
        elif not math.isfinite(gap.low):
            cells.append((*names, f"{gap.mean:+.3f} (one seed)", ""))
        else:
            cells.append((*names, f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})", gap.shown))
    return markdown(cells, left=2)


def grid_table(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], axis: str) -> str:
    """Return the mean losses along an axis as a Markdown table: one row for each line, one column for each place."""
    places = sorted({place for line in lines.values() for place, _ in line})
    cells = [(axis, *(f"{place:g}" for place in places))]
    for name, line in lines.items():
        means = {place: statistics.fmean(losses) for place, losses in line}
        texts = {place: f"{mean:.3f}" if math.isfinite(mean) else "diverged" for place, mean in means.items()}
        cells.append((name, *(texts.get(place, "") for place in places)))
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


def draw_comparison(runs: Sequence[Run], gaps: Sequence[Difference], baseline: str, path: Path) -> None:
    """Draw the paired differences of final held-out losses to the baseline's, as a PNG file.

    Bars show mean differences, whiskers are 95% intervals, dots are seeds.
    """
    arms = comparison.by_contender(runs)
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
    axes.axvline(0, color="0.25", linewidth=1)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set(
        xlabel="final held-out loss, nats per token (line: 95% interval, dots: seeds)",
        title=f"difference to {baseline}",
    )
    axes.grid(alpha=0.3, axis="x")
    save(figure, path)


def draw_along_axis(lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], axis: str, path: Path) -> None:
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
