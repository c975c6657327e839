"""What kernels may touch: they read and write memory by address, so every tensor of a step is looked at first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mars_hf.arithmetic.eight_bits import has_whole_blocks


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors without gaps are in memory, aligned, and share none of it."""
    count = len(tensors)
    starts = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, count)
    sizes = np.fromiter(map(Tensor.element_size, tensors), np.int64, count)
    if not starts.all() or (starts % sizes).any():
        return False
    ends = starts + sizes * np.fromiter(map(Tensor.numel, tensors), np.int64, count)
    # Spans are apart if, in order, none starts before the one before it ends.
    return not (np.sort(ends)[:-1] > np.sort(starts)[1:]).any()


def inspect_memory(
    entries: Sequence[Sequence[Tensor]], scales: Sequence[Sequence[Tensor]]
) -> tuple[list[bool], list[bool]]:
    """Look closely at the memory of all tensors of a step.

    Kernels can take tensors whose values lie in memory, aligned and without gaps, all in the order of the parameter,
    where no other tensor of the step lies. If any of them share memory, kernels take none of their kind: that is rare,
    and right for all.

    Args:
        entries: for each parameter the parameter, its gradient and its states, in this order.
        scales: for each parameter the scales of its states in 8 bits.

    Returns:
        Two lists with a flag for each parameter: whether kernels can take it and its states, which plain PyTorch takes
        if not, and whether they can take its gradient, which the caller copies if not.

    Raises:
        RuntimeError: a tensor that cannot be read or updated where it is.
    """
    state_fits, grad_fits = [], []
    updated: list[Tensor] = []
    read: list[Tensor] = []
    for (param, grad, *states), scales_of_param in zip(entries, scales, strict=True):
        _require_usable(param, grad, [*states, *scales_of_param])
        order = _order_of(param)
        fits = [_fits(tensor, order) for tensor in (param, *states)]
        fits += [_fits_blocks(param, each) for each in scales_of_param]
        state_fits.append(all(fits))
        grad_fits.append(_fits(grad, order))
        if state_fits[-1]:
            updated += filter(_is_in_memory, [param, *states, *scales_of_param])
        if grad_fits[-1]:
            read += filter(_is_in_memory, [grad])
    if not are_apart(updated):
        state_fits = [False] * len(entries)
    if not are_apart([*updated, *read]):
        grad_fits = [False] * len(entries)
    return state_fits, grad_fits


def _require_usable(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> None:
    """Raise RuntimeError for a tensor that cannot be read or updated where it is."""
    _require_memory("parameter", param)
    _require_memory("gradient", grad)
    _require_own_elements("parameter", param)
    for state in states:
        _require_memory("state", state)
        _require_own_elements("state", state)


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor's values are those in its memory: it is dense, and no wrapper around other tensors."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not is_wrapper


def _is_in_memory(tensor: Tensor) -> bool:
    return _has_values(tensor) and tensor.device.type != "meta" and tensor.numel() > 0


def _require_memory(what: str, tensor: Tensor) -> None:
    if _is_in_memory(tensor) and tensor.data_ptr() == 0:
        raise RuntimeError(
            f"the memory of a {what} of shape {tuple(tensor.shape)} has been freed; restore it before step()"
        )


def _require_own_elements(what: str, tensor: Tensor) -> None:
    """Raise RuntimeError for a view that a step cannot update."""
    if not _is_in_memory(tensor):
        return
    shape, strides = tuple(tensor.shape), tensor.stride()
    repeats = [size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)]
    if any(repeats) or tensor.is_neg():
        raise RuntimeError(
            f"a {what} of shape {shape} is an expanded or negated view (strides {strides}), which cannot be updated; "
            "replace it with its .clone()"
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


def _fits_blocks(param: Tensor, scales: Tensor) -> bool:
    """Return whether kernels can take states in 8 bits: they count blocks in memory, so rows must end with one."""
    if not param.is_contiguous() or not _fits(scales, None):
        return False
    return has_whole_blocks(param.shape, scales.shape)
