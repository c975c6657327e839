"""Write the result of a comparison: a verdict in words, tables, a picture, and the numbers as JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import mars_hf
from mars_hf.compare import files, picture
from mars_hf.compare.comparison import Comparison
from mars_hf.compare.differences import Difference
from mars_hf.compare.verdict import Findings, median, size


def write(comparison: Comparison, *, has_speeds: bool) -> str:
    """Write comparison.json, .md and .png into a comparison's folder, and return the page.

    `has_speeds` says whether runs had a device for themselves.
    """
    found, plan = comparison.findings(has_speeds), comparison.plan
    verdicts = [found.verdict(gap) for gap in found.gaps]
    remarks = [*comparison.remarks(), *found.doubts(), *([] if has_speeds else ["Runs shared a device: no speeds."])]
    machine, command = describe_machine(), shlex.join(comparison.template.command)
    texts = [
        f"# {found.title}",
        plan.about,
        _list(verdicts) or "No verdict yet: no arm has finished its new seeds.",
        results_table(found),
        "![Learning rates, and differences at the best ones](comparison.png)",
        search_table(found),
        _list(remarks),
        f"`{command}`",
        f"{machine['cpu']}, {machine['cores']} cores, accelerator: {machine['accelerator']}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, mars_hf {machine['mars_hf']}.",
    ]
    best = [(state.arm, state.best) for state in comparison.states if state.best is not None]
    orders = {arm.name: comparison.run(arm, place, plan.seeds[0]).order for arm, place in best}
    numbers = {
        "machine": machine,
        "command": command,
        "set": plan.set,
        "metric": dataclasses.asdict(found.metric),
        "arms": {arm: {**order.arm, "arguments": order.arguments} for arm, order in orders.items()},
        "search_seeds": plan.search_seeds,
        "search": {
            arm: [{"rate": rate, "values": values} for rate, values in by_rate.items()]
            for arm, by_rate in found.search.items()
        },
        "verdicts": verdicts,
        "remarks": remarks,
        "differences": [{**gap._asdict(), "is_shown": gap.is_shown} for gap in found.gaps],
        "runs": [run._asdict() for run in found.runs],
    }
    page = "\n\n".join(filter(None, texts)) + "\n"
    picture.figure_of(found).savefig(comparison.output / "comparison.png", dpi=160)
    files.write_text(comparison.output / "comparison.md", page)
    files.write_json(comparison.output / "comparison.json", numbers)
    return page


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def results_table(found: Findings) -> str:
    """Return the result of each arm as a Markdown table, without columns that nothing fills."""
    if not found.runs:
        return ""
    less = f"less {found.baseline}'s"
    rate = "best rate" if found.search else "rate"
    cells = [["arm", rate, found.metric.shown_name, "seeds", less, "verdict", "s/step", "GPU memory"]]
    gaps = {gap.arm: gap for gap in found.gaps if gap.against == found.baseline}
    for arm in found.arms:
        gap = gaps.get(arm)
        against = ["", ""] if gap is None else [_signed(gap), found.answer(gap)]
        cells.append(_row(found, arm, against))
    filled = [at for at, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
    return markdown([[row[at] for at in filled] for row in cells])


def _row(found: Findings, arm: str, against: list[str]) -> list[str]:
    runs = found.arms[arm]
    values = [run.value for run in runs]
    result = f"{statistics.fmean(values):.4f} ({min(values):.4f}-{max(values):.4f})"
    if lost := sum(map(math.isnan, values)):
        result = f"{lost} of {len(runs)} diverged"
    seconds, memory = median(run.seconds_per_step for run in runs), median(run.memory for run in runs)
    costs = [
        f"{seconds:.3g}" if math.isfinite(seconds) else "",
        f"{memory / 2**20:,.0f} MiB" if math.isfinite(memory) else "",
    ]
    return [arm, f"{runs[0].rate:.3g}", result, str(len(runs)), *against, *costs]


def _signed(gap: Difference) -> str:
    sign = "-" if gap.mean < 0 else "+"
    return f"{sign}{size(gap)}" if math.isfinite(gap.mean) else ""


def search_table(found: Findings) -> str:
    """Return the mean metric by rate; the best rate of each arm is in bold, with the number of its seeds."""
    cells = [("arm", "search: metric by learning rate (seeds)")]
    for arm, by_rate in found.search.items():
        texts = []
        for rate, values in by_rate.items():
            text = f"{rate:.3g}: {statistics.fmean(values):.4f} ({len(values)})" if values else f"{rate:.3g}: diverged"
            texts.append(f"**{text}**" if rate == found.best.get(arm) else text)
        cells.append((arm, ", ".join(texts)))
    return markdown(cells, left=2) if found.search else ""


def markdown(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a padded Markdown table whose first columns, as many as `left`, are words."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if at < left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        words = [cell.ljust(width) for cell, width in zip(row[:left], widths[:left], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        lines.append(f"| {' | '.join([*words, *numbers])} |")
    return "\n".join(lines)


def describe_machine() -> dict[str, str | int]:
    """Return processor, cores, accelerator and versions, for results."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next((line.partition(": ")[2] for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mars_hf": mars_hf.__version__,
    }
