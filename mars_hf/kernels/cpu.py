"""Run sums and update on CPU: one call of cpu.cpp for all tensors.

`sums` is one pass over memory, `update` another; each is one parallel region for any number of tensors. Numbers that
change during training are arguments, so one library serves every dtype, rule and size; it compiles once per machine,
in a second or two. Results do not depend on the number of threads. If compiling fails, `is_available` returns False and
logs the reason once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_hf.kernels import cpu_compiler as compiler
from mars_hf.rules import RULES, Options

logger = logging.getLogger(__name__)

NAME = "compiled"
SOURCE = Path(__file__).with_name("cpu.cpp")
# Must match cpu.cpp, as `RULES` must: types by number; 0 means no tensor.
TYPES = {torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
DTYPES = frozenset(TYPES)
_COLUMNS = 13  # fields of Scalars in cpu.cpp


def is_available(device: torch.device) -> bool:
    """Return whether these kernels run here; the first call compiles them."""
    return device.type == "cpu" and _library() is not None


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
    """Take the sums of `rules.sums` over dense tensors, in memory order.

    Products are in the arithmetic's dtype, in float64 where that overflows; row totals add up in float64. Rows the
    caller does not need stay zero. Without last gradients c is g, and only <g, g> is computed.
    """
    result = torch.zeros(4, len(gradients), dtype=torch.float64, device="cpu")
    table, scalars = _table([[], gradients, [], [], last_grads]), _scalars(len(gradients), scale, last_scales, k)
    _library().mars_sums(
        len(gradients), _address(table), _address(scalars), products, corrected,
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def update(
    params: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    last_grads: list[Tensor],
    options: Options,
) -> None:
    """Update dense tensors as `rules.update` does, in memory order.

    With `clip_threshold` the kernel computes the factors itself, right before a tensor's update, while its gradients
    are in the cache.
    """
    lr, beta1, beta2, steps = float(options.lr), options.beta1, options.beta2, options.steps
    corrects = options.rule == "adamw"  # other rules ignore the counts, which may be 0 then
    roots = {t: (1 - beta2**t) ** -0.5 if corrects else 1.0 for t in set(steps)}
    rates = {t: lr / (1 - beta1**t) if corrects else lr for t in set(steps)}
    scalars = _scalars(
        *(len(params), options.scale, options.last_scales, options.k, options.factors),
        *(1 - beta1, options.nesterov, beta2, 1 - beta2, 1 - lr * options.weight_decay),
        *([rates[t] for t in steps], [roots[t] for t in steps], options.eps, options.clip_threshold),
    )
    table = _table([params, gradients, exp_avgs, exp_avg_sqs, last_grads], options.seeds)
    _library().mars_update(
        len(params), _address(table), _address(scalars), RULES.index(options.rule),
        options.second_moment == "gradient", options.keep_last, options.clip_threshold is not None,
        bool(options.seeds), torch.get_num_threads(),
    )  # fmt: skip


def _table(lists: Sequence[Sequence[Tensor]], seeds: Sequence[int] = ()) -> array[int]:
    """Return the words that describe tensors to the kernels."""
    sizes = list(map(Tensor.numel, lists[0] or lists[1]))
    assert all(list(map(Tensor.numel, tensors)) in (sizes, []) for tensors in lists), "sizes differ between lists"
    assert all(len({tensor.dtype for tensor in tensors}) < 2 for tensors in lists), "dtypes differ in a list"
    absent = [0] * len(sizes)
    words = array("q", [TYPES[tensors[0].dtype] if tensors else 0 for tensors in lists])
    for tensors in lists:
        words.extend(list(map(Tensor.data_ptr, tensors)) or absent)
    words.extend(sizes)
    words.extend(seeds or absent)
    return words


def _scalars(count: int, *columns: Tensor | list[float] | float | None) -> array[float]:
    """Return one row of Scalars (see cpu.cpp) per tensor; None and missing columns become 1."""
    values = [column.tolist() if isinstance(column, Tensor) else column for column in columns]
    row = [value if isinstance(value, (int, float)) else 1.0 for value in values]
    scalars = array("d", (row + [1.0] * (_COLUMNS - len(row))) * count)
    for column, value in enumerate(values):
        if isinstance(value, list):
            scalars[column::_COLUMNS] = array("d", value)
    return scalars


def _address(words: array[Any]) -> int:
    return words.buffer_info()[0]


@functools.cache
def _library() -> Any:
    """Return the kernels, or None if they cannot be compiled or loaded."""
    try:
        library = compiler.load(SOURCE)
    except (RuntimeError, OSError) as error:
        logger.warning("MARS takes its slower CPU path for the rest of this run. %s", error)
        return None
    word, address = ctypes.c_int64, ctypes.c_void_p
    library.mars_sums.argtypes = [word, address, address, word, word, address, word]
    library.mars_update.argtypes = [word, address, address, *[word] * 6]
    library.mars_sums.restype = library.mars_update.restype = None
    return library
