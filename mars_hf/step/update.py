"""Update the parameters of a bucket; advance first moments for rules that orthogonalize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mars_hf import rules
from mars_hf.distributed import dtensors
from mars_hf.param_groups import rule_of
from mars_hf.step.buckets import Bucket
from mars_hf.step.corrections import Correction, Update
from mars_hf.step.directions import iteration_dtype
from mars_hf.step.metrics import HERE, StepMetrics

_ARITHMETIC = {"adamw": "adamw", "mars-adamw": "adamw", "mars-lion": "lion"}


def update_bucket(update: Update, metrics: StepMetrics | None = None) -> None:
    """Move the parameters of a bucket by one step.

    Args:
        update: a bucket whose steps have been counted.
        metrics: receives the change, piece by piece, which copies one piece at a time; None skips it.
    """
    if metrics is None or not update.bucket.mars:
        _move(update)
        return
    for piece in update.pieces():
        bucket = piece.bucket
        before = bucket.params[0].clone()
        _move(piece)
        dtype = torch.promote_types(bucket.exp_avgs[0].dtype, torch.float32)
        change = bucket.params[0].to(dtype) - before.to(dtype)
        metrics.add_update(change, bucket.process_group if bucket.is_sharded else HERE)


def take_momenta(bucket: Bucket, correction: Correction) -> list[Tensor]:
    """Advance the first moments of a bucket by one step.

    Returns:
        m for each of the optimizer's tensors, with its shape and strides, in the dtype of Newton-Schulz.
    """
    here = [dtensors.local(owner.detach()) for owner in bucket.placements]
    momenta = [torch.empty_like(tensor, dtype=iteration_dtype(bucket.group, tensor)) for tensor in here]
    _run_rule(bucket, correction, bucket.cut(momenta), "momentum")
    return momenta


def keep_gradients(bucket: Bucket, correction: Correction) -> None:
    """Move gradients into the state as last gradients after an update, with the scale they still need."""
    scale = None if correction.scale is None else correction.scale.float()
    kept = bucket.moves_gradients or correction.last_scales is not None
    for owner, state in zip(bucket.owners, bucket.owned, strict=True) if kept and bucket.last_grads else ():
        state.pop("last_grad_scale", None)
        if bucket.moves_gradients:
            state["last_grad"], owner.grad = owner.grad, None
            if scale is not None:
                state["last_grad_scale"] = scale


def _move(update: Update) -> None:
    """Write the parameters, rounded as the group's `rounding` says."""
    bucket = update.bucket
    how = bucket.group["rounding"] if bucket.params[0].dtype == torch.bfloat16 else "nearest"
    if how == "nearest":
        _write(update, bucket.params)
    elif how == "stochastic" and bucket.backend.rounds and bucket.chunk is None:
        _write(update, bucket.params, seeds=_seeds(bucket))
    else:
        for piece in update.pieces():
            _write_rounded(piece)


def _write_rounded(piece: Update) -> None:
    """Update a float32 copy of one piece, then round it into the bfloat16 parameter."""
    bucket = piece.bucket
    (param,) = bucket.params
    values = param.float()
    if bucket.compensations:
        values += bucket.compensations[0]
    _write(piece, [values])
    if bucket.compensations:
        param.copy_(rules.round_compensated(values, bucket.compensations[0]))
    else:
        (seed,) = _seeds(bucket)
        param.copy_(rules.round_stochastically(values, torch.Generator(param.device).manual_seed(seed)))


def _write(update: Update, params: list[Tensor], **how: Any) -> None:
    bucket = update.bucket
    group = bucket.group
    if bucket.chunk is None:
        _run_rule(bucket, update.correction, params, _ARITHMETIC[rule_of(group)], **how)
    else:
        settings = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
        rules.apply(params, update.directions, **settings, foreach=bucket.backend.foreach)


def _run_rule(bucket: Bucket, correction: Correction, params: list[Tensor], rule: str, **how: Any) -> None:
    group = bucket.group
    if correction.clips:
        how["clip_threshold"] = float(group["clip_threshold"])
    bucket.backend.run_update(
        *(params, bucket.gradients, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.last_grads),
        rule=rule,
        steps=bucket.steps,
        lr=group["lr"],
        scale=correction.scale,
        last_scales=correction.last_scales,
        factors=correction.factors,
        k=bucket.k,
        nesterov=0.0 if bucket.last_grads or not bucket.mars else float(group["gamma"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        second_moment=group["second_moment"],
        keep_last=group["is_approx"] and not bucket.moves_gradients,
        **how,
    )


def _seeds(bucket: Bucket) -> list[int]:
    """Return the noise seed of each piece: equal on all ranks that hold it, whatever else its bucket contains."""
    steps = [int(step.item()) for step in bucket.steps]
    return [rules.noise_seed(*own) for own in zip(bucket.slots, steps, bucket.starts, strict=True)]
