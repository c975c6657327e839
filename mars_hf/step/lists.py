"""Collect what a step touches, look at every tensor of it, and sort all into lists that one call of a backend takes.

All lists are made anew in each step: nothing of a former one is trusted. Errors are raised before anything changes.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.directions import iteration_dtype
from mars_hf.arithmetic.eight_bits import Coded, Column, tensors_of
from mars_hf.arithmetic.formulas import CODES
from mars_hf.arithmetic.resting import Units
from mars_hf.arithmetic.update_rules import UpdateRule
from mars_hf.distributed.tensors import PLAIN, Group, Shard, ShardSpec, local
from mars_hf.kernels import Backend, choose_backend
from mars_hf.kernels.memory import are_apart, inspect_memory
from mars_hf.step import coded, states

# For maps over many tensors.
_dtype_of, _device_of, _layout_of = map(attrgetter, ("dtype", "device", "layout"))
_shape_of, _grad_of = map(attrgetter, ("shape", "grad"))
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
    steps: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the parameters
    shards: list[Shard | None] = field(default_factory=list)  # None for a whole parameter
    units: list[Units] = field(default_factory=list)  # of rules that orthogonalize: what rests on its own
    correction: float = 0.0  # k
    # Set between collecting and updating:
    sums: Tensor | None = None  # rows of `formulas.sums`; None if the step does not need them
    grad_scale: Tensor | None = None  # 0-d; None means 1
    factors: Tensor | None = None  # one per entry; None means 1
    clip_bounds: list[float] = field(default_factory=list)  # largest <g, g> at which c is surely not clipped, if known
    squares: Tensor | None = None  # <g, g> of lists with bounds; None before it is known
    moving: list[Tensor] = field(default_factory=list)  # flags of their units; see `resting.moving_flags`

    @property
    def last_grad(self) -> list[Tensor]:
        """Return the last gradients, or their codes; empty if none are kept."""
        return tensors_of(self.buffers.get("last_grad", []))

    @property
    def clip_threshold(self) -> float | None:
        """Return the largest norm of a corrected gradient; None for no clipping, and for AdamW."""
        return self.group["clip_threshold"] if self.rule.corrects else None

    def run_sums(self, *, without_last_grads: bool = False, **needed: bool) -> Tensor:
        """Return the sums over each gradient and its last gradient; `needed`: see `formulas.sums`."""
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
        return replace(self, sums=None, squares=None, **selected)


@dataclass
class Batch:
    """Parameters with gradients of one group whose states have the same buffers, and all that their step touches."""

    group: dict[str, Any]
    rule: UpdateRule
    keys: states.BufferKeys
    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    specs: list[ShardSpec | None] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    # As this rank holds them: "params", "grads" and buffers, all of the parameters' shapes.
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    scales: list[list[Tensor]] = field(default_factory=list)  # of each parameter, those of its buffers in 8 bits
    # Whether kernels can take parameter and states; empty if they can take all.
    fits: list[bool] = field(default_factory=list)

    def read(self) -> None:
        """Read steps and tensors from parameters and states."""
        read = itemgetter("step", *self.keys.buffers)
        self.steps, *columns = map(list, zip(*map(read, self.states), strict=True))
        self.tensors = {"params": list(self.params), "grads": list(map(_grad_of, self.params))}
        self.tensors |= zip(self.keys.buffers, columns, strict=True)
        self.scales = [[state[key] for key in self.keys.scales] for state in self.states]

    def scales_of_shards(self, number: int, position: int) -> list[Tensor]:
        """Return scales of the parameter at a position, those of one buffer, for each of its shards."""
        return coded.scales_of_shards(self.params[position], self.scales[position][number], self.specs[position])

    def rows_of_shards(self, position: int) -> list[Tensor]:
        """Return the running means of rows of the parameter at a position, for each of its shards."""
        return states.split_rows(self.params[position], self.group, self.states[position], self.specs[position])


# A parameter of a batch or a shard of it: position in the batch, number of the shard in its spec, and the shard.
Piece = tuple[int, int, Shard | None]


def build_lists(
    param_groups: Sequence[dict[str, Any]],
    rules: Sequence[UpdateRule],
    all_states: MutableMapping[Tensor, Any],
    specs: Mapping[Tensor, ShardSpec],
    chunk_of: Mapping[int, Any],
) -> tuple[list[TensorList], list[Tensor]]:
    """Check every tensor of the step, add missing buffers to states, and sort all by what one call can take.

    Args:
        param_groups: the optimizer's groups.
        rules: their update rules.
        all_states: the optimizer's states; those of new parameters are stored if no check fails.
        specs: specs of the sharded tensors.
        chunk_of: the chunk of each matrix to orthogonalize, by its index.

    Returns:
        The lists, and the step counts of all parameters that have a gradient.

    Raises:
        RuntimeError: a gradient or state that MARS cannot use; nothing has changed then.
    """
    new_states: dict[Tensor, dict[str, Any]] = {}
    batches = _collect(param_groups, rules, all_states, new_states, specs)
    if not _are_ordinary(batches):
        _look_closely(batches)
    # Groups under MARS whose first moments are averages of gradients, for one gamma.
    averaging = [batch.group for batch in batches if batch.rule.corrects and "last_grad" not in batch.keys.buffers]
    for group in averaging:
        _require_same_gamma(group)

    # Of all parameters: released gradients come one by one, and compiling pays for them together.
    every_param = itertools.chain.from_iterable([group["params"] for group in param_groups])
    numel = sum(map(Tensor.numel, every_param))
    lists = []
    for batch in batches:
        for key, pieces in _sort(batch, chunk_of).items():
            lists.append(_make_list(batch, key, pieces, numel))

    all_states.update(new_states)
    for group in averaging:
        group["gamma_of_average"] = float(group["gamma"])
    return lists, list(itertools.chain.from_iterable([batch.steps for batch in batches]))


# --- collect ----------------------------------------------------------------------------------------------------------


def _collect(
    param_groups: Iterable[dict[str, Any]],
    rules: Iterable[UpdateRule],
    all_states: Mapping[Tensor, Any],
    new_states: MutableMapping[Tensor, Any],
    specs: Mapping[Tensor, ShardSpec],
) -> list[Batch]:
    """Return the parameters with gradients; buffers that are missing are made, in new states if there is none."""
    batches: list[Batch] = []
    param_index = -1
    for group, rule in zip(param_groups, rules, strict=True):
        of_group: dict[states.BufferKeys, Batch] = {}
        # By dtype and the keys of a complete state, which in a group decide the batch; in 8 bits the shape does, too.
        known: dict[Any, Batch] = {}
        in_8_bits, orthogonalizes = group["state_dtype"] == eight_bits.NAME, rule.orthogonalizes
        for param in group["params"]:
            param_index += 1
            if param.grad is None:
                continue
            state = all_states.get(param)
            if state is None:
                state = new_states[param] = {}
            spec = specs.get(param) if specs else None
            batch = known.get((param.dtype, *state))
            if batch is None:
                keys = _prepared(param, group, rule, state, spec)
                if keys not in of_group:
                    of_group[keys] = Batch(group, rule, keys)
                batch = of_group[keys]
                if not in_8_bits:
                    complete = (param.dtype, *state)
                    known[complete] = batch
            if orthogonalizes:
                states.prepare_rows(param, group, state, spec)
            batch.params.append(param)
            batch.states.append(state)
            batch.specs.append(spec)
            batch.indices.append(param_index)
        batches += of_group.values()
    for batch in batches:
        batch.read()
    return batches


def _prepared(
    param: Tensor, group: Mapping[str, Any], rule: UpdateRule, state: dict[str, Any], spec: ShardSpec | None
) -> states.BufferKeys:
    """Return the keys of a parameter's buffers; those that its state lacks are added."""
    keys = states.keys_of(rule, param, group, state)
    if not keys.are_in(state):
        check_gradient(param, param.grad)
        states.prepare(param, group, state, keys, spec)
    elif keys.coded:
        states.check_codes(param, state, keys, spec)
    return keys


def _are_ordinary(batches: Sequence[Batch]) -> bool:
    """Return whether a step is like most: one fast test of all tensors, in place of a close look at each.

    They are plain, of the dtypes they should have, on one device, contiguous, of the parameters' shapes, and lie apart.
    """
    columns = [column for batch in batches for column in (*batch.tensors.values(), *batch.scales)]
    tensors = list(itertools.chain.from_iterable(columns))
    if not _are_plain(tensors) or not all(map(_are_counts, [batch.steps for batch in batches])):
        return False
    if not all(map(_are_typed, batches)) or not all(map(_have_one_shape, batches)):
        return False
    return all(map(Tensor.is_contiguous, tensors)) and are_apart(tensors)


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors hold values as they are, on one device."""
    if not set(map(type, tensors)) <= PLAIN or set(map(_layout_of, tensors)) != {torch.strided}:
        return False
    return not any(map(Tensor.is_neg, tensors)) and len(set(map(_device_of, tensors))) == 1


def _are_counts(steps: Sequence[Any]) -> bool:
    return set(map(type, steps)) == {Tensor} and not any(map(Tensor.dim, steps))


def _are_typed(batch: Batch) -> bool:
    """Return whether tensors have the dtypes that they should have: buffers that should be in 8 bits, and no others."""
    for name, column in batch.tensors.items():
        expected = {CODES[name]} if name in batch.keys.coded else _FLOATS
        if not set(map(_dtype_of, column)) <= expected:
            return False
    return not batch.keys.scales or all(map(_scales_fit, batch.params, batch.specs, batch.scales))


def _scales_fit(param: Tensor, spec: ShardSpec | None, scales: Iterable[Tensor]) -> bool:
    """Return whether scales are those of codes in rows that kernels take."""
    shape = coded.shape_of_scales(param, spec)
    has_scales = all(each.shape == shape and each.dtype == torch.float32 for each in scales)
    return has_scales and eight_bits.has_whole_blocks(param.shape, shape)


def _have_one_shape(batch: Batch) -> bool:
    """Return whether gradients and buffers have the shapes of their parameters."""
    shapes = list(map(_shape_of, batch.params))
    return all(list(map(_shape_of, column)) == shapes for name, column in batch.tensors.items() if name != "params")


def _look_closely(batches: Iterable[Batch]) -> None:
    """Check gradients, states and memory of batches one by one, and find what kernels cannot take."""
    for batch in batches:
        for param, state, spec in zip(batch.params, batch.states, batch.specs, strict=True):
            check_gradient(param, param.grad)
            states.prepare(param, batch.group, state, batch.keys, spec)
        batch.read()
        for column in (*batch.tensors.values(), *batch.scales):
            column[:] = [tensor if type(tensor) in PLAIN else local(tensor.detach()) for tensor in column]
    rows = [row for batch in batches for row in zip(*batch.tensors.values(), strict=True)]
    scales = list(itertools.chain.from_iterable([batch.scales for batch in batches]))
    state_fits, grad_fits = inspect_memory(rows, scales)
    first = 0
    for batch in batches:
        params, grads = batch.tensors["params"], batch.tensors["grads"]
        batch.fits = state_fits[first : first + len(params)]
        for position, fits in enumerate(grad_fits[first : first + len(params)]):
            if not fits:  # plain PyTorch takes the copy too; it has the parameter's strides
                grads[position] = torch.empty_like(params[position], dtype=grads[position].dtype).copy_(grads[position])
        first += len(params)


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


def _sort(batch: Batch, chunk_of: Mapping[int, Any]) -> dict[Any, list[Piece]]:
    """Sort the whole parameters and shards of a batch by what the entries of a list have in common.

    That is device, whether kernels can take them, and dtypes; the process group; and the chunk.
    """
    pieces: dict[Any, list[Piece]] = collections.defaultdict(list)
    if not batch.rule.orthogonalizes:
        chunk_of = {}  # a tensor of ZeRO that holds several parameters may be at the index of a matrix
    dtypes = [map(_dtype_of, column) for column in batch.tensors.values()]
    fits = batch.fits or itertools.repeat(True)
    forms = zip(map(_device_of, batch.tensors["params"]), fits, *dtypes, strict=False)
    for position, (form, spec, index) in enumerate(zip(forms, batch.specs, batch.indices, strict=True)):
        if spec is None:
            pieces[form, None, chunk_of.get(index)].append((position, 0, None))
            continue
        for number, shard in enumerate(spec.shards):  # tensors of ZeRO that hold several parameters
            pieces[form, spec.group, chunk_of.get(shard.param_index)].append((position, number, shard))
    return pieces


def _make_list(batch: Batch, key: Any, pieces: Sequence[Piece], numel: int) -> TensorList:
    """Choose a backend for some pieces of a batch, and put their tensors into columns."""
    (device, fits, *dtypes), process_group, chunk = key
    group, rule = batch.group, batch.rule
    dtype_of = dict(zip(batch.tensors, dtypes, strict=True))
    if rule.orthogonalizes:  # kernels write first moments, and round no parameters
        dtype_of["params"] = iteration_dtype(group, batch.tensors["params"][pieces[0][0]], device)
        dtype_of.pop("compensation", None)
    backend = choose_backend(group, device, dtype_of, rule.arithmetic, numel, dense=fits)
    columns = {name: _cut(column, pieces) for name, column in batch.tensors.items()}
    tensors = TensorList(group, rule, backend, chunk, process_group)
    tensors.params, tensors.grads = columns.pop("params"), columns.pop("grads")
    tensors.compensation = columns.pop("compensation", [])
    tensors.buffers = {**columns, **_coded_columns(batch, columns, pieces)}
    tensors.steps = [batch.steps[position] for position, _, _ in pieces]
    tensors.shards = [shard for _, _, shard in pieces]
    indices = batch.indices
    tensors.indices = [indices[position] if shard is None else shard.param_index for position, _, shard in pieces]
    if rule.orthogonalizes:
        tensors.row_avg_sq = _of_shards(pieces, batch.rows_of_shards)
        tensors.units = [_units_in(*pair, group) for pair in zip(tensors.params, tensors.shards, strict=True)]
    if group["maximize"]:
        tensors.grad_scale = torch.full((), -1.0, device=device)
    if tensors.last_grad:
        beta1 = float(group["betas"][0])
        tensors.correction = float(group["gamma"]) * beta1 / (1 - beta1)
    return tensors


def _cut(column: Sequence[Tensor], pieces: Iterable[Piece]) -> list[Tensor]:
    """Return the pieces of a batch's tensors."""
    return [column[position] if shard is None else _held(column[position], shard) for position, _, shard in pieces]


def _held(tensor: Tensor, shard: Shard) -> Tensor:
    """Return what a tensor has of a shard; all of it keeps its shape."""
    return tensor if shard.numel == tensor.numel() else tensor[shard.start : shard.start + shard.numel]


def _coded_columns(batch: Batch, columns: Mapping[str, list[Tensor]], pieces: Sequence[Piece]) -> dict[str, Column]:
    """Return the columns of codes with their scales."""
    coded_columns: dict[str, Column] = {}
    for number, name in enumerate(batch.keys.with_scales):
        scales = _of_shards(pieces, functools.partial(batch.scales_of_shards, number))
        coded_columns[name] = list(map(Coded, columns[name], scales))
    return coded_columns


def _of_shards(pieces: Sequence[Piece], split: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
    """Return what each piece has of what a function returns for all shards of the parameter at a position."""
    positions = dict.fromkeys([position for position, _, _ in pieces])
    found = {position: split(position) for position in positions}
    return [found[position][number] for position, number, _ in pieces]


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
