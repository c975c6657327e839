"""End a run early without losing steps: on a signal of the scheduler, and when its launcher is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import psutil
from accelerate import Accelerator
from transformers import TrainerCallback

from pretraining.run.environment import LAUNCHED_BY

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_LAUNCHERS = ("accelerate", "torchrun", "torch.distributed", "deepspeed")
_POLL = 1.0
# A run that nobody waits for ends by itself, at the latest after this many seconds or five times its longest step.
_GRACE = 30.0


class Stopping(TrainerCallback):
    """Save and end at the end of the step in which a signal came, on all processes at the same step.

    Handlers are in place only while training runs; a second signal has its usual effect. If the process that launched
    this one is gone, the run ends in the same way; if it cannot, because other processes are gone too, it exits.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Take the accelerator, through which processes agree."""
        self.reason: str | None = None
        self._asked: str | None = None
        self._accelerator = accelerator
        self._handlers: dict[int, Any] = {}
        self._done = threading.Event()
        self._last_step = time.monotonic()
        self._longest = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Put handlers in place and watch the launcher."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._ask) for number in SIGNALS}
        self._last_step = time.monotonic()
        launchers = _launchers()
        if launchers:
            threading.Thread(target=self._watch, args=(launchers,), daemon=True, name="launcher").start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask Trainer to save and stop if any process was asked to."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last_step)
        self._last_step = now
        if self._accelerator.num_processes > 1:
            if self._asked:
                self._accelerator.set_trigger()
            stop = self._accelerator.check_trigger()
        else:
            stop = self._asked is not None
        if stop and state.global_step < state.max_steps:
            self.reason = self._asked or "a signal to another process"
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Give the signals back."""
        self.close()

    def close(self) -> None:
        """Give the signals back and stop watching; for a run that failed, too."""
        self._done.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number).name
        signal.signal(number, self._handlers[number])

    def _watch(self, launchers: list[_Launcher]) -> None:
        while not self._done.wait(_POLL):
            gone = next((one for one in launchers if not one.is_alive), None)
            if gone is not None:
                break
        else:
            return
        self._asked = self._asked or f"the end of process {gone.pid}, which launched it"
        since = time.monotonic()
        while not self._done.wait(_POLL):
            if time.monotonic() - max(since, self._last_step) > max(_GRACE, 5 * self._longest):
                print(f"process {os.getpid()} ends: its launcher is gone, and no step ends any more", file=sys.stderr)
                os._exit(1)


class _Launcher(NamedTuple):
    """A process, by its pid and the time it was created: pids are given again."""

    pid: int
    created: float

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def _launchers() -> list[_Launcher]:
    """Return the processes without which this one has no reason to run.

    A parent counts only if it is a launcher: a run started from a shell outlives it, as under nohup.
    """
    pids = [int(os.environ[LAUNCHED_BY])] if os.environ.get(LAUNCHED_BY, "").isdigit() else []
    parent = os.getppid()
    if any(name in " ".join(_command(parent)) for name in _LAUNCHERS):
        pids.append(parent)
    return [_Launcher(pid, _created(pid)) for pid in dict.fromkeys(pids)]


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


def _created(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:  # gone already
        return 0.0
