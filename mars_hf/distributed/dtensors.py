"""Where FSDP2 (`fully_shard`) and `distribute_tensor` put the pieces of a parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.distributed.placement import Group, Piece, Placement
from mars_hf.distributed.routes import Region


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is sharded or replicated by torch.distributed.tensor."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # nearly always, and told at once
    return not plain and dist.is_available() and isinstance(tensor, _dtensor_class())


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


def place_dtensor(tensor: Any, slot: int) -> Placement | None:
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


def replicas_in_mesh(tensor: Any) -> Group:
    """The ranks along the longest mesh dimension that a DTensor is replicated over; None where there are no others.

    Along further dimensions work is repeated, which changes nothing: all ranks there start from the same.
    """
    mesh = tensor.device_mesh
    lengths = {dim: mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()}
    longest = max(lengths, key=lengths.__getitem__, default=None)
    return None if longest is None or lengths[longest] == 1 else mesh.get_group(longest)


def _dtensor_class() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor
