#!/usr/bin/env python
"""Measure the step time and memory of exact MARS, beside approx MARS and torch's fused AdamW.

    python benchmarks/exact_cost.py                     # a few minutes; keep the machine idle meanwhile
    python benchmarks/exact_cost.py --sizes embedded --rounds 3

MarsTrainer trains GPT-2 on random tokens. For step times the contenders take turns in one process, block by block, so
that a disturbance affects all of them; ratios are taken within a round. Peak memory comes from one process per
contender. Results go to benchmarks/results/exact_cost.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import mars_hf
from mars_hf.training.guard import innermost

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.run import model as gpt2  # noqa: E402 (needs the line above)
from pretraining.run.arguments import ModelArguments  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "exact_cost.json"
ADAMW, APPROX, EXACT = CONTENDERS = ("adamw (fused)", "approx", "exact")


class Size(NamedTuple):
    """A model's sizes, and the sequences per step."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    batch: int


SIZES = {
    "tiny": Size(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=64, batch=2),
    "embedded": Size(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=4096, batch=16),
    "wider": Size(n_layer=6, n_head=4, n_embd=256, block_size=256, vocab_size=4096, batch=16),
    "gpt2-small": Size(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, batch=8),
}


class RandomTokens(Dataset):
    """Blocks of random tokens: the cost of a step does not depend on them."""

    def __init__(self, size: Size, blocks: int) -> None:
        """Draw the tokens."""
        self._ids = torch.randint(0, size.vocab_size, (blocks, size.block_size))

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one block."""
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Meter(TrainerCallback):
    """Time steps in two parts, and count the bytes of gradients and state.

    Trainer gets this callback at construction, so its `on_step_begin` runs before the one in which MarsTrainer computes
    the stale gradient. Fetching the batch is not part of the time.
    """

    def __init__(self) -> None:
        """Start without measurements."""
        self.gradients: list[float] = []  # seconds to the clipped gradients, stale ones included
        self.updates: list[float] = []  # seconds of the optimizer's step
        self.bytes: dict[str, int] = {}  # peak by key
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._start = _now()

    def on_pre_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Record the time of the gradients."""
        self.gradients.append(_now() - self._start)
        self._count(optimizer)  # exact MARS drops its stale gradients in the step
        self._start = _now()

    def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Record the time of the optimizer's step."""
        self.updates.append(_now() - self._start)
        self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        for key, count in count_bytes(innermost(optimizer)).items():
            self.bytes[key] = max(count, self.bytes.get(key, 0))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def count_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and every key of the state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    counted: dict[str, int] = defaultdict(int)
    for param in params:
        counted["param"] += param.nbytes
        counted["grad"] += param.grad.nbytes if param.grad is not None else 0
        for key, value in optimizer.state[param].items():
            counted[key] += value.nbytes
    return dict(counted)


def make_trainer(contender: str, size: Size, steps: int, output: str) -> tuple[mars_hf.MarsTrainer, Meter]:
    """Return a trainer and its meter; each `train()` takes the same number of further steps."""
    torch.manual_seed(0)
    arguments = ModelArguments(**{key: value for key, value in size._asdict().items() if key != "batch"})
    on_gpu = torch.cuda.is_available()
    training = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=size.batch,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        bf16=on_gpu,
    )
    optimizers: dict[str, tuple[Any, dict[str, Any]]] = {
        ADAMW: (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        APPROX: mars_hf.factory(training),
        EXACT: mars_hf.factory(training, is_approx=False),
    }
    meter = Meter()
    trainer = mars_hf.MarsTrainer(
        model=gpt2.build(arguments, size.vocab_size, 0),
        args=training,
        train_dataset=RandomTokens(size, steps * size.batch),
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=optimizers[contender],
        callbacks=[meter],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, meter


def take_turns(size: Size, rounds: int, steps: int, output: str, progress: Any) -> dict[str, Any]:
    """Run one block per contender and round, after a warm-up round, and return medians and bytes.

    Returns:
        For each contender `rounds`, each with the seconds of `gradients` and `update`, and `bytes` by key.
    """
    trainers = {name: make_trainer(name, size, steps, output) for name in CONTENDERS}
    measured: dict[str, Any] = {name: {"rounds": []} for name in CONTENDERS}
    for index in range(rounds + 1):
        for name, (trainer, meter) in trainers.items():
            meter.gradients.clear()
            meter.updates.clear()
            trainer.train()
            block = {"gradients": statistics.median(meter.gradients), "update": statistics.median(meter.updates)}
            if index:
                measured[name]["rounds"].append(block)
            progress.update()
    for name, (_, meter) in trainers.items():
        measured[name]["bytes"] = meter.bytes
    return measured


def peak_memory(contender: str, size: Size) -> dict[str, int]:
    """Return the peak bytes of three steps: resident memory beyond that before the model, and memory on the GPU."""
    before = _resident("VmRSS")
    with tempfile.TemporaryDirectory() as output:
        make_trainer(contender, size, 3, output)[0].train()
    peak = {"resident": _resident("VmHWM") - before}
    return peak | ({"cuda": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})


def _resident(key: str) -> int:
    """Return a value of /proc/self/status in bytes; getrusage's maximum would include the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def in_own_process(contender: str, size: Size) -> dict[str, int]:
    """Run `peak_memory` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_memory, contender, size).result()


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Return each contender's medians in milliseconds and ratios within rounds, and the bound of exact MARS.

    The bound is the cost of a second pass over the batch, against approx: twice approx's time for gradients and once
    its time for the update.
    """
    rounds = {name: measured[name]["rounds"] for name in measured}
    totals = {name: [block["gradients"] + block["update"] for block in blocks] for name, blocks in rounds.items()}

    def against(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(totals[name], totals[other], strict=True))

    contenders = {
        name: {
            "step_ms": 1e3 * statistics.median(totals[name]),
            "gradients_ms": 1e3 * statistics.median(block["gradients"] for block in rounds[name]),
            "update_ms": 1e3 * statistics.median(block["update"] for block in rounds[name]),
            "against_adamw": against(name, ADAMW),
            "against_approx": against(name, APPROX),
            **{key: value for key, value in measured[name].items() if key != "rounds"},
        }
        for name in measured
    }
    bound = statistics.median(
        (2 * block["gradients"] + block["update"]) / (block["gradients"] + block["update"]) for block in rounds[APPROX]
    )
    return {"contenders": contenders, "bound": bound}


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table; memory is in units of the parameters' bytes, peaks in MiB."""
    lines = [
        "| GPT-2 | optimizer | step (ms) | gradients (ms) | update (ms) | against AdamW | against approx "
        "| gradients and state, of the parameters | peak (MiB) |",
        "| --- | --- |" + " ---: |" * 7,
    ]
    for size, result in results.items():
        for name, row in result["contenders"].items():
            kept = sum(row["bytes"].values()) / row["bytes"]["param"] - 1
            peak = row["peak"].get("cuda", row["peak"]["resident"])
            lines.append(
                f"| {size}, {result['parameters'] / 1e6:.1f}M | {name} | {row['step_ms']:.1f} "
                f"| {row['gradients_ms']:.1f} | {row['update_ms']:.1f} | {row['against_adamw']:.2f}x "
                f"| {row['against_approx']:.2f}x | {kept:.2f}x | {peak / 2**20:.0f} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["embedded", "wider"], help="%(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each contender: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="%(default)s")
    arguments = parser.parse_args(argv)
    results = {}
    blocks = len(arguments.sizes) * len(CONTENDERS) * (arguments.rounds + 1)
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=blocks, unit="block") as progress:
        for name in arguments.sizes:
            size = SIZES[name]
            progress.set_description(name)
            measured = take_turns(size, arguments.rounds, arguments.steps, scratch, progress)
            for contender in CONTENDERS:
                measured[contender]["peak"] = in_own_process(contender, size)
            parameters = measured[ADAMW]["bytes"]["param"] // 4
            results[name] = {
                "size": size._asdict(),
                "parameters": parameters,
                "tokens_per_step": size.batch * size.block_size,
                **summarize(measured),
            }
    about = {**machine.describe(), "threads": torch.get_num_threads()}
    written = {"machine": about, "rounds": arguments.rounds, "steps": arguments.steps, "sizes": results}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(written, indent=1) + "\n")
    print(table(results))
    for name, result in results.items():
        ratio = result["contenders"][EXACT]["against_approx"]
        print(f"{name}: exact takes {ratio:.2f} times approx's time; two passes and one update: {result['bound']:.2f}")


if __name__ == "__main__":
    main()
