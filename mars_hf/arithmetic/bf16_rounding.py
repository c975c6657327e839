"""How an update computed in float32 is put into a bfloat16 parameter."""

from __future__ import annotations

import torch
from torch import Tensor


def seed(slot: int, step: int, start: int) -> int:
    """Return the seed of one tensor's noise in one step: the same whatever else is updated with it.

    Args:
        slot: of the parameter; alike on all ranks, so that replicas round alike.
        step: its number of steps.
        start: first element or index that this rank holds of it.

    Returns:
        63 bits.
    """
    mixed = slot
    for number in (step, start):  # a round of splitmix64 each
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def stochastic(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, to either neighbour with the probability that makes the average right.

    Args:
        values: float32; not modified.
        generator: of the random bits, on the device of `values`.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # The sixteen bits that bfloat16 does not have, plus noise below one unit of the last one it has; then cut off.
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


def kahan(values: Tensor, compensation: Tensor) -> Tensor:
    """Round float32 to the nearest bfloat16 and keep what that loses.

    Args:
        values: float32, made from parameter + compensation; not modified.
        compensation: bfloat16; set to the rounding error.
    """
    rounded = values.to(torch.bfloat16)
    compensation.copy_(values - rounded.float())
    return rounded
