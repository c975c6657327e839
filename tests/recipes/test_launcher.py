"""A launcher that is killed at any moment takes its workers with it."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest
from pretraining.run import launcher
from test_pretrain_gpt2 import ROOT, SCRIPT, TINY

PROGRAMS = sorted(path for path in SCRIPT.parent.glob("*.py") if "errors.run(" in path.read_text())


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_recipe_starts_the_watch_above_its_other_imports(path):
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "module", "") != "__future__"]
    assert [ast.unparse(node) for node in body[1:3]] == [
        "from pretraining.run import errors",
        f"if __name__ == '__main__':\n    errors.run({path.stem!r})",
    ]


def test_imports_start_no_watch_and_are_light():
    code = "import sys, threading, pretraining.run.errors; print(threading.active_count(), 'torch' in sys.modules)"
    environment = {**os.environ, "ACCELERATE_DYNAMO_BACKEND": "NO", "PYTHONPATH": str(SCRIPT.parent)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "1 False\n"


@pytest.mark.skipif(sys.platform == "win32", reason="starts sleep")
def test_launcher_is_python_or_names_the_script(monkeypatch):
    """What adopts a process, as init does, is neither."""
    assert launcher._is_launcher(os.getpid())
    other = subprocess.Popen(["sleep", "60"])
    named = subprocess.Popen(["sh", "-c", "sleep 60; true", "folder/recipe.py"], start_new_session=True)
    try:
        while not psutil.Process(named.pid).cmdline():  # a busy system shows it late
            time.sleep(0.01)
        assert not launcher._is_launcher(other.pid)
        monkeypatch.setattr(sys, "argv", ["somewhere/recipe.py", "--max_steps", "1"])
        assert launcher._is_launcher(named.pid) and not launcher._is_launcher(other.pid)
        with monkeypatch.context() as patch:
            patch.setenv("OMPI_COMM_WORLD_SIZE", "2")
            assert launcher._is_launcher(other.pid)
    finally:
        for process in [*psutil.Process(named.pid).children(), other, named]:
            process.kill()
        other.wait()
        named.wait()
    assert not launcher._is_launcher(other.pid)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the children that run the recipe, not those that have not left the launcher's program yet."""
    workers = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            if str(SCRIPT) in command and "accelerate.commands.launch" not in command:
                workers.append(child)
    return workers


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("count", "seconds"), [(1, 0), (2, 1)], ids=["before the watch", "during imports"])
def test_killed_launcher_leaves_no_workers(tokens, tmp_path, count, seconds):
    """They would import torch, and then wait for the launcher's store for minutes."""
    config = ROOT / "accelerate_configs" / "cpu_ddp.yaml"
    words = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    words += [SCRIPT, *TINY, "--data_dir", tokens]
    process = psutil.Popen([sys.executable, *map(str, words), "--output_dir", str(tmp_path / "run")])
    while len(workers_of(process)) < count:
        time.sleep(0.001)
    time.sleep(seconds)
    process.suspend()  # it starts no more of them
    workers = workers_of(process)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive and not (tmp_path / "run" / "metrics.json").exists()
