#!/usr/bin/env python
"""Fine-tune what each optimizer pretrained with each rule, at tuned learning rates.

    python benchmarks/tune_finetuning.py                # everything, two runs at a time on one thread each
    python benchmarks/tune_finetuning.py --report       # the tables and the picture, from finished runs

The models are default jobs of pretrain_gpt2.py, each at tuned rates, made in runs/bases. recipes/finetune_lm.py trains
them on C++ headers. First, every rule searches its rate on the model of MARS-AdamW, for all weights and for LoRA: in
factors of two, from a first rate to the neighbours of the best one, until that has both. These are the rates that the
recipe starts from. Then three rules search theirs on the other models, from there, and run with further seeds at the
best rate. Each run is also evaluated on the text of pretraining, to see what is forgotten. Results go to
benchmarks/results/tune_finetuning.json; runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import machine
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from tqdm.auto import tqdm
from tune_tasks import best, wanted

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.compare import presets  # noqa: E402  (needs the line above)
from pretraining.compare.launch import pretrain  # noqa: E402
from pretraining.run.report import write_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tune_finetuning.json"
BASES = ROOT / "runs" / "bases"
PICTURE = ROOT / "docs" / "images" / "tune_finetuning.png"
SEARCH_SEED = 100
SEEDS = (1, 2)
DEFAULT = "mars_adamw"  # the base of the recipe
# Base -> settings of its pretraining. A later search gave AdamW and MARS-AdamW twice these rates.
_AVERAGES = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
PRETRAINING: dict[str, dict[str, Any]] = {
    DEFAULT: {"optimizer": DEFAULT, "gamma": 0.025, "learning_rate": 1e-3, "lr_embeddings": 3.2e-2, **_AVERAGES},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "lr_embeddings": 3.2e-2, **_AVERAGES},
    "muon": {
        "optimizer": "muon",
        "beta1": 0.95,
        "learning_rate": 1.6e-2,
        "lr_embeddings": 6.4e-2,
        "weight_decay": 0.1,
        "weight_decay_1d": 0.1,
    },
}
OTHERS = [base for base in PRETRAINING if base != DEFAULT]
COMPARED = ("adamw_torch", "mars_adamw", "mars_m")  # on every base
# Mode -> rule -> first rate and further settings; {same} and {eighth} are parts of the rate.
RULES = {
    "full": {
        "adamw_torch": (4e-3, None),
        "mars_adamw": (8e-3, "beta1=0.9,beta2=0.95"),
        "mars_m": (1.6e-2, "beta1=0.95,lr_1d={same:g}"),
        "mars_lion": (2e-3, None),
        "mars_shampoo": (3.2e-2, "beta1=0.95,lr_1d={eighth:g}"),
    },
    "lora": {
        "adamw_torch": (1.6e-2, None),
        "mars_adamw": (1.6e-2, "beta1=0.9,beta2=0.95"),
        "mars_m": (1.6e-2, "beta1=0.95"),
        "mars_lion": (4e-3, None),
        "mars_shampoo": (6.4e-2, "beta1=0.95"),
    },
}
# Evaluate once, at the end, so that runs are short. With bfloat16 autocast a step takes half the time.
COMMON = [
    *("--eval_strategy", "no", "--eval_on_start", "false", "--disable_tqdm", "true"),
    *("--use_cpu", "true", "--bf16", "true"),
]


class Arm(NamedTuple):
    """A base, what is trained of it, and by which rule."""

    base: str
    mode: str
    optim: str


ARMS = [
    *(Arm(DEFAULT, mode, optim) for mode, rules in RULES.items() for optim in rules),
    *(Arm(base, "full", optim) for base in OTHERS for optim in COMPARED),
]


def optim_args(arm: Arm, rate: float) -> str | None:
    """Return `--optim_args` of an arm at a learning rate."""
    text = RULES[arm.mode][arm.optim][1]
    return None if text is None else text.format(same=rate, eighth=rate / 8)


def train(arm: Arm, rate: float, seed: int, scratch: str) -> dict[str, Any]:
    """Train once, evaluate on the new text and on that of pretraining, and return the run's row."""
    import finetune_lm
    from pretraining.data import embedded

    given = optim_args(arm, rate)
    argv = [
        *("--model_name_or_path", str(BASES / arm.base), "--use_peft", str(arm.mode == "lora"), "--optim", arm.optim),
        *("--learning_rate", f"{rate:g}", "--seed", str(seed), "--output_dir", f"{scratch}/{'-'.join(arm)}-{seed}"),
        *(() if given is None else ("--optim_args", given)),
    ]
    row: dict[str, Any] = {**arm._asdict(), "optim_args": given, "learning_rate": rate, "seed": seed}
    try:
        trainer, found = finetune_lm.train([*COMMON, *argv])
    except ValueError as mistake:
        if "non-finite" not in str(mistake):
            raise
        return {**row, "eval_loss": None, "pretraining_loss": None}
    tokenizer: Any = trainer.processing_class
    model: Any = trainer.model
    documents = finetune_lm.datasets.Dataset.from_dict({"text": embedded.read_corpus().val})
    held_out = finetune_lm.blocks(documents, "text", tokenizer, model.config.n_positions).select(range(256))
    forgotten = trainer.evaluate(held_out, metric_key_prefix="pretraining")
    keep = ("steps", "train_loss", "eval_loss", "train_runtime_seconds")
    return row | {key: found[key] for key in keep} | {"pretraining_loss": forgotten["pretraining_loss"]}


def make_base(base: str) -> dict[str, Any]:
    """Pretrain a base, unless it is there; return its settings and held-out loss."""
    settings = PRETRAINING[base]
    finished = BASES / base / "metrics.json"
    if not finished.is_file():
        pretrain([*presets.words(settings), "--eval_strategy", "no", "--cpu_threads", "1"], BASES / base)
    metrics = json.loads(finished.read_text())
    return {"settings": settings, "eval_loss": metrics["eval_loss"]}


def losses_of(rows: list[dict[str, Any]], seed: int = SEARCH_SEED) -> dict[Arm, dict[float, float]]:
    """Return held-out losses of a seed, by arm and rate."""
    losses: dict[Arm, dict[float, float]] = {}
    for row in rows:
        if row["seed"] == seed:
            own = losses.setdefault(Arm(row["base"], row["mode"], row["optim"]), {})
            own[row["learning_rate"]] = math.nan if row["eval_loss"] is None else row["eval_loss"]
    return losses


def work_on(arm: Arm, rows: list[dict[str, Any]], run: Callable[[Arm, float, int], None]) -> None:
    """Search an arm's rate, then run the further seeds of those that are compared."""
    first = RULES[arm.mode][arm.optim][0]
    if arm.base != DEFAULT and (found := losses_of(rows).get(arm._replace(base=DEFAULT))):
        first = best(found)
    while (rate := wanted(first, losses_of(rows).get(arm, {}))) is not None:
        run(arm, rate, SEARCH_SEED)
    if arm.mode == "full" and arm.optim in COMPARED:
        rate = best(losses_of(rows)[arm])
        for seed in SEEDS:
            if rate not in losses_of(rows, seed).get(arm, {}):
                run(arm, rate, seed)


def search_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: the losses of the recipe's base at each rate, the best in bold."""
    lines = ["| weights | optim | held-out loss by learning rate |", "| --- | --- | --- |"]
    for arm, losses in losses_of(rows).items():
        if arm.base != DEFAULT:
            continue
        cells = [f"{rate:g}: {losses[rate]:.3f}" for rate in sorted(losses)]
        place = sorted(losses).index(best(losses))
        cells[place] = f"**{cells[place]}**"
        unfinished = "" if wanted(0, losses) is None else " (the search has not ended)"
        lines.append(f"| {arm.mode} | {arm.optim} | {', '.join(cells)}{unfinished} |")
    return "\n".join(lines)


def bases_table(rows: list[dict[str, Any]], bases: Mapping[str, Any]) -> str:
    """Return a Markdown table: mean held-out loss over the seeds after fine-tuning each base with each rule."""
    lines = [
        f"| pretrained with | loss before fine-tuning, old text | {' | '.join(COMPARED)} |",
        "| --- | ---: |" + " ---: |" * len(COMPARED),
    ]
    for base in (DEFAULT, *OTHERS):
        cells = []
        for optim in COMPARED:
            own = [row for row in rows if (row["base"], row["mode"], row["optim"]) == (base, "full", optim)]
            own = [row for row in own if row["seed"] in SEEDS]
            if not own:
                cells.append("")
                continue
            new, old = ([row[key] for row in own] for key in ("eval_loss", "pretraining_loss"))
            spread = f" ± {statistics.stdev(new):.3f}" if len(new) > 1 else ""
            cells.append(f"{statistics.mean(new):.3f}{spread} (old text {statistics.mean(old):.3f})")
        before = f"{bases[base]['eval_loss']:.3f}" if base in bases else ""
        lines.append(f"| {base} | {before} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the searches on the recipe's base: held-out loss over the learning rate, a panel for each mode."""
    found = losses_of(rows)
    figure, panels = plt.subplots(1, len(RULES), figsize=(9, 3.8), layout="constrained")
    for axes, (mode, title) in zip(panels, (("full", "all weights"), ("lora", "LoRA")), strict=True):
        for color, optim in enumerate(RULES[mode]):
            losses = found.get(Arm(DEFAULT, mode, optim), {})
            rates = sorted(losses)
            axes.plot(rates, [losses[rate] for rate in rates], label=optim, color=f"C{color}", marker=".")
            if losses:
                axes.plot(best(losses), losses[best(losses)], color=f"C{color}", marker="o", markersize=8)
        axes.set(xscale="log", title=title, xlabel="learning rate")
        drawn = [found.get(Arm(DEFAULT, mode, optim), {}) for optim in RULES[mode]]
        ticks = sorted({rate for losses in drawn for rate in losses})[::2]
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        finite = [loss for losses in drawn for loss in losses.values() if math.isfinite(loss)]
        if finite:
            axes.set_ylim(top=min(finite) + 1.2)  # what is worse leaves the panel
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.supylabel("held-out loss (nats per token)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RULES["full"]))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--bases", nargs="+", choices=(DEFAULT, *OTHERS), default=[DEFAULT, *OTHERS])
    arguments = parser.parse_args(argv)
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"bases": {}, "runs": []}
    if not arguments.report:
        machine.note(result)
        search(result, arguments.bases, arguments.jobs)
    print(search_table(result["runs"]))
    print()
    print(bases_table(result["runs"], result["bases"]))
    draw(result["runs"], PICTURE)


def search(result: dict[str, Any], bases: list[str], jobs: int) -> None:
    """Run what is missing of some bases, and write each run's row when it ends."""
    lock = threading.Lock()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(jobs) as threads,
        ProcessPoolExecutor(jobs, mp_context=context) as processes,
        tqdm(unit="run") as progress,
    ):

        def run(arm: Arm, rate: float, seed: int) -> None:
            row = processes.submit(train, arm, rate, seed, scratch).result()
            with lock:
                result["runs"].append(row)
                write_text(RESULTS, json.dumps(result, indent=1) + "\n")
                progress.update()
                progress.set_description(f"{' '.join(arm)} {rate:g}: {row['eval_loss']}")

        try:
            for base, found in zip(bases, threads.map(make_base, bases), strict=True):
                result["bases"][base] = found
            for is_default in (True, False):  # the others begin where the default's searches end
                arms = [arm for arm in ARMS if arm.base in bases and (arm.base == DEFAULT) == is_default]
                for job in as_completed([threads.submit(work_on, arm, result["runs"], run) for arm in arms]):
                    job.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
