"""What kernels may touch: they read and write memory by address, so every tensor of a step is looked at first."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """Whether the tensors of a parameter suit kernels.

    They do if their values lie in memory, aligned and without gaps, all in the order of the parameter, and no other
    tensor of the step lies there.
    """

    state_fits: bool  # of the parameter and its states; otherwise plain PyTorch takes them
    grad_fits: bool  # otherwise it is copied


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether contiguous tensors are in memory, aligned, and share none of it."""
    starts = list(map(Tensor.data_ptr, tensors))
    sizes = list(map(Tensor.element_size, tensors))
    if not all(starts) or any(map(operator.mod, starts, sizes)):
        return False
    # Spans are apart if, in order, none starts before the one before it ends.
    lengths = map(operator.mul, map(Tensor.numel, tensors), sizes)
    ends = sorted(map(operator.add, starts, lengths))
    return not any(map(operator.gt, ends[:-1], sorted(starts)[1:]))


def inspect_memory(rows: Sequence[Sequence[Tensor]]) -> list[Memory]:
    """Look closely at the memory of each parameter, its gradient and its states; a row holds them in this order.

    Raises:
        RuntimeError: memory has been freed.
    """
    for row in rows:
        _reject_freed(row)
    sharing = _sharing(rows)
    memories = []
    for position, (param, grad, *states) in enumerate(rows):
        order = _order_of(param)
        state_fits = position not in sharing and all(_fits(tensor, order) for tensor in (param, *states))
        memories.append(Memory(state_fits, _fits(grad, order)))
    return memories


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor's values are those in its memory: it is dense, and no wrapper around other tensors."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not is_wrapper and not tensor._is_zerotensor()


def _needs_memory(tensor: Tensor) -> bool:
    return _has_values(tensor) and tensor.device.type != "meta" and tensor.numel() > 0


def _reject_freed(row: Sequence[Tensor]) -> None:
    for position, tensor in enumerate(row):
        if _needs_memory(tensor) and tensor.data_ptr() == 0:
            what = ("parameter", "gradient", "state")[min(position, 2)]
            raise RuntimeError(
                f"the memory of a {what} of shape {tuple(tensor.shape)} has been freed; restore it before step()"
            )


def _order_of(param: Tensor) -> list[int] | None:
    """Return the dimensions of a parameter from the largest stride to the smallest; None if it is contiguous."""
    if not _has_values(param) or param.is_contiguous():
        return None
    return sorted(range(param.ndim), key=lambda dim: -param.stride()[dim])


def _fits(tensor: Tensor, order: list[int] | None) -> bool:
    """Return whether kernels can take a tensor, whose dimensions are to be in this order in memory."""
    if not _has_values(tensor) or tensor.is_neg():
        return False
    in_order = tensor if order is None else tensor.permute(order)
    return in_order.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0


def _sharing(rows: Sequence[Sequence[Tensor]]) -> set[int]:
    """Return the positions of rows with a tensor that shares memory with another one."""
    spans = []
    for position, row in enumerate(rows):
        for tensor in row:
            if _needs_memory(tensor):
                spans.append((tensor.data_ptr(), _end_of(tensor), position))
    sharing: set[int] = set()
    furthest, owner = 0, -1
    for start, end, position in sorted(spans):
        if start < furthest:
            sharing |= {owner, position}
        if end > furthest:
            furthest, owner = end, position
    return sharing


def _end_of(tensor: Tensor) -> int:
    """Return the address behind the last element of a tensor."""
    distances = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (1 + sum(distances)) * tensor.element_size()
