"""Contenders that take turns in one process, so that a disturbance meets all of them, and the clock for it."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import machine
import torch

T = TypeVar("T")
# Cycles for which a GPU is kept busy before a measured call: some 20 ms, so that the launches are queued behind them.
HEAD_START = 40_000_000


class Timing(NamedTuple):
    """Seconds of a call: on the device, and until the call came back."""

    seconds: float
    host: float


class Clock:
    """Marks in time: of the CPU, or on a GPU's stream, where they do not make anybody wait."""

    def __init__(self, device: torch.device) -> None:
        """For what runs on `device`."""
        self._device = device

    def mark(self) -> Any:
        """Now."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits for the later one."""
        if self._device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def time(self, call: Callable[[], object]) -> Timing:
        """Time a call.

        On a GPU launches run ahead of it, as they do in training, so what is measured is its own time, unless the call
        waits for it or takes longer to launch than to run.
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
    """One turn of every contender a round, beginning with another one each time.

    Args:
        contenders: by name, what takes a turn and returns what it measured.
        rounds: how many.
        every: contenders that take part in every n-th round only, from the first on.
        progress: called after every turn.

    Returns:
        Per contender one entry a round, None where it had no turn.
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
    """The median of the rounds that there are."""
    return statistics.median(value for value in values if value is not None)


def ratios(values: Sequence[float | None], others: Sequence[float | None]) -> list[float]:
    """One ratio for every round in which both had a turn."""
    pairs = zip(values, others, strict=True)
    return [one / other for one, other in pairs if one is not None and other is not None]


def ratio(values: Sequence[float | None], others: Sequence[float | None]) -> float:
    """The median of the ratios within rounds."""
    return statistics.median(ratios(values, others))


def quartiles(values: Sequence[float | None], others: Sequence[float | None]) -> tuple[float, float]:
    """The first and the third quartile of the ratios within rounds: how quiet the machine was."""
    found = ratios(values, others)
    low, _, high = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return low, high


def device_name(device: torch.device) -> str:
    """The processor or the GPU, as `machine` has it."""
    return str(machine.describe()["accelerator" if device.type == "cuda" else "cpu"])


def slug(name: str) -> str:
    """A name as a part of a file's."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its numbers (all but the first column) to the right, padded to be read as it is."""
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width if not index else "-" * (width - 1) + ":") for index, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])
