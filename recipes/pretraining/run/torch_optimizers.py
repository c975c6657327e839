"""What comparisons train with besides mars_hf: torch's Muon with its AdamW, and a gamma that falls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mars_hf.training.guard import unwrap_optimizer

# How torch.optim.Muon scales an orthogonalized (out, in) matrix. match_rms_adamw is the scale of mars-m, so that both
# have the same learning rates; original, sqrt(max(1, out / in)), is that of mars-shampoo and of the MARS paper.
SCALES = ("match_rms_adamw", "original")


class MuonWithAdamW(torch.optim.Optimizer):
    """Step the groups with role `matrix` by torch.optim.Muon, and all others by torch.optim.AdamW.

    Trainer knows one optimizer. Both share this one's groups and state, so schedulers reach them, and a checkpoint
    holds everything.

    Args:
        groups: parameter groups with `role`, `lr`, `weight_decay` and `transposed`, which says that matrices are stored
            (in, out); those that take AdamW with `betas` as well.
        lr: learning rate, which schedulers read from `defaults`.
        momentum: of Muon, with Nesterov's form.
        ns_steps: steps of Newton-Schulz.
        eps: of AdamW.
        adjust_lr_fn: one of `SCALES`, for the (out, in) shape of a matrix, however it is stored.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        ns_steps: int = 5,
        eps: float = 1e-8,
        adjust_lr_fn: str = SCALES[0],
    ) -> None:
        """Build both optimizers over the groups."""
        matrices = [group for group in groups if group["role"] == "matrix"]
        if adjust_lr_fn == "original":
            matrices = [part for group in matrices for part in _by_scale(group)]
        rest = [group for group in groups if group["role"] != "matrix"]
        muon = torch.optim.Muon(matrices, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        self._parts: list[torch.optim.Optimizer] = [muon]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both; Trainer never gives a closure."""
        for part in self._parts:  # loading a state replaces groups and state
            part.param_groups = [
                _scaled(group)
                for group in self.param_groups
                if (group["role"] == "matrix") == isinstance(part, torch.optim.Muon)
            ]
            part.state = self.state
            part.step()


def _by_scale(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Divide a group by what torch's original scale, which reads the stored shape, lacks for the (out, in) shape."""
    if not group["transposed"]:
        yield group
        return
    parts: dict[float, list[tuple[str, torch.Tensor]]] = {}
    for name, param in group["params"]:
        inputs, outputs = param.shape
        scale = math.sqrt(max(1.0, outputs / inputs) / max(1.0, inputs / outputs))
        parts.setdefault(scale, []).append((name, param))
    for scale, params in parts.items():
        yield {**group, "params": params, "scale": scale}


def _scaled(group: dict[str, Any]) -> dict[str, Any]:
    """Return the group as a step reads it: `scale` times the learning rate, and the same decay."""
    scale = group.get("scale", 1.0)
    return {**group, "lr": scale * group["lr"], "weight_decay": group["weight_decay"] / scale}


class GammaSchedule(TrainerCallback):
    """Multiply gamma by a factor that falls from 1 to 0 over the run.

    Args:
        shape: `linear` or `cosine`; `constant` or None leave gamma alone.
    """

    def __init__(self, shape: str | None = None) -> None:
        """Choose the shape."""
        self._shape = shape

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the gamma of the step to come; groups keep the first one, so a resumed run goes on with it."""
        progress = state.global_step / state.max_steps
        factors = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        if self._shape in factors:
            for group in unwrap_optimizer(kwargs["optimizer"]).param_groups:
                group.setdefault("initial_gamma", group["gamma"])
                group["gamma"] = group["initial_gamma"] * factors[self._shape]
