"""Start the scripts of this folder as users start theirs."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def needs_deepspeed() -> None:
    """Skip a test if the `test` extra is not fully installed."""
    if importlib.util.find_spec("deepspeed") is None:  # importing it takes seconds; the launches do
        pytest.skip("DeepSpeed is not installed: pip install -e '.[test]'")


def launch(script: str, output: Path, runs: list[str], world: int, *options: str) -> None:
    """Launch all runs; after a failure, which writes a file with its error, launch the remaining ones again."""
    remaining = runs
    while remaining:
        stderr = _torchrun([str(HERE / script), str(output), *remaining, *options], world)
        before = remaining
        remaining = [run for run in remaining if not list(output.glob(f"{run.replace('/', '-')}.[je]*"))]
        if remaining == before:
            pytest.fail(f"no run was made or failed:\n{stderr[-3000:]}")


def error_of(output: Path, run: str) -> str | None:
    """Return a run's error, from the rank with the longest one."""
    texts = [file.read_text() for file in output.glob(f"{run.replace('/', '-')}.error*")]
    return max(texts, key=len, default=None)


def _torchrun(arguments: list[str], world: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=1800)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            raise
