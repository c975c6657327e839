"""Collect what a step touches, look at every tensor of it, and sort all into lists that one call of a backend takes.

All lists are made anew in each step: nothing of a former one is trusted. Errors are raised before anything changes.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.directions import iteration_dtype
from mars_hf.arithmetic.eight_bits import Coded, Column, tensors_of
from mars_hf.arithmetic.resting import Units
from mars_hf.arithmetic.rules import CODES
from mars_hf.arithmetic.update_rules import UpdateRule
from mars_hf.distributed.tensors import PLAIN, Group, Shard, ShardSpec, local
from mars_hf.kernels import Backend, choose_backend
from mars_hf.kernels.memory import Memory, are_apart, inspect_memory
from mars_hf.step import coded, states

_NO_ROWS = torch.empty(0, device="cpu")
# For maps over many tensors.
_dtype_of, _device_of, _layout_of, _shape_of = map(attrgetter, ("dtype", "device", "layout", "shape"))
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass
class TensorList:
    """Tensors of one group, device and dtypes that one call of a backend takes: whole parameters or shards.

    Each list has one entry per parameter or shard, or is empty if the rule does not need it. With the factors the
    corrected gradient is c = factor (g + k (g - last)), where g = grad_scale * gradient and last is last_grad.
    """

    group: dict[str, Any]
    rule: UpdateRule
    backend: Backend
    chunk: Any = None  # equal for matrices orthogonalized together; None if the rule does not orthogonalize
    process_group: Group = None  # ranks that hold the other shards; None for whole parameters
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Column] = field(default_factory=dict)  # by their keys in states; in 8 bits with their scales
    compensation: list[Tensor] = field(default_factory=list)
    row_avg_sq: list[Tensor] = field(default_factory=list)  # of whole matrices; empty tensors where rows are left
    states: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the parameters
    offsets: list[int] = field(default_factory=list)  # where in its parameter each shard begins
    fractions: list[float] = field(default_factory=list)  # each shard's of its parameter
    units: list[Units] = field(default_factory=list)  # of rules that orthogonalize: what rests on its own
    correction: float = 0.0  # k
    # Set between collecting and updating:
    sums: Tensor | None = None  # rows of `rules.sums`; None if the step does not need them
    grad_scale: Tensor | None = None  # 0-d; None means 1
    factors: Tensor | None = None  # one per entry; None means 1
    clip_bounds: list[float] = field(default_factory=list)  # largest <g, g> at which c is surely not clipped, if known
    squares: Tensor | None = None  # <g, g> of lists with bounds; None before it is known
    moving: list[Tensor] = field(default_factory=list)  # flags of their units; see `resting.find_moving`

    @property
    def last_grad(self) -> list[Tensor]:
        """Return the last gradients, or their codes; empty if none are kept."""
        return tensors_of(self.buffers.get("last_grad", []))

    @property
    def clip_threshold(self) -> float | None:
        """Return the largest norm of a corrected gradient; None for no clipping, and for AdamW."""
        return self.group["clip_threshold"] if self.rule.corrects else None

    def run_sums(self, *, without_last_grads: bool = False, **needed: bool) -> Tensor:
        """Return the sums over each gradient and its last gradient; `needed`: see `rules.sums`."""
        last_grads = [] if without_last_grads else self.buffers.get("last_grad", [])
        return self.backend.run_sums(self.grads, last_grads, grad_scale=self.grad_scale, k=self.correction, **needed)

    def select(self, positions: Sequence[int]) -> TensorList:
        """Return a list of some entries, without sums."""
        selected: dict[str, Any] = {}
        for item in fields(self):
            column = getattr(self, item.name)
            if isinstance(column, list) and column:
                selected[item.name] = [column[position] for position in positions]
        columns = self.buffers.items()
        selected["buffers"] = {name: [column[position] for position in positions] for name, column in columns}
        if self.factors is not None:
            selected["factors"] = self.factors[positions]
        return replace(self, sums=None, **selected)


class Entry(NamedTuple):
    """A parameter with a gradient, and all that its step touches."""

    group_index: int
    param_index: int
    param: Tensor
    state: dict[str, Any]
    buffers: states.Buffers  # of the state, that its rule uses
    tensors: list[Tensor]  # parameter, gradient and buffers, as this rank holds them
    scales: list[Tensor]  # of the buffers in 8 bits
    spec: ShardSpec | None


class _Key(NamedTuple):
    """What the members of a list have in common."""

    group_index: int
    device: torch.device
    buffers: states.Buffers
    dtypes: tuple[torch.dtype, ...]  # of parameter, gradient and buffers
    state_fits: bool  # kernels can take parameters and states
    process_group: Group
    chunk: Any


class _Member(NamedTuple):
    """A whole parameter or a shard of one, to go into a list."""

    entry: Entry
    shard: Shard | None
    scales: list[Tensor]  # of its buffers in 8 bits
    rows: Tensor  # running means of its rows; empty if they are left
    grad_fits: bool


def build_lists(
    param_groups: Sequence[dict[str, Any]],
    rules: Sequence[UpdateRule],
    all_states: MutableMapping[Tensor, Any],
    specs: Mapping[Tensor, ShardSpec],
    chunk_of: Mapping[int, Any],
) -> tuple[list[TensorList], list[dict[str, Any]]]:
    """Check every tensor of the step, add missing buffers to states, and sort all by what one call can take.

    Args:
        param_groups: the optimizer's groups.
        rules: their update rules.
        all_states: the optimizer's states; those of new parameters are stored if no check fails.
        specs: specs of the sharded tensors.
        chunk_of: the chunk of each matrix to orthogonalize, by its index.

    Returns:
        The lists, and the states of all parameters that have a gradient.

    Raises:
        RuntimeError: a gradient or state that MARS cannot use; nothing has changed then.
    """
    entries = _collect(param_groups, rules, all_states, specs)
    if _are_ordinary(entries):
        memories = [Memory(state_fits=True, grad_fits=True)] * len(entries)
    else:
        entries = [_checked(entry, param_groups[entry.group_index]) for entry in entries]
        memories = inspect_memory([entry.tensors for entry in entries], [entry.scales for entry in entries])
    averaging = _averaging_groups(entries, param_groups, rules)
    for group in averaging:
        _require_same_gamma(group)

    # Of all parameters: released gradients come one by one, and compiling pays for them together.
    numel = sum(param.numel() for group in param_groups for param in group["params"])
    lists = []
    for key, members in _sort(entries, memories, param_groups, rules, chunk_of).items():
        group, rule = param_groups[key.group_index], rules[key.group_index]
        lists.append(_make_list(key, members, group, rule, numel))

    for entry in entries:
        all_states[entry.param] = entry.state
    for group in averaging:
        group["gamma_of_average"] = float(group["gamma"])
    return lists, [entry.state for entry in entries]


def _averaging_groups(
    entries: Sequence[Entry], param_groups: Sequence[dict[str, Any]], rules: Sequence[UpdateRule]
) -> list[dict[str, Any]]:
    """Return the groups under MARS whose first moments are averages of gradients, for one gamma."""
    without_last_grads = {entry.group_index for entry in entries if "last_grad" not in entry.buffers.keys}
    return [param_groups[index] for index in without_last_grads if rules[index].corrects]


# --- collect ----------------------------------------------------------------------------------------------------------


def _collect(
    param_groups: Iterable[dict[str, Any]],
    rules: Iterable[UpdateRule],
    all_states: Mapping[Tensor, Any],
    specs: Mapping[Tensor, ShardSpec],
) -> list[Entry]:
    """Return the parameters with gradients, and for those that lack buffers new ones."""
    entries = []
    param_index = -1
    for group_index, (group, rule) in enumerate(zip(param_groups, rules, strict=True)):
        buffers_of: dict[Any, states.Buffers] = {}  # by what decides them in a group; in 8 bits the shape does, too
        in_8_bits = group["state_dtype"] == eight_bits.NAME
        for param in group["params"]:
            param_index += 1
            if param.grad is None:
                continue
            state = all_states.get(param, {})
            kind = (param.dtype, "last_grad" in state)
            if in_8_bits or kind not in buffers_of:
                buffers_of[kind] = states.buffers_of(rule, param, group, state)
            buffers = buffers_of[kind]
            spec = specs.get(param) if specs else None
            if not buffers.are_in(state):
                check_gradient(param, param.grad)
                states.prepare(param, group, state, buffers, spec)
            elif buffers.coded:
                states.check_codes(param, state, buffers, spec)
            if rule.orthogonalizes:
                states.prepare_rows(param, group, state, spec)
            tensors = [param, param.grad, *[state[key] for key in buffers.keys]]
            scales = [state[key] for key in buffers.scales]
            entries.append(Entry(group_index, param_index, param, state, buffers, tensors, scales, spec))
    return entries


def _are_ordinary(entries: Sequence[Entry]) -> bool:
    """Return whether a step is like most: one fast test of all tensors, in place of a close look at each.

    They are plain, of the dtypes they should have, on one device, contiguous, of the parameters' shapes, and lie apart.
    """
    tensors = list(itertools.chain.from_iterable([entry.tensors for entry in entries]))
    scales = list(itertools.chain.from_iterable([entry.scales for entry in entries]))
    if not _are_plain([*tensors, *scales]) or not _are_counts([entry.state["step"] for entry in entries]):
        return False
    if not _are_typed(entries, tensors) or not _have_one_shape(entries, tensors):
        return False
    tensors += scales
    return all(map(Tensor.is_contiguous, tensors)) and are_apart(tensors)


def _are_typed(entries: Sequence[Entry], tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have the dtypes that they should have."""
    if any([entry.buffers.coded for entry in entries]):
        return all(map(_is_coded_as_it_should, entries))
    return set(map(_dtype_of, tensors)) <= _FLOATS


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors hold values as they are, on one device."""
    if not set(map(type, tensors)) <= PLAIN or set(map(_layout_of, tensors)) != {torch.strided}:
        return False
    return not any(map(Tensor.is_neg, tensors)) and len(set(map(_device_of, tensors))) == 1


def _are_counts(steps: Sequence[Any]) -> bool:
    return set(map(type, steps)) == {Tensor} and not any(map(Tensor.dim, steps))


def _have_one_shape(entries: Sequence[Entry], tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors of each entry have the shape of its parameter."""
    expected: list[torch.Size] = []
    for entry in entries:
        expected += [entry.param.shape] * len(entry.tensors)
    return list(map(_shape_of, tensors)) == expected


def _is_coded_as_it_should(entry: Entry) -> bool:
    """Return whether the buffers that should be in 8 bits are, in rows that kernels take, and no other tensor is."""
    of_parameter_and_gradient = ("", "")
    names = (*of_parameter_and_gradient, *entry.buffers.keys)
    for name, tensor in zip(names, entry.tensors, strict=True):
        fits = tensor.dtype == CODES[name] if name in entry.buffers.coded else tensor.dtype in _FLOATS
        if not fits:
            return False
    if not entry.scales:
        return True
    shape = coded.shape_of_scales(entry.param, entry.spec)
    has_scales = all(scales.shape == shape and scales.dtype == torch.float32 for scales in entry.scales)
    return has_scales and eight_bits.has_whole_blocks(entry.tensors[0].shape, shape)


def _checked(entry: Entry, group: Mapping[str, Any]) -> Entry:
    """Check gradient and state of an entry, and return it with what this rank holds of its tensors."""
    param, state = entry.param, entry.state
    check_gradient(param, param.grad)
    states.prepare(param, group, state, entry.buffers, entry.spec)
    tensors = [param, param.grad, *[state[key] for key in entry.buffers.keys]]
    scales = [state[key] for key in entry.buffers.scales]
    if type(param) not in PLAIN:
        tensors = [local(tensor.detach()) for tensor in tensors]
        scales = [local(tensor) for tensor in scales]
    return entry._replace(tensors=tensors, scales=scales)


def check_gradient(param: Tensor, grad: Any) -> None:
    """Raise RuntimeError for a parameter or gradient that MARS cannot use."""
    shape = param.shape
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"gradient of layout {grad.layout} for a parameter of shape {tuple(shape)}: MARS takes dense "
            "(torch.strided) gradients only; build the embedding with sparse=False"
        )
    if not {grad.dtype, param.dtype} <= _FLOATS:
        raise RuntimeError(
            f"gradient of dtype {grad.dtype} for a parameter of shape {tuple(shape)} and dtype {param.dtype}: MARS "
            "takes float16, bfloat16, float32 and float64 only"
        )
    if grad.shape != shape or grad.device != param.device:
        raise RuntimeError(
            f"gradient of shape {tuple(grad.shape)} on {grad.device} for a parameter of shape {tuple(shape)} on "
            f"{param.device}: the parameter has been changed since backward(); compute the gradient again"
        )


def _require_same_gamma(group: Mapping[str, Any]) -> None:
    """Raise RuntimeError if gamma has changed in a group whose first moments are averages, for one gamma."""
    gamma, before = group["gamma"], group.get("gamma_of_average")
    if before not in (None, gamma):
        raise RuntimeError(
            f"gamma={gamma} after steps with {before}: without clipping the state has no last gradients, which "
            "another gamma needs. Keep gamma, or start the run with clip_threshold=1e30 (keeps last gradients, "
            "never clips)"
        )


# --- sort -------------------------------------------------------------------------------------------------------------


def _sort(
    entries: Sequence[Entry],
    memories: Sequence[Memory],
    param_groups: Sequence[Mapping[str, Any]],
    rules: Sequence[UpdateRule],
    chunk_of: Mapping[int, Any],
) -> dict[_Key, list[_Member]]:
    """Sort whole parameters and shards by what the members of a list have in common."""
    members: dict[_Key, list[_Member]] = collections.defaultdict(list)
    orthogonalizes = [rule.orthogonalizes for rule in rules]
    for entry, memory in zip(entries, memories, strict=True):
        spec = entry.spec
        shards: Sequence[Shard | None] = (None,) if spec is None else spec.shards
        scales_of_shards = [entry.scales] if spec is None else _scales_of_shards(entry, len(shards))
        rows_of_shards = [_NO_ROWS] * len(shards)
        if orthogonalizes[entry.group_index]:
            rows_of_shards = states.split_rows(entry.param, param_groups[entry.group_index], entry.state, spec)
        for shard, scales, rows in zip(shards, scales_of_shards, rows_of_shards, strict=True):
            chunk = chunk_of.get(_param_index(entry, shard)) if orthogonalizes[entry.group_index] else None
            key = _Key(
                entry.group_index,
                entry.tensors[0].device,
                entry.buffers,
                tuple(map(_dtype_of, entry.tensors)),
                memory.state_fits,
                None if spec is None else spec.group,
                chunk,
            )
            members[key].append(_Member(entry, shard, scales, rows, memory.grad_fits))
    return members


def _scales_of_shards(entry: Entry, count: int) -> list[list[Tensor]]:
    """Return the scales of the buffers in 8 bits, for each shard."""
    if not entry.scales:
        return [[]] * count
    columns = [coded.scales_of_shards(entry.param, scales, entry.spec) for scales in entry.scales]
    return [list(row) for row in zip(*columns, strict=True)]


def _param_index(entry: Entry, shard: Shard | None) -> int:
    """Return the index of the parameter: tensors of ZeRO that hold several are not at theirs."""
    return entry.param_index if shard is None else shard.param_index


def _make_list(
    key: _Key, members: Sequence[_Member], group: dict[str, Any], rule: UpdateRule, numel: int
) -> TensorList:
    """Choose a backend for some members, and put their tensors into columns."""
    dtypes = dict(zip(("params", "grads", *key.buffers.keys), key.dtypes, strict=True))
    if rule.orthogonalizes:  # kernels write first moments, and round no parameters
        dtypes["params"] = iteration_dtype(group, members[0].entry.tensors[0], key.device)
        dtypes.pop("compensation", None)
    backend = choose_backend(group, key.device, dtypes, rule.arithmetic, numel, dense=key.state_fits)
    params, grads, *columns = map(list, zip(*map(_held_by, members), strict=True))
    tensors = TensorList(group, rule, backend, key.chunk, key.process_group, params, grads)
    buffers = dict(zip(key.buffers.keys, columns, strict=True))
    tensors.compensation = buffers.pop("compensation", [])
    tensors.buffers = {**buffers, **_coded_columns(key.buffers, buffers, members)}
    for entry, shard, *_ in members:
        tensors.states.append(entry.state)
        tensors.steps.append(entry.state["step"])
        tensors.indices.append(_param_index(entry, shard))
        tensors.offsets.append(0 if shard is None else shard.slice.offset)
        tensors.fractions.append(1.0 if shard is None else shard.numel / shard.whole_numel)
    if rule.orthogonalizes:
        tensors.row_avg_sq = [member.rows for member in members]
        tensors.units = [_units_in(param, member.shard, group) for param, member in zip(params, members, strict=True)]
    if group["maximize"]:
        tensors.grad_scale = torch.full((), -1.0, device=key.device)
    if tensors.last_grad:
        beta1 = float(group["betas"][0])
        tensors.correction = float(group["gamma"]) * beta1 / (1 - beta1)
    return tensors


def _coded_columns(
    buffers: states.Buffers, columns: Mapping[str, Sequence[Tensor]], members: Sequence[_Member]
) -> dict[str, Column]:
    """Return the columns of codes with their scales."""
    rows = zip(*[member.scales for member in members], strict=True)
    return {key: list(map(Coded, columns[key], scales)) for key, scales in zip(buffers.with_scales, rows, strict=True)}


def _units_in(param: Tensor, shard: Shard | None, group: Mapping[str, Any]) -> Units:
    """Return what of a tensor rests on its own: all of it, or each expert of a stack."""
    layout, shape = group["layout"], param.shape if shard is None else shard.shape
    is_stack = len(shape) == 3 if layout is None else layout["batched"]
    if not is_stack:
        return Units([0])
    if shard is None:
        return Units(range(len(param)))
    if shard.slice.dim is not None:
        return Units(shard.slice.first_indices(shape[0]))
    return Units(range(shape[0]), shape[1:].numel(), shard.slice.start)


def _held_by(member: _Member) -> list[Tensor]:
    """Return parameter, gradient and buffers of a member; a gradient that does not suit kernels as a copy."""
    (param, grad, *buffers), shard = member.entry.tensors, member.shard
    if not member.grad_fits:  # whoever computes
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)  # with the parameter's strides
    tensors = [param, grad, *buffers]
    if shard is None or shard.numel == param.numel():
        return tensors
    return [tensor[shard.start : shard.start + shard.numel] for tensor in tensors]
