#!/usr/bin/env python
"""Measure training with MARS and with AdamW: tokens per second and model FLOP utilization of the recipe.

    python benchmarks/train_throughput.py                       # GPT-2 small; keep the machine idle meanwhile
    python benchmarks/train_throughput.py --size 28m --batch 2 --block 256 --rounds 3 --steps 4
    python benchmarks/train_throughput.py --bf16 --batch 15     # on a GPU
    python benchmarks/train_throughput.py --report              # table and picture from existing results

The recipe's model and Trainer train on random tokens, with the recipe's settings except the options here and
max_grad_norm 1. AdamW is torch's fused one. Both live in one process and take turns, block by block; ratios are taken
within a round. Results go to benchmarks/results/train_throughput_DEVICE.json, and a picture beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import interleave
import machine
import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from step_cost import RESULTS, SIZES  # first: it makes the recipe importable
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import default_data_collator
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import mars_hf

from pretraining.run import arguments, model, optimizers  # isort: skip

ADAMW, MARS = "AdamW fused", "Mars"
# Dense bfloat16 matrix products, FLOP/s, from NVIDIA's data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12}


class Block(NamedTuple):
    """Median seconds of a block's steps."""

    step: float  # from the start of one step to the start of the next
    update: float  # the part for clipping and the optimizer's step


class RandomTokens(Dataset):
    """Sequences of random tokens: the cost of a step does not depend on them."""

    def __init__(self, vocab_size: int, length: int, count: int) -> None:
        """Draw the tokens."""
        self._ids = torch.randint(0, vocab_size, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sequence."""
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Meter(TrainerCallback):
    """Mark the start of each step, the end of its backward pass and its end, without waiting for the device."""

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

    def gradients_are_there(self) -> None:
        """Mark the end of the backward pass, before clipping."""
        self.gradients.append(self._clock.mark())

    def pop(self) -> Block:
        """Return the block since the last call."""
        begins, gradients, updates = self.begins, self.gradients, self.updates
        self.begins, self.gradients, self.updates = [], [], []
        steps = [self._clock.seconds(*pair) for pair in itertools.pairwise(begins)]
        parts = [self._clock.seconds(*pair) for pair in zip(gradients, updates, strict=True)]
        return Block(statistics.median(steps), statistics.median(parts))


class MeteredTrainer(mars_hf.MarsTrainer):
    """MarsTrainer that marks when a step has its gradients."""

    meter: Meter

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch; the last one ends with a mark."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.meter.gradients_are_there()
        return loss


def make_trainer(name: str, options: argparse.Namespace, output: str) -> MeteredTrainer:
    """Return a trainer; each `train()` takes the same number of further steps."""
    sizes = vars(SIZES[options.size])
    device = torch.device(options.device)
    run = arguments.parse(
        [
            *("--config", f"gpt2-{options.size}" if options.size in ("medium", "large", "xl") else "gpt2-small"),
            *("--optimizer", "adamw" if name == ADAMW else "mars_adamw"),
            *(text for key in ("n_layer", "n_head", "n_embd", "vocab_size") for text in (f"--{key}", str(sizes[key]))),
            *("--block_size", str(options.block), "--per_device_train_batch_size", str(options.batch)),
            *("--gradient_accumulation_steps", str(options.accumulation), "--max_steps", str(options.steps)),
            *("--bf16", str(options.bf16), "--tf32", str(device.type == "cuda"), "--max_grad_norm", "1.0"),
            *("--use_cpu", str(device.type == "cpu"), "--dataloader_num_workers", "0", "--output_dir", output),
            *("--eval_strategy", "no", "--logging_strategy", "no", "--save_strategy", "no", "--disable_tqdm", "true"),
        ]
    )
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    if name == ADAMW:
        settings["fused"] = True
    meter = Meter(interleave.Clock(device))
    sequences = options.batch * options.accumulation * options.steps
    trainer = MeteredTrainer(
        model=model.build(run.model, 1, 0),
        args=run.training,
        train_dataset=RandomTokens(sizes["vocab_size"], options.block, sequences),
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
    name = interleave.device_name(device)
    for key, peak in PEAKS.items():
        if device.type == "cuda" and options.bf16 and key in name:
            return peak, f"data sheet of {key}"
    return measured_flops(device, torch.bfloat16 if options.bf16 else torch.float32), "measured, a large product"


def measured_flops(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """Return the best FLOP/s of several products of large square matrices."""
    order = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(order, order, device=device, dtype=dtype) for _ in range(2))
    clock = interleave.Clock(device)
    times = [clock.time(lambda: torch.mm(a, b)).seconds for _ in range(repeats + 1)]
    return 2 * order**3 / min(times[1:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both trainers' blocks in turn, after one warm-up block each, and return the results."""
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=2 * (options.rounds + 1), unit="block") as progress:
        trainers = {name: make_trainer(name, options, scratch) for name in (ADAMW, MARS)}

        def block(trainer: MeteredTrainer) -> Block:
            trainer.train()
            return trainer.meter.pop()

        turns = {name: (lambda trainer=trainer: block(trainer)) for name, trainer in trainers.items()}
        interleave.take_turns(turns, 1, progress=progress.update)
        blocks = interleave.take_turns(turns, options.rounds, progress=progress.update)
    steps = {name: [one and one.step for one in taken] for name, taken in blocks.items()}
    gpt2: Any = trainers[MARS].model
    per_token = flops_per_token(options, gpt2)
    tokens = options.batch * options.accumulation * options.block
    peak, source = peak_flops(options)
    contenders = {}
    for name, taken in blocks.items():
        seconds = interleave.median(steps[name])
        contenders[name] = {
            "step_ms": 1e3 * seconds,
            "update_ms": 1e3 * interleave.median([one and one.update for one in taken]),
            "update_share": interleave.median([one and one.update / one.step for one in taken]),
            "tokens_per_second": tokens / seconds,
            "mfu": tokens / seconds * per_token / peak,
            "time_against_adamw": interleave.ratio(steps[name], steps[ADAMW]),
            "time_against_adamw_quartiles": interleave.quartiles(steps[name], steps[ADAMW]),
            "throughput_against_adamw": interleave.ratio(steps[ADAMW], steps[name]),
        }
    return {
        "parameters": gpt2.num_parameters(),
        "tokens_per_step": tokens,
        "flops_per_token": per_token,
        "peak_flops": peak,
        "peak_source": source,
        "contenders": contenders,
    }


def report(written: Mapping[str, Any], picture: Path) -> None:
    """Print the table and draw the picture."""
    result = written["result"]
    print(f"\n{_title(written)}, {written['device']}")
    print(f"peak: {result['peak_flops'] / 1e12:.2f} TFLOP/s ({result['peak_source']})\n")
    header = [
        "optimizer",
        "tokens/s",
        "MFU",
        "step (ms)",
        "clipping and update (ms)",
        "of the step",
        "time / AdamW's (quartiles)",
    ]
    rows = [
        [
            name,
            f"{row['tokens_per_second']:,.0f}",
            f"{100 * row['mfu']:.1f}%",
            f"{row['step_ms']:.1f}",
            f"{row['update_ms']:.2f}",
            f"{100 * row['update_share']:.1f}%",
            f"{row['time_against_adamw']:.3f}x ({low:.3f}-{high:.3f})",
        ]
        for name, row in result["contenders"].items()
        for low, high in [row["time_against_adamw_quartiles"]]
    ]
    print(interleave.markdown(header, rows))
    draw(written, picture)


def _title(written: Mapping[str, Any]) -> str:
    settings, result = written["settings"], written["result"]
    precision = "bfloat16 autocast" if settings["bf16"] else "float32"
    return (
        f"GPT-2 {settings['size']}, {result['parameters'] / 1e6:.1f}M parameters, {result['tokens_per_step']:,} tokens "
        f"a step, {precision}"
    )


def draw(written: Mapping[str, Any], path: Path) -> None:
    """Draw one bar per contender: its step in two parts."""
    contenders = written["result"]["contenders"]
    figure, axes = plt.subplots(figsize=(7.5, 2.3), layout="constrained")
    longest = max(row["step_ms"] for row in contenders.values())
    for place, row in enumerate(contenders.values()):
        rest = row["step_ms"] - row["update_ms"]
        labels = (None, None) if place else ("forward, backward and the rest", "clipping and update")
        axes.barh(place, rest, height=0.6, color="#9ecae1", label=labels[0])
        axes.barh(place, row["update_ms"], left=rest, height=0.6, color="#08519c", label=labels[1])
        text = f"{row['tokens_per_second']:,.0f} tokens/s\nMFU {100 * row['mfu']:.1f}%"
        text += f", {row['throughput_against_adamw']:.3f}x" if place else ""
        axes.annotate(text, (row["step_ms"], place), textcoords="offset points", xytext=(5, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(contenders)), list(contenders))
    axes.set_ylim(len(contenders) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * longest)
    axes.set_xlabel("milliseconds a step")
    axes.set_title(f"{_title(written)}\n{written['device']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Measure, write, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="%(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch: %(default)s")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step: %(default)s")
    parser.add_argument("--block", type=int, default=1024, help="tokens of a sequence: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each contender: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16 (autocast)")
    parser.add_argument("--peak_tflops", type=float, help="left out: known (H100, H200 in bfloat16) or measured")
    parser.add_argument("--threads", type=int, help="of PyTorch on CPU; left out: its own choice")
    parser.add_argument("--output", type=Path, help="JSON; left out: benchmarks/results/train_throughput_DEVICE.json")
    parser.add_argument("--report", action="store_true", help="measure nothing: table and picture of what is there")
    options = parser.parse_args(argv)
    name = interleave.device_name(torch.device(options.device))
    output = options.output or RESULTS / f"train_throughput_{interleave.slug(name)}.json"
    if not options.report:
        if options.threads:
            torch.set_num_threads(options.threads)
        kept = ("size", "batch", "accumulation", "block", "rounds", "steps", "bf16")
        written = {
            "machine": {**machine.describe(), "threads": torch.get_num_threads()},
            "device": name,
            "settings": {key: getattr(options, key) for key in kept},
            "result": measure(options),
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(written, indent=1) + "\n")
    report(json.loads(output.read_text()), output.with_suffix(".png"))


if __name__ == "__main__":
    main()
