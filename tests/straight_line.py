"""Exact MARS on GPT-2 in straight-line code: no Trainer, no optimizer; autograd gradients, the rest in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from reference import Reference
from torch import Tensor, nn

Batch = dict[str, Tensor]


def batches(dataset: Any, size: int, accumulation: int, epochs: int) -> list[list[Batch]]:
    """Return the micro-batches of every step, in data order; the last step of an epoch may have fewer."""
    steps = []
    for _ in range(epochs):
        rows = [dataset[index] for index in range(len(dataset))]
        micro = [
            {key: torch.stack([row[key] for row in rows[start : start + size]]) for key in rows[0]}
            for start in range(0, len(rows), size)
        ]
        steps += [micro[start : start + accumulation] for start in range(0, len(micro), accumulation)]
    return steps


def gradients(
    model: nn.Module,
    at: dict[str, Tensor],
    micro_batches: Sequence[Batch],
    *,
    max_grad_norm: float,
    random_states: Sequence[Tensor],
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """Return the gradient of a step's mean loss over all labels at parameters `at`, clipped to a global norm."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(at[name])
            param.grad = None
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches)
    for batch, state in zip(micro_batches, random_states, strict=True):
        torch.set_rng_state(state)
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            logits = model(batch["input_ids"]).logits
        summed = nn.functional.cross_entropy(
            logits.float()[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        (summed / items * scale).backward()
    found = {name: param.grad.double() / scale for name, param in model.named_parameters()}
    norm = torch.stack([gradient.square().sum() for gradient in found.values()]).sum().sqrt()
    factor = min(1.0, max_grad_norm / (norm.item() + 1e-6)) if max_grad_norm > 0 else 1.0
    return {name: gradient * factor for name, gradient in found.items()}


def train(
    model: nn.Module,
    steps: Iterable[Sequence[Batch]],
    *,
    settings: dict[str, Any],
    mars_type: str = "mars-adamw",
    lr_1d: float,
    max_grad_norm: float = 1.0,
    random_states: Sequence[Sequence[Tensor]] | None = None,
    skipped: Callable[[int], bool] = lambda step: False,
    autocast: torch.dtype | None = None,
    scales: Sequence[float] | None = None,
    found: Sequence[dict[str, Tensor]] | None = None,
) -> list[dict[str, Tensor]]:
    """Return the parameters after every step.

    Args:
        model: runs forward and backward; its parameters are the starting point.
        steps: micro-batches of every step.
        settings: lr, betas, eps, weight_decay, gamma, clip_threshold of the matrices.
        mars_type: rule of the matrices.
        lr_1d: learning rate of the vectors, which use AdamW with betas (0.9, 0.95) and no decay.
        max_grad_norm: largest global norm of both gradients; 0 for no clipping.
        random_states: torch's random states before every micro-batch; None if nothing is random.
        skipped: whether a gradient scaler skips a step.
        autocast: dtype of the forward pass.
        scales: loss scale of every step.
        found: another implementation's parameters, to continue from at every step (moments stay our own). For low
            precision, where rounding turns the last bits of the parameters into jumps of the gradient.
    """
    x = {name: param.detach().clone() for name, param in model.named_parameters()}
    vectors = {"lr": lr_1d, "betas": (0.9, 0.95), "eps": settings["eps"]}
    rules = {
        name: Reference(tensor, **settings, rule=mars_type)
        if tensor.ndim > 1
        else Reference(tensor, **vectors, rule="adamw")
        for name, tensor in x.items()
    }
    previous = None
    trajectory = []
    for step, micro_batches in enumerate(steps):
        if skipped(step):
            trajectory.append(x)
            continue
        now = {
            "max_grad_norm": max_grad_norm,
            "random_states": random_states[step] if random_states else [torch.get_rng_state()] * len(micro_batches),
            "autocast": autocast,
            "scale": scales[step] if scales else 1.0,
        }
        current = gradients(model, x, micro_batches, **now)
        stale = gradients(model, previous, micro_batches, **now) if previous else {}
        previous = x
        x = {
            name: rule.step(current[name], stale.get(name, torch.zeros_like(current[name]))).float()
            for name, rule in rules.items()
        }
        trajectory.append(x)
        if found is not None:
            x = found[step]
            for name, rule in rules.items():
                rule.x = x[name].double()
    return trajectory
