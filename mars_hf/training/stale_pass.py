"""Exact MARS in a Trainer: the gradient of a step's batch at the parameters of the step before."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from mars_hf.arithmetic.formulas import global_scale
from mars_hf.distributed.shards import reshard
from mars_hf.distributed.tensors import is_dtensor, local
from mars_hf.optimizer import Mars
from mars_hf.training.guard import unwrap_optimizer

# Attributes of a Trainer that may be long lists, and that no pass changes.
_NOT_COPIED = ("train_dataset", "eval_dataset")


class StalePass(TrainerCallback):
    """Run the micro-batches of each exact step at the previous step's parameters, ahead of the ordinary pass.

    All micro-batches run at once, so gradients accumulate and synchronize as in an ordinary step. Each ordinary
    micro-batch starts from the random state of its stale one and so draws the same dropout masks. A stale pass changes
    copies of the batches and of the Trainer's containers, and buffers of modules are restored. The inputs of
    `compute_loss` are compared: a Trainer that generates or draws others inside the step raises an error before it.

    Args:
        trainer: a TrainerWithMars.

    Attributes:
        running: whether a stale pass is running.
        norm: of the last stale gradient, before clipping; None where a step has none.
    """

    def __init__(self, trainer: Any) -> None:
        """See the class."""
        self.running = False
        self.norm: Tensor | None = None
        self._trainer = trainer
        self._batches: list[Any] = []
        self._num_items: Any = None
        # Per micro-batch: what restores its random state, and the inputs of its calls of compute_loss.
        self._pending: deque[tuple[Callable[[], None], list[Any]]] = deque()

    def buffer_batches(self, batches: list[Any], num_items: Any) -> None:
        """Keep the next step's micro-batches, and the number of items that divides their loss."""
        self._batches, self._num_items = batches, num_items

    def clear(self) -> None:
        """Drop what an interrupted step has left."""
        self._batches, self.norm = [], None
        self._pending.clear()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Supply an exact Mars with the stale gradient: here Trainer has not wrapped a micro-batch in a context yet.

        Does nothing before the first step of a Mars, which has no previous parameters.
        """
        mars = unwrap_optimizer(optimizer)
        if not (isinstance(mars, Mars) and mars.is_exact):
            return
        batches = self._batches
        self.clear()
        if not mars.has_previous_params:
            return
        reshard(self._trainer.model_wrapped)  # a Mars of parameter groups does not know the model
        with mars.previous_params(), self._isolated_pass():
            for index, inputs in enumerate(batches):
                self._pending.append(self._backward(inputs, last=index == len(batches) - 1))
        self._commit(mars)
        restore_random_state, _inputs = self._pending[0]
        restore_random_state()

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Wrap an ordinary micro-batch: give it its stale pass's random numbers, and check for the same inputs."""
        if self.running or not self._pending:
            yield
            return
        restore_random_state, expected = self._pending.popleft()
        restore_random_state()

        def compare(inputs: Any) -> None:
            path = _difference(expected.pop(0), inputs) if expected else "their number"
            if path is not None:
                self._refuse(f"computes the two losses of a step from different inputs ({path} differs)")

        with self._observe_inputs(compare):
            yield
        if expected:
            self._refuse("calls compute_loss less often than in the pass for the stale gradient")
        if not self._pending and self._trainer.accelerator.scaler is not None and self.norm is not None:
            # A stale gradient that overflows makes the ordinary one overflow, so that the scaler skips the step.
            params = [param for param in self._trainer.model_wrapped.parameters() if param.grad is not None]
            _scale_gradients(params, 1 + 0 * self.norm)  # by 1, or NaN

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check that every stale micro-batch had its ordinary one."""
        if self._pending:
            self._refuse("has a training_step of its own that does not call MarsTrainer's")

    def _backward(self, inputs: Any, *, last: bool) -> tuple[Callable[[], None], list[Any]]:
        """Add the gradient of a micro-batch; return what restores the random state at its start, and its inputs."""
        trainer = self._trainer
        restore_random_state = _capture_random_state(trainer.args.device)
        seen: list[Any] = []
        trainer.accelerator.gradient_state._set_sync_gradients(last)
        with self._synchronization(last), self._observe_inputs(lambda inputs: seen.append(_copied(inputs))):
            trainer.training_step(trainer.model_wrapped, _copied(inputs), self._num_items)
        return restore_random_state, seen

    def _commit(self, mars: Mars) -> None:
        """Clip the stale gradients like ordinary ones and make them the optimizer's last gradients."""
        trainer = self._trainer
        of_model = [param for param in trainer.model_wrapped.parameters() if param.grad is not None]
        of_mars = [param for group in mars.param_groups for param in group["params"] if param.grad is not None]
        params = list(dict.fromkeys([*of_model, *of_mars]))  # with the weights of a loss, which Trainer does not clip
        if trainer.accelerator.scaler is not None:
            _scale_gradients(params, 1 / trainer.accelerator.scaler.get_scale())
        self.norm = _total_norm(of_model)
        if trainer.args.max_grad_norm > 0:
            _scale_gradients(of_model, global_scale(self.norm, trainer.args.max_grad_norm))
        mars.update_previous_grad()
        mars.update_last_grad()
        for param in params:
            param.grad = None

    @contextlib.contextmanager
    def _isolated_pass(self) -> Iterator[None]:
        """Run passes that do not count: models' buffers and the Trainer's attributes are unchanged afterwards."""
        attributes = vars(self._trainer)
        before = dict(attributes)
        # Such as a loss with weights of its own.
        in_training = [value for value in before.values() if isinstance(value, nn.Module) and value.training]
        gradient_state = self._trainer.accelerator.gradient_state
        sync_gradients = gradient_state.sync_gradients
        with _buffers_kept(self._trainer.model_wrapped, *in_training):
            attributes.update({name: _copied(before[name]) for name in before if name not in _NOT_COPIED})
            attributes["log"] = lambda *args, **kwargs: None  # once per batch, in the ordinary pass
            self.running = True
            try:
                yield
            finally:
                self.running = False
                attributes.clear()
                attributes.update(before)
                gradient_state._set_sync_gradients(sync_gradients)

    @contextlib.contextmanager
    def _observe_inputs(self, see: Callable[[Any], None]) -> Iterator[None]:
        """Call `see` with the inputs of every call of `compute_loss`, whichever class defines it."""
        attributes = vars(self._trainer)
        compute_loss, of_instance = self._trainer.compute_loss, attributes.get("compute_loss")

        def watched(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            see(inputs)
            return compute_loss(model, inputs, *args, **kwargs)

        attributes["compute_loss"] = watched
        try:
            yield
        finally:
            del attributes["compute_loss"]
            if of_instance is not None:
                attributes["compute_loss"] = of_instance

    def _synchronization(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of Trainer's loop: ranks reduce gradients with the last micro-batch only."""
        trainer = self._trainer
        if last or trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return contextlib.nullcontext()
        if getattr(trainer, "is_distributed_loading_by_transformers", False) and is_fsdp_managed_module(
            trainer.model_wrapped
        ):
            return trainer._defer_fsdp_gradient_reduction()
        return trainer.accelerator.no_sync(model=trainer.model_wrapped)

    def _refuse(self, reason: str) -> NoReturn:
        raise RuntimeError(
            "is_approx=False: exact MARS takes two gradients of one batch, and "
            f"{type(self._trainer).__name__} {reason}. A Trainer that generates or draws its inputs inside the step "
            "(GRPO, online DPO) cannot be exact: use is_approx=True"
        )


def _capture_random_state(device: torch.device) -> Callable[[], None]:
    """Return what restores the generators that a forward pass may use: Python's, NumPy's, torch's."""
    kept: list[tuple[Callable[[Any], None], Any]] = [
        (random.setstate, random.getstate()),
        (numpy.random.set_state, numpy.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type not in ("cpu", "meta"):
        accelerator = torch.get_device_module(device)
        # DataParallel, and models with a device_map, draw on several devices. The states are in the CPU's memory.
        if hasattr(accelerator, "get_rng_state_all"):
            kept.append((accelerator.set_rng_state_all, accelerator.get_rng_state_all()))
        else:  # torch.mps
            kept.append((accelerator.set_rng_state, accelerator.get_rng_state()))

    def restore() -> None:
        for set_state, state in kept:
            set_state(state)

    return restore


@contextlib.contextmanager
def _buffers_kept(*models: nn.Module) -> Iterator[None]:
    """Restore the modules' buffers afterwards: the same tensors with the same values, assigned ones too."""
    modules = {module for model in models for module in model.modules()}
    kept = [
        (buffers, name, buffer, buffer.clone())
        for buffers in (module._buffers for module in modules)
        for name, buffer in buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, value in kept:
                buffers[name] = buffer.copy_(value)


def _copied(value: Any) -> Any:
    """Return a copy of a batch or of metrics that a pass may change: containers and tensors; other objects are shared.

    Tensors that require a gradient, such as weights of a loss, are shared too.
    """
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, entry in value.items():  # not every class has update()
            result[key] = _copied(entry)
        return result
    if isinstance(value, (list, tuple)):
        entries = map(_copied, value)
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def _difference(one: Any, other: Any) -> str | None:
    """Return the path of a tensor in which two batches differ, or None; other objects count as equal."""
    ones, others = dict(_tensors(one)), dict(_tensors(other))
    for path in sorted({*ones, *others}):
        if path not in ones or path not in others:
            return path
        if not _are_equal(ones[path], others[path]):
            return path
    return None


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, NaN at the same places included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _tensors(value: Any, path: str = "inputs") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a batch, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(entry, f"{path}[{key!r}]")


def _total_norm(params: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients, over all ranks that hold parts of them; torch's takes one mesh only."""
    meshes: defaultdict[Any, list[Any]] = defaultdict(list)
    for param in params:
        meshes[getattr(param.grad, "device_mesh", None)].append(param.grad)
    per_mesh: Iterable[Any] = map(nn.utils.get_total_norm, meshes.values())
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in per_mesh]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


@torch.no_grad()
def _scale_gradients(params: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply all gradients in place, whatever meshes and devices they are on."""
    for param in params:
        grad: Any = local(param.grad)
        grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
