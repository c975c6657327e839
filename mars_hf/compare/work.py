"""Run what a comparison lacks, several runs at a time, and tell how it goes."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from mars_hf.compare import page, runs
from mars_hf.compare.comparison import Comparison
from mars_hf.compare.plan import Plan
from mars_hf.compare.runs import Run

_POLL = 0.1  # seconds
_REPORT_EVERY = 20.0  # a picture takes longer than a short run


@dataclass
class Work:
    """Runs in flight."""

    comparison: Comparison
    jobs: int = 1  # runs at a time
    gpus: Sequence[str] = ()  # CUDA_VISIBLE_DEVICES of each in turn
    max_runs: int | None = None  # to start at most
    _in_flight: dict[int, tuple[Run, subprocess.Popen[bytes]]] = field(default_factory=dict, init=False)  # by slot
    _started: int = field(default=0, init=False)
    _reported: float = field(default=-math.inf, init=False)
    _bar: Any = field(default=None, init=False)  # of progress
    _failure: ValueError | None = field(default=None, init=False)  # the first

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
            # Launches would all take one port. torchrun and accelerate launch find a free one; mpirun needs a number.
            more["PET_STANDALONE"] = os.environ.get("PET_STANDALONE", "1")
            with socket.socket() as free:
                free.bind(("", 0))
                more["MASTER_PORT"] = str(free.getsockname()[1])
        return more

    def report(self) -> str:
        """Write the page and return it."""
        self._reported = time.monotonic()
        return page.write(self.comparison, has_speeds=not self.share_a_device)

    def until_done(self) -> None:
        """Run what is missing, and write the page meanwhile.

        Raises:
            ValueError: a run failed; those in flight have ended.
        """
        done, (least, _) = self.comparison.count_finished(), count_runs(self.comparison.plan)
        with tqdm(unit="run", initial=done, total=max(done, least), dynamic_ncols=True) as bar:
            self._bar = bar
            if done and next(self.comparison.missing(), None) is not None:
                bar.write(self._estimate())
            try:
                while True:
                    if self._failure is None:
                        self._start_runs()
                    if not self._in_flight:
                        break
                    time.sleep(_POLL)
                    for slot, (run, process) in list(self._in_flight.items()):
                        if process.poll() is not None:
                            del self._in_flight[slot]
                            self._take(run, process.returncode)
            except BaseException:
                runs.stop([process for _, process in self._in_flight.values()])
                raise
        if self._failure is not None:
            if self.comparison.metric is not None:
                self.report()
            raise self._failure

    def _start_runs(self) -> None:
        """Start runs in free slots."""
        for slot in set(range(self.jobs)) - self._in_flight.keys():
            run = self._next_run()
            if run is None or (self.max_runs is not None and self._started >= self.max_runs):
                return
            self._started += 1
            self._in_flight[slot] = run, run.start(self.environment(slot))
            self._bar.total = max(self._bar.total, self._bar.n + len(self._in_flight))
            self._bar.set_description(run.name)

    def _next_run(self) -> Run | None:
        """Return what to start next; one that a killed comparison has left training is waited for, and counts."""
        busy = {run.folder for run, _ in self._in_flight.values()}
        while run := next((run for run in self.comparison.missing() if run.folder not in busy), None):
            if not run.is_orphaned():
                return run
            self._bar.write(f"{run.folder} still trains: waiting for it")
            while run.is_orphaned():
                time.sleep(_POLL)
            self.comparison.refresh()
        return None

    def _take(self, run: Run, code: int) -> None:
        """Look at an ended run, and tell its line: arm, rate, seed, metric, time."""
        is_first = self.comparison.metric is None
        try:
            run.end(code)
            self.comparison.refresh()
        except ValueError as error:
            self._failure = self._failure or error
            return
        metric = self.comparison.metric
        text = "diverged; trying half of its rate"
        if metric is not None:
            done = run.finished(metric)
            assert done is not None
            text = "diverged" if math.isnan(done.value) else f"{metric.shown_name} {done.value:.4f}"
        self._bar.update()
        self._bar.write(f"{run.name}: {text} ({run.result['seconds']:.0f} s)")
        if metric is None:
            return
        if is_first:
            self._bar.write("\n".join([*self.comparison.about, self._estimate()]))
        if time.monotonic() - self._reported > _REPORT_EVERY:
            self.report()

    def _estimate(self) -> str:
        """Return runs and time that are left, from the first run."""
        seconds, done = self.comparison.first.result["seconds"], self.comparison.count_finished()
        counts = sorted({max(1, count - done) for count in count_runs(self.comparison.plan)})
        times = [_time(seconds * count / self.jobs) for count in counts]
        return (
            f"{' to '.join(map(str, counts))} more runs of {seconds:.0f} s like the first: about {' to '.join(times)}. "
            "Ctrl-C stops, the same command goes on; --max_runs, fewer arms or --search_seeds 42 shorten it"
        )


def count_runs(plan: Plan) -> tuple[int, int]:
    """Return how many runs there will be, from so many to so many: a search may go on by some rates."""
    least = most = 0
    if plan.grid:
        least = most = len(plan.grid) * len(plan.search_seeds)
    elif plan.search_seeds:
        others, around = len(plan.search_seeds) - 1, 3 ** len(plan.rates)  # the best place and its neighbours
        least = around + around * others
        most = 6 ** len(plan.rates) + (around + 1) * others
    return len(plan.arms) * (least + len(plan.seeds)), len(plan.arms) * (most + len(plan.seeds))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
