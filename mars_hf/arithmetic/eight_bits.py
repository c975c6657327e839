"""States in 8 bits (`state_dtype="8bit"`): small floating point numbers in blocks of 64, with one scale each.

A block's scale is its largest magnitude. A code stands for a number y from 2 on: it is the bits of y in float32, less
those of 2, without the last places of the mantissa. First moments and last gradients are int8: the sign of x, and
y = 2 + 494 |x| / scale with 4 places, codes 0 to 127. Second moments are uint8: y = 2 + 502 sqrt(x / scale) with 5
places, codes 0 to 255. Numbers keep a relative precision, as in bfloat16, down to where the 2 takes over; zero and the
largest of a block come back exactly.

What lies between two codes is rounded by a threshold that walks through 256 values from step to step: right on average,
as stochastic rounding is, and the same on all ranks. Numbers that were decoded lie on codes and keep them.

Source: our own; docs/decisions.md compares it with other codes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

NAME = "8bit"  # a value of `state_dtype`
BLOCK = 64
# Smaller tensors keep float32; the number is bitsandbytes'.
SMALLEST = 4096
DTYPES = (torch.int8, torch.uint8)  # of values, and of squares
# Norm of what int8 codes stand for over that of what was encoded, at most: each is off by less than 1/16 of itself and
# 1/3952 of the largest, which is at most the norm of its block, and a block has 64.
LARGEST_GROWTH = 1 + 1 / 16 + 8 / 3952
_TINY = 2.0**-118  # moments of a block below this are zero: 494 / scale would overflow
_LARGEST_CODES = {torch.int8: 127, torch.uint8: 255}  # that of a block's largest number
_BITS_OF_2 = 0x40000000


class _Code(NamedTuple):
    range: float  # y of the largest, less 2
    shift: int  # bits of a float32's mantissa that a code does not keep


_VALUES = _Code(494.0, 19)
_ROOTS = _Code(502.0, 18)


class Coded(NamedTuple):
    """A tensor in 8 bits."""

    codes: Tensor  # int8, or uint8 for second moments; of the tensor's shape
    scales: Tensor  # float32; see `shape_of_scales`

    def decode(self) -> Tensor:
        """Return the values in float32."""
        values = decode_each(_in_blocks(self.codes, self.scales), self.scales.unsqueeze(-1))
        return _out_of_blocks(values, self.codes.shape)

    def fits(self) -> bool:
        """Return whether codes and scales can be of one tensor: the largest number of each block has the last code.

        Codes that have been cut or moved without their scales do not; nor do scales below zero, or not finite.
        """
        if not self.has_finite_scales():
            return False
        blocks = _in_blocks(self.codes, self.scales)
        largest = (blocks.abs() if blocks.dtype == torch.int8 else blocks).amax(-1)
        last = _LARGEST_CODES[self.codes.dtype] - 1  # a kernel's division may fall short by a unit
        return bool(((largest >= last) | (self.scales < _TINY)).all())

    def has_finite_scales(self) -> bool:
        """Return whether scales are finite, and none is below zero."""
        return bool((self.scales.isfinite() & (self.scales >= 0)).all())

    def encode(self, values: Tensor, step: float) -> None:
        """Write values, floating point, in place; `step` is the count of the step that made them."""
        x = _in_blocks(values.float(), self.scales)
        scales = x.abs().amax(-1, keepdim=True)
        thresholds = _thresholds(step, x.device)
        if self.codes.dtype == torch.uint8:
            codes = _levels(x.sqrt(), scales.sqrt(), _ROOTS, thresholds >> 1)
            codes = torch.maximum(codes, (x > 0).int())  # a step divides by it
        else:
            scales = torch.where(scales < _TINY, 0.0, scales)
            codes = _levels(x.abs(), scales, _VALUES, thresholds)
            codes = torch.where(x < 0, -codes, codes)
        self.codes.copy_(_out_of_blocks(codes.to(self.codes.dtype), self.codes.shape))
        self.scales.copy_(scales.squeeze(-1))


def decode_each(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes, with scales of a shape that broadcasts to theirs."""
    holds_roots = codes.dtype == torch.uint8
    code = _ROOTS if holds_roots else _VALUES
    codes = codes.int()
    y = ((codes.abs() << code.shift) + _BITS_OF_2).view(torch.float32)
    values = (y - 2) * (1 / code.range)
    values = values * values * scales if holds_roots else values * scales
    return torch.where(codes < 0, -values, values)


def look_like_codes(values: Tensor) -> bool:
    """Return whether floating point numbers are codes that somebody has cast: whole ones, and not all small."""
    if values.numel() == 0:
        return False
    least, most = map(float, values.aminmax())
    return 64 <= max(-least, most) <= 255 and bool((values == values.round()).all())


# Tensors of a list, all in 8 bits or none; and those of a list's buffers, by name.
Column = Sequence[Tensor] | Sequence[Coded]
Columns = Mapping[str, Column]


def is_coded(column: Column) -> bool:
    """Return whether a column is in 8 bits."""
    return len(column) > 0 and isinstance(column[0], Coded)


def tensors_of(column: Column) -> list[Tensor]:
    """Return the tensors of the parameters' shapes: values, or codes."""
    if is_coded(column):
        return [each.codes for each in cast("Sequence[Coded]", column)]
    return list(cast("Sequence[Tensor]", column))


def scales_of(column: Column) -> list[Tensor]:
    """Return the scales of a column in 8 bits; none of any other."""
    return [each.scales for each in cast("Sequence[Coded]", column)] if is_coded(column) else []


def values_of(column: Column) -> list[Tensor]:
    """Return the values of a column: copies if it is in 8 bits."""
    return [each.decode() if isinstance(each, Coded) else each for each in column]


def encoded(values: Tensor, dtype: torch.dtype) -> Coded:
    """Return a flat tensor in 8 bits."""
    scales = values.new_zeros(-(-values.numel() // BLOCK), dtype=torch.float32)
    coded = Coded(torch.zeros_like(values, dtype=dtype), scales)
    coded.encode(values, 1)
    return coded


def _levels(sizes: Tensor, largest: Tensor, code: _Code, thresholds: Tensor) -> Tensor:
    y = sizes * torch.where(largest == 0, 0.0, code.range / largest) + 2
    return (y.view(torch.int32) - _BITS_OF_2 + thresholds) >> code.shift


def _thresholds(step: float, device: torch.device) -> Tensor:
    """Return what is added below the last place of a code, for each element of a block."""
    lanes = torch.arange(BLOCK, dtype=torch.int32, device=device)
    return ((159 * (int(step) & 255) + 97 * lanes & 255) << 11) + (1 << 10)


# --- blocks -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def first_dim_of_rows(shape: torch.Size) -> int | None:
    """Return the dimension from which on elements form the rows that blocks divide; None if a tensor takes no codes.

    Rows run along the last dimension, or along more of the last ones if it is shorter than a block, as in convolutions;
    along the first one only if there is no other.
    """
    if shape.numel() < SMALLEST:
        return None
    for dim in range(len(shape) - 1, 0, -1):
        if shape[dim:].numel() >= BLOCK:
            return dim
    return 0 if len(shape) == 1 else None


def shape_of_scales(shape: torch.Size, first: int) -> torch.Size:
    """Return the shape of the scales of a tensor whose rows start at dimension `first`."""
    return torch.Size([*shape[:first], -(-shape[first:].numel() // BLOCK)])


def scales_of_elements(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return a scale for each element of a tensor of this shape."""
    in_blocks = scales.unsqueeze(-1).expand(*scales.shape, BLOCK)
    return _out_of_blocks(in_blocks, shape)


def has_whole_blocks(shape: torch.Size, shape_of_scales: torch.Size) -> bool:
    """Return whether no row but the last one of a tensor ends within a block."""
    rows = shape_of_scales[:-1].numel()
    return rows <= 1 or shape.numel() // rows % BLOCK == 0


def _in_blocks(tensor: Tensor, scales: Tensor) -> Tensor:
    """Return rows in blocks, the last one of each filled up with zeros, in two dimensions more."""
    rows = tensor.flatten(scales.ndim - 1)
    missing = scales.shape[-1] * BLOCK - rows.shape[-1]
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.unflatten(-1, (scales.shape[-1], BLOCK))


def _out_of_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    rows = blocks.flatten(-2)
    length = shape[blocks.ndim - 2 :].numel()
    return rows[..., :length].reshape(shape)


# --- flat tensors of several parameters -------------------------------------------------------------------------------


def number_of_scales(numel: int, parts: int) -> int:
    """Return how many scales a flat tensor of several parameters needs; each parameter begins a block."""
    return numel // BLOCK + 1 + parts


def scales_of_parts(scales: Tensor, parts: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the scales of the parts of a flat tensor, which have a start and a number of elements each."""
    positions = {start: position for position, start in enumerate(sorted(start for start, _ in parts))}
    pieces = []
    for start, numel in parts:
        first = start // BLOCK + positions[start]
        pieces.append(scales[first : first - (-numel // BLOCK)])
    return pieces


# --- bfloat16 with 8 bits more ----------------------------------------------------------------------------------------

_SIGN, _SIZE, _INFINITY = -(2**31), 2**31 - 1, 0x7F800000


def lost_of(param: Tensor, values: Tensor) -> Tensor:
    """Return what a bfloat16 parameter lacks of float32 values that are next to it, as `split_weight` keeps it.

    What is half a place or more, which would be the neighbour's, becomes the most that 8 bits hold.
    """
    bits, wanted_bits = (tensor.float().view(torch.int32) for tensor in (param, values))
    size, wanted = bits & _SIZE, wanted_bits & _SIZE
    lost = (torch.where(bits ^ wanted_bits < 0, 0, wanted + 128) >> 8) - (size >> 8)
    lost = torch.where(torch.maximum(size, wanted) < _INFINITY, lost.clamp(-128, 127), 0)
    return lost.to(torch.int8)


def split_weight(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 to 24 bits; return the nearest bfloat16, and what it lacks in 256ths of its last place, int8.

    Source: flashoptim's split of weights, arXiv 2602.23349.
    """
    bits = values.view(torch.int32)
    size = bits & _SIZE
    shorter = torch.where(size < _INFINITY, size + 128, size) >> 8
    rounded = torch.where(size <= _INFINITY, (shorter + 128) >> 8, 0x7FC0)  # NaN
    lost = torch.where(size < _INFINITY, shorter - (rounded << 8), 0)
    param = ((bits & _SIGN) | (rounded << 16)).view(torch.float32)
    return param.to(torch.bfloat16), lost.to(torch.int8)


def join_weight(param: Tensor, lost: Tensor) -> Tensor:
    """Return float32 from a bfloat16 parameter and what `split_weight` has kept beside it."""
    bits = param.float().view(torch.int32)
    size = bits & _SIZE
    joined = torch.where(size < _INFINITY, (size + lost.int() * 256).clamp_min(0), size)
    return ((bits & _SIGN) | joined).view(torch.float32)
