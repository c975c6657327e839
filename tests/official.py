"""Newton-Schulz with the bf16 roundings of the official implementations, one (rows, cols) matrix at a time."""

from __future__ import annotations

import torch

from mars_hf.newton_schulz import QUINTIC


def newton_schulz_of_mars(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """Newton-Schulz of the official MARS code."""
    a, b, c = QUINTIC
    x = (matrix.bfloat16().float() / (matrix.norm() + eps)).bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        product = gram @ x
        x = a * x + b * product + c * gram @ product
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def newton_schulz_of_mars_m(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """Newton-Schulz of the official MARS-M code."""
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / (x.norm() + eps)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()
