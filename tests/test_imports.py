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
from mars_hf._compat import PRIVATE_NAMES, REPLACED_NAMES

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(Path(mars_hf.__file__).parent.rglob("*.py"))


def test_imports_point_down():
    """The contracts are in pyproject.toml."""
    finished = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout
    assert "2 kept, 0 broken" in finished.stdout


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
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Name):
                    found.add(each.id)
                elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                    found.add(each.attr)
    return found


def test_private_names_of_others_are_listed():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ours = set().union(*(defined(tree) for path, tree in trees.items() if path.name != "_compat.py"))
    listed = {entry.rpartition(".")[2] for entry in PRIVATE_NAMES}
    used = set()
    for path, tree in trees.items():
        names = private_accesses(tree) - (set() if path.name == "_compat.py" else ours)
        used |= names
        foreign = {name for name in names if not name.startswith("_foreach_")} - listed - {"_fields", "_replace"}
        assert foreign <= ALLOWED.get(path.name, set()), f"{path.name} uses {sorted(foreign)}; list it in _compat.py"
    assert listed - {"_clip_grad_norm", "_get_grad_norm"} <= used


# trl's methods told by their names, parts of an Enum, and a type variable.
ALLOWED = {
    "trainer.py": {"_generate", "_generate_and_score_completions", "_generate_student_completions"},
    "_compat.py": {"_name_", "_value_", "_sort_order_", "_member_names_", "_value2member_map_", "_F"},
}


@pytest.mark.parametrize("entry", REPLACED_NAMES)
def test_replaced_names_are_there(entry):
    module, _, path = entry.partition(":")
    pytest.importorskip(module.partition(".")[0])
    assert operator.attrgetter(path)(importlib.import_module(module))


@pytest.mark.parametrize("entry", [entry for entry in PRIVATE_NAMES if not entry.startswith("parameters")])
def test_private_names_are_there(entry):
    owner, _, name = entry.rpartition(".")
    module, _, path = owner.partition(":")
    pytest.importorskip(module.partition(".")[0])
    found = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    if hasattr(found, name):
        return
    source = Path(sys.modules[found.__module__].__file__).read_text()  # set on instances
    assert f"self.{name}" in source or f'"{name}"' in source


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's flags")
def test_bfloat16_is_for_processors_that_multiply_it():
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    code = "from mars_hf._compat import cpu_multiplies_bfloat16; print(cpu_multiplies_bfloat16())"
    for limit, expected in (("", bool(flags & {"avx512_bf16", "amx_bf16"})), ("avx2", False), ("default", False)):
        environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
        if limit:
            environment["ATEN_CPU_CAPABILITY"] = limit
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(expected), limit


# --- files that others wrote run nothing ------------------------------------------------------------------------------

SCRIPTS = [*FILES, *sorted((ROOT / "recipes").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
YAML_LOADERS = {"SafeLoader", "CSafeLoader", "BaseLoader"}


def unsafe_reads(tree: ast.AST) -> list[str]:
    """Say, with its line, what may run code out of a file: unpickling, unsafe YAML, remote code."""
    found = []
    modules: dict[str, str] = {}  # local names of imported modules and functions
    safe_loaders = set(YAML_LOADERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef) and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & (
            YAML_LOADERS
        ):
            safe_loaders.add(node.name)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{node.lineno}: imports {name}" for name in names if name.partition(".")[0] in UNPICKLERS]
        if not isinstance(node, ast.Call):
            continue
        head, _, tail = ast.unparse(node.func).partition(".")
        name = ".".join(filter(None, [modules.get(head, head), tail]))
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        loader = given.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "").rpartition(".")[2]
        wrong = (
            (name in ("torch.load", "torch.serialization.load") and given.get("weights_only") != "True")
            or (name == "numpy.load" and (given.get("allow_pickle", "False") != "False" or len(node.args) > 2))
            or (name in ("yaml.load", "yaml.load_all") and loader not in safe_loaders)
            or (name.startswith("yaml.") and ("unsafe" in name or "full_load" in name))
            or name in ("pandas.read_pickle", "torch.hub.load")
            or given.get("trust_remote_code", "False") != "False"
            or (name.startswith("transformers.Auto") and "trust_remote_code" not in given)  # it would ask the user
        )
        if wrong:
            found.append(f"{node.lineno}: {ast.unparse(node)[:80]}")
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_out_of_a_file_that_is_read(path):
    assert unsafe_reads(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=False)",
        "import torch\ntorch.load(file, weights_only=not True)",
        "import torch as t\nt.load(file, mmap=True)",
        "from torch import load\nload(file)",
        "from torch import load as read\nread(file)",
        "import torch.serialization\ntorch.serialization.load(file)",
        "import pickle",
        "from pickle import load",
        "def f():\n    import dill",
        "import numpy as np\nnp.load(file, allow_pickle=True)",
        "from numpy import load\nload(file, None, True)",
        "import yaml\nyaml.load(file, Loader=yaml.Loader)",
        "import yaml\nyaml.load(file, yaml.UnsafeLoader)",
        "import yaml\nyaml.load(file)",
        "import yaml\nyaml.unsafe_load(file)",
        "import yaml\nclass Own(yaml.FullLoader): pass\nyaml.load(file, Loader=Own)",
        "import pandas as pd\npd.read_pickle(file)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(folder)",
    ],
)
def test_unsafe_reads_are_noticed(code):
    assert len(unsafe_reads(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(file, weights_only=True)",
        "import numpy as np\nnp.load(file)\nnp.load(file, allow_pickle=False)",
        "import yaml\nclass Own(yaml.SafeLoader): pass\nyaml.load(file, Loader=Own)\nyaml.safe_load(file)",
        "import json\njson.load(file)",
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(folder, trust_remote_code=False)",
    ],
)
def test_safe_reads_are_let_through(code):
    assert unsafe_reads(ast.parse(code)) == []


def test_import_brings_torch_and_nothing_heavy():
    script = (
        "import sys, mars_hf\n"
        "heavy = {'transformers', 'accelerate', 'deepspeed', 'triton', 'datasets', 'matplotlib', 'peft', 'tiktoken'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "mars_hf.create, mars_hf.Mars\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_names():
    assert set(mars_hf.__all__) == {
        *("LastGradientCallback", "Mars", "MarsTrainer", "NonFiniteCallback", "NonFiniteError"),
        *("create", "factory", "register", "with_mars"),
    }
    assert all(getattr(mars_hf, name).__doc__ for name in mars_hf.__all__)
