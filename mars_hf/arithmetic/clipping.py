"""From sums over whole parameters to what the gradients of a step are multiplied by."""

from __future__ import annotations

from torch import Tensor

# Of the global norm, as torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6


def global_scale(norm: Tensor, max_grad_norm: float) -> Tensor:
    """What clipping by the global norm multiplies every gradient by.

    Args:
        norm: 0-d, of all gradients together.
        max_grad_norm: largest global norm.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    return (max_grad_norm / (norm + _EPS)).clamp_max(1.0)


def corrected_square(sums: Tensor, k: float, scale: Tensor) -> Tensor:
    """<c, c> of c = g' + k (g' - last), g' = scale * g, from the sums that `rules.sums` took of g.

    The scale follows from the gradients of all parameters, so that c cannot be summed in the same pass.
    """
    gg, gl, ll = sums[:3]
    square = ((1 + k) * scale) ** 2 * gg - 2 * (1 + k) * k * scale * gl + k**2 * ll
    return square.clamp_min(0.0)  # rounding; NaN stays NaN


def factors(square: Tensor, clip_threshold: float) -> Tensor:
    """What corrected gradients are multiplied by so that none is longer than `clip_threshold`.

    Args:
        square: <c, c> over the whole parameter, one a tensor.
        clip_threshold: largest norm.

    Source: Algorithm 2 of the paper, parameter by parameter as in the official code.
    """
    return 1 / (square.sqrt() / clip_threshold).clamp_min(1.0)
