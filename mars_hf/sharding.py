"""Where the pieces of a parameter live, who repeats them, and how a sum over a whole parameter is taken across ranks.

With `universal` for checkpoints, the only file that knows an engine by name. An engine may hand `step()` something else
than the parameters the optimizer was built with: FSDP2 a DTensor for each, DeepSpeed ZeRO flat tensors that hold pieces
of many. `Layout.locate` says which parameter each stretch of such a tensor belongs to, or raises; `WholeSums` adds up
over the ranks.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf.layouts import shape_of
from mars_hf.regions import Region

# ProcessGroup, or None for the default one.
Group = Any


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
    """Remembers, weakly, the parameters an optimizer was built with, and explains what arrives at `step()`.

    Weakly, because accelerate empties the optimizer's references while it shards a model, so that the unsharded one
    can be freed. A parameter's slot is its position among them; it is the same on every rank.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]] = ()) -> None:
        """Remember the parameters of these groups."""
        self._origins: list[weakref.ref[Tensor]] = []
        self._roles: list[str] = []
        self.shapes: list[torch.Size] = []  # of the whole parameters, by slot
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._verified: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for group in groups:
            self.extend(group)

    def extend(self, group: Mapping[str, Any]) -> None:
        """Remember the parameters of one more group."""
        self.shapes += [shape_of(param) for param in group["params"]]
        self._origins += [weakref.ref(param) for param in group["params"]]
        self._roles += [group["role"]] * len(group["params"])
        self._found.clear()
        self._verified.clear()

    def slots(self, *, vectors: bool) -> list[int]:
        """Slots of the matrices, and of the vectors if wanted."""
        return [slot for slot, role in enumerate(self._roles) if vectors or role == "matrix"]

    def all_seen(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these have been asked about before; alike on every rank."""
        new = [tensor for tensor in tensors if tensor not in self._verified]
        for tensor in new:
            self._verified[tensor] = True
        return not new

    def locate(self, tensor: Tensor, slot: int) -> Placement | None:
        """Where the pieces of an optimizer's tensor belong; None for a whole parameter.

        Args:
            tensor: what a parameter group holds now.
            slot: its position among the tensors of all groups.

        Raises:
            RuntimeError: the tensor is a piece of something unknown; the message names what it looks like.
        """
        if tensor not in self._found:
            self._found[tensor] = self._locate(tensor, slot)
        return self._found[tensor]

    def _locate(self, tensor: Tensor, slot: int) -> Placement | None:
        if is_dtensor(tensor):
            return _in_dtensor(tensor, slot)
        reject_fsdp1(tensor)
        origins = [(index, origin) for index, ref in enumerate(self._origins) if (origin := ref()) is not None]
        if any(origin is tensor for _, origin in origins) or tensor.ndim > 1:
            return None
        for explain in (_in_zero3, _in_zero12):
            placement = explain(tensor, origins)
            if placement is not None:
                return placement
        raise RuntimeError(
            f"a flat tensor of shape {tuple(tensor.shape)} that is none of the parameters Mars was built with: the "
            "norm of a corrected gradient cannot be taken over a piece of unknown origin. Supported are DDP, FSDP2 and "
            "DeepSpeed ZeRO-1/2/3, with Mars built from the model's own parameters"
        )


class WholeSums:
    """Sums over whole parameters from sums over pieces: one all-reduce a process group, all parameters together."""

    def __init__(self, slots: Sequence[int], rows: int, device: torch.device, dtype: torch.dtype) -> None:
        """Start with zeros, `rows` of them for each of the parameters in these slots; the same ones on every rank."""
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._zeros = torch.zeros(rows, len(slots), device=device, dtype=dtype)
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
                # Float32 counts exactly up to 2**24, so shares of the whole are sent, not elements.
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
        return self._sums[group][:, self._columns(slots)]

    def total(self, row: int) -> Tensor:
        """The sum of a row over all parameters, 0-d."""
        return torch.stack([sums[row].sum() for sums in self._sums.values()]).sum()

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


def wire_device(device: torch.device, group: Group) -> torch.device:
    """Where a process group takes tensors that live on `device`."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # ZeRO-Offload: states on CPU, ranks on GPUs
        return torch.device("cuda")
    return device


def replicas_of(params: Sequence[Tensor]) -> list[Group]:
    """For each of these whole parameters the process group on whose ranks it is repeated; None where none is known.

    Of a DTensor without sharded dimension that of its mesh; of a plain parameter that of the DistributedDataParallel
    module which reduces its gradients, and which is looked for among all live objects (slow: remember the answer).
    Nothing is concluded from the number of ranks: a model may be on one of them only, or differ. Plain parameters of
    modules with different groups count as not repeated.
    """
    wrapped = _groups_of_ddp() if any(not is_dtensor(param) for param in params) else {}
    plain = [None if is_dtensor(param) else wrapped.get(id(param)) for param in params]
    known = {group for group in plain if group is not None}
    return [
        _replicas_in_mesh(param) if is_dtensor(param) else (group if len(known) == 1 else None)
        for param, group in zip(params, plain, strict=True)
    ]


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
    here = tensor.to_local()
    assert here.shape == region.shape(tensor.shape)
    pieces = (Piece(slot, 0, here.numel(), tensor.numel(), region),) if here.numel() else ()
    return Placement(pieces, mesh.get_group(mesh_dim), _replicas_in_mesh(tensor))


def _replicas_in_mesh(tensor: Any) -> Group:
    """The ranks along the longest mesh dimension that a DTensor is replicated over; None where there are no others.

    Along further dimensions work is repeated, which changes nothing: all ranks there start from the same.
    """
    mesh = tensor.device_mesh
    lengths = {dim: mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    return None if longest is None or lengths[longest] == 1 else mesh.get_group(longest)


def _groups_of_ddp() -> dict[int, Group]:
    """Process group of each parameter, by id, that a DistributedDataParallel module keeps alike on several ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    groups: dict[int, Group] = {}
    for module in gc.get_objects():
        # Not isinstance, which asks proxies for their __class__.
        if issubclass(type(module), nn.parallel.DistributedDataParallel) and _stays_alike(module):
            for name, param in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    groups[id(param)] = module.process_group
    return groups


def _stays_alike(module: nn.parallel.DistributedDataParallel) -> bool:
    """Whether there are other ranks that take every step with this one, on the same gradients."""
    hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(module, "_comm_hooks", ())]
    joining = module._join_config.enable  # some ranks may have had their last batch
    return dist.get_world_size(module.process_group) > 1 and "post_localSGD_hook" not in hooks and not joining


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


def _check_shares(shares: Tensor, counts: dict[int, list[int]]) -> None:
    for index in counts:
        share = shares[index].item()
        if abs(share - 1) > 1e-3:
            raise RuntimeError(
                f"the pieces of parameter {index} on all ranks are {share:.4f} of it, not 1: this engine lays "
                "parameters out in a way that mars_hf does not know"
            )
