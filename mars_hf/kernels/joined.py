"""Small tensors on a CPU end to end in one: a rule then makes a dozen calls, and not a dozen for each tensor."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from mars_hf.arithmetic import formulas
from mars_hf.arithmetic.eight_bits import Column, Columns, is_coded, tensors_of


def can_sum(gradients: Sequence[Tensor], last_grads: Column) -> bool:
    """Return whether `sums` takes these tensors: contiguous ones, because it adds up in row-major order."""
    return _can_join(gradients, [last_grads]) and all(map(Tensor.is_contiguous, gradients))


def can_update(params: Sequence[Tensor], buffers: Columns, options: formulas.Options) -> bool:
    """Return whether `update` takes these tensors: all at one step, rounded to nearest."""
    have_one_step = len(set(options.steps)) == 1
    return _can_join(params, buffers.values()) and have_one_step and options.rounding.kind == "nearest"


def _can_join(tensors: Sequence[Tensor], columns: Iterable[Column]) -> bool:
    """Return whether tensors are several, on a CPU, with no buffer in 8 bits."""
    return len(tensors) > 1 and tensors[0].device.type == "cpu" and not any(map(is_coded, columns))


def sums(
    gradients: list[Tensor],
    last_grads: list[Tensor],
    *,
    grad_scale: Tensor | None = None,
    k: float = 0.0,
    products: bool = True,
    corrected: bool = True,
) -> Tensor:
    """Take the sums of `formulas.sums`, to the bit."""
    joined = [_flatten_dense_tensors(gradients)]
    joined_last = [_flatten_dense_tensors(last_grads)] if last_grads else []
    g, last, c = formulas.correct(joined, joined_last, grad_scale, k if corrected else None)
    if not products:
        g, last = [], []
    sizes = list(map(Tensor.numel, gradients))
    parts = [list(tensors[0].double().split(sizes)) if tensors else [] for tensors in (g, last, c)]
    return formulas.sums_of(*parts, products=products, corrected=corrected)


def update(params: list[Tensor], gradients: list[Tensor], buffers: Columns, options: formulas.Options) -> None:
    """Update as `formulas.update` does, to the bit."""
    by_shape: dict[torch.Size, list[int]] = collections.defaultdict(list)
    for position, param in enumerate(params):
        by_shape[param.shape].append(position)
    lists = {"params": params, "grads": gradients, **dict(zip(buffers, map(tensors_of, buffers.values()), strict=True))}
    stacks: dict[str, list[list[Tensor]]] = collections.defaultdict(list)
    factors = []  # one for each element
    for shape, positions in by_shape.items():
        for name, tensors in lists.items():
            stacks[name].append([tensors[position] for position in positions])
        if options.factors is not None:
            factors.append(options.factors[positions].unsqueeze(1).expand(-1, shape.numel()).flatten())
    if factors:
        options = replace(options, factors=torch.cat(factors).unsqueeze(0))
    joined = {name: [_join(of_list)] for name, of_list in stacks.items()}
    joined_params, joined_gradients = joined.pop("params"), joined.pop("grads")
    formulas.update(joined_params, joined_gradients, joined, replace(options, steps=options.steps[:1]))
    for name, (tensor,) in {"params": joined_params, **joined}.items():
        _part(tensor, stacks[name])


def _join(stacks: Sequence[list[Tensor]]) -> Tensor:
    """Return a new flat tensor with the elements of all, which are of one shape in each stack."""
    return torch.cat([torch.stack(tensors).flatten() for tensors in stacks])


def _part(joined: Tensor, stacks: Sequence[list[Tensor]]) -> None:
    """Copy the elements of a flat tensor back."""
    parts = joined.split([len(tensors) * tensors[0].numel() for tensors in stacks])
    for part, tensors in zip(parts, stacks, strict=True):
        torch.unbind_copy(part.view(len(tensors), *tensors[0].shape), out=tensors)
