"""Orthogonalize the first moments of a step: those whole on this rank in chunks, those that ranks share in rounds.

Where ranks hold shards of a matrix (FSDP2, ZeRO) or copies of it (DDP, HSDP), one rank collects it, orthogonalizes it
and sends the direction back. `plan_rounds` says which rank; it is called once over all matrices, and a step takes those
that have gradients. A round reads: gather, orthogonalize, scatter.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf import matrix_layouts
from mars_hf._compat import cpu_multiplies_bfloat16
from mars_hf.distributed.norms import GroupSums, group_order, wire_device
from mars_hf.distributed.shards import replicas_in_mesh, slices_of
from mars_hf.distributed.tensors import PLAIN, Group, ShardSpec, Slice, is_dtensor
from mars_hf.matrix_layouts import MatrixLayout
from mars_hf.newton_schulz import MAX_ELEMENTS, chunks_of, coefficients_of, orthogonalize
from mars_hf.settings import parse_dtype
from mars_hf.update_rules import update_rule

# The allocator reuses memory for temporary tensors of up to 32 MB; larger ones cost a page fault every 4 KB.
MAX_ELEMENTS_CPU = 2**22
# Largest work of the busiest rank, relative to the best division, if that saves communication.
SLACK = 1.1


# --- directions -----------------------------------------------------------------------------------------------------


class NewtonSchulz(NamedTuple):
    """How one parameter's first moment becomes its direction; without a layout its shape decides."""

    scale: Callable[[int, int], float]
    layout: MatrixLayout | None
    coefficients: tuple[Any, ...]
    eps: float
    dtype: torch.dtype


def newton_schulz_of(group: Mapping[str, Any], dtype: torch.dtype) -> NewtonSchulz:
    """Return the settings for the parameters of a group, whose rule orthogonalizes."""
    rule = update_rule(group)
    assert rule.scale is not None
    layout = None if group["layout"] is None else MatrixLayout(**group["layout"])
    coefficients = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    return NewtonSchulz(rule.scale, layout, coefficients, rule.norm_eps(group), dtype)


def iteration_dtype(group: Mapping[str, Any], param: Tensor, device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: `ns_dtype`; left out, float64 for float64 parameters, else the device's.

    A CPU without bfloat16 instructions takes float32, every other device bfloat16. `device` does the work.
    """
    if group["ns_dtype"] is not None:
        return parse_dtype(group["ns_dtype"])
    if param.dtype == torch.float64:
        return torch.float64
    return torch.float32 if device.type == "cpu" and not cpu_multiplies_bfloat16() else torch.bfloat16


def compute_directions(
    momenta: Sequence[Tensor], settings: Sequence[NewtonSchulz], out_dtype: torch.dtype
) -> list[Tensor]:
    """Orthogonalize whole first moments, each with its settings, and multiply them by their scale.

    Matrices of one shape and the same settings go through Newton-Schulz together. The scale is applied in the dtype of
    the results, so the iteration's result is rounded once.

    Returns:
        New tensors with the shapes and strides of `momenta`, which are not modified.
    """
    layouts = [each.layout or matrix_layouts.of_shape(m.shape) for m, each in zip(momenta, settings, strict=True)]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, setting in enumerate(settings):
        alike.setdefault((setting.coefficients, setting.eps, setting.dtype), []).append(place)
    results = list(momenta)
    for (coefficients, eps, dtype), places in alike.items():
        matrices: list[Tensor] = []
        for place in places:
            shapes = matrix_layouts.matrix_shapes(momenta[place].shape, layouts[place])
            parts = matrix_layouts.views(momenta[place], layouts[place])
            matrices += map(Tensor.reshape, parts, shapes)
        orthogonal = iter(orthogonalize(matrices, coefficients=coefficients, eps=eps, dtype=dtype, out_dtype=out_dtype))
        for place in places:
            results[place] = torch.empty_like(momenta[place], dtype=out_dtype)
            for view in matrix_layouts.views(results[place], layouts[place]):
                matrix = next(orthogonal)
                view.copy_(matrix.reshape(view.shape)).mul_(settings[place].scale(*matrix.shape[-2:]))
    return results


# --- who works on what ----------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A parameter to orthogonalize, as all ranks that share the work know it."""

    param_index: int
    shape: torch.Size  # of the whole parameter
    cost: float  # of the work, in any unit
    slice_of: Callable[[int], Slice | None]  # what a rank holds, by its number among those that hold shards
    home: int | None = None  # the only rank that holds any of it
    group: int = 0  # index of its parameter group


# Matrices that are worked on at a time, each with its owner: a replica, and a rank in it.
Round = list[tuple[Matrix, tuple[int, int]]]


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
    workers, busiest = _divide(matrices, ranks * replicas, -1.0)
    if any(matrix.home is not None for matrix in matrices):
        at_home, most = _divide(matrices, ranks * replicas, SLACK * busiest)
        workers = at_home if most <= SLACK * busiest else workers
    sizes = [matrix.shape.numel() for matrix in matrices]
    chunks = chunks_of(workers, sizes, [max_elements // replicas] * len(matrices))
    rounds: list[Round] = [[] for _ in range(1 + max((number for _, number in chunks), default=-1))]
    for matrix, worker, (_, number) in zip(matrices, workers, chunks, strict=True):
        # Neighbors are workers of different replicas, so none idles while another has two.
        rounds[number].append((matrix, (worker % replicas, worker // replicas)))
    return rounds


def _divide(matrices: Sequence[Matrix], workers: int, limit: float) -> tuple[list[int], float]:
    """Return workers and the largest load; matrices with a home stay there up to a load of `limit`."""
    chosen, loads = [-1] * len(matrices), [0.0] * workers
    for place, matrix in enumerate(matrices):
        if matrix.home is not None and loads[matrix.home] + matrix.cost <= limit:
            chosen[place] = matrix.home
            loads[matrix.home] += matrix.cost
    heap = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(heap)
    for place, matrix in enumerate(matrices):
        if chosen[place] < 0:
            load, chosen[place] = heap[0]
            heapq.heapreplace(heap, (load + matrix.cost, chosen[place]))
    return chosen, max(heap)[0]


def flops(shape: Sequence[int], layout: MatrixLayout, steps: int) -> float:
    """Return the multiplications and additions of Newton-Schulz on a parameter of this shape, in bfloat16."""
    total = 0.0
    for *batch, rows, columns in matrix_layouts.matrix_shapes(shape, layout):
        small, large = sorted((rows, columns))
        # x xᵀ, its product with x, and the square of a (small, small) matrix.
        total += math.prod(batch) * steps * (4.0 * small * small * large + 2.0 * small**3)
    return total


# --- the exchange ---------------------------------------------------------------------------------------------------


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
        orders = [() if group is None else group_order(group) for group in self[:2]]
        return *orders, self.device.type, str(self.dtype)


class Exchange:
    """Move matrices to their owners and directions back, among the ranks of some process groups.

    `run` is collective: all ranks of both groups take part, also those that hold nothing.
    """

    def __init__(self, groups: ProcessGroups, matrices: Sequence[Matrix]) -> None:
        """Plan."""
        self.groups = groups
        (self._ranks, self._rank), (self._replicas, self._replica) = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group)) for group in groups[:2]
        )
        self.rounds = plan_rounds(matrices, ranks=self._ranks, replicas=self._replicas)

    @torch.no_grad()
    def run(
        self,
        matrices: Round,
        shards: Mapping[int, Tensor],
        work: Callable[[list[Matrix], list[Tensor]], list[Tensor]],
    ) -> dict[int, Tensor]:
        """Gather whole matrices on their owners, do the work there, and return this rank's shards of the results.

        Args:
            matrices: those of a round that have gradients, with their owners; the same on all ranks.
            shards: this rank's part of each, by index, in the dtype of the iteration.
            work: maps matrices and their whole tensors to results of the same shapes and dtype.
        """
        owned = [matrix for matrix, owner in matrices if owner == (self._replica, self._rank)]
        # Matrices of which this rank has a shard, by the replica and rank that work on them.
        held = [(owner, matrix.param_index) for matrix, owner in matrices if matrix.param_index in shards]
        held.sort(key=lambda pair: pair[0])
        if self.groups.shards is None:
            wholes = [shards[matrix.param_index].to(self.groups.device) for matrix in owned]
            results = {matrix.param_index: result for matrix, result in zip(owned, work(owned, wholes), strict=True)}
        else:
            leaving = [(rank, index) for (replica, rank), index in held if replica == self._replica]
            results = self._in_replica(owned, leaving, shards, work)
        if self.groups.replicas is None:
            return results
        return self._from_replicas([(replica, index) for (replica, _), index in held], results, shards)

    def _in_replica(
        self,
        owned: list[Matrix],
        leaving: Sequence[tuple[int, int]],
        shards: Mapping[int, Tensor],
        work: Callable[[list[Matrix], list[Tensor]], list[Tensor]],
    ) -> dict[int, Tensor]:
        """Return this rank's shards of what its replica works on; `leaving` are the ranks and indices of these."""
        slices = [(rank, matrix, matrix.slice_of(rank)) for rank in range(self._ranks) for matrix in owned]
        coming = [(rank, matrix, part) for rank, matrix, part in slices if part is not None]
        sent, received = [0] * self._ranks, [0] * self._ranks
        for rank, index in leaving:
            sent[rank] += shards[index].numel()
        for rank, matrix, part in coming:
            received[rank] += part.shape(matrix.shape).numel()
        # Gather.
        flat = self._all_to_all([shards[index] for _, index in leaving], sent, received)
        wholes = {matrix.param_index: self._empty(matrix.shape) for matrix in owned}
        views = [part.of(wholes[matrix.param_index]) for _, matrix, part in coming]
        if views:
            torch._foreach_copy_(views, _unpack(flat, [view.shape for view in views]))
        # Orthogonalize.
        results = map(Tensor.contiguous, work(owned, list(wholes.values())))
        directions = dict(zip(wholes, results, strict=True))
        # Scatter.
        views = [part.of(directions[matrix.param_index]) for _, matrix, part in coming]
        flat = self._all_to_all(views, received, sent)
        indices = [index for _, index in leaving]
        return dict(zip(indices, _unpack(flat, [shards[index].shape for index in indices]), strict=True))

    def _from_replicas(
        self, held: Sequence[tuple[int, int]], results: Mapping[int, Tensor], shards: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return this rank's shards of what all replicas work on; `held` are the replicas and indices of these."""
        blocks = [[index for owner, index in held if owner == replica] for replica in range(self._replicas)]
        sizes = [sum(shards[index].numel() for index in block) for block in blocks]
        block = self._pack([results[index] for index in blocks[self._replica]])
        flats = [block if replica == self._replica else self._empty((size,)) for replica, size in enumerate(sizes)]
        sends = [
            dist.broadcast(_bytes(flat), group_src=source, group=self.groups.replicas, async_op=True)
            for source, flat in enumerate(flats)
            if len(flat)
        ]
        for send in sends:
            send.wait()
        return {
            index: part
            for indices, flat in zip(blocks, flats, strict=True)
            for index, part in zip(indices, _unpack(flat, [shards[index].shape for index in indices]), strict=True)
        }

    def _all_to_all(self, tensors: Sequence[Tensor], leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Send the elements of some tensors, `leaving` of them to each rank, and return those that come."""
        received, size = self._empty((sum(coming),)), self.groups.dtype.itemsize
        counts, sent = [numel * size for numel in coming], [numel * size for numel in leaving]
        dist.all_to_all_single(_bytes(received), _bytes(self._pack(tensors)), counts, sent, group=self.groups.shards)
        return received

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements of all tensors one after the other."""
        flat = self._empty((sum(tensor.numel() for tensor in tensors),))
        if tensors:
            torch._foreach_copy_(_unpack(flat, [tensor.shape for tensor in tensors]), list(tensors))
        return flat

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.groups.dtype, device=self.groups.device)


def _unpack(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Split a flat tensor into views of these shapes, in their order."""
    numels = [shape.numel() for shape in shapes]
    parts = flat[: sum(numels)].split(numels)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _bytes(flat: Tensor) -> Tensor:
    """View a tensor as bytes: not every communication backend knows every dtype."""
    return flat.view(torch.uint8)


# --- one step -------------------------------------------------------------------------------------------------------


class Orthogonalizer:
    """Sort the matrices of a step into chunks and rounds."""

    def __init__(self) -> None:
        """Start without plans."""
        self._exchanges: dict[Any, Exchange] = {}
        self.shared: list[tuple[Exchange, list[int]]] = []  # of this step, with the gradients of whole parameters here

    def assign(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        specs: Mapping[Tensor, ShardSpec],
        shapes: Sequence[torch.Size],
        process_group: Group,
    ) -> dict[int, Any]:
        """Return the chunk of each matrix of this rank, by the index of its parameter. Collective where ranks share.

        Args:
            param_groups: the optimizer's groups.
            specs: specs of the sharded parameters.
            shapes: shapes of the whole parameters, by index.
            process_group: ranks that hold the same whole parameters and share the work; None for none.
        """
        alone: dict[int, Any] = {}
        sizes, limits = [], []
        members: dict[ProcessGroups, list[tuple[int, int, Tensor]]] = {}
        index = -1
        for place, group in enumerate(param_groups):
            if not update_rule(group).orthogonalizes:
                index += len(group["params"])
                continue
            layout = None if group["layout"] is None else MatrixLayout(**group["layout"])
            for param in group["params"]:
                index += 1
                is_shared = process_group is not None or type(param) not in PLAIN or param in specs
                groups = _groups_of(param, group, specs.get(param), process_group) if is_shared else None
                if groups is not None:
                    members.setdefault(groups, []).append((index, place, param))
                elif param.grad is not None:
                    dtype = iteration_dtype(group, param, param.device)
                    alone[index] = param.device, param.dtype, dtype, _kind(param.shape, layout)
                    sizes.append(param.numel())
                    limits.append(MAX_ELEMENTS_CPU if param.device.type == "cpu" else MAX_ELEMENTS)
        chunk_of: dict[int, Any] = dict(zip(alone, chunks_of(alone.values(), sizes, limits), strict=True))
        self.shared = []
        for groups in sorted(members, key=ProcessGroups.order):
            shared = members[groups]
            # Exchanges are planned at the first step that has these members.
            key = groups, tuple((index, place, param.shape, specs.get(param)) for index, place, param in shared)
            if key not in self._exchanges:
                self._exchanges[key] = Exchange(groups, _matrices(groups.shards, shared, param_groups, specs, shapes))
            exchange = self._exchanges[key]
            for number, matrices in enumerate(exchange.rounds):
                chunk_of |= {matrix.param_index: (len(self.shared), number) for matrix, _ in matrices}
            present = [i for i, _, param in shared if param.grad is not None and param not in specs]
            self.shared.append((exchange, present))
        return chunk_of

    def register(self, whole: GroupSums) -> None:
        """Take part in the sums of the ranks that share this step, and say which gradients are here."""
        for exchange, present in self.shared:
            for group in filter(None, exchange.groups[:2]):
                whole.register(group)
            replicas = exchange.groups.replicas
            for index in present:
                whole.add_present(replicas, index, 1 / dist.get_world_size(replicas))

    def rounds(self, whole: GroupSums) -> dict[Any, tuple[Exchange, Round]]:
        """Return the rounds of this step by chunk, with the matrices that have gradients, in one order everywhere."""
        rounds = {}
        for place, (exchange, _) in enumerate(self.shared):
            present = whole.present_in(exchange.groups.shards or exchange.groups.replicas)
            for number, matrices in enumerate(exchange.rounds):
                if moving := [(matrix, owner) for matrix, owner in matrices if matrix.param_index in present]:
                    rounds[place, number] = exchange, moving
        return rounds


def _groups_of(
    param: Tensor, group: Mapping[str, Any], spec: ShardSpec | None, process_group: Group
) -> ProcessGroups | None:
    """Return the ranks that share a parameter; None if it is this rank's alone."""
    shards, replicas = (None, process_group) if spec is None else (spec.group, spec.replicas)
    if spec is None and is_dtensor(param):
        replicas = replicas_in_mesh(param)
    replicas = None if replicas is None or dist.get_world_size(replicas) == 1 else replicas
    if shards is None and replicas is None:
        return None
    device = wire_device(param.device, shards or replicas)
    return ProcessGroups(shards, replicas, device, iteration_dtype(group, param, device))


def _matrices(
    shards: Group,
    members: Sequence[tuple[int, int, Tensor]],
    param_groups: Sequence[Mapping[str, Any]],
    specs: Mapping[Tensor, ShardSpec],
    shapes: Sequence[torch.Size],
) -> list[Matrix]:
    """Return the matrices in some members, whose shards the ranks of a group hold; collective under ZeRO."""

    def matrix(index: int, place: int, shape: torch.Size, part: Any, home: int | None = None) -> Matrix:
        group = param_groups[place]
        layout = matrix_layouts.of_shape(shape) if group["layout"] is None else MatrixLayout(**group["layout"])
        return Matrix(index, shape, flops(shape, layout, group["ns_steps"]), part, home, place)

    if shards is None:
        return [matrix(i, place, p.shape, {0: Slice(0, 0, p.shape[0])}.get) for i, place, p in members]
    if all(is_dtensor(param) for *_, param in members):
        return [matrix(i, place, param.shape, slices_of(param)) for i, place, param in members]
    held = {shard.param_index: (place, shard.slice) for _, place, param in members for shard in specs[param].shards}
    everywhere: list[dict[int, tuple[int, Slice]]] = [{}] * dist.get_world_size(shards)
    dist.all_gather_object(everywhere, held, group=shards)
    matrices = []
    for index, place in sorted({index: place for held in everywhere for index, (place, _) in held.items()}.items()):
        parts = {rank: held[index][1] for rank, held in enumerate(everywhere) if index in held}
        starts, ends = zip(*sorted((part.start, part.start + part.length) for part in parts.values()), strict=True)
        if (*starts, shapes[index].numel()) != (0, *ends):
            raise RuntimeError(
                f"unsupported sharding of parameter {index} (shape {tuple(shapes[index])}): the ranks' pieces overlap "
                "or leave gaps. Supported are DDP, FSDP2, tensor parallelism and ZeRO-1/2/3"
            )
        home = next(iter(parts)) if len(parts) == 1 else None
        matrices.append(matrix(index, place, shapes[index], parts.get, home))
    return matrices


@functools.lru_cache(maxsize=4096)
def _kind(shape: torch.Size, layout: MatrixLayout | None) -> frozenset[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter, transposed or not."""
    shapes = matrix_layouts.matrix_shapes(shape, layout or matrix_layouts.of_shape(shape))
    return frozenset(tuple(sorted(matrix[-2:])) for matrix in shapes)
