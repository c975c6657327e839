"""Find the placement of DTensors, as `fully_shard`, `parallelize_module` and `distribute_tensor` make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf import _compat
from mars_hf.distributed import mesh_groups
from mars_hf.distributed.placement import Group, Piece, Placement
from mars_hf.distributed.routes import Region


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded or replicated by torch.distributed.tensor."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # the usual case, and a fast test
    return not plain and dist.is_available() and isinstance(tensor, _dtensor_class())


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def place_gradient(param: Any, grad: Any) -> None:
    """Give a DTensor parameter its gradient in its own placements; collective if they differ.

    Tensor parallelism leaves some gradients as partial sums, or whole where the parameter is sharded.

    Raises:
        RuntimeError: the gradient is not a DTensor on the parameter's mesh.
    """
    if not is_dtensor(param):
        return
    if not is_dtensor(grad) or grad.device_mesh != param.device_mesh:
        found = f"on {grad.device_mesh}" if is_dtensor(grad) else "no DTensor"
        raise RuntimeError(
            f"the gradient of a DTensor parameter of shape {tuple(param.shape)} is {found}, the parameter is on "
            f"{param.device_mesh}; place the gradient like its parameter before step()"
        )
    if grad.placements != param.placements:
        param.grad = grad.redistribute(placements=param.placements)


def place_dtensor(tensor: Any, slot: int) -> Placement | None:
    """Return the placement of a DTensor on a mesh of any number of dimensions; None if none of them shards it.

    Its group are the ranks that hold the other pieces, and no copies of this one. Collective among them at first where
    it spans several mesh dimensions.

    Raises:
        RuntimeError: partial sums, or a placement that mars_hf does not know.
    """
    mesh = tensor.device_mesh
    cuts = _cuts(tensor)
    if not cuts:
        return None
    region = None
    for dim in sorted({cut.dim for cut in cuts}, reverse=True):  # from the last one on: each holds the later ones
        region = _cut(tensor, [cut for cut in cuts if cut.dim == dim], region)
    assert region is not None
    dims = [cut.mesh_dim for cut in cuts]
    longer = [dim for dim in dims if mesh.size(dim) > 1]
    numel = region.local_shape(tensor.shape).numel()
    pieces = (Piece(slot, 0, numel, tensor.numel(), region),) if numel else ()
    return Placement(pieces, mesh_groups.group_over(mesh, longer or dims[:1]), replicas_in_mesh(tensor))


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
        found = _compat.shard_of(placement)
        if found is None:
            raise _unsupported(tensor, "a placement other than Shard and Replicate")
        dim, factor = found
        cuts.append(_Cut(mesh_dim, dim % tensor.ndim, factor))
    return cuts


def _cut(tensor: Any, cuts: Sequence[_Cut], inner: Region | None) -> Region:
    """Return the part of a DTensor that remains after all cuts along one dimension.

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
        skipped = min(mesh.get_local_rank(cut.mesh_dim) * full, length)
        start, length = start + skipped, min(full, length - skipped)
    return Region(dim, start, length, inner, stripes)


def _unsupported(tensor: Any, kind: str) -> RuntimeError:
    mesh = tensor.device_mesh
    return RuntimeError(
        f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on mesh "
        f"{mesh.mesh_dim_names or tuple(mesh.shape)}: {kind} is not supported; supported are Shard and Replicate over "
        "any mesh dimensions, as fully_shard, parallelize_module and distribute_tensor place parameters"
    )


def replicas_in_mesh(tensor: Any) -> Group:
    """Return the ranks of the longest mesh dimension that a DTensor is replicated over; None if it has one rank.

    Along further dimensions ranks repeat the work, with the same result, since all start from the same values.
    """
    mesh = tensor.device_mesh
    lengths = {dim: mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    return None if longest is None or lengths[longest] == 1 else mesh.get_group(longest)


def _dtensor_class() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor
