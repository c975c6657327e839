"""What rests in a step: a matrix, or an expert of a stack, whose whole gradient is exactly zero.

Newton-Schulz would blow up what is left of its first moment to full size, at every step for ever. So rules that
orthogonalize take its first moment for zero: its state decays, its weights do not move. Signs rest element by element,
see `formulas.update`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Units(NamedTuple):
    """The units of a parameter that a tensor holds. A unit rests or moves as a whole.

    A single unit is the whole tensor, and several lie along its first dimension. A flat shard of a stack cuts units:
    there `size` and `start` say where.
    """

    indices: Sequence[int]  # in the parameter
    size: int = 0  # elements of a unit in a flat shard; 0 elsewhere
    start: int = 0  # first element of a flat shard, in the parameter


def moving_flags(gradients: Sequence[Tensor], units: Sequence[Units]) -> list[Tensor]:
    """Return float32 flags of each gradient's units: 1 if an element is not zero, NaN included, else 0.

    On CPUs a test ends at the first element that is not zero. Elsewhere nothing waits for the device.
    """
    parts = [_parts(*pair) for pair in zip(gradients, units, strict=True)]
    if not gradients or gradients[0].device.type == "cpu":
        return [torch.tensor([float(not _is_zero(part)) for part in of_one], device="cpu") for of_one in parts]
    return _moving_flags_by_sums(parts, gradients[0].device)


def _moving_flags_by_sums(parts: Sequence[list[Tensor]], device: torch.device) -> list[Tensor]:
    """Return the flags from sums of absolute values, which a few launches take for all units; no sum underflows."""
    units = list(itertools.chain.from_iterable(parts))
    sums = torch.stack(torch._foreach_norm(units, 1)) if units else torch.empty(0, device=device)
    return list(sums.ne(0).float().split(list(map(len, parts))))


def put_to_rest(momenta: Sequence[Tensor], units: Sequence[Units], moving: Sequence[Tensor]) -> None:
    """Make first moments zero in place where the flags of their units are 0; NaN stays NaN."""
    for momentum, of_momentum, flags in zip(momenta, units, moving, strict=True):
        is_on_cpu = flags.device.type == "cpu"  # where reading flags waits for nothing
        if not (is_on_cpu and flags.all()):
            momentum.mul_(_spread(flags, momentum, of_momentum))


def _is_zero(tensor: Tensor) -> bool:
    return torch.equal(tensor, tensor.new_zeros(()).expand_as(tensor))


def _parts(tensor: Tensor, units: Units) -> list[Tensor]:
    """Return what a tensor holds of each of its units."""
    if units.size:
        ends = [max(0, number * units.size - units.start) for number in range(len(units.indices) + 1)]
        return [tensor[start:end] for start, end in itertools.pairwise(ends)]
    return [tensor] if len(units.indices) == 1 else list(tensor.unbind())


def _spread(flags: Tensor, tensor: Tensor, units: Units) -> Tensor:
    """Return the flags of a tensor's units in a shape that multiplies the tensor."""
    if units.size:
        positions = torch.arange(tensor.numel(), device=tensor.device) + units.start
        return flags[positions // units.size]
    return flags.view(-1, *[1] * (tensor.ndim - 1))
