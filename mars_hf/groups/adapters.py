"""Know the states of PEFT's adapters in which they cannot be trained."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from mars_hf.groups import known_models


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that hold adapters of PEFT."""
    return [module for module in model.modules() if "BaseTunerLayer" in known_models.class_names(module)]


def why_untrainable(adapted: Iterable[nn.Module]) -> str | None:
    """Return what is wrong with layers whose trainable adapters are merged into the base weights, with the remedy.

    The forward pass of such a layer runs the base weights alone, so its adapters get no gradients.
    """
    merged = [layer for layer in adapted if getattr(layer, "merged", False) and _is_trained(layer)]
    if not merged:
        return None
    names = sorted({name for layer in merged for name in getattr(layer, "merged_adapters", ())})
    return (
        f"adapter {', '.join(map(repr, names))} is merged into the base weights of {len(merged)} layers, where its "
        "parameters get no gradients; call unmerge_adapter() before training"
    )


def _is_trained(layer: nn.Module) -> bool:
    named = layer.named_parameters()
    return any(param.requires_grad for name, param in named if not name.startswith("base_layer."))
