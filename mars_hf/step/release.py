"""`create(model, release_gradients=True)`: each parameter steps as soon as backward has its gradient.

Its gradient is copied into the last gradient and freed on the spot, so a run holds one gradient at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mars_hf.distributed.tensors import is_dtensor, local


class Steppable(Protocol):
    """What a released step asks of its optimizer."""

    param_groups: list[dict[str, Any]]

    @property
    def max_grad_norm(self) -> float | None:
        """Largest global norm of all gradients; None for none."""

    @property
    def is_exact(self) -> bool:
        """Whether any parameter needs stale gradients."""


class GradientRelease:
    """Hooks on the parameters of an optimizer, which step them one by one."""

    def __init__(self, optimizer: Steppable, step: Callable[[Exception | None], None]) -> None:
        """Hook the parameters; `step` updates those that have a gradient, and may take it; all ranks raise an error."""
        self._optimizer = weakref.ref(optimizer)  # parameters that outlive it keep their hooks
        self._step = weakref.WeakMethod(step)
        self._stepped: set[Tensor] = set()
        # The largest absolute values of this step's gradients, if NonFiniteCallback has made it a list.
        self.largest: list[Tensor] | None = None
        self._hooked = WeakTensorKeyDictionary()  # its keys; a mark on a parameter would be saved with the model
        self.hook()

    def finish(self) -> bool:
        """Return whether backward has taken the step, and wait for the next one.

        False if it had no hooks yet, on parameters that an engine has exchanged for its own: they get them now.

        Raises:
            RuntimeError: gradients that no hook has seen.
        """
        stepped = self._stepped
        self._stepped = set()
        if self.largest is not None:
            self.largest = []
        left = [param for param in self._params() if param.grad is not None]
        if not left:
            return bool(stepped)
        if not stepped and self.hook():
            return False
        raise RuntimeError(
            f"release_gradients=True: {len(left)} parameters have gradients that backward() did not hand over, the "
            f"first of shape {tuple(left[0].shape)}; take each gradient from backward(), or leave it out"
        )

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        return [param for group in optimizer.param_groups for param in group["params"]]

    def hook(self) -> bool:
        """Hook the parameters without a hook; return whether there are any."""
        has_new = False
        for param in self._params():
            if param in self._hooked:
                continue
            param.register_post_accumulate_grad_hook(self._on_gradient)
            self._hooked[param] = True
            has_new = True
        return has_new

    def _on_gradient(self, param: Tensor) -> None:
        optimizer, step = self._optimizer(), self._step()
        if optimizer is None or step is None or param.grad is None:
            return
        reason = self._why_not(param, optimizer)
        error = None if reason is None else RuntimeError(f"release_gradients=True: {reason}")
        if error is not None and not is_dtensor(param):
            raise error
        with torch.no_grad():
            if self.largest is not None and local(param.grad).numel():
                self.largest.append(nn.utils.get_total_norm([local(param.grad)], torch.inf))
            step(error)
        param.grad = None
        self._stepped.add(param)

    def _why_not(self, param: Tensor, optimizer: Steppable) -> str | None:
        """Return why a parameter cannot step now; None if it can."""
        params = self._params()
        needs_all_gradients = optimizer.max_grad_norm is not None or optimizer.is_exact
        if needs_all_gradients:
            return "each parameter steps alone; max_grad_norm must be None, and is_approx True"
        if param in self._stepped:
            return "a second backward() before step(), or reentrant checkpoints; take one micro-batch a step"
        if not any(each is param for each in params):
            return "an engine has exchanged the optimizer's parameters; only fully_shard may"
        if _has_other_ranks() and not is_dtensor(param):
            return "DistributedDataParallel averages gradients later, in buckets that hold them all; use fully_shard"
        if len({each.device for each in params}) > 1:
            return "parameters on several devices, whose gradients may come at the same time"
        return None


def _has_other_ranks() -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size() > 1
