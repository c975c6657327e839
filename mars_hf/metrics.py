"""What one step of MARS did, summed where the tensors are and read only when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StepMetrics:
    """Sums over the parameters that took the MARS rule in one step.

    `add` queues work on the parameters' device and never waits for it; `read` waits once. All sums are additive over
    parameters, so that pieces can be put together in any order.
    """

    def __init__(self) -> None:
        """Start with empty sums."""
        self._parts: list[Tensor] = []
        self._matrices = 0
        self._elements = 0

    def add(
        self,
        gradients: Sequence[Tensor],
        last_gradients: Sequence[Tensor],
        corrected_norms: Sequence[Tensor],
        clip_threshold: float | None,
        updates: Sequence[Tensor],
    ) -> None:
        """Add parameters: g_t, g_{t-1}, the norms of c_t before clipping, and x_{t+1} - x_t."""
        for g, last, norm, update in zip(gradients, last_gradients, corrected_norms, updates, strict=True):
            clipped = torch.zeros_like(norm) if clip_threshold is None else (norm > clip_threshold).to(norm.dtype)
            sums = [clipped, norm.square(), _dot(g, g), _dot(last, last), _dot(g, last), _dot(update, update)]
            self._parts.append(torch.stack([value.float() for value in sums]))
            self._matrices += 1
            self._elements += update.numel()

    def read(self) -> dict[str, float]:
        """The metrics as floats; empty when no parameter took the MARS rule.

        - `mars/clip_fraction`: share of the parameters whose c_t was longer than `clip_threshold`.
        - `mars/corrected_norm_ratio`: ||c_t|| / ||g_t||, before clipping, over all of them together.
        - `mars/grad_cosine`: cosine of g_t and g_{t-1}; 0 at the first step, which has no g_{t-1}.
        - `mars/update_rms`: root mean square of x_{t+1} - x_t, weight decay included.
        """
        if not self._parts:
            return {}
        total = torch.stack([part.cpu() for part in self._parts]).double().sum(0).tolist()
        clipped, corrected, gradient, last, product, update = total
        return {
            "mars/clip_fraction": clipped / self._matrices,
            "mars/corrected_norm_ratio": (corrected / gradient) ** 0.5 if gradient > 0 else 0.0,
            "mars/grad_cosine": product / (gradient * last) ** 0.5 if gradient > 0 and last > 0 else 0.0,
            "mars/update_rms": (update / self._elements) ** 0.5 if self._elements else 0.0,
        }


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(a * b)
