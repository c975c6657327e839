"""The folder of a run: who writes there, which run it is, and what earlier runs left."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from filelock import FileLock, Timeout

from pretraining import report

RUN = "run.json"
_LOCK, _HOLDER = ".run.lock", ".run.holder.json"
# What a run writes there, for Hub and resume; compare_optimizers.py's arguments.json is not among them.
WRITTEN = (
    *(RUN, "metrics*.json", "trainer_state.json", "loss_curve.png", "README.md", "training_args.bin", "runs"),
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "checkpoint-*"),
)


class Run(NamedTuple):
    """A run, as its folder names it.

    Args:
        id: random; checkpoints carry it too.
        settings: those that its weights depend on; see `identity`.
    """

    id: str
    settings: dict[str, Any]


class InUse(RuntimeError):
    """Raised if another process writes into the folder; the message names it."""


def hold(output: Path, wait: float = 0.0) -> FileLock:
    """Keep other runs out of a folder until this process ends or releases the lock.

    Args:
        output: the folder; it is made if missing.
        wait: seconds to wait for another run that ends.

    Raises:
        InUse: another process holds it, on this machine or another.
    """
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / _LOCK)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise InUse(f"{output} is in use by {_holder(output)}; wait, stop that, or give another --output_dir") from None
    me = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    report.write(output / _HOLDER, me)
    return lock


def _holder(output: Path) -> str:
    try:
        found = json.loads((output / _HOLDER).read_text(encoding="utf-8"))
        text = f"process {found['pid']} on {found['host']}, since {found['since']}"
        if found["host"] == platform.node() and psutil.pid_exists(found["pid"]):
            text += f" ({' '.join(psutil.Process(found['pid']).cmdline())[:80]})"
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return "another process"
    return text


def read(output: Path) -> Run | None:
    """Return the run of a folder; None if it names none that can be read."""
    try:
        found = json.loads((output / RUN).read_text(encoding="utf-8"))
        return Run(str(found["id"]), dict(found["settings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin(output: Path, settings: dict[str, Any]) -> Run:
    """Name a new run of a folder."""
    run = Run(uuid.uuid4().hex, settings)
    report.write(output / RUN, run._asdict())
    return run


def set_aside(output: Path) -> Path | None:
    """Move all that an earlier run wrote into a folder beside it, earlier-1 or the next; return that, if any."""
    found = sorted({path for pattern in WRITTEN for path in output.glob(pattern)})
    if not found:
        return None
    number = 1
    while (aside := output / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    # The name of the run goes first: from then on its checkpoints are no one's.
    for path in sorted(found, key=lambda path: path.name != RUN):
        shutil.move(path, aside / path.name)
    return aside
