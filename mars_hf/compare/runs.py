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

_ENDED = ("complete", "diverged")
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_read: dict[tuple[Path, int], dict[str, Any]] = {}  # results of runs that ended, which are long, by time of writing


@dataclass(frozen=True)
class Run:
    """One run: an arm at a rate, with a seed.

    Args:
        arm: the arm.
        rate: its learning rate; NaN in the first run, which tells it.
        seed: of weights and data.
        order: for the process.
    """

    arm: Arm
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
        return [*(self.order.launcher or [sys.executable, "-m"]), "mars_hf.compare.child", *self.order.command]

    @property
    def environment(self) -> dict[str, str]:
        """Return what the environment of its process has more than this one's."""
        return {VARIABLE: self.order.text(), "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}

    @property
    def shell_line(self) -> str:
        """Return it as a line for a shell, for `--dry_run`."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return f"mkdir -p {shlex.quote(str(self.folder))} && {' '.join(settings)} {shlex.join(self.command)}"

    @property
    def result(self) -> dict[str, Any]:
        """Return its result.json; {} if it has none.

        Raises:
            ValueError: the folder holds a finished run with other settings.
        """
        path = self.folder / "result.json"
        if not path.is_file():
            return {}
        key = path, path.stat().st_mtime_ns
        if key not in _read:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["state"] not in _ENDED:
                return content
            _read[key] = content
        self._refuse_others(_read[key]["order"])
        return _read[key]

    def _refuse_others(self, then: Mapping[str, Any]) -> None:
        now = self.order.what_trains()
        for name in now:
            if then.get(name) != now[name]:
                change = f"{_short(then.get(name))}, now {_short(now[name])}"
                raise ValueError(
                    f"{self.folder} holds a run with other {name} ({change}): give another --output_dir, or the same "
                    "arguments as before"
                )

    @property
    def is_finished(self) -> bool:
        """Return whether it need not be repeated."""
        return self.result.get("state") in _ENDED

    def start(self, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start its process; one that was half done begins again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "output", ignore_errors=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        return spawn(self.command, self.log, {**os.environ, **more, **self.environment})

    def is_orphaned(self) -> bool:
        """Return whether a process of a killed comparison trains this run: it ends by itself, and counts."""
        return files.is_locked(self.folder / "process")

    def end(self, code: int) -> None:
        """Look at what an ended process has left.

        Raises:
            ValueError: the run failed; names its last words.
        """
        if self.is_finished:
            shutil.rmtree(self.folder / "output", ignore_errors=True)
            return
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        last = [f": {line.strip()}" for line in text.splitlines() if line.strip()][-1:]
        message = self.result.get("message") or f"it ended with code {code}{''.join(last)}"
        raise ValueError(f"{self.arm.name}, seed {self.seed}: {message} (its log: {self.log})")

    def finished(self, metric: Metric) -> FinishedRun:
        """Return the result of a finished run."""
        training = self.result["training"]
        has_diverged = self.result["state"] == "diverged"
        value = None if has_diverged else metric.value(training)
        if value is None and not has_diverged:
            raise ValueError(f"{self.folder}: no {metric.name} in its evaluations; choose another with --metric")
        rate = self.rate if math.isfinite(self.rate) else training["arguments"]["learning_rate"]
        began = {"weights": training.get("weights"), "batch": training.get("batch")}
        if value is None or not math.isfinite(value):
            return FinishedRun(self.arm.name, rate, self.seed, math.nan, **began)
        seconds, memory = (training[name] or math.nan for name in ("seconds_per_step", "memory"))
        curve = tuple(metric.curve(training))
        return FinishedRun(self.arm.name, rate, self.seed, value, seconds, memory, curve, **began)


def folder_name(arm: str) -> str:
    """Return the name of the folder for an arm's runs; no two arms share one."""
    return quote(arm, safe="=,")


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
