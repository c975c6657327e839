"""MARS, the variance-reduced optimizer, for Hugging Face training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mars_hf import import_hooks
from mars_hf.optimizer import Mars, create

if TYPE_CHECKING:
    from mars_hf.callbacks import LastGradientCallback
    from mars_hf.registry import factory, register
    from mars_hf.trainer import MarsTrainer

__version__ = "0.1.0"
__all__ = ["LastGradientCallback", "Mars", "MarsTrainer", "create", "factory", "register"]

# Loaded when first used: they need transformers, which takes seconds to import.
_LAZY = {
    "LastGradientCallback": "callbacks",
    "MarsTrainer": "trainer",
    "factory": "registry",
    "register": "registry",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"mars_hf.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mars_hf' has no attribute {name!r}")


def _guard_trainers() -> None:
    """Give every Trainer the callback that guards a Mars."""
    importlib.import_module("mars_hf.callbacks").install()


# Not before: transformers takes seconds to import.
import_hooks.after_import("transformers.trainer", _guard_trainers)
