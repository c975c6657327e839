"""Read the published comparisons and searches of benchmarks/results, for the pages' tests and figures.

Most were run before `python -m mars_hf compare`, which now runs the plans in benchmarks/plans. A difference of two arms
is paired by seed, with the 95% interval of Student's t over the seeds of both. `findings` reads those of the command.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import ttest_rel

from mars_hf.compare import differences as compared
from mars_hf.compare import page
from mars_hf.compare.differences import holm, steps_to
from mars_hf.compare.metric import Metric
from mars_hf.compare.plan import Plan
from mars_hf.compare.verdict import Findings

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLANS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "plans"

Rates = tuple[float, ...]
Losses = dict[Rates, dict[int, float]]  # rates -> seed -> held-out loss, NaN for a run that diverged


@dataclass(frozen=True)
class FinishedRun:
    """One run of a comparison; `contender` is its arm."""

    contender: str
    seed: int
    learning_rate: float
    eval_loss: float
    tokens_per_second: float
    curve: Sequence[tuple[int, float]] = ()


class Difference(NamedTuple):
    """Mean difference of two arms' losses, paired by seed, its 95% interval, p value, and that after Holm."""

    contender: str
    against: str
    mean: float
    low: float = -math.inf
    high: float = math.inf
    p: float = math.nan
    holm: float = math.nan

    @property
    def interval(self) -> str:
        """Return mean and half-width as pages have them."""
        return f"{self.mean:+.3f} ± {(self.high - self.low) / 2:.3f}"


class Row(NamedTuple):
    """Result of one arm; `steps_to_baseline` is where its mean loss reaches the baseline's last (None: never)."""

    contender: str
    learning_rate: float
    seeds: int
    diverged: int
    loss: float
    lowest: float
    highest: float
    steps: int
    steps_to_baseline: int | None
    speed: float


def runs(name: str) -> list[FinishedRun]:
    """Return the runs of a comparison."""
    return [FinishedRun(**{**run, "curve": tuple(map(tuple, run["curve"]))}) for run in read(name)["runs"]]


def read(name: str) -> dict[str, Any]:
    """Return a file of benchmarks/results."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def findings(name: str, title: str = "") -> Findings:
    """Return what the comparison.json of a `python -m mars_hf compare` holds; `title` is for its picture."""
    result, members = read(name), []
    for run in result["runs"]:
        unknown = {key: math.nan for key in ("seconds_per_step", "memory") if run[key] is None}
        members.append(compared.FinishedRun(**{**run, **unknown}))
    searched = {arm: {row["rate"]: row["values"] for row in rows} for arm, rows in result["search"].items()}
    best = {run.arm: run.rate for run in members}
    return Findings(title, Metric(**result["metric"]), next(iter(result["arms"])), members, searched, best)


def further_runs(search: str) -> list[FinishedRun]:
    """Return the runs with further seeds of a search, each arm at its best rate."""
    return [
        FinishedRun(
            row["arm"], row["seed"], row["learning_rate"], row["eval_loss"], math.nan, tuple(map(tuple, row["curve"]))
        )
        for row in read(f"tune_{search}")["runs"]
        if "curve" in row
    ]


def plan(name: str) -> Plan:
    """Return a plan of benchmarks/plans."""
    return Plan.of_file(str(PLANS / f"{name}.yaml"))


def settings(of: Plan, arm: str) -> dict[str, Any]:
    """Return the flags of an arm at its first rates."""
    (own,) = [each for each in of.arms if each.name == arm]
    return {**of.arguments, **own.arguments, **dict(zip(of.rates, own.first, strict=True))}


def by_contender(members: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Group runs by arm, in the order of their first runs."""
    names = dict.fromkeys(run.contender for run in members)
    return {name: [run for run in members if run.contender == name] for name in names}


# --- statistics ------------------------------------------------------------------------------------------------------


def difference(ours: Sequence[FinishedRun], against: Sequence[FinishedRun]) -> Difference:
    """Return the difference of final held-out losses over the seeds that both arms have."""
    theirs = {run.seed: run.eval_loss for run in against}
    losses = np.array([(run.eval_loss, theirs[run.seed]) for run in ours if run.seed in theirs])
    names, mean = (ours[0].contender, against[0].contender), float(np.mean(losses[:, 0] - losses[:, 1]))
    if len(losses) < 2:
        return Difference(*names, mean)
    test = ttest_rel(losses[:, 0], losses[:, 1])
    low, high = map(float, test.confidence_interval(0.95))
    return Difference(*names, mean, low, high, float(test.pvalue))


def differences(
    members: Sequence[FinishedRun], baseline: str, pairs: Sequence[tuple[str, str]] = ()
) -> list[Difference]:
    """Return the difference of each arm to the baseline, and of each further pair."""
    arms = by_contender(members)
    asked = dict.fromkeys([*((name, baseline) for name in arms if name != baseline), *pairs])
    gaps = [difference(arms[one], arms[other]) for one, other in asked if {one, other} <= arms.keys()]
    return [gap._replace(holm=p) for gap, p in zip(gaps, holm([gap.p for gap in gaps]), strict=True)]


def summarize(members: Sequence[FinishedRun], baseline: str) -> list[Row]:
    """Return one row per arm."""
    arms = by_contender(members)
    goal = statistics.fmean(run.eval_loss for run in arms[baseline])
    speeds = {name: statistics.median(run.tokens_per_second for run in own) for name, own in arms.items()}
    rows = []
    for name, own in arms.items():
        losses, curve = [run.eval_loss for run in own], mean_curve(own)
        rows.append(
            Row(
                contender=name,
                learning_rate=own[0].learning_rate,
                seeds=len(own),
                diverged=0,
                loss=statistics.fmean(losses),
                lowest=min(losses),
                highest=max(losses),
                steps=curve[-1][0],
                steps_to_baseline=steps_to(goal, curve),
                speed=speeds[name] / speeds[baseline],
            )
        )
    return rows


def mean_curve(members: Sequence[FinishedRun]) -> list[tuple[int, float]]:
    """Return one arm's mean loss at the steps that all its runs evaluated."""
    curves = [dict(run.curve) for run in members]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return [(step, statistics.fmean(curve[step] for curve in curves)) for step in steps]


# --- tables over a setting -------------------------------------------------------------------------------------------

# Comparison -> the setting that its table's rows run over, and the one that names a column; "name": the arm's name
# without its last word.
AXES = {
    "gamma_embedded": ("gamma", "gamma_schedule"),
    "betas_embedded": ("beta1", "name"),
    "batch_embedded": ("per_device_train_batch_size", "optimizer"),
    "lr_embedded": ("learning_rate", "optimizer"),
}


def lines_of(name: str) -> dict[str, list[tuple[float, list[float]]]]:
    """Return the lines of a comparison over its axis: places and the losses of all seeds."""
    (axis, line_setting), arms = AXES[name], read(name)["arms"]
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for arm, own in by_contender(runs(name)).items():
        line = arm.rpartition(" ")[0] if line_setting == "name" else str(arms[arm][line_setting])
        lines.setdefault(line, []).append((float(arms[arm][axis]), [run.eval_loss for run in own]))
    return lines


def grid_table(name: str) -> str:
    """Return the mean losses along a comparison's axis: a row for each place, a column for each line."""
    lines = lines_of(name)
    columns = {line: {at: statistics.fmean(losses) for at, losses in places} for line, places in lines.items()}
    cells = [(AXES[name][0].replace("_", " "), *columns)]
    for place in sorted(set().union(*columns.values())):
        means = [column.get(place) for column in columns.values()]
        cells.append((f"{place:g}", *("" if mean is None else f"{mean:.3f}" for mean in means)))
    return page.markdown(cells)


# --- searches --------------------------------------------------------------------------------------------------------

# Search -> the keys of its rows that name an arm, and its rates.
COLUMNS = {"embedded": ["contender"], "finetuning": ["base", "mode", "optim"], "smollm2": ["text", "mode", "optim"]}
COLUMNS |= {"tasks": ["recipe", "optim"]}
RATES = {"controls": ["learning_rate", "lr_embeddings"]}


def searched(name: str) -> dict[str, Losses]:
    """Return the held-out losses of each arm of a search, by increasing rates and seed."""
    losses: dict[str, Losses] = {}

    def rates_of(row: Mapping[str, Any]) -> Rates:
        return tuple(float(f"{row[rate]:.6g}") for rate in RATES.get(name, ["learning_rate"]))

    for row in sorted(read(f"tune_{name}")["runs"], key=lambda row: (rates_of(row), row["seed"])):
        arm = " ".join(row[column] for column in COLUMNS.get(name, ["arm"]))
        loss = math.nan if row["eval_loss"] is None else row["eval_loss"]
        losses.setdefault(arm, {}).setdefault(rates_of(row), {})[row["seed"]] = loss
    return losses


def best(losses: Losses) -> Rates:
    """Return the rates with the lowest mean loss over the seeds; rates with fewer seeds than others do not count."""
    most = max(map(len, losses.values()))
    means = {rates: statistics.fmean(by_seed.values()) for rates, by_seed in losses.items() if len(by_seed) == most}
    return min(means, key=lambda rates: means[rates] if math.isfinite(means[rates]) else math.inf)
