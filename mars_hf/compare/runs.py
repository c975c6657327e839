"""Start a run in a process of its own, stop it, and read its result.json."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mars_hf.compare import files
from mars_hf.compare.differences import FinishedRun
from mars_hf.compare.metric import Metric
from mars_hf.compare.order import VARIABLE, Order
from mars_hf.compare.plan import Arm
from mars_hf.compare.search import Place

_ENDED = ("complete", "diverged")
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_read: dict[tuple[Path, int], dict[str, Any]] = {}  # results of runs that ended, which are long, by time of writing


@dataclass(frozen=True)
class Run:
    """One run: an arm at a place of its search, with a seed.

    Args:
        arm: the arm.
        place: of the search.
        rate: its learning rate; NaN in the first run, which tells it.
        seed: of weights and data.
        order: for the process.
    """

    arm: Arm
    place: Place
    rate: float
    seed: int
    order: Order

    @property
    def folder(self) -> Path:
        """Return the folder of result.json and of the log."""
        return Path(self.order.folder)

    @property
    def log(self) -> Path:
        """Return the file of what the run prints."""
        return self.folder / "log.txt"

    @property
    def command(self) -> list[str]:
        """Return the command of its process."""
        module = ["-m"] if self.order.is_module else []
        launcher = self.order.launcher or [sys.executable, "-m"]
        return [*launcher, "mars_hf.compare.child", *module, self.order.script, *self.order.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Return what the environment of its process has more than this one's."""
        return {VARIABLE: self.order.text(), "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}

    @property
    def result(self) -> dict[str, Any] | None:
        """Return its result.json; None if it has none.

        Raises:
            ValueError: the folder holds a finished run with other settings.
        """
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        key = path, path.stat().st_mtime_ns
        if key not in _read:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["state"] not in _ENDED:
                return content
            _read[key] = content
        self._refuse_others(_read[key])
        return _read[key]

    def _refuse_others(self, content: Mapping[str, Any]) -> None:
        now, then = self.order.what_trains(), content["order"]
        changed = [name for name in now if then.get(name) != now[name]]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{self.folder} holds a run with other {name} ({_short(then.get(name))}, now {_short(now[name])}): "
                "give another --output_dir, or the same arguments as before"
            )

    @property
    def is_finished(self) -> bool:
        """Return whether it need not be repeated."""
        result = self.result
        return result is not None and result["state"] in _ENDED

    @property
    def can_resume(self) -> bool:
        """Return whether an interrupted run goes on from a checkpoint: with the same settings, in a single training."""
        result = self.result or {}
        if not self.order.saves or len(result.get("trainings", [])) != 1:
            return False
        return result["order"] == self.order.what_trains() and any(self.folder.glob("output/checkpoint-*"))

    def start(self, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start or resume its process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.can_resume:
            shutil.rmtree(self.folder / "output", ignore_errors=True)  # a half-finished run begins again
            (self.folder / "result.json").unlink(missing_ok=True)
        return spawn(self.command, self.log, {**os.environ, **more, **self.environment})

    def is_orphaned(self) -> bool:
        """Return whether a process of a killed comparison trains this run: it ends by itself, and counts."""
        return files.is_locked(self.folder / "process")

    def end(self, code: int, *, keep_output: bool) -> None:
        """Look at what an ended process has left.

        Raises:
            ValueError: the run failed; names its last words.
        """
        if not keep_output and self.is_finished:
            shutil.rmtree(self.folder / "output", ignore_errors=True)
        if not self.is_finished:
            message = (self.result or {}).get("message") or self._last_words(code)
            raise ValueError(f"{self.arm.name}, seed {self.seed}: {message} (its log: {self.log})")

    def _last_words(self, code: int) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"it ended with code {code}" + (f": {lines[-1]}" if lines else "")

    def finished(self, metric: Metric) -> FinishedRun:
        """Return the result of a finished run."""
        result = self.result
        assert result is not None
        training = training_of(result, self.order)
        common: dict[str, Any] = {"weights": training.get("weights"), "batch": training.get("batch")}
        if training.get("resumed_at"):  # those of the checkpoint
            common = {}
        rate = self.rate if math.isfinite(self.rate) else training.get("arguments", {}).get("learning_rate", math.nan)
        value = None if result["state"] == "diverged" else metric.value(training)
        if result["state"] != "diverged" and value is None:
            raise ValueError(f"{self.folder}: no {metric.name} in its evaluations; choose another with --metric")
        if value is None or not math.isfinite(value):
            return FinishedRun(self.arm.name, rate, self.seed, math.nan, **common)
        seconds, memory = training["seconds_per_step"], training["memory"]
        return FinishedRun(
            self.arm.name,
            rate,
            self.seed,
            value,
            seconds_per_step=math.nan if seconds is None else seconds,
            memory=math.nan if memory is None else memory,
            curve=tuple(metric.curve(training)),
            **common,
        )


def training_of(result: Mapping[str, Any], order: Order) -> Mapping[str, Any]:
    """Return the record of the training that is compared; {} if it has not begun."""
    at = (order.training or 1) - 1
    trainings = result["trainings"]
    return trainings[at] if at < len(trainings) else {}


def folder_name(arm: str) -> str:
    """Return the name of the folder for an arm's runs; no two arms share one."""
    return quote(arm, safe="=,")


def shell_line(run: Run) -> str:
    """Return a run as a line for a shell, for `--dry_run`."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in run.environment.items()]
    return f"mkdir -p {shlex.quote(str(run.folder))} && {' '.join(settings)} {shlex.join(run.command)}"


def spawn(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that prints into a log; a launcher's children get its signals, for they share its session."""
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes and their children, gently first."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, kind)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:87]}..."
