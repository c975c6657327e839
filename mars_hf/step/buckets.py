"""Sort the tensors of a step into buckets: lists that one backend call takes.

`plan_buckets` decides which tensors go together; `fill_bucket` picks the current tensors of parameters, `.grad` and
state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mars_hf import _compat
from mars_hf.distributed import dtensors
from mars_hf.distributed.placement import Group, Placement, cut, shares
from mars_hf.kernels import Backend, choose_backend
from mars_hf.param_groups import takes_mars
from mars_hf.step import looks, states

# State key to the bucket's list.
_LISTS = {
    "exp_avg": "exp_avgs",
    "exp_avg_sq": "exp_avg_sqs",
    "max_exp_avg_sq": "max_exp_avg_sqs",
    "last_grad": "last_grads",
    "compensation": "compensations",
}


class Entry(NamedTuple):
    """A parameter with a gradient, as the step sees it."""

    param: Tensor
    state: dict[str, Any]
    group: int  # index of the parameter group
    slot: int  # index among all parameters

    @property
    def gradient(self) -> Tensor:
        """Return the parameter's gradient."""
        assert self.param.grad is not None
        return self.param.grad


@dataclass
class Bucket:
    """Hold pieces of one group's parameters with one device, the same dtypes and one backend.

    A piece is a whole tensor, or one parameter's part of an engine's flat tensor. Each list has one entry per piece, or
    is empty if the rule does not need it.
    """

    group: dict[str, Any]
    backend: Backend
    moves_gradients: bool = False
    chunk: Hashable = None  # equal for matrices orthogonalized together; None if the rule does not orthogonalize
    is_sharded: bool = False  # whether other ranks hold the other pieces of its parameters
    process_group: Group = None  # those ranks
    placements: dict[Tensor, Placement | None] = field(default_factory=dict)  # by the optimizer's tensor; for chunks
    owners: list[Tensor] = field(default_factory=list)  # the optimizer's tensor that each piece belongs to
    owned: list[dict[str, Any]] = field(default_factory=list)  # the states of the owners
    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    last_grads: list[Tensor] = field(default_factory=list)
    compensations: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # each piece's fraction of its parameter
    slots: list[int] = field(default_factory=list)  # the parameters' slots
    starts: list[int] = field(default_factory=list)  # where in its parameter each piece begins

    @property
    def mars(self) -> bool:
        """Return whether the bucket uses the MARS rule; otherwise it uses plain AdamW."""
        return takes_mars(self.group)

    @property
    def k(self) -> float:
        """Return the weight of the correction, gamma beta1 / (1 - beta1); 0 without last gradients."""
        beta1 = float(self.group["betas"][0])
        return float(self.group["gamma"]) * beta1 / (1 - beta1) if self.last_grads else 0.0

    def pieces(self) -> Iterator[Bucket]:
        """Yield buckets of one piece each."""
        lists = [item.name for item in fields(self) if isinstance(getattr(self, item.name), list)]
        for index in range(len(self.params)):
            yield replace(self, **{name: getattr(self, name)[index : index + 1] for name in lists})

    def add_whole(self, entries: Sequence[Entry], keys: Iterable[str], copied: Iterable[int]) -> None:
        """Fill an empty bucket with whole, plain tensors, list by list: faster than `add`, for every step.

        Args:
            entries: parameters with gradients and states; the first ones of the bucket.
            keys: keys of the states that the rule uses.
            copied: indices of entries whose gradients are copied.
        """
        self.params = [entry.param for entry in entries]
        self.owners = self.params
        self.owned = [entry.state for entry in entries]
        self.gradients = [entry.param.grad for entry in entries]  # type: ignore[misc]
        for index in copied:
            self.gradients[index] = _laid_out_like(self.params[index], self.gradients[index])
        for key in keys:
            setattr(self, _LISTS[key], [state[key] for state in self.owned])
        self.steps = [state["step"] for state in self.owned]
        self.slots = [entry.slot for entry in entries]
        self.shares, self.starts = [1.0] * len(entries), [0] * len(entries)
        if self.chunk is not None:
            self.placements = dict.fromkeys(self.params)

    def add(self, entry: Entry, placement: Placement | None, keys: Iterable[str], *, copied: bool = False) -> None:
        """Add the pieces of one of the optimizer's tensors.

        Args:
            entry: the tensor, with its gradient and state.
            placement: placement of its pieces; None for a whole parameter.
            keys: keys of the states that the rule uses.
            copied: whether to copy the gradient, with the parameter's strides.
        """
        param, state = entry.param, entry.state
        here = dtensors.local(param.detach()) if placement is not None or dtensors.is_dtensor(param) else param
        gradient = dtensors.local(entry.gradient)
        if copied:
            gradient = _laid_out_like(here, gradient)
        self.params += cut(here, placement)
        self.gradients += cut(gradient, placement)
        for key in keys:
            getattr(self, _LISTS[key]).extend(cut(dtensors.local(state[key]), placement))
        self.placements[param] = placement
        count = len(self.params) - len(self.steps)
        self.owners += [param] * count
        self.owned += [state] * count
        self.steps += [state["step"]] * count
        self.shares += shares(placement)
        self.slots += [entry.slot] if placement is None else [piece.slot for piece in placement.pieces]
        self.starts += [0] if placement is None else [piece.region.place for piece in placement.pieces]
        if placement is not None:
            self.is_sharded, self.process_group = True, placement.group

    def cut(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Cut tensors shaped like the optimizer's into the pieces of `params`."""
        pieces = []
        for tensor, placement in zip(tensors, self.placements.values(), strict=True):
            pieces += cut(tensor, placement)
        return pieces


@dataclass(frozen=True)
class Recipe:
    """Describe how to fill a bucket: everything but its tensors."""

    group: int
    backend: Backend
    moves: bool
    chunk: Hashable
    keys: tuple[str, ...]  # keys of the states that the rule uses
    places: list[int]  # indices of its parameters among the entries
    copied: set[int]  # places of gradients that do not suit the backend and are copied


def plan_buckets(
    param_groups: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    placements: Mapping[Tensor, Placement],
    chunks: Mapping[Tensor, Hashable] | None = None,
    *,
    take_grad: bool = False,
) -> list[Recipe]:
    """Decide which entries are updated together, and add missing buffers to their states.

    Args:
        param_groups: the optimizer's groups.
        entries: the step's entries.
        placements: placements of the sharded parameters.
        chunks: the chunk of each parameter to orthogonalize, see `Bucket.chunk`; None means none.
        take_grad: `Mars.take_grad`.
    """
    chunks = chunks or {}
    needed = [states.fill(entry.param, param_groups[entry.group], entry.state) for entry in entries]
    shared = _sharing(entries, needed)
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, entry in enumerate(entries):
        group, param, gradient = param_groups[entry.group], entry.param, entry.gradient
        placement = placements.get(param)
        key = (
            *(entry.group, param.device, param.dtype, gradient.dtype),
            tuple(needed[place].items()),
            None if placement is None else (placement.group,),
            take_grad and placement is None and place not in shared and may_move(entry, group),
            place not in shared and _is_dense(entry, needed[place]),
            chunks.get(param),
        )
        found.setdefault(key, []).append(place)
    numel = sum(dtensors.local(entry.param).numel() for entry in entries)
    recipes = []
    for (index, device, dtype, gradient_dtype, needs, _, moves, dense, chunk), places in found.items():
        group = param_groups[index]
        dtypes = [dtype, gradient_dtype, *(of for _, of in needs)]
        backend = choose_backend(group, device, dtypes, numel, dense=dense)
        copied = {place for place in places if not _gradient_fits(entries[place], backend)}
        recipes.append(Recipe(index, backend, moves, chunk, tuple(key for key, _ in needs), places, copied))
    return recipes


def fill_bucket(
    recipe: Recipe,
    param_groups: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    placements: Mapping[Tensor, Placement],
) -> Bucket:
    """Fill a bucket with the current tensors."""
    group = param_groups[recipe.group]
    bucket = Bucket(group, recipe.backend, moves_gradients=recipe.moves, chunk=recipe.chunk)
    own = [entries[place] for place in recipe.places]
    if not placements and all(type(entry.param) in (Tensor, nn.Parameter) for entry in own):
        copied = [index for index, place in enumerate(recipe.places) if place in recipe.copied] if recipe.copied else []
        bucket.add_whole(own, recipe.keys, copied)
    else:
        for place, entry in zip(recipe.places, own, strict=True):
            bucket.add(entry, placements.get(entry.param), recipe.keys, copied=place in recipe.copied)
    return bucket


def entries_of(param_groups: Sequence[Mapping[str, Any]], all_states: Mapping[Tensor, dict[str, Any]]) -> list[Entry]:
    """Return the parameters that have a gradient; one without a state gets a new dict, not stored yet."""
    entries = []
    slot = 0
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            if param.grad is not None:
                state = all_states.get(param)
                entries.append(Entry(param, {} if state is None else state, index, slot))
            slot += 1
    return entries


def may_move(entry: Entry, group: Mapping[str, Any]) -> bool:
    """Return whether the gradient tensor itself may become the last gradient: same look, memory of its own."""
    grad, last = entry.param.grad, entry.state.get("last_grad")
    if not group["is_approx"] or grad is None or last is None:
        return False
    if dtensors.is_dtensor(grad) or grad.requires_grad or _compat.is_view(grad) or not looks.is_plain(grad):
        return False
    owns = grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return owns and grad.dtype == last.dtype and grad.stride() == last.stride()


def _sharing(entries: Sequence[Entry], needed: Sequence[Iterable[str]]) -> set[int]:
    """Return the places of entries that share memory with another tensor of the step: they update one by one."""
    tensors, places = [], []
    for place, (entry, keys) in enumerate(zip(entries, needed, strict=True)):
        own = [entry.param, entry.gradient, *(entry.state[key] for key in keys)]
        tensors += [dtensors.local(tensor) for tensor in own]
        places += [place] * len(own)
    return {places[index] for index in looks.overlapping(tensors)}


def _is_dense(entry: Entry, keys: Iterable[str]) -> bool:
    """Return whether the memory of parameter and states suits kernels; gradients can be copied instead."""
    if "compensation" in entry.state and entry.state["compensation"].dtype != torch.bfloat16:
        return False
    tensors = [dtensors.local(tensor) for tensor in (entry.param, *(entry.state[key] for key in keys))]
    return all(map(looks.is_plain, tensors)) and looks.fill_alike(tensors)


def _laid_out_like(param: Tensor, gradient: Tensor) -> Tensor:
    """Return a copy of the gradient with the parameter's strides."""
    return torch.empty_like(param, dtype=gradient.dtype, memory_format=torch.preserve_format).copy_(gradient)


def _gradient_fits(entry: Entry, backend: Backend) -> bool:
    param, gradient = dtensors.local(entry.param), dtensors.local(entry.gradient)
    if not backend.is_flat:
        return not gradient.is_neg()  # PyTorch loses the neg bit between float16 and float32
    return looks.is_plain(gradient) and looks.fill_alike([param, gradient])
