"""Compile the package's C++ files into libraries, once per machine, with the compiler found there."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
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

# How many seconds a compile may take: the variable that sets it, and its default. Our kernels need two.
PATIENCE = "MARS_HF_COMPILE_TIMEOUT"
DEFAULT_SECONDS = 120.0


def load(source: Path) -> ctypes.CDLL:
    """Compile a C++ file with OpenMP, unless the library is cached, and load it.

    `library_cache` keeps libraries by source, compile command (all arguments in CXX included) and C library: different
    machines and containers may share a home. Several processes may compile at once.

    Args:
        source: path of the file; it needs only the compiler's own headers.

    Raises:
        RuntimeError: no compiler, it failed, it took too long, or no folder can hold what it makes; the message says
            which, and has its output.
    """
    try:
        from mars_hf.arithmetic.kernels import library_cache as cache
    except ImportError as error:  # no fcntl
        raise RuntimeError(f"libraries are kept on Linux and macOS only ({error})") from None
    command = [*find(), *FLAGS, *_instructions(), str(source), *_openmp()]
    place = (platform.machine(), platform.libc_ver())
    key = hashlib.sha256(repr([command, place, source.read_bytes()]).encode()).hexdigest()[:16]
    name = f"{source.stem}_{key}"
    reasons = []
    try:
        for folder in cache.existing_folders():
            library = folder.load(name)
            if library is not None:
                return library
        for folder in cache.new_folders():
            try:
                with cache.workplace(folder.path) as own:
                    made = own / "library.so"
                    _run([*command, "-o", str(made)], own)
                    return folder.keep(name, made)
            except OSError as error:  # full, read-only, or mounted without the right to run what is in it
                reasons.append(f"{folder.path}: {error}")
    except OSError as error:
        reasons.append(str(error))
    raise RuntimeError(
        f"no folder can keep and run a compiled library ({'; '.join(reasons)}); set XDG_CACHE_HOME to one that can"
    )


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


def _run(command: list[str], workplace: Path) -> None:
    """Run a compiler to its end; its temporary files and its output go to `workplace`.

    Raises:
        RuntimeError: it cannot be run, failed, or took longer than `_patience()`; none of its processes is left then.
    """
    seconds = _patience()
    # A file and no pipe, which a server that the compiler starts (sccache) would hold open.
    output = workplace / "output"
    with output.open("wb") as said:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(workplace)},
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"{command[0]} cannot be run: {error}") from None
    try:
        status = process.wait(seconds)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RuntimeError(
            f"{shlex.join(command)} did not end within {seconds:g} seconds and was stopped; try that command, set CXX "
            f"to another compiler, or give it more seconds with {PATIENCE}=600"
        ) from None
    if status or not Path(command[-1]).exists():
        # Compilers write in the encoding of the user's locale, or in that of the source.
        text = " ".join(output.read_bytes().decode("utf-8", "replace").split())[:400]
        wrong = f"failed with status {status}" if status else "ended well but wrote no library"
        raise RuntimeError(f"{shlex.join(command)} {wrong}: {text}")


def _patience() -> float:
    """Return the seconds that a compiler may take; RuntimeError if the environment has no such number."""
    given = os.environ.get(PATIENCE, "").strip()
    try:
        seconds = float(given or DEFAULT_SECONDS)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RuntimeError(f"{PATIENCE}={given!r} is no time; accepted: seconds above 0, such as 600; or unset it")
    return seconds


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
