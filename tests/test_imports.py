"""Imports point down, private names of other packages are listed, and importing mars_hf imports little."""

from __future__ import annotations

import ast
import importlib
import operator
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mars_hf
from mars_hf._compat import PRIVATE_NAMES, REPLACED_NAMES, cpu_multiplies_bfloat16

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(Path(mars_hf.__file__).parent.rglob("*.py"))


def test_imports_point_down():
    """The contracts are in pyproject.toml."""
    finished = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout
    assert "7 kept, 0 broken" in finished.stdout


def private_accesses(tree: ast.AST) -> set[str]:
    """Names with one leading underscore that are read from an object other than self, cls or a module of ours."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found |= {text for text in texts if text.isidentifier() and text.startswith("_") and text[1:2].isalpha()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("mars_hf"):
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
    return {name for name in found if not name.startswith("__")}


def defined(tree: ast.AST) -> set[str]:
    """Names that the package itself gives to functions, classes, variables and attributes."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stores = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    found |= {node.id for node in stores if isinstance(node, ast.Name)}
    return found | {
        node.attr for node in stores if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def test_private_names_of_others_are_listed():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ours = set().union(*(defined(tree) for path, tree in trees.items() if path.name != "_compat.py"))
    listed = {entry.rpartition(".")[2] for entry in PRIVATE_NAMES}
    used = set()
    for path, tree in trees.items():
        names = private_accesses(tree) - (set() if path.name == "_compat.py" else ours)
        used |= names
        foreign = (
            {name for name in names if not name.startswith("_foreach_")} - listed - {"_fields", "_replace", "_asdict"}
        )
        assert foreign <= ALLOWED.get(path.name, set()), f"{path.name} uses {sorted(foreign)}; list it in _compat.py"
    assert listed - {"_clip_grad_norm", "_get_grad_norm"} <= used


# trl's methods told by their names, ends of the names of metrics, parts of an Enum, and a type variable.
ALLOWED = {
    "metric.py": {"_loss"},
    "recorder.py": {"_runtime", "_per_second", "_time", "_num_tokens"},
    "trainer.py": {"_generate", "_generate_and_score_completions", "_generate_student_completions"},
    "_compat.py": {"_name_", "_value_", "_sort_order_", "_member_names_", "_value2member_map_", "_F"},
}


@pytest.mark.parametrize("entry", [*REPLACED_NAMES, *(name for name in PRIVATE_NAMES if "parameters" not in name)])
def test_names_of_others_are_there(entry):
    owner, _, name = entry.rpartition("." if "." in entry.partition(":")[2] or ":" not in entry else ":")
    module, _, path = owner.partition(":")
    pytest.importorskip(module.partition(".")[0])
    found = importlib.import_module(module)
    found = operator.attrgetter(path)(found) if path else found
    if not hasattr(found, name):  # set on instances
        source = Path(sys.modules[found.__module__].__file__).read_text()
        assert entry in PRIVATE_NAMES and (f"self.{name}" in source or f'"{name}"' in source)


@pytest.mark.slow
def test_import_in_a_new_process():
    """It brings torch and nothing heavy; with AVX2 alone no processor multiplies bfloat16."""
    heavy = {"transformers", "accelerate", "deepspeed", "triton", "datasets", "matplotlib", "peft", "tiktoken"}
    code = f"""if True:
        import sys, mars_hf
        print(sorted({heavy} & set(sys.modules)))
        mars_hf.create, mars_hf.Mars
        from mars_hf._compat import cpu_multiplies_bfloat16
        print(cpu_multiplies_bfloat16())"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    lines = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).splitlines()
    assert lines[0] == "[]" and (lines[1] == "False" or platform.machine() != "x86_64")


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's flags")
@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="ATEN_CPU_CAPABILITY hides what the processor has")
def test_bfloat16_is_for_processors_that_multiply_it():
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    assert cpu_multiplies_bfloat16() == bool({"avx512_bf16", "amx_bf16"} & set(flags))


# --- files that others wrote run nothing ------------------------------------------------------------------------------

SCRIPTS = [*FILES, *sorted((ROOT / "recipes").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}
# Imports that run code out of files, or hide the names of such functions from the table below.
UNSAFE_IMPORTS = re.compile(
    r"(import|from) (_?pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal|jsonpickle)\b"
    r"|from (torch|torch\.serialization|numpy|yaml|pandas) import .*\b(load\w*|read_pickle)\b"
    r"|import (torch|torch\.serialization|yaml) as "
)
# The beginning of a call, and what must be in it; None where nothing helps.
UNSAFE_CALLS = {
    r"torch\.(serialization\.)?load\(": r"weights_only=True[,)]",
    r"(np|numpy)\.load\(.*\ballow_pickle=": r"allow_pickle=False[,)]",
    r"yaml\.(load|load_all)\(": None,
    r"yaml\.(unsafe|full)_load|(pd|pandas)\.read_pickle\(|torch\.hub\.load\(": None,
    r".*\btrust_remote_code=": r"trust_remote_code=False[,)]",
    r"(transformers\.)?Auto\w+\.from_\w+\(": r"trust_remote_code=False[,)]",  # without, it would ask the user
}


def unsafe_reads(tree: ast.AST) -> list[str]:
    """Say, with its line, what may run code out of a file: unpickling, unsafe YAML, remote code."""
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    loaders = SAFE_LOADERS | {node.name for node in classes if SAFE_LOADERS & set(map(ast.unparse, node.bases))}

    def is_unsafe(code: str) -> bool:
        calls = [needed for start, needed in UNSAFE_CALLS.items() if re.match(start, code)]
        safe = code.endswith(tuple(f", Loader={loader})" for loader in loaders))
        return not safe and any(not (needed and re.search(needed, code)) for needed in calls)

    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = [node for node in imports if UNSAFE_IMPORTS.match(ast.unparse(node))]
    found += [node for node in nodes if isinstance(node, ast.Call) and is_unsafe(ast.unparse(node))]
    return [f"{node.lineno}: {ast.unparse(node)[:80]}" for node in found]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_out_of_a_file_that_is_read(path):
    assert unsafe_reads(ast.parse(path.read_text(encoding="utf-8"))) == []


UNSAFE = """
torch.load(file)
torch.load(file, weights_only=False)
torch.load(file, weights_only=not True)
import torch as t
from torch import load
from torch import load as read
torch.serialization.load(file)
import pickle
from pickle import load
def f(): import dill
np.load(file, allow_pickle=True)
from numpy import load
yaml.load(file, Loader=yaml.Loader)
yaml.load(file, yaml.UnsafeLoader)
yaml.load(file)
yaml.unsafe_load(file)
class Own(yaml.FullLoader): yaml.load(file, Loader=Own)
pd.read_pickle(file)
AutoModel.from_pretrained(name, trust_remote_code=True)
Model.from_pretrained(name, trust_remote_code=choice)
AutoTokenizer.from_pretrained(folder)
"""
SAFE = """
torch.load(file, weights_only=True)
np.load(file)
np.load(file, allow_pickle=False)
yaml.safe_load(file)
class Own(yaml.SafeLoader): yaml.load(file, Loader=Own)
json.load(file)
AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
"""


def test_unsafe_reads_are_noticed():
    assert [code for code in UNSAFE.strip().splitlines() if not unsafe_reads(ast.parse(code))] == []
    assert [code for code in SAFE.strip().splitlines() if unsafe_reads(ast.parse(code))] == []


def test_public_names():
    assert set(mars_hf.__all__) == {
        "LastGradientCallback",
        "Mars",
        "MarsTrainer",
        "NonFiniteCallback",
        "NonFiniteError",
        "create",
        "factory",
        "register",
        "with_mars",
    }
    assert all(getattr(mars_hf, name).__doc__ for name in mars_hf.__all__)
