"""Find the placement of DTensors, as FSDP2 (`fully_shard`) and `distribute_tensor` make them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.distributed.placement import Group, Piece, Placement
from mars_hf.distributed.routes import Region


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded or replicated by torch.distributed.tensor."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # the usual case, and a fast test
    return not plain and dist.is_available() and isinstance(tensor, _dtensor_class())


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def check_gradient_placement(param: Any, grad: Any) -> None:
    """Raise RuntimeError unless a gradient has the placements of its parameter."""
    if is_dtensor(param) and not (is_dtensor(grad) and grad.placements == param.placements):
        found = getattr(grad, "placements", "not a DTensor")
        raise RuntimeError(
            f"the gradient of a DTensor parameter of shape {tuple(param.shape)} is placed as {found}, the parameter as "
            f"{param.placements}; reduce the gradients before step()"
        )


def place_dtensor(tensor: Any, slot: int) -> Placement | None:
    """Return the placement of a DTensor of FSDP2, alone or with replication; None if it is not sharded."""
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
    # As torch.chunk cuts: the first parts are full.
    full = -(-tensor.shape[dim] // mesh.size(mesh_dim))
    start = min(mesh.get_local_rank(mesh_dim) * full, tensor.shape[dim])
    region = Region(dim, start, min(full, tensor.shape[dim] - start))
    numel = region.shape(tensor.shape).numel()
    pieces = (Piece(slot, 0, numel, tensor.numel(), region),) if numel else ()
    return Placement(pieces, mesh.get_group(mesh_dim), replicas_in_mesh(tensor))


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
