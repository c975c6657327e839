"""Let scripts that know nothing of MARS find MarsTrainer where they look for Trainer."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def replace_trainer() -> None:
    """Make `transformers.Trainer` MarsTrainer for all code but ours; safe to call twice.

    Classes derived from it, such as trl's, have everything that MARS adds. MarsTrainer is imported when somebody looks
    for Trainer, because a hook calls this while a module of ours may be importing `transformers.trainer`.
    """
    module: Any = importlib.import_module("transformers.trainer")
    plain = vars(module).pop("Trainer", None)
    if plain is None:  # called before
        return
    if plain.__module__.startswith("mars_hf."):
        module.Trainer = plain
        return

    def __getattr__(name: str) -> Any:
        if name != "Trainer":
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        if any(_is_initializing(own) for key, own in list(sys.modules.items()) if key.startswith("mars_hf")):
            return plain  # what MarsTrainer derives from
        mars_trainer = importlib.import_module("mars_hf.training.trainer").MarsTrainer
        module.Trainer = sys.modules["transformers"].Trainer = mars_trainer  # type: ignore[attr-defined]
        return mars_trainer

    module.__getattr__ = __getattr__


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))
