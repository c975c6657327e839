"""torch.optim.Muon for matrices and torch.optim.AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Step the groups with role `matrix` by torch.optim.Muon, and all others by torch.optim.AdamW.

    Trainer knows one optimizer. Both share this one's groups and state, so schedulers reach them, and a checkpoint
    holds everything.

    Args:
        groups: parameter groups with `role`, `lr` and `weight_decay`; those that take AdamW with `betas` as well.
        momentum: of Muon, with Nesterov's form.
        ns_steps: steps of Newton-Schulz.
        eps: of AdamW.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float = 0.95, ns_steps: int = 5, eps: float = 1e-8
    ) -> None:
        """Build both optimizers over the groups."""
        matrices = [group for group in groups if group["role"] == "matrix"]
        rest = [group for group in groups if group["role"] != "matrix"]
        # match_rms_adamw: the scale of mars-m, so that both have the same learning rates.
        muon = torch.optim.Muon(matrices, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [muon]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both; `closure` recomputes the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:  # loading a state replaces groups and state
            part.param_groups = [
                group
                for group in self.param_groups
                if (group["role"] == "matrix") == isinstance(part, torch.optim.Muon)
            ]
            part.state = self.state
            part.step()
        return loss
