"""Find the placements of a step's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mars_hf.distributed.locator import Locator
from mars_hf.distributed.placement import Placement
from mars_hf.param_groups import takes_mars


def locate(
    param_groups: Sequence[Mapping[str, Any]], locator: Locator, max_grad_norm: float | None
) -> dict[Tensor, Placement]:
    """Return the placements of sharded parameters whose norms the step may need; whole parameters have none."""
    found = {}
    slot = 0
    for group in param_groups:
        for param in group["params"]:
            if takes_mars(group) or max_grad_norm is not None:
                placement = locator.locate(param, slot)
                if placement is not None:
                    found[param] = placement
            slot += 1
    return found
