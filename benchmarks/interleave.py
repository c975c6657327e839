"""Time contenders in turns in one process, so that a disturbance affects all of them; trace a call's memory."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

try:
    from mars_hf.compare import page
    from mars_hf.compare.page import markdown
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}; benchmarks need pip install -c constraints.txt -e '.[recipes]'")

__all__ = [
    "Clock",
    "Timing",
    "describe_machine",
    "device_name",
    "markdown",
    "median",
    "quartiles",
    "ratio",
    "resume",
    "slug",
    "trace_memory",
]

T = TypeVar("T")
# Cycles that keep a GPU busy before a measured call: about 20 ms, so that the launches queue up behind them.
HEAD_START = 40_000_000


class Timing(NamedTuple):
    """Seconds of a call: on the device, and until the call returned."""

    seconds: float
    host: float


class Clock:
    """Mark points in time: on the CPU, or on a GPU's stream without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        """Start a clock for `device`."""
        self._device = device

    def mark(self) -> Any:
        """Return a mark for now."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for the later one."""
        if self._device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def time(self, call: Callable[[], object]) -> Timing:
        """Time a call.

        Launches run ahead of a GPU, as in training. The measured time is therefore the GPU's own, unless the call waits
        for the GPU or takes longer to launch than to run.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START)
        began = time.perf_counter()
        start = self.mark()
        call()
        end = self.mark()
        host = time.perf_counter() - began
        return Timing(self.seconds(start, end), host)


def take_turns(
    contenders: Mapping[str, Callable[[], T]],
    rounds: int,
    every: Mapping[str, int] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, list[T | None]]:
    """Give every contender one turn per round, starting each round with the next one.

    Args:
        contenders: functions by name; each takes a turn and returns its measurement.
        rounds: number of rounds.
        every: contenders that take part in every n-th round only, from the first on.
        progress: called after every turn.

    Returns:
        One entry per round for each contender, None for a round without its turn.
    """
    names = list(contenders)
    measured: dict[str, list[T | None]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            takes_part = index % (every or {}).get(name, 1) == 0
            measured[name].append(contenders[name]() if takes_part else None)
            progress()
    return measured


def median(values: Sequence[float | None]) -> float:
    """Return the median over the rounds with a turn."""
    return statistics.median(value for value in values if value is not None)


def ratios(values: Sequence[float | None], others: Sequence[float | None]) -> list[float]:
    """Return one ratio per round in which both had a turn."""
    pairs = zip(values, others, strict=True)
    return [one / other for one, other in pairs if one is not None and other is not None]


def ratio(values: Sequence[float | None], others: Sequence[float | None]) -> float:
    """Return the median of the ratios within rounds."""
    return statistics.median(ratios(values, others))


def quartiles(values: Sequence[float | None], others: Sequence[float | None]) -> tuple[float, float]:
    """Return the first and third quartile of the ratios within rounds: they show how quiet the machine was."""
    found = ratios(values, others)
    low, _, high = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return low, high


def describe_machine() -> dict[str, str | int]:
    """Return processor, cores, accelerator, versions and the threads of PyTorch."""
    return {**page.describe_machine(), "threads": torch.get_num_threads()}


def device_name(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    return str(page.describe_machine()["accelerator" if device.type == "cuda" else "cpu"])


def resume(output: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Return the results in a file if they are of the same device and versions, so that a run can go on; else `new`."""
    if not output.exists():
        return new
    earlier = json.loads(output.read_text())
    return earlier if earlier["machine"] == new["machine"] else new


def slug(name: str) -> str:
    """Return a name that suits a file name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def trace_memory(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the bytes of PyTorch's allocator after a call, while its result is held, and at their peak during it.

    Both are beyond those before the call. On CPUs a call is not credited with memory of before it that it frees.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _kept = call(), gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _kept = call(), gc.collect()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    held = list(itertools.accumulate(sizes, initial=0))
    return held[-1], max(held)
