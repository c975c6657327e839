"""Compute gradients beside a Trainer's own steps: of halves of the step to come, and of draws of the training data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from mars_hf.training.random_state import RandomState
from mars_hf.training.shadow_moments import Halves
from mars_hf.training.snapshots import copied

Batch = dict[str, Any]


class Split(NamedTuple):
    """The micro-batches of a step in two halves, and the number of samples that their mean stands for.

    Halves of different sizes weigh equally, so their mean has the noise of slightly fewer samples than there are.
    """

    halves: tuple[list[Batch], list[Batch]]
    samples: float


def split(batches: Sequence[Batch]) -> Split | None:
    """Return the halves of a step: each micro-batch cut in two, or else every other one; None for a single sample."""
    if all(_samples(inputs) > 1 for inputs in batches):
        halves = [_part(inputs, 0) for inputs in batches], [_part(inputs, 1) for inputs in batches]
    elif len(batches) > 1:
        halves = list(batches[0::2]), list(batches[1::2])
    else:
        return None
    variance = sum(sum(1 / _samples(inputs) for inputs in half) / len(half) ** 2 for half in halves) / 4
    return Split(halves, 1 / variance)


class ProbePasses:
    """Forward and backward passes of a MarsTrainer's loss that the run does not notice.

    Args:
        trainer: whose `compute_loss` is taken.
        params: parameters to differentiate by.
        data: the Trainer's loader of training data, whose dataset has a length.
        seed: of the draws.
    """

    def __init__(self, trainer: Any, params: Sequence[Tensor], data: DataLoader[Any], seed: int) -> None:
        """Draw nothing yet."""
        self._trainer, self._params = trainer, params
        self._draws = self._micro_batches(data.dataset, data.collate_fn, seed)

    def of_halves(self, halves: Sequence[Sequence[Batch]], previous: Sequence[Tensor]) -> tuple[Halves, Halves | None]:
        """Return the halves' gradients, and those at other parameters with the same dropout masks.

        Args:
            halves: micro-batches, as the data loader gave them.
            previous: the other parameters; empty: None in the place of their gradients.
        """
        states, found = [], []
        for half in halves:
            states.append(RandomState.capture(self._trainer.args.device))
            found.append(self._gradient(half))
        if not previous:
            return (found[0], found[1]), None
        here = [param.detach().clone() for param in self._params]
        stale = []
        try:
            self._put(previous)
            for half, state in zip(halves, states, strict=True):
                state.restore()
                stale.append(self._gradient(half))
        finally:
            self._put(here)
        return (found[0], found[1]), (stale[0], stale[1])

    def of_draws(self, count: int) -> Halves:
        """Return two independent estimates of the gradient of the training data, of `count` micro-batches each."""
        one, two = (self._gradient(list(itertools.islice(self._draws, count))) for _ in range(2))
        return one, two

    def _gradient(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the mean gradient of micro-batches in float32; `p.grad` and the hooks on it are left alone."""
        trainer = self._trainer
        trainer.model.train()
        total = [torch.zeros_like(param, dtype=torch.float32) for param in self._params]
        for inputs in batches:
            own = send_to_device(copied(inputs), trainer.args.device)  # a loss may take its labels out
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, own)
            found = torch.autograd.grad(loss, self._params, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, [gradient.float() for gradient in found], alpha=1 / len(batches))
        return total

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)

    def _micro_batches(self, dataset: Any, collate: Any, seed: int) -> Iterator[Batch]:
        """Yield micro-batches of the training data, shuffled anew whenever all were drawn."""
        size = self._trainer.args.per_device_train_batch_size
        loader = DataLoader(
            dataset,
            batch_size=size,
            shuffle=True,
            drop_last=len(dataset) >= size,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=collate,
        )
        for _ in itertools.count():
            yield from loader


def _samples(inputs: Batch) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim)


def _part(inputs: Batch, half: int) -> Batch:
    """Return the first or the second half of a micro-batch's samples; the second has an odd one."""
    size = _samples(inputs)
    cut = slice(0, size // 2) if half == 0 else slice(size // 2, size)
    return {
        name: value[cut] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for name, value in inputs.items()
    }
