"""MARS in straight-line code, for tests: one parameter, float64, every formula written out, in one place.

Shares nothing with mars_hf; slow and plain on purpose. `fuzz/judges.py` bounds rounding errors with it;
`kernels/contract.py` has what is below a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


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
        gamma: float = 0.025,
        clip_threshold: float | None = 1.0,
        amsgrad: bool = False,
        second_moment: str = "corrected",
    ) -> None:
        self.x = x.detach().double().clone()
        self.rule, self.lr, self.betas, self.eps, self.weight_decay = rule, lr, betas, eps, weight_decay
        self.gamma, self.clip_threshold, self.amsgrad = gamma, clip_threshold, amsgrad
        self.second_moment = second_moment
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
            direction = torch.sign(self.m)
        elif self.rule in ("mars-shampoo", "mars-m"):
            direction = orthogonalized(self.rule, self.m, beta1, self.eps)
        else:
            square = g**2 if self.second_moment == "gradient" else c**2
            self.v = beta2 * self.v + (1 - beta2) * square
            self.v_max = torch.maximum(self.v_max, self.v)
            v = self.v_max if self.amsgrad else self.v
            m_hat = self.m / (1 - beta1**self.t)
            direction = m_hat / (torch.sqrt(v / (1 - beta2**self.t)) + self.eps)
        self.x = self.x - self.lr * (direction + self.weight_decay * self.x)
        return self.x
