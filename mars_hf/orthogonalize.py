"""Orthogonalize the first moments of a step: those whole on this rank in chunks, those that ranks share in rounds.

Where ranks hold shards of a matrix (FSDP2, ZeRO) or copies of it (DDP, HSDP), one rank collects it, orthogonalizes it
and sends the direction back. `Plan` says which rank; it is made once over all matrices, and a step takes those of it
that have gradients. A round of it reads: gather, orthogonalize, scatter.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf import matrix_layouts
from mars_hf._compat import cpu_multiplies_bfloat16
from mars_hf.distributed.norms import WholeSums, group_order, wire_device
from mars_hf.distributed.shards import Group, Region, ShardSpec, is_dtensor, local, ranks_of
from mars_hf.matrix_layouts import MatrixLayout
from mars_hf.newton_schulz import MAX_ELEMENTS, muon_scale, orthogonalize, shampoo_scale
from mars_hf.param_groups import orthogonalizes
from mars_hf.settings import dtype_of, ns_coefficients

# The allocator reuses memory for temporary tensors of up to 32 MB; larger ones cost a page fault every 4 KB.
MAX_ELEMENTS_CPU = 2**22
# Largest work of the busiest rank, relative to the best division, if that saves communication.
SLACK = 1.1
_SCALES = {"mars-shampoo": shampoo_scale, "mars-m": muon_scale}


class Matrix(NamedTuple):
    """A parameter to orthogonalize, as all ranks that share the work know it.

    Attributes:
        param_index: the parameter's index.
        shape: the shape of the whole parameter.
        cost: cost of the work, in any unit.
        region: the region that each rank holds, by its rank among those that hold shards; None for nothing.
        home: the only rank that holds any of it; None if there are several.
        group: index of its parameter group.
    """

    param_index: int
    shape: torch.Size
    cost: float
    region: Callable[[int], Region | None]
    home: int | None = None
    group: int = 0


class Plan:
    """Which rank orthogonalizes which matrix, and in which round; the same on all ranks, without communication."""

    def __init__(
        self, matrices: Sequence[Matrix], *, ranks: int = 1, replicas: int = 1, max_elements: int = MAX_ELEMENTS
    ) -> None:
        """Divide the work: largest first, to the rank with the least so far. Linear in matrices plus ranks.

        Args:
            matrices: all of them, with and without gradients.
            ranks: number of ranks that hold the shards of a copy; 1 for whole matrices.
            replicas: number of copies.
            max_elements: of the whole matrices that a rank receives in one round; one matrix may have more.
        """
        self.replicas = replicas
        self.matrices = sorted(matrices, key=lambda matrix: (-matrix.cost, matrix.param_index))
        workers = _divide(self.matrices, ranks * replicas)
        # Next to each other in this order are workers of different replicas, so none idles while another has two.
        self.owners = [(worker % replicas, worker // replicas) for worker in workers]
        self.rounds: list[list[tuple[Matrix, tuple[int, int]]]] = []
        self.round_of: dict[int, int] = {}
        taken: dict[int, tuple[int, int]] = {}
        for matrix, worker, owner in zip(self.matrices, workers, self.owners, strict=True):
            number, elements = taken.get(worker, (0, 0))
            if elements and elements + matrix.shape.numel() > max_elements // replicas:
                number, elements = number + 1, 0
            taken[worker] = number, elements + matrix.shape.numel()
            self.round_of[matrix.param_index] = number
            if number == len(self.rounds):
                self.rounds.append([])
            self.rounds[number].append((matrix, owner))

    def received(self, replica: int, rank: int) -> tuple[int, int]:
        """Return the elements that a rank receives from others in a step, and the least that it must receive."""
        least = padding = 0
        for matrices in self.rounds:
            blocks: dict[int, int] = {}
            for matrix, (owner, worker) in matrices:
                region = matrix.region(rank)
                own = 0 if region is None else region.shape(matrix.shape).numel()
                blocks[owner] = blocks.get(owner, 0) + own
                if (owner, worker) == (replica, rank):
                    least += matrix.shape.numel() - own
                else:
                    least += own
            sizes = [blocks.get(owner, 0) for owner in range(self.replicas)]
            if self.replicas > 1 and pads(sizes):
                padding += sum(max(sizes) - size for owner, size in enumerate(sizes) if owner != replica)
        return least + padding, least


def _divide(matrices: Sequence[Matrix], workers: int) -> list[int]:
    """Return the worker of each matrix: its home, if that keeps the busiest within `SLACK` of the best division."""
    anywhere, most = _longest_first(matrices, workers, -1.0)
    if any(matrix.home is not None for matrix in matrices):
        at_home, busiest = _longest_first(matrices, workers, SLACK * most)
        if busiest <= SLACK * most:
            return at_home
    return anywhere


def _longest_first(matrices: Sequence[Matrix], workers: int, limit: float) -> tuple[list[int], float]:
    """Return workers and the largest load; matrices with a home come first and stay there up to `limit`."""
    chosen, loads = [0] * len(matrices), [0.0] * workers
    heap = [(0.0, worker) for worker in range(workers)]
    for place in sorted(range(len(matrices)), key=lambda place: matrices[place].home is None or limit < 0):
        _, _, cost, _, home, _ = matrices[place]
        if home is None or loads[home] + cost > limit:
            while heap[0][0] != loads[heap[0][1]]:
                heapq.heappop(heap)
            home = heap[0][1]
        chosen[place] = home
        loads[home] += cost
        heapq.heappush(heap, (loads[home], home))
    return chosen, max(loads)


class ProcessGroups(NamedTuple):
    """Ranks that share matrices: those that hold the shards of one copy, and those that hold the same of other copies.

    `device` and `dtype` are those of the iteration.
    """

    shards: Group
    replicas: Group
    device: torch.device
    dtype: torch.dtype


class Exchange:
    """Move matrices to their owners and directions back, among the ranks of some process groups.

    Construction and `run` are collective: all ranks of both groups take part, also those that hold nothing.
    """

    def __init__(self, groups: ProcessGroups, matrices: Sequence[Matrix]) -> None:
        """Plan.

        Raises:
            RuntimeError: ranks disagree on the matrices; raised on all ranks.
        """
        self.groups = groups
        self._ranks, self._rank = _size_and_rank(groups.shards)
        self._replicas, self._replica = _size_and_rank(groups.replicas)
        self.plan = Plan(matrices, ranks=self._ranks, replicas=self._replicas)
        agreed = repr(
            [(matrix.param_index, matrix.shape, matrix.cost) for matrix in self.plan.matrices] + [groups.dtype]
        )
        digests = gather_objects(hashlib.sha256(agreed.encode()).hexdigest(), groups.shards)
        digests = gather_objects(digests, groups.replicas)
        if any(digest != digests[0][0] for replica in digests for digest in replica):
            raise RuntimeError(
                f"{self._ranks * self._replicas} ranks, {self._ranks} for each copy of the model, disagree on the "
                "parameters to be updated, on their shapes, or on the dtype of Newton-Schulz: build the optimizer from "
                "the same parameters in the same order on every rank, and state ns_dtype if their CPUs differ"
            )

    @torch.no_grad()
    def run(
        self,
        matrices: Sequence[tuple[Matrix, tuple[int, int]]],
        pieces: Mapping[int, Tensor],
        work: Callable[[list[Matrix], list[Tensor]], list[Tensor]],
    ) -> dict[int, Tensor]:
        """Gather whole matrices on their owners, do the work there, and return this rank's pieces of the results.

        Args:
            matrices: those of a round that have gradients, with their owners; the same on all ranks.
            pieces: this rank's region of each, by index, in the dtype of the iteration.
            work: maps matrices and their whole tensors to results of the same shapes and dtype.
        """
        owned = [matrix for matrix, owner in matrices if owner == (self._replica, self._rank)]
        results = self._in_replica(matrices, owned, pieces, work)
        if self.groups.replicas is None:
            return results
        return self._from_replicas(matrices, results, pieces)

    def _in_replica(
        self,
        matrices: Sequence[tuple[Matrix, tuple[int, int]]],
        owned: list[Matrix],
        pieces: Mapping[int, Tensor],
        work: Callable[[list[Matrix], list[Tensor]], list[Tensor]],
    ) -> dict[int, Tensor]:
        """Return this rank's pieces of what its replica works on."""
        if self.groups.shards is None:
            copies = [pieces[matrix.param_index].to(self.groups.device) for matrix in owned]
            return {matrix.param_index: result for matrix, result in zip(owned, work(owned, copies), strict=True)}
        leaving: list[list[int]] = [[] for _ in range(self._ranks)]
        for matrix, (replica, rank) in matrices:
            if replica == self._replica and matrix.param_index in pieces:
                leaving[rank].append(matrix.param_index)
        coming = [
            [(matrix, region) for matrix in owned if (region := matrix.region(rank)) is not None]
            for rank in range(self._ranks)
        ]
        sent = [sum(pieces[index].numel() for index in indices) for indices in leaving]
        received = [sum(region.shape(matrix.shape).numel() for matrix, region in items) for items in coming]
        # Gather.
        flat = self._all_to_all(_pack([pieces[i] for own in leaving for i in own], self._like()), sent, received)
        wholes = {matrix.param_index: self._empty(matrix.shape) for matrix in owned}
        parts = [region.of(wholes[matrix.param_index]) for items in coming for matrix, region in items]
        _copy(parts, flat.split([part.numel() for part in parts]))
        # Orthogonalize.
        directions = [result.contiguous() for result in work(owned, list(wholes.values()))]
        results = dict(zip(wholes, directions, strict=True))
        # Scatter.
        parts = [region.of(results[matrix.param_index]) for items in coming for matrix, region in items]
        flat = self._all_to_all(_pack(parts, self._like()), received, sent)
        indices = [index for own in leaving for index in own]
        splits = flat.split([pieces[index].numel() for index in indices])
        return {index: part.view(pieces[index].shape) for index, part in zip(indices, splits, strict=True)}

    def _from_replicas(
        self,
        matrices: Sequence[tuple[Matrix, tuple[int, int]]],
        results: Mapping[int, Tensor],
        pieces: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """Return this rank's pieces of what all replicas work on."""
        blocks: list[list[int]] = [[] for _ in range(self._replicas)]
        for matrix, (replica, _) in matrices:
            if matrix.param_index in pieces:
                blocks[replica].append(matrix.param_index)
        sizes = [sum(pieces[index].numel() for index in block) for block in blocks]
        own = _pack([results[index] for index in blocks[self._replica]], self._like())
        if pads(sizes):
            gathered = self._empty((len(sizes) * max(sizes),))
            padded = torch.cat([own, self._empty((max(sizes) - len(own),))])
            # torch 2.13 renamed it.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            all_gather(_bytes(gathered), _bytes(padded), group=self.groups.replicas)
            flats = list(gathered.split(max(sizes)))
        else:
            flats = [own if replica == self._replica else self._empty((size,)) for replica, size in enumerate(sizes)]
            sends = [
                dist.broadcast(_bytes(flat), group_src=source, group=self.groups.replicas, async_op=True)
                for source, flat in enumerate(flats)
                if len(flat)
            ]
            for send in sends:
                send.wait()
        found = {}
        for block, flat in zip(blocks, flats, strict=True):
            numels = [pieces[index].numel() for index in block]
            for index, part in zip(block, flat[: sum(numels)].split(numels), strict=True):
                found[index] = part.view(pieces[index].shape)
        return found

    def _all_to_all(self, sent: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
        received = self._empty((sum(coming),))
        size = sent.element_size()
        dist.all_to_all_single(
            _bytes(received),
            _bytes(sent),
            [numel * size for numel in coming],
            [numel * size for numel in leaving],
            group=self.groups.shards,
        )
        return received

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.groups.dtype, device=self.groups.device)

    def _like(self) -> Tensor:
        return self._empty((0,))


def pads(sizes: Sequence[int]) -> bool:
    """Return whether blocks of these sizes go in one all-gather, padded; else each is broadcast, without padding."""
    return len(sizes) * max(sizes) <= 1.1 * sum(sizes) and sum(sizes) > 0


class Orthogonalizer:
    """Sort the matrices of a step into chunks, and turn their first moments into directions."""

    def __init__(self) -> None:
        """Start without plans."""
        self._exchanges: dict[Any, Exchange] = {}
        self._shared: list[tuple[Exchange, list[int]]] = []  # of this step, with the gradients of whole parameters here

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
        chunk_of: dict[int, Any] = {}
        sizes: dict[Any, tuple[int, int]] = {}
        members: dict[ProcessGroups, list[tuple[int, int, Tensor]]] = {}
        index = -1
        for place, group in enumerate(param_groups):
            if not orthogonalizes(group):
                index += len(group["params"])
                continue
            layout = None if group["layout"] is None else MatrixLayout(**group["layout"])
            for param in group["params"]:
                index += 1
                shared = self._groups_of(param, group, specs.get(param), process_group)
                if shared is not None:
                    members.setdefault(shared, []).append((index, place, param))
                elif param.grad is not None:
                    device = local(param).device
                    kind = (device, param.dtype, iteration_dtype(group, param, device), _kind(param.shape, layout))
                    number, elements = sizes.get(kind, (0, 0))
                    limit = MAX_ELEMENTS_CPU if device.type == "cpu" else MAX_ELEMENTS
                    if elements and elements + param.numel() > limit:
                        number, elements = number + 1, 0
                    sizes[kind] = number, elements + param.numel()
                    chunk_of[index] = (*kind, number)
        self._shared = []
        for shared in sorted(members, key=_order):
            exchange = self._exchange(shared, members[shared], param_groups, specs, shapes)
            for number, matrices in enumerate(exchange.plan.rounds):
                chunk_of |= {matrix.param_index: (len(self._shared), number) for matrix, _ in matrices}
            present = [i for i, _, param in members[shared] if param.grad is not None and param not in specs]
            self._shared.append((exchange, present))
        return chunk_of

    @property
    def shares(self) -> bool:
        """Return whether other ranks take part in this step."""
        return bool(self._shared)

    def join(self, whole: WholeSums) -> None:
        """Take part in the sums of the ranks that share this step, and say which gradients are here."""
        for exchange, present in self._shared:
            for group in filter(None, exchange.groups[:2]):
                whole.join(group)
            for index in present:
                replicas = exchange.groups.replicas
                whole.add_present(replicas, index, 1 / dist.get_world_size(replicas))

    def rounds(self, whole: WholeSums) -> dict[Any, tuple[Exchange, list[tuple[Matrix, tuple[int, int]]]]]:
        """Return the rounds of this step by chunk, with the matrices that have gradients, in one order everywhere."""
        rounds = {}
        for place, (exchange, _) in enumerate(self._shared):
            shards, replicas = exchange.groups[:2]
            present = whole.present(replicas if shards is None else shards)
            for number, matrices in enumerate(exchange.plan.rounds):
                moving = [(matrix, owner) for matrix, owner in matrices if matrix.param_index in present]
                if moving:
                    rounds[place, number] = exchange, moving
        return rounds

    def _groups_of(
        self, param: Tensor, group: Mapping[str, Any], spec: ShardSpec | None, process_group: Group
    ) -> ProcessGroups | None:
        """Return the ranks that share a parameter; None if it is this rank's alone."""
        if spec is not None:
            shards, replicas = spec.group, spec.replicas
        elif is_dtensor(param):
            from mars_hf.distributed.dtensors import replicas_in_mesh

            shards, replicas = None, replicas_in_mesh(param)
        else:
            shards, replicas = None, process_group
        if is_dtensor(param) or spec is None:  # one rank holds it whole, in its own shape
            shards = None if shards is None or dist.get_world_size(shards) == 1 else shards
        replicas = None if replicas is None or dist.get_world_size(replicas) == 1 else replicas
        if shards is None and replicas is None:
            return None
        device = wire_device(local(param).device, replicas if shards is None else shards)
        return ProcessGroups(shards, replicas, device, iteration_dtype(group, param, device))

    def _exchange(
        self,
        groups: ProcessGroups,
        members: list[tuple[int, int, Tensor]],
        param_groups: Sequence[Mapping[str, Any]],
        specs: Mapping[Tensor, ShardSpec],
        shapes: Sequence[torch.Size],
    ) -> Exchange:
        """Return the exchange for these members, made at the first step that has them."""
        settings = tuple(
            repr((group.get("mars_type"), group.get("layout"), group.get("ns_steps"))) for group in param_groups
        )
        key = (
            groups,
            settings,
            tuple((index, place, param.shape, specs.get(param)) for index, place, param in members),
        )
        if key not in self._exchanges:
            for old in [one for one in self._exchanges if not all(map(ranks_of, filter(None, one[0][:2])))]:
                del self._exchanges[old]  # its process groups have been destroyed
            matrices: list[Matrix] = []
            if all(is_dtensor(param) or param not in specs for *_, param in members):
                from mars_hf.distributed.dtensors import regions_of

                for index, place, param in members:
                    region = regions_of(param) if groups.shards is not None else _everything(param.shape)
                    matrices.append(
                        Matrix(index, param.shape, _cost(param_groups[place], param.shape), region, None, place)
                    )
            else:
                own = {
                    shard.param_index: (place, shard.region)
                    for _, place, param in members
                    for shard in specs[param].shards
                }
                everywhere = gather_objects(own, groups.shards)
                for index in sorted({index for theirs in everywhere for index in theirs}):
                    regions = {rank: theirs[index][1] for rank, theirs in enumerate(everywhere) if index in theirs}
                    place = next(theirs[index][0] for theirs in everywhere if index in theirs)
                    _check_cover(index, shapes[index], list(regions.values()))
                    home = next(iter(regions)) if len(regions) == 1 else None
                    cost = _cost(param_groups[place], shapes[index])
                    matrices.append(Matrix(index, shapes[index], cost, regions.get, home, place))
            self._exchanges[key] = Exchange(groups, matrices)
        return self._exchanges[key]


class NewtonSchulz(NamedTuple):
    """How one parameter's first moment becomes its direction; without a layout its shape decides."""

    rule: str
    layout: MatrixLayout | None
    coefficients: tuple[Any, ...]
    eps: float
    dtype: torch.dtype


def newton_schulz_of(group: Mapping[str, Any], dtype: torch.dtype) -> NewtonSchulz:
    """Return the settings for the parameters of a group.

    mars-shampoo orthogonalizes m / (1 - beta1). Newton-Schulz normalizes its input, so only eps sees the factor: eps is
    multiplied by 1 - beta1 instead.
    """
    eps = 1e-7 if group["mars_type"] == "mars-m" else group["eps"] * (1 - group["betas"][0])
    layout = None if group["layout"] is None else MatrixLayout(**group["layout"])
    return NewtonSchulz(group["mars_type"], layout, ns_coefficients(group), float(eps), dtype)


def iteration_dtype(group: Mapping[str, Any], param: Tensor, device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: `ns_dtype`; left out, float64 for float64 parameters, else the device's.

    A CPU without bfloat16 instructions takes float32, every other device bfloat16. `device` does the work.
    """
    if group["ns_dtype"] is not None:
        return dtype_of(group["ns_dtype"])
    if param.dtype == torch.float64:
        return torch.float64
    return torch.float32 if device.type == "cpu" and not cpu_multiplies_bfloat16() else torch.bfloat16


def compute_directions(
    momenta: Sequence[Tensor], settings: Sequence[NewtonSchulz], out_dtype: torch.dtype
) -> list[Tensor]:
    """Orthogonalize whole first moments and multiply them by their scale.

    Matrices of one shape and the same settings go through Newton-Schulz together, whichever parameters they belong to.

    Args:
        momenta: the first moments: the parameters' shapes, any strides; not modified.
        settings: one for each.
        out_dtype: dtype of the results; the scale is applied in it, so the iteration's result is rounded once.

    Returns:
        New tensors with the shapes and strides of `momenta`.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    layouts = []
    for place, (momentum, setting) in enumerate(zip(momenta, settings, strict=True)):
        alike.setdefault((setting.coefficients, setting.eps, setting.dtype), []).append(place)
        layouts.append(setting.layout or matrix_layouts.of_shape(momentum.shape))
    results = list(momenta)
    for (coefficients, eps, dtype), places in alike.items():
        matrices: list[Tensor] = []
        for place in places:
            shapes = matrix_layouts.matrix_shapes(momenta[place].shape, layouts[place])
            parts = matrix_layouts.views(momenta[place], layouts[place])
            matrices += [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        orthogonal = iter(orthogonalize(matrices, coefficients=coefficients, eps=eps, dtype=dtype, out_dtype=out_dtype))
        for place in places:
            results[place] = torch.empty_like(momenta[place], dtype=out_dtype)
            for view in matrix_layouts.views(results[place], layouts[place]):
                matrix = next(orthogonal)
                view.copy_(matrix.reshape(view.shape)).mul_(_SCALES[settings[place].rule](*matrix.shape[-2:]))
    return results


def flops(shape: Sequence[int], layout: MatrixLayout, steps: int) -> float:
    """Return the multiplications and additions of Newton-Schulz on a parameter of this shape."""
    total = 0.0
    for matrix in matrix_layouts.matrix_shapes(shape, layout):
        small, large = sorted(matrix[-2:])
        count = matrix[0] if layout.batched else 1
        # x xᵀ, its product with x, and the square of a (small, small) matrix.
        total += count * steps * (4.0 * small * small * large + 2.0 * small**3)
    return total


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Return the values of all ranks of a process group; this rank's alone if there is none."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@functools.lru_cache(maxsize=4096)
def _kind(shape: torch.Size, layout: MatrixLayout | None) -> frozenset[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter, transposed or not."""
    shapes = matrix_layouts.matrix_shapes(shape, layout or matrix_layouts.of_shape(shape))
    return frozenset(tuple(sorted(matrix[-2:])) for matrix in shapes)


def _cost(group: Mapping[str, Any], shape: torch.Size) -> float:
    layout = matrix_layouts.of_shape(shape) if group["layout"] is None else MatrixLayout(**group["layout"])
    return flops(shape, layout, len(ns_coefficients(group)))


def _everything(shape: torch.Size) -> Callable[[int], Region]:
    return lambda rank: Region(0, 0, shape[0])


def _check_cover(index: int, shape: torch.Size, regions: Iterable[Region]) -> None:
    """Raise RuntimeError unless flat regions hold each element of a parameter once."""
    end = 0
    for region in sorted(regions, key=lambda region: region.start):
        end = end + region.length if region.start == end else -1
    if end != shape.numel():
        raise RuntimeError(
            f"the ranks do not hold each element of parameter {index}, of shape {tuple(shape)}, once: this engine lays "
            "parameters out in a way that mars_hf does not know"
        )


def _order(groups: ProcessGroups) -> tuple[Any, ...]:
    """Return the sort key of process groups: one order on all ranks."""
    orders = tuple(() if group is None else group_order(group) for group in groups[:2])
    return *orders, str(groups.device.type), str(groups.dtype)


def _size_and_rank(group: Group) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def _pack(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the elements of all tensors one after the other."""
    flat = like.new_empty(sum(tensor.numel() for tensor in tensors))
    _copy(flat.split([tensor.numel() for tensor in tensors]), tensors)
    return flat


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of the same numbers of elements; the targets are flat, or the sources are."""
    if targets:
        shaped = [
            t.view(s.shape) if t.shape != s.shape and t.ndim == 1 else t for t, s in zip(targets, sources, strict=True)
        ]
        torch._foreach_copy_(shaped, [s.view(t.shape) for s, t in zip(sources, shaped, strict=True)])


def _bytes(flat: Tensor) -> Tensor:
    """View a tensor as bytes: not every communication backend knows every dtype."""
    return flat.view(torch.uint8)
