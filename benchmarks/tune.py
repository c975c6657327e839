#!/usr/bin/env python
"""Search the learning rates of a recipe's optimizers: benchmarks/tune.yaml holds the searches and their arms.

    python benchmarks/tune.py controls                # all arms, two runs at a time on one thread each
    python benchmarks/tune.py finetuning --arms 'mars_adamw full mars_m'
    python benchmarks/tune.py embedded --report       # a table, from finished runs

A search goes in factors of two from a first rate to the best of its neighbours, until the best one is better than all
of them: rates that are best changed together are tried together. Some arms have a grid of rates and seeds instead, or
further seeds at the best rate. Runs go to benchmarks/results/tune_NAME.json; those there are not repeated, so start an
interrupted search again to resume it. Further arguments go to every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
try:
    import yaml
    from pretraining.compare import launch, presets
    from pretraining.files import write_json
    from tqdm.auto import tqdm
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}; benchmarks need pip install -c constraints.txt -e '.[recipes]'")

SEARCHES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks" / "tune.yaml").read_text(encoding="utf-8"))
BASES = ROOT / "runs" / "bases"
_KEPT = (
    "steps",
    "tokens",
    "train_loss",
    "eval_loss",
    "general_loss",
    "bits_per_byte",
    "eval_accuracy",
    "tokens_per_second",
)

Rates = tuple[float, ...]
Losses = dict[Rates, dict[int, float]]  # rates -> seed -> held-out loss, NaN for a run that diverged


class Search:
    """A search of tune.yaml.

    Attributes:
        arms: name to settings of the recipe, and `first` rates, or a `grid` of rates for each seed.
        rates: names of the learning rates that are searched.
        columns: keys of a result's rows that name the arm.
        seed: of the search; `seeds` of an arm run at its best rates, with the settings `further` of the search.
    """

    def __init__(self, name: str) -> None:
        """Read the search."""
        self.spec = SEARCHES[name]
        self.file = ROOT / "benchmarks" / "results" / f"tune_{self.spec.get('results', name)}.json"
        self.rates: list[str] = self.spec.get("rates", ["learning_rate"])
        self.columns: list[str] = self.spec.get("columns", ["arm"])
        self.seed: int = self.spec.get("seed", 1)
        if "preset" in self.spec:
            arms = {arm: {"settings": dict(own)} for arm, own in presets.load(self.spec["preset"]).arms.items()}
        else:
            arms = self.spec["arms"]
        self.arms = {
            arm: {"first": self.spec.get("first"), **own, **self.spec.get("starts", {}).get(arm, {})}
            for arm, own in arms.items()
        }

    def losses(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Losses]:
        """Return the held-out losses of each arm that has runs, by increasing rate and seed."""
        losses: dict[str, Losses] = {}
        for row in sorted(rows, key=lambda row: (self.rates_of(row), row["seed"])):
            by_seed = losses.setdefault(self.arm_of(row), {}).setdefault(self.rates_of(row), {})
            by_seed[row["seed"]] = math.nan if row["eval_loss"] is None else row["eval_loss"]
        return {arm: losses[arm] for arm in self.arms if arm in losses}

    def arm_of(self, row: Mapping[str, Any]) -> str:
        """Return the arm of a result's row."""
        return " ".join(row[column] for column in self.columns)

    def rates_of(self, row: Mapping[str, Any]) -> Rates:
        """Return the rates of a result's row."""
        return tuple(_rounded(row[name]) for name in self.rates)

    def wanted(self, arm: str, losses: Losses) -> tuple[Rates, int] | None:
        """Return rates and seed of an arm's next run, from the losses so far; None at the end of the search."""
        spec = self.arms[arm]
        if grid := spec.get("grid"):
            points = [((_rounded(rate),), seed) for seed, rates in grid.items() for rate in rates]
            return next((point for point in points if point[1] not in losses.get(point[0], {})), None)
        searched = {rates: by_seed for rates, by_seed in losses.items() if self.seed in by_seed}
        if not searched:
            return tuple(spec["first"]), self.seed
        middle = best({rates: {self.seed: by_seed[self.seed]} for rates, by_seed in searched.items()})
        if not math.isfinite(losses[middle][self.seed]):  # all diverged
            return tuple(_rounded(rate / 2) for rate in min(searched)), self.seed
        for factors in neighbours(len(middle)):
            rates = tuple(_rounded(rate * factor) for rate, factor in zip(middle, factors, strict=True))
            if rates not in searched:
                return rates, self.seed
        return next(((middle, seed) for seed in spec.get("seeds", []) if seed not in losses[middle]), None)

    def further(self, seed: int) -> dict[str, Any]:
        """Return the settings that runs of this seed have beside those of the search."""
        return {} if seed == self.seed else self.spec.get("further", {})

    def argv(self, arm: str, rates: Rates, seed: int) -> list[str]:
        """Return the recipe's arguments of a run; {rate}, {twice} and {eighth} stand for the first rate in settings."""
        rate = rates[0]
        parts = {"rate": f"{rate:g}", "twice": f"{2 * rate:g}", "eighth": f"{rate / 8:g}"}
        settings = {**self.spec.get("common", {}), **self.arms[arm].get("settings", {})}
        settings |= self.further(seed)
        settings = {key: value.format(**parts) if isinstance(value, str) else value for key, value in settings.items()}
        return presets.words({**settings, **dict(zip(self.rates, rates, strict=True)), "seed": seed})

    def train(self, arm: str, rates: Rates, seed: int, arguments: Sequence[str], scratch: str) -> dict[str, Any]:
        """Train once and return the run's row."""
        argv = [*self.argv(arm, rates, seed), *arguments]
        parts = arm.split() if len(self.columns) > 1 else [arm]
        row = {**dict(zip(self.columns, parts, strict=True)), **dict(zip(self.rates, rates, strict=True)), "seed": seed}
        name = self.arms[arm].get("script", self.spec.get("script"))
        script = ROOT / ("benchmarks" if name == "finetune" else "recipes") / f"{name}.py"
        output = Path(scratch) / "-".join([*arm.split(), *(f"{rate:g}" for rate in rates), str(seed)])
        try:
            metrics = launch.run_recipe(argv, output, script=script)
        except launch.Diverged:
            metrics = {"eval_loss": None}
        row |= {"argv": argv, **{key: metrics[key] for key in _KEPT if key in metrics}}
        if self.further(seed) and metrics["eval_loss"] is not None:
            row["curve"] = launch.curve_of(output)
        shutil.rmtree(output, ignore_errors=True)
        return row

    def report(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return a Markdown table of the losses by rate; the best rate of each arm is in bold."""
        lines = [
            f"| {' | '.join(self.columns)} | held-out loss by learning rate |",
            "| --- " * (len(self.columns) + 1) + "|",
        ]
        for arm, losses in self.losses(rows).items():
            if "grid" not in self.arms[arm]:
                losses = {rates: {self.seed: own[self.seed]} for rates, own in losses.items() if self.seed in own}
            cells = []
            for rates, by_seed in losses.items():
                values = " / ".join(f"{loss:.3f}" if math.isfinite(loss) else "diverged" for loss in by_seed.values())
                cell = f"{'/'.join(f'{rate:g}' for rate in rates)}: {values}"
                cells.append(f"**{cell}**" if rates == best(losses) else cell)
            end = "" if self.wanted(arm, self.losses(rows)[arm]) is None else " (the search has not ended)"
            names = arm.split() if len(self.columns) > 1 else [arm]
            lines.append(f"| {' | '.join(names)} | {', '.join(cells)}{end} |")
        return "\n".join(lines)


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def best(losses: Losses) -> Rates:
    """Return the rates with the lowest mean loss over the seeds; rates with fewer seeds than others do not count."""
    most = max(map(len, losses.values()))
    means = {rates: statistics.fmean(by_seed.values()) for rates, by_seed in losses.items() if len(by_seed) == most}
    return min(means, key=lambda rates: means[rates] if math.isfinite(means[rates]) else math.inf)


def neighbours(count: int) -> list[tuple[float, ...]]:
    """Return the factors to a point's neighbours: one of its rates doubled or halved, then several."""
    factors = [own for own in itertools.product((2.0, 0.5, 1.0), repeat=count) if own != (1.0,) * count]
    return sorted(factors, key=lambda own: sum(factor != 1 for factor in own))


def work_on(
    search: Search, arm: str, rows: Sequence[Mapping[str, Any]], run: Callable[[str, Rates, int], None]
) -> None:
    """Run what an arm lacks, one run at a time: better rates have other neighbours. `run` adds to the rows."""
    while point := search.wanted(arm, search.losses(rows).get(arm, {})):
        run(arm, *point)


def note_machine(result: dict[str, Any]) -> None:
    """Add this machine to a result, unless the result names it: a search may go on where another machine stopped."""
    machine = launch.describe_machine()
    if machine not in (result.setdefault("machine", machine), *result.get("further_machines", ())):
        result.setdefault("further_machines", []).append(machine)


def make_base(search: Search, name: str) -> dict[str, Any]:
    """Pretrain a model that is fine-tuned, unless it is there; return its settings and held-out loss."""
    settings, output = search.spec["bases"][name], BASES / name
    if not (output / "metrics.json").is_file():
        launch.run_recipe([*presets.words(settings), "--eval_strategy", "no"], output)
    return {"settings": settings, "eval_loss": launch.metrics_of(output)["eval_loss"]}


def main(argv: list[str] | None = None) -> None:
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", choices=SEARCHES)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time: %(default)s")
    parser.add_argument("--arms", nargs="+", help="default: all")
    options, arguments = parser.parse_known_args(argv)
    search, lock = Search(options.search), threading.Lock()
    result = json.loads(search.file.read_text()) if search.file.is_file() else {"runs": []}
    if not options.report:
        note_machine(result)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for base in search.spec.get("bases", {}):
            result.setdefault("bases", {})[base] = make_base(search, base)
        with (
            tempfile.TemporaryDirectory() as scratch,
            ThreadPoolExecutor(options.jobs) as pool,
            tqdm(unit="run") as progress,
        ):

            def run(arm: str, rates: Rates, seed: int) -> None:
                row = search.train(arm, rates, seed, arguments, scratch)
                with lock:
                    result["runs"].append(row)
                    write_json(search.file, result)
                    progress.update()
                    progress.set_description(f"{arm} {rates}: {row['eval_loss']}")

            jobs = [pool.submit(work_on, search, arm, result["runs"], run) for arm in options.arms or search.arms]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    print(search.report(result["runs"]))


if __name__ == "__main__":
    main()
