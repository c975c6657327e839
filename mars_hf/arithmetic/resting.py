"""What rests in a step: a parameter, or an expert of a stack, whose whole gradient is exactly zero.

Sign and Newton-Schulz would blow up what is left of its first moment to full size, at every step for ever. So rules
that normalize their directions take its first moment for zero: its state decays, its weights do not move.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Units(NamedTuple):
    """How a tensor is divided into units, each of which rests or moves as a whole.

    Element i of the tensor, in the order of memory, belongs to unit (i + shift) // stride % number.
    """

    number: int
    stride: int
    shift: int = 0  # elements of the first unit that come before this tensor


@dataclass(frozen=True)
class Moving:
    """Which units of a list of tensors move."""

    flags: Tensor  # flat, float32: 1 for a unit that moves, 0 for one that rests; tensor by tensor
    units: Sequence[Units]  # of each tensor

    def flags_by_tensor(self) -> list[Tensor]:
        """Return the flags of each tensor's units."""
        return list(self.flags.split([units.number for units in self.units]))

    def select(self, positions: Sequence[int]) -> Moving:
        """Return what moves of some tensors."""
        flags = self.flags_by_tensor()
        return Moving(torch.cat([flags[position] for position in positions]), [self.units[each] for each in positions])


def units_in_stack(stack: Tensor) -> Units:
    """Return the units of a tensor whose first dimension counts them; strided memory has no gaps."""
    return Units(max(1, len(stack)), max(1, stack.stride(0)))


def units_in_one(tensor: Tensor) -> Units:
    """Return the unit of a tensor that rests or moves as a whole."""
    return Units(1, max(1, tensor.numel()))


def find_moving(gradients: Sequence[Tensor], units: Sequence[Units]) -> Tensor:
    """Return the flags of all units (see `Moving`): 1 for each that has a gradient other than zero, NaN included.

    On CPUs a test ends at the first element that is not zero. Elsewhere nothing waits for the device.
    """
    pairs = list(zip(gradients, units, strict=True))
    if gradients[0].device.type == "cpu":
        found = [not _is_zero(part) for pair in pairs for part in _parts(*pair)]
        return torch.tensor(found, dtype=torch.float32, device="cpu")
    flags: list[Tensor] = []
    for gradient, units_of_tensor in pairs:
        if gradient.ndim > 1 and units_of_tensor.number > 1:
            flags.append(gradient.ne(0).flatten(1).any(1))
        else:
            flags += [part.any().view(1) for part in _parts(gradient, units_of_tensor)]
    return torch.cat(flags).float()


def _is_zero(tensor: Tensor) -> bool:
    return torch.equal(tensor, tensor.new_zeros(()).expand_as(tensor))


def _parts(tensor: Tensor, units: Units) -> list[Tensor]:
    """Return what a tensor holds of each of its units."""
    if units.number == 1:
        return [tensor]
    if tensor.ndim > 1:
        return list(tensor.unbind())
    # A flat shard, which begins and ends anywhere in the parameter.
    ends = [max(0, unit * units.stride - units.shift) for unit in range(units.number + 1)]
    return [tensor[start:end] for start, end in itertools.pairwise(ends)]


def spread(flags: Tensor, tensor: Tensor, units: Units) -> Tensor:
    """Return the flags of a tensor's units in a shape that multiplies the tensor."""
    if units.number == 1:
        return flags.view(())
    if tensor.ndim > 1:
        return flags.view(-1, *[1] * (tensor.ndim - 1))
    positions = torch.arange(tensor.numel(), device=tensor.device) + units.shift
    return flags[positions // units.stride % units.number]
