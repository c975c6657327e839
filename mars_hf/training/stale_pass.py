"""Compute the stale gradient of exact MARS with a Trainer's own training step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from mars_hf import _compat
from mars_hf.arithmetic.clipping import global_scale
from mars_hf.distributed import dtensors
from mars_hf.optimizer import Mars
from mars_hf.training.guard import innermost
from mars_hf.training.random_state import RandomState
from mars_hf.training.snapshots import attribute_set, attributes_kept, buffers_kept, copied, difference

# Attributes of a Trainer that may be large and whose contents no pass changes.
_UNCHANGED = ("train_dataset", "eval_dataset", "model", "model_wrapped")


class StalePass:
    """Run the micro-batches of one step at the previous step's parameters, ahead of the ordinary pass.

    All micro-batches run at once, so gradients accumulate and synchronize as in an ordinary step, whatever wraps the
    model. The pass keeps the random state at the start of each micro-batch for its ordinary pass, which then draws the
    same dropout masks. Nothing else of a stale pass remains: it works on copies of the batches and restores the model's
    buffers and the Trainer's attributes (counters, metrics).

    Both passes need the same batch. A Trainer that calls the model's `generate` inside the step raises an error. The
    inputs of `compute_loss` are compared, so different ones raise an error before the step.
    """

    def __init__(self, trainer: Trainer, max_grad_norm: Callable[[], float]) -> None:
        """Serve one Trainer.

        Args:
            trainer: the Trainer whose `training_step` is run.
            max_grad_norm: returns the norm that both gradients are clipped to; 0 for no clipping.
        """
        self.running = False
        self.norm: Tensor | None = None  # of the last stale gradient, before clipping
        self._trainer = trainer
        self._max_grad_norm = max_grad_norm
        self._seen: deque[list[Any]] = deque()  # one list per micro-batch: the inputs of compute_loss
        self._batches: list[Any] = []
        self._num_items: Any = None
        self._starts: deque[RandomState] = deque()
        self._overflows: Tensor | None = None

    def hold(self, batches: list[Any], num_items: Any) -> None:
        """Keep the next step's micro-batches, and the number of items that divides their loss."""
        self._batches, self._num_items = batches, num_items

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Wrap an ordinary micro-batch: give it its stale pass's random numbers, and check for the same inputs."""
        if self.running or not self._starts:
            yield
            return
        self._starts.popleft().restore()
        expected = self._seen.popleft()
        with self._watching(lambda inputs: self._compare(expected, inputs)):
            yield
        if expected:
            self._refuse("did not call compute_loss as often as in the pass for the stale gradient")
        if self._overflows is not None and not self._starts:
            self._spread_overflow()

    def require_both_passes(self) -> None:
        """Raise RuntimeError, ahead of the optimizer's step, if a stale pass has no ordinary one."""
        if self._starts:
            self._refuse("has a training_step of its own that does not call MarsTrainer's")

    def forget(self) -> None:
        """Drop what an interrupted step has left."""
        self._batches, self._overflows, self.norm = [], None, None
        self._starts.clear()
        self._seen.clear()

    def run(self, mars: Mars) -> None:
        """Supply the optimizer with the stale gradient; a no-op before its first step.

        Gradients, random state, buffers and the Trainer's attributes are unchanged afterwards.
        """
        batches = self._batches
        self.forget()
        if not mars.has_previous_params:
            return
        with mars.previous_params(), self._aside():
            starts = [self._backward(inputs, last=index == len(batches) - 1) for index, inputs in enumerate(batches)]
        self._commit(mars)
        starts[0].restore()
        self._starts.extend(starts)

    def _spread_overflow(self) -> None:
        """Make the ordinary gradient overflow if the stale one did in fp16, so that the scaler skips the step."""
        norm, self._overflows = self._overflows, None
        assert norm is not None
        with torch.no_grad():
            for param in self._trainer.model_wrapped.parameters():
                if param.grad is not None:
                    here = dtensors.local(param.grad)
                    here.add_((norm * 0).to(here))  # 0, or NaN

    def _compare(self, expected: list[Any], inputs: Any) -> None:
        if not expected:
            self._refuse("calls compute_loss more often than in the pass for the stale gradient")
        found = difference(expected.pop(0), inputs)
        if found is not None:
            self._refuse(f"computes the two losses of a step from different inputs ({found} differs)")

    def _refuse(self, reason: str) -> NoReturn:
        raise RuntimeError(
            "is_approx=False: exact MARS takes two gradients of one batch, and "
            f"{type(self._trainer).__name__} {reason}. A Trainer that generates or draws its inputs inside the step "
            "(GRPO, online DPO) cannot be exact: use is_approx=True"
        )

    @contextlib.contextmanager
    def _watching(self, see: Callable[[Any], None]) -> Iterator[None]:
        """Call `see` with the inputs of every call of `compute_loss`, whichever class defines it."""
        compute_loss = self._trainer.compute_loss

        def watched(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            see(inputs)
            return compute_loss(model, inputs, *args, **kwargs)

        with attribute_set(self._trainer, "compute_loss", watched):
            yield

    def _refuse_generation(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("generates text inside the step")

    def _backward(self, inputs: Any, *, last: bool) -> RandomState:
        """Add the gradient of a micro-batch and return the random state at its start."""
        trainer = self._trainer
        start = RandomState.capture(trainer.args.device)
        seen: list[Any] = []
        _compat.set_sync_gradients(trainer.accelerator.gradient_state, last)
        with (
            self._synchronization(last),
            self._watching(lambda inputs: seen.append(copied(inputs))),
            attribute_set(trainer.model, "generate", self._refuse_generation),
        ):
            trainer.training_step(trainer.model_wrapped, copied(inputs), self._num_items)
        if not seen:
            self._refuse("has a training_step that does not call compute_loss, so that its inputs are not known")
        self._seen.append(seen)
        return start

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Run passes that do not count: models' buffers and the Trainer's attributes are unchanged afterwards."""
        held = [value for value in vars(self._trainer).values() if isinstance(value, nn.Module)]
        models = [self._trainer.model_wrapped, *(value for value in held if value.training)]  # a loss with statistics
        gradient_state = self._trainer.accelerator.gradient_state
        synchronizes = gradient_state.sync_gradients
        with buffers_kept(*models), attributes_kept(self._trainer, _UNCHANGED):
            self.running = True
            try:
                yield
            finally:
                self.running = False
                _compat.set_sync_gradients(gradient_state, synchronizes)

    def _commit(self, mars: Mars) -> None:
        """Clip the stale gradients like ordinary ones and make them the optimizer's last gradients."""
        trainer = self._trainer
        clipped = [param for param in trainer.model_wrapped.parameters() if param.grad is not None]
        known = {id(param) for param in clipped}
        own = [param for group in mars.param_groups for param in group["params"] if param.grad is not None]
        params = [*clipped, *(param for param in own if id(param) not in known)]  # with the weights of a loss
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            _scale_gradients(params, 1 / scaler.get_scale())
        limit = self._max_grad_norm()
        self.norm = _total_norm(clipped)
        if limit > 0 and self.norm is not None:
            _scale_gradients(clipped, global_scale(self.norm, limit))
        if scaler is not None:
            self._overflows = self.norm
        mars.update_previous_grad()
        mars.update_last_grad()
        for param in params:
            param.grad = None

    def _synchronization(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of Trainer's loop: ranks reduce gradients with the last micro-batch only."""
        trainer = self._trainer
        if last or trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return contextlib.nullcontext()
        if getattr(trainer, "is_distributed_loading_by_transformers", False) and is_fsdp_managed_module(
            trainer.model_wrapped
        ):
            return _compat.fsdp_reduction_deferred(trainer)
        return trainer.accelerator.no_sync(model=trainer.model_wrapped)


def _total_norm(params: Iterable[Tensor]) -> Tensor | None:
    """Return the norm of all gradients, over all ranks that hold parts of them; None if there is none."""
    meshes: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            meshes.setdefault(getattr(param.grad, "device_mesh", None), []).append(param.grad)
    norms: list[Any] = [nn.utils.get_total_norm(grads) for grads in meshes.values()]
    whole = [norm.full_tensor() if dtensors.is_dtensor(norm) else norm for norm in norms]
    if len(whole) <= 1:
        return whole[0] if whole else None
    return torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]))


@torch.no_grad()
def _scale_gradients(params: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients in place; torch's foreach functions take no list that mixes meshes."""
    for param in params:
        if param.grad is not None:
            grad = dtensors.local(param.grad)
            grad.mul_(factor.to(grad) if isinstance(factor, Tensor) else factor)


class StalePassCallback(TrainerCallback):
    """Start the stale pass of every step of an exact run."""

    def __init__(self, stale_pass: StalePass) -> None:
        """Keep the stale pass to start."""
        self._stale_pass = stale_pass

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Run the stale pass before the first micro-batch, outside the contexts that Trainer wraps micro-batches in."""
        mars = innermost(optimizer)
        if isinstance(mars, Mars) and mars.is_exact:
            self._stale_pass.run(mars)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check, after the last micro-batch, that every stale pass had its ordinary one."""
        self._stale_pass.require_both_passes()
