"""Tensors of any layout in guarded memory: NaN lies around every element, so that a stray read or write shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

# Parameters and states are written to; gradients are only read, so that their elements may share memory.
WRITABLE = (
    *("contiguous", "offset", "misaligned", "every other", "column", "rows", "transposed", "permuted"),
    *("channels last", "real part", "loose", "odd strides"),
)
READABLE = (*WRITABLE, "expanded", "one element", "overlapping", "negated", "zero tensor")
COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_CANARY = 0xFF  # in every byte: NaN in all floating dtypes
_MARGIN = 64  # bytes


@dataclass
class Guarded:
    """A tensor, and the memory it lies in; None where the tensor owns all of its memory."""

    layout: str
    tensor: Tensor
    memory: bytearray | None = None

    def __post_init__(self) -> None:
        # Where the elements are now: `tensor.data` may be set to other memory later.
        self._beside = None if self.memory is None else self._mark(self.memory)
        self._before = self._read()

    def check(self, name: str) -> None:
        """Fail if a byte beside the tensor's elements has changed."""
        if self._before is not None:
            changed = (self._read() != self._before).sum().item()
            assert not changed, f"{name} ({self.layout}): {changed} bytes beside the tensor have been written to"

    def _read(self) -> Tensor | None:
        return None if self.memory is None else torch.frombuffer(self.memory, dtype=torch.uint8)[self._beside]

    def _mark(self, memory: bytearray) -> Tensor:
        """Which bytes of memory are none of the tensor's."""
        beside = torch.ones(len(memory), dtype=torch.bool)
        if self.tensor.numel():
            offsets = torch.zeros((), dtype=torch.int64)
            for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True):
                offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
            start = self.tensor.data_ptr() - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            size = self.tensor.element_size()
            for byte in range(size):
                beside[start + offsets.flatten() * size + byte] = False
        return beside


def place(values: Tensor, dtype: torch.dtype, layout: str, random: Random) -> Guarded:
    """Put values into a tensor of a dtype and a layout.

    Args:
        values: any floating dtype; where elements of the tensor share memory, some of the values get lost.
        dtype: of the tensor.
        layout: one of `READABLE`; one that the shape cannot have becomes a similar one.
        random: draws offsets, orders and gaps.
    """
    shape = tuple(values.shape)
    if layout == "contiguous":
        return Guarded(layout, values.to(dtype).contiguous().clone())
    if layout == "zero tensor":
        return Guarded(layout, torch._efficientzerotensor(shape, dtype=dtype))
    if layout == "negated":
        guarded = place(-values, dtype, random.choice(WRITABLE[1:]), random)
        return Guarded(f"negated {guarded.layout}", torch._neg_view(guarded.tensor), guarded.memory)
    if layout == "real part" and dtype not in COMPLEX:
        layout = "every other"
    strides = _strides(shape, layout, random)
    size = dtype.itemsize * (2 if layout == "real part" else 1)
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    offset = random.randint(1, 3)
    start = _MARGIN + offset * size + (random.randrange(1, size) if layout == "misaligned" else 0)
    memory = bytearray([_CANARY]) * (start + max(reach, 1) * size + _MARGIN)
    of = COMPLEX[dtype] if layout == "real part" else dtype
    # An offset of torch's own where there can be one, so that storage_offset() is not 0.
    skipped = 0 if layout == "misaligned" else offset
    flat = torch.frombuffer(memory, dtype=of, offset=start - skipped * size, count=max(reach, 1) + skipped)
    tensor = flat.as_strided(shape, strides, skipped)
    tensor = tensor.real if layout == "real part" else tensor
    once = tuple(slice(None) if stride else slice(1) for stride in strides)
    if layout == "overlapping":
        flat[skipped:] = torch.randn(len(flat) - skipped, generator=_generator(random), dtype=torch.float64).to(dtype)
    else:
        tensor[once].copy_(values[once])
    return Guarded(layout, tensor, memory)


def _strides(shape: Sequence[int], layout: str, random: Random) -> tuple[int, ...]:
    dims = len(shape)
    order = list(range(dims))  # from the outermost dimension to the innermost
    steps = [1] * dims  # of each dimension in elements of what lies within it
    if layout == "transposed":
        order = [*order[:-2], *reversed(order[-2:])]
    elif layout == "channels last" and dims >= 3:
        order = [0, *range(2, dims), 1]
    elif layout in ("permuted", "channels last"):
        random.shuffle(order)
    elif layout == "every other" and dims:
        steps[-1] = 2
    elif layout == "column" and dims:
        steps[-1] = random.randint(3, 5)
    elif layout == "rows" and dims:
        steps[0] = random.randint(2, 3)
    elif layout == "loose":
        random.shuffle(order)
        steps = [random.randint(1, 3) for _ in steps]
    strides, acc = [0] * dims, 1
    for dim in reversed(order):
        strides[dim] = acc * steps[dim]
        acc = strides[dim] * max(shape[dim], 1)
    if layout == "one element":
        strides = [0] * dims
    if layout == "expanded" and dims:
        for dim in random.sample(range(dims), random.randint(1, dims)):
            strides[dim] = 0
    if layout == "overlapping":
        strides = [random.randint(1, 2) for _ in strides]
    if layout == "odd strides":  # where they say nothing
        strides = [random.randint(0, 99) if shape[dim] == 1 else stride for dim, stride in enumerate(strides)]
    return tuple(strides)


def _generator(random: Random) -> torch.Generator:
    return torch.Generator().manual_seed(random.randrange(2**31))
