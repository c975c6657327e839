"""One step: build lists, take norms, clip, orthogonalize, update.

`build_lists` looks at every tensor that the step will touch and raises before anything changes. All lists are made anew
in each step: nothing of a former one is trusted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf import rules, states
from mars_hf.distributed.norms import GroupSums
from mars_hf.distributed.tensors import PLAIN, Group, Shard, ShardSpec, local
from mars_hf.kernels import Backend, choose_backend
from mars_hf.metrics import HERE, StepMetrics
from mars_hf.orthogonalize import (
    Exchange,
    Matrix,
    NewtonSchulz,
    compute_directions,
    iteration_dtype,
    newton_schulz_of,
)
from mars_hf.update_rules import UpdateRule

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# Rows of the sums.
GG, GL, LL, CC = range(4)

# Of last gradients: address and version, which change with the values but for writes through `.data`, and norm.
LastNorms = MutableMapping[Tensor, tuple[int, int, float]]


@dataclass
class TensorList:
    """Tensors of one group, device and dtypes that one call of a backend takes: whole parameters or shards.

    Each list has one entry per parameter or shard, or is empty if the rule does not need it. With the factors the
    corrected gradient is c = factor (g + k (g - last)), where g = scale * gradient and last is last_grad.
    """

    group: dict[str, Any]
    rule: UpdateRule
    backend: Backend
    chunk: Any = None  # equal for matrices orthogonalized together; None if the rule does not orthogonalize
    process_group: Group = None  # ranks that hold the other shards; None for whole parameters
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    max_exp_avg_sq: list[Tensor] = field(default_factory=list)
    last_grad: list[Tensor] = field(default_factory=list)
    compensation: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the parameters
    offsets: list[int] = field(default_factory=list)  # where in its parameter each shard begins
    fractions: list[float] = field(default_factory=list)  # each shard's of its parameter
    correction: float = 0.0  # k
    scale: Tensor | None = None  # 0-d; None means 1
    factors: Tensor | None = None  # one per entry; None means 1; set between norms and update
    limits: list[float] = field(default_factory=list)  # largest <g, g> at which c is surely not clipped, if known
    squares: Tensor | None = None  # <g, g> of lists with limits; None before it is known

    def part(self, indices: Sequence[int]) -> TensorList:
        """Return a list of some entries."""
        names = [item.name for item in fields(self) if isinstance(getattr(self, item.name), list)]
        lists: dict[str, Any] = {
            name: [getattr(self, name)[i] for i in indices] for name in names if getattr(self, name)
        }
        return replace(self, **lists, factors=None if self.factors is None else self.factors[indices])


def build_lists(
    param_groups: Sequence[dict[str, Any]],
    update_rules: Sequence[UpdateRule],
    all_states: MutableMapping[Tensor, Any],
    specs: Mapping[Tensor, ShardSpec],
    chunk_of: Mapping[int, Any],
) -> tuple[list[TensorList], list[dict[str, Any]]]:
    """Check every tensor of the step, add missing buffers to states, and sort all by what one call can take.

    Args:
        param_groups: the optimizer's groups.
        update_rules: their update rules.
        all_states: the optimizer's states; those of new parameters are stored if no check fails.
        specs: specs of the sharded tensors.
        chunk_of: the chunk of each matrix to orthogonalize, by its index.

    Returns:
        The lists, and the states of all parameters that have a gradient.

    Raises:
        RuntimeError: a gradient or state that MARS cannot use; nothing has changed then.
    """
    entries = _collect_ordinary(param_groups, update_rules, all_states)
    fits = [(True, True)] * len(entries)
    overlapping: set[int] = set()
    if not entries:
        entries = _collect_any(param_groups, all_states)
        spans: list[tuple[int, int, int]] = []
        fits = [_look(entry.tensors, entry.param_index, spans) for entry in entries]
        overlapping = _overlapping(spans)
    # Groups whose first moments are averages of the gradients, for one gamma.
    averaging = {e.place for e in entries if "last_grad" not in e.keys and update_rules[e.place].corrects}
    for place in averaging:
        gamma, before = param_groups[place]["gamma"], param_groups[place].get("gamma_of_average")
        if before not in (None, gamma):
            raise RuntimeError(
                f"gamma={gamma} after steps with {before}: without clipping the state has no last gradients, which "
                "another gamma needs. Keep gamma, or start the run with clip_threshold=1e30 (keeps last gradients, "
                "never clips)"
            )
    alike: dict[Any, list[tuple[_Entry, Shard | None, bool]]] = {}
    for entry, (dense, grad_fits) in zip(entries, fits, strict=True):
        place, index, param, _, keys, tensors = entry
        spec = specs.get(param) if specs else None
        if index in overlapping:  # updated one by one
            dense = False
        process_group = None if spec is None else spec.group
        kind = (place, tensors[0].device, *[tensor.dtype for tensor in tensors], keys, dense, process_group)
        for shard in (None,) if spec is None else spec.shards:
            # Tensors of ZeRO that nobody located are not at their parameters' indices.
            index = index if shard is None else shard.param_index
            chunk = chunk_of.get(index) if update_rules[place].orthogonalizes else None
            alike.setdefault((*kind, chunk), []).append((entry, shard, grad_fits))
    total = sum(entry.tensors[0].numel() for entry in entries)
    lists = []
    for (place, device, *_, dense, process_group, chunk), parts in alike.items():
        group, rule, first = param_groups[place], update_rules[place], parts[0][0]
        names = ("params", "grads", *first.keys)
        dtypes = {name: tensor.dtype for name, tensor in zip(names, first.tensors, strict=True)}
        if rule.orthogonalizes:  # kernels write first moments
            dtypes["params"] = iteration_dtype(group, first.tensors[0], device)
        backend = choose_backend(group, device, dtypes, rule.arithmetic, total, dense=dense)
        lists.append(TensorList(group, rule, backend, chunk, process_group))
        _fill(lists[-1], parts)
    for entry in entries:
        all_states[entry.param] = entry.state
    for place in averaging:
        param_groups[place]["gamma_of_average"] = float(param_groups[place]["gamma"])
    return lists, [entry.state for entry in entries]


class _Entry(NamedTuple):
    """A parameter with a gradient."""

    place: int  # index of its group
    param_index: int
    param: Tensor
    state: dict[str, Any]
    keys: tuple[str, ...]  # of the buffers that its rule uses
    tensors: list[Tensor]  # parameter, gradient and buffers, as this rank holds them


def _collect_ordinary(
    param_groups: Sequence[dict[str, Any]], update_rules: Sequence[UpdateRule], all_states: Mapping[Tensor, Any]
) -> list[_Entry]:
    """Return the entries of a step like most; empty if any tensor needs the closer look of `_collect_any` and `_look`.

    All tensors are plain, floating point, on one device and contiguous, have the parameters' shapes, and lie apart.
    """
    entries: list[_Entry] = []
    index = -1
    for place, (group, rule) in enumerate(zip(param_groups, update_rules, strict=True)):
        if group["rounding"] == "kahan" or group["amsgrad"]:
            return []
        second_moment = ("exp_avg_sq",) if rule.has_second_moment else ()
        last_grad = ("last_grad",) if rule.corrects else ()
        keys = ("exp_avg", *second_moment, *last_grad)
        needed = {*keys, "step"}
        for param in group["params"]:
            index += 1
            if param.grad is None:
                continue
            state = all_states.get(param)
            if state is None or not state.keys() >= needed or ("last_grad" in state) is not rule.corrects:
                return []
            entries.append(_Entry(place, index, param, state, keys, [param, param.grad, *[state[key] for key in keys]]))
    tensors = [tensor for entry in entries for tensor in entry.tensors]
    steps = [entry.state["step"] for entry in entries]
    if not (set(map(type, tensors)) <= PLAIN and set(map(type, steps)) == {Tensor}):
        return []
    if not {tensor.dtype for tensor in tensors} <= _FLOATS or len({tensor.device for tensor in tensors}) > 1:
        return []
    if {tensor.layout for tensor in tensors} != {torch.strided} or any(map(Tensor.is_neg, tensors)):
        return []
    for entry in entries:
        shapes = [tensor.shape for tensor in entry.tensors]
        if shapes.count(shapes[0]) < len(shapes):
            return []
    if not all(map(Tensor.is_contiguous, tensors)) or {step.shape for step in steps} != {torch.Size()}:
        return []
    starts, sizes = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.element_size, tensors))
    # Apart are spans whose n-th end is not behind the next start, in order.
    ends = sorted(map(operator.add, starts, map(operator.mul, map(Tensor.numel, tensors), sizes)))
    overlap = any(map(operator.gt, ends[:-1], sorted(starts)[1:]))
    return [] if overlap or not all(starts) or any(map(operator.mod, starts, sizes)) else entries


def _collect_any(param_groups: Sequence[dict[str, Any]], all_states: Mapping[Tensor, Any]) -> list[_Entry]:
    """Return the entries of any step, after checks of each gradient and state."""
    entries: list[_Entry] = []
    index = -1
    for place, group in enumerate(param_groups):
        for param in group["params"]:
            index += 1
            if param.grad is None:
                continue
            state = all_states[param] if param in all_states else {}
            check_gradient(param, param.grad)
            keys = states.prepare(param, group, state)
            tensors = [param, param.grad, *[state[key] for key in keys]]
            if type(param) not in PLAIN:
                tensors = [local(tensor.detach()) for tensor in tensors]
            entries.append(_Entry(place, index, param, state, keys, tensors))
    return entries


def _fill(target: TensorList, parts: Sequence[tuple[_Entry, Shard | None, bool]]) -> None:
    """Fill a list with whole tensors or shards; gradients that do not suit its backend are copied."""
    rows = []
    for entry, shard, grad_fits in parts:
        param, grad = entry.tensors[:2]
        if not (grad_fits if target.backend.kernels is not None else not grad.is_neg()):
            # With the parameter's strides; PyTorch loses the neg bit between float16 and float32.
            entry.tensors[1] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        row = entry.tensors
        if shard is not None and shard.numel != param.numel():
            row = [tensor[shard.start : shard.start + shard.numel] for tensor in row]
        rows.append(row)
    columns = list(map(list, zip(*rows, strict=True)))
    for name, column in zip(("params", "grads", *parts[0][0].keys), columns, strict=True):
        setattr(target, name, column)
    target.states = [entry.state for entry, _, _ in parts]
    target.steps = [entry.state["step"] for entry, _, _ in parts]
    target.indices = [entry.param_index if shard is None else shard.param_index for entry, shard, _ in parts]
    target.offsets = [0 if shard is None else shard.slice.offset for _, shard, _ in parts]
    target.fractions = [1.0 if shard is None else shard.numel / shard.whole for _, shard, _ in parts]
    if target.group["maximize"]:
        target.scale = torch.full((), -1.0, device=target.params[0].device)
    if target.last_grad:
        beta1 = float(target.group["betas"][0])
        target.correction = float(target.group["gamma"]) * beta1 / (1 - beta1)


def take_sums(
    lists: Sequence[TensorList], max_grad_norm: float | None, metrics: StepMetrics | None, norms: LastNorms
) -> dict[int, Tensor]:
    """Return the sums over each list that needs norms, by its place: <g, g>, <g, last>, <last, last>, <c, c>.

    Lists of compiled kernels that clip get limits from remembered norms instead: the update sees to the rest.
    """
    folded = max_grad_norm is not None
    sums = {}
    for place, tensors in enumerate(lists):
        group, threshold = tensors.group, tensors.group["clip_threshold"]
        if not folded and (not tensors.rule.corrects or (threshold is None and metrics is None)):
            continue
        remembers = (
            *(tensors.backend.name == "compiled", tensors.process_group is None, group["is_approx"]),
            not any(map(Tensor.is_inference, tensors.last_grad)),  # these have no versions
        )
        if all(remembers) and tensors.last_grad and threshold is not None and (folded or metrics is None):
            last_norms = [
                norm if (address, version) == (last.data_ptr(), last._version) else math.inf
                for last in tensors.last_grad
                for address, version, norm in [norms.get(last, (0, 0, math.inf))]
            ]
            # ‖c‖ <= (1 + k) ‖g‖ + k ‖last‖; the margin is for last gradients that a state has rounded.
            rooms = [min(threshold, 1e150) / 1.01 - tensors.correction * norm for norm in last_norms]
            tensors.limits = [(room / (1 + tensors.correction)) ** 2 if room >= 0 else -1.0 for room in rooms]
        if folded or not tensors.limits:
            needs_last = (threshold is not None or metrics is not None) and not tensors.limits
            sums[place] = tensors.backend.run_sums(
                tensors.grads,
                tensors.last_grad if needs_last else [],
                products=folded or metrics is not None,
                corrected=not folded,
                scale=tensors.scale,
                k=tensors.correction,
            )
    return sums


def set_factors(
    lists: Sequence[TensorList],
    sums: Mapping[int, Tensor],
    whole: GroupSums | None,
    max_grad_norm: float | None,
    metrics: StepMetrics | None,
) -> Tensor | None:
    """Set the scale and the clipping factors of all lists, and return the global norm of the gradients.

    Args:
        lists: the lists of the step.
        sums: from `take_sums`.
        whole: the sums over all ranks, for lists of shards.
        max_grad_norm: largest global norm; None for no scaling, and no norm.
        metrics: receives the sums; None measures nothing.
    """
    norm = global_scale = None
    if max_grad_norm is not None:
        squares = [
            *(rows[GG].sum() for place, rows in sums.items() if lists[place].process_group is None),
            *([] if whole is None else [whole.sum_of_row(GG)]),
        ]
        squares = squares or [torch.zeros((), dtype=torch.float64, device="cpu")]
        norm = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        global_scale = rules.global_scale(norm, max_grad_norm)
    for place, part in sums.items():
        tensors, threshold, k = lists[place], lists[place].group["clip_threshold"], lists[place].correction
        scale = None if global_scale is None else global_scale.to(part.device, part.dtype, non_blocking=True)
        if scale is not None:
            tensors.squares = part[GG] * scale**2 if tensors.limits else None
            tensors.scale = scale if tensors.scale is None else tensors.scale * scale
            if tensors.limits and metrics is not None:  # the factors that the update would find, to the bit
                part, scale = tensors.backend.run_sums(tensors.grads, tensors.last_grad, scale=tensors.scale, k=k), None
                tensors.limits = []
        if tensors.rule.corrects and not tensors.limits:
            rows = part[CC:] if scale is None else part[: LL + 1]
            if tensors.process_group is not None and whole is not None:
                rows = whole.select(tensors.process_group, tensors.indices).to(part)
            square = rows[0] if scale is None else rules.corrected_square(rows, k, scale)
            if metrics is not None:
                if scale is not None:
                    corrected = rules.corrected_square(part, k, scale)
                    part = torch.stack([part[GG] * scale**2, part[GL] * scale, part[LL], corrected])
                group = HERE if tensors.process_group is None else tensors.process_group
                metrics.add(part, square, tensors.fractions, threshold, has_last=bool(tensors.last_grad), group=group)
            if threshold is not None:
                tensors.factors = rules.clip_factors(square, threshold)
    return norm


def update_matrices(
    lists: Sequence[TensorList],
    param_groups: Sequence[Mapping[str, Any]],
    shared: tuple[Exchange, Any] | None,
    metrics: StepMetrics | None,
) -> None:
    """Advance the first moments of a chunk, orthogonalize them and move the parameters; collective if ranks share it.

    Args:
        lists: the lists of the chunk; on this rank there may be none.
        param_groups: the optimizer's groups.
        shared: the exchange and the matrices of a round that ranks share; None for matrices of this rank alone.
        metrics: see `update`.
    """
    momenta: list[Tensor] = []
    settings: list[NewtonSchulz] = []
    for tensors in lists:
        device = tensors.params[0].device if shared is None else shared[0].groups.device
        dtype = iteration_dtype(tensors.group, tensors.params[0], device)
        part = [torch.empty_like(param, dtype=dtype) for param in tensors.params]
        _write(tensors, part, arithmetic="momentum")
        momenta += part
        if shared is None:
            settings += [newton_schulz_of(tensors.group, dtype)] * len(tensors.params)
    if shared is None:
        wide = torch.float64 if lists[0].params[0].dtype == torch.float64 else torch.float32
        directions = compute_directions(momenta, settings, wide)
    else:
        exchange, matrices = shared

        def work(owned: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
            dtype = exchange.groups.dtype
            settings = [newton_schulz_of(param_groups[matrix.group], dtype) for matrix in owned]
            return compute_directions(wholes, settings, dtype)

        indices = [index for tensors in lists for index in tensors.indices]
        results = exchange.run(matrices, dict(zip(indices, momenta, strict=True)), work)
        directions = [results[index].to(momentum.device) for index, momentum in zip(indices, momenta, strict=True)]
    del momenta
    for tensors in lists:
        update(tensors, directions[: len(tensors.params)], metrics)
        del directions[: len(tensors.params)]


def update(tensors: TensorList, directions: list[Tensor] | None = None, metrics: StepMetrics | None = None) -> None:
    """Move the parameters of a list by one step, and keep its gradients as last gradients.

    Args:
        tensors: the list; its steps have been counted.
        directions: one per entry if the rule orthogonalizes; None if not.
        metrics: receives the change, entry by entry, which copies one at a time; None skips it.
    """
    rounding = tensors.group["rounding"] if tensors.params[0].dtype == torch.bfloat16 else "nearest"
    kernel_rounds = rounding == "stochastic" and tensors.backend.kernels is not None and directions is None
    metrics = metrics if tensors.rule.corrects else None
    if metrics is None and (rounding == "nearest" or kernel_rounds):
        _write(tensors, tensors.params, directions, seeded=kernel_rounds)
    else:
        for place, param in enumerate(tensors.params):
            single = tensors.part([place])
            direction = None if directions is None else directions[place : place + 1]
            before = None if metrics is None else param.clone()
            if rounding == "nearest" or kernel_rounds:
                _write(single, [param], direction, seeded=kernel_rounds)
            else:
                _write_rounded(single, direction, rounding)
            if metrics is not None and before is not None:
                dtype = torch.promote_types(single.exp_avg[0].dtype, torch.float32)
                group = HERE if tensors.process_group is None else tensors.process_group
                metrics.add_update(param.to(dtype) - before.to(dtype), group)


def _write_rounded(single: TensorList, direction: list[Tensor] | None, rounding: str) -> None:
    """Update a float32 copy of one entry, then round it into the bfloat16 parameter."""
    (param,) = single.params
    values = param.float()
    if rounding == "kahan":
        values += single.compensation[0]
    _write(single, [values], direction)
    if rounding == "kahan":
        param.copy_(values)
        single.compensation[0].copy_(values - param.float())  # what rounding has lost (Kahan)
    else:
        generator = torch.Generator(param.device).manual_seed(_seeds(single)[0])
        param.copy_(rules.round_stochastically(values, generator))


def _write(
    tensors: TensorList,
    params: list[Tensor],
    directions: list[Tensor] | None = None,
    *,
    arithmetic: str | None = None,
    seeded: bool = False,
) -> None:
    """Write what a list's rule gives into `params`: the moved parameters, or for "momentum" the first moments."""
    group = tensors.group
    if directions is not None:
        rules.apply(params, directions, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))
        return
    options = rules.Options(
        arithmetic=arithmetic or tensors.rule.arithmetic,
        steps=[step.item() for step in tensors.steps],
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        k=tensors.correction,
        scale=tensors.scale,
        factors=tensors.factors,
        nesterov=0.0 if tensors.last_grad or not tensors.rule.corrects else float(group["gamma"]),
        second_moment=group["second_moment"],
        seeds=_seeds(tensors) if seeded else (),
        limits=tensors.limits,
        squares=tensors.squares,
    )
    squares = tensors.backend.run_update(
        *(params, tensors.grads, tensors.exp_avg, tensors.exp_avg_sq, tensors.max_exp_avg_sq, tensors.last_grad),
        options=options,
    )
    if tensors.limits:
        tensors.squares = squares
        pairs = enumerate(zip(squares.tolist(), tensors.limits, strict=True))
        if left := [place for place, (square, limit) in pairs if not square <= limit]:  # c may be clipped
            part = replace(tensors.part(left), limits=[], squares=None)
            sums = part.backend.run_sums(
                part.grads, part.last_grad, products=False, scale=part.scale, k=part.correction
            )
            part.factors = rules.clip_factors(sums[CC], group["clip_threshold"])
            _write(part, [params[place] for place in left], arithmetic=arithmetic, seeded=seeded)


def _seeds(tensors: TensorList) -> list[int]:
    """Return the noise seed of each entry: equal on all ranks that hold it, whatever else its list contains."""
    steps = [int(step.item()) for step in tensors.steps]
    return [rules.noise_seed(*entry) for entry in zip(tensors.indices, steps, tensors.offsets, strict=True)]


def check_gradient(param: Tensor, grad: Tensor) -> None:
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
    if param.is_neg():
        raise RuntimeError(f"a parameter of shape {tuple(shape)} is a negated view; use its .resolve_neg()")
    if 0 in param.stride() and states.is_expanded(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(shape)} is expanded (strides {param.stride()}): its elements share memory "
            "and cannot be updated; use its .clone()"
        )


def _look(tensors: Sequence[Tensor], index: int, spans: list[tuple[int, int, int]]) -> tuple[bool, bool]:
    """Look at the memory of a parameter, its gradient and its states, and add their spans.

    Returns:
        Whether parameter and states suit kernels: values lie in memory, aligned, without gaps, all in the order of the
        parameter; and whether the gradient does too.
    """
    fits = []
    order: list[int] | None = None
    for tensor in tensors:
        has_values = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided
        if not has_values or tensor._is_zerotensor():
            fits.append(False)
            continue
        address, numel, itemsize = tensor.data_ptr(), tensor.numel(), tensor.element_size()
        is_meta = tensor.device.type == "meta"
        if address == 0 and numel and not is_meta:
            what = "gradient" if tensor is tensors[1] else "parameter" if tensor is tensors[0] else "state"
            raise RuntimeError(
                f"the memory of a {what} of shape {tuple(tensor.shape)} has been freed; restore it before step()"
            )
        if order is None and tensor.is_contiguous():
            dense, extent = True, numel
        else:
            if order is None:  # the dimensions from the largest stride to the smallest
                first = tensors[0]
                order = sorted(range(first.ndim), key=lambda dim: -first.stride()[dim])
            dense = tensor.permute(order).is_contiguous()
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in sizes) if numel else 0
        fits.append(dense and not tensor.is_neg() and address % itemsize == 0)
        if extent and not is_meta:
            spans.append((address, address + extent * itemsize, index))
    return all(fits[:1] + fits[2:]), fits[1]


def _overlapping(spans: list[tuple[int, int, int]]) -> set[int]:
    """Return the indices of parameters with a tensor that shares memory with another one of the step."""
    sharing: set[int] = set()
    furthest, owner = 0, -1
    for start, end, index in sorted(spans):
        if start < furthest:
            sharing |= {owner, index}
        if end > furthest:
            furthest, owner = end, index
    return sharing
