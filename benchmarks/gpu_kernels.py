#!/usr/bin/env python
"""Measure what a step on a GPU is made of: block sizes of the Triton kernels, Newton-Schulz, launches and their times.

    python benchmarks/gpu_kernels.py                                   # GPT-2 small
    python benchmarks/gpu_kernels.py --size small large --only newton_schulz
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --device cpu --size tiny --rounds 1    # does it run?

`blocks` times sums and update of mars-adamw by the elements of a tile and of a block, and the warps that share a block.
`newton_schulz` compares one batch for each shape with a loop over the matrices, and with a large matrix product;
`forms` its plain form with symmetric products, with steps on the Gram matrix, and with both, by shape; `chunks` a step
of mars-m and its peak by how many elements go through Newton-Schulz at once.
`launches` counts kernels and copies of a step, and sums their times by name. Results go to
benchmarks/results/gpu_kernels_DEVICE.json after each part.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import interleave
import torch
from step_cost import ADAMW, RESULTS, Workload, contenders, write_json
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mars_hf.arithmetic import newton_schulz
from mars_hf.arithmetic.directions import flops as flops_of
from mars_hf.arithmetic.formulas import Options
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.arithmetic.newton_schulz import orthogonalize
from mars_hf.distributed import exchange
from mars_hf.kernels import gpu, symmetric

TILES, BLOCKS, WARPS = (4096, 8192, 16384, 32768), (512, 1024, 2048, 4096), (4, 8)
COMPILERS = 12  # processes
# Parameters and gradients; moments and last gradients are float32.
DTYPES = (torch.float32, torch.bfloat16)
PROFILED = (ADAMW, "AdamW foreach", "Mars", "Mars fused=False", "mars-m", "Muon, AdamW for the rest")
STEPS = 5  # in a profile
ORDER = {"cpu": 256, "cuda": 8192}  # of the large matrix product
# Ratio from which on steps are taken on the Gram matrix, and the symmetric products.
FORMS = {
    "plain": (math.inf, None),
    "symmetric": (math.inf, symmetric),
    "Gram": (newton_schulz.GRAM_RATIO, None),
    "Gram, symmetric": (newton_schulz.GRAM_RATIO, symmetric),
}
CHUNKS = [2**power for power in range(22, 28)]  # elements
# CUDA's calls that put work on a stream.
CALLS = ("LaunchKernel", "MemcpyAsync", "MemsetAsync")

Sizes = tuple[int, int, int]


# --- sizes of tiles and blocks ----------------------------------------------------------------------------------------


def sizes() -> list[Sizes]:
    """Return all combinations of tile, block and warps in which a tile holds a block, today's first."""
    today = (gpu.TILE, gpu.BLOCK, gpu.LAUNCH_OPTIONS["num_warps"])
    others = [one for one in itertools.product(TILES, BLOCKS, WARPS) if one[1] <= one[0] and one != today]
    return [today, *others]


def set_sizes(tile: int, block: int, warps: int) -> None:
    """Let the next launches take these sizes."""
    gpu.TILE, gpu.BLOCK = tile, block
    gpu.LAUNCH_OPTIONS = {**gpu.LAUNCH_OPTIONS, "num_warps": warps}
    gpu._cached_table.cache_clear()  # tables of another tile


class Kernels:
    """The two passes of mars-adamw over the tensors of a workload."""

    def __init__(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Make states for these parameters."""
        self.params, self.gradients = [param.detach() for param in params], gradients
        moments = [[torch.rand_like(param, dtype=torch.float32) for param in params] for _ in range(3)]
        self.exp_avg, self.exp_avg_sq, self.last_grad = moments

    def sums(self) -> Tensor:
        """Take the sums over gradients and last gradients."""
        return gpu.sums(self.gradients, self.last_grad, k=0.475)

    def update(self) -> None:
        """Update everything."""
        options = Options(
            arithmetic="adamw",
            steps=[2.0] * len(self.params),
            lr=1e-6,
            beta1=0.95,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.1,
            k=0.475,
        )
        buffers = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "last_grad": self.last_grad}
        gpu.update(self.params, self.gradients, buffers, options)


def compile_sizes(device: str, one: Sizes) -> None:
    """Fill Triton's cache on disk with the kernels of some sizes, for all dtypes."""
    set_sizes(*one)
    for dtype in DTYPES:
        tensors = [torch.ones(5, dtype=dtype, device=device)]
        kernels = Kernels(tensors, tensors)
        kernels.sums()
        kernels.update()


def measure_blocks(work: Workload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds of both passes for all sizes, which take turns."""
    if device.type == "cuda":
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(COMPILERS, context) as pool:
            list(pool.map(compile_sizes, [str(device)] * len(sizes()), sizes()))
    today, clock = sizes()[0], interleave.Clock(device)
    rows = []
    for dtype in DTYPES:
        own = work.of_dtype(dtype)
        own.present(0)
        kernels = Kernels(own.params, [param.grad for param in own.params if param.grad is not None])
        turns = {one: _timed(kernels, one, clock) for one in sizes()}
        interleave.take_turns(turns, 1)
        for one, taken in interleave.take_turns(turns, rounds).items():
            seconds = zip(*filter(None, taken), strict=True)
            sums, update = (1e3 * interleave.median(list(passed)) for passed in seconds)
            names = dict(zip(("tile", "block", "warps"), one, strict=True))
            rows.append({"dtype": str(dtype), **names, "sums_ms": sums, "update_ms": update, "today": one == today})
    set_sizes(*today)
    return rows


def _timed(kernels: Kernels, one: Sizes, clock: interleave.Clock) -> Callable[[], tuple[float, float]]:
    def turn() -> tuple[float, float]:
        set_sizes(*one)
        return clock.time(kernels.sums).seconds, clock.time(kernels.update).seconds

    return turn


# --- Newton-Schulz ----------------------------------------------------------------------------------------------------


def matrices_of(work: Workload) -> list[Tensor]:
    """Return the matrices of the blocks."""
    return [param.detach() for name, param in work.named.items() if param.ndim == 2 and ".h." in name]


def measure_newton_schulz(work: Workload, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return FLOP/s of Newton-Schulz on the matrices of the blocks, in batches and one by one, and of a product."""
    matrices = matrices_of(work)
    large, clock = ORDER[device.type], interleave.Clock(device)
    a, b = (torch.randn(large, large, dtype=torch.bfloat16, device=device) for _ in range(2))
    turns: dict[str, Callable[[], object]] = {
        "batched": lambda: orthogonalize(matrices),
        "one by one": lambda: [orthogonalize([matrix]) for matrix in matrices],
        "plain loop": lambda: [plain_newton_schulz(matrix) for matrix in matrices],
        "matrix product": lambda: a @ b,
    }
    timed = {name: (lambda call=call: clock.time(call).seconds) for name, call in turns.items()}
    interleave.take_turns(timed, 2)
    taken = interleave.take_turns(timed, rounds)
    flops = dict.fromkeys(turns, sum(plain_flops(matrix.shape) for matrix in matrices))
    flops["matrix product"] = 2 * large**3
    rates = {name: [flops[name] / one if one else None for one in seconds] for name, seconds in taken.items()}
    return {
        name: {
            "ms": 1e3 * interleave.median(taken[name]),
            "tflops": interleave.median(rates[name]) / 1e12,
            "of_product": interleave.ratio(rates[name], rates["matrix product"]),
        }
        for name in turns
    }


def plain_flops(shape: torch.Size) -> float:
    """Return the FLOPs of five steps on a matrix in the plain form, which CPUs take in bfloat16."""
    return flops_of(shape, MatrixLayout(), [newton_schulz.QUINTIC] * 5, torch.bfloat16, torch.device("cpu"))


def plain_newton_schulz(matrix: Tensor) -> Tensor:
    """Orthogonalize one matrix as most implementations do, a product at a time."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def measure_forms(work: Workload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of each form for all matrices of a shape, and against the plain form; they take turns."""
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices_of(work):
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix.bfloat16())
    clock = interleave.Clock(device)
    rows = []
    for shape, matrices in by_shape.items():
        turns = {name: _timed_form(name, matrices, clock) for name in FORMS}
        interleave.take_turns(turns, 2)
        taken = interleave.take_turns(turns, rounds)
        for name, seconds in taken.items():
            ratio = interleave.ratio(seconds, taken["plain"])
            ms = 1e3 * interleave.median(seconds)
            rows.append({"shape": shape, "count": len(matrices), "form": name, "ms": ms, "of_plain": ratio})
    return rows


def _timed_form(name: str, matrices: list[Tensor], clock: interleave.Clock) -> Callable[[], float]:
    ratio, products = FORMS[name]

    def turn() -> float:
        before, newton_schulz.GRAM_RATIO = newton_schulz.GRAM_RATIO, ratio  # type: ignore[assignment]
        try:
            return clock.time(lambda: orthogonalize(matrices, products=products)).seconds
        finally:
            newton_schulz.GRAM_RATIO = before

    return turn


def measure_chunks(work: Workload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds and peak of a step of mars-m, in bytes a parameter, by the elements of a chunk."""
    (optimizer,) = contenders()["mars-m"].make(work.named)
    numel = sum(param.numel() for param in work.named.values())
    clock = interleave.Clock(device)
    before = exchange.CHUNK_ELEMENTS, exchange.CHUNK_SHARE

    def timed(elements: int) -> Callable[[], float]:
        def turn() -> float:
            exchange.CHUNK_ELEMENTS = elements
            work.present(0)
            return clock.time(optimizer.step).seconds

        return turn

    exchange.CHUNK_SHARE = 0.0
    try:
        turns = {elements: timed(elements) for elements in CHUNKS}
        interleave.take_turns(turns, 2)
        taken = interleave.take_turns(turns, rounds)
        rows = []
        for elements, seconds in taken.items():
            exchange.CHUNK_ELEMENTS = elements
            work.present(0)
            _, peak = interleave.trace_memory(optimizer.step, device)
            rows.append({"elements": elements, "ms": 1e3 * interleave.median(seconds), "bytes": peak / numel})
    finally:
        exchange.CHUNK_ELEMENTS, exchange.CHUNK_SHARE = before
    return rows


# --- launches ---------------------------------------------------------------------------------------------------------


def measure_launches(work: Workload, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return what each contender's step launches, and the time on the device by kernel; `rounds` is not used."""
    rows = {}
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    for name in PROFILED:
        contender = contenders()[name]
        optimizers = contender.make(work.named)
        for warm in range(3):
            work.present(warm)
            for optimizer in optimizers:
                optimizer.step()
        with profile(activities=activities) as profiled:
            for turn in range(STEPS):
                work.present(turn)
                for optimizer in optimizers:
                    optimizer.step()
        events = profiled.key_averages()
        kernels = {event.key: event for event in events if event.device_type.name == "CUDA"}
        rows[name] = {
            "launches": sum(event.count for event in events if any(call in event.key for call in CALLS)) / STEPS,
            "kernels": {
                key[:80]: {"calls": event.count / STEPS, "ms": event.self_device_time_total / 1e3 / STEPS}
                for key, event in sorted(kernels.items(), key=lambda item: -item[1].self_device_time_total)[:8]
            },
        }
    return rows


PARTS: dict[str, Callable[[Workload, torch.device, int], Any]] = {
    "blocks": measure_blocks,
    "newton_schulz": measure_newton_schulz,
    "forms": measure_forms,
    "chunks": measure_chunks,
    "launches": measure_launches,
}


# --- report -----------------------------------------------------------------------------------------------------------


def report(written: Mapping[str, Any]) -> None:
    """Print a table for each part of each size."""
    for size, measured in written["sizes"].items():
        for part, result in measured.items():
            print(f"\n{part}, GPT-2 {size}, {written['device']}\n")
            print(interleave.markdown(list(_rows(part, result))))


def _rows(part: str, result: Any) -> Iterator[list[str]]:
    if part == "blocks":
        yield ["dtype", "tile", "block", "warps", "sums (ms)", "update (ms)"]
        for row in sorted(result, key=lambda row: (row["dtype"], row["sums_ms"] + row["update_ms"])):
            mark = " (today's)" if row["today"] else ""
            whole = (row["dtype"], row["tile"], row["block"], f"{row['warps']}{mark}")
            yield [*map(str, whole), f"{row['sums_ms']:.3f}", f"{row['update_ms']:.3f}"]
    elif part == "newton_schulz":
        yield ["form", "ms", "TFLOP/s", "of a large product"]
        for name, row in result.items():
            yield [name, f"{row['ms']:.3f}", f"{row['tflops']:.1f}", f"{row['of_product']:.0%}"]
    elif part == "forms":
        yield ["shape", "matrices", "form", "ms", "of the plain form"]
        for row in result:
            shape = " x ".join(map(str, row["shape"]))
            yield [shape, str(row["count"]), row["form"], f"{row['ms']:.3f}", f"{row['of_plain']:.2f}"]
    elif part == "chunks":
        yield ["elements at once", "step (ms)", "temporaries, bytes a parameter"]
        for row in result:
            yield [f"2**{math.log2(row['elements']):.0f}", f"{row['ms']:.3f}", f"{row['bytes']:.2f}"]
    else:
        yield ["optimizer", "launches a step", "kernel", "calls", "ms"]
        for name, row in result.items():
            yield [name, f"{row['launches']:.0f}", "", "", ""]
            for kernel, of_kernel in row["kernels"].items():
                yield ["", "", kernel, f"{of_kernel['calls']:g}", f"{of_kernel['ms']:.3f}"]


def main(argv: list[str] | None = None) -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["small"], help="of step_cost.py: %(default)s")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="left out: all parts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender: %(default)s")
    parser.add_argument("--resume", action="store_true", help="keep what the output has of this device")
    parser.add_argument("--output", type=Path, help="JSON; left out: benchmarks/results/gpu_kernels_DEVICE.json")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("Triton needs a GPU, or TRITON_INTERPRET=1 for a trial without times")
    name = interleave.device_name(device)
    output = options.output or RESULTS / f"gpu_kernels_{interleave.slug(name)}.json"
    written: dict[str, Any] = {"machine": interleave.describe_machine(), "device": name, "sizes": {}}
    if options.resume:
        written = interleave.resume(output, written)
    for size in options.size:
        work = Workload(size, device)
        measured = written["sizes"].setdefault(size, {})
        for part in options.only:
            if part not in measured:
                measured[part] = PARTS[part](work, device, options.rounds)
                write_json(output, written)
    report(written)


if __name__ == "__main__":
    main()
