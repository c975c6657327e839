"""What tensors look like: whether a step may treat them as it treated those of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf import _compat


class Look:
    """Remembers types, dtypes, devices, shapes and strides of a list of tensors, and none of the tensors.

    All that decides how a tensor's memory may be read counts, lazily negated or conjugated views and gradient tracking
    included. Of addresses the alignment counts, and how many are null. A list in which two tensors begin at the same
    address fits nothing.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Look at these."""
        self._count = len(tensors)
        self._guards = _compat.tensor_guards(tensors)
        self._described = None if self._guards is not None else [_describe(tensor) for tensor in tensors]
        self._addresses = _pattern(tensors)

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Tell whether others look the same, one by one; entries that are no tensors never do."""
        if len(tensors) != self._count or self._addresses is None:
            return False
        if self._guards is not None:
            alike = self._guards.check(*tensors)
        else:
            alike = [_describe(tensor) for tensor in tensors] == self._described
        return alike and _pattern(tensors) == self._addresses


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor's values are what lies in its memory, strided and aligned to its elements."""
    dispatches = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if dispatches or tensor.layout is not torch.strided:
        return False
    if tensor.is_neg() or tensor.is_conj() or _compat.is_zerotensor(tensor):
        return False
    return tensor.device.type == "meta" or tensor.data_ptr() % tensor.element_size() == 0


def has_memory(tensor: Tensor) -> bool:
    """Tell whether the storage of a plain tensor is there: some wrappers free it and keep the tensor."""
    return tensor.numel() == 0 or tensor.device.type == "meta" or tensor.data_ptr() != 0


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the one with the largest stride to the one with the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])


def fill_alike(tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors of one shape fill their memory without gaps, all in the order of the first."""
    order = memory_order(tensors[0])
    return all(tensor.permute(order).is_contiguous() for tensor in tensors)


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Return the places of tensors that share memory with another one in the list."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), place)
        for place, tensor in enumerate(tensors)
        if is_plain(tensor) and tensor.numel() and tensor.device.type != "meta"
    )
    found: set[int] = set()
    furthest, owner = 0, -1
    for start, end, place in spans:
        if start < furthest:
            found |= {owner, place}
        if end > furthest:
            furthest, owner = end, place
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _pattern(tensors: Sequence[Tensor]) -> tuple[list[int], int] | None:
    """Alignments (none where all are multiples of 16), and how many addresses are null; None if two are the same."""
    addresses = list(map(Tensor.data_ptr, tensors))
    nulls = addresses.count(0)
    if len(set(addresses)) + max(nulls - 1, 0) < len(addresses):
        return None
    return [address & 15 for address in addresses] if any(map((15).__and__, addresses)) else [], nulls


def _describe(tensor: Any) -> tuple[Any, ...] | object:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return object()  # equal to nothing
    lazy = (tensor.is_neg(), tensor.is_conj(), _compat.is_zerotensor(tensor), tensor.requires_grad)
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), *lazy)
