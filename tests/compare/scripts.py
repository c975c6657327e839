"""Small scripts as people have them, each with one trap for a comparison, and a way to run them that starts fast.

A run's process takes most of its time to import torch and transformers. Here one server has imported them, and each run
is a fork of it; `test_processes.py` starts real ones.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mars_hf.compare import command, runs

NET = """
import os, sys, torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x, labels):
        out = self.inner(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    labels = torch.sin(x[:, :4] * 2) + 0.1 * torch.randn(count, 4, generator=generator)
    return [{"x": one, "labels": label} for one, label in zip(x, labels)]


def arguments(kind=TrainingArguments, **settings):
    usual = dict(output_dir="out", max_steps=6, learning_rate=1e-2, per_device_train_batch_size=8, use_cpu=True)
    return kind(**{**usual, **settings})


"""
PLAIN = "Trainer(Net(), arguments(), train_dataset=data(64, 1), eval_dataset=data(32, 2)).train()\n"


class _Forked:
    """What `runs` uses of a Popen."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        assert words[:3] == [sys.executable, "-m", "mars_hf.compare.child"]
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(words[3:], environment, str(log), os.getcwd()))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("run", timeout or 0)
        return self._process.exitcode


def _run(words: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    from mars_hf.compare import child

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    child.main(words)


def _run_alone(module: list[str], path: str, words: list[str], log: str, environment: dict[str, str]) -> None:
    """Run a script as it stands, or under `mars_hf run`."""
    import runpy

    import transformers

    from mars_hf.__main__ import main

    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    transformers.set_seed(1)  # as a comparison does for scripts that seed nothing
    if module:
        main(["run", path, *words])
    else:
        sys.argv = [path, *words]
        runpy.run_path(path, run_name="__main__")


def run_alone(module: list[str], path: Path, words: list[str], log: Path) -> None:
    """Run a script without any comparison, in a fork of the server."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_alone, args=(module, str(path), words, str(log), dict(os.environ)))
    process.start()
    process.join()
    assert process.exitcode == 0, log.read_text()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs be forks of a server that has imported all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compare.preload"])
    tests = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(runs, "spawn", _Forked)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Answer:
    """What a comparison said and left."""

    def __init__(self, code: int, out: str, error: str, folder: Path) -> None:
        self.code, self.out, self.error, self.folder = code, out, error, folder

    @property
    def page(self) -> str:
        return (self.folder / "comparison.md").read_text()

    @property
    def numbers(self) -> dict[str, Any]:
        return json.loads((self.folder / "comparison.json").read_text())

    def results(self, arm: str = "*") -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob(f"runs/{arm}/*/result.json")):
            yield json.loads(path.read_text())


def script(folder: Path, text: str) -> Path:
    """Write a script that has `Net` and `data`."""
    path = folder / "train.py"
    path.write_text(NET + textwrap.dedent(text))
    return path


def compare(capsys: pytest.CaptureFixture[str], path: Path, *words: str, folder: str = "compare") -> Answer:
    """Run the command on a script; "--" and the script's arguments may end the words."""
    output = path.parent / folder
    code = command.main([str(path), "--output_dir", str(output), *words])
    captured = capsys.readouterr()
    return Answer(code, captured.out, captured.err, output)


def command_of_module(capsys: pytest.CaptureFixture[str], module: str, folder: Path, *words: str) -> Answer:
    """Run the command on a module."""
    code = command.main(["-m", module, "--output_dir", str(folder / "compare"), *words])
    captured = capsys.readouterr()
    return Answer(code, captured.out, captured.err, folder / "compare")


def wait_for(condition: Any, seconds: float = 60) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.05)
