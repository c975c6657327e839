"""The matrices of a step: first moments are taken together, orthogonalized, and handed back as directions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf import hyperparameters, layouts, sharding
from mars_hf.batches import Batch
from mars_hf.directions import Chunks, directions, flops, iteration_dtype, settings_of
from mars_hf.exchange import Exchange, gather_objects
from mars_hf.param_groups import orthogonalizes
from mars_hf.regions import Region
from mars_hf.sharding import Group, Placement


class Team(NamedTuple):
    """Ranks that share the work on some matrices, and how they send them; see `exchange.Exchange`."""

    shards: Group
    replicas: Group
    device: torch.device
    dtype: torch.dtype


class _Member(NamedTuple):
    """A tensor of the optimizer that a team works on; also where nothing of its parameters is on this rank."""

    team: Team
    group: dict[str, Any]
    tensor: Tensor
    placement: Placement | None
    slot: int


class Matrices:
    """Gives batches of mars-shampoo and mars-m their directions.

    Matrices that are on this rank alone are orthogonalized in chunks. Where ranks hold pieces of them (FSDP2, ZeRO) or
    repeat them (DDP), each is brought together on one rank, orthogonalized there once, and its direction sent back.
    """

    def __init__(self, layout: sharding.Layout) -> None:
        """With the parameters that the optimizer was built with."""
        self._layout = layout
        self._members: list[_Member] = []
        self._replicas: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._exchanges: dict[Hashable, tuple[Exchange, dict[int, int]]] = {}

    def sort(
        self, param_groups: Iterable[dict[str, Any]], placements: Mapping[Tensor, Placement]
    ) -> dict[Tensor, Hashable]:
        """Who is orthogonalized together in the coming step, and in those after it until this is called again.

        Args:
            param_groups: of the optimizer.
            placements: of the sharded tensors.

        Returns:
            For every tensor that has a gradient and holds matrices to be orthogonalized its chunk, or the team that
            works on it.
        """
        chunks = Chunks()
        found: dict[Tensor, Hashable] = {}
        self._members = []
        slotted = enumerate((group, param) for group in param_groups for param in group["params"])
        wanted = [(slot, *pair) for slot, pair in slotted if pair[1].grad is not None and orthogonalizes(pair[0])]
        self._find_replicas([param for _, _, param in wanted if param not in placements])
        for slot, group, param in wanted:
            placement = placements.get(param)
            shards = None if placement is None or _is_alone(param, placement) else placement.group
            replicas = self._replicas[param] if placement is None else placement.replicas
            if shards is None and replicas is None:
                found[param] = chunks.of(group, param)
            else:
                team = Team(shards, replicas, sharding.local(param).device, iteration_dtype(group, param))
                self._members.append(_Member(team, group, param, placement, slot))
                found[param] = team
        return found

    def in_order(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches in the order they are to be updated in, with directions where their rule has any.

        Those of a chunk or team come together: their first moments are taken further and orthogonalized before the
        first of them, and no directions are kept when the next one is asked for. Collective, where there are teams.
        """
        # A rank that holds nothing of a team's matrices works for it all the same.
        parts: dict[Hashable, list[Batch]] = {member.team: [] for member in self._members}
        for batch in batches:
            parts.setdefault(id(batch) if batch.chunk is None else batch.chunk, []).append(batch)
        for part, together in parts.items():
            if isinstance(part, Team):
                self._share(part, together)
            elif together[0].chunk is not None:
                _orthogonalize(together)
            for batch in together:
                yield batch
                batch.directions = []

    def _find_replicas(self, wholes: Sequence[Tensor]) -> None:
        unknown = [param for param in wholes if param not in self._replicas]
        for param, replicas in zip(unknown, sharding.replicas_of(unknown), strict=True):
            self._replicas[param] = replicas

    def _share(self, team: Team, batches: Sequence[Batch]) -> None:
        """Give the batches of a team their directions."""
        members = [member for member in self._members if member.team == team]
        groups = list({id(member.group): member.group for member in members}.values())
        exchange, group_of = self._exchange(team, groups, members)
        slots = {member.tensor: member.slot for member in members}
        buffers = [batch.momenta() for batch in batches]
        pieces: dict[int, Tensor] = {}
        for batch, momenta in zip(batches, buffers, strict=True):
            for (tensor, placement), momentum in zip(batch.placements.items(), momenta, strict=True):
                own = [slots[tensor]] if placement is None else [piece.slot for piece in placement.pieces]
                pieces |= zip(own, sharding.cut(momentum, placement), strict=True)

        def work(wholes: dict[int, Tensor]) -> dict[int, Tensor]:
            settings = {slot: settings_of(groups[group_of[slot]], whole) for slot, whole in wholes.items()}
            return directions(wholes, settings, out_dtype=team.dtype)

        results = exchange.run(pieces, work)
        if pieces:
            torch._foreach_copy_(list(pieces.values()), [results[slot] for slot in pieces])
        for batch, momenta in zip(batches, buffers, strict=True):
            batch.take_directions(momenta)

    def _exchange(
        self, team: Team, groups: Sequence[dict[str, Any]], members: Sequence[_Member]
    ) -> tuple[Exchange, dict[int, int]]:
        """The exchange of a team, and for every slot the place of its group in `groups`; collective the first time."""
        places = {id(group): place for place, group in enumerate(groups)}
        held: dict[int, tuple[int, Region]] = {}
        for member in members:
            place = places[id(member.group)]
            if member.placement is None:
                held[member.slot] = place, Region.everything(member.tensor.shape)
            else:
                held |= {piece.slot: (place, piece.region) for piece in member.placement.pieces}
        kinds = [(layouts.from_plain(group["layout"]), len(hyperparameters.ns_coefficients(group))) for group in groups]
        key = (team, tuple(kinds), tuple(held.items()))
        if key not in self._exchanges:
            group_of: dict[int, int] = {}
            for theirs in gather_objects({slot: place for slot, (place, _) in held.items()}, team.shards):
                group_of |= theirs
            shapes = {slot: self._layout.shapes[slot] for slot in group_of}
            costs = {}
            for slot, shape in shapes.items():
                layout, steps = kinds[group_of[slot]]
                costs[slot] = flops(shape, layout or layouts.of_shape(shape), steps)
            self._exchanges[key] = (
                Exchange(
                    shapes,
                    costs,
                    {slot: region for slot, (_, region) in held.items()},
                    shards=team.shards,
                    replicas=team.replicas,
                    device=team.device,
                    dtype=team.dtype,
                ),
                group_of,
            )
        return self._exchanges[key]


def _is_alone(param: Tensor, placement: Placement) -> bool:
    """Whether a sharded parameter is whole, in its own shape, because there is one rank only."""
    return sharding.is_dtensor(param) and dist.get_world_size(placement.group) == 1


def _orthogonalize(batches: Sequence[Batch]) -> None:
    """Give the batches of a chunk their directions."""
    owners = [(batch.group, owner) for batch in batches for owner in batch.placements]
    settings = dict(enumerate(settings_of(group, owner) for group, owner in owners))
    momenta = dict(enumerate(momentum for batch in batches for momentum in batch.momenta()))
    wide = torch.float64 if owners[0][1].dtype == torch.float64 else torch.float32
    found = iter(directions(momenta, settings, out_dtype=wide).values())
    for batch in batches:
        batch.take_directions([next(found) for _ in batch.placements])
