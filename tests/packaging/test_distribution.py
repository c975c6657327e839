"""The wheel and the sdist: built, checked, installed into a clean environment and used outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


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


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_twine_accepts_both(built: Distributions) -> None:
    said = run([sys.executable, "-m", "twine", "check", "--strict", *built], built.wheel.parent)
    assert said.count("PASSED") == 2


def test_the_wheel_has_the_whole_package_and_nothing_else(source: Path, built: Distributions) -> None:
    package = {path.relative_to(source).as_posix() for path in (source / "mars_hf").rglob("*") if path.is_file()}
    configs = (path for path in (source / "accelerate_configs").rglob("*") if path.is_file())
    package |= {f"mars_hf/{path.relative_to(source).as_posix()}" for path in configs}
    found = {name for name in wheel_files(built.wheel) if ".dist-info/" not in name}
    assert found == package
    # The comparison is with the repository; these must be in both.
    assert {"mars_hf/py.typed", "mars_hf/accelerate_configs/zero2_offload.yaml"} <= found
    assert any(name.endswith(".cpp") for name in found)


def test_the_sdist_has_every_file_of_the_repository(source: Path, built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert set(repository_files()) - found <= {".gitignore"}


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


def test_installed_package_has_its_command_line(python: Path, tmp_path: Path) -> None:
    assert "to_universal" in run([python, "-I", "-m", "mars_hf", "--help"], tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "from transformers import TrainingArguments\n"
        "print(TrainingArguments('out', optim='mars_adamw', use_cpu=True, report_to=[]).optim.value)\n"
    )
    assert "mars_adamw" in run([python, "-I", "-m", "mars_hf", "run", script], tmp_path)


def test_installed_launch_configs_are_beside_the_package(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "configs.py"
    script.write_text(
        "import importlib.resources as resources\n"
        "from accelerate.commands.config.config_args import load_config_from_file\n"
        "folder = resources.files('mars_hf') / 'accelerate_configs'\n"
        "for path in folder.glob('*.yaml'):\n"
        "    print(path.name, load_config_from_file(str(path)).distributed_type.value)\n"
    )
    lines = sorted(run([python, "-I", script], tmp_path).split("\n"))
    names = {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {line.split()[0] for line in lines if line.endswith(("NO", "MULTI_GPU", "FSDP", "DEEPSPEED"))} == names
