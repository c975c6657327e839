"""Run the rules on NVIDIA and AMD GPUs: two passes over memory per bucket, any number of tensors per launch.

`sums` launches twice: over all gradients, then over their partial sums, one number per `TILE` elements. It adds no
floats atomically, so the bits are the same every time. `update` is one launch. The kernels are in `gpu_device`; this
module describes a call's tensors to them.

**The table.** Kernels read the tensors' addresses and sizes from a table of int64 words on the device. Outside graph
capture, tables are cached by content: the addresses of parameters and states never change, and those of gradients
repeat once the allocator has settled, also with `zero_grad(set_to_none=True)`. New content costs one small asynchronous
copy from pinned memory, which PyTorch's host allocator does not reuse before the copy is done. The cache is per stream,
so that the memory of an evicted table is reused only after the kernels that read it.

**CUDA graphs.** Under capture neither is safe: a cached table could be evicted and freed while the graph still reads
it, and the pinned source of a captured copy would have to outlive the graph unchanged. A captured call therefore writes
its own table, in the graph's memory, with kernels that carry the words as launch arguments (as PyTorch's multi-tensor
functions do; here `torch._foreach_add_`, about a hundred words per launch). Each replay writes the table again and
needs nothing outside the graph. Python numbers (betas, eps, weight decay) are constants of the graph; step, lr, scales
and factors are read from the device. Call once before the capture, so that nothing compiles during it.

**torch.compile** sees two operators, `mars_hf::triton_sums` and `mars_hf::triton_update`, and traces past them without
a graph break. Eager code skips them: calling the functions directly costs less.

**Sizes**, estimated for an H200 and not measured. A thread moves 16 bytes per access, twice per tensor. For AdamW with
a float32 last gradient, 160 bytes are in flight in each of a program's 128 threads. At 88 registers, 5 programs share a
multiprocessor: 100 KB in flight, where 4.8 TB/s x 0.8 us / 132 needs 29 KB. A program processes 8192 elements (295 KB,
about 45 us when all are busy); its start, a few table reads of about a microsecond, is 2 % of that. GPT-2 medium still
needs 65 waves of programs on 132 multiprocessors, so the last wave costs little.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.arithmetic.rules import check_rule

TILE = 8192  # elements per program
BLOCK = 1024  # elements that a program has in flight
REST = 512  # the same for masked accesses
TOTALS = 1024  # partial sums added at once without spilling registers; GPT-2's embedding has 4712
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
OPTIONS_OF_TOTALS = {**OPTIONS, "num_warps": 8}
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
KEPT_TABLES = 256


def supports(device: torch.device, dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether these kernels run on `device` with tensors of `dtypes`.

    Args:
        device: device of the tensors. The CPU counts under TRITON_INTERPRET=1, for tests.
        dtypes: dtypes of all tensors.

    Returns:
        True if Triton is installed and supports the device, and the kernels know every dtype.
    """
    if not DTYPES.issuperset(dtypes) or importlib.util.find_spec("triton") is None:
        return False
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type != "cuda" or interpreted:
        return device.type == "cpu" and interpreted
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    *,
    scale: Tensor | None = None,
    last_scales: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
) -> Tensor:
    """Take the sums of `rules.sums`: <g, g>, <g, last>, <last, last> and <c, c> of each tensor.

    Args:
        gradients: dense, read in memory order, on one device; any float dtypes.
        last_grads: like `gradients`; empty for a rule without last gradient.
        scale: 0-d, on the device; g = scale * gradient; None means 1.
        last_scales: one per tensor, on the device; last = last_scales[i] * last_grads[i]; None means 1.
        k: weight of the correction, c = g + k (g - last).
        products: ignored: the first three rows cost nothing in a pass bound by memory.
        corrected: ignored, for the same reason.

    Returns:
        Shape (4, number of tensors), float64; the same bits for the same input.
    """
    operator = _sums_operator if torch.compiler.is_compiling() else _sums
    return operator(gradients, last_grads, scale, last_scales, k)


def _sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    scale: Tensor | None,
    last_scales: Tensor | None,
    k: float,
) -> Tensor:
    compute = _compute_dtype(gradients, last_grads)
    out = torch.empty((4, len(gradients)), dtype=torch.float64, device=gradients[0].device if gradients else "cpu")
    device = _device_code()
    for places in _by_dtypes(gradients, last_grads):
        lists = [_pick(list_, places) for list_ in (gradients, last_grads)]
        last = _triton_type(lists[1])
        with torch.cuda.device_of(out):
            table = _table(lists, places, (k,))
            partials = out.new_empty((4 if lists[1] else 1, table.tiles))
            if table.tiles:
                device.partial_sums[(table.tiles,)](
                    table.words, len(places), table.tiles, scale, last_scales if lists[1] else None, partials,
                    GRADIENT=_triton_type(lists[0]), LAST=last, COMPUTE=_in_triton(compute),
                    TILE=TILE, BLOCK=BLOCK, REST=REST, VECTOR=_vector(lists), **OPTIONS,
                )  # fmt: skip
            device.total_sums[(len(places),)](
                table.words, len(places), table.tiles, partials, out, len(gradients),
                LAST=last, TILE=TILE, BLOCK=TOTALS, **OPTIONS_OF_TOTALS,
            )  # fmt: skip
    return out


def update(
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    last_grads: list[Tensor],
    *,
    rule: str,
    steps: Tensor,
    lr: Tensor,
    scale: Tensor | None = None,
    last_scales: Tensor | None = None,
    factors: Tensor | None = None,
    k: float = 0.0,
    blend: float = 0.0,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    second_moment: str = "corrected",
    keep_last: bool = True,
    seeds: Sequence[int] = (),
    compensations: Sequence[Tensor] = (),
) -> None:
    """Update all tensors in place, in one pass over memory; see `rules.update`.

    All tensors are dense, read in memory order, and on one device; any float dtypes.
    Arithmetic is in float32, or float64 if any tensor is float64; every result is rounded once, when it is stored.

    Args:
        params: x; modified. For "momentum", the tensors that receive m; not read.
        gradients: before scaling; not modified.
        exp_avgs: e; modified.
        exp_avg_sqs: v; modified; an empty list for "lion" and "momentum".
        max_exp_avg_sqs: running maxima of v (AMSGrad); modified; an empty list turns AMSGrad off.
        last_grads: become g if `keep_last`; an empty list makes c = factor * g.
        rule: "adamw", "lion" or "momentum".
        steps: t of each tensor, from 1; on the device.
        lr: step size; 0-d, on the device.
        scale: see `sums`.
        last_scales: see `sums`.
        factors: multiply c, one per tensor, on the device; None means 1.
        k: see `sums`.
        blend: 0, or gamma for the form that needs no last gradient.
        beta1: decay rate of e.
        beta2: decay rate of v.
        eps: added to the bias-corrected root of v.
        weight_decay: decoupled; the parameter shrinks by lr * weight_decay.
        second_moment: "corrected" averages c * c, "gradient" g * g.
        keep_last: False reads `last_grads` and does not write them.
        seeds: one per tensor, new at each step, for stochastic rounding of bfloat16 parameters (unbiased, so that tiny
            steps add up). Empty rounds to nearest.
        compensations: bfloat16, as are the parameters then: the rounding error, added to the parameter before the step
            and renewed after it (Kahan). Empty turns it off.
    """
    (_update_operator if torch.compiler.is_compiling() else _update)(
        params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads, rule, steps, lr, scale, last_scales,
        factors, k, blend, beta1, beta2, eps, weight_decay, second_moment, keep_last, list(seeds), list(compensations),
    )  # fmt: skip


def _update(
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    last_grads: list[Tensor],
    rule: str,
    steps: Tensor,
    lr: Tensor,
    scale: Tensor | None,
    last_scales: Tensor | None,
    factors: Tensor | None,
    k: float,
    blend: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    second_moment: str,
    keep_last: bool,
    seeds: list[int],
    compensations: list[Tensor],
) -> None:
    check_rule(rule)
    numbers = (k, blend, beta1, _log(beta1), beta2, _log(beta2), eps, weight_decay)
    everything = [gradients, last_grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, compensations]
    compute = _compute_dtype(*everything)
    device = _device_code()
    keys = _keys(seeds, params[0].device) if seeds else None
    for places in _by_dtypes(params, gradients, last_grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs):
        lists = [_pick(list_, places) for list_ in everything]
        with torch.cuda.device_of(lists[0][0]):
            table = _table(lists, places, numbers)
            if not table.tiles:
                continue
            device.update[(table.tiles,)](
                table.words, len(places), steps, lr, scale, last_scales if lists[1] else None, factors, keys,
                PARAM=_triton_type(lists[2]), GRADIENT=_triton_type(lists[0]), EXP_AVG=_triton_type(lists[3]),
                EXP_AVG_SQ=_triton_type(lists[4]), MAX_EXP_AVG_SQ=_triton_type(lists[5]),
                LAST=_triton_type(lists[1]), COMPUTE=_in_triton(compute),
                RULE=rule, AMSGRAD=bool(max_exp_avg_sqs), CORRECTED=second_moment == "corrected",
                KEEP_LAST=keep_last and bool(last_grads), COMPENSATED=bool(compensations),
                TILE=TILE, BLOCK=BLOCK, REST=REST, VECTOR=_vector(lists), **OPTIONS,
            )  # fmt: skip


_sums_operator = torch.library.custom_op(
    "mars_hf::triton_sums",
    _sums,
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor[] last_grads, Tensor? scale, Tensor? last_scales, float k) -> Tensor",
)
_update_operator = torch.library.custom_op(
    "mars_hf::triton_update",
    _update,
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "last_grads", "compensations"),
    schema="(Tensor(a!)[] params, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] last_grads, str rule, Tensor steps, Tensor lr, Tensor? scale,"
    " Tensor? last_scales, Tensor? factors, float k, float blend, float beta1, float beta2, float eps,"
    " float weight_decay, str second_moment, bool keep_last, int[] seeds, Tensor(f!)[] compensations) -> ()",
)


@_sums_operator.register_fake
def _(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    scale: Tensor | None,
    last_scales: Tensor | None,
    k: float,
) -> Tensor:
    return gradients[0].new_empty((4, len(gradients)), dtype=torch.float64)


class _Table(NamedTuple):
    words: Tensor
    tiles: int


def _table(lists: Sequence[list[Tensor]], places: Sequence[int], numbers: tuple[float, ...]) -> _Table:
    """Return the table of `gpu_device` for `lists`, which come in the order of its rows of addresses.

    Raises:
        RuntimeError: sizes in a list differ from the parameters' (in `sums`, from the gradients').
    """
    device = lists[0][0].device
    sizes = tuple([tensor.numel() for tensor in (lists[2] if len(lists) > 2 else lists[0])])
    for list_ in lists:
        if list_ and tuple([tensor.numel() for tensor in list_]) != sizes:
            found = [tensor.numel() for tensor in list_]
            raise RuntimeError(f"tensors of {found} elements in one call with tensors of {list(sizes)}")
    addresses = tuple(tuple([tensor.data_ptr() for tensor in list_]) for list_ in lists)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        words, tiles = _words(sizes, tuple(places), addresses, numbers)
        return _Table(_write(words, device), tiles)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(device, stream, sizes, tuple(places), addresses, numbers)


@functools.lru_cache(maxsize=KEPT_TABLES)
def _kept(device: torch.device, stream: int, *content: Any) -> _Table:
    words, tiles = _words(*content)
    host = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return _Table(host.to(device, non_blocking=True), tiles)


def _write(words: list[int], device: torch.device) -> Tensor:
    """Write `words` to the device without host memory that is read later: for graph capture."""
    table = torch.zeros(len(words), dtype=torch.int64, device=device)
    torch._foreach_add_(list(table.unbind()), words)
    return table


def _words(
    sizes: tuple[int, ...],
    places: tuple[int, ...],
    addresses: tuple[tuple[int, ...], ...],
    numbers: tuple[float, ...],
) -> tuple[list[int], int]:
    """Return the contents of a table (see `gpu_device`) and the number of tiles."""
    ends = list(accumulate(-(-size // TILE) for size in sizes))
    header = struct.unpack("<8q", struct.pack("<8d", *numbers, *[0.0] * (8 - len(numbers))))
    given = [row for row in addresses if row]
    aligned = [all(address % 16 == 0 for address in of_tensor) for of_tensor in zip(*given, strict=True)]
    rows = [[0, *ends[:-1]], sizes, places, aligned, *(row or (0,) * len(sizes) for row in addresses)]
    return [*header, *(int(word) for row in rows for word in row)], ends[-1]


def _by_dtypes(*lists: list[Tensor]) -> Iterable[list[int]]:
    """Return the places of tensors with the same dtypes in all given lists: one launch per list of places."""
    given = [list_ for list_ in lists if list_]
    if given and all(len({tensor.dtype for tensor in list_}) == 1 for list_ in given):
        return [list(range(len(given[0])))]
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, tensors in enumerate(zip(*given, strict=True)):
        groups.setdefault(tuple(tensor.dtype for tensor in tensors), []).append(place)
    return groups.values()


def _keys(seeds: list[int], device: torch.device) -> Tensor:
    host = torch.tensor(seeds, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _pick(tensors: list[Tensor], places: list[int]) -> list[Tensor]:
    return [tensors[place] for place in places] if tensors else []


def _compute_dtype(*lists: list[Tensor]) -> torch.dtype:
    double = any(torch.float64 in {tensor.dtype for tensor in list_} for list_ in lists)
    return torch.float64 if double else torch.float32


def _vector(lists: Iterable[list[Tensor]]) -> int:
    """Return the number of elements a thread moves at once: 16 bytes of the widest dtype."""
    return 16 // max(list_[0].element_size() for list_ in lists if list_)


def _triton_type(tensors: list[Tensor]) -> Any:
    return _in_triton(tensors[0].dtype) if tensors else None


def _in_triton(dtype: torch.dtype) -> Any:
    return getattr(_device_code().tl, str(dtype).removeprefix("torch."))


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


@functools.cache
def _device_code() -> ModuleType:
    """Return the kernels; imported on first use because Triton is not installed everywhere."""
    from mars_hf.arithmetic.kernels import gpu_device

    return gpu_device
