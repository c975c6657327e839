"""Share the work on matrices among ranks: who orthogonalizes which, and how parts travel there and back.

Where ranks hold shards of a matrix (FSDP2, ZeRO) or copies of it (DDP, HSDP), one rank collects it, orthogonalizes it
and sends the direction back. `plan_rounds` says which rank; it is called once over all matrices, and a step takes those
that have gradients. A round reads: gather, orthogonalize, scatter. While one communicates, others work: a round is a
generator, which yields where it would wait.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from mars_hf.distributed.shards import slices_of, spec_of_copies
from mars_hf.distributed.tensors import Group, ShardSpec, Slice, is_dtensor

# The allocator reuses memory for temporary tensors of up to 32 MB; larger ones cost a page fault every 4 KB.
CHUNK_ELEMENTS_CPU = 2**22
# On an accelerator: of 2**25 elements a product makes eight blocks of 128 x 256 for each multiprocessor of an H100, so
# that the last ones, which do not occupy all, cost little. A step holds 8 bytes for each element (first moment,
# iteration, direction); in a large model an eighth of all makes that a byte a parameter.
CHUNK_ELEMENTS, CHUNK_SHARE = 2**25, 1 / 8
# Rounds of an exchange overlap, so a rank's work is cut into several, unless they become too small to pay.
ROUNDS, ROUND_ELEMENTS = 4, 2**22


# --- who works on what ------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A parameter to orthogonalize, as all ranks that share the work know it."""

    param_index: int
    shape: torch.Size  # of the whole parameter
    cost: float  # of the work, in any unit
    slice_of: Callable[[int], Slice | None]  # what a rank holds, by its number among those that hold shards
    group: int = 0  # index of its parameter group
    rows: int = 0  # that have a state


# Matrices that are worked on at a time, each with its owner: a replica, and a rank in it.
Round = list[tuple[Matrix, tuple[int, int]]]
# See `Exchange.run`.
Held = Mapping[int, tuple[Tensor, Tensor]]
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
    least_loaded = [(0.0, rank) for rank in range(ranks * replicas)]  # a heap
    owners = []
    for matrix in matrices:
        load, rank = least_loaded[0]
        owners.append(rank)
        heapq.heapreplace(least_loaded, (load + matrix.cost, rank))
    sizes = [matrix.shape.numel() for matrix in matrices]
    chunks = chunks_of(owners, sizes, [max_elements // replicas] * len(matrices))
    numbers = [number for _, number in chunks]
    rounds: list[Round] = [[] for _ in range(1 + max(numbers, default=-1))]
    for matrix, owner, number in zip(matrices, owners, numbers, strict=True):
        # Neighbors are ranks of different replicas, so none idles while another has two.
        rounds[number].append((matrix, (owner % replicas, owner // replicas)))
    return rounds


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
        return group_order(self.shards), group_order(self.replicas), self.device.type, str(self.dtype)


class Parcel(NamedTuple):
    """What travels of a matrix: a rank's part of it, and the state of its rows, which all ranks hold alike."""

    matrix: Matrix
    slice: Slice
    part: Tensor
    rows: Tensor  # maybe empty


class _Box(NamedTuple):
    """Bytes for what this rank sends to others or gets from them, and views of what is in them.

    The bytes of each rank follow those of the rank before it: first whether the sender has failed, then its parcels.
    """

    flat: Tensor
    sizes: list[int]  # bytes of each rank
    parcels: list[Parcel]
    statuses: list[Tensor]  # 0-d: 1 if it has failed, else 0


class Failure:
    """What this rank has failed with in a step that has begun to change something.

    Other ranks wait for this one in exchanges, which tell them, so it goes on as far as they need. Without exchanges,
    the process ends as with any optimizer, or the next step refuses.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.error: Exception | None = None
        self.is_waited_for = False  # no longer once communication has failed

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of the block while others wait for this rank."""
        try:
            yield
        except Exception as error:
            if not self.is_waited_for:
                raise
            traceback.clear_frames(error.__traceback__)  # which hold memory
            self.error = self.error or error


# A round that goes on: it yields while it communicates.
Travel = Generator[None, None, None]


class Exchange:
    """Move matrices to their owners and directions back, among the ranks of some process groups.

    `run` is collective: all ranks of both groups take part, also those that hold nothing, and all let their rounds go
    on in the same order. What goes back says also whether a rank has failed before, so that in each round either all
    ranks hear it or none; `tell` ends a step.
    """

    def __init__(self, groups: ProcessGroups, matrices: Sequence[Matrix]) -> None:
        """Plan."""
        self.groups = groups
        self._ranks, self._rank = _size_and_rank(groups.shards)
        self._replicas, self._replica = _size_and_rank(groups.replicas)
        self._row_dtype = torch.promote_types(groups.dtype, torch.float32)
        # What a rank works on in a round is about a fourth of its share. It receives as much of each replica.
        share = sum(matrix.shape.numel() for matrix in matrices) // (self._ranks * self._replicas)
        worked_on = min(max(share // ROUNDS, ROUND_ELEMENTS), CHUNK_ELEMENTS)
        self.rounds = plan_rounds(
            matrices, ranks=self._ranks, replicas=self._replicas, max_elements=worked_on * self._replicas
        )
        self.start(Failure())

    def start(self, failure: Failure) -> None:
        """Begin a step, in which other ranks wait for this one."""
        failure.is_waited_for = True
        self._failure = failure
        self._heard: list[Tensor] = []  # by round, whether a rank has said that it has failed

    def tell(self, message: str | None) -> str | None:
        """Return the message of a rank that has failed before its last word in this step; None if there is none.

        Collective if there is one. Waits for the device. `message` is this rank's; None if it has not failed.
        """
        if not self._heard or not torch.stack(self._heard).any():
            return None
        for group in (self.groups.shards, self.groups.replicas):
            if group is not None:
                message = first_message(message, group)
        return message

    def run(self, matrices: Round, held: Held, work: Work, error: Exception | None = None) -> Travel:
        """Gather whole matrices on their owners, do the work there, and put the results in the place of what was held.

        It yields whenever it has begun to communicate. A rank that fails takes part to the end, with what it has, since
        the others wait for it.

        Args:
            matrices: those of a round that have gradients, with their owners; the same on all ranks.
            held: by index, this rank's part of each, in the dtype of the iteration, and the state of its rows.
            work: maps matrices, their whole tensors and the state of their rows, which it modifies, to results of the
                same shapes and dtype.
            error: what this rank has failed with on its way here.

        Raises:
            Exception: what this rank has failed with in this step; at the end.
        """
        try:
            yield from self._run(matrices, held, work, error)
        except Exception:
            self._failure.is_waited_for = False
            raise
        if self._failure.error is not None:
            raise self._failure.error

    def _run(self, matrices: Round, held: Held, work: Work, error: Exception | None) -> Travel:
        """Keep what this rank fails with, and raise what breaks the exchange."""
        owned: dict[tuple[int, int], list[Matrix]] = {}
        for matrix, owner in matrices:
            if matrix.shape.numel():
                owned.setdefault(owner, []).append(matrix)
        own = owned.get((self._replica, self._rank), [])
        # This rank's parts of what this replica works on, and all parts of what this rank works on.
        mine = theirs = self._box_for(self._replica, owned)
        if self.groups.shards is not None:
            theirs = self._box([_parts(own, rank) for rank in range(self._ranks)])
        # Gather.
        with self._failure.kept():
            _copy(_tensors_in(mine.parcels), _tensors_of(mine.parcels, held))
            if error is not None:
                raise error
        yield from self._all_to_all(theirs, mine)
        # Orthogonalize.
        with self._failure.kept():
            if self._failure.error is None:
                self._work(own, theirs.parcels, work)
        has_failed = float(self._failure.error is not None)
        status = torch.full((), has_failed, dtype=self.groups.dtype, device=self.groups.device)
        _copy(theirs.statuses, [status] * len(theirs.statuses))
        # Scatter. What has happened since this status is for the next round: else some ranks of other replicas would
        # hear it in this one, and some not.
        yield from self._all_to_all(mine, theirs)
        boxes = yield from self._of_all_replicas(mine, owned)
        statuses = itertools.chain.from_iterable([box.statuses for box in boxes])
        self._heard.append(torch.stack([*statuses]).amax())
        with self._failure.kept():
            for box in boxes:
                _copy(_tensors_of(box.parcels, held), _tensors_in(box.parcels))

    def _work(self, own: list[Matrix], parcels: Sequence[Parcel], work: Work) -> None:
        """Put the parts of the directions of this rank's matrices in the place of those of their first moments."""
        wholes = {matrix.param_index: self._empty(matrix.shape, self.groups.dtype) for matrix in own}
        rows = {parcel.matrix.param_index: parcel.rows for parcel in parcels}
        places = _places(parcels, wholes)
        parts = [parcel.part.view(place.shape) for parcel, place in zip(parcels, places, strict=True)]
        _copy(places, parts)
        results = work(own, [*wholes.values()], [rows[index] for index in wholes])
        _copy(parts, _places(parcels, dict(zip(wholes, results, strict=True))))
        with_rows = [parcel for parcel in parcels if parcel.matrix.rows]
        _copy([parcel.rows for parcel in with_rows], [rows[parcel.matrix.param_index] for parcel in with_rows])

    def _all_to_all(self, received: _Box, sent: _Box) -> Travel:
        """Send each rank of this replica its bytes in a box, and receive those in another one."""
        group = self.groups.shards
        if group is None:
            return
        sizes = received.sizes, sent.sizes
        work = dist.all_to_all_single(received.flat, sent.flat, *sizes, group=group, async_op=True)
        yield
        work.wait()

    def _of_all_replicas(
        self, mine: _Box, owned: Mapping[tuple[int, int], Sequence[Matrix]]
    ) -> Generator[None, None, list[_Box]]:
        """Send the results of this replica to the others, and return them with theirs."""
        group = self.groups.replicas
        if group is None:
            return [mine]
        boxes, works = [], []
        for replica in range(self._replicas):
            box = mine if replica == self._replica else self._box_for(replica, owned)
            works.append(dist.broadcast(box.flat, group_src=replica, group=group, async_op=True))
            boxes.append(box)
        yield
        for of_replica in works:
            of_replica.wait()
        return boxes

    def _box_for(self, replica: int, owned: Mapping[tuple[int, int], Sequence[Matrix]]) -> _Box:
        """Return room for this rank's parts of what a replica works on, for each rank there."""
        return self._box([_parts(owned.get((replica, rank), []), self._rank) for rank in range(self._ranks)])

    def _box(self, parts_of_ranks: Sequence[Sequence[tuple[Matrix, Slice]]]) -> _Box:
        """Return room for some parts for each rank."""
        dtype, row_dtype = self.groups.dtype, self._row_dtype
        sizes: list[list[int]] = []
        for parts in parts_of_ranks:
            of_rank = [_size((), dtype)]
            for matrix, part in parts:
                of_rank += [_size(part.shape(matrix.shape), dtype), _size((matrix.rows,), row_dtype)]
            sizes.append(of_rank)
        flat = self._empty((sum(map(sum, sizes)),), torch.uint8)
        pieces = iter(flat.split([*itertools.chain.from_iterable(sizes)]))
        parcels, statuses = [], []
        for parts in parts_of_ranks:
            statuses.append(_view(next(pieces), (), dtype))
            for matrix, part in parts:
                of_part = _view(next(pieces), part.shape(matrix.shape), dtype)
                parcels.append(Parcel(matrix, part, of_part, _view(next(pieces), (matrix.rows,), row_dtype)))
        return _Box(flat, [*map(sum, sizes)], parcels, statuses)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.groups.device)


def _parts(matrices: Iterable[Matrix], rank: int) -> list[tuple[Matrix, Slice]]:
    """Return what a rank holds of some matrices."""
    parts = []
    for matrix in matrices:
        part = matrix.slice_of(rank)
        if part is not None and part.shape(matrix.shape).numel():
            parts.append((matrix, part))
    return parts


def _tensors_in(parcels: Iterable[Parcel]) -> list[Tensor]:
    """Return what is in parcels; without empty rows, whose dtype would keep a GPU from one copy of all parts."""
    return [tensor for parcel in parcels for tensor in (parcel.part, parcel.rows) if tensor.numel()]


def _tensors_of(parcels: Iterable[Parcel], held: Held) -> list[Tensor]:
    """Return what a rank holds of what is in parcels, in the same order."""
    return [tensor for parcel in parcels for tensor in held[parcel.matrix.param_index] if tensor.numel()]


def _places(parcels: Iterable[Parcel], wholes: Mapping[int, Tensor]) -> list[Tensor]:
    """Return views of the parts of whole tensors that are in parcels."""
    return [parcel.slice.of(wholes[parcel.matrix.param_index]) for parcel in parcels]


def _copy(to: list[Tensor], tensors: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, tensors)


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor, rounded up so that any dtype may follow, at full speed."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16


def _view(piece: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor at the beginning of some bytes, which every communication backend knows."""
    return piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _size_and_rank(group: Group) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


# --- one step ---------------------------------------------------------------------------------------------------------


class MatrixPlanner:
    """Sort the matrices of a step into chunks and rounds."""

    def __init__(self) -> None:
        """Start without plans."""
        self._exchanges: dict[Any, Exchange] = {}
        self.shared: list[Exchange] = []  # of this step, as the next one
        self.failure = Failure()

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
        self.shared, self.failure = [], Failure()
        alone: list[_Member] = []
        members: dict[ProcessGroups, list[_Member]] = {}
        for member in _members(param_groups):
            spec = specs.get(member.param) or spec_of_copies(member.param, member.param_index, process_group)
            if spec is not None:
                members.setdefault(_groups_of(member, spec), []).append(member)
            elif member.param.grad is not None:
                alone.append(member)
        chunk_of = _chunks_alone(alone)
        for groups in sorted(members, key=ProcessGroups.order):
            exchange = self._exchange(groups, members[groups], specs, shapes, agree)
            for number, matrices in enumerate(exchange.rounds):
                chunk = len(self.shared), number
                chunk_of |= {matrix.param_index: chunk for matrix, _ in matrices}
            exchange.start(self.failure)
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


def _chunks_alone(members: Sequence[_Member]) -> dict[int, Any]:
    """Return the chunks of matrices of this rank alone, by the index of the parameter: each is of one kind."""
    sizes = [member.param.numel() for member in members]
    on_device = min(max(CHUNK_ELEMENTS, int(CHUNK_SHARE * sum(sizes))), MAX_ELEMENTS)
    limits = [CHUNK_ELEMENTS_CPU if member.param.device.type == "cpu" else on_device for member in members]
    indices = [member.param_index for member in members]
    return dict(zip(indices, chunks_of(map(_kind, members), sizes, limits), strict=True))


def _kind(member: _Member) -> tuple[Any, ...]:
    """Return what matrices of one chunk have in common."""
    param, layout = member.param, member.group["layout"]
    shapes = _shapes_of(param.shape, None if layout is None else MatrixLayout(**layout))
    return param.device, param.dtype, iteration_dtype(member.group, param, param.device), shapes


def _groups_of(member: _Member, spec: ShardSpec) -> ProcessGroups:
    """Return the ranks that share a parameter."""
    device = wire_device(member.param.device, spec.group or spec.replicas)
    return ProcessGroups(spec.group, spec.replicas, device, iteration_dtype(member.group, member.param, device))


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
) -> Matrix:
    group = member.group
    layout = matrix_layouts.of_shape(shape) if group["layout"] is None else MatrixLayout(**group["layout"])
    coefficients = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    cost = flops(shape, layout, coefficients, groups.dtype, groups.device)
    rows = count_rows(group, shape)
    return Matrix(index, shape, cost, slice_of, member.group_index, rows)


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
    of_group = {member.group_index: member for member in members}
    matrices = []
    for index in sorted(set().union(*everywhere)):
        of_ranks = {rank: held[index] for rank, held in enumerate(everywhere) if index in held}
        slices = {rank: part for rank, (_, part) in of_ranks.items()}
        _check_pieces(index, shapes[index], slices.values())
        group_index, _ = next(iter(of_ranks.values()))
        matrices.append(_matrix(groups, of_group[group_index], index, shapes[index], slices.get))
    return matrices


def _check_pieces(index: int, shape: torch.Size, pieces: Iterable[Slice]) -> None:
    """Raise RuntimeError unless the ranks' pieces of a parameter follow one another from its start to its end."""
    starts, ends = zip(*sorted((piece.start, piece.start + piece.length) for piece in pieces), strict=True)
    if (*starts, shape.numel()) != (0, *ends):
        raise RuntimeError(
            f"unsupported sharding of parameter {index} (shape {tuple(shape)}): the ranks' pieces overlap "
            "or leave gaps. Supported are DDP, FSDP2, tensor parallelism and ZeRO-1/2/3"
        )


@functools.lru_cache(maxsize=4096)
def _shapes_of(shape: torch.Size, layout: MatrixLayout | None) -> frozenset[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter, transposed or not."""
    shapes = matrix_layouts.matrix_shapes(shape, layout or matrix_layouts.of_shape(shape))
    return frozenset(tuple(sorted(matrix[-2:])) for matrix in shapes)
