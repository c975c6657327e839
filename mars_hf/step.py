"""One step on lists of tensors: take norms, clip, orthogonalize, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mars_hf import rules
from mars_hf.distributed.norms import GroupSums
from mars_hf.last_norms import LastNorms
from mars_hf.lists import TensorList
from mars_hf.metrics import HERE, StepMetrics
from mars_hf.orthogonalize import (
    Exchange,
    Matrix,
    NewtonSchulz,
    compute_directions,
    iteration_dtype,
    newton_schulz_of,
)

# Rows of the sums.
GG, GL, LL, CC = range(4)


def take_sums(
    lists: Sequence[TensorList], max_grad_norm: float | None, metrics: StepMetrics | None, last_norms: LastNorms
) -> dict[int, Tensor]:
    """Return the sums over each list that needs norms, by its place: <g, g>, <g, last>, <last, last>, <c, c>.

    Lists of compiled kernels that clip get limits from remembered norms instead: the update sees to the rest.
    """
    folded = max_grad_norm is not None
    sums = {}
    for place, tensors in enumerate(lists):
        group, threshold = tensors.group, tensors.group["clip_threshold"]
        if not folded and (not tensors.rule.corrects or (threshold is None and metrics is None)):
            continue
        remembers = (
            *(tensors.backend.name == "compiled", tensors.process_group is None, group["is_approx"]),
            not any(map(Tensor.is_inference, tensors.last_grad)),  # these have no versions
        )
        if all(remembers) and tensors.last_grad and threshold is not None and (folded or metrics is None):
            tensors.limits = last_norms.limits(tensors.last_grad, threshold, tensors.correction)
        if folded or not tensors.limits:
            needs_last = (threshold is not None or metrics is not None) and not tensors.limits
            sums[place] = tensors.backend.run_sums(
                tensors.grads,
                tensors.last_grad if needs_last else [],
                products=folded or metrics is not None,
                corrected=not folded,
                scale=tensors.scale,
                k=tensors.correction,
            )
    return sums


def set_factors(
    lists: Sequence[TensorList],
    sums: Mapping[int, Tensor],
    whole: GroupSums | None,
    max_grad_norm: float | None,
    metrics: StepMetrics | None,
) -> Tensor | None:
    """Set the scale and the clipping factors of all lists, and return the global norm of the gradients.

    Args:
        lists: the lists of the step.
        sums: from `take_sums`.
        whole: the sums over all ranks, for lists of shards.
        max_grad_norm: largest global norm; None for no scaling, and no norm.
        metrics: receives the sums; None measures nothing.
    """
    norm = global_scale = None
    if max_grad_norm is not None:
        squares = [
            *(rows[GG].sum() for place, rows in sums.items() if lists[place].process_group is None),
            *([] if whole is None else [whole.sum_of_row(GG)]),
        ]
        squares = squares or [torch.zeros((), dtype=torch.float64, device="cpu")]
        norm = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        global_scale = rules.global_scale(norm, max_grad_norm)
    for place, part in sums.items():
        tensors, threshold, k = lists[place], lists[place].group["clip_threshold"], lists[place].correction
        scale = None if global_scale is None else global_scale.to(part.device, part.dtype, non_blocking=True)
        if scale is not None:
            tensors.squares = part[GG] * scale**2 if tensors.limits else None
            tensors.scale = scale if tensors.scale is None else tensors.scale * scale
            if tensors.limits and metrics is not None:  # the factors that the update would find, to the bit
                part, scale = tensors.backend.run_sums(tensors.grads, tensors.last_grad, scale=tensors.scale, k=k), None
                tensors.limits = []
        if tensors.rule.corrects and not tensors.limits:
            rows = part[CC:] if scale is None else part[: LL + 1]
            if tensors.process_group is not None and whole is not None:
                rows = whole.select(tensors.process_group, tensors.indices).to(part)
            square = rows[0] if scale is None else rules.corrected_square(rows, k, scale)
            if metrics is not None:
                if scale is not None:
                    corrected = rules.corrected_square(part, k, scale)
                    part = torch.stack([part[GG] * scale**2, part[GL] * scale, part[LL], corrected])
                group = HERE if tensors.process_group is None else tensors.process_group
                metrics.add(part, square, tensors.fractions, threshold, has_last=bool(tensors.last_grad), group=group)
            if threshold is not None:
                tensors.factors = rules.clip_factors(square, threshold)
    return norm


def update_matrices(
    lists: Sequence[TensorList],
    param_groups: Sequence[Mapping[str, Any]],
    shared: tuple[Exchange, Any] | None,
    metrics: StepMetrics | None,
) -> None:
    """Advance the first moments of a chunk, orthogonalize them and move the parameters; collective if ranks share it.

    Args:
        lists: the lists of the chunk; on this rank there may be none.
        param_groups: the optimizer's groups.
        shared: the exchange and the matrices of a round that ranks share; None for matrices of this rank alone.
        metrics: see `update`.
    """
    momenta: list[Tensor] = []
    settings: list[NewtonSchulz] = []
    for tensors in lists:
        device = tensors.params[0].device if shared is None else shared[0].groups.device
        dtype = iteration_dtype(tensors.group, tensors.params[0], device)
        part = [torch.empty_like(param, dtype=dtype) for param in tensors.params]
        _write(tensors, part, arithmetic="momentum")
        momenta += part
        if shared is None:
            settings += [newton_schulz_of(tensors.group, dtype)] * len(tensors.params)
    if shared is None:
        wide = torch.float64 if lists[0].params[0].dtype == torch.float64 else torch.float32
        directions = compute_directions(momenta, settings, wide)
    else:
        exchange, matrices = shared

        def work(owned: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
            dtype = exchange.groups.dtype
            settings = [newton_schulz_of(param_groups[matrix.group], dtype) for matrix in owned]
            return compute_directions(wholes, settings, dtype)

        indices = [index for tensors in lists for index in tensors.indices]
        results = exchange.run(matrices, dict(zip(indices, momenta, strict=True)), work)
        directions = [results[index].to(momentum.device) for index, momentum in zip(indices, momenta, strict=True)]
    del momenta
    for tensors in lists:
        update(tensors, directions[: len(tensors.params)], metrics)
        del directions[: len(tensors.params)]


def update(tensors: TensorList, directions: list[Tensor] | None = None, metrics: StepMetrics | None = None) -> None:
    """Move the parameters of a list by one step, and keep its gradients as last gradients.

    Args:
        tensors: the list; its steps have been counted.
        directions: one per entry if the rule orthogonalizes; None if not.
        metrics: receives the change, entry by entry, which copies one at a time; None skips it.
    """
    rounding = tensors.group["rounding"] if tensors.params[0].dtype == torch.bfloat16 else "nearest"
    kernel_rounds = rounding == "stochastic" and tensors.backend.kernels is not None and directions is None
    metrics = metrics if tensors.rule.corrects else None
    if metrics is None and (rounding == "nearest" or kernel_rounds):
        _write(tensors, tensors.params, directions, seeded=kernel_rounds)
    else:
        for place, param in enumerate(tensors.params):
            single = tensors.select([place])
            direction = None if directions is None else directions[place : place + 1]
            before = None if metrics is None else param.clone()
            if rounding == "nearest" or kernel_rounds:
                _write(single, [param], direction, seeded=kernel_rounds)
            else:
                _write_rounded(single, direction, rounding)
            if metrics is not None and before is not None:
                dtype = torch.promote_types(single.exp_avg[0].dtype, torch.float32)
                group = HERE if tensors.process_group is None else tensors.process_group
                metrics.add_update(param.to(dtype) - before.to(dtype), group)


def _write_rounded(single: TensorList, direction: list[Tensor] | None, rounding: str) -> None:
    """Update a float32 copy of one entry, then round it into the bfloat16 parameter."""
    (param,) = single.params
    values = param.float()
    if rounding == "kahan":
        values += single.compensation[0]
    _write(single, [values], direction)
    if rounding == "kahan":
        param.copy_(values)
        single.compensation[0].copy_(values - param.float())  # what rounding has lost (Kahan)
    else:
        generator = torch.Generator(param.device).manual_seed(_seeds(single)[0])
        param.copy_(rules.round_stochastically(values, generator))


def _write(
    tensors: TensorList,
    params: list[Tensor],
    directions: list[Tensor] | None = None,
    *,
    arithmetic: str | None = None,
    seeded: bool = False,
) -> None:
    """Write what a list's rule gives into `params`: the moved parameters, or for "momentum" the first moments."""
    group = tensors.group
    if directions is not None:
        rules.apply(params, directions, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))
        return
    options = rules.Options(
        arithmetic=arithmetic or tensors.rule.arithmetic,
        steps=[step.item() for step in tensors.steps],
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        k=tensors.correction,
        scale=tensors.scale,
        factors=tensors.factors,
        nesterov=0.0 if tensors.last_grad or not tensors.rule.corrects else float(group["gamma"]),
        second_moment=group["second_moment"],
        seeds=_seeds(tensors) if seeded else (),
        limits=tensors.limits,
        squares=tensors.squares,
    )
    squares = tensors.backend.run_update(
        *(params, tensors.grads, tensors.exp_avg, tensors.exp_avg_sq, tensors.max_exp_avg_sq, tensors.last_grad),
        options=options,
    )
    if tensors.limits:
        tensors.squares = squares
        pairs = enumerate(zip(squares.tolist(), tensors.limits, strict=True))
        if left := [place for place, (square, limit) in pairs if not square <= limit]:  # c may be clipped
            part = replace(tensors.select(left), limits=[], squares=None)
            sums = part.backend.run_sums(
                part.grads, part.last_grad, products=False, scale=part.scale, k=part.correction
            )
            part.factors = rules.clip_factors(sums[CC], group["clip_threshold"])
            _write(part, [params[place] for place in left], arithmetic=arithmetic, seeded=seeded)


def _seeds(tensors: TensorList) -> list[int]:
    """Return the noise seed of each entry: equal on all ranks that hold it, whatever else its list contains."""
    steps = [int(step.item()) for step in tensors.steps]
    return [rules.noise_seed(*entry) for entry in zip(tensors.indices, steps, tensors.offsets, strict=True)]
