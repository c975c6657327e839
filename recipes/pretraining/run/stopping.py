"""End a run early without losing steps: on a signal of the scheduler, and when its launcher is gone."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
# A run that was started from a shell outlives it, as under nohup; one of a launcher has no reason to.
IS_LAUNCHED = not os.environ.keys().isdisjoint({"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"})
_LAUNCHER = os.getppid()


class Stopping(TrainerCallback):
    """Save and end at the end of the step in which a signal came, on all processes at the same step.

    Handlers are in place only while training runs; a second signal has its usual effect. The end of the launcher counts
    as a signal.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Take the accelerator, through which processes agree."""
        self.reason: str | None = None
        self._asked: str | None = None
        self._accelerator = accelerator
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Put handlers in place."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask Trainer to save and stop if any process was asked to."""
        if IS_LAUNCHED and os.getppid() != _LAUNCHER:
            self._asked = self._asked or f"the end of process {_LAUNCHER}, which launched it"
        stop = self._asked is not None
        if self._accelerator.num_processes > 1:
            if stop:
                self._accelerator.set_trigger()
            stop = self._accelerator.check_trigger()
        if stop and state.global_step < state.max_steps:
            self.reason = self._asked or "a signal to another process"
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Give the signals back."""
        self.close()

    def close(self) -> None:
        """Give the signals back; for a run that failed, too."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number).name
        signal.signal(number, self._handlers[number])
