#!/usr/bin/env python
"""Measure training with MARS, approximate and exact, and with AdamW: tokens per second, model FLOP utilization.

    python benchmarks/train_cost.py                            # GPT-2 small; keep the machine idle meanwhile
    python benchmarks/train_cost.py --size default --batch 16 --block 128     # the default job
    python benchmarks/train_cost.py --bf16 --batch 15          # on a GPU

The recipe's model and Trainer train on random tokens, with the recipe's settings except the options here and
max_grad_norm 1. AdamW is torch's fused one. All live in one process and take turns, block by block; ratios are taken
within a round. Results go to benchmarks/results/train_cost_DEVICE.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import interleave
import torch
from step_cost import RESULTS, SIZES  # first: it makes the recipe importable
from tqdm.auto import tqdm
from transformers import default_data_collator
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import mars_hf
from mars_hf.compare.files import write_json

from pretraining.run import arguments, model, optimizers  # isort: skip

ADAMW, MARS, EXACT = "AdamW fused", "Mars", "Mars exact"
CONTENDERS = {
    ADAMW: ["--optimizer", "adamw"],
    MARS: ["--optimizer", "mars_adamw"],
    EXACT: ["--optimizer", "mars_adamw", "--is_approx", "false"],
    "mars-m": ["--optimizer", "mars_m"],
}
# Dense bfloat16 matrix products, FLOP/s, from NVIDIA's data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12}


class Block(NamedTuple):
    """Median seconds of a block's steps."""

    step: float  # from the start of one step to the start of the next
    update: float  # the part for clipping and the optimizer's step


class Meter(TrainerCallback):
    """Mark the start of each step, the end of its backward pass and its end, without waiting for the device.

    Trainer gets this callback at construction, so its `on_step_begin` runs before the one in which MarsTrainer computes
    the stale gradient.
    """

    def __init__(self, clock: interleave.Clock) -> None:
        """Start without marks."""
        self._clock = clock
        self.begins: list[Any] = []
        self.gradients: list[Any] = []  # set by the trainer
        self.updates: list[Any] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Mark the start of a step, before the forward pass."""
        self.begins.append(self._clock.mark())

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Mark the end of the update."""
        self.updates.append(self._clock.mark())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the last step, in place of the start of another one."""
        if state.global_step == state.max_steps:
            self.begins.append(self._clock.mark())

    def mark_gradients(self) -> None:
        """Mark the end of the backward pass, before clipping."""
        self.gradients.append(self._clock.mark())

    def pop(self) -> Block:
        """Return the block since the last call."""
        steps = [self._clock.seconds(*pair) for pair in itertools.pairwise(self.begins)]
        updates = [self._clock.seconds(*pair) for pair in zip(self.gradients, self.updates, strict=True)]
        self.begins, self.gradients, self.updates = [], [], []
        return Block(statistics.median(steps), statistics.median(updates))


class MeteredTrainer(mars_hf.MarsTrainer):
    """MarsTrainer that marks when a step has its gradients; AdamW is measured with it, too."""

    requires_mars = False
    meter: Meter

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch; the last one ends with a mark."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients and not self.in_stale_pass:
            self.meter.mark_gradients()
        return loss


def make_trainer(name: str, options: argparse.Namespace, output: str) -> MeteredTrainer:
    """Return a trainer; each `train()` takes the same number of further steps."""
    sizes = vars(SIZES[options.size])
    device = torch.device(options.device)
    flags = {
        "config": f"gpt2-{options.size}" if options.size in ("medium", "large", "xl") else "gpt2-small",
        "n_layer": sizes["n_layer"],
        "n_head": sizes["n_head"],
        "n_embd": sizes["n_embd"],
        "vocab_size": sizes["vocab_size"],
        "block_size": options.block,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "max_steps": options.steps,
        "bf16": options.bf16,
        "tf32": device.type == "cuda",
        "max_grad_norm": 1.0,
        "use_cpu": device.type == "cpu",
        "dataloader_num_workers": 0,
        "output_dir": output,
        "eval_strategy": "no",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    argv = list(CONTENDERS[name])
    for flag, value in flags.items():
        argv += [f"--{flag}", str(value)]
    run = arguments.parse(argv)
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    if name == ADAMW:
        settings["fused"] = True
    meter = Meter(interleave.Clock(device))
    shape = options.batch * options.accumulation * options.steps, options.block
    tokens = torch.randint(0, sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    trainer = MeteredTrainer(
        model=model.build(run.model, 1, 0),
        args=run.training,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in tokens],
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=(make, settings),
        callbacks=[meter],
    )
    trainer.meter = meter
    trainer.remove_callback(PrinterCallback)
    return trainer


def flops_per_token(options: argparse.Namespace, gpt2: torch.nn.Module) -> float:
    """Return FLOPs of forward and backward: 6 per weight in a matrix product, plus attention (mask not halved).

    Source: appendix B of PaLM, arXiv 2204.02311. Position embeddings do not count; token embeddings are tied to the
    head.
    """
    size = SIZES[options.size]
    weights = sum(param.numel() for name, param in gpt2.named_parameters() if ".wpe." not in name)
    return 6 * weights + 12 * size.n_layer * size.n_embd * options.block


def peak_flops(options: argparse.Namespace) -> tuple[float, str]:
    """Return the peak FLOP/s for utilization, and their source."""
    if options.peak_tflops:
        return options.peak_tflops * 1e12, "given"
    device = torch.device(options.device)
    for key, peak in PEAKS.items():
        if device.type == "cuda" and options.bf16 and key in interleave.device_name(device):
            return peak, f"data sheet of {key}"
    order, dtype = 8192 if device.type == "cuda" else 2048, torch.bfloat16 if options.bf16 else torch.float32
    a, b = (torch.randn(order, order, device=device, dtype=dtype) for _ in range(2))
    times = [interleave.Clock(device).time(lambda: torch.mm(a, b)).seconds for _ in range(6)]
    return 2 * order**3 / min(times[1:]), "measured, a large product"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all trainers' blocks in turn, after one warm-up block each, and return the results."""
    with tempfile.TemporaryDirectory() as scratch:
        trainers = {name: make_trainer(name, options, scratch) for name in options.contenders}

        def block(trainer: MeteredTrainer) -> Block:
            trainer.train()
            return trainer.meter.pop()

        turns = {name: (lambda trainer=trainer: block(trainer)) for name, trainer in trainers.items()}
        with tqdm(total=len(turns) * (options.rounds + 1), unit="block") as progress:
            interleave.take_turns(turns, 1, progress=progress.update)
            blocks = interleave.take_turns(turns, options.rounds, progress=progress.update)
    gpt2: Any = next(iter(trainers.values())).model
    peak, source = peak_flops(options)
    tokens = options.batch * options.accumulation * options.block
    return {
        "parameters": gpt2.num_parameters(),
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_token(options, gpt2),
        "peak_flops": peak,
        "peak_source": source,
        "contenders": summarize(blocks, tokens, flops_per_token(options, gpt2) / peak),
        "exact_bound": exact_bound(blocks[MARS]) if MARS in blocks else None,
    }


def summarize(blocks: Mapping[str, list[Any]], tokens: int, seconds_per_token: float) -> dict[str, dict[str, Any]]:
    """Return each contender's medians, and its ratios to the others within rounds."""
    steps = {name: [block.step for block in taken] for name, taken in blocks.items()}
    rows = {}
    for name, taken in blocks.items():
        seconds = interleave.median(steps[name])
        rows[name] = {
            "step_ms": 1e3 * seconds,
            "update_ms": 1e3 * interleave.median([block.update for block in taken]),
            "update_share": interleave.median([block.update / block.step for block in taken]),
            "tokens_per_second": tokens / seconds,
            "mfu": tokens / seconds * seconds_per_token,
            "against": {other: interleave.ratio(steps[name], steps[other]) for other in steps},
            "against_adamw_quartiles": interleave.quartiles(steps[name], steps[ADAMW]),
        }
    return rows


def exact_bound(blocks: list[Any]) -> float:
    """Return the cost of a second pass over the batch, against approximate MARS: two gradients and one update."""
    return interleave.median([(2 * block.step - block.update) / block.step for block in blocks])


def table(result: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table."""
    header = [
        "optimizer",
        "tokens/s",
        "MFU",
        "step (ms)",
        "clipping and update (ms)",
        "of the step",
        "time / AdamW's (quartiles)",
        "time / Mars's",
    ]
    rows = []
    for name, row in result["contenders"].items():
        low, high = row["against_adamw_quartiles"]
        times = [f"{row['step_ms']:.1f}", f"{row['update_ms']:.2f}", f"{row['update_share']:.1%}"]
        ratios = [f"{row['against'][ADAMW]:.3f}x ({low:.3f}-{high:.3f})"]
        ratios.append(f"{row['against'][MARS]:.3f}x" if MARS in row["against"] else "")
        rows.append([name, f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}", *times, *ratios])
    return interleave.markdown([header, *rows])


def main(argv: list[str] | None = None) -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="%(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="AdamW takes part"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch: %(default)s")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step: %(default)s")
    parser.add_argument("--block", type=int, default=1024, help="tokens of a sequence: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each contender: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16 (autocast)")
    parser.add_argument("--peak_tflops", type=float, help="left out: known (H100, H200 in bfloat16) or measured")
    parser.add_argument("--threads", type=int, help="of PyTorch on CPU; left out: its own choice")
    parser.add_argument("--output", type=Path, help="JSON; left out: benchmarks/results/train_cost_DEVICE.json")
    options = parser.parse_args(argv)
    options.contenders = list(dict.fromkeys([ADAMW, *options.contenders]))
    name = interleave.device_name(torch.device(options.device))
    output = options.output or RESULTS / f"train_cost_{interleave.slug(name)}.json"
    if options.threads:
        torch.set_num_threads(options.threads)
    result = measure(options)
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "peak_tflops", "threads")}
    written = {"machine": interleave.describe_machine(), "device": name, "settings": settings, "result": result}
    write_json(output, written)
    print(f"\nGPT-2 {options.size}, {result['parameters'] / 1e6:.1f}M parameters, {result['tokens_per_step']:,} tokens")
    print(f"peak: {result['peak_flops'] / 1e12:.2f} TFLOP/s ({result['peak_source']})\n\n{table(result)}")
    if result["exact_bound"]:
        print(f"two passes and one update would take {result['exact_bound']:.2f} times {MARS}'s time")


if __name__ == "__main__":
    main()
