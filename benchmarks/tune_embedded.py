#!/usr/bin/env python
"""Tune each optimizer's learning rate on the default job, with one rate for all matrices, embeddings included.

    python benchmarks/tune_embedded.py                # all runs, two at a time on one thread each
    python benchmarks/tune_embedded.py --report       # table and picture from finished runs

Every run is `recipes/pretrain_gpt2.py` itself. Results go to benchmarks/results/tune_embedded.json; runs that are in it
are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import machine
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.compare.launch import pretrain  # noqa: E402  (needs the line above)
from pretraining.run.report import write_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tune_embedded.json"
PICTURE = ROOT / "docs" / "images" / "tune_embedded.png"

GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
BASELINE = "adamw (0.9, 0.95)"


class Contender(NamedTuple):
    """Arguments of an optimizer's runs, and their learning rates per seed."""

    argv: list[str]
    learning_rates: dict[int, tuple[float, ...]]

    @property
    def family(self) -> str:
        """Return the optimizer's name."""
        return self.argv[1]


def _settings(optimizer: str, **settings: float) -> list[str]:
    return ["--optimizer", optimizer, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


def _with_lr_1d(optimizer: str, rates: dict[float, dict[int, tuple[float, ...]]]) -> dict[str, Contender]:
    """Return contenders that orthogonalize, one per lr_1d. beta1 is the published one, beta2 is unused."""
    return {
        f"{optimizer.replace('_', '-')}, lr_1d {lr_1d:g}": Contender(
            _settings(optimizer, beta1=0.95, lr_1d=lr_1d), learning_rates
        )
        for lr_1d, learning_rates in rates.items()
    }


CONTENDERS = {
    "mars (0.95, 0.99)": Contender(_settings("mars_adamw", beta1=0.95, beta2=0.99), {1: GRID, 2: GRID}),
    "mars (0.9, 0.95)": Contender(_settings("mars_adamw", beta1=0.9, beta2=0.95), {1: GRID, 2: GRID}),
    "adamw (0.9, 0.95)": Contender(_settings("adamw", beta1=0.9, beta2=0.95), {1: GRID, 2: GRID}),
    "adamw (0.95, 0.99)": Contender(_settings("adamw", beta1=0.95, beta2=0.99), {1: GRID, 2: GRID}),
}
CONTENDERS |= _with_lr_1d(
    "mars_shampoo",
    {
        2e-3: {1: (2e-2,)},
        4e-3: {1: (1e-2, 2e-2, 4e-2, 8e-2)},
        8e-3: {1: (1e-2, 2e-2), 2: (2e-2,)},
        1.6e-2: {1: (1e-2, 2e-2, 4e-2), 2: (2e-2,)},
        3.2e-2: {1: (2e-2,)},
    },
)
CONTENDERS |= _with_lr_1d(
    "mars_m",
    {
        2e-3: {1: (8e-3,)},
        4e-3: {1: (4e-3, 8e-3, 1.6e-2, 3.2e-2)},
        8e-3: {1: (4e-3, 8e-3), 2: (8e-3,)},
        1.6e-2: {1: (4e-3, 8e-3, 1.6e-2), 2: (8e-3,)},
        3.2e-2: {1: (8e-3,)},
    },
)
CONTENDERS |= {
    "mars-lion (0.9)": Contender(_settings("mars_lion", beta1=0.9), {1: (5e-4, 1e-3, 2e-3, 4e-3), 2: (1e-3, 2e-3)}),
    "mars-lion (0.95)": Contender(_settings("mars_lion", beta1=0.95), {1: (1e-3, 2e-3)}),
}
# Evaluate once, at the end, on the whole held-out split.
COMMON = [
    "--max_eval_blocks",
    "100000",
    "--eval_strategy",
    "no",
    "--eval_on_start",
    "false",
    "--sample_tokens",
    "0",
    "--disable_tqdm",
    "true",
]


def argv(contender: str, lr: float, seed: int) -> list[str]:
    """Return a run's arguments: one rate for all matrices, embeddings included, or lr_1d for embeddings and vectors."""
    own = CONTENDERS[contender].argv
    embeddings = own[own.index("--lr_1d") + 1] if "--lr_1d" in own else str(lr)
    gamma = ["--gamma", "0.025"] if own[1].startswith("mars") else []  # the class's default; the config has another
    return [*own, *gamma, "--learning_rate", str(lr), "--lr_embeddings", embeddings, "--seed", str(seed)]


def run(contender: str, lr: float, seed: int, scratch: str) -> dict[str, Any]:
    """Train once and return the run's row."""
    output = Path(scratch) / f"{contender.replace(' ', '')}-{lr:g}-{seed}"
    metrics = pretrain([*argv(contender, lr, seed), "--cpu_threads", "1", *COMMON], output)
    keep = ("steps", "tokens", "train_loss", "eval_loss", "bits_per_byte", "tokens_per_second")
    return {
        "contender": contender,
        "learning_rate": lr,
        "seed": seed,
        **{key: metrics[key] for key in keep},
    }


def losses_of(rows: list[dict[str, Any]]) -> dict[str, dict[float, list[float]]]:
    """Return held-out losses by contender and learning rate, in the order of CONTENDERS and of the rates."""
    losses: dict[str, dict[float, list[float]]] = {}
    for name in CONTENDERS:
        own = sorted((row["learning_rate"], row["seed"], row["eval_loss"]) for row in rows if row["contender"] == name)
        for lr, _, loss in own:
            losses.setdefault(name, {}).setdefault(lr, []).append(loss)
    return losses


def best(by_lr: dict[float, list[float]]) -> tuple[float, float]:
    """Return the best learning rate and its mean loss over seeds; rates with fewer seeds do not count."""
    seeds = max(map(len, by_lr.values()))
    means = {lr: statistics.mean(losses) for lr, losses in by_lr.items() if len(losses) == seeds}
    lr = min(means, key=means.__getitem__)
    return lr, means[lr]


def report(rows: list[dict[str, Any]]) -> None:
    """Print one table per family of optimizers, and draw the picture."""
    losses = losses_of(rows)
    families: dict[str, list[str]] = {}
    for name in losses:
        families.setdefault(CONTENDERS[name].family, []).append(name)
    for names in families.values():
        print(table({name: losses[name] for name in names}) + "\n")
    for name, by_lr in losses.items():
        lr, loss = best(by_lr)
        print(f"{name}: best {loss:.4f} at lr {lr:g} (seeds: {len(by_lr[lr])})")
    draw({family: {name: losses[name] for name in names} for family, names in families.items()})


def table(losses: dict[str, dict[float, list[float]]]) -> str:
    """Return the losses of all seeds as a Markdown table, one column per learning rate."""
    rates = sorted({lr for by_lr in losses.values() for lr in by_lr})
    lines = ["| optimizer | " + " | ".join(f"lr {lr:g}" for lr in rates) + " |", "| --- |" + " ---: |" * len(rates)]
    for name, by_lr in losses.items():
        cells = [" / ".join(f"{loss:.3f}" for loss in by_lr.get(lr, [])) or "-" for lr in rates]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(families: dict[str, dict[str, dict[float, list[float]]]]) -> None:
    """Draw one panel per family: every run, the mean over seeds, and AdamW's best as a line."""
    baseline = families.get("adamw", {}).get(BASELINE)
    rows = math.ceil(len(families) / 2)
    figure, panels = plt.subplots(rows, 2, figsize=(9, 3.4 * rows), layout="constrained", sharey=True, squeeze=False)
    for axes, (family, losses) in zip(panels.flat, families.items(), strict=False):
        if baseline:
            axes.axhline(best(baseline)[1], color="0.25", linewidth=0.9, linestyle="--")
        for index, (name, by_lr) in enumerate(losses.items()):
            means = [statistics.mean(own) for own in by_lr.values()]
            axes.plot(list(by_lr), means, label=name, color=f"C{index}", marker=".")
            points = [(lr, loss) for lr, own in by_lr.items() for loss in own]
            axes.scatter(*zip(*points, strict=True), s=12, alpha=0.6, color=f"C{index}")
        rates = sorted({lr for by_lr in losses.values() for lr in by_lr})
        axes.set(xscale="log", title=family)
        axes.set_xticks(rates, [f"{lr:g}" for lr in rates])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in panels.flat[len(families) :]:
        axes.remove()
    figure.supxlabel("peak learning rate")
    figure.supylabel("held-out loss (nats per token); dashed: AdamW at its best")
    figure.savefig(PICTURE, dpi=120)


def wanted() -> list[tuple[str, float, int]]:
    """Return contender, learning rate and seed of every run."""
    return [
        (name, lr, seed)
        for name, contender in CONTENDERS.items()
        for seed, learning_rates in contender.learning_rates.items()
        for lr in learning_rates
    ]


def main() -> None:
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"machine": machine.describe(), "runs": []}
    done = {(row["contender"], row["learning_rate"], row["seed"]) for row in result["runs"]}
    missing = [] if arguments.report else [key for key in wanted() if key not in done]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [pool.submit(run, *key, scratch) for key in missing]
        try:
            for job in tqdm(as_completed(jobs), total=len(jobs), unit="run", disable=not jobs):
                result["runs"].append(job.result())
                write_text(RESULTS, json.dumps(result, indent=1) + "\n")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report(result["runs"])


if __name__ == "__main__":
    main()
