"""Write the result of a comparison: a verdict in words, tables, a picture, and the numbers as JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

import mars_hf
from mars_hf.compare import differences, files, picture
from mars_hf.compare.comparison import Comparison
from mars_hf.compare.differences import Difference, FinishedRun
from mars_hf.compare.metric import Metric
from mars_hf.compare.picture import Searched
from mars_hf.compare.verdict import count, doubts, median, verdict


def write(comparison: Comparison, *, has_speeds: bool) -> str:
    """Write comparison.json, .md and .png into a comparison's folder, and return the page.

    Args:
        comparison: what is finished of it.
        has_speeds: whether runs had a device for themselves.
    """
    metric, plan = comparison.metric, comparison.plan
    assert metric is not None
    baseline, runs = plan.baseline.name, comparison.compared()
    searched = {arm.name: by_rate for arm in plan.arms if (by_rate := comparison.searched(arm))}
    best = comparison.best_runs()
    rates = {name: run.rate for name, run in best.items()}
    gaps = differences.differences(runs, baseline, plan.pairs)
    verdicts = [verdict(gap, runs, metric, was_searched=comparison.searches, has_speeds=has_speeds) for gap in gaps]
    remarks = [*comparison.remarks(), *doubts(runs), *([] if has_speeds else ["Runs shared a device: no speeds."])]
    machine, title, command = describe_machine(), _title(comparison), shlex.join(comparison.template.command)
    texts = [
        f"# {title}",
        plan.about,
        _list(verdicts) or "No verdict yet: no arm has finished its new seeds.",
        results_table(runs, gaps, baseline, metric, was_searched=comparison.searches, has_speeds=has_speeds),
        "![Learning rates, and differences at the best ones](comparison.png)",
        search_table(searched, rates),
        _list(remarks),
        f"`{command}`",
        f"{machine['cpu']}, {machine['cores']} cores, accelerator: {machine['accelerator']}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, mars_hf {machine['mars_hf']}.",
    ]
    numbers = {
        "machine": machine,
        "command": command,
        "set": dict(plan.set),
        "metric": dataclasses.asdict(metric),
        "arms": {name: {**run.order.arm, "arguments": list(run.order.arguments)} for name, run in best.items()},
        "search_seeds": list(plan.search_seeds),
        "search": {
            name: [{"rate": rate, "values": list(values)} for rate, values in by_rate.items()]
            for name, by_rate in searched.items()
        },
        "verdicts": verdicts,
        "remarks": remarks,
        "differences": [{**gap._asdict(), "is_shown": gap.is_shown} for gap in gaps],
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    page = "\n\n".join(filter(None, texts)) + "\n"
    picture.draw(comparison.output / "comparison.png", title, searched, rates, runs, gaps, metric, baseline)
    files.write_text(comparison.output / "comparison.md", page)
    files.write_json(comparison.output / "comparison.json", numbers)
    return page


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def results_table(
    runs: Sequence[FinishedRun],
    gaps: Sequence[Difference],
    baseline: str,
    metric: Metric,
    *,
    was_searched: bool,
    has_speeds: bool,
) -> str:
    """Return the result of each arm as a Markdown table, without columns that nothing fills.

    Without a search of rates nothing is shown, as the verdict says.
    """
    if not runs:
        return ""
    of_baseline = {gap.arm: gap for gap in gaps if gap.against == baseline}
    cells = [["arm", "best rate", metric.shown_name, "seeds", f"less {baseline}'s", "shown", "s/step", "GPU memory"]]
    for name, members in differences.by_arm(runs).items():
        gap = of_baseline.get(name)
        against = ["", ""] if gap is None else [_with_interval(gap), "yes" if gap.is_shown else "no"]
        cells.append(_result(members, against if was_searched else [against[0], ""], has_speeds))
    filled = [at for at, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
    return markdown([[row[at] for at in filled] for row in cells])


def _result(members: Sequence[FinishedRun], against: list[str], has_speeds: bool) -> list[str]:
    """Return an arm's row of the table, with the cells that compare it with the baseline."""
    finite = [run.value for run in members if math.isfinite(run.value)]
    values = f"{len(members) - len(finite)} of {len(members)} diverged"
    if len(finite) == len(members):
        values = f"{statistics.fmean(finite):.4f} ({min(finite):.4f}-{max(finite):.4f})"
    seconds = median(run.seconds_per_step for run in members) if has_speeds else math.nan
    memory = median(run.memory for run in members)
    costs = [
        f"{seconds:.3g}" if math.isfinite(seconds) else "",
        f"{memory / 2**20:,.0f} MiB" if math.isfinite(memory) else "",
    ]
    return [members[0].arm, f"{members[0].rate:.3g}", values, str(len(members)), *against, *costs]


def _with_interval(gap: Difference) -> str:
    if not math.isfinite(gap.mean):
        return "diverged"
    return f"{gap.mean:+.4f} " + (f"± {gap.half:.2g}" if math.isfinite(gap.half) else "(one seed)")


def search_table(searched: Searched, best_rates: Mapping[str, float]) -> str:
    """Return the mean metric by rate; the best rate of each arm is in bold, with the number of its seeds."""
    cells = [("arm", "search: metric by learning rate (seeds)")]
    for arm, by_rate in searched.items():
        texts = []
        for rate, values in by_rate.items():
            text = f"{rate:.3g}: {statistics.fmean(values):.4f} ({len(values)})" if values else f"{rate:.3g}: diverged"
            texts.append(f"**{text}**" if rate == best_rates.get(arm) else text)
        cells.append((arm, ", ".join(texts)))
    return markdown(cells, left=2) if searched else ""


def markdown(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a padded Markdown table whose first columns, as many as `left`, are words."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    padded = [
        [cell.ljust(width) if index < left else cell.rjust(width) for index, (cell, width) in enumerate(row)]
        for row in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))


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


def _title(comparison: Comparison) -> str:
    first, *others = (arm.name for arm in comparison.plan.arms)
    steps = comparison.first_run().result["training"]["steps"]
    seeds = count(len(comparison.plan.seeds), "new seed")
    return f"{', '.join(others)} against {first} on {Path(comparison.template.script).name}, {steps} steps, {seeds}"
