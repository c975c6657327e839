"""Orthogonalize the matrices of a step: collect first moments, share the work among ranks, return directions."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf import matrix_layouts
from mars_hf.distributed import dtensors, replicas
from mars_hf.distributed.exchange import Exchange, agree, digest, disagreement, gather_objects
from mars_hf.distributed.locator import Locator
from mars_hf.distributed.placement import Group, Placement, cut
from mars_hf.distributed.routes import Region
from mars_hf.distributed.whole_sums import wire_device
from mars_hf.param_groups import orthogonalizes
from mars_hf.settings import ns_coefficients
from mars_hf.step.buckets import Bucket
from mars_hf.step.corrections import Correction, Update
from mars_hf.step.directions import Chunks, directions, flops, iteration_dtype, settings_of
from mars_hf.step.update import take_momenta

logger = logging.getLogger(__name__)

# Exchanges kept per team, for later steps in which the same parameters have gradients.
MAX_EXCHANGES = 16


class Team(NamedTuple):
    """Ranks that share the work on some matrices, and how they send them; see `exchange.Exchange`.

    `uniform` means that an engine ensures that all ranks bring the same gradients.
    """

    shards: Group
    replicas: Group
    device: torch.device
    dtype: torch.dtype
    uniform: bool = False


class _Repeated(NamedTuple):
    """Key of plain matrices that DistributedDataParallel replicates: its ranks share them, or each works alone."""

    device: torch.device
    dtype: torch.dtype


class _Plain(NamedTuple):
    """A parameter that is neither sharded nor a DTensor."""

    slot: int
    place: int
    device: torch.device
    dtype: torch.dtype


class _Member(NamedTuple):
    """A tensor with a gradient that a team works on, also if this rank holds no piece of its parameters."""

    slot: int
    place: int  # index of its parameter group
    shape: torch.Size
    placement: Placement | None
    id: int


class _Work(NamedTuple):
    """The work of a team in one step."""

    members: list[_Member]
    groups: Mapping[int, dict[str, Any]]  # by place
    dtype: torch.dtype
    exchange: Exchange
    place_of: Mapping[int, int]  # slot to the place of its group, also for slots without a piece on this rank


class Matrices:
    """Compute the directions of mars-shampoo and mars-m buckets.

    Matrices on this rank alone are orthogonalized in chunks. If ranks hold pieces of a matrix (FSDP2, ZeRO) or
    replicate it (DDP), one rank collects it, orthogonalizes it once and sends the direction back.

    Under DDP, ranks share a step if DistributedDataParallel has averaged gradients since the last step, and all ranks
    have brought gradients for the same matrices in this and every earlier step. Otherwise each rank does all the work
    on its own gradients, as with any torch optimizer: after a backward pass of the bare module or under `no_sync`, in
    `join`, if a rank lacks a gradient, and once ranks have taken different steps. Ranks that hold pieces cannot
    continue alone: all raise RuntimeError.
    """

    def __init__(self, locator: Locator) -> None:
        """Start with the locator of the optimizer's parameters."""
        self._locator = locator
        # Set by `assign`, by the id of a tensor. Nothing here keeps a tensor alive.
        self._plain: dict[int, _Plain] = {}
        self._teams: dict[int, Team] = {}
        self._members: dict[Team, list[_Member]] = {}
        self._exchanges: dict[tuple[Team, Hashable, Hashable], tuple[Exchange, dict[int, int]]] = {}
        self._names: dict[Hashable, str] = {}
        self._past = ""  # digest of the gradients present in all steps so far; equal ones mean equal first moments
        self._name = secrets.token_hex(8)
        self._apart: set[Team] = set()  # teams whose ranks have taken different steps
        self._groups: Sequence[dict[str, Any]] = ()  # set from `assign` to the end of the step

    def assign(
        self, param_groups: Iterable[dict[str, Any]], placements: Mapping[Tensor, Placement]
    ) -> dict[Tensor, Hashable]:
        """Decide which matrices are orthogonalized together in the next step.

        The answer holds for later steps as long as groups, parameters and the set of gradients stay the same. With
        DTensors or placements, every step needs a call.

        Args:
            param_groups: the optimizer's groups.
            placements: placements of the sharded tensors.

        Returns:
            A key for every tensor that has a gradient and matrices to orthogonalize; tensors with the same key are
            orthogonalized together.
        """
        chunks = Chunks()
        found: dict[Tensor, Hashable] = {}
        self._plain, self._teams, self._members = {}, {}, {}
        self._groups = list(param_groups)
        slotted = enumerate((place, param) for place, group in enumerate(self._groups) for param in group["params"])
        wanted = [(slot, *pair) for slot, pair in slotted if orthogonalizes(self._groups[pair[0]])]
        plain = [id(param) for *_, param in wanted if param not in placements and not dtensors.is_dtensor(param)]
        repeated = self._locator.replicas.repeated(plain) if plain else {}
        for slot, place, param in wanted:
            group = self._groups[place]
            key: Hashable = None
            if param in placements or dtensors.is_dtensor(param):
                key = self._join(slot, place, param, placements.get(param))
            else:
                dtype = iteration_dtype(group, param)
                self._plain[id(param)] = _Plain(slot, place, param.device, dtype)
                if id(param) in repeated and not self._apart:
                    key = _Repeated(param.device, dtype)
            if param.grad is not None:
                found[param] = chunks.of(group, param) if key is None else key
        return found

    def in_order(self, buckets: Sequence[Bucket], corrections: Sequence[Correction]) -> Iterator[Update]:
        """Yield buckets in update order, with directions if their rule orthogonalizes.

        Buckets orthogonalized together follow each other: their first moments are advanced and orthogonalized before
        the first of them, and no directions are kept once the caller asks for the next. Collective if ranks share work:
        call it in every step, also without buckets.

        Raises:
            RuntimeError: ranks hold pieces of the same matrices but bring gradients for different ones; raised on all
                ranks, before any first moment has changed.
        """
        correction_of = {id(bucket): own for bucket, own in zip(buckets, corrections, strict=True)}
        try:
            for works, together in self._divide(buckets):
                own = [correction_of[id(bucket)] for bucket in together]
                directions: list[list[Tensor]] = [[] for _ in together]
                if works:
                    directions = self._share(works, together, own)
                elif together[0].chunk is not None:
                    directions = _orthogonalize(together, own)
                for bucket, correction in zip(together, own, strict=True):
                    yield Update(bucket, correction, directions.pop(0))
        finally:
            self._groups = ()

    def _join(self, slot: int, place: int, param: Tensor, placement: Placement | None) -> Hashable:
        """Return the team that works on a DTensor or an engine's tensor; None if no other rank takes part."""
        shards = None if placement is None or _is_alone(param, placement) else placement.group
        if placement is not None:
            repeating = placement.replicas
        else:
            repeating = dtensors.replicas_in_mesh(param)
        if shards is None and repeating is None:
            return None
        device = dtensors.local(param).device
        works = wire_device(device, repeating if shards is None else shards)
        dtype = iteration_dtype(self._groups[place], param, works)
        team = Team(shards, repeating, device, dtype, not dtensors.is_dtensor(param))
        self._teams[id(param)] = team
        members = self._members.setdefault(team, [])  # also without a gradient here: other ranks may have one
        if param.grad is not None:
            members.append(_Member(slot, place, param.shape, placement, id(param)))
        return team

    def _divide(self, buckets: Sequence[Bucket]) -> list[tuple[list[_Work], list[Bucket]]]:
        """Return the buckets to work on together, with the shared work; empty work if no other rank takes part."""
        averaged = self._averaged()
        teams = {team: list(members) for team, members in self._members.items()}
        for key, group in averaged.items():
            teams.setdefault(Team(None, group, *self._plain[key][2:]), [])
        groups = dict(enumerate(self._groups))
        present = [member.slot for members in teams.values() for member in members]
        cut: dict[Team, list[Bucket]] = {team: [] for team in self._members}
        repeated: list[Bucket] = []  # may hold tensors of several teams
        alone: dict[Hashable, list[Bucket]] = {}
        shares_all = True
        for bucket in buckets:
            place = alone.setdefault(id(bucket) if bucket.chunk is None else bucket.chunk, [])
            for tensor in bucket.placements if bucket.chunk is not None else ():
                if id(tensor) in self._teams:
                    place = cut[self._teams[id(tensor)]]
                elif id(tensor) in self._plain:
                    own = self._plain[id(tensor)]
                    present.append(own.slot)
                    shares_all = shares_all and (id(tensor) in averaged or id(tensor) in self._locator.replicas.unclear)
                    if id(tensor) in averaged:
                        place = repeated
                        team = Team(None, averaged[id(tensor)], own.device, own.dtype)
                        teams[team].append(_Member(own.slot, own.place, tensor.shape, None, id(tensor)))
                        groups[own.place] = bucket.group
            place.append(bucket)
        # Ask for all teams before any work: nothing has changed yet if ranks disagree.
        works = {team: self._work(team, sorted(teams[team]), groups) for team in sorted(teams, key=_order)}
        if present:
            # A step on unaveraged gradients is this rank's alone, so its digest must differ from the others'.
            self._past = digest(self._past, sorted(present), "" if shares_all else self._name)
        shared = [work for team, work in works.items() if team not in cut and work is not None]
        for bucket in repeated if not shared else ():
            alone[bucket.chunk].append(bucket)
        parts = [([work] if work else [], cut[team]) for team, work in works.items() if team in cut]
        parts = [(shared, repeated if shared else []), *parts, *(([], own) for own in alone.values())]
        return [(work, own) for work, own in parts if work or own]

    def _averaged(self) -> dict[int, Group]:
        """Return the process group that shares this step, for each plain parameter that has one, by id."""
        if not self._plain:
            return {}
        return self._locator.replicas.averaged(list(self._plain))

    def _work(self, team: Team, members: list[_Member], groups: Mapping[int, dict[str, Any]]) -> _Work | None:
        """Agree with a team's ranks on its work in this step; None if each rank works alone. Collective."""
        if team in self._apart:
            return self._work_without_replicas(team, members, groups)
        places = {member.place for member in members}
        kinds = [(place, _kind(groups[place])) for place in sorted(places)]
        common = (tuple((member.slot, member.place, member.shape) for member in members), repr(kinds))
        key = (team, common, None if team.shards is None else tuple(member.placement for member in members))
        new = key not in self._exchanges
        if not team.uniform:
            same, wrong = True, False
            if team.shards is not None:
                same, (new,) = agree(self._name_of(common), team.shards, team.device, new)
                wrong = not same
            if team.replicas is not None:
                values = (self._name_of(common), self._past)
                same, (new, wrong) = agree(values, team.replicas, team.device, new, wrong)
            if wrong:
                raise disagreement(*_sizes(team))
            if not same:
                logger.warning(
                    "The ranks of a DistributedDataParallel model, or of the copies of a sharded one, bring gradients "
                    "for different matrices to this step, or did in an earlier one. Each orthogonalizes all of its "
                    "matrices itself from now on: as exact, and slower. To share the work, take the same steps on "
                    "every rank."
                )
                self._apart.add(team)
                return self._work_without_replicas(team, members, groups)
        if new:
            self._exchanges[key] = self._exchange(team, members, groups)
            self._forget_exchanges(team)
        return _Work(members, groups, team.dtype, *self._exchanges[key])

    def _forget_exchanges(self, team: Team) -> None:
        """Drop exchanges of destroyed process groups, and the oldest ones of a team that has too many.

        An engine's team has one exchange per tensor and needs them all: its ranks do not ask who lacks one.
        """
        gone = [key for key in self._exchanges if not all(map(replicas.exists, key[0][:2]))]
        own = [] if team.uniform else [key for key in self._exchanges if key[0] == team]
        for key in {*gone, *own[:-MAX_EXCHANGES]}:
            del self._exchanges[key]

    def _name_of(self, common: Hashable) -> str:
        """Return the digest of work that ranks have in common; cached, as it takes a millisecond."""
        if common not in self._names:
            if len(self._names) > MAX_EXCHANGES:
                self._names.clear()
            self._names[common] = digest(common)
        return self._names[common]

    def _work_without_replicas(
        self, team: Team, members: list[_Member], groups: Mapping[int, dict[str, Any]]
    ) -> _Work | None:
        return None if team.shards is None else self._work(team._replace(replicas=None), members, groups)

    def _exchange(
        self,
        team: Team,
        members: Sequence[_Member],
        groups: Mapping[int, dict[str, Any]],
    ) -> tuple[Exchange, dict[int, int]]:
        """Return a new exchange for a team, and the place of each slot's group. Collective."""
        place_of: dict[int, int] = {}
        for theirs in gather_objects({slot: m.place for m in members for slot in _held(m)}, team.shards):
            place_of |= theirs
        shapes = {slot: self._locator.shapes[slot] for slot in place_of} if team.uniform else {}
        shapes |= {member.slot: member.shape for member in members if not team.uniform}
        costs = {}
        for slot in place_of:
            _, layout, steps = _kind(groups[place_of[slot]])
            costs[slot] = flops(
                shapes[slot], matrix_layouts.from_plain(layout) or matrix_layouts.of_shape(shapes[slot]), steps
            )
        exchange = Exchange(
            {slot: shapes[slot] for slot in place_of},
            costs,
            {slot: region for member in members for slot, region in _held(member).items()},
            shards=team.shards,
            replicas=team.replicas,
            device=team.device,
            dtype=team.dtype,
        )
        return exchange, place_of

    def _share(
        self, works: Sequence[_Work], buckets: Sequence[Bucket], corrections: Sequence[Correction]
    ) -> list[list[Tensor]]:
        """Return the directions of buckets, which may include tensors that no other rank replicates."""
        momenta = [take_momenta(*pair) for pair in zip(buckets, corrections, strict=True)]
        found: dict[int, tuple[dict[str, Any], Tensor, Tensor]] = {
            id(tensor): (bucket.group, tensor, momentum)
            for bucket, own in zip(buckets, momenta, strict=True)
            for tensor, momentum in zip(bucket.placements, own, strict=True)
        }
        for work in works:
            pieces: dict[int, Tensor] = {}
            for member in work.members:
                if member.id in found:  # not if an engine's tensor is all padding
                    _, _, momentum = found.pop(member.id)
                    slots = [member.slot] if member.placement is None else [p.slot for p in member.placement.pieces]
                    pieces |= zip(slots, cut(momentum, member.placement), strict=True)
            results = work.exchange.run(pieces, functools.partial(_orthogonalize_wholes, work))
            if pieces:
                torch._foreach_copy_(list(pieces.values()), [results[slot] for slot in pieces])
        for dtype in {momentum.dtype for *_, momentum in found.values()}:
            others = {key: momentum for key, (*_, momentum) in found.items() if momentum.dtype == dtype}
            settings = {key: settings_of(*found[key][:2]) for key in others}
            for key, direction in directions(others, settings, out_dtype=dtype).items():
                others[key].copy_(direction)
        return [bucket.cut(own) for bucket, own in zip(buckets, momenta, strict=True)]


def _orthogonalize_wholes(work: _Work, wholes: dict[int, Tensor]) -> dict[int, Tensor]:
    settings = {slot: settings_of(work.groups[work.place_of[slot]], whole) for slot, whole in wholes.items()}
    return directions(wholes, settings, out_dtype=work.dtype)


def _is_alone(param: Tensor, placement: Placement) -> bool:
    """Return whether a sharded parameter is whole, in its own shape, because its process group has one rank."""
    return dtensors.is_dtensor(param) and dist.get_world_size(placement.group) == 1


def _held(member: _Member) -> dict[int, Region]:
    """Return the regions of a tensor's parameters that this rank holds, by slot."""
    if member.placement is None:
        return {member.slot: Region.everything(member.shape)}
    return {piece.slot: piece.region for piece in member.placement.pieces}


def _kind(group: Mapping[str, Any]) -> tuple[str, Any, int]:
    """Return the settings of a group that must be equal on all ranks."""
    return group["mars_type"], group["layout"], len(ns_coefficients(group))


def _order(team: Team) -> tuple[Any, ...]:
    """Return the sort key of teams: one order on all ranks, so that ranks in several teams do not deadlock."""
    ranks = [() if group is None else tuple(dist.get_process_group_ranks(group)) for group in team[:2]]
    # First what all ranks of a mesh have in common: the rows of one may be the columns of another.
    steps = [tuple(rank - own[0] for rank in own) for own in ranks]
    names = ["" if group is None else group.group_name for group in team[:2]]
    return *steps, *ranks, *names, str(team.device.type), str(team.dtype)


def _sizes(team: Team) -> tuple[int, int]:
    """Return the number of ranks, and the number that hold one copy of the model."""
    copies, shards = (1 if group is None else dist.get_world_size(group) for group in (team.replicas, team.shards))
    return copies * shards, shards


def _orthogonalize(buckets: Sequence[Bucket], corrections: Sequence[Correction]) -> list[list[Tensor]]:
    """Return the directions of the buckets of a chunk."""
    owners = [(bucket.group, owner) for bucket in buckets for owner in bucket.placements]
    settings = dict(enumerate(settings_of(group, owner) for group, owner in owners))
    taken = [take_momenta(*pair) for pair in zip(buckets, corrections, strict=True)]
    momenta = dict(enumerate(momentum for own in taken for momentum in own))
    chunk = buckets[0].chunk
    wide = torch.float64 if owners[0][1].dtype == torch.float64 else torch.float32
    # Round as an exchange does, so that a step is the same whether it is shared or not.
    out_dtype = chunk.dtype if isinstance(chunk, _Repeated) else wide
    found = iter(directions(momenta, settings, out_dtype=out_dtype).values())
    return [bucket.cut([next(found) for _ in bucket.placements]) for bucket in buckets]
