"""What a rank holds of a tensor: all of it, or a part that a `Slice` describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# ProcessGroup, or None for no group.
Group = Any
# Types of tensors that are no DTensors, for a fast test.
PLAIN = frozenset({Tensor, nn.Parameter})


class Slice(NamedTuple):
    """The part of a whole parameter that a rank holds.

    `dim=None`: elements [start, start + length) of the parameter flattened in row-major order. Otherwise indices
    [start, start + length) along dimension `dim`, of those only what `inner` says of later dimensions. With `stripes`,
    dimension `dim` consists of that many equal blocks, and the part is [start, start + length) of each.
    """

    dim: int | None
    start: int
    length: int
    inner: Slice | None = None
    stripes: int = 1

    @property
    def offset(self) -> int:
        """Return a number that two parts of one parameter have in common only if they are the same part."""
        return self.start if self.inner is None else self.start + ((self.inner.offset + 1) << 32)

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a whole parameter as a view; stripes have a dimension before that of their indices."""
        if self.dim is None:
            return whole.view(-1)[self.start : self.start + self.length]
        if self.inner is not None:
            whole = self.inner.of(whole)
        if self.stripes == 1:
            return whole.narrow(self.dim, self.start, self.length)
        return whole.unflatten(self.dim, (self.stripes, -1)).narrow(self.dim + 1, self.start, self.length)

    def shape(self, whole: torch.Size) -> torch.Size:
        """Return the shape of this part as a rank holds it: its stripes follow each other."""
        if self.dim is None:
            return torch.Size([self.length])
        shape = whole if self.inner is None else self.inner.shape(whole)
        return torch.Size([*shape[: self.dim], self.stripes * self.length, *shape[self.dim + 1 :]])

    def first_indices(self, size: int) -> list[int]:
        """Return the indices along the first dimension, of this size, in the order in which a rank holds them.

        Flat parts and those of other dimensions have all.
        """
        if self.dim != 0:
            return list(range(size))
        block = size // self.stripes
        starts = [stripe * block + self.start for stripe in range(self.stripes)]
        return [index for start in starts for index in range(start, start + self.length)]


class Shard(NamedTuple):
    """One parameter's part of a local tensor: `numel` of its elements, from element `start` of the tensor on.

    `param_index` is the parameter's index among all parameters of the optimizer, the same on every rank.
    """

    param_index: int
    start: int
    numel: int
    shape: torch.Size  # of the whole parameter
    slice: Slice

    @property
    def whole_numel(self) -> int:
        """Return the number of elements of the whole parameter."""
        return self.shape.numel()


class ShardSpec(NamedTuple):
    """The shards in a local tensor (none if it is all padding), and the ranks that hold the others.

    `replicas` are ranks that hold the same shards. None means none: without a `group` the shard is all of a parameter.
    """

    shards: tuple[Shard, ...]
    group: Group
    replicas: Group = None


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is sharded or replicated by torch.distributed.tensor; imports nothing."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def ranks_of(group: Group) -> Sequence[int]:
    """Return the global ranks of a process group; empty for one that has been destroyed."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return []


def shape_of(param: Tensor) -> torch.Size:
    """Return the parameter's own shape, also if DeepSpeed's `zero.Init` has left an empty tensor in its place."""
    return torch.Size(getattr(param, "ds_shape", param.shape))
