"""States in 8 bits: which buffers have codes and scales, whether these fit, and how a buffer takes another form.

Codes mean nothing without their scales. Loaders that fill the tensors of an optimizer copy them into float32, and tools
that cut or cast states leave scales behind, so both are looked at wherever they are new.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf import log
from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.eight_bits import Coded
from mars_hf.arithmetic.formulas import CODES, SCALES
from mars_hf.arithmetic.update_rules import UpdateRule
from mars_hf.distributed.shards import first_dim_of_rows, part_of, placed_like
from mars_hf.distributed.tensors import ShardSpec, is_dtensor, local

# The last tensors in which codes were found that fit their scales, by the id of the codes: those of the step before,
# unless somebody has exchanged them.
_fitting: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}


class UnfitStateError(ValueError, RuntimeError):
    """Raised for a state that does not fit its parameter: a ValueError on loading, a RuntimeError in a step."""


def coded_keys(rule: UpdateRule, param: Tensor, group: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Return which buffers of a parameter are in 8 bits; stale gradients, there during a step only, are not."""
    is_exact = rule.corrects and not group["is_approx"]
    has_codes = group["role"] != "vector" and first_dim_of_rows(param) is not None
    coded = []
    for key in keys:
        is_moment = key in SCALES and not (is_exact and key == "last_grad")
        if key == "compensation" or (is_moment and has_codes):
            coded.append(key)
    return tuple(coded)


# --- places -----------------------------------------------------------------------------------------------------------


def shape_of_scales(param: Tensor, spec: ShardSpec | None) -> torch.Size:
    """Return the shape of the scales of a parameter with codes, of this rank's part of it."""
    first = first_dim_of_rows(param)
    return _shape_of_scales(param, 0 if first is None else first, spec)


def _shape_of_scales(param: Tensor, first: int, spec: ShardSpec | None) -> torch.Size:
    """Return the shape of the scales of this rank's part of a parameter, whose rows start at dimension `first`."""
    parts = _parts_of_flat(param, spec)
    if parts is not None:
        return torch.Size([eight_bits.number_of_scales(param.numel(), len(parts))])
    held = local(param).shape
    if len(held) != param.ndim:  # torch gives empty parts other shapes
        return torch.Size([0])
    return eight_bits.shape_of_scales(held, first)


def _parts_of_flat(param: Tensor, spec: ShardSpec | None) -> list[tuple[int, int]] | None:
    """Return start and size of the parameters in a flat tensor of an engine; None for any other tensor."""
    if spec is None or is_dtensor(param):
        return None
    return [(shard.start, shard.numel) for shard in spec.shards]


def scales_of_shards(param: Tensor, scales: Tensor, spec: ShardSpec | None) -> list[Tensor]:
    """Return the scales of each shard that this rank holds of a parameter."""
    parts = _parts_of_flat(param, spec)
    if parts is not None:
        return eight_bits.scales_of_parts(scales, parts)
    return [scales] if spec is None or spec.shards else []


def _pieces(tensor: Tensor, param: Tensor, spec: ShardSpec | None) -> list[Tensor]:
    """Return what a tensor of a parameter's shape has of each shard."""
    parts = _parts_of_flat(param, spec)
    if parts is not None:
        return [tensor[start : start + numel] for start, numel in parts]
    return [tensor] if spec is None or spec.shards else []


def _coded(param: Tensor, state: Mapping[str, Any], key: str, spec: ShardSpec | None) -> list[Coded]:
    codes = _pieces(local(state[key]), param, spec)
    scales = scales_of_shards(param, local(state[SCALES[key]]), spec)
    return [Coded(*pair) for pair in zip(codes, scales, strict=True)]


# --- what fits --------------------------------------------------------------------------------------------------------


def check(param: Tensor, state: Mapping[str, Any], key: str, spec: ShardSpec | None, what: str) -> None:
    """Raise UnfitStateError unless codes and scales of a buffer are of one tensor; a pair that fits is checked once."""
    codes, scales = state[key], state[SCALES[key]]
    known = _fitting.get(id(codes))
    if known is not None and known[0]() is codes and known[1]() is scales:
        return
    if codes.is_floating_point() or local(codes).device != local(param).device:
        return  # `encode` makes codes of it, and `states` refuses another device
    if local(codes).shape != local(param).shape:
        raise UnfitStateError(_misfit(what, param, key) + _remedy(param, spec))
    held, first = local(scales), first_dim_of_rows(param)
    if first is None:  # it had codes before it was cut, or sharded otherwise
        first = max(0, scales.ndim - 1)
    expected = _shape_of_scales(param, first, spec)
    has_form = held.dtype == torch.float32 and held.shape == expected and held.device == local(codes).device
    if not has_form:
        raise UnfitStateError(
            f"{_whose(what, param)} has {key} in 8 bits with scales of {described(held)}, and needs float32 of shape "
            f"{tuple(expected)} on {local(codes).device}{_remedy(param, spec)}"
        )
    if not all(piece.fits() for piece in _coded(param, state, key, spec)):
        raise UnfitStateError(_misfit(what, param, key) + _remedy(param, spec))
    place = id(codes)
    _fitting[place] = weakref.ref(codes, lambda _: _fitting.pop(place, None)), weakref.ref(scales)


def check_loaded(param: Tensor, state: Mapping[str, Any], what: str, *, in_8_bits: bool) -> None:
    """Raise UnfitStateError for a saved state whose codes and scales are not of one tensor, or codes without scales.

    The scales may be those of the whole parameter. What engines hold in flat tensors is looked at in the next step.

    Args:
        param: the parameter that takes the state.
        state: tensors of its shape or its part's, by key.
        what: name of the state in the message.
        in_8_bits: whether the saved group or the one here keeps its states in 8 bits.
    """
    for key in CODES:
        value = state.get(key)
        if not isinstance(value, Tensor):
            continue
        if value.is_floating_point():
            has_codes = in_8_bits or SCALES.get(key) in state
            if has_codes and key != "last_grad" and eight_bits.look_like_codes(local(value)):
                raise UnfitStateError(_cast(what, param, key, value.dtype))
        elif key in SCALES:
            _check_loaded_codes(param, key, value, state.get(SCALES[key]), what)


def _check_loaded_codes(param: Tensor, key: str, codes: Tensor, scales: Any, what: str) -> None:
    """Raise UnfitStateError unless codes and scales can be of one tensor."""
    if not isinstance(scales, Tensor) or not _can_be_scales(param, codes, local(scales)):
        raise UnfitStateError(
            f"{_whose(what, param)} has {key} in 8 bits with scales of {described(scales)}, which do not fit"
            f"{_remedy(param, None)}"
        )
    can_be_paired = not _are_of_parts(param, local(scales)) and not is_whole_beside_part(codes, scales)
    pair = Coded(local(codes), local(scales))
    if not (pair.fits() if can_be_paired else pair.has_finite_scales()):
        raise UnfitStateError(_misfit(what, param, key) + _remedy(param, None))


def have_lost_values(states: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether states that have taken steps hold codes, and all scales of these are zero."""
    scales = []
    for state in states:
        codes = state.get("exp_avg")
        has_steps = isinstance(codes, Tensor) and codes.dtype == CODES["exp_avg"] and bool(state.get("step"))
        if has_steps and local(codes).numel():
            scales.append(local(state[SCALES["exp_avg"]]))
    return bool(scales) and not any(bool(each.any()) for each in scales)


def is_whole_beside_part(codes: Tensor, scales: Tensor) -> bool:
    """Return whether scales are those of a whole parameter, and the codes of a part: what full state dicts leave."""
    return is_dtensor(codes) and not is_dtensor(scales)


def _can_be_scales(param: Tensor, codes: Tensor, scales: Tensor) -> bool:
    """Return whether a tensor has the form of scales, of the whole parameter or of this rank's part."""
    if scales.dtype != torch.float32 or not 0 < scales.ndim <= codes.ndim or scales.device != local(codes).device:
        return False
    if _are_of_parts(param, scales):
        return True
    first = scales.ndim - 1
    shapes = [codes.shape, local(codes).shape]
    if len(local(codes).shape) != param.ndim:
        return True  # an empty part
    return scales.shape in [eight_bits.shape_of_scales(shape, first) for shape in shapes]


def _are_of_parts(param: Tensor, scales: Tensor) -> bool:
    """Return whether scales can be those of a flat tensor with parts of several parameters."""
    return param.ndim == 1 and not is_dtensor(param) and scales.numel() > param.numel() // eight_bits.BLOCK


def _whose(what: str, param: Tensor) -> str:
    return f"{what} of shape {tuple(param.shape)}"


def _misfit(what: str, param: Tensor, key: str) -> str:
    return (
        f"{_whose(what, param)} has {key} in 8 bits with scales of other codes, or scales that are negative or not "
        "finite: somebody has cut, moved or replaced one without the other"
    )


def _cast(what: str, param: Tensor, key: str, dtype: torch.dtype) -> str:
    return (
        f"{_whose(what, param)} has {key} of {dtype} that holds 8-bit codes as if they were numbers: they were saved "
        "with state_dtype='8bit', and torch.distributed.checkpoint, or a tool, has copied them without their scales. "
        "Make the optimizer with state_dtype='8bit' and the sharding it was saved with, load, and then set "
        "group['state_dtype'] of each group; or load a full state dict that each rank has"
    )


def _remedy(param: Tensor, spec: ShardSpec | None) -> str:
    """Return what to do with codes that do not fit."""
    if spec is not None and not is_dtensor(param):
        return (
            ". Under ZeRO it was saved on other ranks: resume on as many, or from a folder made by python -m mars_hf "
            "to_universal"
        )
    return (
        ". Change states in float32 only (group['state_dtype'] = None, and a step), or start this parameter's state "
        "anew: optimizer.state.pop(param)"
    )


def described(value: Any) -> str:
    """Return what errors say of a value in a state."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    return repr(value)


# --- conversion -------------------------------------------------------------------------------------------------------


def encode(param: Tensor, state: dict[str, Any], key: str, spec: ShardSpec | None) -> None:
    """Put a buffer into 8 bits if it is not: zeros if there is none."""
    if key in state and state[key].dtype == CODES[key]:
        return
    if key in state and eight_bits.look_like_codes(local(state[key])):
        raise UnfitStateError(_cast("the state of a parameter", param, key, state[key].dtype))
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
        # Scales beside numbers are of codes that a loader has replaced by these.
        had_codes = key in SCALES and state.pop(SCALES[key], None) is not None
        if had_codes and eight_bits.look_like_codes(local(state[key])):
            raise UnfitStateError(_cast("the state of a parameter", param, key, state[key].dtype))
        return
    if key == "compensation":
        state[key] = _convert_compensation(param, state[key])
        return
    check(param, state, key, spec, "the state of a parameter")
    _say_converted(to_codes=False)
    values = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    for codes, part in zip(_coded(param, state, key, spec), _pieces(local(values), param, spec), strict=True):
        part.copy_(codes.decode())
    state[key] = values
    del state[SCALES[key]]


def decode_by_whole_scales(param: Any, codes: Any, scales: Tensor) -> Tensor:
    """Return the values of this rank's codes, from the scales of the whole parameter."""
    whole = eight_bits.scales_of_elements(scales.to(local(codes).device), param.shape)
    values = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    local(values).copy_(eight_bits.decode_each(local(codes), part_of(param, whole)))
    return values


def _convert_compensation(param: Tensor, compensation: Tensor) -> Tensor:
    """Return what rounding has lost of a bfloat16 parameter in the other one of its two forms."""
    weight, lost = local(param), local(compensation)
    if lost.dtype == torch.int8:
        rest = eight_bits.join_weight(weight, lost) - weight.float()
        rest = torch.where(lost == -128, rest * (255 / 256), rest)  # half a place: a step might take the neighbour
        other = rest.to(weight.dtype)
    else:
        other = eight_bits.lost_of(weight, weight.float() + lost.float())
    _say_converted(to_codes=other.dtype == torch.int8)
    converted = torch.zeros_like(param, dtype=other.dtype, memory_format=torch.preserve_format)
    local(converted).copy_(other)
    return converted


@functools.cache
def _say_converted(*, to_codes: bool) -> None:
    """Log, once a process and direction, that loaded states change their form."""
    log.warning(f"MARS converts loaded states {'to' if to_codes else 'from'} 8 bits, as state_dtype says.")
