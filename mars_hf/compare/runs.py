"""Start a run in a process of its own, stop it, and read its result.json."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mars_hf.compare import files
from mars_hf.compare.differences import FinishedRun
from mars_hf.compare.metric import Metric
from mars_hf.compare.order import VARIABLE, Order

_ENDED = ("complete", "diverged")
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Run:
    """One run."""

    arm: str  # its name
    seed: int  # of weights and data
    order: Order  # for its process

    @property
    def name(self) -> str:
        """Return arm, rate and seed in words."""
        rate = self.order.arm.get("learning_rate")
        shown = "the script's own rate" if rate is None else f"rate {rate:.3g}"
        return f"{self.arm}, {shown}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Return the folder of result.json and of log.txt, which has what the run prints."""
        return Path(self.order.folder)

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

    # --- its process --------------------------------------------------------------------------------------------------

    def start(self, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start its process; one that was half done begins again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "output", ignore_errors=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        return spawn(self.command, self.folder / "log.txt", {**os.environ, **more, **self.environment})

    def is_orphaned(self) -> bool:
        """Return whether a process of a killed comparison trains this run: it ends by itself, and counts."""
        try:
            with files.locked(self.folder / "process", "trains"):
                return False
        except ValueError:
            return True

    def end(self, code: int) -> None:
        """Look at what an ended process has left.

        Raises:
            ValueError: the run failed; names its last words.
        """
        if self.is_finished:
            shutil.rmtree(self.folder / "output", ignore_errors=True)
            return
        log = self.folder / "log.txt"
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [f": {line.strip()}" for line in lines if line.strip()][-1:]
        message = self.result.get("message") or f"it ended with code {code}{''.join(last)}"
        raise ValueError(f"{self.arm}, seed {self.seed}: {message} (its log: {log})")

    # --- its result ---------------------------------------------------------------------------------------------------

    @property
    def result(self) -> dict[str, Any]:
        """Return its result.json; {} if it has none.

        Raises:
            ValueError: the folder holds a finished run with other settings.
        """
        path = self.folder / "result.json"
        if not path.is_file():
            return {}
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        then, now = _flat(content["order"]), _flat(self.order.what_trains())
        changed = [name for name in {**now, **then} if then.get(name) != now.get(name)]
        if changed and content["state"] in _ENDED:
            if "text_hash" in changed:
                raise ValueError(
                    f"{self.folder} holds a run of {self.order.script} before it was edited: give another "
                    "--output_dir, or the script as it was"
                )
            name = changed[0]
            texts = json.dumps(then.get(name)), json.dumps(now.get(name))
            # Long lists may differ far behind.
            alike = max(0, len(os.path.commonprefix(texts)) - 20)  # noqa: RUF071 of characters, indeed
            before, today = (f"{'...' if alike else ''}{text[alike:]:.90}" for text in texts)
            raise ValueError(
                f"{self.folder} holds a run with other settings ({name}: {before}, now {today}): give another "
                "--output_dir, or the same arguments as before"
            )
        return content

    @property
    def is_finished(self) -> bool:
        """Return whether it need not be repeated."""
        return self.result.get("state") in _ENDED

    def finished(self, metric: Metric) -> FinishedRun | None:
        """Return the result of a finished run; None before its end.

        Raises:
            ValueError: it has no such metric.
        """
        result = self.result
        if result.get("state") not in _ENDED:
            return None
        training = result["training"]
        value = math.nan if result["state"] == "diverged" else metric.value(training)
        if value is None:
            raise ValueError(f"{self.folder}: no {metric.shown_name} in its evaluations; choose another with --metric")
        return FinishedRun(
            self.arm,
            training["arguments"]["learning_rate"],
            self.seed,
            value,
            training["seconds_per_step"] or math.nan,
            training["memory"] or math.nan,
            [] if math.isnan(value) else metric.curve(training),
            training["weights"],
            training["batch"],
        )


def _flat(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return an order's settings without their sections; their names tell a reader what has changed."""
    return {**order, **order["shared"], **order["arm"], "shared": None, "arm": None}


def spawn(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that prints into a new log, in a session of its own: Ctrl-C reaches the comparison alone."""
    # Without an input: nobody would see the questions of a script, which would wait for ever.
    with log.open("wb") as file, open(os.devnull) as empty:
        out, error = file, subprocess.STDOUT
        return subprocess.Popen(command, stdin=empty, stdout=out, stderr=error, env=environment, start_new_session=True)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes and all below them, gently first: workers of a launcher may have sessions of their own."""
    family: list[psutil.Process] = []
    for process in [each for each in processes if each.poll() is None]:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(process.pid)
            family += [found, *found.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for each in family:
            with contextlib.suppress(psutil.Error):
                end(each)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
