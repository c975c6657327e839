"""Share the work on matrices among ranks: who orthogonalizes which, and how parts travel there and back.

Where ranks hold shards of a matrix (FSDP2, ZeRO) or copies of it (DDP, HSDP), one rank collects it, orthogonalizes it
and sends the direction back. `plan_rounds` says which rank; it is called once over all matrices, and a step takes those
that have gradients. A round reads: gather, orthogonalize, scatter. While one communicates, others work: a round is a
generator, which yields where it would wait.
"""

from __future__ import annotations

import functools
import heapq
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.arithmetic import matrix_layouts
from mars_hf.arithmetic.directions import count_rows, flops, iteration_dtype
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.arithmetic.newton_schulz import MAX_ELEMENTS, chunks_of, coefficients_of
from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.distributed.norms import GroupSums, first_message, group_order, wire_device
from mars_hf.distributed.shards import replicas_in_mesh, slices_of
from mars_hf.distributed.tensors import Group, ShardSpec, Slice, is_dtensor

# The allocator reuses memory for temporary tensors of up to 32 MB; larger ones cost a page fault every 4 KB.
CHUNK_ELEMENTS_CPU = 2**22
# On an accelerator: of 2**25 elements a product makes eight blocks of 128 x 256 for each multiprocessor of an H100, so
# that the last ones, which do not occupy all, cost little. A step holds 8 bytes for each element (first moment,
# iteration, direction); in a large model an eighth of all makes that a byte a parameter.
CHUNK_ELEMENTS, CHUNK_SHARE = 2**25, 1 / 8
# Rounds of an exchange overlap, so a rank's work is cut into several, unless they become too small to pay.
ROUNDS, ROUND_ELEMENTS = 4, 2**22
# Largest work of the busiest rank, relative to the best division, if that saves communication.
SLACK = 1.1


# --- who works on what ------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A parameter to orthogonalize, as all ranks that share the work know it."""

    param_index: int
    shape: torch.Size  # of the whole parameter
    cost: float  # of the work, in any unit
    slice_of: Callable[[int], Slice | None]  # what a rank holds, by its number among those that hold shards
    only_holder: int | None = None  # the only rank that holds any of it
    group: int = 0  # index of its parameter group
    rows: int = 0  # that have a state


# Matrices that are worked on at a time, each with its owner: a replica, and a rank in it.
Round = list[tuple[Matrix, tuple[int, int]]]
_STATUS = -1  # in place of the index of a parameter
# See `Exchange.run`.
Work = Callable[[list[Matrix], list[Tensor], list[Tensor]], list[Tensor]]


def plan_rounds(
    matrices: Iterable[Matrix], *, ranks: int = 1, replicas: int = 1, max_elements: int = MAX_ELEMENTS
) -> list[Round]:
    """Say which rank orthogonalizes which matrix, and in which round; the same on all ranks, without communication.

    Largest first, to the rank with the least work so far: linear in matrices plus ranks.

    Args:
        matrices: all of them, with and without gradients.
        ranks: number of ranks that hold the shards of a copy.
        replicas: number of copies.
        max_elements: of the whole matrices that a rank receives in one round, unless one has more.
    """
    matrices = sorted(matrices, key=lambda matrix: (-matrix.cost, matrix.param_index))
    owners = _owners(matrices, ranks * replicas)
    sizes = [matrix.shape.numel() for matrix in matrices]
    chunks = chunks_of(owners, sizes, [max_elements // replicas] * len(matrices))
    numbers = [number for _, number in chunks]
    rounds: list[Round] = [[] for _ in range(1 + max(numbers, default=-1))]
    for matrix, owner, number in zip(matrices, owners, numbers, strict=True):
        # Neighbors are ranks of different replicas, so none idles while another has two.
        rounds[number].append((matrix, (owner % replicas, owner // replicas)))
    return rounds


def _owners(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """Return the rank that works on each matrix: the only one that holds it, if that makes no rank much busier."""
    owners, busiest = _divide(matrices, ranks, -1.0)
    if all(matrix.only_holder is None for matrix in matrices):
        return owners
    with_holders, most = _divide(matrices, ranks, SLACK * busiest)
    return with_holders if most <= SLACK * busiest else owners


def _divide(matrices: Sequence[Matrix], ranks: int, limit: float) -> tuple[list[int], float]:
    """Return owners and the largest load; matrices with one holder stay there up to a load of `limit`."""
    owners = [-1] * len(matrices)
    loads = [0.0] * ranks
    for position, matrix in enumerate(matrices):
        holder = matrix.only_holder
        if holder is not None and loads[holder] + matrix.cost <= limit:
            owners[position] = holder
            loads[holder] += matrix.cost
    least_loaded = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least_loaded)
    for position, matrix in enumerate(matrices):
        if owners[position] < 0:
            load, rank = least_loaded[0]
            owners[position] = rank
            heapq.heapreplace(least_loaded, (load + matrix.cost, rank))
    return owners, max(least_loaded)[0]


# --- there and back ---------------------------------------------------------------------------------------------------


class ProcessGroups(NamedTuple):
    """Ranks that share matrices: those that hold the shards of one copy, and those that hold the same of other copies.

    `device` and `dtype` are those of the iteration.
    """

    shards: Group
    replicas: Group
    device: torch.device
    dtype: torch.dtype

    def order(self) -> tuple[Any, ...]:
        """Return the sort key of these groups: one order on all ranks."""
        shards = () if self.shards is None else group_order(self.shards)
        replicas = () if self.replicas is None else group_order(self.replicas)
        return shards, replicas, self.device.type, str(self.dtype)


class Parcel(NamedTuple):
    """What travels of a matrix: a part of it, and the state of its rows, which all ranks hold alike; maybe empty."""

    part: Tensor
    rows: Tensor


class _Form(NamedTuple):
    """The form of a parcel."""

    shape: torch.Size  # of its part
    rows: int  # that have a state


@dataclass
class _Trip:
    """A round on its way."""

    calls: int = 0  # of communication
    done: int = 0  # those before this rank has failed
    heard_here: Tensor | None = None  # whether a rank of this replica has failed
    heard_there: Tensor | None = None  # or of any


# A round that goes on: it yields while it communicates, and returns the directions, or parcels on their way.
Directions = Generator[None, None, dict[int, Tensor]]
_Parcels = Generator[None, None, dict[int, Parcel]]


class Exchange:
    """Move matrices to their owners and directions back, among the ranks of some process groups.

    `run` is collective: all ranks of both groups take part, also those that hold nothing, and all let their rounds go
    on in the same order. What goes back says also whether a rank has failed before, so that in each round either all
    ranks hear it or none; `tell` ends a step.

    Attributes:
        has_failed: whether this rank has failed in this step.
        is_broken: whether communication has failed, so that no rank can wait for this one.
    """

    def __init__(self, groups: ProcessGroups, matrices: Sequence[Matrix]) -> None:
        """Plan."""
        self.groups = groups
        self._ranks, self._rank = _size_and_rank(groups.shards)
        self._replicas, self._replica = _size_and_rank(groups.replicas)
        self._row_dtype = torch.promote_types(groups.dtype, torch.float32)
        self._no_rows = torch.empty(0, dtype=self._row_dtype, device=groups.device)
        share = sum(matrix.shape.numel() for matrix in matrices) // (self._ranks * self._replicas)
        self.rounds = plan_rounds(
            matrices,
            ranks=self._ranks,
            replicas=self._replicas,
            max_elements=min(max(share // ROUNDS, ROUND_ELEMENTS), CHUNK_ELEMENTS) * self._replicas,
        )
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.has_failed = self.is_broken = False
        self._heard: Tensor | None = None  # how often a rank has said that it has failed; None before a round

    def tell(self, message: str | None) -> str | None:
        """Return the message of a rank that has failed before its last word in this step; None if there is none.

        Collective if there is one. Waits for the device. `message` is this rank's; None if it has not failed.
        """
        if self._heard is None or not self._heard.any():
            return None
        for group in (self.groups.shards, self.groups.replicas):
            if group is not None:
                message = first_message(message, group)
        return message

    def run(
        self, matrices: Round, held: Mapping[int, Parcel], work: Work, error: Exception | None = None
    ) -> Directions:
        """Gather whole matrices on their owners, do the work there, and return this rank's parts of the results.

        It yields whenever it has begun to communicate. A rank that fails takes part to the end, with what it has, since
        the others wait for it.

        Args:
            matrices: those of a round that have gradients, with their owners; the same on all ranks.
            held: by index, this rank's part of each, in the dtype of the iteration, and the state of its rows, which
                is modified.
            work: maps matrices, their whole tensors and the state of their rows, which it modifies, to results of the
                same shapes and dtype.
            error: what this rank has failed with on its way here; raised at the end.
        """
        trip = _Trip()
        if error is None:
            try:
                results = yield from self._run(trip, matrices, held, work)
                for index, result in results.items():
                    held[index].rows.copy_(result.rows)
                self._end_round(trip)
                return {index: result.part for index, result in results.items()}
            except Exception as raised:
                if self.is_broken:
                    raise
                error = raised
        traceback.clear_frames(error.__traceback__)  # which hold memory
        self.has_failed = True
        trip.calls, trip.done = 0, trip.calls
        try:
            yield from self._run(trip, matrices, held, lambda owned, wholes, rows: wholes)
        except Exception:
            self.is_broken = True
            raise
        self._end_round(trip)
        raise error

    def _end_round(self, trip: _Trip) -> None:
        """Add up what has been heard."""
        heard = trip.heard_here if self.groups.replicas is None else trip.heard_there
        if heard is not None:
            self._heard = heard if self._heard is None else self._heard + heard

    def _run(self, trip: _Trip, matrices: Round, held: Mapping[int, Parcel], work: Work) -> _Parcels:
        """Return this rank's parts of the results, with new states of rows; skip what the trip says is done."""
        owned = [matrix for matrix, owner in matrices if owner == (self._replica, self._rank)]
        by_replica = self._held_by_owner(matrices, held)
        own = {index: parcel._replace(rows=self._as_sent(parcel.rows)) for index, parcel in held.items()}
        if self.groups.shards is None:
            results = self._work_alone(owned, own, work)
        else:
            results = yield from self._work_within_replica(trip, owned, by_replica[self._replica], own, work)
        if self.groups.replicas is not None:
            # What has happened since ranks of this replica have told each other is for the next round: else some would
            # hear it in this one, and some not.
            status = self._status() if trip.heard_here is None else self._as_status(trip.heard_here)
            results = yield from self._from_replicas(trip, by_replica, results, own, status)
        return results

    def _status(self) -> Parcel:
        """Return what tells whether this rank has failed."""
        return self._as_status(
            torch.full((), float(self.has_failed), dtype=self.groups.dtype, device=self.groups.device)
        )

    def _as_status(self, flag: Tensor) -> Parcel:
        return Parcel(flag.expand(_aligned(1) // self.groups.dtype.itemsize), self._no_rows)

    def _as_sent(self, rows: Tensor) -> Tensor:
        """Return the state of rows in the dtype that all ranks send."""
        return rows.to(self.groups.device, self._row_dtype) if rows.numel() else self._no_rows

    def _held_by_owner(self, matrices: Round, held: Mapping[int, Parcel]) -> list[list[tuple[int, int]]]:
        """Return what this rank has a part of, by the replica that works on it: owners' ranks and indices."""
        by_replica: list[list[tuple[int, int]]] = [[] for _ in range(self._replicas)]
        for matrix, (replica, rank) in matrices:
            if matrix.param_index in held:
                by_replica[replica].append((rank, matrix.param_index))
        for of_replica in by_replica:
            of_replica.sort(key=lambda pair: pair[0])
        return by_replica

    def _work_alone(self, owned: list[Matrix], own: Mapping[int, Parcel], work: Work) -> dict[int, Parcel]:
        """Return the results of the matrices that this rank holds whole and works on."""
        wholes = [own[matrix.param_index] for matrix in owned]
        parts = [whole.part.to(self.groups.device) for whole in wholes]
        directions = work(owned, parts, [whole.rows for whole in wholes])
        results = {}
        for matrix, direction, whole in zip(owned, directions, wholes, strict=True):
            results[matrix.param_index] = Parcel(direction, whole.rows)
        return results

    def _work_within_replica(
        self,
        trip: _Trip,
        owned: list[Matrix],
        leaving: Sequence[tuple[int, int]],
        own: Mapping[int, Parcel],
        work: Work,
    ) -> _Parcels:
        """Return this rank's parts of what its replica works on; `leaving`: owners' ranks and indices."""
        coming = self._slices_of_ranks(owned)
        # Gather.
        arrived = yield from self._to_owners(trip, leaving, own, coming)
        wholes = {matrix.param_index: self._empty(matrix.shape, self.groups.dtype) for matrix in owned}
        rows = {matrix.param_index: self._no_rows for matrix in owned}
        views = []
        for (_, matrix, part), parcel in zip(coming, arrived, strict=True):
            views.append(part.of(wholes[matrix.param_index]))
            rows[matrix.param_index] = parcel.rows
        if views:
            pieces = [parcel.part.view(view.shape) for parcel, view in zip(arrived, views, strict=True)]
            torch._foreach_copy_(views, pieces)
        # Orthogonalize.
        results = [result.contiguous() for result in work(owned, list(wholes.values()), list(rows.values()))]
        directions = dict(zip(wholes, results, strict=True))
        # Scatter.
        parcels = []
        for rank, matrix, part in coming:
            index = matrix.param_index
            parcels.append((rank, Parcel(part.of(directions[index]), rows[index])))
        return (yield from self._from_owners(trip, leaving, own, parcels))

    def _to_owners(
        self,
        trip: _Trip,
        leaving: Sequence[tuple[int, int]],
        own: Mapping[int, Parcel],
        coming: Sequence[tuple[int, Matrix, Slice]],
    ) -> Generator[None, None, list[Parcel]]:
        """Send each parcel to the rank that works on its matrix, and return those that come, in their order."""
        sent = [(rank, own[index]) for rank, index in leaving]
        forms = [(rank, _Form(part.shape(matrix.shape), matrix.rows)) for rank, matrix, part in coming]
        return (yield from self._all_to_all(trip, sent, forms))

    def _from_owners(
        self,
        trip: _Trip,
        leaving: Sequence[tuple[int, int]],
        own: Mapping[int, Parcel],
        parcels: Sequence[tuple[int, Parcel]],
    ) -> _Parcels:
        """Send parcels to their ranks, and return those that come back for this rank's own, by index.

        Every rank gets a status too. `leaving` and `parcels` are in the order of ranks.
        """
        status = self._status()
        sent = [*parcels, *[(rank, status) for rank in range(self._ranks)]]
        coming = [(rank, index, _form_of(own[index])) for rank, index in leaving]
        coming += [(rank, _STATUS, _form_of(status)) for rank in range(self._ranks)]
        sent.sort(key=lambda entry: entry[0])
        coming.sort(key=lambda entry: entry[0])
        is_heard = trip.calls >= trip.done
        returned = yield from self._all_to_all(trip, sent, [(rank, form) for rank, _, form in coming])
        if is_heard:
            statuses = [parcel for (_, index, _), parcel in zip(coming, returned, strict=True) if index == _STATUS]
            trip.heard_here = _largest(statuses)
        indices = [index for _, index, _ in coming]
        return {index: parcel for index, parcel in zip(indices, returned, strict=True) if index != _STATUS}

    def _slices_of_ranks(self, owned: list[Matrix]) -> list[tuple[int, Matrix, Slice]]:
        """Return what each rank holds of the matrices that this one works on, rank by rank."""
        slices = []
        for rank in range(self._ranks):
            for matrix in owned:
                part = matrix.slice_of(rank)
                if part is not None and part.shape(matrix.shape).numel():
                    slices.append((rank, matrix, part))
        return slices

    def _from_replicas(
        self,
        trip: _Trip,
        by_replica: Sequence[Sequence[tuple[int, int]]],
        results: Mapping[int, Parcel],
        own: Mapping[int, Parcel],
        status: Parcel,
    ) -> _Parcels:
        """Return what all replicas work on, in the forms of `own`; `by_replica`: see `_held_by_owner`.

        Each replica sends a status too, behind its results.
        """
        form = _form_of(status)
        forms_by_replica = [{index: _form_of(own[index]) for _, index in held} | {_STATUS: form} for held in by_replica]
        results = {**results, _STATUS: status}
        flats = []
        for replica, forms in enumerate(forms_by_replica):
            if replica == self._replica:
                flats.append(self._pack([results[index] for index in forms]))
            else:
                flats.append(self._empty((sum(map(self._size, forms.values())),), torch.uint8))
        is_heard = trip.calls >= trip.done
        yield from self._communicate(trip, lambda: self._broadcast(flats))
        parcels: dict[int, Parcel] = {}
        statuses = []
        for forms, flat in zip(forms_by_replica, flats, strict=True):
            parcels.update(zip(forms, self._unpack(flat, list(forms.values())), strict=True))
            statuses.append(parcels.pop(_STATUS))
        if is_heard:
            trip.heard_there = _largest(statuses)
        return parcels

    def _broadcast(self, flats: Sequence[Tensor]) -> list[Any]:
        """Begin to send each replica's bytes to the others."""
        group = self.groups.replicas
        return [dist.broadcast(flat, group_src=source, group=group, async_op=True) for source, flat in enumerate(flats)]

    def _all_to_all(
        self, trip: _Trip, leaving: Sequence[tuple[int, Parcel]], coming: Sequence[tuple[int, _Form]]
    ) -> Generator[None, None, list[Parcel]]:
        """Send parcels to ranks, rank by rank, and return those that come, in their order."""
        sent, received = [0] * self._ranks, [0] * self._ranks  # bytes
        for rank, parcel in leaving:
            sent[rank] += self._size(_form_of(parcel))
        for rank, form in coming:
            received[rank] += self._size(form)
        flat = self._empty((sum(received),), torch.uint8)
        packed = self._pack([parcel for _, parcel in leaving])
        group = self.groups.shards
        yield from self._communicate(
            trip, lambda: [dist.all_to_all_single(flat, packed, received, sent, group=group, async_op=True)]
        )
        return self._unpack(flat, [form for _, form in coming])

    def _communicate(self, trip: _Trip, begin: Callable[[], list[Any]]) -> Iterator[None]:
        """Begin a round's next communication, let others go on, and end it; skip what was done before a failure."""
        trip.calls += 1
        if trip.calls <= trip.done:
            return
        try:
            works = begin()
            yield
            for work in works:
                work.wait()
        except Exception:
            self.is_broken = True
            raise

    def _pack(self, parcels: Sequence[Parcel]) -> Tensor:
        """Return parcels as bytes, which every communication backend knows, one after the other."""
        forms = [_form_of(parcel) for parcel in parcels]
        flat = self._empty((sum(map(self._size, forms)),), torch.uint8)
        copies = [tensor for parcel in self._unpack(flat, forms) for tensor in parcel if tensor.numel()]
        tensors = [tensor for parcel in parcels for tensor in parcel if tensor.numel()]
        if tensors:
            torch._foreach_copy_(copies, tensors)
        return flat

    def _unpack(self, flat: Tensor, forms: Sequence[_Form]) -> list[Parcel]:
        """Return views of the parcels in some bytes."""
        parcels = []
        start = 0
        for form in forms:
            end = start + form.shape.numel() * self.groups.dtype.itemsize
            part = flat[start:end].view(self.groups.dtype).view(form.shape)
            rows = self._no_rows
            if form.rows:
                first = _aligned(end)
                rows = flat[first : first + form.rows * self._row_dtype.itemsize].view(self._row_dtype)
            parcels.append(Parcel(part, rows))
            start += self._size(form)
        return parcels

    def _size(self, form: _Form) -> int:
        """Return the bytes of a parcel."""
        part = _aligned(form.shape.numel() * self.groups.dtype.itemsize)
        return part + _aligned(form.rows * self._row_dtype.itemsize)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.groups.device)


def _largest(statuses: Sequence[Parcel]) -> Tensor:
    return torch.stack([status.part[0] for status in statuses]).amax()


def _form_of(parcel: Parcel) -> _Form:
    return _Form(parcel.part.shape, parcel.rows.numel())


def _aligned(size: int) -> int:
    """Return a number of bytes rounded up so that any dtype may follow, at full speed."""
    return -(-size // 16) * 16


def _size_and_rank(group: Group) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


# --- one step ---------------------------------------------------------------------------------------------------------


class MatrixPlanner:
    """Sort the matrices of a step into chunks and rounds."""

    def __init__(self) -> None:
        """Start without plans."""
        self._exchanges: dict[Any, Exchange] = {}
        self.shared: list[Exchange] = []  # of this step

    def assign(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        specs: Mapping[Tensor, ShardSpec],
        shapes: Sequence[torch.Size],
        process_group: Group,
        agree: Callable[[], None] = lambda: None,
    ) -> dict[int, Any]:
        """Return the chunk of each matrix of this rank, by the index of its parameter. Collective where ranks share.

        Args:
            param_groups: the optimizer's groups.
            specs: specs of the sharded parameters.
            shapes: shapes of the whole parameters, by index.
            process_group: ranks that hold the same whole parameters and share the work; None for none.
            agree: lets all ranks stop where one has failed; called before ranks tell each other what they hold.
        """
        alone = _Chunks()
        members: dict[ProcessGroups, list[_Member]] = {}
        for member in _members(param_groups):
            groups = _groups_of(member, specs.get(member.param), process_group)
            if groups is not None:
                members.setdefault(groups, []).append(member)
            elif member.param.grad is not None:
                alone.append(member)
        chunk_of = alone.numbered()
        self.shared = []
        for groups in sorted(members, key=ProcessGroups.order):
            exchange = self._exchange(groups, members[groups], specs, shapes, agree)
            for number, matrices in enumerate(exchange.rounds):
                chunk = len(self.shared), number
                chunk_of |= {matrix.param_index: chunk for matrix, _ in matrices}
            exchange.start()
            self.shared.append(exchange)
        return chunk_of

    def _exchange(
        self,
        groups: ProcessGroups,
        members: Sequence[_Member],
        specs: Mapping[Tensor, ShardSpec],
        shapes: Sequence[torch.Size],
        agree: Callable[[], None],
    ) -> Exchange:
        """Return the exchange among some ranks, planned at the first step that has these members."""
        held = [(each.param_index, each.group_index, each.param.shape, specs.get(each.param)) for each in members]
        normalizes = [each.group["normalize_rows"] is not None for each in members]
        key = groups, tuple(held), tuple(normalizes)
        if key not in self._exchanges:
            if any(each.param in specs and not is_dtensor(each.param) for each in members):
                agree()
            self._exchanges[key] = Exchange(groups, _matrices(groups, members, specs, shapes))
        return self._exchanges[key]

    def rounds(self, whole: GroupSums) -> dict[Any, tuple[Exchange, Round]]:
        """Return the rounds of this step by chunk, with the matrices that have gradients, in one order everywhere."""
        rounds = {}
        for position, exchange in enumerate(self.shared):
            present = whole.present_in(exchange.groups.shards or exchange.groups.replicas)
            for number, matrices in enumerate(exchange.rounds):
                with_gradients = [(matrix, owner) for matrix, owner in matrices if matrix.param_index in present]
                if with_gradients:
                    rounds[position, number] = exchange, with_gradients
        return rounds


class _Member(NamedTuple):
    """A parameter whose rule orthogonalizes."""

    param_index: int
    group_index: int
    param: Tensor
    group: Mapping[str, Any]


def _members(param_groups: Sequence[Mapping[str, Any]]) -> Iterator[_Member]:
    """Yield the parameters whose rules orthogonalize."""
    first = 0
    for group_index, group in enumerate(param_groups):
        if update_rule(group).orthogonalizes:
            for index, param in enumerate(group["params"], first):
                yield _Member(index, group_index, param, group)
        first += len(group["params"])


class _Chunks:
    """Matrices of this rank alone, sorted into chunks of one kind."""

    def __init__(self) -> None:
        self._kinds: dict[int, Any] = {}  # by the index of the parameter
        self._sizes: list[int] = []

    def append(self, member: _Member) -> None:
        param = member.param
        layout = None if member.group["layout"] is None else MatrixLayout(**member.group["layout"])
        dtype = iteration_dtype(member.group, param, param.device)
        self._kinds[member.param_index] = param.device, param.dtype, dtype, _shapes_of(param.shape, layout)
        self._sizes.append(param.numel())

    def numbered(self) -> dict[int, Any]:
        """Return the chunk of each matrix, by the index of its parameter."""
        on_device = min(max(CHUNK_ELEMENTS, int(CHUNK_SHARE * sum(self._sizes))), MAX_ELEMENTS)
        limits = [CHUNK_ELEMENTS_CPU if kind[0].type == "cpu" else on_device for kind in self._kinds.values()]
        return dict(zip(self._kinds, chunks_of(self._kinds.values(), self._sizes, limits), strict=True))


def _groups_of(member: _Member, spec: ShardSpec | None, process_group: Group) -> ProcessGroups | None:
    """Return the ranks that share a parameter; None if it is this rank's alone."""
    param = member.param
    shards, replicas = sharing_ranks(param, spec, process_group)
    if shards is None and replicas is None:
        return None
    device = wire_device(param.device, shards or replicas)
    return ProcessGroups(shards, replicas, device, iteration_dtype(member.group, param, device))


def sharing_ranks(param: Tensor, spec: ShardSpec | None, process_group: Group) -> tuple[Group, Group]:
    """Return the ranks that hold the other shards of a parameter to orthogonalize, and those that hold copies."""
    if spec is not None:
        shards, replicas = spec.group, spec.replicas
    elif is_dtensor(param):
        shards, replicas = None, replicas_in_mesh(param)
    else:
        shards, replicas = None, process_group
    if replicas is not None and dist.get_world_size(replicas) == 1:
        replicas = None
    return shards, replicas


def _matrices(
    groups: ProcessGroups, members: Sequence[_Member], specs: Mapping[Tensor, ShardSpec], shapes: Sequence[torch.Size]
) -> list[Matrix]:
    """Return the matrices in some members that ranks share; collective under ZeRO."""
    if groups.shards is None:
        return [_matrix(groups, each, each.param_index, each.param.shape, _whole(each.param.shape)) for each in members]
    if all(is_dtensor(member.param) for member in members):
        return [_matrix(groups, each, each.param_index, each.param.shape, slices_of(each.param)) for each in members]
    return _matrices_of_zero(groups, members, specs, shapes)


def _matrix(
    groups: ProcessGroups,
    member: _Member,
    index: int,
    shape: torch.Size,
    slice_of: Callable[[int], Slice | None],
    only_holder: int | None = None,
) -> Matrix:
    group = member.group
    layout = matrix_layouts.of_shape(shape) if group["layout"] is None else MatrixLayout(**group["layout"])
    coefficients = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    cost = flops(shape, layout, coefficients, groups.dtype, groups.device)
    rows = count_rows(group, shape)
    return Matrix(index, shape, cost, slice_of, only_holder, member.group_index, rows)


def _whole(shape: torch.Size) -> Callable[[int], Slice | None]:
    """Return what the only rank of a copy holds of a matrix: all rows."""
    rows = Slice(0, 0, shape[0])
    return lambda rank: rows


def _matrices_of_zero(
    groups: ProcessGroups, members: Sequence[_Member], specs: Mapping[Tensor, ShardSpec], shapes: Sequence[torch.Size]
) -> list[Matrix]:
    """Return the matrices in flat tensors of ZeRO, which hold shards of several parameters. Collective."""
    held: dict[int, tuple[int, Slice]] = {}  # by the index of the parameter: its group here, and what this rank holds
    for member in members:
        for shard in specs[member.param].shards:
            held[shard.param_index] = member.group_index, shard.slice
    everywhere: list[dict[int, tuple[int, Slice]]] = [{}] * dist.get_world_size(groups.shards)
    dist.all_gather_object(everywhere, held, group=groups.shards)
    slices: dict[int, dict[int, Slice]] = {}
    group_index_of: dict[int, int] = {}
    for rank, of_rank in enumerate(everywhere):
        for index, (group_index, part) in of_rank.items():
            slices.setdefault(index, {})[rank] = part
            group_index_of[index] = group_index
    of_group = {member.group_index: member for member in members}
    matrices = []
    for index in sorted(slices):
        _check_pieces(index, shapes[index], slices[index].values())
        only_holder = min(slices[index]) if len(slices[index]) == 1 else None
        member = of_group[group_index_of[index]]
        matrices.append(_matrix(groups, member, index, shapes[index], slices[index].get, only_holder))
    return matrices


def _check_pieces(index: int, shape: torch.Size, pieces: Iterable[Slice]) -> None:
    """Raise RuntimeError unless the ranks' pieces of a parameter follow one another from its start to its end."""
    end = 0
    for start, length in sorted((piece.start, piece.length) for piece in pieces):
        if start != end:
            end = -1
            break
        end = start + length
    if end != shape.numel():
        raise RuntimeError(
            f"unsupported sharding of parameter {index} (shape {tuple(shape)}): the ranks' pieces overlap "
            "or leave gaps. Supported are DDP, FSDP2, tensor parallelism and ZeRO-1/2/3"
        )


@functools.lru_cache(maxsize=4096)
def _shapes_of(shape: torch.Size, layout: MatrixLayout | None) -> frozenset[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter, transposed or not."""
    shapes = matrix_layouts.matrix_shapes(shape, layout or matrix_layouts.of_shape(shape))
    return frozenset(tuple(sorted(matrix[-2:])) for matrix in shapes)
