"""MARS in a few readable lines: one tensor, one rule, no options. `Mars` is held to this by the tests.

What has no gradient moves here by its momentum, as in the paper. In `Mars` it rests: see `formulas.update`, resting.py.

Algorithms and equations are those of arXiv 2411.10438 (mars-adamw, mars-lion, mars-shampoo); mars-m is that of arXiv
2510.21800. Where the official code differs from the paper, this follows the code and says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA, EPS, CLIP = 0.025, 1e-8, 1.0


def newton_schulz(m: Tensor, eps: float) -> Tensor:
    """Return an approximation of U V^T for m = U S V^T: five quintic steps (the paper's Algorithm 4 takes an SVD)."""
    x = m / (m.norm() + eps)
    x = x.mT if m.shape[0] > m.shape[1] else x
    for _ in range(5):
        xxt = x @ x.mT
        x = 3.4445 * x - 4.7750 * xxt @ x + 2.0315 * xxt @ xxt @ x
    return x.mT if m.shape[0] > m.shape[1] else x


class MarsReference:
    """Steps one parameter; x, and with it the arithmetic, may be of any floating point dtype.

    Args:
        x: parameter x_t, two-dimensional for mars-shampoo and mars-m; updated in place.
        rule: `"mars-adamw"`, `"mars-lion"`, `"mars-shampoo"` or `"mars-m"`.
        lr: learning rate.
        betas: decay rates of the two moments.
        weight_decay: decoupled decay.
    """

    def __init__(
        self, x: Tensor, rule: str, lr: float, betas: tuple[float, float] = (0.95, 0.99), weight_decay: float = 0.0
    ) -> None:
        """Start with zero moments and no last gradient."""
        self.x, self.rule, self.lr, self.betas, self.weight_decay = x, rule, lr, betas, weight_decay
        self.m, self.v, self.last = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
        self.t = 0

    @torch.no_grad()
    def step(self, g: Tensor, stale: Tensor | None = None) -> None:
        """Take one step.

        Args:
            g: gradient g_t of this batch at x_t, globally clipped if the loop clips.
            stale: gradient of this batch at x_{t-1} (exact MARS); None takes g_{t-1} (approximate MARS).
        """
        beta1, beta2 = self.betas
        self.t += 1
        last = self.last if stale is None else stale  # zero at t = 1 (the paper corrects by 0 there)
        c = g + GAMMA * beta1 / (1 - beta1) * (g - last)  # Algorithm 1, c_t: corrected gradient
        c = c / max(1.0, float(c.norm()) / CLIP)  # Algorithm 1, clipped c_t; per parameter, as in the code
        self.m = beta1 * self.m + (1 - beta1) * c  # Algorithm 1, m_t: first moment
        if self.rule == "mars-adamw":
            self.v = beta2 * self.v + (1 - beta2) * c**2  # eq. 3.12, v_t: second moment of the corrected gradient
            m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
            direction = m_hat / (v_hat.sqrt() + EPS)  # Algorithm 2, AdamW
        elif self.rule == "mars-lion":
            direction = self.m.sign()  # Algorithm 3, Lion
        elif self.rule == "mars-shampoo":  # Algorithm 4, with Newton-Schulz, clipping and this scale from the code
            direction = max(1, self.x.shape[0] / self.x.shape[1]) ** 0.5 * newton_schulz(self.m / (1 - beta1), EPS)
        elif self.rule == "mars-m":  # arXiv 2510.21800
            direction = 0.2 * max(self.x.shape) ** 0.5 * newton_schulz(self.m, 1e-7)
        else:
            raise ValueError(f"rule={self.rule!r} is unknown; accepted: mars-adamw, mars-lion, mars-shampoo, mars-m")
        self.x -= self.lr * (direction + self.weight_decay * self.x)  # Algorithm 1, x_{t+1}
        self.last = g
