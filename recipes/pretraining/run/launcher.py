"""End a launched process when its launcher ends: a worker that is left alone waits minutes for the others.

This file imports nothing heavy, because the watch starts before torch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

_VARIABLES = ("ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID")
# Of Open MPI, MPICH and Intel MPI: their daemons on other machines start the workers.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


def is_launched() -> bool:
    """Tell whether a launcher started this process; a run from a shell outlives the shell, as under nohup."""
    return any(name in os.environ for name in _VARIABLES)


def watch() -> None:
    """Watch a launched process's launcher from a thread, and end the process when the launcher has ended.

    The process ends with SIGUSR2, on which a run that trains saves first.

    Raises:
        SystemExit: the launcher had ended before this process could look.
    """
    if not is_launched():
        return
    parent = os.getppid()
    if not _is_launcher(parent):
        raise SystemExit(f"{Path(sys.argv[0]).name}: its launcher has ended")
    threading.Thread(target=_end_after, args=[parent], daemon=True).start()


def _is_launcher(parent: int) -> bool:
    """Return False for a process that has adopted this one, such as init: neither Python, nor does it name the script.

    Whatever else may have started the process counts as its launcher.
    """
    if any(name in os.environ for name in _MPI_VARIABLES):
        return True
    try:
        command = psutil.Process(parent).cmdline()
    except psutil.NoSuchProcess:  # it ended just now
        return False
    except psutil.Error:  # another user's
        return True
    script = Path(sys.argv[0]).name
    return any(Path(word).name == script for word in command) or any("python" in word for word in command[:1])


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGUSR2)
