"""What is updated together: the tensors of a step, sorted into lists that one call of an engine works on.

`sort` decides which tensors go together. `Order` keeps that decision, as places in the step's list of entries. `make`
picks the tensors. Sorting some hundred tensors takes milliseconds, as long as a GPU needs for the update itself, so a
step uses the order of the step before if all its tensors look the same. An order holds no tensor: a step takes those
that the parameters, their `.grad` and the state have at that moment.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mars_hf.arithmetic import backends as engines
from mars_hf.arithmetic import bf16_rounding as rounding
from mars_hf.arithmetic import rules
from mars_hf.distributed import dtensors
from mars_hf.distributed.placement import Group, Placement, cut, shares
from mars_hf.groups.roles import rule_of, takes_mars
from mars_hf.groups.settings import STRUCTURAL_KEYS
from mars_hf.step import looks, states
from mars_hf.step.directions import iteration_dtype

# The list of a batch that each state is in.
_LISTS = {
    "exp_avg": "exp_avgs",
    "exp_avg_sq": "exp_avg_sqs",
    "max_exp_avg_sq": "max_exp_avg_sqs",
    "last_grad": "last_grads",
    "compensation": "compensations",
}


class Entry(NamedTuple):
    """A parameter of the step: it has a gradient."""

    param: Tensor
    state: dict[str, Any]
    group: int  # its place among the optimizer's groups
    slot: int  # its place among all parameters

    @property
    def gradient(self) -> Tensor:
        """The parameter's gradient."""
        assert self.param.grad is not None
        return self.param.grad


@dataclass
class Batch:
    """Pieces of parameters of one group that live on one device, share their dtypes and go to one engine.

    A piece is a whole tensor, or the stretch of an engine's flat tensor that belongs to one parameter. All lists have
    one entry a piece, or are empty where the rule needs none.
    """

    group: dict[str, Any]
    engine: engines.Engine
    moves_gradients: bool = False
    chunk: Hashable = None  # equal for batches whose matrices are orthogonalized together; None for no such rule
    is_sharded: bool = False  # whether the other pieces of its parameters are on other ranks
    process_group: Group = None  # of those ranks
    clips: bool = False  # in the update itself, so that no factors are needed
    placements: dict[Tensor, Placement | None] = field(default_factory=dict)  # of the optimizer's tensors, for a chunk
    owners: list[Tensor] = field(default_factory=list)  # the optimizer's tensor that a piece is of
    owned: list[dict[str, Any]] = field(default_factory=list)  # their states
    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    last_grads: list[Tensor] = field(default_factory=list)
    compensations: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    directions: list[Tensor] = field(default_factory=list)  # only while the batch is updated
    shares: list[float] = field(default_factory=list)  # how much of its parameter a piece is
    slots: list[int] = field(default_factory=list)  # of the parameters
    starts: list[int] = field(default_factory=list)  # where in its parameter a piece begins
    scale: Tensor | None = None  # of the gradients, 0-d
    last_scales: Tensor | None = None  # of the last gradients, one a piece
    factors: Tensor | None = None  # of the corrected gradients, one a piece

    @property
    def mars(self) -> bool:
        """Whether these take the MARS rule; plain AdamW otherwise."""
        return takes_mars(self.group)

    @property
    def k(self) -> float:
        """Weight of the correction."""
        beta1 = float(self.group["betas"][0])
        return float(self.group["gamma"]) * beta1 / (1 - beta1) if self.last_grads else 0.0

    @property
    def correction(self) -> dict[str, Any]:
        """How g, last and c are made, as `rules.sums` takes it."""
        return {"scale": self.scale, "last_scales": self.last_scales, "k": self.k}

    def __iter__(self) -> Iterator[Batch]:
        """Batches of one piece each."""
        lists = [item.name for item in fields(self) if isinstance(getattr(self, item.name), list)]
        for index in range(len(self.params)):
            one = slice(index, index + 1)
            own: dict[str, Any] = {name: getattr(self, name)[one] for name in lists}
            for name in ("factors", "last_scales"):
                own[name] = None if getattr(self, name) is None else getattr(self, name)[one]
            yield replace(self, **own)

    def update(self) -> None:
        """Move the parameters by one step; `steps` have been counted, and directions taken where the rule has any."""
        how = self.group["rounding"] if self.params[0].dtype == torch.bfloat16 else "nearest"
        if how == "nearest":
            self._move(self.params)
        elif self.engine.rounds and self.chunk is None:
            self._move(self.params, **({"seeds": self._seeds()} if how == "stochastic" else self._compensated()))
        else:
            for piece in self:
                piece._update_and_round()

    def momenta(self) -> list[Tensor]:
        """Take the first moments a step further.

        Returns:
            m of each of the optimizer's tensors, of its shape and strides, in the dtype of Newton-Schulz.
        """
        here = [dtensors.local(owner.detach()) for owner in self.placements]
        momenta = [torch.empty_like(tensor, dtype=iteration_dtype(self.group, tensor)) for tensor in here]
        self._update(self._cut(momenta), "momentum")
        return momenta

    def take_directions(self, found: Iterable[Tensor]) -> None:
        """Keep directions for the update: one for each of `momenta`, of its shape and strides."""
        self.directions = self._cut(found)

    def add_whole(self, entries: Sequence[Entry], keys: Iterable[str], copied: Iterable[int]) -> None:
        """Do what `add` does for each of these, all of them whole and plain, list by list: it is done at every step.

        Args:
            entries: the tensors, with their gradients and states; the first ones of the batch.
            keys: of the states that the rule takes.
            copied: places of those whose gradients are taken as copies.
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
            placement: where its pieces belong; None for a whole parameter.
            keys: of the states that the rule takes.
            copied: whether the gradient is taken as a copy laid out like the parameter.
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
        self.starts += [0] if placement is None else [piece.region.start for piece in placement.pieces]
        if placement is not None:
            self.is_sharded, self.process_group = True, placement.group

    def _cut(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Pieces, as `params` has them, of tensors like the optimizer's."""
        pieces = []
        for tensor, placement in zip(tensors, self.placements.values(), strict=True):
            pieces += cut(tensor, placement)
        return pieces

    def _move(self, params: list[Tensor], **how: Any) -> None:
        group = self.group
        if self.chunk is None:
            self._update(params, "lion" if rule_of(group) == "mars-lion" else "adamw", **how)
        else:
            settings = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
            rules.apply(params, self.directions, **settings, foreach=self.engine.foreach)

    def _update(self, params: list[Tensor], rule: str, **how: Any) -> None:
        group = self.group
        if self.clips:
            how["clip_threshold"] = float(group["clip_threshold"])
        self.engine.update(
            *(params, self.gradients, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.last_grads),
            rule=rule,
            steps=self.steps,
            lr=group["lr"],
            factors=self.factors,
            blend=0.0 if self.last_grads or not self.mars else float(group["gamma"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            second_moment=group["second_moment"],
            keep_last=group["is_approx"] and not self.moves_gradients,
            **self.correction,
            **how,
        )

    def _compensated(self) -> dict[str, Any]:
        return {"compensations": self.compensations}

    def _seeds(self) -> list[int]:
        """Of the noise of each piece: alike on all ranks that hold it, and whatever it is updated with."""
        steps = [int(step.item()) for step in self.steps]
        return [rounding.seed(*own) for own in zip(self.slots, steps, self.starts, strict=True)]

    def _update_and_round(self) -> None:
        """One piece, updated in float32; as its parameter's neighbours hold values that bfloat16 cannot."""
        (param,) = self.params
        values = param.float()
        if self.compensations:
            values += self.compensations[0]
        self._move([values])
        if self.compensations:
            param.copy_(rounding.kahan(values, self.compensations[0]))
        else:
            (seed,) = self._seeds()
            param.copy_(rounding.stochastic(values, torch.Generator(param.device).manual_seed(seed)))


@dataclass(frozen=True)
class Recipe:
    """How a batch is made: everything about it but its tensors."""

    group: int
    engine: engines.Engine
    moves: bool
    chunk: Hashable
    keys: tuple[str, ...]  # of the states it takes
    places: list[int]  # of its parameters among the entries
    copied: set[int]  # those whose gradients lie in memory otherwise than the engine needs them


class Order:
    """Remembers how a step was sorted, for as long as the next ones look like it; holds no tensor."""

    def __init__(
        self, recipes: Sequence[Recipe], param_groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry]
    ) -> None:
        """Remember the recipes that `sort` has given for these entries."""
        self.recipes = recipes
        self._structure = structure(param_groups)
        self._slots = [entry.slot for entry in entries]
        keys: dict[int, tuple[str, ...]] = {place: recipe.keys for recipe in recipes for place in recipe.places}
        self._keys = [keys[place] for place in range(len(entries))]
        self._has_last = ["last_grad" in own for own in self._keys]
        self._moves = [False] * len(entries)
        for recipe in recipes:
            for place in recipe.places:
                self._moves[place] = recipe.moves
        self._look = looks.Look(self._tensors(entries))

    @staticmethod
    def covers(entries: Sequence[Entry]) -> bool:
        """Tell whether `fits` can vouch for these: plain tensors."""
        return all(type(entry.param) in (Tensor, nn.Parameter) for entry in entries)

    def fits(self, param_groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry]) -> bool:
        """Tell whether every tensor of a step looks like its predecessor, and every setting is the same."""
        if [entry.slot for entry in entries] != self._slots or structure(param_groups) != self._structure:
            return False
        if ["last_grad" in entry.state for entry in entries] != self._has_last:
            return False
        try:
            tensors = self._tensors(entries)
        except KeyError:
            return False
        if not self._look.fits(tensors):
            return False
        return all(
            moves is may_move(entry, param_groups[entry.group])
            for entry, moves in zip(entries, self._moves, strict=True)
            if param_groups[entry.group]["take_grad"]
        )

    def _tensors(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Every tensor that the step reads or writes."""
        tensors: list[Any] = []
        for (param, state, _, _), keys in zip(entries, self._keys, strict=True):
            tensors += (param, param.grad, state["step"], *[state[key] for key in keys])
        return tensors


def structure(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the settings that decide how tensors are sorted, group by group, and the groups' sizes."""
    return [(len(group["params"]), *[group[name] for name in STRUCTURAL_KEYS]) for group in param_groups]


def sort(
    param_groups: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    placements: Mapping[Tensor, Placement],
    chunks: Mapping[Tensor, Hashable] | None = None,
) -> list[Recipe]:
    """Decide which entries are updated together; states are filled where they lack something.

    Args:
        param_groups: of the optimizer.
        entries: of the step.
        placements: of the sharded parameters.
        chunks: of the parameters that are to be orthogonalized, see `Batch.chunk`; None where there are none.
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
            placement is None and place not in shared and may_move(entry, group),
            place not in shared and _is_dense(entry, needed[place]),
            chunks.get(param),
        )
        found.setdefault(key, []).append(place)
    numel = sum(dtensors.local(entry.param).numel() for entry in entries)
    recipes = []
    for (index, device, dtype, gradient_dtype, needs, _, moves, dense, chunk), places in found.items():
        group = param_groups[index]
        engine = engines.choose(
            group,
            device,
            [dtype, gradient_dtype, *(of for _, of in needs)],
            numel,
            plain_adamw=not takes_mars(group),
            dense=dense,
        )
        copied = {place for place in places if not _gradient_fits(entries[place], engine)}
        recipes.append(Recipe(index, engine, moves, chunk, tuple(key for key, _ in needs), places, copied))
    return recipes


def make(
    recipe: Recipe,
    param_groups: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    placements: Mapping[Tensor, Placement],
) -> Batch:
    """Pick the tensors of a batch."""
    group = param_groups[recipe.group]
    batch = Batch(group, recipe.engine, moves_gradients=recipe.moves, chunk=recipe.chunk)
    own = [entries[place] for place in recipe.places]
    if not placements and all(type(entry.param) in (Tensor, nn.Parameter) for entry in own):
        copied = [index for index, place in enumerate(recipe.places) if place in recipe.copied] if recipe.copied else []
        batch.add_whole(own, recipe.keys, copied)
    else:
        for place, entry in zip(recipe.places, own, strict=True):
            batch.add(entry, placements.get(entry.param), recipe.keys, copied=place in recipe.copied)
    if group["maximize"] and batch.params:
        batch.scale = torch.full((), -1.0, device=batch.params[0].device)
    batch.last_scales = _last_scales(batch.owned)
    return batch


def gather(
    param_groups: Sequence[dict[str, Any]],
    all_states: Mapping[Tensor, dict[str, Any]],
    placements: Mapping[Tensor, Placement],
    chunks: Mapping[Tensor, Hashable] | None = None,
) -> list[Batch]:
    """Sort the parameters that have a gradient into batches."""
    entries = entries_of(param_groups, all_states)
    recipes = sort(param_groups, entries, placements, chunks)
    return [make(recipe, param_groups, entries, placements) for recipe in recipes]


def entries_of(param_groups: Sequence[Mapping[str, Any]], all_states: Mapping[Tensor, dict[str, Any]]) -> list[Entry]:
    """Return the parameters that have a gradient, with a new state, not kept yet, where there is none."""
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
    """Tell whether the gradient itself may become the last gradient: it owns its memory, and looks like it."""
    grad, last = entry.param.grad, entry.state.get("last_grad")
    if not group["take_grad"] or not group["is_approx"] or grad is None or last is None:
        return False
    if dtensors.is_dtensor(grad) or grad.requires_grad or grad._is_view() or not looks.is_plain(grad):
        return False
    owns = grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return owns and grad.dtype == last.dtype and grad.stride() == last.stride()


def _last_scales(owned: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """What the last gradients in these states are still to be multiplied by, as one tensor; None for 1."""
    scales = [state.get("last_grad_scale") for state in owned]
    given = [scale for scale in scales if scale is not None]
    if not given:
        return None
    if len(given) == len(scales) and all(scale is given[0] for scale in given):  # of one step
        return given[0].repeat(len(given))
    return torch.stack([torch.ones_like(given[0]) if scale is None else scale for scale in scales])


def _sharing(entries: Sequence[Entry], needed: Sequence[Iterable[str]]) -> set[int]:
    """Places of entries that share memory with another tensor of the step: they are updated one after the other."""
    tensors, places = [], []
    for place, (entry, keys) in enumerate(zip(entries, needed, strict=True)):
        own = [entry.param, entry.gradient, *(entry.state[key] for key in keys)]
        tensors += [dtensors.local(tensor) for tensor in own]
        places += [place] * len(own)
    return {places[index] for index in looks.overlapping(tensors)}


def _is_dense(entry: Entry, keys: Iterable[str]) -> bool:
    """Whether parameter and states lie in memory as kernels need them; of gradients a copy can be made."""
    if "compensation" in entry.state and entry.state["compensation"].dtype != torch.bfloat16:
        return False
    tensors = [dtensors.local(tensor) for tensor in (entry.param, *(entry.state[key] for key in keys))]
    return all(map(looks.is_plain, tensors)) and looks.fill_alike(tensors)


def _laid_out_like(param: Tensor, gradient: Tensor) -> Tensor:
    """A copy of the gradient, with the parameter's strides."""
    return torch.empty_like(param, dtype=gradient.dtype, memory_format=torch.preserve_format).copy_(gradient)


def _gradient_fits(entry: Entry, engine: engines.Engine) -> bool:
    param, gradient = dtensors.local(entry.param), dtensors.local(entry.gradient)
    if not engine.is_flat:
        return not gradient.is_neg()  # which PyTorch forgets between float16 and float32
    return looks.is_plain(gradient) and looks.fill_alike([param, gradient])
