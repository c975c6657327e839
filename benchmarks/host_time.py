#!/usr/bin/env python
"""Measure what a step costs besides arithmetic: many small tensors on one core of a CPU, as LoRA and small models have.

    python benchmarks/host_time.py                          # 148, 500 and 2,000 tensors; keep the machine idle
    python benchmarks/host_time.py --count 148 --rounds 100

mars-adamw with compiled kernels and in plain PyTorch takes turns with torch's AdamW, foreach and fused, each on
parameters of its own. Results go to benchmarks/results/host_time_PROCESSOR.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interleave
import torch
from torch import nn
from tqdm.auto import tqdm

import mars_hf

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = [(16, 16), (16,), (8, 32), (32, 8)]
MAKE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "mars-adamw, kernels": lambda params: mars_hf.Mars(params, lr=1e-3, fused=True),
    "mars-adamw, plain PyTorch": lambda params: mars_hf.Mars(params, lr=1e-3, fused=False),
}
BASELINE = "AdamW foreach"


def parameters(count: int) -> list[nn.Parameter]:
    """Return small parameters with gradients."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for index in range(count):
        shape = SHAPES[index % len(SHAPES)]
        param = nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = torch.randn(shape, generator=generator)
        params.append(param)
    return params


def turn_of(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Return a turn: one step to warm up, and the seconds of the next."""

    def turn() -> float:
        optimizer.step()
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return turn


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds a step, microseconds a tensor and the ratio to the baseline within rounds."""
    turns = {name: turn_of(make(parameters(count))) for name, make in MAKE.items()}
    with tqdm(total=rounds * len(turns), desc=f"{count:,} tensors") as bar:
        seconds = interleave.take_turns(turns, rounds, progress=bar.update)
    rows = {}
    for name, values in seconds.items():
        median = interleave.median(values)
        rows[name] = {
            "ms": round(1e3 * median, 3),
            "us_a_tensor": round(1e6 * median / count, 1),
            "ratio": round(interleave.ratio(values, seconds[BASELINE]), 3),
        }
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, write the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, nargs="+", default=[148, 500, 2000], help="tensors (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="default: benchmarks/results")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    machine = interleave.describe_machine()
    tensors = {str(count): measure(count, args.rounds) for count in args.count}
    written = {"machine": machine, "rounds": args.rounds, "tensors": tensors}
    name = interleave.slug(interleave.device_name(torch.device("cpu")).removesuffix("Processor").replace("(R)", ""))
    path = args.output_dir / f"host_time_{name}.json"
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    cells = [["tensors", *MAKE]]
    for count, rows in tensors.items():
        cells.append([count, *[f"{row['ms']} ms, {row['ratio']}x" for row in rows.values()]])
    print(interleave.markdown(cells))
    print(f"in {path}")


if __name__ == "__main__":
    main()
