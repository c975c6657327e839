#!/usr/bin/env python
"""Measure the memory of whole training steps, in bytes a parameter: its parts, what stays between steps, and the peak.

    python benchmarks/memory.py                          # 27.8M parameters; other load does not matter
    python benchmarks/memory.py --forms 'SGD|8bit'       # a regular expression of names

A float32 GPT-2 trains on one short sequence a step, in a plain loop and in Trainer (MarsTrainer for MARS, which clips
inside the step). Counted is what PyTorch's allocator hands out, from before the
model is built. `temporaries` are the rest of the peak, activations included: SGD has none of its own, so its row shows
those of the backward pass. `growth` is what 1,000 steps of a tiny model leave behind, after the first 50.
Results go to benchmarks/results/memory_DEVICE.json, and a picture beside them.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import interleave
import torch
from step_cost import RESULTS, SIZES, gpt2, plt, write_json
from transformers import Trainer, TrainingArguments

import mars_hf

# No optimizer has these colors.
COLORS = {"weights": "#01564f", "gradients": "#9bd8cf", "states": "#35978f", "temporaries": "#d9d9d9"}
BLOCK = 50  # steps of the tiny model in one trace: longer ones take gigabytes
BATCH = dict.fromkeys(("input_ids", "labels"), [0] * 8)  # short, so that activations are small
_mars = partial(mars_hf.create, lr=3e-3)


def _short(model: Any, **settings: Any) -> mars_hf.Mars:
    """Return mars-adamw with states in 8 bits on bfloat16 weights of 24 bits."""
    return _mars(model.to(torch.bfloat16), state_dtype="8bit", rounding="kahan", **settings)


FORMS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "mars-adamw": _mars,
    "mars-adamw, release_gradients": partial(_mars, release_gradients=True),
    "mars-adamw, fused=False": partial(_mars, fused=False),
    "mars-adamw, state_dtype=bfloat16": partial(_mars, state_dtype="bfloat16"),
    "mars-adamw, state_dtype=8bit": partial(_mars, state_dtype="8bit"),
    "bfloat16, kahan, state_dtype=8bit": _short,
    "bfloat16, kahan, state_dtype=8bit, release_gradients": partial(_short, release_gradients=True),
    "mars-adamw, no clip, v of gradients": partial(_mars, clip_threshold=None, second_moment="gradient"),
    "mars-adamw, exact": partial(_mars, is_approx=False),
    "mars-lion": partial(_mars, mars_type="mars-lion"),
    "mars-lion, state_dtype=8bit": partial(_mars, mars_type="mars-lion", state_dtype="8bit"),
    "mars-lion, no clip": partial(_mars, mars_type="mars-lion", clip_threshold=None),
    "mars-shampoo": partial(_mars, mars_type="mars-shampoo"),
    "mars-m": partial(_mars, mars_type="mars-m"),
    "mars-m, no clip, state_dtype=8bit": partial(_mars, mars_type="mars-m", clip_threshold=None, state_dtype="8bit"),
    "mars-m, no clip": partial(_mars, mars_type="mars-m", clip_threshold=None),
}


def plain_loop(model: Any, optimizer: Any, steps: int) -> None:
    """Train in a loop of one's own."""
    batch = {key: torch.tensor([ids], device=model.device) for key, ids in BATCH.items()}
    for _ in range(steps):
        if getattr(optimizer, "has_previous_params", False):  # exact MARS: the stale gradient
            with optimizer.previous_params():
                model(**batch).loss.backward()
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_trainer(model: Any, optimizer: Any, steps: int) -> object:
    """Train in MarsTrainer, or in Trainer without MARS."""
    trainer = (mars_hf.MarsTrainer if isinstance(optimizer, mars_hf.Mars) else Trainer)(
        model,
        TrainingArguments(
            tempfile.gettempdir(),  # where nothing is saved
            per_device_train_batch_size=1,
            max_steps=steps,
            max_grad_norm=0.0 if getattr(optimizer, "_release", None) else 1.0,
            use_cpu=model.device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
        ),
        train_dataset=[BATCH] * steps,
        optimizers=(optimizer, None),
    )
    trainer.train()
    return trainer


LOOPS = {"plain loop": plain_loop, "Trainer": in_trainer}


def measure(
    make: Callable[[Any], Any], train: Callable[..., object], size: str, device: torch.device
) -> dict[str, int]:
    """Return the bytes of a training: the parts of its peak, what it holds at its end, and the peak."""
    parts = dict.fromkeys(COLORS, 0)

    def count(optimizer: Any, *_: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for part, tensors in {
            "weights": params,
            "gradients": [param.grad for param in params],
            "states": [value for state in optimizer.state.values() for value in state.values()],
        }.items():
            parts[part] = sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor))

    def call() -> object:
        model = gpt2.build(SIZES[size], 1, 0).to(device)
        optimizer = make(model)
        optimizer.register_step_pre_hook(count)
        return model, optimizer, train(model, optimizer, 4)

    held, peak = interleave.trace_memory(call, device)
    return {**parts, "temporaries": peak - sum(parts.values()), "held": held, "peak": peak}


def growth(make: Callable[[Any], Any], train: Callable[..., object], device: torch.device, steps: int) -> int:
    """Return the bytes that blocks of steps leave behind, after the first one, while model and optimizer live on."""
    model = gpt2.build(SIZES["tiny"], 1, 0).to(device)
    optimizer = make(model)
    held = [
        interleave.trace_memory(lambda: train(model, optimizer, BLOCK) and None, device)[0]
        for _ in range(1 + steps // BLOCK)
    ]
    return sum(held[1:])


def report(written: Mapping[str, Any], picture: Path) -> None:
    """Print the table; draw a bar for each form in a plain loop, and one for Trainer where the peak differs."""
    forms, numel = written["forms"], written["parameters"]
    rows = [(f"{name}, {loop}", row) for name, loops in forms.items() for loop, row in loops.items()]
    header = ["optimizer, loop", *COLORS, "held", "peak", f"growth in {written['steps']:,} steps (bytes)"]
    cells = ([name, *(f"{row[key] / numel:.2f}" for key in header[1:-1]), f"{row['growth']:,}"] for name, row in rows)
    print(f"{written['device']}, {numel / 1e6:.1f}M parameters, bytes each\n\n{interleave.markdown([header, *cells])}")
    drawn = {
        name if loop == "plain loop" else f"{name}, {loop}": row
        for name, loops in forms.items()
        for loop, row in loops.items()
        if loop == "plain loop" or abs(row["peak"] - loops["plain loop"]["peak"]) > 0.05 * numel
    }
    figure, axes = plt.subplots(figsize=(6.4, 0.3 * len(drawn) + 1.2), layout="constrained")
    axes.tick_params(labelsize=8)
    for index, (part, color) in enumerate(COLORS.items()):
        bars = axes.barh(
            list(drawn),
            [row[part] / numel for row in drawn.values()],
            left=[sum(row[before] for before in list(COLORS)[:index]) / numel for row in drawn.values()],
            color=color,
            label=part,
        )
    axes.bar_label(bars, [f"{row['peak'] / numel:.1f}" for row in drawn.values()], padding=3, fontsize=8)
    figure.suptitle(
        f"Peak memory of a training step: GPT-2, {numel / 1e6:.1f}M parameters, {written['device']}", fontsize=10
    )
    axes.set(
        xlabel="bytes a parameter, lower is better",
        xlim=(0, 1.1 * max(row["peak"] for row in drawn.values()) / numel),
        ylim=(len(drawn) - 0.4, -0.6),
    )
    figure.legend(ncols=len(COLORS), loc="outside lower center", frameon=False, fontsize=8, columnspacing=1)
    figure.savefig(picture, dpi=160)


def main(argv: list[str] | None = None) -> None:
    """Measure, write, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="28m", help="%(default)s")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1000, help="in which nothing may grow: %(default)s")
    parser.add_argument("--forms", default="", help="regular expression of names; left out: all. SGD counts parameters")
    parser.add_argument("--resume", action="store_true", help="keep what the output has of this device")
    parser.add_argument("--output", type=Path, help="JSON; left out: benchmarks/results/memory_DEVICE.json")
    parser.add_argument("--report", action="store_true", help="measure nothing: table and picture of what is there")
    options = parser.parse_args(argv)
    name = interleave.device_name(options.device)
    output = options.output or RESULTS / f"memory_{interleave.slug(name)}.json"
    if options.report:
        report(json.loads(output.read_text()), output.with_suffix(".png"))
        return
    written: dict[str, Any] = {
        "machine": interleave.describe_machine(),
        "device": name,
        "size": options.size,
        "steps": options.steps,
        "forms": {},
    }
    if options.resume:
        written = interleave.resume(output, written)
    measure(FORMS["SGD"], plain_loop, "tiny", options.device)  # libraries take memory at their first call
    for form, make in FORMS.items():
        if form in written["forms"] or not re.search(options.forms, form):
            continue
        written["forms"][form] = {
            loop: {
                **measure(make, train, options.size, options.device),
                "growth": growth(make, train, options.device, options.steps),
            }
            for loop, train in LOOPS.items()
        }
        written["parameters"] = written["forms"]["SGD"]["plain loop"]["weights"] // 4
        write_json(output, written)
    report(written, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
