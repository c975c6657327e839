#!/usr/bin/env python
"""Tune the two learning rates of every arm of the preset `controls`: that of matrices and that of embeddings.

    python benchmarks/tune_controls.py                # all arms, two runs at a time on one thread each
    python benchmarks/tune_controls.py --report       # the table, from finished runs

Each arm takes the same search on the default job, with a seed that no comparison uses: from one pair of rates to the
best of its neighbours, with one rate or both halved or doubled, until a pair is better than its eight neighbours. (With
four, one rate at a time, the search stops on a ridge: rates that are best doubled together.) Runs go to
benchmarks/results/tune_controls.json; those there are not repeated, so start an interrupted search again to resume it.
The best rates go to recipes/presets/controls.yaml.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import machine
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.compare import presets  # noqa: E402  (needs the line above)
from pretraining.compare.launch import Diverged, pretrain  # noqa: E402
from pretraining.run.report import write_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tune_controls.json"
SEED = 100
# Rates are FIRST * 2**k: pairs of exponents for matrices and embeddings. START lies between the best pairs of the first
# two arms, whose search began at (3, 4) and went down in both.
FIRST = 1e-3
START = (1, 4)
# Where the best pair of a closely related arm was known, the search begins there; it ends by the same rule.
STARTS = {
    "mars_adamw exact": (0, 5),  # mars_adamw's
    **dict.fromkeys(("mars_m", "mars_m, gamma 0", "mars_m, gamma 1 - beta1"), (4, 6)),  # muon's
}
# Evaluate once, at the end, on the whole held-out split.
COMMON = [
    *("--max_eval_blocks", "100000", "--eval_strategy", "no", "--eval_on_start", "false", "--sample_tokens", "0"),
    *("--disable_tqdm", "true", "--cpu_threads", "1", "--seed", str(SEED)),
]

Pair = tuple[int, int]


def rate(exponent: int) -> float:
    """Return a learning rate of the grid."""
    return float(f"{FIRST * 2**exponent:.3g}")


def wanted(losses: Mapping[Pair, float], start: Pair = START) -> list[Pair]:
    """Return the pairs to try next, from the losses so far; none at the end of the search.

    Args:
        losses: exponents of the two rates to the held-out loss; NaN for a run that diverged.
        start: the first pair.
    """
    if not losses:
        return [start]
    if not math.isfinite(losses[best(losses)]):  # all diverged
        return [min((matrices - 1, embeddings - 1) for matrices, embeddings in losses)]
    return [pair for pair in neighbours(best(losses)) if pair not in losses]


def neighbours(pair: Pair) -> Iterator[Pair]:
    """Yield the pairs with one rate halved or doubled, then those with both."""
    for matrices, embeddings in ((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1), (1, -1), (-1, 1)):
        yield pair[0] + matrices, pair[1] + embeddings


def best(losses: Mapping[Pair, float]) -> Pair:
    """Return the pair with the lowest loss."""
    return min(losses, key=lambda pair: losses[pair] if math.isfinite(losses[pair]) else math.inf)


def search(arm: str, found: dict[Pair, float], train: Callable[[str, Pair], float], progress: Any) -> None:
    """Search an arm's rates, and add the losses to `found`."""
    while pairs := wanted(found, STARTS.get(arm, START)):
        pair = pairs[0]  # one at a time: a better pair has other neighbours
        found[pair] = train(arm, pair)
        progress.update()
        progress.set_description(f"{arm} {rate(pair[0]):g}/{rate(pair[1]):g}: {found[pair]:.4f}")


def losses_of(rows: list[dict[str, Any]]) -> dict[str, dict[Pair, float]]:
    """Return the losses of each arm by pair of exponents."""
    exponent = {rate(number): number for number in range(-4, 12)}
    losses: dict[str, dict[Pair, float]] = {}
    for row in rows:
        pair = exponent[row["learning_rate"]], exponent[row["lr_embeddings"]]
        losses.setdefault(row["arm"], {})[pair] = math.nan if row["eval_loss"] is None else row["eval_loss"]
    return losses


def best_rates() -> dict[str, dict[str, float]]:
    """Return the best rates found so far for each arm, as settings of the recipe."""
    found = losses_of(json.loads(RESULTS.read_text())["runs"])
    pairs = {arm: best(own) for arm, own in found.items()}
    return {arm: {"learning_rate": rate(pair[0]), "lr_embeddings": rate(pair[1])} for arm, pair in pairs.items()}


def report(losses: Mapping[str, Mapping[Pair, float]]) -> str:
    """Return a Markdown table with each arm's best rates, and whether its search has ended."""
    lines = ["| arm | matrices | embeddings | held-out loss | runs |", "| --- | ---: | ---: | ---: | ---: |"]
    for arm, own in losses.items():
        pair = best(own)
        count = str(len(own)) + (", not at its end" if wanted(own) else "")
        lines.append(f"| {arm} | {rate(pair[0]):g} | {rate(pair[1]):g} | {own[pair]:.3f} | {count} |")
    return "\n".join(lines)


def main() -> None:
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast: half the time where processors know it")
    arguments = parser.parse_args()
    preset = presets.load("controls")
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"runs": []}
    if not arguments.report:
        machine.note(result)
    losses = losses_of(result["runs"])
    arms = arguments.arms or list(preset.arms)
    lock = threading.Lock()

    def train(arm: str, pair: Pair) -> float:
        rates = {"learning_rate": rate(pair[0]), "lr_embeddings": rate(pair[1])}
        stated = {name: value for name, value in preset.arms[arm].items() if name not in rates}
        argv = presets.words({**stated, **rates, "bf16": arguments.bf16})
        try:
            metrics = pretrain([*argv, *COMMON], Path(scratch) / f"{arm}-{pair}".replace(" ", "_"))
        except Diverged:
            metrics = {"eval_loss": math.nan}
        keep = ("steps", "tokens", "train_loss", "eval_loss", "bits_per_byte", "tokens_per_second")
        row = {key: value if math.isfinite(value) else None for key, value in metrics.items() if key in keep}
        with lock:
            result["runs"].append(
                {"arm": arm, "settings": stated, **rates, "seed": SEED, "bf16": arguments.bf16, **row}
            )
            write_text(RESULTS, json.dumps(result, indent=1) + "\n")
        return float(metrics["eval_loss"])

    if not arguments.report:
        with (
            tempfile.TemporaryDirectory() as scratch,
            ThreadPoolExecutor(arguments.jobs) as pool,
            tqdm(unit="run") as progress,
        ):
            jobs = [pool.submit(search, arm, losses.setdefault(arm, {}), train, progress) for arm in arms]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    print(report(losses))


if __name__ == "__main__":
    main()
