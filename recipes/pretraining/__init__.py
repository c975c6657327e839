"""Modules that the recipes share; importing them makes a launched process end with its launcher."""

import os
import signal
import threading
import time

_LAUNCHER = os.getppid()
# A run that was started from a shell outlives it, as under nohup; one of a launcher has no reason to.
IS_LAUNCHED = not os.environ.keys().isdisjoint({"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"})


def _follow_launcher() -> None:
    """End the process with SIGUSR2, on which a run that trains saves first; workers would wait for one another."""
    while os.getppid() == _LAUNCHER:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGUSR2)


if IS_LAUNCHED:  # at import, because torch takes seconds to import
    threading.Thread(target=_follow_launcher, daemon=True).start()
