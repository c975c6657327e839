"""The stale gradient of exact MARS, taken with a Trainer's own training step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from mars_hf import sharding
from mars_hf.callbacks import innermost
from mars_hf.optimizer import Mars
from mars_hf.random_state import RandomState


class StalePass:
    """Runs the micro-batches of one step at the parameters of the step before, ahead of the ordinary pass.

    All micro-batches go through at once, so that gradients are accumulated and synchronized as in an ordinary step,
    whatever wraps the model. The random state each of them starts with is kept for its ordinary pass, which then draws
    the same dropout masks.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Serve one Trainer."""
        self.running = False
        self._trainer = trainer
        self._batches: list[Any] = []
        self._num_items: Any = None
        self._starts: deque[RandomState] = deque()
        self._norm: Tensor | None = None

    def hold(self, batches: list[Any], num_items: Any) -> None:
        """Keep the micro-batches of the step to come, and the number of items that their loss is divided by."""
        self._batches, self._num_items = batches, num_items

    def before_micro_batch(self) -> None:
        """The random state of an ordinary micro-batch is that of its stale pass, if it has had one."""
        if self._starts:
            self._starts.popleft().restore()

    def after_micro_batch(self) -> None:
        """If the stale gradient overflowed in fp16, so does the ordinary one: the scaler then skips the step."""
        if self._norm is None or self._starts:
            return
        norm, self._norm = self._norm, None
        with torch.no_grad():
            for param in self._trainer.model_wrapped.parameters():
                if param.grad is not None:
                    here = sharding.local(param.grad)
                    here.add_((norm * 0).to(here))  # 0, or NaN

    def run(self, mars: Mars) -> None:
        """Supply the optimizer with the stale gradient; nothing before its first step.

        Gradients and random state are as before afterwards; buffers (running statistics) too.
        """
        batches, self._batches = self._batches, []
        self._starts.clear()
        self._norm = None
        if not mars.has_previous_params:
            return
        with mars.previous_params(), buffers_kept(self._trainer.model_wrapped), self._running():
            starts = [self._backward(inputs, last=index == len(batches) - 1) for index, inputs in enumerate(batches)]
        self._commit(mars)
        starts[0].restore()
        self._starts.extend(starts)

    def _backward(self, inputs: Any, *, last: bool) -> RandomState:
        """Add the gradient of a micro-batch; the random state it started with."""
        trainer = self._trainer
        start = RandomState.capture(trainer.args.device)
        trainer.accelerator.gradient_state._set_sync_gradients(last)
        with self._synchronization(last):
            trainer.training_step(trainer.model_wrapped, inputs, self._num_items)
        return start

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        gradient_state = self._trainer.accelerator.gradient_state
        synchronizes = gradient_state.sync_gradients
        self.running = True
        try:
            yield
        finally:
            self.running = False
            gradient_state._set_sync_gradients(synchronizes)

    def _commit(self, mars: Mars) -> None:
        """From the gradients of the stale pass to the optimizer's last gradients; clipped as the ordinary ones."""
        trainer = self._trainer
        params = [param for param in trainer.model_wrapped.parameters() if param.grad is not None]
        gradients = [param.grad for param in params if param.grad is not None]
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            torch._foreach_mul_(gradients, 1 / scaler.get_scale())
        norm: Any = nn.utils.get_total_norm(gradients) if scaler is not None or trainer.args.max_grad_norm > 0 else None
        if norm is not None and trainer.args.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(params, trainer.args.max_grad_norm, norm)
        if norm is not None and scaler is not None:
            self._norm = norm.full_tensor() if sharding.is_dtensor(norm) else norm
        mars.update_previous_grad()
        mars.update_last_grad()
        for param in params:
            param.grad = None

    def _synchronization(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """As in Trainer's loop: gradients are exchanged between ranks with the last micro-batch."""
        trainer = self._trainer
        if last or trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return contextlib.nullcontext()
        if trainer.is_distributed_loading_by_transformers and is_fsdp_managed_module(trainer.model_wrapped):
            return trainer._defer_fsdp_gradient_reduction()
        return trainer.accelerator.no_sync(model=trainer.model_wrapped)


class StalePassCallback(TrainerCallback):
    """Starts the stale pass of every step of an exact run."""

    def __init__(self, stale_pass: StalePass) -> None:
        """Start this one."""
        self._stale_pass = stale_pass

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Before the first micro-batch, and outside of the contexts that Trainer runs micro-batches in."""
        mars = innermost(optimizer)
        if isinstance(mars, Mars) and mars.is_exact:
            self._stale_pass.run(mars)


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were, in place: running statistics count every batch once."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
