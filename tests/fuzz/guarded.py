"""Tensors with any strides in guarded memory: NaN around every element exposes stray reads and writes."""

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
    """A tensor and its memory; None if the tensor owns all of its memory."""

    layout: str
    tensor: Tensor
    memory: bytearray | None = None

    def __post_init__(self) -> None:
        # Where the elements are now: `tensor.data` may be set to other memory later.
        self._beside = None if self.memory is None else self._mark(torch.frombuffer(self.memory, dtype=torch.uint8))

    def check(self, name: str) -> None:
        """Fail if a byte outside the tensor's elements has changed."""
        if self.memory is not None:
            changed = (torch.frombuffer(self.memory, dtype=torch.uint8) != _CANARY).logical_and_(self._beside)
            written = changed.sum().item()
            assert not written, f"{name} ({self.layout}): {written} bytes beside the tensor have been written to"

    def _mark(self, memory: Tensor) -> Tensor:
        """Return a mask of the bytes that do not belong to the tensor."""
        beside = memory == _CANARY
        if self.tensor.numel():
            size = self.tensor.element_size()
            places = zip(self.tensor.shape, self.tensor.stride(), strict=True)
            shape = (*(1 if stride == 0 else length for length, stride in places), size)
            strides = (*(stride * size for stride in self.tensor.stride()), 1)
            beside.as_strided(shape, strides, self.tensor.data_ptr() - memory.data_ptr()).fill_(False)
        return beside


def place(values: Tensor, dtype: torch.dtype, layout: str, random: Random) -> Guarded:
    """Put values into a tensor of a dtype and a layout.

    Args:
        values: any floating dtype; if elements of the tensor share memory, some values are lost.
        dtype: dtype of the tensor.
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
    # Use torch's own offset where possible, so that storage_offset() is not 0.
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
    steps = [1] * dims  # stride of each dimension, in units of the next inner one's extent
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
