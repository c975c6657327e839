"""Where the pieces of a parameter live, who repeats them, and how a sum over a whole parameter is taken across ranks.

With `universal` for checkpoints, the only file that knows an engine by name. An engine may hand `step()` something else
than the parameters the optimizer was built with: FSDP2 a DTensor for each, DeepSpeed ZeRO flat tensors that hold pieces
of many. `Layout.locate` says which parameter each stretch of such a tensor belongs to, or raises; `WholeSums` adds up
over the ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf.distributed.replicas import Group, Replicas, all_objects
from mars_hf.distributed.routes import Region
from mars_hf.groups.matrix_layouts import shape_of


class Piece(NamedTuple):
    """A stretch of a local tensor, flattened: `numel` elements from `start` on, out of `whole` of parameter `slot`.

    `region` says which of them these are.
    """

    slot: int
    start: int
    numel: int
    whole: int
    region: Region


class Placement(NamedTuple):
    """The pieces a local tensor is made of (none where it is all padding), and the ranks that hold the others.

    `replicas` are the ranks that hold the same pieces; here None means that there are none.
    """

    pieces: tuple[Piece, ...]
    group: Group
    replicas: Group = None


class Layout:
    """Knows the parameters an optimizer was built with, and explains what arrives at `step()`.

    It keeps their shapes and their `id`, and no reference to them. A strong one would keep the unsharded model alive
    while accelerate shards it. With a weak one `torch.utils.swap_tensors` refuses a tensor, by which `model.to(dtype)`
    converts DTensors. Only where DeepSpeed has put flat tensors in their place does it look for the parameters.

    A parameter's slot is its position among all; it is the same on every rank.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]] = ()) -> None:
        """Remember the parameters of these groups."""
        self.shapes: list[torch.Size] = []  # of the whole parameters, by slot
        self._roles: list[str] = []
        self._slots: dict[int, int] = {}  # by id
        # Those that an engine has put into flat tensors, by slot.
        self._origins: dict[int, weakref.ref[Tensor]] = {}
        # Of an engine's flat tensor, and what of it and its parameters the placement was found from.
        self._flat: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # By mesh; what is in them follows from the slot, the placements and the shape of a DTensor.
        self._meshes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sharded_slots: set[int] = set()
        self._verified: WeakIdKeyDictionary = WeakIdKeyDictionary()  # flat tensors, and meshes with their geometries
        self.replicas = Replicas()
        for group in groups:
            self.extend(group)
            if group.get("mars_type") in ("mars-shampoo", "mars-m"):
                self.replicas.averaged()  # before the optimizer was made

    def extend(self, group: Mapping[str, Any]) -> None:
        """Remember the parameters of one more group."""
        for param in group["params"]:
            self._slots[id(param)] = len(self.shapes)
            self.shapes.append(shape_of(param))
            self._roles.append(group["role"])
        self._origins.clear()
        self._flat.clear()
        self._verified.clear()

    def slots(self, *, vectors: bool) -> list[int]:
        """Slots of the matrices, of the vectors if wanted, and of all DTensors found so far; alike on every rank."""
        return [
            slot for slot, role in enumerate(self._roles) if vectors or role == "matrix" or slot in self._sharded_slots
        ] + sorted(slot for slot in self._sharded_slots if slot >= len(self._roles))

    def origin(self, slot: int) -> Tensor | None:
        """The parameter in a slot that an engine has put into a flat tensor; None if there is none."""
        return self._origins[slot]() if slot in self._origins else None

    def all_seen(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these, or others laid out like them, have been asked about before; alike on every rank."""
        seen = True
        for tensor in tensors:
            owner: Any = tensor
            key = None
            if is_dtensor(tensor):  # by what every rank knows; and no reference to the DTensor, see the class
                owner, key = owner.device_mesh, (owner.placements, owner.shape)
            known = self._verified.setdefault(owner, set())
            seen = seen and key in known
            known.add(key)
        return seen

    def locate(self, tensor: Tensor, slot: int) -> Placement | None:
        """Where the pieces of an optimizer's tensor belong; None for a whole parameter.

        Args:
            tensor: what a parameter group holds now.
            slot: its position among the tensors of all groups.

        Raises:
            RuntimeError: the tensor is a piece of something unknown; the message names what it looks like.
        """
        if is_dtensor(tensor):
            return self._locate_dtensor(tensor, slot)
        reject_fsdp1(tensor)
        if tensor.ndim > 1 or self._is_known(tensor):
            return None
        if tensor in self._flat:
            placement, facts = self._flat[tensor]
            if facts == self._facts(tensor, placement):
                return placement
        placement = self._explain(tensor)
        if placement is not None:
            self._flat[tensor] = placement, self._facts(tensor, placement)
            return placement
        # An engine that is not known would have flattened matrices too.
        in_its_place = slot >= len(self.shapes) or self._roles[slot] == "vector"
        if not self._origins and (in_its_place or _is_of_a_module(tensor)):
            self._replace(slot, tensor)
            return None
        raise RuntimeError(
            f"a flat tensor of shape {tuple(tensor.shape)} that is none of the parameters Mars was built with: the "
            "norm of a corrected gradient cannot be taken over a piece of unknown origin. Supported are DDP, FSDP2 and "
            "DeepSpeed ZeRO-1/2/3, with Mars built from the model's own parameters"
        )

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether this is one of the parameters; what took the place of a freed one in memory has another shape."""
        slot = self._slots.get(id(tensor))
        return slot is not None and self.shapes[slot] == tensor.shape

    def _replace(self, slot: int, tensor: Tensor) -> None:
        """Remember a vector that the user has put in the place of another, or added."""
        self._slots[id(tensor)] = slot
        if slot < len(self.shapes):
            self.shapes[slot] = tensor.shape

    def _locate_dtensor(self, tensor: Any, slot: int) -> Placement | None:
        found = self._meshes.setdefault(tensor.device_mesh, {})
        key = (slot, tensor.placements, tensor.shape)
        if key not in found:
            found[key] = _in_dtensor(tensor, slot)
        placement = found[key]
        if placement is not None:
            self._sharded_slots.add(slot)
            (region,) = [piece.region for piece in placement.pieces] or [None]
            here = tensor.to_local().shape
            if here.numel() if region is None else here != region.shape(tensor.shape):
                raise RuntimeError(
                    f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} has a part of shape "
                    f"{tuple(here)} on this rank, which is not how torch divides it: MARS supports what fully_shard "
                    "and distribute_tensor make"
                )
        return placement

    def _explain(self, tensor: Tensor) -> Placement | None:
        """Which parameters an engine has put into a flat tensor; None if no engine says so."""
        if self._origins:
            placement = self._explain_with_origins(tensor)
            if placement is not None:
                return placement
        self._find_origins()
        return self._explain_with_origins(tensor)

    def _explain_with_origins(self, tensor: Tensor) -> Placement | None:
        origins = [(slot, origin) for slot, ref in self._origins.items() if (origin := ref()) is not None]
        return _in_zero3(tensor, origins) or _in_zero12(tensor, origins)

    def _find_origins(self) -> None:
        """Look for the parameters among all objects: some 50 ms. Weak references do no harm to those of an engine."""
        found = {}
        for candidate in all_objects():
            slot = self._slots.get(id(candidate))
            if slot is not None and issubclass(type(candidate), Tensor) and shape_of(candidate) == self.shapes[slot]:
                if hasattr(candidate, "_hp_mapping") or hasattr(candidate, "_z3_optimizer"):
                    found[slot] = weakref.ref(candidate)
        self._origins = dict(sorted(found.items()))

    def _facts(self, tensor: Tensor, placement: Placement) -> tuple[Any, ...]:
        """What a placement in an engine's flat tensor was found from; it holds as long as these are the same."""
        origins = [self.origin(piece.slot) for piece in placement.pieces]
        return (
            *(tensor.shape, tensor.storage_offset()),
            *(None if origin is None else _place_in_engine(origin, tensor) for origin in origins),
        )


class WholeSums:
    """Sums over whole parameters from sums over pieces: one all-reduce a process group, all parameters together."""

    def __init__(self, slots: Sequence[int], rows: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Start with zeros, `rows` of them for each of the parameters in these slots; the same ones on every rank.

        Args:
            slots: as above.
            rows: number of sums for each slot.
            device: of the parameters.
            dtype: of the sums that come back, None for that of `wide_dtype`. They travel in the latter: a rank without
                pieces does not know what others have.
        """
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._zeros = torch.zeros(rows, len(slots), device=device, dtype=wide_dtype(device))
        self._dtype = dtype or self._zeros.dtype
        self._sums: dict[Group, Tensor] = {}
        self._counts: dict[Group, dict[int, list[int]]] = {}

    def join(self, placement: Placement) -> None:
        """Take part in the sums over a placement's ranks, also when nothing of a parameter is here."""
        if placement.group not in self._sums:
            self._sums[placement.group] = self._zeros.clone()
        counts = self._counts.setdefault(placement.group, {})
        for piece in placement.pieces:
            counts.setdefault(self._index[piece.slot], [0, piece.whole])[0] += piece.numel

    def add(self, group: Group, slots: Sequence[int], sums: Tensor) -> None:
        """Add sums over pieces: one column for each slot."""
        total = self._sums[group]
        total.index_add_(1, self._columns(slots), sums.to(total))

    def reduce(self, *, verify: bool) -> None:
        """Add up over the ranks.

        Args:
            verify: also check, in the same all-reduce, that the pieces of all ranks make up the whole parameters.

        Raises:
            RuntimeError: they do not.
        """
        for group, total in self._sums.items():
            sent = total
            if verify:
                # Float32, where there is no float64, counts up to 2**24 only: shares of the whole are sent.
                shares = torch.zeros_like(total[:1])
                for index, (numel, whole) in self._counts[group].items():
                    shares[0, index] = numel / whole
                sent = torch.cat([total, shares])
            reduced = all_reduce(sent, group)
            total.copy_(reduced[: len(total)])
            if verify:
                _check_shares(reduced[-1], self._counts[group])

    def of(self, group: Group, slots: Sequence[int]) -> Tensor:
        """The sums over the whole parameters in these slots: one column each."""
        return self._sums[group][:, self._columns(slots)].to(self._dtype)

    def total(self, row: int) -> Tensor:
        """The sum of a row over all parameters, 0-d."""
        return torch.stack([sums[row].sum() for sums in self._sums.values()]).sum().to(self._dtype)

    def _columns(self, slots: Sequence[int]) -> Tensor:
        device = self._zeros.device
        indices = torch.tensor([self._index[slot] for slot in slots], pin_memory=device.type == "cuda")
        return indices.to(device, non_blocking=True)


def all_reduce(values: Tensor, group: Group) -> Tensor:
    """Sum of `values` over a process group, on the device of `values`."""
    device = values.device
    values = values.to(wire_device(device, group), copy=True)
    dist.all_reduce(values, group=group)
    return values.to(device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums on a device: float64 where it has that."""
    return torch.float32 if device.type == "mps" else torch.float64


def wire_device(device: torch.device, group: Group) -> torch.device:
    """Where a process group takes tensors that live on `device`."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # ZeRO-Offload: states on CPU, ranks on GPUs
        return torch.device("cuda")
    return device


def replicas_in_mesh(tensor: Any) -> Group:
    """The ranks along the longest mesh dimension that a DTensor is replicated over; None where there are no others.

    Along further dimensions work is repeated, which changes nothing: all ranks there start from the same.
    """
    mesh = tensor.device_mesh
    lengths = {dim: mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    return None if longest is None or lengths[longest] == 1 else mesh.get_group(longest)


def reject_fsdp1(param: Tensor) -> None:
    """Raise RuntimeError for a parameter that FSDP1 has flattened: it has lost its shape, and with it its role."""
    if type(param).__name__ == "FlatParameter" or getattr(param, "_fsdp_flattened", False):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} that FSDP1 has flattened: MARS needs the parameters' shapes; "
            "use FSDP2 (fully_shard, or fsdp_version: 2 in the accelerate config)"
        )


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is sharded or replicated by torch.distributed.tensor."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # nearly always, and told at once
    return not plain and dist.is_available() and isinstance(tensor, _dtensor_class())


def cut(tensor: Tensor, placement: Placement | None) -> list[Tensor]:
    """The pieces of a local tensor, as views; the tensor itself where it is one piece."""
    if placement is None or [piece.numel for piece in placement.pieces] == [tensor.numel()]:
        return [tensor]
    return [tensor[piece.start : piece.start + piece.numel] for piece in placement.pieces]


def shares(placement: Placement | None) -> list[float]:
    """Which part of its parameter each piece is."""
    return [1.0] if placement is None else [piece.numel / piece.whole for piece in placement.pieces]


def local(tensor: Any) -> Tensor:
    """The part of a tensor that is on this rank; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def check_gradient_placement(param: Any, grad: Any) -> None:
    """Raise RuntimeError unless a gradient is laid out like its parameter."""
    if is_dtensor(param) and not (is_dtensor(grad) and grad.placements == param.placements):
        found = getattr(grad, "placements", "not a DTensor")
        raise RuntimeError(
            f"the gradient of a DTensor parameter of shape {tuple(param.shape)} is placed as {found}, the parameter as "
            f"{param.placements}; reduce the gradients before step()"
        )


def _dtensor_class() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def _in_dtensor(tensor: Any, slot: int) -> Placement | None:
    """FSDP2 (`fully_shard`), alone or with replication over a second mesh dimension."""
    mesh, placements = tensor.device_mesh, tensor.placements
    names = mesh.mesh_dim_names or ()
    sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
    known = all(type(placement).__name__ in ("Shard", "Replicate") for placement in placements)
    if "tp" in names or len(sharded) > 1 or not known:
        kind = "a placement other than Shard and Replicate"
        if "tp" in names:
            kind = "tensor parallelism"
        elif sum(not placement.is_replicate() for placement in placements) > 1:
            kind = "more than one sharded mesh dimension"
        raise RuntimeError(
            f"a DTensor of shape {tuple(tensor.shape)} placed as {placements} on mesh {names or tuple(mesh.shape)}: "
            f"{kind} is not supported; supported is FSDP2 over one mesh dimension, with or without replication over "
            "others"
        )
    if not sharded:
        return None
    (mesh_dim,) = sharded
    dim = placements[mesh_dim].dim % tensor.ndim
    # As torch.chunk does it; the first ones are full.
    full = -(-tensor.shape[dim] // mesh.size(mesh_dim))
    start = min(mesh.get_local_rank(mesh_dim) * full, tensor.shape[dim])
    region = Region(dim, start, min(full, tensor.shape[dim] - start))
    numel = region.shape(tensor.shape).numel()
    pieces = (Piece(slot, 0, numel, tensor.numel(), region),) if numel else ()
    return Placement(pieces, mesh.get_group(mesh_dim), replicas_in_mesh(tensor))


def _is_of_a_module(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter of any module, as one that an engine has made is not."""
    if type(tensor) is not nn.Parameter:
        return False
    modules = (candidate for candidate in all_objects() if issubclass(type(candidate), nn.Module))
    return any(tensor is param for module in modules for param in module.__dict__.get("_parameters", {}).values())


def _in_zero12(tensor: Tensor, origins: Sequence[tuple[int, Tensor]]) -> Placement | None:
    """DeepSpeed ZeRO-1 and 2 and its bf16 optimizer: each rank's tensor is one stretch of a group's flat buffer.

    Each parameter is a view of that buffer, so its storage offset is its place there. `_hp_mapping`, which DeepSpeed
    leaves on the parameters, tells which buffer it is; its addresses are wrong with `round_robin_gradients`.
    """
    linked: list[tuple[int, Any]] = [(slot, origin) for slot, origin in origins if hasattr(origin, "_hp_mapping")]
    if not linked:
        return None
    groups = {id(origin._dp_group): origin._dp_group for _, origin in linked}
    if len(groups) > 1:
        raise RuntimeError(
            f"DeepSpeed partitions these parameters over {len(groups)} different process groups (expert parallelism), "
            "which is not supported"
        )
    group = next(iter(groups.values())) or dist.group.WORLD
    here = tensor.untyped_storage().data_ptr()
    buffers = {
        origin.untyped_storage().data_ptr()
        for _, origin in linked
        if origin._hp_mapping is not None and origin._hp_mapping.hp_fragment.untyped_storage().data_ptr() == here
    }
    pieces = []
    first = dist.get_rank(group) * tensor.numel()
    for slot, origin in linked:
        if origin.untyped_storage().data_ptr() in buffers:
            start = max(origin.storage_offset(), first)
            end = min(origin.storage_offset() + origin.numel(), first + tensor.numel())
            if start < end:
                region = Region(None, start - origin.storage_offset(), end - start)
                pieces.append(Piece(slot, start - first, end - start, origin.numel(), region))
    return Placement(tuple(pieces), group)


def _in_zero3(tensor: Tensor, origins: Sequence[tuple[int, Tensor]]) -> Placement | None:
    """DeepSpeed ZeRO-3: `_z3_optimizer` knows the sub-group of each parameter and its place in that."""
    partitioned: list[tuple[int, Any]] = [
        (slot, origin) for slot, origin in origins if hasattr(origin, "_z3_optimizer")
    ]
    if not partitioned:
        return None
    group = partitioned[0][1].ds_process_group
    rank, pieces, known = dist.get_rank(group), [], False
    for slot, origin in partitioned:
        engine = origin._z3_optimizer
        if engine.get_param_id(origin) not in engine.grad_position:  # frozen
            continue
        sub_group, start, partition = engine.grad_position[engine.get_param_id(origin)]
        if engine.fp32_partitioned_groups_flat[sub_group] is not tensor:
            continue
        known = True
        # The last partitions may be padded.
        numel = min(partition, max(0, origin.ds_numel - rank * partition))
        if numel:
            region = Region(None, rank * partition, numel)
            pieces.append(Piece(slot, start, numel, origin.ds_numel, region))
    return Placement(tuple(pieces), group) if known else None


def _place_in_engine(origin: Any, tensor: Tensor) -> tuple[Any, ...]:
    """Where an engine says that a parameter lies in a flat tensor."""
    if hasattr(origin, "_z3_optimizer"):
        engine = origin._z3_optimizer
        place = engine.grad_position.get(engine.get_param_id(origin))
        return place, place is not None and engine.fp32_partitioned_groups_flat[place[0]] is tensor
    return origin.storage_offset(), origin.shape


def _check_shares(shares: Tensor, counts: dict[int, list[int]]) -> None:
    for index in counts:
        share = shares[index].item()
        if abs(share - 1) > 1e-3:
            raise RuntimeError(
                f"the pieces of parameter {index} on all ranks are {share:.4f} of it, not 1: this engine lays "
                "parameters out in a way that mars_hf does not know"
            )
