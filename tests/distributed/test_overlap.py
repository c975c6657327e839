"""Rounds of an exchange overlap: one communicates while others work, and the weights are those of one round."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launches, from_all_ranks, leave
from test_errors_of_one_rank import MANY, MESHES, make, params_of, step
from test_ranks_in_threads import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from mars_hf import Mars
from mars_hf.distributed import exchange
from mars_hf.distributed.tensors import local
from mars_hf.step import ranks

WORLD = 4


def weights_after(kind: str, rows: float | None) -> list[list[Tensor]]:
    def run(rank: int) -> list[Tensor]:
        mars = make(kind, MANY, normalize_rows=rows)
        for _ in range(3):
            step(mars)
        return [local(param.detach()).clone() for param in params_of(mars)]

    return run_ranks(WORLD, run)


@pytest.mark.parametrize("rows", [None, 0.9])
@pytest.mark.parametrize("kind", [*MESHES, "process group"])
def test_weights_are_those_of_one_round(kind, rows, monkeypatch):
    together = weights_after(kind, rows)
    monkeypatch.setattr(exchange, "ROUND_ELEMENTS", 1)
    apart = weights_after(kind, rows)
    for one, other in zip(together, apart, strict=True):
        assert all(map(torch.equal, one, other))


def plan_of(count: int, size: int) -> list[exchange.Round]:
    shape = torch.Size((size, size))
    matrices = [exchange.Matrix(index, shape, 1.0, lambda rank: None) for index in range(count)]
    groups = exchange.ProcessGroups(None, None, torch.device("cpu"), torch.float32)
    return exchange.Exchange(groups, matrices).rounds


def test_a_rank_has_several_rounds():
    """Four, of about as many elements, unless they become too small or too large."""
    assert [len(matrices) for matrices in plan_of(24, 2048)] == [6] * 4
    assert len(plan_of(24, 64)) == 1
    assert max(len(matrices) for matrices in plan_of(80, 2048)) == exchange.CHUNK_ELEMENTS // 2048**2


class Recorder:
    """Note when communication begins and is waited for, and when a rank works."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._numbers = itertools.count()

    def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
        number, work = next(self._numbers), dist.all_to_all_single(*args, **kwargs)
        self.events.append(f"begin {number}")
        events = self.events

        class Work:
            def wait(self) -> None:
                events.append(f"wait {number}")
                work.wait()

        return Work()

    def compute(self, *args: Any) -> Any:
        self.events.append("work")
        return compute_directions(*args)


compute_directions = ranks.compute_directions


def test_order_of_events(monkeypatch):
    """The next round is gathered while this one is worked on, and scattered while the next one is."""
    recorders: dict[int, Recorder] = {}
    monkeypatch.setattr(exchange, "ROUND_ELEMENTS", 1)

    def all_to_all(*args: Any, **kwargs: Any) -> Any:
        return recorders[dist.get_rank()].all_to_all(*args, **kwargs)

    monkeypatch.setattr(exchange, "dist", _Dist(all_to_all))
    monkeypatch.setattr(ranks, "compute_directions", lambda *args: recorders[dist.get_rank()].compute(*args))

    def run(rank: int) -> list[str]:
        recorders[rank] = Recorder()
        step(make("sharded", MANY))
        return recorders[rank].events

    events, *others = run_ranks(WORLD, run)
    assert all(other == events for other in others)
    # Even numbers from the second on gather, odd ones scatter: 0 and 1 gather the first two rounds, 2 scatters.
    count = events.count("work")
    assert count > 2
    assert events[:6] == ["begin 0", "begin 1", "wait 0", "work", "begin 2", "begin 3"]
    assert events[6:10] == ["wait 1", "work", "begin 4", "wait 2"]
    assert events[-1].startswith("wait")


class _Dist:
    """torch.distributed with another all-to-all."""

    def __init__(self, all_to_all: Any) -> None:
        self.all_to_all_single = all_to_all

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


# --- time, on gloo ----------------------------------------------------------------------------------------------------

TRAVEL, WORK, ROUNDS = 0.15, 0.3, 6  # seconds


class _Slow:
    """Communication that takes its time from when it begins."""

    def __init__(self, work: Any) -> None:
        self._work, self._ends = work, time.monotonic() + TRAVEL

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._ends - time.monotonic()))


def _time_a_step(spec: str, file: Path) -> None:
    exchange.ROUND_ELEMENTS = 1
    exchange.ROUNDS = ROUNDS
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(WORLD * ROUNDS)])
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    mars = Mars([{"params": list(model.parameters()), "role": "matrix"}], mars_type="mars-m", ns_dtype="float32")
    calls = itertools.count()

    def slow(*args: Any) -> Any:
        next(calls)
        time.sleep(WORK)
        return compute_directions(*args)

    exchange.dist = _Dist(lambda *args, **kwargs: _Slow(dist.all_to_all_single(*args, **kwargs)))  # type: ignore[assignment]
    ranks.compute_directions = slow  # type: ignore[assignment]
    model(torch.randn(4, 16)).sum().backward()
    dist.barrier()
    start = time.monotonic()
    mars.step()
    leave(file, from_all_ranks((time.monotonic() - start, next(calls))))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_step_takes_the_longer_of_exchange_and_work(tmp_path_factory):
    """And the first gathering and the last scattering, not their sum."""
    for seconds, calls in Launches(_time_a_step, tmp_path_factory).get("step", ["step"], WORLD, "step").notes:
        one_after_the_other = calls * (WORK + 2 * TRAVEL)
        overlapped = calls * WORK + 2 * TRAVEL
        assert calls == ROUNDS
        # Without overlap it cannot be shorter than the sum; busy cores make it longer.
        assert overlapped <= seconds < (overlapped + 3 * one_after_the_other) / 4
