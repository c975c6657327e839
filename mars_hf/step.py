"""One step on lists of tensors: take norms, clip, orthogonalize, update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mars_hf import rules
from mars_hf.exchange import Exchange, Matrix, Round
from mars_hf.last_norms import LastNorms
from mars_hf.lists import TensorList
from mars_hf.metrics import HERE, StepMetrics
from mars_hf.orthogonalize import NewtonSchulz, compute_directions, iteration_dtype, newton_schulz_of
from mars_hf.ranks import SharedStep

# Rows of the sums over a list: <g, g>, <g, last>, <last, last>, <c, c>.
GG, GL, LL, CC = range(4)
PRODUCTS, CORRECTED = slice(GG, LL + 1), slice(CC, CC + 1)


# --- norms ------------------------------------------------------------------------------------------------------------


def take_sums(
    lists: Sequence[TensorList], max_grad_norm: float | None, metrics: StepMetrics | None, last_norms: LastNorms
) -> None:
    """Take the sums over each list that needs norms.

    Lists of compiled kernels that clip get limits from remembered norms instead: `update` sees to the rest.

    Args:
        lists: the lists of the step.
        max_grad_norm: largest global norm; None for no scaling.
        metrics: what measures the step; None for nothing.
        last_norms: norms of last gradients that the step before has taken.
    """
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
    tensors.sums = tensors.backend.run_sums(
        tensors.grads,
        tensors.last_grad,
        products=metrics is not None,
        scale=tensors.scale,
        k=tensors.correction,
    )


def _take_products(tensors: TensorList, metrics: StepMetrics | None, last_norms: LastNorms) -> None:
    """Take the products: <c, c> follows from them when the norm of all gradients is known."""
    last_grads = tensors.last_grad if _needs_corrected(tensors, metrics) else []
    if _can_bound(tensors):
        _bound(tensors, last_norms)
        last_grads = []
    tensors.sums = tensors.backend.run_sums(
        tensors.grads, last_grads, corrected=False, scale=tensors.scale, k=tensors.correction
    )


def _needs_corrected(tensors: TensorList, metrics: StepMetrics | None) -> bool:
    """Return whether the norms of corrected gradients are needed."""
    return tensors.clip_threshold is not None or (metrics is not None and tensors.rule.corrects)


def _can_bound(tensors: TensorList) -> bool:
    """Return whether remembered norms can bound c: if the update can leave out tensors that may be clipped."""
    if tensors.clip_threshold is None or not tensors.last_grad or not tensors.group["is_approx"]:
        return False
    if tensors.backend.name != "compiled" or tensors.process_group is not None:
        return False
    return not any(map(Tensor.is_inference, tensors.last_grad))  # these have no versions


def _bound(tensors: TensorList, last_norms: LastNorms) -> None:
    assert tensors.clip_threshold is not None
    tensors.limits = last_norms.limits(tensors.last_grad, tensors.clip_threshold, tensors.correction)


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
    scale = rules.global_scale(norm, max_grad_norm)
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
    tensors.scale = scale if tensors.scale is None else tensors.scale * scale
    if tensors.limits:
        tensors.squares = sums[GG] * scale**2
        if metrics is not None:  # the factors that the update would find, to the bit
            tensors.limits = []
            sums = tensors.backend.run_sums(tensors.grads, tensors.last_grad, scale=tensors.scale, k=k)
            _set_clip_factors(tensors, sums, shared, metrics)
    elif _needs_corrected(tensors, metrics):
        whole = shared.whole_sums(tensors, sums[PRODUCTS])
        square = rules.corrected_square(whole, k, scale)
        _clip(tensors, square)
        if metrics is not None:
            corrected = rules.corrected_square(sums, k, scale)
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
        tensors.factors = rules.clip_factors(square, tensors.clip_threshold)


def _measure(tensors: TensorList, sums: Tensor, square: Tensor, metrics: StepMetrics) -> None:
    metrics.add(
        sums,
        square,
        tensors.fractions,
        tensors.clip_threshold,
        has_last=bool(tensors.last_grad),
        group=_measured_by(tensors),
    )


def _measured_by(tensors: TensorList) -> Any:
    """Return whose metrics a list counts in: those of the ranks that hold its shards, or of this one."""
    return HERE if tensors.process_group is None else tensors.process_group


# --- matrices ---------------------------------------------------------------------------------------------------------


def update_matrices(
    lists: Sequence[TensorList],
    param_groups: Sequence[Mapping[str, Any]],
    shared: tuple[Exchange, Round] | None,
    metrics: StepMetrics | None,
) -> None:
    """Advance the first moments of a chunk, orthogonalize them and move the parameters; collective if ranks share it.

    Args:
        lists: the lists of the chunk; on this rank there may be none.
        param_groups: the optimizer's groups.
        shared: the exchange and the matrices of a round that ranks share; None for matrices of this rank alone.
        metrics: see `update`.
    """
    if shared is None:
        directions = _directions_here(lists)
    else:
        directions = _directions_of_ranks(lists, param_groups, *shared)
    for tensors in lists:
        count = len(tensors.params)
        update(tensors, directions[:count], metrics)
        del directions[:count]


def _directions_here(lists: Sequence[TensorList]) -> list[Tensor]:
    """Return the directions of matrices of this rank alone."""
    momenta: list[Tensor] = []
    settings: list[NewtonSchulz] = []
    for tensors in lists:
        dtype = iteration_dtype(tensors.group, tensors.params[0], tensors.params[0].device)
        momenta += _advance_momenta(tensors, dtype)
        settings += [newton_schulz_of(tensors.group, dtype)] * len(tensors.params)
    is_double = lists[0].params[0].dtype == torch.float64
    return compute_directions(momenta, settings, torch.float64 if is_double else torch.float32)


def _directions_of_ranks(
    lists: Sequence[TensorList], param_groups: Sequence[Mapping[str, Any]], exchange: Exchange, matrices: Round
) -> list[Tensor]:
    """Return what this rank holds of the directions of matrices that ranks share. Collective."""
    dtype = exchange.groups.dtype
    momenta: dict[int, Tensor] = {}
    devices: list[torch.device] = []
    for tensors in lists:
        advanced = _advance_momenta(tensors, dtype)
        momenta |= dict(zip(tensors.indices, advanced, strict=True))
        devices += [momentum.device for momentum in advanced]

    def work(owned: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
        settings = [newton_schulz_of(param_groups[matrix.group], dtype) for matrix in owned]
        return compute_directions(wholes, settings, dtype)

    results = exchange.run(matrices, momenta, work)
    return [results[index].to(device) for index, device in zip(momenta, devices, strict=True)]


def _advance_momenta(tensors: TensorList, dtype: torch.dtype) -> list[Tensor]:
    """Advance the first moments of a list, and return them in the dtype of the iteration."""
    momenta = [torch.empty_like(param, dtype=dtype) for param in tensors.params]
    _write(tensors, momenta, "momentum")
    return momenta


# --- update -----------------------------------------------------------------------------------------------------------


def count_steps(states: Sequence[Mapping[str, Any]]) -> None:
    """Count a step in the states of the parameters that it moves."""
    if states:
        torch._foreach_add_([state["step"] for state in states], 1)


def update(tensors: TensorList, directions: list[Tensor] | None = None, metrics: StepMetrics | None = None) -> None:
    """Move the parameters of a list by one step, and keep its gradients as last gradients.

    Args:
        tensors: the list; its steps have been counted.
        directions: one per entry if the rule orthogonalizes; None if not.
        metrics: receives the change, entry by entry, which copies one at a time; None skips it.
    """
    if metrics is None or not tensors.rule.corrects:
        _move(tensors, directions)
        return
    for single, direction in _one_by_one(tensors, directions):
        (param,) = single.params
        before = param.clone()
        _move(single, direction)
        dtype = torch.promote_types(single.exp_avg[0].dtype, torch.float32)
        metrics.add_update(param.to(dtype) - before.to(dtype), _measured_by(tensors))


def _one_by_one(
    tensors: TensorList, directions: list[Tensor] | None
) -> Iterator[tuple[TensorList, list[Tensor] | None]]:
    """Yield a list of each entry, with its direction."""
    for position in range(len(tensors.params)):
        yield tensors.select([position]), None if directions is None else [directions[position]]


def _move(tensors: TensorList, directions: list[Tensor] | None) -> None:
    """Write the moved parameters of a list."""
    group = tensors.group
    rounding = _rounding(tensors)
    if directions is None:
        _write(tensors, tensors.params, tensors.rule.arithmetic, rounding)
    else:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        rules.apply(tensors.params, directions, lr=lr, weight_decay=weight_decay, rounding=rounding)


def _write(
    tensors: TensorList, params: list[Tensor], arithmetic: str, rounding: rules.Rounding = rules.NEAREST
) -> None:
    """Write what an arithmetic gives into `params`: the moved parameters, or for "momentum" the first moments."""
    squares = tensors.backend.run_update(
        params,
        tensors.grads,
        tensors.exp_avg,
        tensors.exp_avg_sq,
        tensors.max_exp_avg_sq,
        tensors.last_grad,
        options=_options(tensors, arithmetic, rounding),
    )
    if tensors.limits:
        tensors.squares = squares
        _write_left_out(tensors, params, arithmetic)


def _write_left_out(tensors: TensorList, params: list[Tensor], arithmetic: str) -> None:
    """Update the entries above their limits, which may be clipped: now their norms are taken."""
    assert tensors.squares is not None and tensors.clip_threshold is not None
    positions = []
    for position, (square, limit) in enumerate(zip(tensors.squares.tolist(), tensors.limits, strict=True)):
        if not square <= limit:  # NaN is above, too
            positions.append(position)
    if not positions:
        return
    left = replace(tensors.select(positions), limits=[], squares=None)
    sums = left.backend.run_sums(left.grads, left.last_grad, products=False, scale=left.scale, k=left.correction)
    left.factors = rules.clip_factors(sums[CC], tensors.clip_threshold)
    moves_params = params is tensors.params
    _write(
        left,
        [params[position] for position in positions],
        arithmetic,
        _rounding(left) if moves_params else rules.NEAREST,
    )


def _options(tensors: TensorList, arithmetic: str, rounding: rules.Rounding) -> rules.Options:
    group = tensors.group
    averages_gradients = tensors.rule.corrects and not tensors.last_grad
    return rules.Options(
        arithmetic=arithmetic,
        steps=[step.item() for step in tensors.steps],
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        k=tensors.correction,
        scale=tensors.scale,
        factors=tensors.factors,
        nesterov=float(group["gamma"]) if averages_gradients else 0.0,
        second_moment=group["second_moment"],
        rounding=rounding,
        limits=tensors.limits,
        squares=tensors.squares,
    )


def _rounding(tensors: TensorList) -> rules.Rounding:
    """Return how a list's parameters are rounded."""
    kind = tensors.group["rounding"]
    if kind == "nearest" or tensors.params[0].dtype != torch.bfloat16:
        return rules.NEAREST
    if kind == "kahan":
        return rules.Rounding(kind=kind, compensations=tensors.compensation)
    return rules.Rounding(kind=kind, seeds=_seeds(tensors))


def _seeds(tensors: TensorList) -> list[int]:
    """Return the noise seed of each entry: equal on all ranks that hold it, whatever else its list contains."""
    steps = [int(step.item()) for step in tensors.steps]
    return [rules.noise_seed(*entry) for entry in zip(tensors.indices, steps, tensors.offsets, strict=True)]
