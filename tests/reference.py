"""MARS in straight-line code, for tests: one parameter, or a run of a model, in float64, every formula written out.

Shares nothing with mars_hf; slow and plain on purpose. `fuzz/judges.py` bounds rounding errors with it;
`kernels/contract.py` has what is below a step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def newton_schulz(
    matrix: torch.Tensor,
    eps: float,
    coefficients: Sequence[tuple[float, float, float]] = ((3.4445, -4.7750, 2.0315),) * 5,
) -> torch.Tensor:
    """Orthogonalize one matrix in float64, in the official code's order of operations."""
    x = matrix.double() / (matrix.double().pow(2).sum().sqrt() + eps)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for a, b, c in coefficients:
        gram = x @ x.T
        product = gram @ x
        x = a * x + b * product + c * gram @ product
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def newton_schulz_of_mars(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """Newton-Schulz of the official MARS code, with its roundings to bfloat16."""
    x = (matrix.bfloat16().float() / (matrix.norm() + eps)).bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        product = gram @ x
        x = 3.4445 * x + -4.7750 * product + 2.0315 * gram @ product
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def newton_schulz_of_mars_m(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """Newton-Schulz of the official MARS-M code, with its roundings to bfloat16."""
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / (x.norm() + eps)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def orthogonalized(rule: str, m: torch.Tensor, beta1: float, eps: float) -> torch.Tensor:
    """Return the direction of mars-shampoo or mars-m: three dimensions are a batch, more are (out, all others)."""
    if not m.numel():
        return m
    stack = m if m.ndim == 3 else m.reshape(1, m.shape[0], -1)
    directions = []
    for matrix in stack:
        rows, cols = matrix.shape
        if rule == "mars-shampoo":
            directions.append(math.sqrt(max(1, rows / cols)) * newton_schulz(matrix / (1 - beta1), eps))
        else:
            directions.append(0.2 * math.sqrt(max(rows, cols)) * newton_schulz(matrix, 1e-7))
    return torch.stack(directions).reshape(m.shape)


def moves(gradient: torch.Tensor) -> torch.Tensor:
    """Return 0 where a whole gradient, or that of an expert of a stack, is exactly zero, else 1."""
    dims = (1, 2) if gradient.ndim == 3 else tuple(range(gradient.ndim))
    return gradient.ne(0).any(dims, keepdim=True).double()


class Reference:
    """One parameter under one rule, in float64."""

    def __init__(
        self,
        x: torch.Tensor,
        *,
        rule: str,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_mode: str = "standard",
        gamma: float = 0.025,
        clip_threshold: float | None = 1.0,
        amsgrad: bool = False,
        second_moment: str = "corrected",
        normalize_rows: float | None = None,
    ) -> None:
        self.x = x.detach().double().clone()
        self.rule, self.lr, self.betas, self.eps, self.weight_decay = rule, lr, betas, eps, weight_decay
        self.gamma, self.clip_threshold, self.amsgrad = gamma, clip_threshold, amsgrad
        self.second_moment = second_moment
        self.weight_decay_mode = weight_decay_mode
        self.normalize_rows = normalize_rows
        # One number for each row of each matrix: three dimensions are a batch, more are (out, all others).
        self.rows = torch.zeros(0 if x.ndim < 2 else x.shape[:2].numel() if x.ndim == 3 else x.shape[0]).double()
        self.initial_lr = lr  # of a schedule that changes lr
        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)
        self.v_max = torch.zeros_like(self.x)
        self.last = torch.zeros_like(self.x)
        self.t = 0

    def corrected(self, g: torch.Tensor) -> torch.Tensor:
        """Return the corrected gradient before clipping."""
        beta1 = self.betas[0]
        return g + self.gamma * beta1 / (1 - beta1) * (g - self.last)

    def average(self, c: torch.Tensor) -> torch.Tensor:
        """Return the first moment."""
        beta1 = self.betas[0]
        return beta1 * self.m + (1 - beta1) * c

    def step(self, gradient: torch.Tensor, stale: torch.Tensor | None = None) -> torch.Tensor:
        """Take one step, in the exact form if a stale gradient is given."""
        g = gradient.double()
        if stale is not None:
            self.last = stale.double()
        beta1, beta2 = self.betas
        self.t += 1
        c = g
        if self.rule != "adamw":
            c = self.corrected(g)
            if self.clip_threshold is not None:
                norm = math.sqrt((c**2).sum().item())
                if norm > self.clip_threshold:
                    c = c * (self.clip_threshold / norm)
            self.last = g
        self.m = self.average(c)
        if self.rule == "mars-lion":
            direction = torch.sign(self.m) * gradient.ne(0)
        elif self.rule in ("mars-shampoo", "mars-m"):
            direction = orthogonalized(self.rule, self.m * moves(gradient), beta1, self.eps)
            if self.normalize_rows is not None:
                direction = self.normalized(direction, self.normalize_rows)
        else:
            square = g**2 if self.second_moment == "gradient" else c**2
            self.v = beta2 * self.v + (1 - beta2) * square
            self.v_max = torch.maximum(self.v_max, self.v)
            v = self.v_max if self.amsgrad else self.v
            m_hat = self.m / (1 - beta1**self.t)
            direction = m_hat / (torch.sqrt(v / (1 - beta2**self.t)) + self.eps)
        self.x = self.x - self.lr * direction - self.decay(direction)
        return self.x

    def normalized(self, direction: torch.Tensor, beta: float) -> torch.Tensor:
        """Return NorMuon's direction, row by row; it commutes with the scale of a matrix, which a square mean has."""
        if not direction.numel():
            return direction
        stack = direction if direction.ndim == 3 else direction.reshape(1, len(direction), -1)
        results = []
        for index, matrix in enumerate(stack):
            rows, cols = matrix.shape
            scale = 0.2 * math.sqrt(max(rows, cols)) if self.rule == "mars-m" else math.sqrt(max(1, rows / cols))
            divided = torch.zeros_like(matrix)
            for row in range(rows):
                place = index * rows + row
                mean = float((matrix[row] / scale).square().sum()) / cols
                self.rows[place] = beta * self.rows[place] + (1 - beta) * mean
                divided[row] = matrix[row] / (math.sqrt(self.rows[place]) + 1e-10)
            before, after = (math.sqrt(float(each.square().sum())) for each in (matrix, divided))
            results.append(divided * (before / after) if after else divided)
        return torch.stack(results).reshape(direction.shape)

    def decay(self, direction: torch.Tensor) -> torch.Tensor:
        """Return what weight decay takes from the parameter."""
        if self.weight_decay_mode == "decoupled":
            factor = self.lr / self.initial_lr if self.initial_lr else 0.0
            return factor * self.weight_decay * self.x
        decays = direction * self.x >= 0 if self.weight_decay_mode == "cautious" else torch.ones_like(self.x)
        return self.lr * self.weight_decay * self.x * decays


# --- runs: autograd's gradients, no Trainer and no optimizer ---------------------------------------------------------


def references(
    weights: dict[str, nn.Parameter], settings: dict[str, Any], lr_1d: float, mars_type: str = "mars-adamw"
) -> dict[str, Reference]:
    """Vectors use AdamW with betas (0.9, 0.95) and no decay."""
    vectors = {"rule": "adamw", "lr": lr_1d, "betas": (0.9, 0.95), "eps": settings["eps"]}
    matrices = {"rule": mars_type, **settings}
    return {name: Reference(x, **(matrices if x.ndim > 1 else vectors)) for name, x in weights.items()}


def place(weights: dict[str, nn.Parameter], at: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in weights.items():
            param.copy_(at[name])


def clip(named: dict[str, Tensor], clipped: set[str]) -> dict[str, Tensor]:
    """Limit the global norm of those in `clipped` to 1."""
    norm = torch.stack([named[name].square().sum() for name in named if name in clipped]).sum().sqrt()
    factor = min(1.0, 1 / (norm.item() + 1e-6))
    return {name: gradient * (factor if name in clipped else 1.0) for name, gradient in named.items()}


def trajectory(
    rules: dict[str, Reference],
    gradients: Callable[[int, dict[str, Tensor]], dict[str, Tensor]],
    steps: int,
    *,
    exact: bool = True,
    skipped: Callable[[int], bool] = lambda step: False,
    found: Sequence[dict[str, Tensor]] | None = None,
) -> list[dict[str, Tensor]]:
    """Return the float32 parameters after every step.

    Args:
        rules: of each parameter; moved.
        gradients: of a step's batch, at other parameters.
        steps: their number.
        exact: whether the last gradient is computed on this step's batch.
        skipped: whether a gradient scaler skips a step.
        found: another implementation's parameters, to continue from at every step (moments stay our own). For low
            precision, where rounding turns the last bits of the parameters into jumps of the gradient.
    """
    previous, after = {}, []
    for step in range(steps):
        if not skipped(step):
            x = {name: rule.x for name, rule in rules.items()}
            stale = gradients(step, previous) if exact and previous else {}
            current, previous = gradients(step, x), x
            for name, gradient in current.items():
                rules[name].step(gradient, stale.get(name, torch.zeros_like(gradient)) if exact else None)
        after.append({name: rule.x.float() for name, rule in rules.items()})
        for name, rule in rules.items():
            rule.x = (found or after)[step][name].double()
    return after


def batches(dataset: Any, size: int, accumulation: int, epochs: int) -> list[list[Batch]]:
    """Return the micro-batches of every step, in data order; the last step of an epoch may have fewer."""
    rows = [dataset[index] for index in range(len(dataset))]
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    micro = [{key: torch.stack([row[key] for row in group]) for key in group[0]} for group in groups]
    return [micro[start : start + accumulation] for start in range(0, len(micro), accumulation)] * epochs


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    *,
    settings: dict[str, Any],
    lr_1d: float,
    mars_type: str = "mars-adamw",
    random_states: Sequence[Sequence[Tensor]] | None = None,
    autocast: torch.dtype | None = None,
    scales: Sequence[float] | None = None,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Return the parameters of a language model after every step of exact MARS; both gradients are clipped to norm 1.

    Args:
        model: runs forward and backward; its parameters are the starting point.
        steps: micro-batches of every step.
        settings: lr, betas, eps, weight_decay, gamma, clip_threshold of the matrices.
        lr_1d: learning rate of the vectors.
        mars_type: rule of the matrices.
        random_states: torch's random states before every micro-batch; None if nothing is random.
        autocast: dtype of the forward pass.
        scales: loss scale of every step.
        **options: of `trajectory`.
    """
    weights = dict(model.named_parameters())

    def gradients(step: int, at: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the step's mean loss over all labels."""
        place(weights, at)
        model.zero_grad()
        scale = scales[step] if scales else 1.0
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in steps[step])
        for index, batch in enumerate(steps[step]):
            if random_states:
                torch.set_rng_state(random_states[step][index])
            with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
                logits = model(batch["input_ids"]).logits.float()[:, :-1].flatten(0, 1)
            summed = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
            (summed / items * scale).backward()
        return clip({name: param.grad.double() / scale for name, param in weights.items()}, set(weights))

    return trajectory(references(weights, settings, lr_1d, mars_type), gradients, len(steps), **options)
