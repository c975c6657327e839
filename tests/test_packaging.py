"""Workflows, pins, the tests' own processes, and the wheel and the sdist: built, installed and used elsewhere."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import mars_hf

ROOT = Path(__file__).resolve().parents[1]
SOURCES = pytest.Config.ArgsSource


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- workflows --------------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """Parse YAML; `on`, which YAML 1.1 reads as true, stays a word."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in content.items()}


WORKFLOWS = {path.stem: load(path) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job.get("steps", [])]


def test_workflows_and_templates() -> None:
    assert set(WORKFLOWS) == {"lint", "tests", "wheel", "release"}
    templates = {path.stem: load(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert set(templates) == {"bug", "feature", "config"} and all(templates.values())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_is_complete(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["name"] == name and workflow["on"] and workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert ("uses" in job) != ("runs-on" in job and bool(job["steps"]))
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        assert "uses" not in job or (ROOT / job["uses"]).is_file()
    for step in steps(name):
        assert ("run" in step) != ("uses" in step) and "@" in step.get("uses", "@"), step
        assert "cache" not in step.get("with", {}) or (ROOT / step["with"]["cache-dependency-path"]).is_file()


def files_named_by(words: list[str]) -> list[str]:
    """Return the words that look like files: with a slash, or with a suffix that files of the repository have."""
    plain = [word for word in words if not word.startswith(("-", ".[", "dist/")) and " " not in word]
    named = [word for word in plain if "/" in word or re.search(r"\.(py|txt|cfg|toml|ya?ml|md|json)$", word)]
    return [name.partition("::")[0] for name in named]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_commands_name_files_extras_and_markers_that_exist(name: str) -> None:
    markers = re.findall(r'^    "(\w+): ', read("pyproject.toml"), re.MULTILINE)
    for words in (shlex.split(line) for step in steps(name) for line in step.get("run", "").splitlines()):
        assert [file for file in files_named_by(words) if not (ROOT / file).exists()] == []
        extras = {extra for word in words if word.startswith(".[") for extra in word[2:-1].split(",")}
        assert extras <= set(SETTINGS["options.extras_require"])
        if "pytest" in words and "-m" in words[words.index("pytest") :]:
            expression = words[words.index("-m", words.index("pytest")) + 1]
            assert set(re.findall(r"\w+", expression)) <= {*markers, "not", "and", "or"}, expression


def test_only_publishing_may_ask_for_an_identity() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    uses = [step.get("uses", "") for step in jobs["publish"]["steps"]]
    assert uses[-1].startswith("pypa/gh-action-pypi-publish@")
    assert not any("checkout" in used for used in uses)  # no code of the repository runs with that identity
    sent = [step["with"]["name"] for step in steps("wheel") if "upload-artifact" in step.get("uses", "")]
    assert sent == [jobs["publish"]["steps"][0]["with"]["name"]]


def test_contributing_names_the_commands_that_workflows_run() -> None:
    assert [step["run"] for step in steps("tests") if step.get("run", "") not in read("CONTRIBUTING.md")] == []


# --- versions ---------------------------------------------------------------------------------------------------------

SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")


def pins(name: str) -> dict[str, Version]:
    lines = [line.split("==") for line in read(name).splitlines() if not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in lines}


def test_python_versions_are_the_supported_ones() -> None:
    jobs = WORKFLOWS["tests"]["jobs"]
    (oldest,) = (step["with"]["python-version"] for step in jobs["oldest"]["steps"] if "with" in step)
    newest = jobs["newest"]["strategy"]["matrix"]["python-version"]
    assert SETTINGS["options"]["python_requires"] == f">={oldest}"
    classifiers = re.findall(r":: (3\.\d+)$", SETTINGS["metadata"]["classifiers"], re.MULTILINE)
    assert classifiers == [oldest, *newest]
    assert f"for version in {' '.join(newest)}; do resolve constraints.txt" in read(".ci/resolve")
    assert f"resolve constraints-oldest.txt {oldest}\n" in read(".ci/resolve")


def test_floors_are_the_oldest_pins_and_the_newest_satisfy_them() -> None:
    floors, newest = {}, pins("constraints.txt")
    texts = [SETTINGS["options"]["install_requires"], *SETTINGS["options.extras_require"].values()]
    for requirement in (Requirement(line) for text in texts for line in text.split("\n") if line.strip()):
        name = canonicalize_name(requirement.name)
        if name == "mars-hf":
            continue
        (floor,) = requirement.specifier
        assert floor.operator == ">=" and (name not in newest or floor.contains(newest[name])), requirement
        floors[name] = Version(floor.version)
    assert floors == pins("constraints-oldest.txt")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CONTRIBUTING.md"])
def test_pages_install_the_pinned_torch(page: str) -> None:
    assert re.findall(r"pip install torch==(\S+)", read(page)) == [str(pins("constraints.txt")["torch"])]


def test_hooks_run_the_pinned_ruff() -> None:
    revisions = {repo["repo"]: repo.get("rev") for repo in load(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert revisions["https://github.com/astral-sh/ruff-pre-commit"] == f"v{pins('constraints.txt')['ruff']}"


def test_citation_names_this_version_and_both_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert str(citation["version"]) == mars_hf.__version__
    assert citation["license"] == SETTINGS["metadata"]["license"]
    named = {identifier["value"] for paper in citation["references"] for identifier in paper["identifiers"]}
    assert named == {"arXiv:2411.10438", "arXiv:2510.21800"}
    assert all(paper["title"] and paper["authors"] and paper["year"] for paper in citation["references"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2),  # a run of all tests takes every core
        ({"source": SOURCES.ARGS}, None),
        ({"worker": "gw0"}, None),
        ({"plugin": False}, None),
        ({"usepdb": True}, None),
        ({"numprocesses": 3}, 3),
    ],
    ids=str,
)
def test_processes_of_a_test_run(pytestconfig, monkeypatch, changes, expected) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if "worker" in changes:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", changes["worker"])
    option = SimpleNamespace(**{"usepdb": False, "numprocesses": None, "dist": "no", **changes})
    manager = SimpleNamespace(hasplugin=lambda name: changes.get("plugin", True))
    config = SimpleNamespace(option=option, args_source=changes.get("source", SOURCES.TESTPATHS), pluginmanager=manager)
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    conftest.pytest_cmdline_main(config)
    assert option.numprocesses == expected


# --- the wheel and the sdist ------------------------------------------------------------------------------------------


class Distributions(NamedTuple):
    """One build of the repository."""

    wheel: Path
    sdist: Path


def run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Run a command without this process's PYTHONPATH and return its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-6000:]
    return finished.stdout


def repository_files() -> list[str]:
    """Return the files git tracks or would track, without what earlier builds left."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository, so that old egg-info or build folders cannot affect the build."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    copy = tmp_path_factory.mktemp("source")
    for name in repository_files():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    return copy


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build the sdist, and the wheel from the unpacked sdist."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    assert len(list(out.iterdir())) == 2
    return Distributions(wheel, sdist)


@pytest.fixture(scope="module")
def python(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment: the wheel first, then this one's packages without editable installs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    place = {"base": str(folder), "platbase": str(folder)}
    binary = Path(sysconfig.get_path("scripts", "venv", place)) / Path("python").with_suffix(
        Path(sys.executable).suffix
    )
    install = [sys.executable, "-m", "pip", "--python", binary, "install", "--quiet", "--no-deps", "--no-index"]
    run([*install, built.wheel], folder)
    # Only now: otherwise pip could replace this environment's mars_hf. Paths in a .pth file come after
    # the environment's own packages, and .pth files behind it, which editable installs use, are not read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    site = Path(sysconfig.get_path("purelib", "venv", place))
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return binary


@pytest.mark.slow
def test_built_files(source: Path, built: Distributions) -> None:
    """Both have everything, and the wheel nothing else."""
    said = run([sys.executable, "-m", "twine", "check", "--strict", *built], built.wheel.parent)
    assert said.count("PASSED") == 2
    package = {path.relative_to(source).as_posix() for path in (source / "mars_hf").rglob("*") if path.is_file()}
    package |= {f"mars_hf/accelerate_configs/{path.name}" for path in (source / "accelerate_configs").iterdir()}
    with zipfile.ZipFile(built.wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}
    assert found == package
    # The comparison is with the repository; these must be in both.
    assert {"mars_hf/py.typed", "mars_hf/accelerate_configs/zero2_offload.yaml"} <= found
    assert any(name.endswith(".cpp") for name in found)
    with tarfile.open(built.sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert set(repository_files()) - found <= {".gitignore"}


@pytest.mark.slow
def test_installed_package_steps_with_its_own_kernels(python: Path, tmp_path: Path) -> None:
    """With gamma 0 and no clipping MARS equals PyTorch's AdamW."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("needs a C++ compiler")
    script = tmp_path / "step.py"
    script.write_text(
        "import pathlib, sys, torch, mars_hf\n"
        "assert pathlib.Path(sys.prefix) in pathlib.Path(mars_hf.__file__).parents, mars_hf.__file__\n"
        "torch.manual_seed(0)\n"
        "ours, theirs = (torch.nn.Parameter(torch.ones(40, 30)) for _ in range(2))\n"
        "settings = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)\n"
        "mars = mars_hf.Mars([ours], gamma=0.0, clip_threshold=None, fused=True, **settings)\n"
        "adamw = torch.optim.AdamW([theirs], **settings)\n"
        "for _ in range(3):\n"
        "    ours.grad = torch.randn(40, 30)\n"
        "    theirs.grad = ours.grad.clone()\n"
        "    mars.step(), adamw.step()\n"
        "torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)\n"
        "mars = mars_hf.Mars([ours], fused=True)\n"
        "mars.step()\n"
        "assert not torch.equal(ours, theirs)\n"
    )
    cache = tmp_path / "cache"
    run([python, "-I", script], tmp_path, XDG_CACHE_HOME=str(cache))
    assert list(cache.glob("mars_hf/*.so")), "no kernel was compiled from the installed source"


@pytest.mark.slow
def test_installed_commands(python: Path, tmp_path: Path) -> None:
    assert "to_universal" in run([python, "-I", "-m", "mars_hf", "--help"], tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "from transformers import TrainingArguments\n"
        "print(TrainingArguments('out', optim='mars_adamw', use_cpu=True, report_to=[]).optim.value)\n"
    )
    assert "mars_adamw" in run([python, "-I", "-m", "mars_hf", "run", script], tmp_path)
    folder = Path(run([python, "-I", "-m", "mars_hf", "configs"], tmp_path).splitlines()[-1])
    assert python.parents[1] in folder.parents
    installed, configs = (
        {path.name: path.read_bytes() for path in place.glob("*.yaml")}
        for place in (folder, ROOT / "accelerate_configs")
    )
    assert installed == configs != {}
