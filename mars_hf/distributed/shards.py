"""Where the parts of a parameter are: `ShardSpec` for each tensor of the optimizer that an engine has sharded.

FSDP2 and tensor parallelism make DTensors, which say it themselves. DeepSpeed ZeRO steps flat tensors that hold parts
of many parameters; the parameters of the model, which keep their identity there, say which.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mars_hf import _compat
from mars_hf.arithmetic import eight_bits
from mars_hf.distributed.tensors import Group, Shard, ShardSpec, Slice, is_dtensor, ranks_of, shape_of

# Returns a model that the optimizer does not keep alive; None once it is gone.
ModelRef = Callable[[], nn.Module | None]


def require_known_parts(param: Tensor) -> None:
    """Raise RuntimeError for a parameter flattened by FSDP1 or divided by tensor parallelism without DTensors.

    Its shape is no longer that of the whole, and nothing says where the rest is.
    """
    if any(getattr(param, mark, False) for mark in ("tensor_model_parallel", "model_parallel")):
        raise RuntimeError(
            f"a parameter of shape {tuple(shape_of(param))} that AutoTP or Megatron has marked as one part: "
            "MARS cannot find the others. Use torch's tensor parallelism (tp_plan='auto' in from_pretrained, or "
            "parallelize_module), or ZeRO without AutoTP"
        )
    if type(param).__name__ == "FlatParameter" or getattr(param, "_fsdp_flattened", False):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} that FSDP1 has flattened: MARS needs the parameters' shapes; "
            "use FSDP2 (fully_shard, or fsdp_version: 2 in the accelerate config)"
        )


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` has been called on a module; its class is not imported for this."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def reshard(model: nn.Module) -> None:
    """Drop the whole parameters that `fully_shard` keeps after a forward pass without a backward pass.

    Until then they take the place of the shards, and what a step or an exchange writes into those does not reach them.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if is_fully_sharded(module):
            module.reshard()


class Shards:
    """Find the ShardSpec of every tensor in a step.

    It keeps the shapes and ids of the parameters the optimizer was made from, and no references: a strong one would
    keep the unsharded model alive while accelerate shards it, a weak one makes `torch.utils.swap_tensors` refuse the
    tensor. The model is asked for the parameters when DeepSpeed has replaced them by flat tensors.
    """

    def __init__(self, param_groups: Iterable[Mapping[str, Any]] = ()) -> None:
        """Remember the parameters of these groups."""
        self.shapes: list[torch.Size] = []  # of the whole parameters, by index
        self._roles: list[str] = []
        self._indices: dict[int, int] = {}  # by id
        # Parameters that DeepSpeed has put into flat tensors, by index.
        self._originals: dict[int, weakref.ref[Tensor]] = {}
        # Specs of the DTensors of a mesh, by index, placements and shapes.
        self._specs_of_mesh: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for group in param_groups:
            self.extend(group)

    def extend(self, group: Mapping[str, Any]) -> None:
        """Remember the parameters of one more group."""
        for param in group["params"]:
            self._indices[id(param)] = len(self.shapes)
            self.shapes.append(shape_of(param))
            self._roles.append(group["role"])
        self._originals.clear()

    def locate(
        self, param_groups: Iterable[Mapping[str, Any]], wanted: Sequence[bool], model: ModelRef | None
    ) -> tuple[dict[Tensor, ShardSpec], Exception | None]:
        """Return the specs of sharded tensors, those without a gradient included; whole parameters have none.

        `wanted` says for each group whether a step needs norms or directions of its parameters. `model` is the one that
        the optimizer was made from; None if it is not known.

        An error, such as that a tensor is a part of something unknown, is returned: the other tensors say which ranks
        have to hear of it, and ranks make process groups for them together.
        """
        specs = {}
        error: Exception | None = None
        index = -1
        for group, is_wanted in zip(param_groups, wanted, strict=True):
            for param in group["params"]:
                index += 1
                if not is_wanted or self.is_whole(param):
                    continue
                try:
                    spec = self.spec_of(param, index, model)
                except Exception as raised:
                    error = error or raised
                    continue
                if spec is not None:
                    specs[param] = spec
        return specs, error

    def is_whole(self, param: Tensor) -> bool:
        """Return whether the optimizer was made from this very parameter, and no engine has sharded it."""
        known = self._indices.get(id(param))  # ids of freed parameters are reused: the shape must be the same
        return known is not None and self.shapes[known] == param.shape and not is_dtensor(param)

    def spec_of(self, param: Any, index: int, model: ModelRef | None = None) -> ShardSpec | None:
        """Return the spec of a DTensor, or of a tensor that the optimizer was not made from; as `locate`."""
        if is_dtensor(param):
            return self._spec_of_dtensor(param, index)
        require_known_parts(param)
        is_known = index < len(self.shapes)
        if param.ndim < 2:
            spec = self._spec_of_flat(param, model)
            if spec is not None:
                return spec
            was_flattened = is_known and self._roles[index] != "vector"
            if was_flattened or self._originals:  # an unknown engine would have flattened matrices too
                raise RuntimeError(
                    f"unknown flat tensor of shape {tuple(param.shape)}: MARS cannot tell which matrix it is a piece "
                    "of. Use DDP, FSDP2 or DeepSpeed ZeRO, and build Mars from the model's own parameters"
                )
        elif is_known and param.shape != self.shapes[index]:
            self._find_originals(model)  # raises if an engine has made parts of parameters
        # The user has replaced, resized or added the parameter.
        self._indices[id(param)] = index
        if is_known:
            self.shapes[index] = param.shape
        return None

    def _spec_of_dtensor(self, param: Any, index: int) -> ShardSpec | None:
        specs: dict[Any, ShardSpec | None] = self._specs_of_mesh.setdefault(param.device_mesh, {})
        key = (index, param.placements, param.shape, param.to_local().shape)
        if key not in specs:
            specs[key] = spec_of_dtensor(param, index)
        return specs[key]

    def _spec_of_flat(self, param: Tensor, model: ModelRef | None) -> ShardSpec | None:
        """Return the spec of a flat tensor of DeepSpeed; None if it is not one."""
        originals = self._living_originals() or self._find_originals(model)
        # Parameters say where they are now.
        return _spec_of_zero3(param, originals) or _spec_of_zero12(param, originals)

    def _living_originals(self) -> list[tuple[int, Tensor]]:
        params = [(index, reference()) for index, reference in self._originals.items()]
        return [(index, param) for index, param in params if param is not None]

    def _find_originals(self, model: ModelRef | None) -> list[tuple[int, Tensor]]:
        """Find the parameters that DeepSpeed has flattened: those of the model, else among all objects, in 50 ms."""
        module = None if model is None else model()
        originals = self._originals_among(() if module is None else module.parameters())
        originals = originals or self._originals_among(gc.get_objects())
        self._originals = {index: weakref.ref(param) for index, param in originals}
        return originals

    def _originals_among(self, candidates: Iterable[Any]) -> list[tuple[int, Tensor]]:
        originals = {}
        for param in candidates:
            index = self._indices.get(id(param))
            if index is None or not issubclass(type(param), Tensor):
                continue
            require_known_parts(param)
            flattened = hasattr(param, "_hp_mapping") or getattr(param, "_z3_optimizer", None) is not None
            if flattened and shape_of(param) == self.shapes[index]:
                originals[index] = param
        return sorted(originals.items())


# --- DTensors: FSDP2 and tensor parallelism -------------------------------------------------------------------------

# Process groups made here, by their ranks: one serves all optimizers, and all meshes with these ranks.
_made_groups: dict[tuple[int, ...], Group] = {}


def place_gradients(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """Give DTensors their gradients in their own placements; collective where they differ.

    Raises:
        RuntimeError: as `misplaced`.
    """
    for param in misplaced(param_groups).values():
        grad: Any = param.grad
        param.grad = grad.redistribute(placements=param.placements)


def takes_communication(param: Any) -> bool:
    """Return whether ranks must exchange a gradient to place it like its parameter; a whole one is only cut."""
    pairs = zip(param.grad.placements, param.placements, strict=True)
    return any(found != wanted and not found.is_replicate() for found, wanted in pairs)


def misplaced(param_groups: Iterable[Mapping[str, Any]]) -> dict[int, Any]:
    """Return the DTensors whose gradients have other placements, by index.

    Tensor parallelism leaves some gradients as partial sums, or whole where the parameter is sharded.

    Raises:
        RuntimeError: a gradient is not a DTensor on its parameter's mesh.
    """
    found: dict[int, Any] = {}
    if not (dist.is_available() and dist.is_initialized()):
        return found
    for index, param in enumerate([param for group in param_groups for param in group["params"]]):
        grad: Any = param.grad
        if grad is None or not is_dtensor(param):
            continue
        if not is_dtensor(grad) or grad.device_mesh != param.device_mesh:
            what = f"on {grad.device_mesh}" if is_dtensor(grad) else "no DTensor"
            raise RuntimeError(
                f"the gradient of a DTensor parameter of shape {tuple(param.shape)} is {what}, the parameter is on "
                f"{param.device_mesh}; place the gradient like its parameter before step()"
            )
        if grad.placements != param.placements:
            found[index] = param
    return found


def spec_of_dtensor(tensor: Any, index: int) -> ShardSpec | None:
    """Return the spec of a DTensor on a mesh of any number of dimensions; None if it is whole on each rank.

    Its group are the ranks that hold the other shards, and no copies of this one. If these span several mesh
    dimensions, the first call is collective among them: it makes a process group.

    Raises:
        RuntimeError: partial sums, or a placement that mars_hf does not know.
    """
    mesh, splits = tensor.device_mesh, _splits_of(tensor)
    if not splits:
        return None
    part = _slice(tensor, splits, mesh.get_coordinate())
    expected, held = part.shape(tensor.shape), tensor.to_local().shape
    are_empty = expected.numel() == held.numel() == 0  # torch gives empty parts other shapes
    if held != expected and not are_empty:
        raise _unsupported(tensor, f"a part of shape {tuple(held)} on this rank")
    shards = () if are_empty else (Shard(index, 0, expected.numel(), tensor.shape, part),)
    return ShardSpec(shards, _group_over(mesh, _mesh_dims(splits)), replicas_in_mesh(tensor))


def slices_of(tensor: Any) -> Callable[[int], Slice]:
    """Return a function from a rank in the group of a DTensor's spec to the part that it holds."""
    splits = _splits_of(tensor)
    group = _group_over(tensor.device_mesh, _mesh_dims(splits))
    coordinates = _coordinates(tensor.device_mesh, tuple(ranks_of(group)))
    return functools.cache(lambda rank: _slice(tensor, splits, coordinates[rank]))


def divides_evenly(tensor: Any, first: int, unit: int) -> bool:
    """Return whether the parts of a DTensor keep together what is in units along its dimensions from `first` on.

    Units run along the last dimension; if several dimensions from `first` on make up rows, no rank may cut them.
    """
    for dim, cuts in _splits_of(tensor).items():
        parts = math.prod(tensor.device_mesh.size(mesh_dim) * factor for mesh_dim, factor in cuts)
        cuts_rows = dim >= first
        if cuts_rows and (first < tensor.ndim - 1 or tensor.shape[dim] % (parts * unit)):
            return False
    return True


def first_dim_of_rows(param: Tensor) -> int | None:
    """Return the dimension from which on the rows of states in 8 bits run; None for tensors that have none.

    Those are the small ones, and those whose blocks ranks would cut.
    """
    first = eight_bits.first_dim_of_rows(shape_of(param))
    if first is None or not is_dtensor(param) or divides_evenly(param, first, eight_bits.BLOCK):
        return first
    return None


def part_of(param: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor of a DTensor's whole shape."""
    splits = _splits_of(param)
    if not splits:
        return whole
    part = _slice(param, splits, param.device_mesh.get_coordinate()).of(whole)
    return part.reshape(param.to_local().shape)


def placed_like(param: Any, part: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a DTensor placed like a parameter, if that is one.

    The whole has the parameter's size along all but its last dimension, which is divided as the parameter's last one.
    """
    if not is_dtensor(param):
        return part
    from torch.distributed.tensor import DTensor

    splits = _splits_of(param)
    last = part.ndim - 1
    parts = math.prod(param.device_mesh.size(mesh_dim) for mesh_dim, _ in splits.get(last, ()))
    is_cut = last == param.ndim - 1
    whole = torch.Size([*param.shape[:last], part.shape[last] * (parts if is_cut else 1)])
    strides = tuple(whole[dim + 1 :].numel() for dim in range(len(whole)))
    return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False, shape=whole, stride=strides)


def replicas_in_mesh(tensor: Any) -> Group:
    """Return the ranks of the longest mesh dimension that a DTensor is replicated over; None if it has one rank.

    Along further dimensions ranks repeat the work, with the same result, since all start from the same values.
    """
    mesh = tensor.device_mesh
    dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    longest = max(dims, key=mesh.size, default=None)
    return None if longest is None or mesh.size(longest) == 1 else mesh.get_group(longest)


def spec_of_copies(param: Any, index: int, process_group: Group) -> ShardSpec | None:
    """Return the spec of a whole parameter whose copies other ranks hold; None if no other rank does.

    `process_group` are the ranks that hold the copies of what is no DTensor.
    """
    replicas = replicas_in_mesh(param) if is_dtensor(param) else process_group
    if replicas is None or dist.get_world_size(replicas) == 1:
        return None
    all_rows = Slice(0, 0, param.shape[0])
    return ShardSpec((Shard(index, 0, param.numel(), param.shape, all_rows),), None, replicas)


# Dimensions of a tensor to the mesh dimensions of several ranks that divide them, in the order of the mesh, each with
# the split factor of torch's strided shard, else 1.
_Splits = Mapping[int, Sequence[tuple[int, int]]]


def _splits_of(tensor: Any) -> _Splits:
    """Return how the mesh dimensions divide a DTensor."""
    splits: dict[int, list[tuple[int, int]]] = {}
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(mesh_dim) == 1:
            continue
        shard = _compat.shard_of(placement)
        if shard is None:
            raise _unsupported(tensor, "a placement other than Shard and Replicate")
        splits.setdefault(shard[0] % tensor.ndim, []).append((mesh_dim, shard[1]))
    return splits


def _mesh_dims(splits: _Splits) -> tuple[int, ...]:
    return tuple(sorted(mesh_dim for pairs in splits.values() for mesh_dim, _ in pairs))


def _slice(tensor: Any, splits: _Splits, coordinate: Sequence[int]) -> Slice:
    """Return the part of a DTensor that the rank at a coordinate of the mesh holds.

    Along one dimension, each mesh dimension cuts what the ones before have left, but for strided shards, which come
    after as many later ones as their factor says: `fully_shard` cuts what tensor parallelism has left on a rank, while
    its mesh dimension comes first. Without later ones, a strided shard takes the same part of each of `factor` blocks,
    as transformers cuts fused projections.
    """
    mesh, part = tensor.device_mesh, None
    for dim in sorted(splits, reverse=True):  # from the last one on: each holds the later ones
        stripes, in_order = 1, list[int]()
        is_cut_once = len(splits[dim]) == 1
        for mesh_dim, factor in reversed(splits[dim]):
            later = math.prod(map(mesh.size, in_order))
            if factor == 1:
                in_order.insert(0, mesh_dim)
            elif is_cut_once:
                stripes = factor
                in_order.append(mesh_dim)
            elif factor == later:
                in_order.append(mesh_dim)
            else:
                raise _unsupported(tensor, f"a strided shard of factor {factor} with {later} later shards")
        if stripes > 1 and tensor.shape[dim] % (stripes * mesh.size(in_order[0])):
            raise _unsupported(tensor, f"an uneven part of each of {stripes} blocks of dimension {dim}")
        start, length = 0, tensor.shape[dim] // stripes
        for mesh_dim in in_order:
            # As torch.chunk cuts: the first parts are full.
            full = -(-length // mesh.size(mesh_dim))
            skipped = min(coordinate[mesh_dim] * full, length)
            start, length = start + skipped, min(full, length - skipped)
        part = Slice(dim, start, length, part, stripes)
    assert part is not None
    return part


def _unsupported(tensor: Any, kind: str) -> RuntimeError:
    mesh = tensor.device_mesh
    return RuntimeError(
        f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on mesh "
        f"{mesh.mesh_dim_names or tuple(mesh.shape)}: {kind} is not supported; supported are Shard and Replicate over "
        "any mesh dimensions, as fully_shard, parallelize_module and distribute_tensor place parameters"
    )


@functools.lru_cache(maxsize=64)
def _coordinates(mesh: Any, ranks: tuple[int, ...]) -> list[list[int]]:
    return [(mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]


def _group_over(mesh: Any, dims: Sequence[int]) -> Group:
    """Return the ranks that differ from this one along some dimensions of a mesh and along no others.

    Makes a process group, together with those ranks, if the mesh has none: for several dimensions that are not the
    whole world.

    Raises:
        RuntimeError: a process group cannot be made without ranks outside the mesh.
    """
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    coordinate = mesh.get_coordinate()
    index = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if ranks not in _made_groups or not ranks_of(_made_groups[ranks]):
        if mesh.size() < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise RuntimeError(
                f"no process group over dimensions {tuple(dims)} of mesh {mesh.mesh_dim_names or tuple(mesh.shape)}, "
                f"with {mesh.size()} of {dist.get_world_size()} ranks, can be made: init_process_group got a "
                "device_id, which pipeline stages do not allow. Remove device_id"
            )
        # Ranks outside the mesh, of other pipeline stages, know nothing of it.
        _made_groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made_groups[ranks]


# --- flat tensors: DeepSpeed ZeRO-1, 2 and 3 ------------------------------------------------------------------------


def _spec_of_zero12(tensor: Tensor, originals: Sequence[tuple[int, Tensor]]) -> ShardSpec | None:
    """Return the spec of a flat tensor of ZeRO-1/2 or DeepSpeed's bf16 optimizer; None if it is not one.

    Each rank's tensor is one part of a group's flat buffer. Each parameter is a view of that buffer, so its storage
    offset is its place there. `_hp_mapping`, which DeepSpeed sets on the parameters, identifies the buffer; its
    addresses are wrong with `round_robin_gradients`.
    """
    linked: list[tuple[int, Any]] = [(index, param) for index, param in originals if hasattr(param, "_hp_mapping")]
    if not linked:
        return None
    _compat.require_new_deepspeed()
    groups = {id(param._dp_group): param._dp_group for _, param in linked}
    if len(groups) > 1:
        raise RuntimeError(
            f"DeepSpeed partitions these parameters over {len(groups)} different process groups (expert parallelism), "
            "which is not supported"
        )
    group = next(iter(groups.values())) or dist.group.WORLD
    buffers = _buffers_of(tensor, [param for _, param in linked])
    shards = []
    first = dist.get_rank(group) * tensor.numel()
    for index, param in linked:
        offset = param.storage_offset()
        start, end = max(offset, first), min(offset + param.numel(), first + tensor.numel())
        if start < end and param.untyped_storage().data_ptr() in buffers:
            part = Slice(None, start - offset, end - start)
            shards.append(Shard(index, start - first, end - start, param.shape, part))
    return ShardSpec(tuple(shards), group)


def _buffers_of(tensor: Tensor, params: Iterable[Any]) -> set[int]:
    """Return the addresses of the flat buffers, of parameters, whose high-precision copy is in a tensor."""
    address = tensor.untyped_storage().data_ptr()
    buffers = set()
    for param in params:
        mapping = param._hp_mapping
        if mapping is not None and mapping.hp_fragment.untyped_storage().data_ptr() == address:
            buffers.add(param.untyped_storage().data_ptr())
    return buffers


def _spec_of_zero3(tensor: Tensor, originals: Sequence[tuple[int, Any]]) -> ShardSpec | None:
    """Return the spec of a flat tensor of ZeRO-3; None if it is not one.

    `_z3_optimizer` knows each parameter's sub-group and its place there.
    """
    shards = []
    group = None
    for index, param in originals:
        engine: Any = getattr(param, "_z3_optimizer", None)
        if engine is None:
            continue
        position = engine.grad_position.get(engine.get_param_id(param))
        if position is None:  # frozen
            continue
        sub_group, start, partition = position
        if engine.fp32_partitioned_groups_flat[sub_group] is not tensor:
            continue
        group = param.ds_process_group
        first = dist.get_rank(group) * partition
        numel = min(partition, max(0, param.ds_numel - first))  # the last partitions may be padded
        if numel:
            shards.append(Shard(index, start, numel, shape_of(param), Slice(None, first, numel)))
    return None if group is None else ShardSpec(tuple(shards), group)
