"""States in 8 bits: which buffers have codes and scales, and how a buffer of another form becomes one of this."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf import log
from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.eight_bits import CODES, SCALES, Coded
from mars_hf.arithmetic.update_rules import UpdateRule
from mars_hf.distributed.shards import divides_evenly, placed_like
from mars_hf.distributed.tensors import ShardSpec, is_dtensor, local


def coded_keys(rule: UpdateRule, param: Tensor, group: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Return which buffers of a parameter are in 8 bits; stale gradients, there during a step only, are not."""
    is_exact = rule.corrects and not group["is_approx"]
    has_codes = group["role"] != "vector" and _first_dim(param) is not None
    coded = []
    for key in keys:
        is_moment = key in SCALES and not (is_exact and key == "last_grad")
        if key == "compensation" or (is_moment and has_codes):
            coded.append(key)
    return tuple(coded)


def _first_dim(param: Tensor) -> int | None:
    """Return the dimension from which on rows run; None for tensors without codes, or whose blocks ranks would cut."""
    first = eight_bits.first_dim_of_rows(param.shape)
    if first is None or not is_dtensor(param) or divides_evenly(param, first, eight_bits.BLOCK):
        return first
    return None


def shape_of_scales(param: Tensor, spec: ShardSpec | None) -> torch.Size:
    """Return the shape of the scales of a parameter with codes, of this rank's part of it."""
    parts = _parts_of_flat(param, spec)
    if parts is not None:
        return torch.Size([eight_bits.number_of_scales(param.numel(), len(parts))])
    first = _first_dim(param)
    assert first is not None
    return eight_bits.shape_of_scales(local(param).shape, first)


def _parts_of_flat(param: Tensor, spec: ShardSpec | None) -> list[tuple[int, int]] | None:
    """Return start and size of the parameters in a flat tensor of an engine; None for any other tensor."""
    if spec is None or is_dtensor(param):
        return None
    return [(shard.start, shard.numel) for shard in spec.shards]


def scales_of_shards(param: Tensor, scales: Tensor, spec: ShardSpec | None) -> list[Tensor]:
    """Return the scales of each shard that this rank holds of a parameter."""
    parts = _parts_of_flat(param, spec)
    return [scales] if parts is None else eight_bits.scales_of_parts(scales, parts)


def encode(param: Tensor, state: dict[str, Any], key: str, spec: ShardSpec | None) -> None:
    """Put a buffer into 8 bits if it is not: zeros if there is none."""
    if key in state and state[key].dtype == CODES[key]:
        return
    if key == "compensation" and key in state:
        state[key] = _convert_compensation(param, state[key])
        return
    coded = {key: torch.zeros_like(param, dtype=CODES[key], memory_format=torch.preserve_format)}
    if key in SCALES:
        scales = torch.zeros(shape_of_scales(param, spec), dtype=torch.float32, device=local(param).device)
        coded[SCALES[key]] = placed_like(param, scales)
    if key in state:
        _say_converted(to_codes=True)
        for codes, part in zip(_coded(param, coded, key, spec), _pieces(local(state[key]), param, spec), strict=True):
            codes.encode(part, float(state["step"]))
    state.update(coded)


def decode(param: Tensor, state: dict[str, Any], key: str, spec: ShardSpec | None) -> None:
    """Put a buffer into floating point if it is in 8 bits."""
    if state[key].is_floating_point():
        state.pop(SCALES.get(key, ""), None)
        return
    if key == "compensation":
        state[key] = _convert_compensation(param, state[key])
        return
    _say_converted(to_codes=False)
    values = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    for codes, part in zip(_coded(param, state, key, spec), _pieces(local(values), param, spec), strict=True):
        part.copy_(codes.decode())
    state[key] = values
    del state[SCALES[key]]


def _convert_compensation(param: Tensor, compensation: Tensor) -> Tensor:
    """Return what rounding has lost of a bfloat16 parameter in the other one of its two forms."""
    weight, lost = local(param), local(compensation)
    if lost.dtype == torch.int8:
        other = (eight_bits.join_weight(weight, lost) - weight.float()).to(weight.dtype)
    else:
        _, other = eight_bits.split_weight(weight.float() + lost.float())
    _say_converted(to_codes=other.dtype == torch.int8)
    converted = torch.zeros_like(param, dtype=other.dtype, memory_format=torch.preserve_format)
    local(converted).copy_(other)
    return converted


def _coded(param: Tensor, state: Mapping[str, Any], key: str, spec: ShardSpec | None) -> list[Coded]:
    codes = _pieces(local(state[key]), param, spec)
    scales = scales_of_shards(param, local(state[SCALES[key]]), spec)
    return [Coded(*pair) for pair in zip(codes, scales, strict=True)]


def _pieces(tensor: Tensor, param: Tensor, spec: ShardSpec | None) -> list[Tensor]:
    parts = _parts_of_flat(param, spec)
    return [tensor] if parts is None else [tensor[start : start + numel] for start, numel in parts]


@functools.cache
def _say_converted(*, to_codes: bool) -> None:
    """Log, once a process and direction, that loaded states change their form."""
    log.warning(f"MARS converts loaded states {'to' if to_codes else 'from'} 8 bits, as state_dtype says.")
