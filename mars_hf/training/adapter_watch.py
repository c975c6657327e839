"""Stop a run whose adapters change in a way that its optimizer does not follow."""

from __future__ import annotations

from typing import Any

from torch import nn

from mars_hf.groups import adapters
from mars_hf.optimizer import Mars
from mars_hf.training import guard


class AdapterWatch:
    """Look at the adapters of PEFT in a model before each step; costs microseconds a layer."""

    def __init__(self, model: nn.Module, *, flattened: bool = False) -> None:
        """Find the adapters.

        Args:
            model: the model that trains.
            flattened: whether an engine has put other tensors into the optimizer's groups.
        """
        self._model = model
        self._flattened = flattened
        self._layers = adapters.layers(model)
        self._active = self._active_now()

    def check(self, mars: Mars) -> None:
        """Raise RuntimeError if trainable adapters are merged, or the optimizer lacks those made active since."""
        if any(getattr(layer, "merged", False) for layer in self._layers):
            why = adapters.why_untrainable(self._layers)
            if why is not None:
                raise RuntimeError(why)
        active = self._active_now()
        if active != self._active:
            guard.require_parameters(mars, self._model, flattened=self._flattened)
            self._active = active

    def _active_now(self) -> list[Any]:
        return [tuple(getattr(layer, "active_adapters", ())) for layer in self._layers]
