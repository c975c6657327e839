"""Handle the processes of a run: what one decides for all, their threads, and an end that loses no steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainingArguments

# Of a scheduler, of a user, and of `Stopping` itself, which may follow one of the others.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
T = TypeVar("T")


def is_launched() -> bool:
    """Tell whether a launcher started this process; a run from a shell outlives the shell, as under nohup."""
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def check(training: TrainingArguments) -> None:
    """Raise ValueError if launched processes are not connected: each would train alone, into the same folder."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != training.world_size:
        raise ValueError(
            f"{launched} processes were launched, but each sees {training.world_size}: a config for GPUs on a machine "
            "without them? Use accelerate_configs/cpu_ddp.yaml and --use_cpu true on CPU"
        )


def tell_of_idle_gpu(training: TrainingArguments) -> None:
    """Print a line if a GPU stays idle, as configs of small jobs have it."""
    if training.use_cpu and torch.cuda.is_available() and training.process_index == 0:
        print("this run trains on the CPU, and a GPU is idle: --use_cpu false trains there", flush=True)


def on_main(training: TrainingArguments, work: Callable[[], T]) -> T:
    """Return what `work` returns on the main process; what it refuses ends every process."""
    result: list[Any] = [None, None]
    if training.process_index == 0:
        try:
            result = [work(), None]
        except (ValueError, OSError) as error:
            result = [None, str(error)]
    if training.world_size > 1:
        broadcast_object_list(result)
    value, refusal = result
    if refusal is not None:
        raise ValueError(refusal)
    return value


def set_threads(training: TrainingArguments, threads: int | None) -> None:
    """Use as many threads as asked for on CPU, or OMP_NUM_THREADS if the user has set it, or all cores.

    Launchers give OMP_NUM_THREADS to their workers unasked, but not to themselves.
    """
    environment: Any = os.environ
    if is_launched():
        with contextlib.suppress(psutil.Error):
            environment = psutil.Process(os.getppid()).environ()
    if training.device.type == "cpu" and (threads or "OMP_NUM_THREADS" not in environment):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // processes))


def leave() -> None:
    """End a process of several that has succeeded before the interpreter does.

    DDP leaks a reference to its gloo process group, whose threads abort the process if they need the interpreter while
    it ends (torch 2.9 to 2.13).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        os._exit(0)


class Stopping(TrainerCallback):
    """Save and end at the end of the step in which a signal came, on all processes at the same step.

    The end of a launcher counts as one: a worker that is left alone would hold the run's folder. Handlers are in place
    only while training runs; a second signal has its usual effect.
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
            if is_launched():
                threading.Thread(target=_follow, args=[os.getppid()], daemon=True).start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask Trainer to save and stop if any process was asked to."""
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
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._asked = self._asked or ("the end of its launcher" if name == "SIGUSR2" else name)
        signal.signal(number, self._handlers[number])


def _follow(parent: int) -> None:
    """Send this process SIGUSR2 when its launcher has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGUSR2)
