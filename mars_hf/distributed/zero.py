"""Find the placement of the flat tensors of DeepSpeed ZeRO-1, 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mars_hf import _compat
from mars_hf.distributed.placement import Piece, Placement
from mars_hf.distributed.routes import Region


def place_in_zero12(tensor: Tensor, origins: Sequence[tuple[int, Tensor]]) -> Placement | None:
    """Return the placement of a flat tensor of ZeRO-1/2 or DeepSpeed's bf16 optimizer; None if it is not one.

    Each rank's tensor is one part of a group's flat buffer. Each parameter is a view of that buffer, so its storage
    offset is its place there. `_hp_mapping`, which DeepSpeed sets on the parameters, identifies the buffer; its
    addresses are wrong with `round_robin_gradients`.
    """
    linked: list[tuple[int, Any]] = [(slot, origin) for slot, origin in origins if _compat.is_of_zero12(origin)]
    if not linked:
        return None
    _compat.refuse_old_deepspeed()
    groups = {id(group): group for group in (_compat.zero12_group(origin) for _, origin in linked)}
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
        if (fragment := _compat.zero12_fragment(origin)) is not None and fragment.untyped_storage().data_ptr() == here
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


def place_in_zero3(tensor: Tensor, origins: Sequence[tuple[int, Tensor]]) -> Placement | None:
    """Return the placement of a flat tensor of ZeRO-3; None if it is not one.

    `_z3_optimizer` knows each parameter's sub-group and its place there.
    """
    partitioned: list[tuple[int, Any]] = [
        (slot, origin) for slot, origin in origins if _compat.zero3_optimizer(origin) is not None
    ]
    if not partitioned:
        return None
    group = partitioned[0][1].ds_process_group
    rank, pieces, known = dist.get_rank(group), [], False
    for slot, origin in partitioned:
        engine = _compat.zero3_optimizer(origin)
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


def place_in_engine(origin: Any, tensor: Tensor) -> tuple[Any, ...]:
    """Where an engine says that a parameter lies in a flat tensor."""
    engine = _compat.zero3_optimizer(origin)
    if engine is not None:
        place = engine.grad_position.get(engine.get_param_id(origin))
        return place, place is not None and engine.fp32_partitioned_groups_flat[place[0]] is tensor
    return origin.storage_offset(), origin.shape
