"""A Trainer that steps with the optimizer it was given, under every engine."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback

from mars_hf import universal
from mars_hf.callbacks import LastGradientCallback
from mars_hf.optimizer import Mars


class MarsTrainer(Trainer):
    """transformers.Trainer that keeps its optimizer.

    Trainer drops an instance handed over as `optimizers=(optimizer, scheduler)` under DeepSpeed and refuses it under
    FSDP. This one hands it over where Trainer would make its own. If it is a Mars, LastGradientCallback is added with
    it, so that a run in which another optimizer would step stops at its beginning.

    Args:
        *args: as Trainer.
        **kwargs: as Trainer. The model must be the one that the optimizer was built from.

    Raises:
        ValueError: an optimizer is given together with `model_init` or `optimizer_cls_and_kwargs`, which make others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See the class."""
        given = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs).arguments
        del given["self"]
        kept: tuple[Any, Any] = given.pop("optimizers", None) or (None, None)
        self._kept_optimizer, self._kept_scheduler = kept
        if self._kept_optimizer is not None:
            for name in ("model_init", "optimizer_cls_and_kwargs"):
                if given.get(name) is not None:
                    raise ValueError(
                        f"optimizers=({type(self._kept_optimizer).__name__}, ...) and {name} are both given, and each "
                        "would make the optimizer; with model_init use optimizer_cls_and_kwargs=mars_hf.factory(...)"
                    )
        if isinstance(self._kept_optimizer, Mars):
            given["callbacks"] = _guarded(given.get("callbacks"), self._kept_optimizer)
        super().__init__(**given)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that was given, or what Trainer makes."""
        if self.optimizer is None and self._kept_optimizer is not None:
            self.optimizer = self._kept_optimizer
            universal.extend_deepspeed()  # which may have been imported after this optimizer was made
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler that was given, or what Trainer makes."""
        if self.lr_scheduler is None and self._kept_scheduler is not None:
            self.lr_scheduler = self._kept_scheduler
        return super().create_scheduler(num_training_steps, optimizer)


def _guarded(callbacks: list[Any] | None, optimizer: Mars) -> list[TrainerCallback | type[TrainerCallback]]:
    """Callbacks with a LastGradientCallback among them."""
    callbacks = list(callbacks or [])
    for callback in callbacks:
        if isinstance(callback, LastGradientCallback) or callback is LastGradientCallback:
            return callbacks
    return [*callbacks, LastGradientCallback(optimizer)]
