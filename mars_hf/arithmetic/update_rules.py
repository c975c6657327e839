"""The update rules: one entry each says what a rule computes, keeps and defaults to.

Whatever depends on the rule of a group asks its entry. `formulas.py` has the arithmetic that entries name: a new rule
is an entry here, and a function there if no other rule has its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mars_hf.arithmetic.formulas import ARITHMETICS
from mars_hf.arithmetic.newton_schulz import muon_scale, shampoo_scale


def first_moment_rms(beta1: float, gamma: float = 0.0) -> float:
    """Return the root mean square of m over that of g, from m = (1 - γ) e + γ g with independent g."""
    # e weighs a gradient of age i by (1 - β₁) β₁ⁱ; the squares of these weights add up to (1 - β₁) / (1 + β₁).
    average = (1 - gamma) ** 2 * (1 - beta1) / (1 + beta1)
    return math.sqrt(average + 2 * gamma * (1 - gamma) * (1 - beta1) + gamma**2)


def _rms_of_adamw(beta1: float, gamma: float) -> float:
    """Return the root mean square of m / √v, where v averages c²."""
    k = gamma * beta1 / (1 - beta1)
    return first_moment_rms(beta1, gamma) / math.hypot(1 + k, k)


def _rms_of_signs(beta1: float, gamma: float) -> float:
    return 1.0


def _eps_of_bias_corrected(group: Mapping[str, Any]) -> float:
    """Return eps for m where a rule orthogonalizes m / (1 - beta1).

    Newton-Schulz normalizes its input, so only eps sees the factor.
    """
    return float(group["eps"] * (1 - group["betas"][0]))


def _eps_of_muon(group: Mapping[str, Any]) -> float:
    return 1e-7


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """How the parameters of a group are updated."""

    name: str  # a `mars_type`, or "adamw"
    arithmetic: str  # the function of `formulas.ARITHMETICS` that writes parameters, or first moments to orthogonalize
    corrects: bool = True  # the gradient is corrected by the last one, and clipped; False for AdamW alone
    # Factor of an orthogonalized (out, in) matrix; None: the rule does not orthogonalize.
    update_scale: Callable[[int, int], float] | None = None
    # What is added to the norm of a first moment to orthogonalize, from its group.
    norm_eps: Callable[[Mapping[str, Any]], float] = _eps_of_muon
    lr_1d_ratio: float = 0.5  # lr_1d / lr where lr_1d is None: that of every published configuration
    # Root mean square of an elementwise update at lr = 1, from beta1 and gamma, if gradients are independent.
    update_rms: Callable[[float, float], float] = _rms_of_signs

    @property
    def orthogonalizes(self) -> bool:
        """Return whether Newton-Schulz makes the direction of the first moment."""
        return self.update_scale is not None

    @property
    def buffers(self) -> Iterable[str]:
        """Return the names of the states of the parameter's shape, besides those of every rule."""
        return ARITHMETICS[self.arithmetic].buffers

    @property
    def has_eps_of_groups(self) -> bool:
        """Return whether the `eps` of a group enters its norms before Newton-Schulz."""
        return self.orthogonalizes and self.norm_eps is not _eps_of_muon

    @property
    def has_second_moment(self) -> bool:
        """Return whether the state has `exp_avg_sq`."""
        return "exp_avg_sq" in self.buffers


ADAMW = UpdateRule(name="adamw", arithmetic="adamw", corrects=False, update_rms=_rms_of_adamw)
MARS_ADAMW = UpdateRule(name="mars-adamw", arithmetic="adamw", update_rms=_rms_of_adamw)
_TABLE = (
    ADAMW,
    MARS_ADAMW,
    UpdateRule(name="mars-lion", arithmetic="lion"),
    UpdateRule(name="mars-shampoo", arithmetic="momentum", update_scale=shampoo_scale, norm_eps=_eps_of_bias_corrected),
    UpdateRule(name="mars-m", arithmetic="momentum", update_scale=muon_scale, norm_eps=_eps_of_muon, lr_1d_ratio=1.0),
)
UPDATE_RULES: Mapping[str, UpdateRule] = {rule.name: rule for rule in _TABLE}


def update_rule(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of an optimizer's group: by its role, `mars_type` and `optimize_1d`."""
    rule = UPDATE_RULES[group["mars_type"]]
    if group["role"] == "matrix":
        return rule
    if group["role"] == "adamw" or not group["optimize_1d"]:
        return ADAMW
    return MARS_ADAMW if rule.orthogonalizes else rule  # vectors, as in the official code
