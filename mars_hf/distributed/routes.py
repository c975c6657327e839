"""Plan which rank works on each whole parameter, and which pieces travel for it: geometry, no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Largest work of the busiest rank, relative to the best division found, if that saves communication.
SLACK = 1.1


class Region(NamedTuple):
    """The part of a whole parameter that a rank holds.

    `dim=None`: elements [start, start + length) of the parameter flattened in row-major order. Otherwise indices
    [start, start + length) along dimension `dim`, of those only what `inner` says of later dimensions. With `stripes`,
    dimension `dim` consists of that many equal blocks, and the part is [start, start + length) of each.
    """

    dim: int | None
    start: int
    length: int
    inner: Region | None = None
    stripes: int = 1

    @classmethod
    def everything(cls, shape: torch.Size) -> Region:
        """Return the region that is all of a parameter, in its own shape."""
        return cls(0, 0, shape[0])

    @property
    def place(self) -> int:
        """Return a number that parts of one parameter have in common only if they are the same part."""
        return self.start if self.inner is None else self.start + (self.inner.place + 1 << 32)

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a whole parameter as a view; `dim=None` needs a contiguous tensor.

        Stripes have a dimension of their own, before that of their indices.
        """
        if self.dim is None:
            return whole.view(-1)[self.start : self.start + self.length]
        if self.inner is not None:
            whole = self.inner.of(whole)
        if self.stripes == 1:
            return whole.narrow(self.dim, self.start, self.length)
        return whole.unflatten(self.dim, (self.stripes, -1)).narrow(self.dim + 1, self.start, self.length)

    def shape(self, whole: torch.Size) -> torch.Size:
        """Return the shape of `of(whole)` for a parameter of shape `whole`."""
        if self.dim is None:
            return torch.Size([self.length])
        shape = whole if self.inner is None else self.inner.shape(whole)
        lengths = [self.length] if self.stripes == 1 else [self.stripes, self.length]
        return torch.Size([*shape[: self.dim], *lengths, *shape[self.dim + 1 :]])

    def local_shape(self, whole: torch.Size) -> torch.Size:
        """Return the shape of this part as a rank holds it: its stripes follow each other."""
        if self.dim is None:
            return torch.Size([self.length])
        shape = whole if self.inner is None else self.inner.local_shape(whole)
        return torch.Size([*shape[: self.dim], self.stripes * self.length, *shape[self.dim + 1 :]])

    def ranges(self, whole: torch.Size) -> list[list[tuple[int, int]]]:
        """Return the first index and the one after the last of each stretch, for each dimension of a parameter.

        With `dim=None` there is one dimension, of all elements.
        """
        if self.dim is None:
            return [[(self.start, self.start + self.length)]]
        found = [[(0, size)] for size in whole] if self.inner is None else self.inner.ranges(whole)
        starts = [self.start + block * (whole[self.dim] // self.stripes) for block in range(self.stripes)]
        found[self.dim] = [(start, start + self.length) for start in starts]
        return found

    def __str__(self) -> str:
        """Say which part this is."""
        kind = "elements" if self.dim is None else f"dimension {self.dim}"
        stretch = f"{kind} [{self.start}, {self.start + self.length})"
        blocks = "" if self.stripes == 1 else f" of each of {self.stripes} blocks"
        return f"{stretch}{blocks}" if self.inner is None else f"{stretch}{blocks} of {self.inner}"


class Item(NamedTuple):
    """A piece that travels: part `region` of the parameter in `slot`, a tensor of `shape`."""

    slot: int
    region: Region
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()


def assign(costs: Sequence[float], ranks: int, homes: Sequence[Sequence[int]] = ()) -> list[int]:
    """Divide pieces of work among ranks, longest processing time first; ties go to the lower index.

    Args:
        costs: cost of each piece of work, in any unit.
        ranks: number of ranks.
        homes: for each piece of work, the ranks where it costs no communication; may be empty. They get it as long as
            no rank has more than `SLACK` times the work of the busiest rank without homes.

    Returns:
        The rank of each piece of work.
    """
    owners, longest = _longest_first(costs, ranks, [()] * len(costs), math.inf)
    if any(homes):
        at_home, busiest = _longest_first(costs, ranks, homes, SLACK * longest)
        if busiest <= SLACK * longest:
            return at_home
    return owners


class Routes:
    """Plan which rank works on which parameter, and which pieces it needs from which ranks."""

    def __init__(
        self,
        shapes: Mapping[int, torch.Size],
        costs: Mapping[int, float],
        held: Sequence[Mapping[int, Region]],
        *,
        rank: int,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        """Plan for one rank; all ranks make the same plan.

        Args:
            shapes: shapes of the whole parameters, by slot; slots that no rank holds are left out.
            costs: cost of the work on each slot.
            held: regions that each rank of a replica holds, by slot; the same in all replicas.
            rank: this rank's place in `held`.
            replica: index of this rank's replica.
            replicas: number of replicas.

        Raises:
            RuntimeError: the ranks' regions do not cover each element of a parameter exactly once.
        """
        slots = sorted({slot for regions in held for slot in regions})
        holders = {slot: [index for index, regions in enumerate(held) if slot in regions] for slot in slots}
        for slot in slots:
            _check_cover(slot, shapes[slot], [held[index][slot] for index in holders[slot]])
        self._shapes, self._held, self._rank = shapes, held, rank
        ranks = len(held)
        homes = [
            range(holders[slot][0], ranks * replicas, ranks) if len(holders[slot]) == 1 < ranks else ()
            for slot in slots
        ]
        owners = assign([costs[slot] for slot in slots], ranks * replicas, homes)
        # Slot to replica * ranks + rank.
        self.owners = dict(zip(slots, owners, strict=True))
        here = replica * ranks
        # Slots that this rank works on, with their shapes, and those that are whole here already.
        self.whole = {slot: shapes[slot] for slot in slots if self.owners[slot] == here + rank}
        self.uncut = {slot for slot in self.whole if holders[slot] == [rank]}
        # For each rank of this replica: local pieces of the slots it works on, and its pieces of ours.
        self.sent = [
            [self._item(slot, rank) for slot in slots if slot in held[rank] and self.owners[slot] == here + peer]
            if peer != rank
            else []
            for peer in range(ranks)
        ]
        self.received = [
            [self._item(slot, peer) for slot in self.whole if slot in held[peer]] if peer != rank else []
            for peer in range(ranks)
        ]
        # For each replica: this rank's pieces of the slots that the replica works on.
        self.blocks = [
            [self._item(slot, rank) for slot in slots if slot in held[rank] and self.owners[slot] // ranks == index]
            for index in range(replicas)
        ]
        # Whether any rank of this replica must send a piece to another rank of it.
        self.moves = any(
            holders[slot] != [owner % ranks] for slot, owner in self.owners.items() if owner // ranks == replica
        )

    @property
    def kept(self) -> list[Item]:
        """Return this rank's own pieces of the slots it works on."""
        return [self._item(slot, self._rank) for slot in self.whole if slot in self._held[self._rank]]

    @property
    def block(self) -> int:
        """Return the number of elements in the largest block."""
        return max(sum(item.numel for item in items) for items in self.blocks)

    def volume(self, itemsize: int) -> dict[str, int]:
        """Return the bytes that this rank sends; see `exchange.Exchange.volume`."""
        to_owners, from_owners = (
            itemsize * sum(item.numel for items in parcel for item in items) for parcel in (self.sent, self.received)
        )
        replicas = itemsize * self.block * (len(self.blocks) - 1)
        return {"to_owners": to_owners, "from_owners": from_owners, "replicas": replicas}

    def _item(self, slot: int, rank: int) -> Item:
        region = self._held[rank][slot]
        return Item(slot, region, region.shape(self._shapes[slot]))


def _longest_first(
    costs: Sequence[float], ranks: int, homes: Sequence[Sequence[int]], limit: float
) -> tuple[list[int], float]:
    """Return owners and the busiest rank's work; work with homes comes first and stays there up to `limit`."""
    owners, loads = [0] * len(costs), [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: (not homes[index], -costs[index], index)):
        rank = min(homes[index] or range(ranks), key=loads.__getitem__)
        if loads[rank] + costs[index] > limit:
            rank = min(range(ranks), key=loads.__getitem__)
        owners[index] = rank
        loads[rank] += costs[index]
    return owners, max(loads)


def _check_cover(slot: int, shape: torch.Size, regions: Sequence[Region]) -> None:
    kinds = {region.dim is None for region in regions}
    space = [shape.numel()] if True in kinds else list(shape)
    if len(kinds) > 1 or not _is_tiled(space, [region.ranges(shape) for region in regions]):
        raise RuntimeError(
            f"the ranks hold {' and '.join(map(str, regions))} of parameter {slot}, of shape {tuple(shape)}: not each "
            "of its elements once, so this engine lays parameters out in a way that mars_hf does not know"
        )


def _is_tiled(space: Sequence[int], parts: Sequence[Sequence[Sequence[tuple[int, int]]]]) -> bool:
    """Return whether parts, each with stretches along every dimension, cover each point of a space once."""
    edges = [
        sorted({0, size, *(end for part in parts for stretch in part[dim] for end in stretch)})
        for dim, size in enumerate(space)
    ]
    if any(ends[0] < 0 or ends[-1] > size for ends, size in zip(edges, space, strict=True)):
        return False
    places = [{end: place for place, end in enumerate(ends)} for ends in edges]
    # Between two edges all points are covered alike.
    covered = torch.zeros([len(ends) - 1 for ends in edges], dtype=torch.int32, device="cpu")
    for part in parts:
        for box in itertools.product(*part):
            covered[tuple(slice(own[start], own[end]) for own, (start, end) in zip(places, box, strict=True))] += 1
    return bool((covered == 1).all())
