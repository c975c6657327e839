"""Sums and update on CPU: cpu.cpp, called for all tensors at once.

`sums` is one pass over memory, `update` another; each is one parallel region for any number of tensors. Numbers that
change during training are arguments, so that one library, compiled once a machine in a second or two, serves every
dtype, rule and size. Results do not depend on the number of threads. Where the library cannot be made, `supports` says
so and logs the reason, once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_hf.arithmetic.kernels import cpu_compiler as compiler

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
# As in the source: dtypes by number (0 is no tensor), rules, elements of a row, whose sum is one number.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RULES = ("adamw", "lion", "momentum")
ROW = 4096

_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}
_COLUMNS = 13  # of Numbers in the source


def supports(device: torch.device, dtypes: Collection[torch.dtype]) -> bool:
    """Whether these kernels can be used; compiles them, at the first call that has to know.

    Args:
        device: where the tensors are.
        dtypes: theirs.

    Returns:
        False for a device other than the CPU, for dtypes other than `DTYPES`, and where compiling has failed.
    """
    return device.type == "cpu" and all(dtype in _CODES for dtype in dtypes) and _library() is not None


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
    """Take the sums of `rules.sums` of dense tensors, whose elements are taken in the order of memory.

    Products and sums are in float64. What is not asked for is not computed. Without last gradients, <g, g> is all there
    is.
    """
    found = torch.zeros(4, len(gradients), dtype=torch.float64, device="cpu")
    rows = torch.empty(_rows(gradients) * (4 if last_grads else 1), dtype=torch.float64, device="cpu")
    numbers = _numbers(len(gradients), scale, last_scales, k)
    table = _table([[], gradients, [], [], [], last_grads, []])
    _loaded().mars_sums(
        len(gradients), _address(table), _address(numbers), _is_double([*gradients, *last_grads]), products, corrected,
        rows.data_ptr(), found.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return found


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
    clip_threshold: float | None = None,
    seeds: Sequence[int] = (),
    compensations: Sequence[Tensor] = (),
) -> None:
    """Do the update of `rules.update` on dense tensors, whose elements are taken in the order of memory.

    Args:
        steps: as `rules.update`, in one tensor.
        lr: 0-d.
        clip_threshold: take the factors here, from <c, c> of the tensors themselves: norm and update of a tensor come
            right after each other, while its gradients are in the cache. None takes `factors`.
        seeds: one for each tensor, new at each step: bfloat16 parameters are rounded to one of their two neighbours at
            random, right on average. Empty rounds to nearest.
        compensations: bfloat16, as are the parameters then: what rounding has lost, added to the parameter before the
            step, and kept anew after it (Kahan). Empty for none.
    """
    lists = [params, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, last_grads, compensations]
    rate, clips = float(lr), clip_threshold is not None
    counts = steps.tolist()
    corrects = rule == "adamw"  # other rules take no account of the counts, which may be 0 then
    roots = {t: (1 - beta2**t) ** -0.5 if corrects else 1.0 for t in set(counts)}
    rates = {t: rate / (1 - beta1**t) if corrects else rate for t in set(counts)}
    numbers = _numbers(
        *(len(params), scale, last_scales, k, factors),
        *(1 - beta1, blend, beta2, 1 - beta2, 1 - rate * weight_decay),
        *([rates[t] for t in counts], [roots[t] for t in counts], eps, clip_threshold),
    )
    rows = torch.empty(_rows(params) if clips else 0, dtype=torch.float64, device="cpu")
    table = _table(lists, seeds)
    _loaded().mars_update(
        len(params), _address(table), _address(numbers), _is_double([tensor for list_ in lists for tensor in list_]),
        RULES.index(rule), second_moment == "gradient", keep_last, clips, bool(seeds), rows.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip


def _is_double(tensors: list[Tensor]) -> bool:
    return torch.float64 in {tensor.dtype for tensor in tensors}


def _rows(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.numel() // ROW) for tensor in tensors)


def _table(lists: Sequence[Sequence[Tensor]], seeds: Sequence[int] = ()) -> array[int]:
    """The words that describe tensors to the kernels; RuntimeError unless all lists have the sizes of the first."""
    sizes = list(map(Tensor.numel, lists[0] or lists[1]))
    absent = [0] * len(sizes)
    words = array("q")
    for entries in lists:
        found = list(map(Tensor.numel, entries))
        if found and found != sizes:
            raise RuntimeError(f"tensors of {found} elements in one call with tensors of {sizes}")
        words.extend(list(map(Tensor.data_ptr, entries)) or absent)
    for entries in lists:
        words.extend([_CODES[tensor.dtype] for tensor in entries] or absent)
    words.extend(sizes)
    words.extend(seeds or absent)
    return words


def _numbers(count: int, *columns: Tensor | list[float] | float | None) -> array[float]:
    """A row of numbers for each of `count` tensors, in the order of the source; None and what is left out are 1."""
    values = [column.tolist() if isinstance(column, Tensor) else column for column in columns]
    row = [value if isinstance(value, (int, float)) else 1.0 for value in values]
    numbers = array("d", (row + [1.0] * (_COLUMNS - len(row))) * count)
    for place, value in enumerate(values):
        if isinstance(value, list):
            numbers[place::_COLUMNS] = array("d", value)
    return numbers


def _address(words: array[Any]) -> int:
    return words.buffer_info()[0]


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("the compiled kernels could not be made; a warning has said why")
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be had."""
    try:
        library = compiler.load(SOURCE)
    except (RuntimeError, OSError) as error:
        logger.warning("MARS takes its slower CPU path for the rest of this run. %s", error)
        return None
    word, address = ctypes.c_int64, ctypes.c_void_p
    library.mars_sums.argtypes = [word, *[address] * 2, *[word] * 3, *[address] * 2, word]
    library.mars_sums.restype = None
    library.mars_update.argtypes = [word, *[address] * 2, *[word] * 6, address, word]
    library.mars_update.restype = None
    return library
