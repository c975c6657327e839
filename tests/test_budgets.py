"""The package passes its tools, and stays readable and small.

The numbers are a smoke alarm: they say where to look, and reading decides. What counts most is how many things a reader
keeps apart, so decisions are counted: an if, for, while, except or match case, a conditional expression, a
comprehension and each of its ifs, each `and` and `or`. Where a bound is in the way of a function that reads well,
change it, and say why in docs/decisions.md.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers import gpt2
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import mars_hf
from mars_hf.groups.settings import SETTINGS

PACKAGE = Path(mars_hf.__file__).parent
ROOT = PACKAGE.parent

# Files, and lines with C++.
COMPARE = "mars_hf/compare"
ROOMS = {
    "mars_hf": (62, 15_040),
    COMPARE: (16, 2_440),
    "recipes": (23, 2_870),
    "tests": (110, 29_370),
    "benchmarks": (14, 3_100),
}
MOST_SETTINGS, MOST_PUBLIC_NAMES = 32, 9
# Files that one step enters.
# One more than they had: small tensors on a CPU are joined (kernels/joined.py).
WALKS = {"mars-adamw": 17, "mars-m": 22}

# Classes between `Mars.step` and a kernel, by file, of one process and of ranks; names may only go.
NOUNS = {
    "arithmetic/eight_bits.py": ["Coded", "_Code"],
    "arithmetic/matrix_layouts.py": ["MatrixLayout"],
    "arithmetic/directions.py": ["NewtonSchulz"],
    "arithmetic/resting.py": ["Units"],
    "arithmetic/formulas.py": ["Arithmetic", "Options", "Rounding"],
    "arithmetic/update_rules.py": ["UpdateRule"],
    "distributed/exchange.py": [
        "Exchange", "Failure", "Matrix", "MatrixPlanner", "Parcel", "ProcessGroups", "_Box", "_Member",
    ],
    "distributed/norms.py": ["GroupSums"],
    "distributed/shards.py": ["Shards"],
    "distributed/tensors.py": ["Shard", "ShardSpec", "Slice"],
    "kernels/__init__.py": ["Backend"],
    "step/coded.py": ["UnfitStateError"],
    "step/last_norms.py": ["LastNorms"],
    "step/lists.py": ["Batch", "TensorList"],
    "step/metrics.py": ["StepMetrics"],
    "step/ranks.py": ["Chunk", "Ranks", "SharedStep", "_OfGroup", "_Settings"],
    "step/states.py": ["BufferKeys"],
}  # fmt: skip
NOT_ON_THE_WAY = ("arithmetic/reference.py", "step/release.py")
# Source files, and lines of them, that a new rule with a state of its own takes; files that a new setting takes, its
# test and the changelog included. `test_new_rule.py` and `test_new_setting.py` add one of each.
RULE_FILES, RULE_LINES, SETTING_FILES = 3, 25, 6

# Functions with more decisions than this are named below.
NAMED_FROM = 12
FILE_DENSITY = 0.45  # decisions a code line
# In one function, functions named below, code lines of one function.
MOST_DECISIONS = 20  # in one function
MOST_NAMED = 0  # functions
MOST_LINES = 60  # code lines of one function
PACKAGE_DENSITY = 0.38  # decisions a code line

# Functions with more than NAMED_FROM decisions, and how many they have; numbers may only fall.
NAMED: dict[str, int] = {}
# What is above its bound; numbers may only fall.
FOLDED_FILES: dict[str, float] = {}
STAR_TUPLES: dict[str, int] = {}


class Function(NamedTuple):
    """A function of a file; functions inside it count by themselves."""

    name: str  # with the classes and functions around it
    decisions: int
    lines: int  # without docstring, comments and blank lines


class _Functions(ast.NodeVisitor):
    """Count each function of a module by itself."""

    ALWAYS_ONE = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)

    def __init__(self, source: str) -> None:
        self.found: list[Function] = []
        self._names: list[str] = []
        self._decisions: list[int] = []  # of the functions around a node, from the outermost one
        self._lines: list[set[int]] = []
        self._code_lines = _code_lines(source)
        self.visit(ast.parse(source))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inside = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for lines in self._lines:
            lines -= inside
        if ast.get_docstring(node) is not None:
            inside -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        self._names.append(node.name)
        self._decisions.append(0)
        self._lines.append(inside & self._code_lines)
        self.generic_visit(node)
        name, decisions, lines = ".".join(self._names), self._decisions.pop(), self._lines.pop()
        self.found.append(Function(name, decisions, len(lines)))
        self._names.pop()

    def generic_visit(self, node: ast.AST) -> None:
        if self._decisions:
            self._decisions[-1] += self._decisions_at(node)
        super().generic_visit(node)

    def _decisions_at(self, node: ast.AST) -> int:
        if isinstance(node, ast.comprehension):
            return 1 + len(node.ifs)
        if isinstance(node, ast.BoolOp):
            return len(node.values) - 1
        return int(isinstance(node, self.ALWAYS_ONE))


def _code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold more than a comment."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def functions_of(path: Path) -> list[Function]:
    return _Functions(path.read_text(encoding="utf-8")).found


def density(functions: list[Function]) -> float:
    return sum(one.decisions for one in functions) / max(1, sum(one.lines for one in functions))


def sources(room: str = "mars_hf") -> dict[str, Path]:
    """Return the Python files of a room by their path in it."""
    return {str(path.relative_to(ROOT / room)): path for path in sorted((ROOT / room).rglob("*.py"))}


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def assert_only_fallen(found: dict[str, float], known: dict[str, float]) -> None:
    risen = {name: number for name, number in found.items() if number > known.get(name, 0)}
    assert not risen, f"above the bound or the known number: {risen}"
    gone = known.keys() - found.keys()
    assert not gone, f"no longer above the bound, so remove from the list: {gone}"


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."]], ids=" ".join)
def test_tool_passes(tool):
    finished = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_room_for_lines(room):
    files = [path for path in sources(room).values() if room == COMPARE or ROOT / COMPARE not in path.parents]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in [*files, *(ROOT / room).rglob("*.cpp")])
    most_files, most_lines = ROOMS[room]
    assert len(files) <= most_files and lines <= most_lines, f"{len(files)} files, {lines} lines"


def test_settings_and_names():
    arguments = {*inspect.signature(mars_hf.Mars.__init__).parameters, *inspect.signature(mars_hf.create).parameters}
    of_torch = {"foreach", "capturable", "differentiable"}  # at their defaults alone
    settings = {*SETTINGS, *arguments} - {"self", "params", "model_or_params", "settings"} - of_torch
    assert len(settings) <= MOST_SETTINGS
    assert len(mars_hf.__all__) <= MOST_PUBLIC_NAMES


def test_decisions_of_functions():
    found = {}
    for file, path in sources().items():
        for function in functions_of(path):
            if function.decisions > NAMED_FROM:
                found[f"{file} {function.name}"] = function.decisions
    assert_only_fallen(found, NAMED)
    assert max(found.values(), default=0) <= MOST_DECISIONS and len(NAMED) <= MOST_NAMED


def test_lines_of_functions():
    functions = {(file, one.name): one.lines for file, path in sources().items() for one in functions_of(path)}
    assert not {function: lines for function, lines in functions.items() if lines > MOST_LINES}


def test_density_of_decisions():
    # compare/ makes tables of runs: their comprehensions count, and are the plain form.
    others = {file: path for file, path in sources().items() if ROOT / COMPARE not in path.parents}
    functions = {file: functions_of(path) for file, path in others.items()}
    whole = density([one for of_file in functions.values() for one in of_file])
    assert whole <= PACKAGE_DENSITY, f"{whole:.3f} decisions a code line"
    above = {}
    for file, of_file in functions.items():
        has_enough_lines = sum(one.lines for one in of_file) > 30
        if has_enough_lines and round(density(of_file), 2) > FILE_DENSITY:
            above[file] = round(density(of_file), 2)
    assert_only_fallen(above, FOLDED_FILES)


def test_star_tuples():
    """`*("a", "b"),` in a list only keeps a formatter from giving each element its line."""
    found: Counter[str] = Counter()
    for room in ROOMS:
        for path in sources(room).values():
            for node in nodes_of(path):
                if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List)):
                    found[room] += 1
    assert_only_fallen(dict(found), STAR_TUPLES)


def test_comprehensions_of_three_loops():
    found = []
    for file, path in sources().items():
        for node in nodes_of(path):
            if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                if len(node.generators) > 2:
                    found.append(f"{file}:{node.lineno}")
    assert not found


def files_passed(function: Callable[[], object]) -> set[str]:
    """Return the files of the package in which a call enters a function, whatever other tests have left behind.

    That are hooks of all optimizers, and garbage, whose finalizers run anywhere.
    """
    files = set()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(frame.f_code.co_filename)

    hooks_of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    gc.collect()
    gc.disable()
    with contextlib.ExitStack() as restored:
        restored.callback(gc.enable)
        for hooks in hooks_of_all:
            restored.enter_context(mock.patch.dict(hooks, clear=True))
        restored.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(profile)
        function()
    return files


@pytest.mark.parametrize("mars_type", WALKS)
def test_walks_of_a_step(mars_type):
    model = gpt2()
    optimizer = mars_hf.create(model, lr=1e-3, mars_type=mars_type)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        files = files_passed(optimizer.step)
    assert len(files) <= WALKS[mars_type], sorted(files)


def test_nouns_between_step_and_kernel():
    found = {}
    for room in ("arithmetic", "distributed", "kernels", "step"):
        for file, path in sources(f"mars_hf/{room}").items():
            names = sorted([node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef)])
            if names and f"{room}/{file}" not in NOT_ON_THE_WAY:
                found[f"{room}/{file}"] = names
    assert found == NOUNS


def test_names_of_tests():
    """A name says what and in which case: neither one word nor a sentence."""
    names = [name for path in sources("tests").values() for name in re.findall(r"def test_(\w+)", path.read_text())]
    assert [name for name in names if not 2 <= len(name.split("_")) <= 10] == []
