"""Compile the package's C++ file with the machine's compiler, and keep the library in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
# No contraction: every operation rounds on its own wherever it is inlined, so equal expressions give equal bits. A step
# is bound by memory, so this costs nothing.
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-fPIC", "-shared", "-Wl,--as-needed"),
)
# By the processor's capability as PyTorch reports it; wider vectors do not make memory faster.
X86_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}
TIMEOUT = 120.0  # seconds; the kernels need two


def load(source: Path) -> ctypes.CDLL:
    """Load the library of a C++ file: from the user's cache, or compiled now and cached for later runs.

    Raises:
        RuntimeError: no compiler, or it failed.
        OSError: no temporary folder can hold the library.
    """
    if os.name != "posix":
        raise RuntimeError("the kernels compile on Linux and macOS only")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    vectors = X86_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()) if is_x86 else ()
    command = [*find_compiler(), *FLAGS, *vectors, str(source), *_openmp()]
    key = repr([command, source.read_bytes(), torch.__version__, platform.machine(), platform.libc_ver()])
    name = f"{source.stem}_{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with contextlib.suppress(OSError):  # not cached yet, or damaged
        return ctypes.CDLL(str(_cache_folder() / name))
    with tempfile.TemporaryDirectory(prefix="mars_hf-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / name
        _compile([*command, "-o", str(library)])
        try:
            cached = _cache_folder() / name
            with tempfile.TemporaryDirectory(dir=cached.parent) as partial:
                os.replace(shutil.copyfile(library, Path(partial) / name), cached)  # whole at once
            return ctypes.CDLL(str(cached))
        except OSError as error:  # read-only, full, noexec, or not private
            logger.warning("Compiled kernels cannot be cached: %s; XDG_CACHE_HOME can name another folder.", error)
        return ctypes.CDLL(str(library))  # the process keeps what it has loaded; the file may go


def find_compiler() -> list[str]:
    """Return the compile command: the environment's CXX, split as in a shell, or the first of `COMPILERS` on the PATH.

    Raises:
        RuntimeError: no compiler is on the PATH, or the quotes in CXX do not match.
    """
    cxx = os.environ.get("CXX", "").strip()
    try:
        # A path with spaces is a file; a command with arguments is not.
        commands = [[cxx] if shutil.which(cxx) else shlex.split(cxx)] if cxx else [[name] for name in COMPILERS]
    except ValueError as error:
        raise RuntimeError(f"CXX={cxx!r} is not a command ({error}); accepted: such as 'ccache g++ -O2'") from None
    for name, *arguments in commands:
        if path := shutil.which(name):
            return [path, *arguments]
    names = ", ".join(name for name, *_ in commands)
    raise RuntimeError(f"no C++ compiler ({names}) is on the PATH; install one, or set CXX")


def _cache_folder() -> Path:
    """Return the user's folder of libraries, made if missing.

    Raises OSError if that cannot be, or if others could write it: its libraries run as this user.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "mars_hf"
    if not folder.is_absolute():
        raise FileNotFoundError("the home folder is not known")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only you can use (mode 700)")
    return folder


def _compile(command: list[str]) -> None:
    # Output goes to a file: a server that the compiler starts (sccache) would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"the compiler cannot be run: {error}") from None
        output.seek(0)
        text = " ".join(output.read().decode("utf-8", "replace").split())[:400]
    if run.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed with status {run.returncode}: {text}")


def _openmp() -> list[str]:
    """Return the OpenMP library that PyTorch ships, if any: a second one would start its own threads."""
    root = Path(torch.__file__).parent
    folders = (root / "lib", root.parent / "torch.libs")
    return [str(path) for folder in folders for path in sorted(folder.glob("libgomp*.so*"))][:1]
