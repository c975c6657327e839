"""What a step knows of its gradients before it moves: which are zero, and norms, which become scale and factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mars_hf.arithmetic import formulas, resting
from mars_hf.step.last_norms import LastNorms
from mars_hf.step.lists import TensorList
from mars_hf.step.metrics import StepMetrics, counted_by
from mars_hf.step.ranks import SharedStep

# Rows of the sums over a list: <g, g>, <g, last>, <last, last>, <c, c>.
GG, GL, LL, CC = range(4)
PRODUCTS, CORRECTED = slice(GG, LL + 1), slice(CC, CC + 1)


# --- norms ------------------------------------------------------------------------------------------------------------


def take_sums(
    lists: Sequence[TensorList], max_grad_norm: float | None, metrics: StepMetrics | None, last_norms: LastNorms | None
) -> None:
    """Take the sums over each list that needs norms.

    Lists of compiled kernels that clip get bounds from remembered norms instead: the kernels see to the rest.

    Args:
        lists: the lists of the step.
        max_grad_norm: largest global norm; None for no scaling.
        metrics: what measures the step; None for nothing.
        last_norms: norms of last gradients that the step before has taken; None if there are none.
    """
    last_norms = last_norms or LastNorms()
    for tensors in lists:
        if max_grad_norm is None:
            _take_corrected(tensors, metrics, last_norms)
        else:
            _take_products(tensors, metrics, last_norms)


def _take_corrected(tensors: TensorList, metrics: StepMetrics | None, last_norms: LastNorms) -> None:
    """Take <c, c>, and the products that metrics need."""
    if not _needs_corrected(tensors, metrics):
        return
    if metrics is None and _can_bound(tensors):
        _bound(tensors, last_norms)
        return
    tensors.sums = tensors.run_sums(products=metrics is not None)


def _take_products(tensors: TensorList, metrics: StepMetrics | None, last_norms: LastNorms) -> None:
    """Take the products: <c, c> follows from them when the norm of all gradients is known."""
    can_bound = _can_bound(tensors)
    if can_bound:
        _bound(tensors, last_norms)
    needs_last_grads = _needs_corrected(tensors, metrics) and not can_bound
    tensors.sums = tensors.run_sums(without_last_grads=not needs_last_grads, corrected=False)


def _needs_corrected(tensors: TensorList, metrics: StepMetrics | None) -> bool:
    """Return whether the norms of corrected gradients are needed."""
    return tensors.clip_threshold is not None or (metrics is not None and tensors.rule.corrects)


def norms_taken(lists: Sequence[TensorList]) -> LastNorms:
    """Return the norms that the updates have taken of gradients, which are last gradients now."""
    norms = LastNorms()
    for tensors in lists:
        if tensors.squares is not None:
            norms.remember(tensors.last_grad, tensors.squares)
    return norms


def _can_bound(tensors: TensorList) -> bool:
    """Return whether remembered norms can bound c: if the update can clip what they do not bound."""
    if tensors.clip_threshold is None or not tensors.last_grad or not tensors.group["is_approx"]:
        return False
    if tensors.backend.name != "compiled" or tensors.process_group is not None:
        return False
    return not any(map(Tensor.is_inference, tensors.last_grad))  # these have no versions


def _bound(tensors: TensorList, last_norms: LastNorms) -> None:
    assert tensors.clip_threshold is not None
    tensors.clip_bounds = last_norms.clip_bounds(tensors.last_grad, tensors.clip_threshold, tensors.correction)


def rows_to_reduce(max_grad_norm: float | None) -> slice:
    """Return the rows of the sums of shards that a step needs of whole parameters."""
    return CORRECTED if max_grad_norm is None else PRODUCTS


# --- rest -------------------------------------------------------------------------------------------------------------


def find_moving(lists: Sequence[TensorList]) -> None:
    """Find what has a gradient other than zero, under rules that orthogonalize; everything else rests.

    `SharedStep.merge_moving` replaces the flags of shards by those of whole parameters.
    """
    for tensors in lists:
        if tensors.rule.orthogonalizes:
            tensors.moving = resting.moving_flags(tensors.grads, tensors.units)


# --- clipping ---------------------------------------------------------------------------------------------------------


def set_factors(
    lists: Sequence[TensorList], shared: SharedStep, max_grad_norm: float | None, metrics: StepMetrics | None
) -> Tensor | None:
    """Set the scale and the clipping factors of all lists, and return the global norm of the gradients.

    Args:
        lists: the lists of the step, with their sums.
        shared: what ranks share, for lists of shards.
        max_grad_norm: largest global norm; None for no scaling, and no norm.
        metrics: receives the sums; None measures nothing.
    """
    summed = [(tensors, tensors.sums) for tensors in lists if tensors.sums is not None]
    if max_grad_norm is None:
        for tensors, sums in summed:
            _set_clip_factors(tensors, sums, shared, metrics)
        return None
    squares = [sums[GG].sum() for tensors, sums in summed if tensors.process_group is None]
    norm = _norm_of([*squares, *shared.sums_of_row(GG)])
    scale = formulas.global_scale(norm, max_grad_norm)
    for tensors, sums in summed:
        _set_scale(tensors, sums, scale, shared, metrics)
    return norm


def _norm_of(squares: list[Tensor]) -> Tensor:
    """Return the norm of all gradients, from sums of their squares on any devices."""
    if not squares:
        squares = [torch.zeros((), dtype=torch.float64, device="cpu")]
    device = squares[0].device
    return torch.stack([square.to(device) for square in squares]).sum().sqrt()


def _set_scale(
    tensors: TensorList, sums: Tensor, scale: Tensor, shared: SharedStep, metrics: StepMetrics | None
) -> None:
    """Scale the gradients of a list, and then clip its corrected gradients."""
    k = tensors.correction
    scale = scale.to(sums.device, sums.dtype, non_blocking=True)
    tensors.grad_scale = scale if tensors.grad_scale is None else tensors.grad_scale * scale
    if tensors.clip_bounds:
        tensors.squares = sums[GG] * scale**2
        if metrics is not None:  # the factors that the update would find, to the bit
            tensors.clip_bounds = []
            sums = tensors.run_sums()
            _set_clip_factors(tensors, sums, shared, metrics)
    elif _needs_corrected(tensors, metrics):
        whole = shared.whole_sums(tensors, sums[PRODUCTS])
        square = formulas.corrected_square(whole, k, scale)
        _clip(tensors, square)
        if metrics is not None:
            corrected = formulas.corrected_square(sums, k, scale)
            scaled = torch.stack([sums[GG] * scale**2, sums[GL] * scale, sums[LL], corrected])
            _measure(tensors, scaled, square, metrics)


def _set_clip_factors(tensors: TensorList, sums: Tensor, shared: SharedStep, metrics: StepMetrics | None) -> None:
    """Clip the corrected gradients of a list by their sums of squares."""
    (square,) = shared.whole_sums(tensors, sums[CORRECTED])
    _clip(tensors, square)
    if metrics is not None:
        _measure(tensors, sums, square, metrics)


def _clip(tensors: TensorList, square: Tensor) -> None:
    if tensors.clip_threshold is not None:
        tensors.factors = formulas.clip_factors(square, tensors.clip_threshold)


def _measure(tensors: TensorList, sums: Tensor, square: Tensor, metrics: StepMetrics) -> None:
    fractions = [1.0 if shard is None else shard.numel / shard.whole_numel for shard in tensors.shards]
    metrics.add(
        sums,
        square,
        fractions,
        tensors.clip_threshold,
        has_last=bool(tensors.last_grad),
        group=counted_by(tensors.process_group),
    )
