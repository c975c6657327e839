"""Turn sums over whole parameters into the scale and the clipping factors of a step."""

from __future__ import annotations

from torch import Tensor

# Added to the global norm, as in torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6


def global_scale(norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the factor by which clipping to a global norm scales every gradient.

    Args:
        norm: 0-d, the norm of all gradients together.
        max_grad_norm: largest global norm.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    # scale = min(1, max_grad_norm / (‖g‖ + eps))
    return (max_grad_norm / (norm + _EPS)).clamp_max(1.0)


def corrected_square(sums: Tensor, k: float, scale: Tensor) -> Tensor:
    """Return <c, c> for c = g' + k (g' - last), g' = scale * g, from the sums of `rules.sums` over g.

    The scale depends on the gradients of all parameters, so one pass cannot sum c too.
    """
    gg, gl, ll = sums[:3]
    # ‖c‖² = (1 + k)² scale² <g, g> - 2 (1 + k) k scale <g, last> + k² <last, last>
    square = ((1 + k) * scale) ** 2 * gg - 2 * (1 + k) * k * scale * gl + k**2 * ll
    return square.clamp_min(0.0)  # rounding can make it negative; NaN stays NaN


def factors(square: Tensor, clip_threshold: float) -> Tensor:
    """Return the factors that clip each corrected gradient to the norm `clip_threshold`.

    Args:
        square: <c, c> over the whole parameter, one per tensor.
        clip_threshold: largest norm.

    Source: Algorithm 2 of the paper, applied parameter by parameter as in the official code.
    """
    # c̃_t = c_t / max(1, ‖c_t‖ / clip_threshold)    (Algorithm 2, where the threshold is 1)
    return 1 / (square.sqrt() / clip_threshold).clamp_min(1.0)
