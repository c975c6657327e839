"""One process a folder, whatever happens to it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pretraining.run import folder_lock

RECIPES = Path(folder_lock.__file__).parents[2]
HOLDER = """
import sys
from pathlib import Path
from pretraining.run import folder_lock
with folder_lock.held(Path(sys.argv[1]), "prepares data"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path/data until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": str(RECIPES)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def held(folder, **settings):
    return folder_lock.held(folder, "prepares data", **settings)


def test_a_second_process_is_refused_by_name(tmp_path, holder):
    expected = f"process {holder.pid} on {platform.node()} prepares data there; wait for it to end"
    for _ in range(2):  # the first refusal leaves the name there
        with pytest.raises(ValueError, match=expected), held(tmp_path / "data"):
            pass
    with held(tmp_path / "other"):
        pass


def test_a_killed_process_locks_nobody_out(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / "data.lock").exists()
    with held(tmp_path / "data"):
        assert (tmp_path / "data.lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"
    assert list(tmp_path.iterdir()) == []


def test_waiting_takes_over(tmp_path, holder):
    order = []

    def wait() -> None:
        with held(tmp_path / "data", wait=True):
            order.append("taken")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    order.append("released")
    holder.stdin.close()
    thread.join(20)
    assert order == ["released", "taken"]
    assert not (tmp_path / "data.lock").exists()


def test_a_failure_releases(tmp_path):
    with pytest.raises(RuntimeError), held(tmp_path / "data"):
        raise RuntimeError
    with held(tmp_path / "data"):
        pass
