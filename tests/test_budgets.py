"""The package passes its tools, and its size and the functions that a step passes are bounded by what they are now.

A change that needs more says in its message what it takes away. Lower the bounds when the package shrinks.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import gpt2

import mars_hf
from mars_hf.settings import SETTINGS

PACKAGE = Path(mars_hf.__file__).parent
FILES, LINES, STATEMENTS, MOST_SETTINGS = 37, 7_977, 4_000, 28
# Functions and files that a step passes, and `create(model)`.
WALKS = {"mars-adamw": (20, 6, 19, 5), "mars-m": (33, 9, 31, 7)}


@pytest.mark.parametrize(
    "tool",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], pytest.param(["mypy"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_tool(tool):
    finished = subprocess.run([sys.executable, "-m", *tool], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_size(capsys):
    files = sorted(PACKAGE.rglob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in [*files, *PACKAGE.rglob("*.cpp")])
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    statements = sum(
        not (isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)) for node in nodes
    )
    keywords = (inspect.signature(function).parameters for function in (mars_hf.Mars.__init__, mars_hf.create))
    settings = len({*SETTINGS}.union(*keywords) - {"self", "params", "model_or_params", "settings"})
    with capsys.disabled():
        print(f"\nmars_hf: {len(files)} files, {lines} lines, {statements} statements, {settings} settings")
    assert len(files) <= FILES and lines <= LINES and statements <= STATEMENTS and settings <= MOST_SETTINGS
    assert len(mars_hf.__all__) <= 9


def passed(function: Callable[[], object]) -> tuple[int, int]:
    """Return the numbers of functions and files of the package that a call passes, comprehensions not counted."""
    seen = set()

    def profile(frame, event, _):
        code = frame.f_code
        named = not code.co_qualname.rpartition(".")[2].startswith("<")
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and named:
            seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(seen), len({file for file, _ in seen})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have qualified names from Python 3.11 on")
@pytest.mark.parametrize("mars_type", WALKS)
def test_walks(monkeypatch, capsys, mars_type):
    """Without what other tests have imported: DeepSpeed is extended once a process."""
    monkeypatch.setattr(mars_hf.optimizer, "EXTENSIONS", {})
    model, made = gpt2(), []
    mars_hf.create(model)  # installs the guard, once a process
    create = passed(lambda: made.append(mars_hf.create(model, lr=1e-3, mars_type=mars_type)))
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        step = passed(made[0].step)
    with capsys.disabled():
        print(f"\n{mars_type}: a step passes {step[0]} functions in {step[1]} files", end="")
        print(f", create {create[0]} in {create[1]}")
    assert all(count <= bound for count, bound in zip((*step, *create), WALKS[mars_type], strict=True))
