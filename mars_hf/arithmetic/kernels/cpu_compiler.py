"""Compile the package's C++ files into libraries, once per machine, with the compiler found there."""

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
# No contraction: every operation rounds on its own wherever it is inlined, so equal expressions give equal bits. A step
# is bound by memory, so this costs nothing.
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-fPIC", "-shared", "-Wl,--as-needed"),
)
# By the processor's capability as PyTorch reports it; wider vectors do not make memory faster.
X86_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}


def load(source: Path) -> ctypes.CDLL:
    """Compile a C++ file with OpenMP, unless the library is cached, and load it.

    `folder()` caches libraries by source, compile command (all arguments in CXX included) and C library: different
    machines and containers may share a home.

    Args:
        source: path of the file; it needs only the compiler's own headers.

    Raises:
        RuntimeError: no compiler, or it failed; the message has its output.
    """
    command = [*find(), *FLAGS, *_instructions(), str(source), *_openmp()]
    place = (platform.machine(), platform.libc_ver())
    key = hashlib.sha256(repr([command, place, source.read_text()]).encode()).hexdigest()[:16]
    library = folder() / f"{source.stem}_{key}.so"
    if not library.exists():
        # Several processes may compile at once: each makes its own library, and the last one stays.
        with tempfile.TemporaryDirectory(dir=library.parent) as own:
            made = Path(own) / library.name
            _run([*command, "-o", str(made)])
            made.replace(library)
    return ctypes.CDLL(str(library))


def find() -> list[str]:
    """Return the C++ compile command: the environment's CXX, or the first of `COMPILERS` on the PATH.

    CXX may be the path of a compiler, spaces included, or a command with arguments, split as in a shell:
    `ccache g++ -O2`. Its arguments come before `FLAGS`, which win where both set the same option.

    Raises:
        RuntimeError: no compiler is on the PATH, or the quotes in CXX do not match.
    """
    given = os.environ.get("CXX", "").strip()
    commands = [[name] for name in COMPILERS]
    if given:
        # An unquoted path with spaces is a file; a command with arguments is not.
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
    """Return the library cache: mars_hf in $XDG_CACHE_HOME or ~/.cache, or a folder of this process alone."""
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
    """Return the OpenMP library that PyTorch ships, if any: a second one would start its own threads."""
    root = Path(torch.__file__).parent
    places = (root / "lib", root.parent / "torch.libs")
    found = [str(path) for place in places for path in sorted(place.glob("libgomp*.so*"))]
    return found[:1]
