"""Workflows, pins, and the wheel and the sdist: built, installed and used elsewhere."""

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
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import mars_hf

ROOT = Path(__file__).resolve().parents[1]


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
    """They are complete, and their commands name files, extras and markers that exist."""
    assert set(WORKFLOWS) == {"lint", "tests", "wheel", "release"}
    templates = {path.stem: load(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert set(templates) == {"bug", "feature", "config"} and all(templates.values())
    markers = re.findall(r'^    "(\w+): ', read("pyproject.toml"), re.MULTILINE)
    for name, workflow in WORKFLOWS.items():
        assert workflow["name"] == name and workflow["on"] and workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert ("uses" in job) != ("runs-on" in job and bool(job["steps"]))
            assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
            assert "uses" not in job or (ROOT / job["uses"]).is_file()
        for step in steps(name):
            assert ("run" in step) != ("uses" in step) and "@" in step.get("uses", "@"), step
            assert "cache" not in step.get("with", {}) or (ROOT / step["with"]["cache-dependency-path"]).is_file()
            for line in step.get("run", "").splitlines():
                plain = [word for word in shlex.split(line) if not re.match(r"-|\.\[|dist/|.* ", word)]
                files = [word for word in plain if re.search(r"/|\.(py|txt|cfg|toml|ya?ml|md|json)$", word)]
                assert [file for file in files if not (ROOT / file.partition("::")[0]).exists()] == []
                for extras in re.findall(r"\.\[([\w,]+)\]", line):
                    assert set(extras.split(",")) <= set(SETTINGS["options.extras_require"])
                for expression in re.findall(r'pytest -m "([^"]+)"', line):
                    assert set(re.findall(r"\w+", expression)) <= {*markers, "not", "and", "or"}
    assert [step["run"] for step in steps("tests") if step.get("run", "") not in read("CONTRIBUTING.md")] == []


def test_only_publishing_may_ask_for_an_identity() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    uses = [step.get("uses", "") for step in jobs["publish"]["steps"]]
    assert uses[-1].startswith("pypa/gh-action-pypi-publish@")
    assert not any("checkout" in used for used in uses)  # no code of the repository runs with that identity
    sent = [step["with"]["name"] for step in steps("wheel") if "upload-artifact" in step.get("uses", "")]
    assert sent == [jobs["publish"]["steps"][0]["with"]["name"]]


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


def test_pages_and_hooks_have_the_pinned_versions() -> None:
    newest = pins("constraints.txt")
    for page in ("README.md", "docs/index.md", "CONTRIBUTING.md"):
        assert re.findall(r"pip install torch==(\S+)", read(page)) == [str(newest["torch"])], page
    revisions = {repo["repo"]: repo.get("rev") for repo in load(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert revisions["https://github.com/astral-sh/ruff-pre-commit"] == f"v{newest['ruff']}"


def test_citation_names_this_version_and_both_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert str(citation["version"]) == mars_hf.__version__
    assert citation["license"] == SETTINGS["metadata"]["license"]
    named = {identifier["value"] for paper in citation["references"] for identifier in paper["identifiers"]}
    assert named == {"arXiv:2411.10438", "arXiv:2510.21800"}
    assert all(paper["title"] and paper["authors"] and paper["year"] for paper in citation["references"])


# --- the wheel and the sdist ------------------------------------------------------------------------------------------


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
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist of a copy, without old egg-info or build folders, and the wheel from the unpacked sdist."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in repository_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], out)
    sdist, wheel = sorted(out.iterdir(), key=lambda path: path.suffix)
    return wheel, sdist


@pytest.mark.slow
def test_built_files(built: tuple[Path, Path]) -> None:
    """Both have everything, and the wheel nothing else."""
    wheel, sdist = built
    assert run([sys.executable, "-m", "twine", "check", "--strict", *built], wheel.parent).count("PASSED") == 2
    files = set(repository_files())
    package = {name for name in files if name.startswith("mars_hf/")}
    package |= {f"mars_hf/{name}" for name in files if name.startswith("accelerate_configs/")}
    assert {"mars_hf/py.typed", "mars_hf/kernels/cpu.cpp", "mars_hf/accelerate_configs/zero2_offload.yaml"} <= package
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name} == package
    with tarfile.open(sdist) as archive:
        assert files - {member.name.partition("/")[2] for member in archive.getmembers()} <= {".gitignore"}


# With gamma 0 and no clipping MARS equals PyTorch's AdamW; TrainingArguments know MARS under `run`.
SCRIPT = """
import pathlib, sys, torch, mars_hf
from transformers import TrainingArguments
assert pathlib.Path(sys.prefix) in pathlib.Path(mars_hf.__file__).parents, mars_hf.__file__
torch.manual_seed(0)
ours, theirs = (torch.nn.Parameter(torch.ones(40, 30)) for _ in range(2))
settings = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
mars = mars_hf.Mars([ours], gamma=0.0, clip_threshold=None, fused=True, **settings)
adamw = torch.optim.AdamW([theirs], **settings)
for _ in range(3):
    ours.grad = torch.randn(40, 30)
    theirs.grad = ours.grad.clone()
    mars.step(), adamw.step()
torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
mars = mars_hf.Mars([ours], fused=True)
mars.step()
assert not torch.equal(ours, theirs)
print(TrainingArguments('out', optim='mars_adamw', use_cpu=True, report_to=[]).optim.value)
"""


@pytest.mark.slow
def test_installed_package(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In a new environment: the wheel first, then this one's packages without editable installs."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("needs a C++ compiler")
    folder, cache, script = tmp_path / "environment", tmp_path / "cache", tmp_path / "script.py"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    place = {"base": str(folder), "platbase": str(folder)}
    name = Path("python").with_suffix(Path(sys.executable).suffix)
    python = Path(sysconfig.get_path("scripts", "venv", place)) / name
    run(
        [sys.executable, "-m", "pip", "--python", python, *"install --quiet --no-deps --no-index".split(), built[0]],
        folder,
    )
    # Only now: otherwise pip could replace this environment's mars_hf. Paths in a .pth file come after
    # the environment's own packages, and .pth files behind it, which editable installs use, are not read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(sysconfig.get_path("purelib", "venv", place)) / "others.pth").write_text("\n".join(others) + "\n")
    script.write_text(SCRIPT)
    command = [python, "-I", "-m", "mars_hf"]
    assert "mars_adamw" in run([*command, "run", script], tmp_path, XDG_CACHE_HOME=str(cache))
    assert list(cache.glob("mars_hf/*.so")), "no kernel was compiled from the installed source"
    assert "to_universal" in run([*command, "--help"], tmp_path)
    configs = Path(run([*command, "configs"], tmp_path).splitlines()[-1])
    assert folder in configs.parents
    installed = {path.name: path.read_bytes() for path in configs.glob("*.yaml")}
    assert installed == {path.name: path.read_bytes() for path in (ROOT / "accelerate_configs").glob("*.yaml")} != {}
