#!/usr/bin/env python
"""Does MARS help on the default job? Both optimizers over the same learning rates, seeds and budget.

    python benchmarks/tune_embedded.py                # all runs, two at a time on one thread each
    python benchmarks/tune_embedded.py --report       # table and picture from the runs there are

Every run is `recipes/pretrain_gpt2.py` itself. Results gather in benchmarks/results/tune_embedded.json; a run that is
in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import machine
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.launch import pretrain  # noqa: E402  (needs the line above)

RESULTS = ROOT / "benchmarks" / "results" / "tune_embedded.json"
PICTURE = ROOT / "docs" / "images" / "tune_embedded.png"

LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (1, 2)
CONTENDERS = {
    "mars (0.95, 0.99)": ["--optimizer", "mars_adamw", "--beta1", "0.95", "--beta2", "0.99"],
    "mars (0.9, 0.95)": ["--optimizer", "mars_adamw", "--beta1", "0.9", "--beta2", "0.95"],
    "adamw (0.9, 0.95)": ["--optimizer", "adamw", "--beta1", "0.9", "--beta2", "0.95"],
    "adamw (0.95, 0.99)": ["--optimizer", "adamw", "--beta1", "0.95", "--beta2", "0.99"],
}
# The whole held-out split, once, at the end.
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


def run(contender: str, lr: float, seed: int, scratch: str) -> dict[str, Any]:
    """One training run; returns its row."""
    output = Path(scratch) / f"{contender.replace(' ', '')}-{lr:g}-{seed}"
    argv = [*CONTENDERS[contender], "--learning_rate", str(lr), "--seed", str(seed), "--cpu_threads", "1", *COMMON]
    metrics = pretrain(argv, output)
    keep = ("steps", "tokens", "train_loss", "eval_loss", "bits_per_byte", "tokens_per_second")
    return {
        "contender": contender,
        "learning_rate": lr,
        "seed": seed,
        **{key: metrics[key] for key in keep},
    }


def best(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Per contender, its best learning rate and the mean loss over seeds there."""
    losses: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        losses[row["contender"]][row["learning_rate"]].append(row["eval_loss"])
    return {
        name: min(((lr, statistics.mean(values)) for lr, values in by_lr.items()), key=lambda pair: pair[1])
        for name, by_lr in losses.items()
    }


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table and draw the picture."""
    lines = ["| optimizer | " + " | ".join(f"lr {lr:g}" for lr in LEARNING_RATES) + " |"]
    lines.append("| --- |" + " ---: |" * len(LEARNING_RATES))
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in CONTENDERS:
        cells, means, shown = [], [], []
        for lr in LEARNING_RATES:
            losses = [row["eval_loss"] for row in rows if row["contender"] == name and row["learning_rate"] == lr]
            cells.append(" / ".join(f"{loss:.3f}" for loss in losses) or "-")
            if losses:
                shown.append(lr)
                means.append(statistics.mean(losses))
                axes.scatter([lr] * len(losses), losses, s=12, alpha=0.6, color=f"C{list(CONTENDERS).index(name)}")
        axes.plot(shown, means, label=name, color=f"C{list(CONTENDERS).index(name)}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    axes.set(
        xscale="log",
        xlabel="peak learning rate",
        ylabel="held-out loss (nats per token)",
        title="Default job, 500 steps: mean of two seeds",
    )
    axes.set_xticks(LEARNING_RATES, [f"{lr:g}" for lr in LEARNING_RATES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=120)
    print("\n".join(lines))
    for name, (lr, loss) in best(rows).items():
        print(f"{name}: best {loss:.4f} at lr {lr:g}")


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"machine": machine.describe(), "runs": []}
    done = {(row["contender"], row["learning_rate"], row["seed"]) for row in result["runs"]}
    wanted = [(name, lr, seed) for seed in SEEDS for lr in LEARNING_RATES for name in CONTENDERS]
    missing = [] if arguments.report else [key for key in wanted if key not in done]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [pool.submit(run, *key, scratch) for key in missing]
        try:
            for job in tqdm(as_completed(jobs), total=len(jobs), unit="run", disable=not jobs):
                result["runs"].append(job.result())
                RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report(result["runs"])


if __name__ == "__main__":
    main()
