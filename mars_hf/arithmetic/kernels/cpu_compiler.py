"""C++ files of this package as libraries: compiled once a machine, by the compiler that is there."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

COMPILERS = ("g++", "clang++", "c++")
# Every operation is rounded on its own, in whatever it is inlined: equal expressions give equal bits. Memory is what a
# step waits for, so that this costs nothing.
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-fPIC", "-shared", "-Wl,--as-needed"),
)
# Instructions by what PyTorch has found this processor to have; wider vectors do not make memory faster.
X86_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}


def load(source: Path) -> ctypes.CDLL:
    """Compile a C++ file with OpenMP, unless that has been done before, and load it.

    Libraries are kept in `folder()`, by their source, the command that made them, with all arguments in CXX, and the C
    library they are made for: a home may be shared by machines and containers that differ.

    Args:
        source: needs no headers but those of the compiler.

    Raises:
        RuntimeError: there is no compiler, or it failed; with what it said.
    """
    command = [*find(), *FLAGS, *_instructions(), str(source), *_openmp()]
    place = (platform.machine(), platform.libc_ver())
    key = hashlib.sha256(repr([command, place, source.read_text()]).encode()).hexdigest()[:16]
    library = folder() / f"{source.stem}_{key}.so"
    if not library.exists():
        # Several processes may be here at once: each makes its own, and the last one stays.
        with tempfile.TemporaryDirectory(dir=library.parent) as own:
            made = Path(own) / library.name
            _run([*command, "-o", str(made)])
            made.replace(library)
    return ctypes.CDLL(str(library))


def find() -> list[str]:
    """Return the command that compiles C++: CXX of the environment, or the first of `COMPILERS` on the PATH.

    CXX may be the path of a compiler, spaces included, or a command as a shell would split it: `ccache g++ -O2`. Its
    arguments come before `FLAGS`, which override them where both set the same option.

    Raises:
        RuntimeError: no compiler is on the PATH, or the quotes in CXX do not match.
    """
    given = os.environ.get("CXX", "").strip()
    commands = [[name] for name in COMPILERS]
    if given:
        # Unquoted paths with spaces have always worked; a command with arguments is no file.
        commands = [[given]] if shutil.which(given) else [_split(given)]
    for name, *arguments in commands:
        path = shutil.which(name)
        if path:
            return [path, *arguments]
    names = ", ".join(name for name, *_ in commands)
    raise RuntimeError(f"no C++ compiler ({names}) is on the PATH; install one, or set CXX")


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command) or [command]
    except ValueError as error:
        raise RuntimeError(
            f"CXX={command!r} cannot be split into words ({error}); accepted: a compiler and its arguments, quoted as "
            "in a shell, such as 'ccache g++ -O2'"
        ) from None


def folder() -> Path:
    """Where libraries are kept: mars_hf in the user's cache ($XDG_CACHE_HOME, ~/.cache), or one for this process."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "mars_hf"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    own = Path(tempfile.mkdtemp(prefix="mars_hf_"))  # nobody else can write into it
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip()[:400]
        raise RuntimeError(f"{' '.join(command)} failed with status {error.returncode}: {said}") from None
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from None


def _instructions() -> tuple[str, ...]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    return X86_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())


def _openmp() -> list[str]:
    """PyTorch's own OpenMP library, if it brings one: with another one there would be two sets of threads."""
    root = Path(torch.__file__).parent
    places = (root / "lib", root.parent / "torch.libs")
    found = [str(path) for place in places for path in sorted(place.glob("libgomp*.so*"))]
    return found[:1]
