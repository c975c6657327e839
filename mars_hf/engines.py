"""Which code does the arithmetic of a batch: the plain rules, or kernels that do the same faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf import rules


class Engine(NamedTuple):
    """One way to run `sums` and `update` of a batch."""

    name: str

    def sums(self, gradients: list[Tensor], last_grads: list[Tensor], **settings: Any) -> Tensor:
        """As `rules.sums`."""
        return rules.sums(gradients, last_grads, foreach=self.name == "foreach", **settings)

    def update(self, *tensors: list[Tensor], steps: Sequence[Tensor], lr: float | Tensor, **settings: Any) -> None:
        """As `rules.update`, with numbers as the optimizer has them."""
        numbers = [step.item() for step in steps]
        rules.update(*tensors, steps=numbers, lr=float(lr), foreach=self.name == "foreach", **settings)


def choose(group: dict[str, Any], device: torch.device) -> Engine:
    """The engine for tensors of a group on one device."""
    foreach = device.type != "cpu" if group["foreach"] is None else group["foreach"]
    return Engine("foreach" if foreach else "for-loop")
