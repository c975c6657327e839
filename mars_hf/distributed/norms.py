"""Add up sums over shards to sums over whole parameters, and let all ranks of a step raise the same error.

One all-reduce per process group carries the sums, the fraction of each parameter whose gradient is present, which units
have a gradient other than zero (see resting.py), whether all ranks have the same settings, and a flag for an error that
a rank has found before. All ranks read these before anything changes.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.arithmetic.formulas import sum_dtype
from mars_hf.distributed.tensors import Group, ShardSpec, ranks_of


class GroupSums:
    """The sums of one step over each process group: one column per parameter of the optimizer."""

    def __init__(self, count: int, rows: int, device: torch.device, unit_counts: Sequence[int] = ()) -> None:
        """Start with nothing, for `rows` sums of `count` parameters with so many units, the same on every rank."""
        self._device = device
        self._dtype = sum_dtype(device)
        # The last row holds what is present. One more column holds the flag there, and in the first row how far the
        # settings of the other ranks are from those of the first one.
        self._shape = torch.Size((rows + 1, count + 1))
        self._first_units = [0, *itertools.accumulate(unit_counts)]
        # What is added up over the ranks of a group: sums, and behind them one number per unit.
        self._all: dict[Group, Tensor] = {}
        self._sums: dict[Group, Tensor] = {}
        self._moving: dict[Group, Tensor] = {}
        self._present: dict[Group, list[float]] = {}

    @property
    def form(self) -> tuple[Any, ...]:
        """Return what all ranks must have in common before they add up: process groups in their order, and sizes."""
        return sorted(map(group_order, self._sums)), self._shape, self._first_units[-1]

    def register(self, group: Group) -> None:
        """Take part in the sums of a process group, even if this rank holds nothing."""
        if group in self._all:
            return
        numel = self._shape.numel()
        self._all[group] = torch.zeros(numel + self._first_units[-1], dtype=self._dtype, device=self._device)
        self._sums[group] = self._all[group][:numel].view(self._shape)
        self._moving[group] = self._all[group][numel:]
        self._present[group] = [0.0] * self._shape[1]

    def join(self, spec: ShardSpec, *, has_gradient: bool) -> None:
        """Take part in the sums of the ranks that hold a parameter's other shards or copies; say what is here."""
        for group in (spec.group, spec.replicas):
            if group is None:
                continue
            self.register(group)
            for shard in spec.shards if has_gradient else ():
                is_copy = group is spec.replicas
                fraction = 1 / dist.get_world_size(group) if is_copy else shard.numel / shard.whole_numel
                self._present[group][shard.param_index] += fraction

    def add(self, group: Group, indices: Sequence[int], sums: Tensor) -> None:
        """Add sums over shards: one column per index."""
        self._sums[group][: len(sums)].index_add_(1, _to_device(indices, self._device), sums.to(self._all[group]))

    def add_moving(self, group: Group, units: Sequence[int], flags: Tensor) -> None:
        """Add this rank's flags of some units, see `column_of_unit`."""
        self._moving[group].index_add_(0, _to_device(units, self._device), flags.to(self._all[group]))

    def column_of_unit(self, index: int, unit: int) -> int:
        """Return the number by which all ranks know a unit of a parameter."""
        return self._first_units[index] + unit

    def reduce(self, error: Exception | None = None, settings: Mapping[str, str] | None = None) -> None:
        """Add up the sums of all ranks. Collective.

        Args:
            error: what stops this rank; None for nothing.
            settings: what must be the same on all ranks, by what an error calls it; None for nothing.

        Raises:
            RuntimeError: `error`, or that of another rank, or the gradients present on all ranks do not make up whole
                parameters, or settings differ; with the same message on all ranks, which says whose it is.
        """
        message = None if error is None else named(error)
        for group in sorted(self._sums, key=group_order):
            sums, presence = self._sums[group], self._present[group]
            presence[-1] = float(message is not None)
            sums[-1] = torch.tensor(presence, dtype=sums.dtype).to(sums.device)
            sums[0, -1] = _distance(settings, group, sums.dtype)
            self._all[group].copy_(all_reduce(self._all[group], group))
            *self._present[group], distance = torch.cat([sums[-1], sums[0, -1:]]).tolist()
            *fractions, has_error = self._present[group]
            if has_error:
                message = first_message(message, group)
            if distance and message is None:
                message = _difference(settings or {}, group)
            partly = [index for index, fraction in enumerate(fractions) if _is_partial(fraction)]
            if partly and message is None:
                first = partly[0]
                message = (
                    f"{len(ranks_of(group))} ranks bring gradients for {fractions[first]:.4f} of parameter {first} "
                    f"(and part of {len(partly) - 1} others). Give every rank gradients for the same parameters in "
                    "every step; if they have them, the engine's sharding is not supported"
                )
        if message is not None:
            raise RuntimeError(message) from error

    def present_in(self, group: Group) -> set[int]:
        """Return the indices of the parameters whose gradients are present, on any of the ranks."""
        return {index for index, fraction in enumerate(self._present[group][:-1]) if fraction}

    def select(self, group: Group, indices: Sequence[int]) -> Tensor:
        """Return the sums over whole parameters, one column per index."""
        return self._sums[group][:-1, _to_device(indices, self._device)]

    def select_moving(self, group: Group, units: Sequence[int]) -> Tensor:
        """Return the flags of units as wholes: 1 if a rank has a gradient other than zero, else 0."""
        return self._moving[group][_to_device(units, self._device)].ne(0)

    def sum_of_row(self, row: int) -> Tensor:
        """Return the sum of a row over all parameters and process groups, 0-d."""
        return torch.stack([sums[row, :-1].sum() for sums in self._sums.values()]).sum()


def group_order(group: Group) -> tuple[Any, ...]:
    """Return the sort key of process groups: one order on all ranks, so that ranks in several do not deadlock."""
    if group is None:
        return ()
    ranks = tuple(ranks_of(group))
    # First what all ranks of a mesh have in common: the rows of one may be the columns of another.
    return tuple(rank - ranks[0] for rank in ranks), ranks, group.group_name


def named(error: Exception) -> str:
    """Return the text of an error with the rank that has found it; some errors have no text but their name."""
    return f"rank {dist.get_rank()}: {str(error) or type(error).__name__}"


def first_message(message: str | None, group: Group) -> str | None:
    """Return the message of the first rank of a process group that has one. Collective."""
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return next(filter(None, messages), None)


def _distance(settings: Mapping[str, str] | None, group: Group, dtype: torch.dtype) -> int:
    """Return a number whose sum over the ranks is 0 if all have the same settings, and hardly ever if not.

    Each other rank takes its checksum from that of the first one. Sums of so many bits are exact.
    """
    if settings is None:
        return 0
    checksum = zlib.crc32(repr(settings).encode()) % (2**32 if dtype == torch.float64 else 2**12)
    return checksum * (dist.get_world_size(group) - 1) if dist.get_rank(group) == 0 else -checksum


def _difference(settings: Mapping[str, str], group: Group) -> str | None:
    """Return what two ranks of a process group have that differs; None if it is nothing. Collective."""
    everywhere: list[Any] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, settings, group=group)
    ranks = ranks_of(group)
    first = everywhere[0]
    for rank, other in zip(ranks, everywhere, strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return (
                    f"rank {ranks[0]} has {name}={first.get(name)}, and rank {rank} has {other.get(name)}: ranks that "
                    "share parameters take every step with the same settings. Set them alike on all ranks"
                )
    return None


def all_reduce(values: Tensor, group: Group) -> Tensor:
    """Return the sum of `values` over a process group, on the device of `values`."""
    device = values.device
    values = values.to(wire_device(device, group), copy=True)
    dist.all_reduce(values, group=group)
    return values.to(device)


def wire_device(device: torch.device, group: Group) -> torch.device:
    """Return the device on which a process group accepts tensors that live on `device`."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # ZeRO-Offload: states on CPU, ranks on GPUs
        return torch.device("cuda")
    return device


def _is_partial(fraction: float) -> bool:
    """Return whether a fraction is neither 0 nor 1, up to the rounding of sums over ranks."""
    return abs(fraction) > 1e-3 and abs(fraction - 1) > 1e-3


def _to_device(indices: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(indices, pin_memory=device.type == "cuda").to(device, non_blocking=True)
