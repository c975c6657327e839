"""Small tensors on a CPU end to end in one: a rule then makes a dozen calls, and not a dozen for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mars_hf.arithmetic import rules
from mars_hf.arithmetic.eight_bits import Column, Columns, is_coded, tensors_of


def can_sum(gradients: Sequence[Tensor], last_grads: Column) -> bool:
    """Return whether `sums` takes these tensors: contiguous ones, because it adds up in row-major order."""
    if len(gradients) < 2 or gradients[0].device.type != "cpu" or is_coded(last_grads):
        return False
    return all(map(Tensor.is_contiguous, gradients))


def can_update(params: Sequence[Tensor], buffers: Columns, options: rules.Options) -> bool:
    """Return whether `update` takes these tensors: all at one step, rounded to nearest, none in 8 bits."""
    if len(params) < 2 or params[0].device.type != "cpu" or any(map(is_coded, buffers.values())):
        return False
    return len(set(options.steps)) == 1 and options.rounding.kind == "nearest"


def sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    *,
    grad_scale: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
) -> Tensor:
    """Take the sums of `rules.sums`, to the bit."""
    joined_last = [_join(last_grads)] if last_grads else []
    of_all = rules.correct([_join(gradients)], joined_last, grad_scale, k if corrected else None)
    sizes = list(map(Tensor.numel, gradients))
    g, last, c = [list(joined[0].split(sizes)) if joined else [] for joined in of_all]
    return rules.sums_of(g, last, c, products=products, corrected=corrected)


def update(params: list[Tensor], gradients: list[Tensor], buffers: Columns, options: rules.Options) -> None:
    """Update as `rules.update` does, to the bit."""
    lists = {name: tensors_of(column) for name, column in buffers.items()}
    joined = {name: [_join(tensors)] for name, tensors in lists.items()}
    joined_params = _join(params)
    factors = options.factors
    if factors is not None:  # one for each element
        sizes = torch.tensor(list(map(Tensor.numel, params)))
        factors = factors.repeat_interleave(sizes).unsqueeze(0)
    options = replace(options, steps=options.steps[:1], factors=factors)
    rules.update([joined_params], [_join(gradients)], joined, options)
    for name, tensors in lists.items():
        _part(joined[name][0], tensors)
    _part(joined_params, params)


def _join(tensors: list[Tensor]) -> Tensor:
    """Return a new flat tensor with the elements of all."""
    return _flatten_dense_tensors(tensors)


def _part(joined: Tensor, tensors: list[Tensor]) -> None:
    """Copy the elements of a flat tensor back."""
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(joined, tensors))
