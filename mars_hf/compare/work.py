"""Run what a comparison lacks, several runs at a time, and tell how it goes."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from tqdm.auto import tqdm

from mars_hf.compare import runs
from mars_hf.compare.comparison import Comparison
from mars_hf.compare.runs import Run
from mars_hf.compare.search import FINALISTS

_POLL = 0.1  # seconds
_REPORT_EVERY = 20.0  # a picture takes longer than a short run


@dataclass
class Slots:
    """How runs share the machine.

    Args:
        jobs: runs at a time.
        gpus: CUDA_VISIBLE_DEVICES of each in turn.
        max_runs: runs to start at most; None: all.
    """

    jobs: int = 1
    gpus: Sequence[str] = ()
    max_runs: int | None = None

    @property
    def share_a_device(self) -> bool:
        """Return whether runs train on one device at the same time: then their speeds mean nothing."""
        return self.jobs > max(1, len(self.gpus))

    def environment(self, slot: int) -> dict[str, str]:
        """Return what the environment of a run in this slot has more."""
        more = {}
        if self.gpus:
            more["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        if self.jobs > 1:
            threads = max(1, (os.cpu_count() or 1) // self.jobs)
            more["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            with socket.socket() as free:  # launchers would all take the same port
                free.bind(("", 0))
                more["MASTER_PORT"] = str(free.getsockname()[1])
        return more


class Work:
    """Runs in flight.

    Args:
        comparison: what to run.
        slots: how many at a time.
        report: write the page; called after runs, and not more often than is of use.
    """

    def __init__(self, comparison: Comparison, slots: Slots, report: Callable[[], Any]) -> None:
        """Start nothing yet."""
        self.comparison, self.slots, self.report = comparison, slots, report
        self._in_flight: dict[int, tuple[Run, subprocess.Popen[bytes]]] = {}  # by slot
        self._started = 0
        self._reported = -math.inf

    def until_done(self) -> None:
        """Run what is missing, and write the page meanwhile.

        Raises:
            ValueError: a run failed; those in flight have ended.
        """
        errors: list[ValueError] = []
        done = self.comparison.count_finished()
        with ending_by_signals(), tqdm(unit="run", initial=done, dynamic_ncols=True) as progress:
            self._say_total(progress)
            if done and next(self.comparison.missing(), None) is not None:
                progress.write(self._estimate(self.comparison.first_run()))
            try:
                while True:
                    waited = not errors and self._start_runs(progress)
                    if not self._in_flight and not waited:
                        break
                    time.sleep(_POLL)
                    for run, code in self._ended():
                        try:
                            self._take(run, code, progress)
                        except ValueError as error:
                            errors.append(error)
            except BaseException:
                runs.stop([process for _, process in self._in_flight.values()])
                raise
        if errors:
            if self.comparison.metric is not None:
                self.report()
            raise errors[0]

    def _start_runs(self, progress: Any) -> bool:
        """Start runs in free slots; return whether one was waited for, which a killed comparison had left training."""
        for slot in set(range(self.slots.jobs)) - self._in_flight.keys():
            busy = {run.folder for run, _ in self._in_flight.values()}
            run = next((run for run in self.comparison.missing() if run.folder not in busy), None)
            if run is None:
                return False
            if run.is_orphaned():
                progress.write(f"{run.folder} still trains: waiting for it")
                while run.is_orphaned():
                    time.sleep(_POLL)
                self.comparison.refresh()
                return True
            if self.slots.max_runs is not None and self._started >= self.slots.max_runs:
                return False
            self._started += 1
            progress.set_description(f"{run.arm.name}, {_rate(run)}, seed {run.seed}")
            self._in_flight[slot] = run, run.start(self.slots.environment(slot))
        return False

    def _ended(self) -> Iterator[tuple[Run, int]]:
        for slot, (run, process) in list(self._in_flight.items()):
            code = process.poll()
            if code is not None:
                del self._in_flight[slot]
                yield run, code

    def _take(self, run: Run, code: int, progress: Any) -> None:
        """Look at an ended run, and tell its line."""
        run.end(code)
        is_first = self.comparison.metric is None
        self.comparison.refresh()
        progress.update()
        progress.write(_line(self.comparison, run))
        if self.comparison.metric is None:
            return
        if is_first:
            progress.write("\n".join([*self.comparison.about, self._estimate(run)]))
        self._say_total(progress)
        if time.monotonic() - self._reported > _REPORT_EVERY:
            self.report()
            self._reported = time.monotonic()

    # --- how long -----------------------------------------------------------------------------------------------------

    def _say_total(self, progress: Any) -> None:
        progress.total = max(count_runs(self.comparison)[0], progress.n)
        progress.refresh()

    def _estimate(self, first: Run) -> str:
        """Return runs and time of the comparison, from its first run."""
        seconds = first.result["seconds"]
        least, most = count_runs(self.comparison)
        shortest, longest = (_time(seconds * count / self.slots.jobs) for count in (least, most))
        count = str(least) if least == most else f"{least} to {most}"
        hours = shortest if least == most else f"{shortest} to {longest}"
        return (
            f"{count} runs of {seconds:.0f} s like the first: about {hours}. Ctrl-C stops, the same "
            "command goes on; --max_runs, fewer arms or --search_seeds 42 shorten it"
        )


def count_runs(comparison: Comparison) -> tuple[int, int]:
    """Return how many runs there will be, from so many to so many: a search may go on by some rates."""
    plan, rates = comparison.plan, len(comparison.plan.rates)
    final = len(plan.seeds)
    if not comparison.searches:
        return final * len(plan.arms), final * len(plan.arms)
    if plan.grid:
        each = len(plan.grid) * len(plan.search_seeds) + final
        return each * len(plan.arms), each * len(plan.arms)
    others = len(plan.search_seeds) - 1
    least, most = 3**rates + FINALISTS * others, 6**rates + (FINALISTS + 1) * others
    return len(plan.arms) * (least + final), len(plan.arms) * (most + final)


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Let SIGTERM end the runs as Ctrl-C does: schedulers and `timeout` send it."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(comparison: Comparison, run: Run) -> str:
    """Return what a finished run tells: arm, rate, seed, metric, time."""
    value = "diverged" + ("; trying half of its rate" if comparison.metric is None else "")
    if comparison.metric is not None:
        finished = run.finished(comparison.metric).value
        value = f"{comparison.metric.shown_name} {finished:.4f}" if math.isfinite(finished) else value
    return f"{run.arm.name}, {_rate(run)}, seed {run.seed}: {value} ({run.result['seconds']:.0f} s)"


def _rate(run: Run) -> str:
    return f"rate {run.rate:.3g}" if math.isfinite(run.rate) else "the script's own rate"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
