#!/usr/bin/env python
"""Tune the learning rates of the recipes for other data and tasks, at the size of their default runs.

    python benchmarks/tune_tasks.py                   # all recipes and rules, one run at a time
    python benchmarks/tune_tasks.py --recipes finetune_vit
    python benchmarks/tune_tasks.py --report          # the table, from finished runs

Each rule takes the same search over rates in factors of two: from a first rate to the neighbours of the best one, until
that has both. A recipe's rules share seed, data and steps. Results go to benchmarks/results/tune_tasks.json; runs that
are in it are not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT)]
from pretraining.run.report import write_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tune_tasks.json"
# Recipe -> rule -> its first rate and further settings; {twice} is twice the rate.
SEARCHES = {
    "finetune_vit": {
        "mars_adamw": (2e-3, "beta1=0.9,beta2=0.95"),
        "mars_m": (8e-3, "beta1=0.95"),
        "adamw_torch": (4e-3, None),
    },
    "sft_lora": {
        "mars_adamw": (4e-3, "beta1=0.9,beta2=0.95"),
        "mars_m": (4e-3, "beta1=0.95"),
        "adamw_torch": (4e-3, None),
    },
}
# Evaluate once, at the end, so that runs are short.
COMMON = ["--eval_strategy", "no", "--eval_on_start", "false", "--disable_tqdm", "true", "--use_cpu", "true"]


def wanted(first: float, losses: Mapping[float, float]) -> float | None:
    """Return the rate to try next, from the losses so far; None at the end of the search.

    Args:
        first: rate to begin with.
        losses: rate to held-out loss; NaN for a run that diverged.
    """
    if not losses:
        return first
    middle = best(losses)
    if not math.isfinite(losses[middle]):  # all diverged
        return min(losses) / 2
    return next((rate for rate in (middle * 2, middle / 2) if rate not in losses), None)


def best(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def train(recipe: str, optim: str, rate: float, optim_args: str | None, scratch: str) -> dict[str, Any]:
    """Train once and return the run's row."""
    given = None if optim_args is None else optim_args.format(twice=2 * rate)
    argv = [*COMMON, "--optim", optim, "--learning_rate", f"{rate:g}", "--output_dir", f"{scratch}/{optim}"]
    argv += [] if given is None else ["--optim_args", given]
    row: dict[str, Any] = {"recipe": recipe, "optim": optim, "optim_args": given, "learning_rate": rate}
    try:
        _, found = importlib.import_module(recipe).train(argv)
    except ValueError as mistake:
        if "non-finite" not in str(mistake):
            raise
        return {**row, "eval_loss": None}
    keep = ("seed", "steps", "train_loss", "eval_loss", "eval_accuracy", "train_runtime_seconds")
    return row | {key: found[key] for key in keep if key in found}


def losses_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[float, float]]:
    """Return held-out losses by recipe and rule."""
    losses: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        own = losses.setdefault((row["recipe"], row["optim"]), {})
        own[row["learning_rate"]] = math.nan if row["eval_loss"] is None else row["eval_loss"]
    return losses


def report(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: the held-out loss at each rate, the best in bold."""
    lines = ["| recipe | optim | held-out loss by learning rate |", "| --- | --- | --- |"]
    for (recipe, optim), losses in losses_of(rows).items():
        cells = [f"{rate:g}: {losses[rate]:.3f}" for rate in sorted(losses)]
        place = sorted(losses).index(best(losses))
        cells[place] = f"**{cells[place]}**"
        unfinished = "" if wanted(0, losses) is None else " (the search has not ended)"
        lines.append(f"| {recipe} | {optim} | {', '.join(cells)}{unfinished} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--recipes", nargs="+", choices=SEARCHES, default=list(SEARCHES), help="default: all")
    arguments = parser.parse_args(argv)
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"machine": machine.describe(), "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in [] if arguments.report else arguments.recipes:
            for optim, (first, optim_args) in SEARCHES[recipe].items():
                while (rate := wanted(first, losses_of(result["runs"]).get((recipe, optim), {}))) is not None:
                    result["runs"].append(train(recipe, optim, rate, optim_args, scratch))
                    write_text(RESULTS, json.dumps(result, indent=1) + "\n")
    print(report(result["runs"]))


if __name__ == "__main__":
    main()
