"""Know the states of PEFT's adapters in which they cannot be trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model that hold adapters of PEFT."""
    modules = model.modules()
    return [module for module in modules if any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__)]


def why_untrainable(adapted: Iterable[Any]) -> str | None:
    """Say which trainable adapters are merged into base weights, where the forward pass gives them no gradients."""
    merged = [layer for layer in adapted if getattr(layer, "merged", False) and _is_trained(layer)]
    if not merged:
        return None
    names = sorted({name for layer in merged for name in layer.merged_adapters})
    return (
        f"adapter {', '.join(map(repr, names))} is merged into the base weights of {len(merged)} layers, where its "
        "parameters get no gradients; call unmerge_adapter() before training"
    )


def _is_trained(layer: nn.Module) -> bool:
    named = layer.named_parameters()
    return any(param.requires_grad for name, param in named if not name.startswith("base_layer."))
