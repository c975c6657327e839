"""Workflows, templates and pins parse, and the files they name exist."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import mars_hf

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
BUILT = ("dist/",)  # made by an earlier step of the same job


def load(path: Path) -> dict[str, Any]:
    """Parse YAML; `on`, which YAML 1.1 reads as true, stays a word."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in content.items()}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def commands(path: Path) -> list[list[str]]:
    """Return the words of every command that a workflow runs."""
    runs = [step["run"] for step in steps(load(path)) if "run" in step]
    return [shlex.split(line) for run in runs for line in run.splitlines()]


def files_named_by(words: list[str]) -> list[str]:
    """Return the words that look like files: with a slash, or with a suffix that files of the repository have."""
    plain = [word for word in words if not word.startswith(("-", ".[")) and " " not in word]
    named = [word for word in plain if "/" in word or re.search(r"\.(py|txt|cfg|toml|ya?ml|md|json)$", word)]
    return [name.partition("::")[0] for name in named if not name.startswith(BUILT)]


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements() -> list[Requirement]:
    """Return what setup.cfg requires of other packages, extras included."""
    texts = [settings()["options"]["install_requires"], *settings()["options.extras_require"].values()]
    lines = [line for text in texts for line in text.strip().splitlines()]
    return [Requirement(line) for line in lines if not line.startswith("mars_hf[")]


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, _, version in (x.partition("==") for x in lines)}


def test_there_are_workflows_and_templates() -> None:
    assert {path.stem for path in WORKFLOWS} == {"lint", "tests", "wheel", "release"}
    assert {path.stem for path in TEMPLATES} == {"bug", "feature", "config"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_complete(path: Path) -> None:
    workflow = load(path)
    assert workflow["name"] == path.stem
    assert workflow["on"]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert ("uses" in job) != ("runs-on" in job and bool(job["steps"]))
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        assert "@" in step.get("uses", "@"), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_name_files_extras_and_markers_that_exist(path: Path) -> None:
    markers = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    for words in commands(path):
        for name in files_named_by(words):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
        for word in words:
            if word.startswith(".["):
                assert set(word[2:-1].split(",")) <= set(settings()["options.extras_require"]), word
        if "pytest" in words and "-m" in words[words.index("pytest") :]:
            expression = words[words.index("-m", words.index("pytest")) + 1]
            assert set(re.findall(r"\w+", expression)) <= {*markers, "not", "and", "or"}, expression


def test_cached_files_exist() -> None:
    named = [
        step["with"]["cache-dependency-path"]
        for path in WORKFLOWS
        for step in steps(load(path))
        if "cache" in step.get("with", {})
    ]
    assert named and all((ROOT / name).is_file() for name in named)


def test_only_publishing_may_ask_for_an_identity() -> None:
    (release,) = (load(path) for path in WORKFLOWS if path.stem == "release")
    asking = [name for name, job in release["jobs"].items() if "id-token" in job.get("permissions", {})]
    assert asking == ["publish"]
    uses = [step.get("uses", "") for step in release["jobs"]["publish"]["steps"]]
    assert uses[-1].startswith("pypa/gh-action-pypi-publish@")
    assert not any("checkout" in used for used in uses)  # no code of the repository runs with that identity
    (build,) = (load(path) for path in WORKFLOWS if path.stem == "wheel")
    sent = [step["with"]["name"] for step in steps(build) if "upload-artifact" in step.get("uses", "")]
    assert sent == [release["jobs"]["publish"]["steps"][0]["with"]["name"]]


def test_contributing_names_the_commands_that_workflows_run() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tests,) = (load(path) for path in WORKFLOWS if path.stem == "tests")
    for job in tests["jobs"].values():
        for step in job["steps"]:
            assert step.get("run", "") in text


def test_python_versions_are_the_supported_ones() -> None:
    (tests,) = (load(path) for path in WORKFLOWS if path.stem == "tests")
    (oldest,) = (step["with"]["python-version"] for step in tests["jobs"]["oldest"]["steps"] if "with" in step)
    newest = tests["jobs"]["newest"]["strategy"]["matrix"]["python-version"]
    assert settings()["options"]["python_requires"] == f">={oldest}"
    classifiers = re.findall(r":: (3\.\d+)$", settings()["metadata"]["classifiers"], re.MULTILINE)
    assert classifiers == [oldest, *newest]
    resolved = (ROOT / ".ci" / "resolve").read_text(encoding="utf-8")
    assert f"for version in {' '.join(newest)}; do resolve constraints.txt" in resolved
    assert f"resolve constraints-oldest.txt {oldest}\n" in resolved


def test_the_floors_are_the_oldest_pins() -> None:
    floors = {}
    for requirement in requirements():
        (floor,) = requirement.specifier
        assert floor.operator == ">=", requirement
        floors[canonicalize_name(requirement.name)] = Version(floor.version)
    assert floors == pins("constraints-oldest.txt")


def test_the_newest_pins_satisfy_every_floor() -> None:
    newest = pins("constraints.txt")
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name in newest:
            assert requirement.specifier.contains(newest[name]), requirement


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CONTRIBUTING.md"])
def test_pages_install_the_pinned_torch(page: str) -> None:
    named = re.findall(r"pip install torch==(\S+)", (ROOT / page).read_text(encoding="utf-8"))
    assert named == [str(pins("constraints.txt")["torch"])]


def test_hooks_run_the_pinned_ruff() -> None:
    revisions = {repo["repo"]: repo.get("rev") for repo in load(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert revisions["https://github.com/astral-sh/ruff-pre-commit"] == f"v{pins('constraints.txt')['ruff']}"


def test_citation_names_this_version_and_both_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert str(citation["version"]) == mars_hf.__version__
    assert citation["license"] == settings()["metadata"]["license"]
    named = {identifier["value"] for paper in citation["references"] for identifier in paper["identifiers"]}
    assert named == {"arXiv:2411.10438", "arXiv:2510.21800"}
    assert all(paper["title"] and paper["authors"] and paper["year"] for paper in citation["references"])
