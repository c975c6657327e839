"""Run the recipe in a process of its own."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretraining.run.environment import LAUNCHED_BY

SCRIPT = Path(__file__).resolve().parent.parent.parent / "pretrain_gpt2.py"
_TAIL_LINES = 30
# Of mars_hf.NonFiniteError; launchers do not hand on exit codes.
_DIVERGED = "steps in a row with a non-finite loss or gradient"


class RunFailed(RuntimeError):
    """Raised when a run fails; the message has its command and the end of its output."""


class Diverged(RunFailed):
    """Raised when a run ends because its loss or gradients stayed non-finite."""


def words_of(text: str | None) -> list[str]:
    """Return the words of a command that starts a Python script; none for this Python.

    Raises:
        ValueError: a quotation is open, or there is no such program.
    """
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise ValueError(f"--launcher {text!r}: {error}; close every quote") from None
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if words and shutil.which(words[0], path=places) is None:
        raise ValueError(f"--launcher {text!r}: no program {words[0]!r}; give a command, such as 'accelerate launch'")
    return words


def pretrain(argv: Sequence[str], output: Path, launcher: Sequence[str] = (sys.executable,)) -> dict[str, Any]:
    """Run recipes/pretrain_gpt2.py and append its output to OUTPUT.log.

    Args:
        argv: the recipe's arguments, without --output_dir.
        output: the recipe's output folder.
        launcher: command that starts a Python script.

    Returns:
        The run's metrics.json.

    Raises:
        Diverged: its loss or gradients stayed non-finite.
        ValueError: the run was refused; the message is its own.
        RunFailed: the run ended with an error.
    """
    command = [*launcher, str(SCRIPT), *argv, "--output_dir", str(output)]
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.parent / f"{output.name}.log"
    # Unbuffered, so that a traceback is at the log's end.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", LAUNCHED_BY: str(os.getpid())}
    with log.open("a", encoding="utf-8") as file:
        begin = log.stat().st_size  # an earlier attempt may have logged another end
        try:
            finished = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise ValueError(
                f"cannot start {launcher[0]!r} ({error.strerror}); give a command, such as 'accelerate launch'"
            ) from None
    if finished.returncode:
        text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
        lines = re.split(r"[\r\n]+", text.strip())
        for line in reversed(lines):  # a launcher adds reports of its own
            if line.startswith(f"{SCRIPT.name}: "):
                said = f"{output}: {line.removeprefix(f'{SCRIPT.name}: ')}"
                raise (Diverged if _DIVERGED in line else ValueError)(said)
        tail = "\n".join(lines[-_TAIL_LINES:])
        raise RunFailed(f"{' '.join(command)} ended with code {finished.returncode}; {log} ends with:\n{tail}")
    if not (output / "metrics.json").is_file():
        raise RunFailed(f"the run in {output} was stopped before its end; start again to go on from where it is")
    return metrics_of(output)


def metrics_of(output: Path) -> dict[str, Any]:
    """Return a finished run's metrics.json; a held-out loss that is not finite is NaN."""
    metrics: dict[str, Any] = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    return {**metrics, "eval_loss": math.nan if metrics["eval_loss"] is None else metrics["eval_loss"]}
