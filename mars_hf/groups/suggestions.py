"""Suggest the settings of each rule from AdamW's, for an equal update RMS and equal half-lives in tokens.

For gradients that are independent from step to step (noise is most of a gradient at usual batches), with
k = γ β₁ / (1 - β₁), the update of an element has, for lr = 1, the root mean square

- AdamW: √((1 - β₁) / (1 + β₁)), the first moment's over the gradient's
- mars-adamw: the first moment's over that of the corrected gradient, which is √((1 + k)² + k²)
- mars-lion: 1, as every element is a sign
- mars-shampoo, mars-m: the scale of the rule times that of an orthogonalized matrix

`docs/choosing.md` says what is derived, published and measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mars_hf.arithmetic.newton_schulz import muon_scale, shampoo_scale
from mars_hf.groups.settings import DEFAULTS, ORTHOGONAL_TYPES, check

# Root mean square of the singular values that five quintic steps leave of a Gaussian matrix: 0.85 to 0.95, by shape.
_SINGULAR_VALUE = 0.9
# Every published configuration that orthogonalizes has beta1 0.95 where AdamW has 0.9: about twice the half-life.
_HALF_LIVES_OF_ORTHOGONAL = 2.0


@dataclass(frozen=True)
class AdamW:
    """AdamW's tuned settings.

    Attributes:
        lr: learning rate, > 0.
        betas: decay rates of the moments.
        weight_decay: decoupled decay of the matrices, as in torch.optim.AdamW.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        check(asdict(self))
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr!r} of AdamW leaves nothing to match; accepted: a finite number > 0")

    def at_batch(self, ratio: float) -> AdamW:
        """Return the settings for `ratio` times as many tokens a step.

        Half-lives in tokens stay, and so does the path of a random walk: the second moment of a noisy gradient is
        inverse to the batch, so its root takes one half of the factor that the step needs.
        """
        betas = (self.betas[0] ** ratio, self.betas[1] ** ratio)
        return AdamW(self.lr * math.sqrt(ratio), betas, self.weight_decay * math.sqrt(ratio))


@dataclass(frozen=True)
class Suggestion:
    """Settings of one rule.

    Attributes:
        settings: keywords of `create`.
        lr_embeddings: the rate at which embeddings and heads train under these settings.
        update_rms: root mean square of a matrix's update over the learning rate.
    """

    settings: Mapping[str, Any]
    lr_embeddings: float
    update_rms: float


def suggest(rule: str, adamw: AdamW, *, batch_ratio: float = 1.0, width: int | None = None) -> Suggestion:
    """Suggest the settings of a rule.

    Args:
        rule: a `mars_type`.
        adamw: AdamW's settings, at the batch that they were tuned at.
        batch_ratio: tokens a step over those of AdamW's tuning, > 0.
        width: of the model, > 0; only mars-shampoo needs it.

    Raises:
        ValueError: an unknown rule, a value out of range, or mars-shampoo without a width.
    """
    check({"mars_type": rule})
    if not (math.isfinite(batch_ratio) and batch_ratio > 0):
        raise ValueError(f"batch_ratio={batch_ratio!r} is out of range; accepted: a finite number > 0")
    orthogonal = rule in ORTHOGONAL_TYPES
    there = adamw.at_batch(batch_ratio)
    slower = _HALF_LIVES_OF_ORTHOGONAL if orthogonal else 1.0
    beta1, beta1_before = there.betas[0] ** (1 / slower), adamw.betas[0] ** (1 / slower)
    # The correction keeps its strength if gamma keeps its share of 1 - beta1.
    gamma = DEFAULTS["gamma"] * (1 - beta1) / (1 - beta1_before)
    rms = update_rms(rule, beta1=beta1, gamma=gamma, width=width)
    lr = there.lr * first_moment_rms(there.betas[0]) / rms
    settings = {
        "mars_type": rule,
        "lr": lr,
        "lr_1d": there.lr,
        "betas": (beta1, there.betas[1]),
        "betas_1d": there.betas,
        "gamma": gamma,
        # A step shrinks a weight by lr * weight_decay.
        "weight_decay": there.weight_decay * there.lr / lr,
        # AdamW decays embeddings; in these rules they are among the parameters that take `*_1d`.
        "weight_decay_1d": there.weight_decay if orthogonal else 0.0,
    }
    return Suggestion(settings, there.lr if orthogonal else lr, rms)


def update_rms(rule: str, *, beta1: float, gamma: float, width: int | None = None) -> float:
    """Return the root mean square of a matrix's update for lr = 1, from independent gradients.

    Args:
        rule: a `mars_type`.
        beta1: decay rate of the first moment.
        gamma: scale of the correction.
        width: of the model; None will not do for mars-shampoo.
    """
    check({"mars_type": rule})
    if rule == "mars-lion":
        return 1.0
    if rule == "mars-adamw":
        k = gamma * beta1 / (1 - beta1)
        return first_moment_rms(beta1, gamma) / math.hypot(1 + k, k)
    if width is None:
        if rule == "mars-shampoo":
            raise ValueError("mars-shampoo's update depends on the width of the model; give its width")
        width = 1  # mars-m's does not
    if width < 1:
        raise ValueError(f"width={width!r} is out of range; accepted: an integer >= 1")
    scale = {"mars-shampoo": shampoo_scale, "mars-m": muon_scale}[rule]
    # The matrices of a transformer's block: query, key, value and output, then an MLP four times as wide.
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    squares = sum(scale(*shape) ** 2 * min(shape) for shape in shapes)
    return _SINGULAR_VALUE * math.sqrt(squares / sum(rows * cols for rows, cols in shapes))


def first_moment_rms(beta1: float, gamma: float = 0.0) -> float:
    """Return the root mean square of m over that of g, from m = (1 - γ) e + γ g with independent g."""
    # e weighs a gradient of age i by (1 - β₁) β₁ⁱ; the squares of these weights add up to (1 - β₁) / (1 + β₁).
    own = (1 - gamma) ** 2 * (1 - beta1) / (1 + beta1)
    return math.sqrt(own + 2 * gamma * (1 - gamma) * (1 - beta1) + gamma**2)


def half_life(beta: float) -> float:
    """Return the number of steps after which an average has lost half of a gradient's weight."""
    return math.log(0.5) / math.log(beta) if beta > 0 else 0.0
