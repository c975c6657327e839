"""What is updated together: the tensors of a step, sorted into lists that one call of an engine works on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from mars_hf import engines, sharding
from mars_hf.sharding import Group, Placement


@dataclass
class Batch:
    """Pieces of parameters of one group that live on one device, share their dtypes and go to one engine.

    A piece is a whole tensor, or the stretch of an engine's flat tensor that belongs to one parameter. All lists have
    one entry a piece, or are empty where the rule needs none.
    """

    group: dict[str, Any]
    engine: engines.Engine
    mars: bool
    owners: list[Tensor] = field(default_factory=list)  # the optimizer's tensor that a piece is of
    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    last_grads: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # how much of its parameter a piece is
    slots: list[int] = field(default_factory=list)  # of the parameters, where other pieces of them are on other ranks
    process_group: Group = None  # of those ranks
    scale: Tensor | None = None  # of the gradients, 0-d
    factors: Tensor | None = None  # of the corrected gradients, one a piece

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
        """What g and c are made with, as `rules.sums` takes it."""
        return {"scale": self.scale, "k": self.k}

    def update(self) -> None:
        """Move the parameters by one step; `steps` have been counted."""
        group = self.group
        self.engine.update(
            *(self.params, self.gradients, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.last_grads),
            rule="lion" if self.mars and group["mars_type"] == "mars-lion" else "adamw",
            steps=self.steps,
            lr=group["lr"],
            factors=self.factors,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            second_moment=group["second_moment"],
            keep_last=group["is_approx"],
            **self.correction,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Batches of one piece each."""
        lists = [item.name for item in fields(self) if isinstance(getattr(self, item.name), list)]
        for index in range(len(self.params)):
            one = slice(index, index + 1)
            factors = None if self.factors is None else self.factors[one]
            yield replace(self, factors=factors, **{name: getattr(self, name)[one] for name in lists})

    def add(self, owner: Tensor, placement: Placement | None, state: Mapping[str, Any]) -> None:
        """Add the pieces of one of the optimizer's tensors."""
        assert owner.grad is not None
        whole = {
            "params": owner.detach(),
            "gradients": owner.grad,
            "exp_avgs": state["exp_avg"],
            **{key: state[name] for key, name in _STATE_LISTS.items() if name in state},
        }
        for key, tensor in whole.items():
            getattr(self, key).extend(sharding.cut(sharding.local(tensor), placement))
        count = len(self.params) - len(self.steps)
        self.owners += [owner] * count
        self.steps += [state["step"]] * count
        self.shares += sharding.shares(placement)
        if placement is not None:
            self.slots += [piece.slot for piece in placement.pieces]
            self.process_group = placement.group


_STATE_LISTS = {"exp_avg_sqs": "exp_avg_sq", "max_exp_avg_sqs": "max_exp_avg_sq", "last_grads": "last_grad"}
