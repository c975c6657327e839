"""What is updated together: the tensors of a step, sorted into lists that one call of an engine works on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from mars_hf import engines, rounding, rules, sharding, states
from mars_hf.directions import iteration_dtype
from mars_hf.param_groups import rule_of, takes_mars
from mars_hf.sharding import Group, Placement

# The list of a batch that each state is in.
_LISTS = {
    "exp_avg": "exp_avgs",
    "exp_avg_sq": "exp_avg_sqs",
    "max_exp_avg_sq": "max_exp_avg_sqs",
    "last_grad": "last_grads",
    "compensation": "compensations",
}


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
    clips: bool = False  # in the update itself, so that no factors are needed
    placements: dict[Tensor, Placement | None] = field(default_factory=dict)  # of the optimizer's tensors
    owners: list[Tensor] = field(default_factory=list)  # the optimizer's tensor that a piece is of
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
    slots: list[int] = field(default_factory=list)  # of the parameters, where other pieces of them are on other ranks
    process_group: Group = None  # of those ranks
    scale: Tensor | None = None  # of the gradients, 0-d
    last_scales: Tensor | None = None  # of the last gradients, one a piece
    factors: Tensor | None = None  # of the corrected gradients, one a piece
    last_norms: Tensor | None = None  # of the last gradients, one a piece; after the step of the next ones

    @property
    def mars(self) -> bool:
        """Whether these take the MARS rule; plain AdamW otherwise."""
        return takes_mars(self.group)

    @property
    def is_sharded(self) -> bool:
        """Whether the other pieces of its parameters are on other ranks."""
        return bool(self.slots)

    @property
    def k(self) -> float:
        """Weight of the correction."""
        beta1 = self.group["betas"][0]
        return self.group["gamma"] * beta1 / (1 - beta1) if self.last_grads else 0.0

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
            for name in ("factors", "last_scales", "last_norms"):
                own[name] = None if getattr(self, name) is None else getattr(self, name)[one]
            yield replace(self, **own)

    def update(self) -> None:
        """Move the parameters by one step; `steps` have been counted, and directions taken where the rule has any."""
        how = self.group["rounding"] if self.params[0].dtype == torch.bfloat16 else "nearest"
        if how == "nearest":
            self._move(self.params)
        elif self.engine.rounds and self.chunk is None:
            own = {"stochastic": True} if how == "stochastic" else {"compensations": self.compensations}
            self._move(self.params, **own)
        else:
            for index, piece in enumerate(self):
                piece._update_and_round(index)

    def momenta(self) -> list[Tensor]:
        """Take the first moments a step further.

        Returns:
            m of each of the optimizer's tensors, of its shape and strides, in the dtype of Newton-Schulz.
        """
        here = [sharding.local(owner.detach()) for owner in self.placements]
        momenta = [torch.empty_like(tensor, dtype=iteration_dtype(self.group, tensor)) for tensor in here]
        self._update(self._cut(momenta), "momentum")
        return momenta

    def take_directions(self, found: Iterable[Tensor]) -> None:
        """Keep directions for the update: one for each of `momenta`, of its shape and strides."""
        self.directions = self._cut(found)

    def _cut(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Pieces, as `params` has them, of tensors like the optimizer's."""
        pieces = []
        for tensor, placement in zip(tensors, self.placements.values(), strict=True):
            flat = _in_memory_order({"params": tensor})["params"] if self.engine.is_flat else tensor
            pieces += sharding.cut(flat, placement)
        return pieces

    def _move(self, params: list[Tensor], **how: Any) -> None:
        group = self.group
        if self.chunk is None:
            self._update(params, "lion" if rule_of(group) == "mars-lion" else "adamw", **how)
        else:
            settings = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
            rules.apply(params, self.directions, **settings, foreach=self.engine.foreach)

    def _update(self, params: list[Tensor], rule: str, **how: Any) -> None:
        group = self.group
        if self.clips:
            how |= {"clip_threshold": group["clip_threshold"], "last_norms": self.last_norms}
        self.engine.update(
            *(params, self.gradients, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.last_grads),
            rule=rule,
            steps=self.steps,
            lr=group["lr"],
            factors=self.factors,
            blend=0.0 if self.last_grads or not self.mars else group["gamma"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            second_moment=group["second_moment"],
            keep_last=group["is_approx"] and not self.moves_gradients,
            **self.correction,
            **how,
        )

    def _update_and_round(self, index: int) -> None:
        """One piece, updated in float32; as its parameter's neighbours hold values that bfloat16 cannot."""
        (param,) = self.params
        values = param.float()
        if self.compensations:
            values += self.compensations[0]
        self._move([values])
        if self.compensations:
            param.copy_(rounding.kahan(values, self.compensations[0]))
        else:
            # The same on every rank that holds the same parameter.
            seed = int(self.steps[0].item()) * 1_000_003 + index
            param.copy_(rounding.stochastic(values, torch.Generator(param.device).manual_seed(seed)))

    def add(self, owner: Tensor, placement: Placement | None, state: Mapping[str, Any]) -> None:
        """Add the pieces of one of the optimizer's tensors."""
        tensors = {"params": owner.detach(), "gradients": owner.grad}
        tensors |= {name: state[key] for key, name in _LISTS.items() if key in state}
        here: Mapping[str, Tensor] = {name: sharding.local(tensor) for name, tensor in tensors.items()}
        if self.engine.is_flat:
            here = _in_memory_order(here)
        for name, tensor in here.items():
            getattr(self, name).extend(sharding.cut(tensor, placement))
        self.placements[owner] = placement
        count = len(self.params) - len(self.steps)
        self.owners += [owner] * count
        self.steps += [state["step"]] * count
        self.shares += sharding.shares(placement)
        if placement is not None:
            self.slots += [piece.slot for piece in placement.pieces]
            self.process_group = placement.group


def gather(
    param_groups: Sequence[dict[str, Any]],
    all_states: Mapping[Tensor, Any],
    placements: Mapping[Tensor, Placement],
    chunks: Mapping[Tensor, Hashable] | None = None,
) -> list[Batch]:
    """Sort the tensors that have a gradient into batches; states are filled where they lack something.

    Args:
        param_groups: of the optimizer.
        all_states: state of every parameter; modified.
        placements: of the sharded parameters.
        chunks: of the parameters that are to be orthogonalized, see `Batch.chunk`; None where there are none.
    """
    chunks = chunks or {}
    sorted_: dict[tuple[Any, ...], list[Tensor]] = {}
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            if param.grad is not None:
                placement = placements.get(param)
                state = states.fill(param, group, all_states[param])
                key = (
                    *(index, param.device, param.dtype, param.grad.dtype),
                    tuple((name, state[name].dtype) for name in _LISTS if name in state),
                    None if placement is None else (placement.group,),
                    placement is None and may_move(param, group, state),
                    _is_dense(param, state),
                    chunks.get(param),
                )
                sorted_.setdefault(key, []).append(param)
    numel = sum(sharding.local(param).numel() for params in sorted_.values() for param in params)
    batches = []
    for key, params in sorted_.items():
        batch = _make(param_groups[key[0]], key, params, all_states, placements, numel)
        if batch.params:  # an engine's flat tensor may be all padding
            batches.append(batch)
    return batches


def _make(
    group: dict[str, Any],
    key: tuple[Any, ...],
    params: Sequence[Tensor],
    all_states: Mapping[Tensor, Any],
    placements: Mapping[Tensor, Placement],
    numel: int,
) -> Batch:
    _, device, dtype, gradient_dtype, state_dtypes, _, moves, dense, chunk = key
    engine = engines.choose(
        group,
        device,
        [dtype, gradient_dtype, *(of for _, of in state_dtypes)],
        numel,
        plain_adamw=not takes_mars(group),
        dense=dense,
    )
    batch = Batch(group, engine, moves_gradients=moves, chunk=chunk)
    for param in params:
        batch.add(param, placements.get(param), all_states[param])
    if group["maximize"]:
        batch.scale = torch.full((), -1.0, device=device)
    batch.last_scales = last_scales_of([all_states[owner] for owner in batch.owners])
    return batch


def last_scales_of(owned: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """What the last gradients in these states are still to be multiplied by, as one tensor; None for 1."""
    scales = [state.get("last_grad_scale") for state in owned]
    given = [scale for scale in scales if scale is not None]
    if not given:
        return None
    if len(given) == len(scales) and all(scale is given[0] for scale in given):  # of one step
        return given[0].repeat(len(given))
    return torch.stack([torch.ones_like(given[0]) if scale is None else scale for scale in scales])


def may_move(param: Tensor, group: dict[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the gradient itself may become the last gradient: it owns its memory, and looks like it."""
    grad, last = param.grad, state.get("last_grad")
    if not group["take_grad"] or not group["is_approx"] or grad is None or last is None:
        return False
    if sharding.is_dtensor(grad) or grad._is_view():
        return False
    owns = grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return owns and grad.dtype == last.dtype and grad.stride() == last.stride()


def _is_dense(param: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether parameter and states fill their memory without gaps, in one order."""
    order = _memory_order(sharding.local(param))
    tensors = [param, *(state[name] for name in _LISTS if name in state)]
    return all(sharding.local(tensor).permute(order).is_contiguous() for tensor in tensors)


def _in_memory_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One-dimensional views of dense tensors of one shape; a gradient in another order than theirs is copied."""
    order = _memory_order(tensors["params"])
    return {name: tensor.permute(order).reshape(-1) for name, tensor in tensors.items()}


def _memory_order(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
