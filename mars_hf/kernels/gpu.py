"""Run the rules on NVIDIA and AMD GPUs: two passes over memory, any number of tensors a launch.

`sums` launches twice: over all gradients, then over their partial sums, one number per `TILE` elements. It adds no
floats atomically, so the bits are the same every time. `update` is one launch. The kernels are in `gpu_device`; this
module describes a call's tensors to them.

Kernels read addresses and sizes of tensors from a table of int64 words on the device. Tables are cached by content: the
addresses of parameters and states never change, and those of gradients repeat once the allocator has settled, also with
`zero_grad(set_to_none=True)`. New content costs one small asynchronous copy from pinned memory, which PyTorch's host
allocator does not reuse before the copy is done. The cache is per stream, so that the memory of an evicted table is
reused only after the kernels that read it.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.eight_bits import Column, Columns, scales_of, tensors_of
from mars_hf.arithmetic.formulas import Options

try:
    from mars_hf.kernels import gpu_device
except ImportError:  # Triton is not installed everywhere
    gpu_device = None  # type: ignore[assignment]

NAME = "triton"
# Measured on an H100 against 35 other sizes: within 1% of the best in float32 and 2% with bfloat16 parameters
# (benchmarks/results/gpu_kernels_h100.json).
TILE = 8192  # elements per program
BLOCK = 1024  # elements that a program has in flight
MASKED_BLOCK = 512  # the same where accesses are masked
TOTALS = 1024  # partial sums added at once without spilling registers; GPT-2's embedding has 4712
LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
LAUNCH_OPTIONS_OF_TOTALS = {**LAUNCH_OPTIONS, "num_warps": 8}
ARITHMETICS = ("adamw", "lion", "momentum")  # of gpu_device.update
BUFFERS = ("exp_avg", "exp_avg_sq", "last_grad")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of parameters
CACHED_TABLES = 256
_OF_ELEMENTS = 6  # lists of a table, before those of scales


def is_available(device: torch.device) -> bool:
    """Return whether Triton runs on the device: on the CPU under TRITON_INTERPRET=1, for tests."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return gpu_device is not None and device.type == "cpu"
    if gpu_device is None or device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def can_take(dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return whether the kernels compute with these dtypes of lists, by name."""
    return set(dtypes.values()) <= {*FLOATS, *eight_bits.DTYPES}


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

    `products` and `corrected` are ignored: no row costs anything in a pass bound by memory. The scale is on the device.
    """
    # In the order of a table; those left empty are the update's.
    lists = [gradients, tensors_of(last_grads), [], [], [], [], scales_of(last_grads)]
    count = len(gradients)
    last, last_scale = _triton_type(lists[1]), _triton_type(lists[-1])
    out = torch.zeros((4, count), dtype=torch.float64, device=gradients[0].device)
    with torch.cuda.device_of(out):
        table, tiles = _table(lists, (k,))
        partials = out.new_empty((4 if last_grads else 1, tiles))
        if tiles:
            gpu_device.partial_sums[(tiles,)](
                table, count, tiles, grad_scale, partials,
                GRADIENT=_triton_type(gradients), LAST=last, LAST_SCALE=last_scale, **_constants(lists),
            )  # fmt: skip
        gpu_device.total_sums[(count, len(partials))](
            table, count, tiles, partials, out, LAST=last, TILE=TILE, BLOCK=TOTALS, **LAUNCH_OPTIONS_OF_TOTALS
        )
    return out


def update(
    params: list[Tensor],
    gradients: list[Tensor],
    buffers: Columns,
    options: Options,
) -> None:
    """Update dense tensors as `formulas.update` does, in memory order. A rate in a tensor is not waited for."""
    rounding = options.rounding
    last, *moments = [buffers.get(name, []) for name in ("last_grad", "exp_avg", "exp_avg_sq")]
    lists = [gradients, tensors_of(last), params, *map(tensors_of, moments)]
    lists += [list(rounding.compensations), *map(scales_of, (last, *moments))]
    names = ["GRADIENT", "LAST", "PARAM", "EXP_AVG", "EXP_AVG_SQ", "LOST"]
    names += ["LAST_SCALE", "EXP_AVG_SCALE", "EXP_AVG_SQ_SCALE"]
    types = dict(zip(names, map(_triton_type, lists), strict=True))
    device, lr = params[0].device, options.lr
    counts = _to_device(options.steps, device, torch.float32)
    rate = lr.to(device) if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=device)
    keys = _to_device(rounding.seeds, device) if rounding.seeds else None
    betas = [[beta, math.log(beta) if beta else -math.inf] for beta in (options.beta1, options.beta2)]
    with torch.cuda.device_of(counts):
        numbers = options.k, options.blend, *betas[0], *betas[1], options.eps, options.weight_decay
        table, tiles = _table(lists, numbers)
        if tiles:
            gpu_device.update[(tiles,)](
                table, len(params), counts, rate, options.grad_scale, options.factors, keys, **types,
                RULE=options.arithmetic, CORRECTED=options.second_moment == "corrected", CAUTIOUS=options.cautious,
                **_constants(lists),
            )  # fmt: skip


def _table(lists: Sequence[list[Tensor]], numbers: tuple[float, ...]) -> tuple[Tensor, int]:
    """Return the table of `gpu_device` for `lists`, in the order of its rows of addresses, and the number of tiles."""
    device = lists[0][0].device
    sizes = tuple(map(Tensor.numel, lists[0]))
    blocks = tuple(-(-size // eight_bits.BLOCK) for size in sizes)
    for position, list_ in enumerate(lists):
        expected = sizes if position < _OF_ELEMENTS else blocks
        assert tuple(map(Tensor.numel, list_)) in (expected, ()), "sizes differ between lists"
    assert all(len({tensor.dtype for tensor in list_}) < 2 for list_ in lists), "dtypes differ in a list"
    addresses = tuple(tuple(map(Tensor.data_ptr, list_)) for list_ in lists)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cached_table(device, stream, sizes, addresses, numbers)


@functools.lru_cache(maxsize=CACHED_TABLES)
def _cached_table(device: torch.device, stream: int, *described: Any) -> tuple[Tensor, int]:
    content, tiles = _content_of_table(*described)
    return _to_device(content, device), tiles


def _to_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the device."""
    host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _content_of_table(
    sizes: tuple[int, ...], addresses: tuple[tuple[int, ...], ...], numbers: tuple[float, ...]
) -> tuple[list[int], int]:
    """Return the contents of a table (see `gpu_device`) and the number of tiles."""
    ends = list(accumulate(-(-size // TILE) for size in sizes))
    unused = [0.0] * (8 - len(numbers))
    table = list(struct.unpack("<8q", struct.pack("<8d", *numbers, *unused)))
    table += [0, *ends[:-1]]  # where the tiles of each tensor start
    table += sizes
    for of_tensor in zip(*filter(None, addresses), strict=True):
        table.append(int(all(address % 16 == 0 for address in of_tensor)))
    absent = [0] * len(sizes)
    for row in addresses:
        table += row or absent
    return table, ends[-1]


def _constants(lists: Sequence[list[Tensor]]) -> dict[str, Any]:
    """Return the constants of a launch: dtype of the arithmetic, sizes, and the elements a thread moves at once."""
    dtypes = {list_[0].dtype for list_ in lists if list_}
    compute = gpu_device.tl.float64 if torch.float64 in dtypes else gpu_device.tl.float32
    vector = 16 // max(dtype.itemsize for dtype in dtypes)  # 16 bytes of the widest dtype
    return {
        "COMPUTE": compute,
        "TILE": TILE,
        "BLOCK": BLOCK,
        "MASKED_BLOCK": MASKED_BLOCK,
        "VECTOR": vector,
        **LAUNCH_OPTIONS,
    }


def _triton_type(tensors: Sequence[Tensor]) -> Any:
    return getattr(gpu_device.tl, str(tensors[0].dtype).removeprefix("torch.")) if tensors else None
