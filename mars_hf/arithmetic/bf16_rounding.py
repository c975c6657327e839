"""Round an update computed in float32 into a bfloat16 parameter."""

from __future__ import annotations

import torch
from torch import Tensor


def seed(slot: int, step: int, start: int) -> int:
    """Return the seed of one tensor's noise in one step; it does not depend on the tensors updated alongside.

    Args:
        slot: the parameter's slot; the same on all ranks, so that replicas round alike.
        step: the parameter's step count.
        start: first element or index of the parameter that this rank holds.

    Returns:
        63 bits.
    """
    mixed = slot
    for number in (step, start):  # one round of splitmix64 each
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def stochastic(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 stochastically to bfloat16: to either neighbour, unbiased.

    Args:
        values: float32; not modified.
        generator: source of the random bits, on the device of `values`.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # Add 16 random bits to the 16 bits that bfloat16 lacks, then truncate.
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


def kahan(values: Tensor, compensation: Tensor) -> Tensor:
    """Round float32 to the nearest bfloat16 and keep the rounding error (Kahan).

    Args:
        values: float32, computed from parameter + compensation; not modified.
        compensation: bfloat16; set to the rounding error.
    """
    rounded = values.to(torch.bfloat16)
    compensation.copy_(values - rounded.float())
    return rounded
