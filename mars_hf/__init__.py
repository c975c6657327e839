"""MARS, an optimizer that corrects each gradient by the last one, for Hugging Face training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mars_hf.optimizer import Mars, create
from mars_hf.training import import_hooks

if TYPE_CHECKING:
    from mars_hf.training.axolotl import AxolotlPlugin as AxolotlPlugin
    from mars_hf.training.callbacks import LastGradientCallback
    from mars_hf.training.nonfinite import NonFiniteCallback, NonFiniteError
    from mars_hf.training.registry import factory, register
    from mars_hf.training.trainer import MarsTrainer, with_mars

__version__ = "0.1.0"
__all__ = [
    "LastGradientCallback",
    "Mars",
    "MarsTrainer",
    "NonFiniteCallback",
    "NonFiniteError",
    "create",
    "factory",
    "register",
    "with_mars",
]

# Loaded when first used: they need transformers, which takes seconds to import.
# AxolotlPlugin is not in __all__: it needs Axolotl.
_LAZY = {
    "AxolotlPlugin": "training.axolotl",
    "LastGradientCallback": "training.callbacks",
    "MarsTrainer": "training.trainer",
    "NonFiniteCallback": "training.nonfinite",
    "NonFiniteError": "training.nonfinite",
    "factory": "training.registry",
    "register": "training.registry",
    "with_mars": "training.trainer",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"mars_hf.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mars_hf' has no attribute {name!r}")


def _name_rules() -> None:
    """Let TrainingArguments name a rule, also before MarsTrainer is imported."""
    importlib.import_module("mars_hf.training.registry").add_names()


def _guard_trainers() -> None:
    """Let every Trainer make the rules by name, and give it the callback that guards a Mars."""
    importlib.import_module("mars_hf.training.registry").add_handlers()
    # Importing it installs; it may be the very module that is importing transformers.trainer now.
    importlib.import_module("mars_hf.training.callbacks")


def _extend_deepspeed() -> None:
    """Let DeepSpeed's engines load universal checkpoints of a Mars."""
    importlib.import_module("mars_hf.universal").extend_deepspeed()


# Not before: these packages take seconds to import.
import_hooks.after_import("transformers.training_args", _name_rules)
import_hooks.after_import("transformers.trainer", _guard_trainers)
import_hooks.after_import("deepspeed.runtime.engine", _extend_deepspeed)
