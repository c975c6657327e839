"""Move the parameters of a step: first moments, directions of matrices, weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf.arithmetic import formulas, resting
from mars_hf.step.lists import TensorList
from mars_hf.step.metrics import StepMetrics, counted_by
from mars_hf.step.ranks import Chunk

# Elements of parameters that are copied at once to measure their change: 256 MiB in float32. A larger one is copied
# alone.
MEASURED_ELEMENTS = 2**26
_ONE = torch.ones((), device="cpu")  # a number would become a tensor once for each count

# --- matrices ---------------------------------------------------------------------------------------------------------


def update_matrices(
    chunk: Chunk, param_groups: Sequence[Mapping[str, Any]], metrics: StepMetrics | None
) -> Iterator[None]:
    """Advance the first moments of a chunk, orthogonalize them and move the parameters; collective if ranks share it.

    It yields where ranks communicate, for the next chunk to begin.

    Args:
        chunk: matrices that are orthogonalized together; this rank may hold none of them.
        param_groups: the optimizer's groups.
        metrics: see `update`.
    """
    momenta: list[Tensor] = []
    failure: Exception | None = None
    for tensors in chunk.lists:
        dtype = chunk.iteration_dtype(tensors)
        try:
            momenta += _advance_momenta(tensors, dtype)
        except Exception as error:
            if chunk.exchange is None:
                raise
            failure = error  # the other ranks wait for this one's part
            momenta += [torch.zeros_like(param, dtype=dtype) for param in tensors.params]
    directions = yield from chunk.directions(momenta, param_groups, failure)
    del momenta
    for tensors in chunk.lists:
        count = len(tensors.params)
        update(tensors, directions[:count], metrics)
        del directions[:count]


def _advance_momenta(tensors: TensorList, dtype: torch.dtype) -> list[Tensor]:
    """Advance the first moments of a list, and return them in the dtype of the iteration; those at rest are zero."""
    momenta = [torch.empty_like(param, dtype=dtype) for param in tensors.params]
    _run_backend(tensors, momenta)
    resting.put_to_rest(momenta, tensors.units, tensors.moving)
    return momenta


# --- update -----------------------------------------------------------------------------------------------------------


def count_steps(steps: Sequence[Tensor]) -> None:
    """Count a step of the parameters that it moves."""
    for step in steps:
        step.add_(_ONE)  # which takes less than a call for all of them


def update(tensors: TensorList, directions: list[Tensor] | None = None, metrics: StepMetrics | None = None) -> None:
    """Move the parameters of a list by one step; its steps have been counted.

    Args:
        tensors: the list.
        directions: one per entry if the rule orthogonalizes, whose moments have advanced. None advances moments, too,
            and keeps the gradients as last gradients.
        metrics: receives the change of the parameters, from copies of `MEASURED_ELEMENTS` at a time; None skips it.
    """
    if metrics is None or not tensors.rule.corrects:
        _move(tensors, directions)
        return
    for positions in _parts_of(tensors.params):
        part = tensors.select(positions)
        of_part = None if directions is None else [directions[position] for position in positions]
        before = [param.clone() for param in part.params]
        _move(part, of_part)
        process_group = counted_by(part.process_group)
        metrics.add_update(part.params, before, process_group)
        if part.params[0].dtype in formulas.HALF_DTYPES and _rounding(part).kind == "nearest":
            metrics.add_lost(part.params, before, part.grads, process_group)


def _parts_of(params: Sequence[Tensor]) -> list[list[int]]:
    """Return positions of successive parameters that together have at most `MEASURED_ELEMENTS`, or are one."""
    parts: list[list[int]] = []
    room = 0
    for position, param in enumerate(params):
        if not parts or param.numel() > room:
            parts.append([])
            room = MEASURED_ELEMENTS
        parts[-1].append(position)
        room -= param.numel()
    return parts


def _move(tensors: TensorList, directions: list[Tensor] | None) -> None:
    if directions is None:
        _run_backend(tensors, tensors.params, _rounding(tensors))
        return
    group = tensors.group
    formulas.apply(
        tensors.params,
        directions,
        lr=float(group["lr"]),
        weight_decay=_weight_decay(group),
        cautious=group["weight_decay_mode"] == "cautious",
        rounding=_rounding(tensors),
    )


def _run_backend(tensors: TensorList, written: list[Tensor], rounding: formulas.Rounding = formulas.NEAREST) -> None:
    """Advance the buffers of a list, and write the moved parameters, or first moments to orthogonalize."""
    squares = tensors.backend.run_update(written, tensors.grads, tensors.buffers, _options(tensors, rounding))
    if tensors.clip_bounds:
        tensors.squares = squares


def _options(tensors: TensorList, rounding: formulas.Rounding) -> formulas.Options:
    group = tensors.group
    averages_gradients = tensors.rule.corrects and not tensors.last_grad
    return formulas.Options(
        arithmetic=tensors.rule.arithmetic,
        steps=[step.item() for step in tensors.steps],
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=_weight_decay(group),
        cautious=group["weight_decay_mode"] == "cautious",
        k=tensors.correction,
        grad_scale=tensors.grad_scale,
        factors=tensors.factors,
        blend=float(group["gamma"]) if averages_gradients else 0.0,
        second_moment=group["second_moment"],
        rounding=rounding,
        clip_bounds=tensors.clip_bounds,
        clip_threshold=math.inf if tensors.clip_threshold is None else float(tensors.clip_threshold),
        squares=tensors.squares,
    )


def note_peaks(groups: Iterable[dict[str, Any]]) -> None:
    """Keep the largest rate of each group with decoupled decay in the group, which checkpoints hold."""
    for group in groups:
        if group["weight_decay_mode"] == "decoupled":
            rates = (group.get("peak_lr", 0.0), group.get("initial_lr", 0.0), group["lr"])
            group["peak_lr"] = max(map(float, rates))


def _weight_decay(group: Mapping[str, Any]) -> float:
    """Return the decay that is multiplied by the learning rate.

    A decoupled one follows the schedule and not the rate, so it is divided by the peak of the schedule. OneCycleLR
    keeps the peak in the group, as `max_lr`. Elsewhere it is the largest rate so far, and `note_peaks` counts the rate
    that the group was made with and `initial_lr`, too: CyclicLR keeps its lowest rate there, ReduceLROnPlateau none.
    No step decays by more than is stated.
    """
    weight_decay = float(group["weight_decay"])
    if group["weight_decay_mode"] != "decoupled":
        return weight_decay
    peak = max(float(group["max_lr"]), float(group["lr"])) if "max_lr" in group else group["peak_lr"]
    return weight_decay / peak if peak else 0.0


def _rounding(tensors: TensorList) -> formulas.Rounding:
    """Return how a list's parameters are rounded."""
    kind = tensors.group["rounding"]
    if kind == "nearest" or tensors.params[0].dtype != torch.bfloat16:
        return formulas.NEAREST
    if kind == "kahan":
        return formulas.Rounding(kind=kind, compensations=tensors.compensation)
    return formulas.Rounding(kind=kind, seeds=_seeds(tensors))


def _seeds(tensors: TensorList) -> list[int]:
    """Return the noise seed of each entry: equal on all ranks that hold it, whatever else its list contains."""
    steps = [int(step.item()) for step in tensors.steps]
    offsets = [0 if shard is None else shard.slice.offset for shard in tensors.shards]
    return [formulas.noise_seed(*entry) for entry in zip(tensors.indices, steps, offsets, strict=True)]
