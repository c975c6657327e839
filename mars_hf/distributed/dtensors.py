"""The ShardSpec of DTensors, as `fully_shard`, `parallelize_module` and `distribute_tensor` make them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from mars_hf import _compat
from mars_hf.distributed.shards import Group, Region, Shard, ShardSpec, is_dtensor, ranks_of

# Process groups made here, by their ranks: one serves all optimizers, and all meshes with these ranks.
_made: dict[tuple[int, ...], Group] = {}


def place_gradient(param: Any, grad: Any) -> None:
    """Give a DTensor parameter its gradient in its own placements; collective if they differ.

    Tensor parallelism leaves some gradients as partial sums, or whole where the parameter is sharded.

    Raises:
        RuntimeError: the gradient is not a DTensor on the parameter's mesh.
    """
    if not is_dtensor(grad) or grad.device_mesh != param.device_mesh:
        what = f"on {grad.device_mesh}" if is_dtensor(grad) else "no DTensor"
        raise RuntimeError(
            f"the gradient of a DTensor parameter of shape {tuple(param.shape)} is {what}, the parameter is on "
            f"{param.device_mesh}; place the gradient like its parameter before step()"
        )
    if grad.placements != param.placements:
        param.grad = grad.redistribute(placements=param.placements)


def spec_of(tensor: Any, index: int) -> ShardSpec | None:
    """Return the spec of a DTensor on a mesh of any number of dimensions; None if none of them shards it.

    Its group are the ranks that hold the other shards, and no copies of this one. Collective among them at first where
    it spans several mesh dimensions.

    Raises:
        RuntimeError: partial sums, or a placement that mars_hf does not know.
    """
    cuts = _cuts(tensor)
    if not cuts:
        return None
    region = _region(tensor, cuts, tensor.device_mesh.get_coordinate())
    numel = region.shape(tensor.shape).numel()
    shards = (Shard(index, 0, numel, tensor.numel(), region),) if numel else ()
    return ShardSpec(shards, _group_over(tensor.device_mesh, _sharding_dims(tensor, cuts)), replicas_in_mesh(tensor))


def regions_of(tensor: Any) -> Callable[[int], Region]:
    """Return a function from a rank in the group of a DTensor's spec to the region that it holds."""
    mesh, cuts = tensor.device_mesh, _cuts(tensor)
    coordinates = _coordinates(mesh, tuple(_sharding_dims(tensor, cuts)))
    return lambda rank: _region(tensor, cuts, coordinates[rank])


def replicas_in_mesh(tensor: Any) -> Group:
    """Return the ranks of the longest mesh dimension that a DTensor is replicated over; None if it has one rank.

    Along further dimensions ranks repeat the work, with the same result, since all start from the same values.
    """
    mesh = tensor.device_mesh
    lengths = {dim: mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    return None if longest is None or lengths[longest] == 1 else mesh.get_group(longest)


class _Cut(NamedTuple):
    """How one mesh dimension divides a dimension of a tensor; `factor` as of torch's strided shard, else 1."""

    mesh_dim: int
    dim: int
    factor: int


def _cuts(tensor: Any) -> list[_Cut]:
    """Return how the mesh dimensions divide a DTensor, in the order of the mesh."""
    cuts = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        shard = _compat.shard_of(placement)
        if shard is None:
            raise _unsupported(tensor, "a placement other than Shard and Replicate")
        dim, factor = shard
        cuts.append(_Cut(mesh_dim, dim % tensor.ndim, factor))
    return cuts


def _region(tensor: Any, cuts: Sequence[_Cut], coordinate: Sequence[int]) -> Region:
    """Return the part of a DTensor that the rank at a coordinate of the mesh holds."""
    region = None
    for dim in sorted({cut.dim for cut in cuts}, reverse=True):  # from the last one on: each holds the later ones
        region = _cut(tensor, [cut for cut in cuts if cut.dim == dim], coordinate, region)
    assert region is not None
    return region


def _cut(tensor: Any, cuts: Sequence[_Cut], coordinate: Sequence[int], inner: Region | None) -> Region:
    """Return the part that remains after all cuts along one dimension.

    Each mesh dimension cuts what the ones before have left, but for strided shards, which come after as many later ones
    as their factor says: `fully_shard` cuts what tensor parallelism has left on a rank, while its mesh dimension comes
    first. Without later ones, a strided shard takes the same part of each of `factor` blocks, as transformers cuts
    fused projections.
    """
    mesh, dim = tensor.device_mesh, cuts[0].dim
    cuts = [cut for cut in cuts if mesh.size(cut.mesh_dim) > 1]
    stripes = 1
    if len(cuts) == 1 and cuts[0].factor > 1:
        stripes = cuts[0].factor
        if tensor.shape[dim] % (stripes * mesh.size(cuts[0].mesh_dim)):
            raise _unsupported(tensor, f"an uneven part of each of {stripes} blocks of dimension {dim}")
        cuts = [cuts[0]._replace(factor=1)]
    in_order: list[_Cut] = []
    for cut in reversed(cuts):
        later = math.prod(mesh.size(other.mesh_dim) for other in in_order)
        if cut.factor not in (1, later):
            raise _unsupported(tensor, f"a strided shard of factor {cut.factor} with {later} later shards")
        in_order = [cut, *in_order] if cut.factor == 1 else [*in_order, cut]
    start, length = 0, tensor.shape[dim] // stripes
    for cut in in_order:
        # As torch.chunk cuts: the first parts are full.
        full = -(-length // mesh.size(cut.mesh_dim))
        skipped = min(coordinate[cut.mesh_dim] * full, length)
        start, length = start + skipped, min(full, length - skipped)
    return Region(dim, start, length, inner, stripes)


def _unsupported(tensor: Any, kind: str) -> RuntimeError:
    mesh = tensor.device_mesh
    return RuntimeError(
        f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on mesh "
        f"{mesh.mesh_dim_names or tuple(mesh.shape)}: {kind} is not supported; supported are Shard and Replicate over "
        "any mesh dimensions, as fully_shard, parallelize_module and distribute_tensor place parameters"
    )


def _sharding_dims(tensor: Any, cuts: Sequence[_Cut]) -> list[int]:
    """Return the mesh dimensions of more than one rank that divide a tensor; one dimension at least."""
    dims = [cut.mesh_dim for cut in cuts]
    return [dim for dim in dims if tensor.device_mesh.size(dim) > 1] or dims[:1]


@functools.lru_cache(maxsize=64)
def _coordinates(mesh: Any, dims: tuple[int, ...]) -> list[list[int]]:
    """Return the coordinates of the ranks that differ from this one along these dimensions, in order of their ranks."""
    coordinates = {}
    for steps in itertools.product(*(range(mesh.size(dim)) for dim in dims)):
        coordinate = list(mesh.get_coordinate())
        for dim, step in zip(dims, steps, strict=True):
            coordinate[dim] = step
        coordinates[int(mesh.mesh[tuple(coordinate)])] = coordinate
    return [coordinates[rank] for rank in ranks_of(_group_over(mesh, dims))]


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
    if ranks not in _made or not ranks_of(_made[ranks]):
        if mesh.size() < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise RuntimeError(
                f"parameters sharded over dimensions {tuple(dims)} of mesh {mesh.mesh_dim_names or tuple(mesh.shape)}, "
                f"which has {mesh.size()} of {dist.get_world_size()} ranks: their process group cannot be split from "
                "one with a bound device without the other ranks; leave device_id out of init_process_group"
            )
        # Ranks outside the mesh, of other pipeline stages, know nothing of it.
        _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[ranks]
