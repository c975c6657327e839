"""Add up sums over the pieces that ranks hold to sums over whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.distributed.placement import Group, Placement


class WholeSums:
    """Turn sums over pieces into sums over whole parameters: one all-reduce per process group for all parameters."""

    def __init__(self, slots: Sequence[int], rows: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Start with zeros.

        Args:
            slots: slots of the parameters; the same on every rank.
            rows: number of sums per slot.
            device: device of the parameters.
            dtype: dtype of the returned sums; None for `wide_dtype`. Sums always travel in `wide_dtype`: a rank without
                pieces does not know the others' dtype.
        """
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._zeros = torch.zeros(rows, len(slots), device=device, dtype=wide_dtype(device))
        self._dtype = dtype or self._zeros.dtype
        self._sums: dict[Group, Tensor] = {}
        self._counts: dict[Group, dict[int, list[int]]] = {}

    def join(self, placement: Placement) -> None:
        """Take part in the sums over a placement's ranks, even if this rank holds no piece."""
        if placement.group not in self._sums:
            self._sums[placement.group] = self._zeros.clone()
        counts = self._counts.setdefault(placement.group, {})
        for piece in placement.pieces:
            counts.setdefault(self._index[piece.slot], [0, piece.whole])[0] += piece.numel

    def add(self, group: Group, slots: Sequence[int], sums: Tensor) -> None:
        """Add sums over pieces: one column per slot."""
        total = self._sums[group]
        total.index_add_(1, self._columns(slots), sums.to(total))

    def reduce(self, *, verify: bool) -> None:
        """Add up the sums of all ranks.

        Args:
            verify: also check, in the same all-reduce, that the pieces of all ranks make up whole parameters.

        Raises:
            RuntimeError: the pieces do not make up whole parameters.
        """
        for group, total in self._sums.items():
            sent = total
            if verify:
                # Send fractions of the whole: float32, used where float64 is missing, counts only up to 2**24.
                shares = torch.zeros_like(total[:1])
                for index, (numel, whole) in self._counts[group].items():
                    shares[0, index] = numel / whole
                sent = torch.cat([total, shares])
            reduced = all_reduce(sent, group)
            total.copy_(reduced[: len(total)])
            if verify:
                _check_shares(reduced[-1], self._counts[group])

    def of(self, group: Group, slots: Sequence[int]) -> Tensor:
        """Return the sums over the whole parameters in these slots, one column each."""
        return self._sums[group][:, self._columns(slots)].to(self._dtype)

    def total(self, row: int) -> Tensor:
        """Return the sum of a row over all parameters, 0-d."""
        return torch.stack([sums[row].sum() for sums in self._sums.values()]).sum().to(self._dtype)

    def _columns(self, slots: Sequence[int]) -> Tensor:
        device = self._zeros.device
        indices = torch.tensor([self._index[slot] for slot in slots], pin_memory=device.type == "cuda")
        return indices.to(device, non_blocking=True)


def all_reduce(values: Tensor, group: Group) -> Tensor:
    """Return the sum of `values` over a process group, on the device of `values`."""
    device = values.device
    values = values.to(wire_device(device, group), copy=True)
    dist.all_reduce(values, group=group)
    return values.to(device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


def wire_device(device: torch.device, group: Group) -> torch.device:
    """Return the device on which a process group accepts tensors that live on `device`."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # ZeRO-Offload: states on CPU, ranks on GPUs
        return torch.device("cuda")
    return device


def _check_shares(shares: Tensor, counts: dict[int, list[int]]) -> None:
    for index in counts:
        share = shares[index].item()
        if abs(share - 1) > 1e-3:
            raise RuntimeError(
                f"the pieces of parameter {index} on all ranks are {share:.4f} of it, not 1: this engine lays "
                "parameters out in a way that mars_hf does not know"
            )
