"""Workflows, pins, and the wheel and the sdist: built, installed and used elsewhere."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import mutations
import pytest
import yaml
from helpers import needs_compiler
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import mars_hf
from mars_hf.compare import page as comparison_page

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- mutations.yaml ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_mutation_applies() -> None:
    """After a change of a symbol's name or code, mutations.yaml names the new one; the list says which are stale."""
    assert mutations.stale() == []


CODE = """
RATE = 0.1

class Optimizer:
    @property
    def rate(self):
        return RATE

    @rate.setter
    def rate(self, value):
        check(value)
        self._rate = value

    def step(self, params):
        \"\"\"Step.\"\"\"
        self.begin(len(params), eps=1e-8)
        if params and self.ready and len(params) > 1:
            rules.update(params, 3)
        return [p for p in params if p.grad is not None]
"""


@pytest.mark.parametrize(
    ("name", "what", "old", "new"),
    [
        ("RATE", "replace `0.1` by `0.2`", "RATE = 0.1", "RATE = 0.2"),
        ("Optimizer.rate", "replace `RATE` by `-RATE`", "return RATE", "return -RATE"),
        ("Optimizer.rate.setter", "delete the call of check", "check(value)", "pass"),
        ("Optimizer.rate.setter", "delete `self._rate = value`", "self._rate = value", "pass"),
        ("Optimizer.step", "delete the call of rules.update", "rules.update(params, 3)", "pass"),
        ("Optimizer.step", "drop `self.ready`", "params and self.ready and", "params and"),
        ("Optimizer.step", "drop `p.grad is not None`", " if p.grad is not None]", "]"),
        ("Optimizer.step", "drop `3`", "(params, 3)", "(params)"),
        ("Optimizer.step", "give begin `0` as argument 0", "len(params), eps", "0, eps"),
        ("Optimizer.step", "give self.begin `0.0` as eps", "1e-08", "0.0"),
        ("Optimizer.step", "compare `1` by >=", "> 1", ">= 1"),
        ("Optimizer.step", "negate the comparison with `p.grad`", "if p.grad is not None", "if not p.grad is not None"),
        ("Optimizer", "replace `self._rate = value` by `self._rate = 1`", "_rate = value", "_rate = 1"),
        ("Optimizer.step", "return `[]` at once", '"""Step."""', '"""Step."""\n        return []'),
    ],
)
def test_operators_of_mutations(tmp_path: Path, name: str, what: str, old: str, new: str) -> None:
    (tmp_path / "mars_hf").mkdir()
    path = tmp_path / "mars_hf" / "toy.py"
    path.write_text(CODE)
    file, text = mutations.mutated(tmp_path, f"toy.{name}", {"do": what})
    plain = ast.unparse(ast.parse(CODE))
    assert file == path and plain.count(old) == 1
    assert text == ast.unparse(ast.parse(plain.replace(old, new))) + "\n"


@pytest.mark.parametrize(
    ("place", "what", "reason"),
    [
        ("toy.Optimizer.end", "delete the call of check", "0 definitions of end"),
        ("toy.Optimizer.step", "delete the call of check", "0 times: a statement that calls check"),
        ("toy.Optimizer.step", "replace `params` by `()`", "5 times: params"),
        ("toy.RATE", "drop `0.1`", "not one of several: 0.1"),
        ("gone.step", "drop `0.1`", "no module for gone.step"),
    ],
)
def test_stale_mutations(tmp_path: Path, place: str, what: str, reason: str) -> None:
    (tmp_path / "mars_hf").mkdir()
    (tmp_path / "mars_hf" / "toy.py").write_text(CODE)
    with pytest.raises(mutations.StaleError, match=reason):
        mutations.mutated(tmp_path, place, {"do": what})


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
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    lines = [line for name in WORKFLOWS for step in steps(name) for line in step.get("run", "").splitlines()]
    plain = [word for line in lines for word in shlex.split(line) if not re.match(r"-|\.\[|dist/|.* ", word)]
    files = [word for word in plain if re.search(r"/|\.(py|txt|cfg|toml|ya?ml|md|json)$", word)]
    assert files and [file for file in files if not (ROOT / file.partition("::")[0]).exists()] == []
    caches = [step["with"] for name in WORKFLOWS for step in steps(name) if "cache" in step.get("with", {})]
    assert all((ROOT / cache["cache-dependency-path"]).is_file() for cache in caches)
    extras = re.findall(r"\.\[([\w,]+)\]", " ".join(lines))
    assert set(",".join(extras).split(",")) <= set(SETTINGS["options.extras_require"])
    markers = re.findall(r'^    "(\w+): ', read("pyproject.toml"), re.MULTILINE)
    expressions = re.findall(r'pytest -m "([^"]+)"', " ".join(lines))
    assert set(re.findall(r"\w+", " ".join(expressions))) <= {*markers, "not", "and", "or"}
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


def test_version_floors() -> None:
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


def test_version_follows_the_changelog() -> None:
    """Unreleased changes have a version of development, later than the last release."""
    titles = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    last = Version(next(title.partition(" - ")[0] for title in titles if title != "Unreleased"))
    ours = Version(mars_hf.__version__)
    assert ours.is_devrelease == (titles[0] == "Unreleased")
    assert ours > last if ours.is_devrelease else ours == last


def test_pages_and_results_have_this_version() -> None:
    assert re.findall(r"\*\*Status: beta\*\*, version (\S+)\. ", read("README.md")) == [mars_hf.__version__]
    assert SETTINGS["metadata"]["version"] == "attr: mars_hf.__version__"
    assert comparison_page.describe_machine()["mars_hf"] == mars_hf.__version__


def test_citation_names_this_version_and_both_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == mars_hf.__version__
    assert citation["license"] == SETTINGS["metadata"]["license_expression"]
    named = {identifier["value"] for paper in citation["references"] for identifier in paper["identifiers"]}
    assert named == {"arXiv:2411.10438", "arXiv:2510.21800"}


# --- the wheel and the sdist ------------------------------------------------------------------------------------------


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Run a command without this process's PYTHONPATH and return its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    words = [sys.executable, "-m", *map(str, command)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    finished = subprocess.run(words, cwd=folder, env={**kept, **variables}, **output)
    assert finished.returncode == 0, finished.stdout[-6000:]
    return finished.stdout


REPOSITORY = "https://example.org/somebody/mars_hf"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """Build the sdist of a copy, without old egg-info or build folders, and the wheel from it; return both, and names.

    The names are those of the repository's files.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    mutations.copy_tree(source)
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    run("build", "--no-isolation", "--outdir", out, source, folder=out, REPOSITORY_URL=REPOSITORY)
    sdist, wheel = sorted(out.iterdir(), key=lambda path: path.suffix)
    return wheel, sdist, names


@pytest.mark.slow
def test_built_files(built: tuple[Path, Path, set[str]]) -> None:
    """Both have everything, and the wheel nothing else."""
    wheel, sdist, files = built
    assert run("twine", "check", "--strict", wheel, sdist, folder=wheel.parent).count("PASSED") == 2
    package = {name for name in files if name.startswith("mars_hf/")}
    package |= {f"mars_hf/{name}" for name in files if name.startswith("accelerate_configs/")}
    assert {"mars_hf/py.typed", "mars_hf/kernels/cpu.cpp", "mars_hf/accelerate_configs/zero2_offload.yaml"} <= package
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name} == package
    with tarfile.open(sdist) as archive:
        assert files - {member.name.partition("/")[2] for member in archive.getmembers()} <= {".gitignore"}


@pytest.mark.slow
def test_metadata_of_built_files(built: tuple[Path, Path, set[str]]) -> None:
    """The description has no relative link, and every file that it links to exists."""
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert {"Paper", "Source", "Documentation", "Changelog", "Issues"} <= {*urls}
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert links and all(link.startswith("https://") for link in links)
    ours = [link for link in [*urls.values(), *links] if link.startswith(REPOSITORY) and "HEAD" in link]
    assert len(ours) > 15
    for link in ours:
        assert (ROOT / link.partition("/HEAD/")[2].partition("#")[0]).exists(), link


# With gamma 0 and no clipping MARS equals PyTorch's AdamW; TrainingArguments know MARS under `run`.
SCRIPT = """
import torch, mars_hf
from transformers import TrainingArguments
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
print(mars_hf.__file__, TrainingArguments('out', optim='mars_adamw', use_cpu=True, report_to=[]).optim.value)
"""


@needs_compiler
@pytest.mark.slow
def test_installed_package(built: tuple[Path, Path, set[str]], tmp_path: Path) -> None:
    """In a folder that Python reads before this environment's packages."""
    folder, cache, script = tmp_path / "installed", tmp_path / "cache", tmp_path / "script.py"
    run("pip", *"install --quiet --no-deps --no-index --target".split(), folder, built[0], folder=tmp_path)
    script.write_text(SCRIPT)
    place = {"folder": tmp_path, "PYTHONPATH": str(folder)}
    printed = run("mars_hf", "run", script, **place, XDG_CACHE_HOME=str(cache))
    assert f"{folder / 'mars_hf' / '__init__.py'} mars_adamw\n" in printed
    assert list(cache.glob("mars_hf/*.so")), "no kernel was compiled from the installed source"
    assert "to_universal" in run("mars_hf", "--help", **place)
    configs = Path(run("mars_hf", "configs", **place).splitlines()[-1])
    assert folder in configs.parents
    installed = {path.name: path.read_bytes() for path in configs.glob("*.yaml")}
    assert installed == {path.name: path.read_bytes() for path in (ROOT / "accelerate_configs").glob("*.yaml")} != {}
