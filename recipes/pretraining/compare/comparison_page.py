"""Write the result of a comparison: one page, its numbers and its pictures."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.compare import comparison, comparison_tables, figures, machine
from pretraining.compare.presets import Preset
from pretraining.run import report

# From this many intervals on, the page says how many of them miss the truth.
_MANY = 10


class Result(NamedTuple):
    """The runs of a comparison, or those that are finished.

    Args:
        preset: the arms.
        runs: in the order asked for.
        wanted: number of runs when it is complete.
        data: each data that runs had, once.
        arguments: of all runs, from the command line.
    """

    preset: Preset
    runs: Sequence[comparison.Run]
    wanted: int
    data: Sequence[Mapping[str, Any]] = ()
    arguments: Sequence[str] = ()

    @property
    def baseline(self) -> str:
        """Return the arm that the others are compared with."""
        return self.preset.baseline or comparison.baseline_of(list(self.preset.arms))

    @property
    def comparable(self) -> list[comparison.Run]:
        """Return the runs of seeds that the baseline has finished."""
        seeds = {run.seed for run in self.runs if run.contender == self.baseline}
        return [run for run in self.runs if run.seed in seeds]


def text(result: Result) -> str:
    """Return tables and verdicts, as they are printed."""
    return "\n\n".join(filter(None, [*_tables(result), "\n".join((*_verdicts(result), *_notes(result)))]))


def write(result: Result, output: Path) -> None:
    """Write comparison.json, .md and .png, and axis.png along an axis; the page of a part says how much is there."""
    preset, runs = result.preset, result.comparable
    figures.comparison(runs, output / "comparison.png", result.baseline)
    pictures = ["![Losses](comparison.png)"]
    if lines := lines_of(runs, preset):
        figures.along_axis(lines, output / "axis.png", str(preset.axis))
        pictures.append("![Losses along the axis](axis.png)")
    missing = f"{len(result.runs)} of {result.wanted} runs so far." if len(result.runs) < result.wanted else ""
    differences = _differences(result)
    sections = [
        *(
            preset.about,
            missing,
            *_tables(result),
            comparison_tables.differences_table(differences) if differences else "",
        ),
        *("\n".join(f"- {line}" for line in _notes(result)), _about(result), *pictures),
    ]
    report.write_text(output / "comparison.md", "\n\n".join(filter(None, sections)) + "\n")
    report.write(
        output / "comparison.json",
        {
            "machine": machine.describe(),
            "arguments": list(result.arguments),
            "data": list(result.data),
            "arms": {name: dict(settings) for name, settings in preset.arms.items()},
            "rows": [row.as_json() for row in comparison.summarize(runs, result.baseline)],
            "differences": [one.as_json() for one in differences],
            "verdicts": _verdicts(result),
            "sensitivity": _sensitivities(runs, preset),
            "runs": [run.as_json() for run in result.runs],
        },
    )


def lines_of(runs: Sequence[comparison.Run], preset: Preset) -> dict[str, list[tuple[float, list[float]]]]:
    """Return the lines of a picture over the preset's axis: places and the losses of all seeds."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for name, own in comparison.by_contender(runs).items():
        place = preset.place(name)
        if place is not None:
            lines.setdefault(place[0], []).append((place[1], [run.eval_loss for run in own]))
    return lines


def _tables(result: Result) -> list[str]:
    lines = lines_of(result.comparable, result.preset)
    return [
        comparison_tables.grid(lines, str(result.preset.axis)) if lines else "",
        comparison_tables.table(comparison.summarize(result.comparable, result.baseline), result.baseline),
    ]


def _differences(result: Result) -> list[comparison.Compared]:
    return comparison.compared(result.comparable, result.baseline, result.preset.pairs)


def _verdicts(result: Result) -> list[str]:
    return comparison.verdicts(result.comparable, result.baseline, result.preset.pairs)


def _notes(result: Result) -> list[str]:
    costs = _sensitivities(result.comparable, result.preset)
    return [f"{name}: a wrong learning rate costs {cost:.3f} nats per token" for name, cost in costs.items()]


def _about(result: Result) -> str:
    seeds = list(dict.fromkeys(run.seed for run in result.runs))
    about = (
        f"Seeds {', '.join(map(str, seeds))}; settings: {shlex.join(result.arguments) or 'those of the default job'}."
    )
    about += "".join(f" Data: {one['dataset']}, SHA-256 {str(one['train tokens'])[:12]}." for one in result.data)
    differences = _differences(result)
    if len(seeds) > 1 and len(differences) >= _MANY:
        shown = [one.shown for one in differences]
        about += (
            f" Of {len(shown)} intervals at 95%, {len(shown) / 20:.1f} miss the truth on average; by Holm's correction "
            f"{shown.count('yes')} of {len(shown) - shown.count('no')} differences stay shown."
        )
    if result.preset.equal == "seconds":
        about += f" Arms train for as long as {result.baseline} does."
    here = machine.describe()
    return f"{about} {here['cpu']}, torch {here['torch']}, transformers {here['transformers']}."


def _sensitivities(runs: Sequence[comparison.Run], preset: Preset) -> dict[str, float]:
    """Return `comparison.sensitivity` of each line along learning rates, if the loss before training is known."""
    start = max((run.curve[0][1] for run in runs if run.curve and run.curve[0][0] == 0), default=None)
    if start is None or preset.axis != "learning_rate":
        return {}
    found: dict[str, float] = {}
    for name, line in lines_of(runs, preset).items():
        losses = {place: statistics.fmean(own) for place, own in line}
        if len(losses) > 1:
            found[name] = comparison.sensitivity(losses, start)
    return found
