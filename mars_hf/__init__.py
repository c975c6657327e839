"""MARS, an optimizer that corrects each gradient by the last one, for Hugging Face training."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from mars_hf.creation import create
from mars_hf.optimizer import EXTENSIONS, Mars

if TYPE_CHECKING:
    from mars_hf.training.axolotl import AxolotlPlugin as AxolotlPlugin
    from mars_hf.training.callback import LastGradientCallback
    from mars_hf.training.nonfinite import NonFiniteCallback, NonFiniteError
    from mars_hf.training.registry import factory, register
    from mars_hf.training.trainer import MarsTrainer, with_mars

__version__ = "0.2.0.dev0"

# Loaded when first used, because transformers takes seconds to import.
_LAZY = {
    "LastGradientCallback": "callback",
    "MarsTrainer": "trainer",
    "NonFiniteCallback": "nonfinite",
    "NonFiniteError": "nonfinite",
    "factory": "registry",
    "register": "registry",
    "with_mars": "trainer",
    "AxolotlPlugin": "axolotl",  # not in __all__, because it needs Axolotl
}
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


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"mars_hf.training.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mars_hf' has no attribute {name!r}")


# Guard the Trainers, and complete the loaders of DeepSpeed, that this process may hand an optimizer to.
EXTENSIONS["transformers.training_args"] = functools.partial(importlib.import_module, "mars_hf.training.callback")
EXTENSIONS["deepspeed"] = lambda: importlib.import_module("mars_hf.universal").extend_deepspeed()
