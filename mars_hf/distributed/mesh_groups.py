"""Find or make the process groups that span several dimensions of a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mars_hf.distributed.placement import Group
from mars_hf.distributed.replicas import exists

# Those made here, by their ranks: one process group serves all optimizers, and all meshes with these ranks.
_made: dict[tuple[int, ...], Group] = {}


def group_over(mesh: Any, dims: Sequence[int]) -> Group:
    """Return the ranks that differ from this one along some dimensions of a mesh and along no others.

    Makes a process group, together with those ranks, if the mesh has none: for several dimensions that are not the
    whole world.

    Args:
        mesh: a DeviceMesh that this rank is part of.
        dims: indices of mesh dimensions, at least one.

    Raises:
        RuntimeError: a process group cannot be made without ranks outside the mesh.
    """
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    here = mesh.get_coordinate()
    index = tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if ranks not in _made or not exists(_made[ranks]):
        if mesh.size() < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise RuntimeError(
                f"parameters sharded over dimensions {tuple(dims)} of mesh {mesh.mesh_dim_names or tuple(mesh.shape)}, "
                f"which has {mesh.size()} of {dist.get_world_size()} ranks: their process group cannot be split from "
                "one with a bound device without the other ranks; leave device_id out of init_process_group"
            )
        # Ranks outside the mesh, of other pipeline stages, know nothing of it.
        _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[ranks]
