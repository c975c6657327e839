"""Run sums and update on CPU: one call of cpu.cpp for all tensors, compiled on the machine and kept in a cache.

`sums` is one pass over memory, `update` another; each is one parallel region for any number of tensors. Numbers that
change during training are arguments, so one library serves every dtype, rule and size; it compiles once per machine,
in a second or two. Results do not depend on the number of threads. If compiling fails, `is_available` returns False and
logs the reason once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_hf import log
from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.eight_bits import Column, Columns, scales_of, tensors_of
from mars_hf.arithmetic.formulas import NEAREST, Options, Rounding

NAME = "compiled"
SOURCE = Path(__file__).with_name("cpu.cpp")
# These three must match cpu.cpp. Types by number; 0 means no tensor.
ARITHMETICS = ("adamw", "lion", "momentum")
BUFFERS = ("exp_avg", "exp_avg_sq", "last_grad")
TYPES = {torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, torch.int8: 4, torch.uint8: 5}
FLOATS = (torch.bfloat16, torch.float32, torch.float64)  # of parameters
# The numbers of each tensor, in the order of the fields of Scalars in cpu.cpp, which says what they are.
SCALARS = (
    "grad_scale",
    "correction",
    "clip_factor",
    "one_minus_beta1",
    "blend",
    "beta2",
    "one_minus_beta2",
    "decay",
    "decay_away",
    "rate",
    "root",
    "eps",
    "step",
)

COMPILERS = ("g++", "clang++", "c++")
# No contraction: every operation rounds on its own wherever it is inlined, so equal expressions give equal bits. A step
# is bound by memory, so this costs nothing.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wl,--as-needed",
)
# Drivers of C (`CXX=gcc`, which PEFT's BOFT sets in the process that imports it) do not add it on their own.
LIBRARIES = ("-lstdc++",)
# By the processor's capability as PyTorch reports it; wider vectors do not make memory faster.
X86_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}
TIMEOUT = 120.0  # seconds; the kernels need two


def is_available(device: torch.device) -> bool:
    """Return whether these kernels run here; the first call compiles them."""
    return device.type == "cpu" and _library() is not None


def can_take(dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return whether the kernels compute with these dtypes of lists, by name: all states in 8 bits, or none."""
    of_states = {dtypes[name] for name in ("exp_avg", "exp_avg_sq", "last_grad") if name in dtypes}
    has_codes = not of_states.isdisjoint(eight_bits.DTYPES)
    if has_codes and not of_states.issubset(eight_bits.DTYPES):
        return False
    compensation = dtypes.get("compensation", torch.int8)
    is_short = has_codes or "compensation" in dtypes
    if compensation != torch.int8 or (is_short and torch.float64 in dtypes.values()):
        return False
    return set(dtypes.values()) <= TYPES.keys()


def sums(
    gradients: list[Tensor],
    last_grads: Column,
    *,
    grad_scale: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
) -> Tensor:
    """Take the sums of `formulas.sums` over dense tensors, in memory order.

    Products are in the arithmetic's dtype, in float64 where that overflows; row totals add up in float64. Rows the
    caller does not need stay zero. Without last gradients c is g, and only <g, g> is computed.
    """
    result = torch.zeros(4, len(gradients), dtype=torch.float64, device="cpu")
    descriptor = _descriptor([], gradients, {"last_grad": last_grads})
    scalars = _scalars(len(gradients), grad_scale=grad_scale, correction=k)
    _library().mars_sums(
        len(gradients), descriptor.buffer_info()[0], scalars.buffer_info()[0], products, corrected,
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def update(
    params: list[Tensor],
    gradients: list[Tensor],
    buffers: Columns,
    options: Options,
) -> Tensor:
    """Update dense tensors as `formulas.update` does, in memory order.

    With `clip_bounds` it clips by itself those whose <g, g> is above theirs, and returns <g, g>, float64, one per
    tensor.
    """
    lr = float(options.lr)
    rates, roots = _bias_corrected(options, lr)
    decay = 1 - lr * options.weight_decay
    scalars = _scalars(
        len(params),
        grad_scale=options.grad_scale,
        correction=options.k,
        clip_factor=options.factors,
        one_minus_beta1=1 - options.beta1,
        blend=options.blend,
        beta2=options.beta2,
        one_minus_beta2=1 - options.beta2,
        decay=decay,
        decay_away=1.0 if options.cautious else decay,
        rate=rates,
        root=roots,
        eps=options.eps,
        step=list(options.steps),
    )
    descriptor = _descriptor(params, gradients, buffers, options.rounding)
    bounds = array("d", options.clip_bounds)
    if options.squares is None:
        squares = torch.zeros(len(params), dtype=torch.float64, device="cpu")
    else:
        squares = options.squares.contiguous()
    _library().mars_update(
        len(params), descriptor.buffer_info()[0], scalars.buffer_info()[0], ARITHMETICS.index(options.arithmetic),
        options.second_moment == "gradient", bool(options.rounding.seeds), bounds.buffer_info()[0] if bounds else None,
        options.clip_threshold, squares.data_ptr(), options.squares is not None, torch.get_num_threads(),
    )  # fmt: skip
    return squares


def _bias_corrected(options: Options, lr: float) -> tuple[list[float], list[float]]:
    """Return lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) of each tensor; only adamw looks at the counts."""
    if options.arithmetic != "adamw":
        return [lr] * len(options.steps), [1.0] * len(options.steps)
    rates, roots = {}, {}
    for t in set(options.steps):  # most tensors share one
        rates[t] = lr / (1 - options.beta1**t)
        roots[t] = (1 - options.beta2**t) ** -0.5
    return [rates[t] for t in options.steps], [roots[t] for t in options.steps]


def _descriptor(
    params: list[Tensor], gradients: list[Tensor], buffers: Columns, rounding: Rounding = NEAREST
) -> array[int]:
    """Return the numbers that describe tensors to the kernels: dtypes, addresses, sizes, seeds (see cpu.cpp).

    Lists are of equal length, or empty; tensors of a list have one dtype, and those at one place one size, as
    `build_lists` has seen to.
    """
    columns = [buffers.get(name, []) for name in BUFFERS]
    lists = [params, gradients, *map(tensors_of, columns), rounding.compensations, *map(scales_of, columns)]
    absent = [0] * len(gradients)
    descriptor = array("q", [TYPES[tensors[0].dtype] if tensors else 0 for tensors in lists])
    for tensors in lists:
        descriptor.extend(map(Tensor.data_ptr, tensors) if tensors else absent)
    descriptor.extend(map(Tensor.numel, gradients))
    descriptor.extend(rounding.seeds or absent)
    return descriptor


def _scalars(count: int, **columns: Tensor | list[float] | float | None) -> array[float]:
    """Return the Scalars of each tensor (see cpu.cpp), from columns by name; a column that is None or left out is 1."""
    of_all, of_each = dict.fromkeys(SCALARS, 1.0), {}
    for name, column in columns.items():
        if isinstance(column, list):
            of_each[name] = column
        elif isinstance(column, Tensor) and column.ndim:
            of_each[name] = column.tolist()
        elif column is not None:
            of_all[name] = float(column)
    scalars = array("d", of_all.values()) * count
    for name, values in of_each.items():
        scalars[SCALARS.index(name) :: len(SCALARS)] = array("d", values)
    return scalars


@functools.cache
def _library() -> Any:
    """Return the kernels, or None if they cannot be compiled or loaded."""
    try:
        library = load(SOURCE)
    except (RuntimeError, OSError) as error:
        log.warning_on_machine(f"MARS takes its slower CPU path for the rest of this run. {error}")
        return None
    word, number, address = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    library.mars_sums.argtypes = [word, address, address, word, word, address, word]
    library.mars_update.argtypes = [
        word, address, address, word, word, word, address, number, address, word, word,
    ]  # fmt: skip
    library.mars_sums.restype = library.mars_update.restype = None
    return library


# --- compiling -------------------------------------------------------------------------------------------------------


def load(source: Path) -> ctypes.CDLL:
    """Load the library of a C++ file: from the user's cache, or compiled now and cached for later runs.

    Raises:
        RuntimeError: another system than Linux, no compiler, or it failed.
        OSError: no temporary folder can hold the library.
    """
    if sys.platform != "linux":  # Apple's clang has no OpenMP, and its linker other options
        raise RuntimeError("the compiled kernels are made for Linux; elsewhere plain PyTorch computes: leave out fused")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    vectors = X86_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()) if is_x86 else ()
    command = [*find_compiler(), *FLAGS, *vectors, str(source), *_openmp_of_torch(), *LIBRARIES]
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
            log.warning_on_machine(
                f"Compiled kernels cannot be cached: {error}; XDG_CACHE_HOME can name another folder."
            )
        return ctypes.CDLL(str(library))  # the process keeps what it has loaded; the file may go


def _openmp_of_torch() -> list[str]:
    """Return the OpenMP library that PyTorch ships, if any: a second one would start its own threads."""
    root = Path(torch.__file__).parent
    for folder in ("lib", "../torch.libs"):
        for path in sorted((root / folder).glob("libgomp*.so*")):
            return [str(path)]
    return []


def find_compiler() -> list[str]:
    """Return the compile command: the environment's CXX, split as in a shell, or the first of `COMPILERS` on the PATH.

    Raises:
        RuntimeError: no compiler is on the PATH, or the quotes in CXX do not match.
    """
    cxx = os.environ.get("CXX", "").strip()
    if not cxx:
        commands = [[name] for name in COMPILERS]
    elif shutil.which(cxx):  # a path, which may have spaces
        commands = [[cxx]]
    else:
        try:
            commands = [shlex.split(cxx)]
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
