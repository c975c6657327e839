"""The ShardSpec of the flat tensors of DeepSpeed ZeRO-1, 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mars_hf import _compat
from mars_hf.distributed.shards import Region, Shard, ShardSpec


def spec_of_zero12(tensor: Tensor, originals: Sequence[tuple[int, Tensor]]) -> ShardSpec | None:
    """Return the spec of a flat tensor of ZeRO-1/2 or DeepSpeed's bf16 optimizer; None if it is not one.

    Each rank's tensor is one part of a group's flat buffer. Each parameter is a view of that buffer, so its storage
    offset is its place there. `_hp_mapping`, which DeepSpeed sets on the parameters, identifies the buffer; its
    addresses are wrong with `round_robin_gradients`.
    """
    linked: list[tuple[int, Any]] = [
        (index, original) for index, original in originals if _compat.is_of_zero12(original)
    ]
    if not linked:
        return None
    _compat.refuse_old_deepspeed()
    groups = {id(group): group for group in (_compat.zero12_group(original) for _, original in linked)}
    if len(groups) > 1:
        raise RuntimeError(
            f"DeepSpeed partitions these parameters over {len(groups)} different process groups (expert parallelism), "
            "which is not supported"
        )
    group = next(iter(groups.values())) or dist.group.WORLD
    here = tensor.untyped_storage().data_ptr()
    buffers = {
        original.untyped_storage().data_ptr()
        for _, original in linked
        if (fragment := _compat.zero12_fragment(original)) is not None and fragment.untyped_storage().data_ptr() == here
    }
    shards = []
    first = dist.get_rank(group) * tensor.numel()
    for index, original in linked:
        if original.untyped_storage().data_ptr() in buffers:
            start = max(original.storage_offset(), first)
            end = min(original.storage_offset() + original.numel(), first + tensor.numel())
            if start < end:
                region = Region(None, start - original.storage_offset(), end - start)
                shards.append(Shard(index, start - first, end - start, original.numel(), region))
    return ShardSpec(tuple(shards), group)


def spec_of_zero3(tensor: Tensor, originals: Sequence[tuple[int, Tensor]]) -> ShardSpec | None:
    """Return the spec of a flat tensor of ZeRO-3; None if it is not one.

    `_z3_optimizer` knows each parameter's sub-group and its place there.
    """
    partitioned: list[tuple[int, Any]] = [
        (index, original) for index, original in originals if _compat.zero3_optimizer(original) is not None
    ]
    if not partitioned:
        return None
    group = partitioned[0][1].ds_process_group
    rank, shards, known = dist.get_rank(group), [], False
    for index, original in partitioned:
        engine = _compat.zero3_optimizer(original)
        if engine.get_param_id(original) not in engine.grad_position:  # frozen
            continue
        sub_group, start, partition = engine.grad_position[engine.get_param_id(original)]
        if engine.fp32_partitioned_groups_flat[sub_group] is not tensor:
            continue
        known = True
        # The last partitions may be padded.
        numel = min(partition, max(0, original.ds_numel - rank * partition))
        if numel:
            region = Region(None, rank * partition, numel)
            shards.append(Shard(index, start, numel, original.ds_numel, region))
    return ShardSpec(tuple(shards), group) if known else None


def offset_in(tensor: Tensor, param: Any) -> tuple[Any, ...]:
    """Where an engine says that a parameter lies in a flat tensor."""
    engine = _compat.zero3_optimizer(param)
    if engine is not None:
        place = engine.grad_position.get(engine.get_param_id(param))
        return place, place is not None and engine.fp32_partitioned_groups_flat[place[0]] is tensor
    return param.storage_offset(), param.shape
