"""A small model of any class of transformers: its own default configuration with small numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

# A setting whose name matches is at most this; the last match counts. What a configuration does not bear is left out
# of a further try: its widths first, then all.
_COUNTS = [
    (r"(^|_)(n|num|encoder|decoder|hidden|attention|text|vision).*layers?$|^depth$|^n_layer$|^layers$", 2),
    (r"vocab_size", 160),
    (r"experts$|n_routed", 4),
    (r"experts_per_tok|top_?k$|moe_k$", 2),
    (r"^(n_group|num_expert_group|topk_group)$", 1),
]
_WIDTHS = [
    (r"(hidden_size|d_model|dim|n_embd|width|embedding_size|channels)$", 32),
    (r"intermediate_size|ffn_dim|ffn_hidden|mlp_dim|inter_dim|d_ff", 64),
    (r"(heads|n_head|groups)$", 4),
]
_LENGTHS = [
    (r"(head_dim|rope_dim)$", 8),
    (r"lora_rank", 16),
    (r"max_position_embeddings|n_positions|window", 64),
]
_TRIES = (_COUNTS + _WIDTHS + _LENGTHS, _COUNTS + _WIDTHS, _COUNTS)
_MOST_PARAMETERS = 30_000_000


def classes_by_type() -> dict[str, list[type]]:
    """Return the classes that transformers' auto classes make of each model type."""
    found: dict[str, list[type]] = {}
    for name in sorted(vars(modeling_auto)):
        if not (name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")):
            continue
        for model_type, names in getattr(modeling_auto, name).items():
            for each in [names] if isinstance(names, str) else names:
                kind = getattr(transformers, each, None)
                if model_type in CONFIG_MAPPING and kind is not None:
                    found.setdefault(model_type, []).append(kind)
    return {model_type: list(dict.fromkeys(kinds)) for model_type, kinds in found.items()}


def small_model(kind: Any) -> Any | None:
    """Return a class's small model on the meta device, whose configuration makes others; None if none was found."""
    return _first_model(kind, _TRIES, _MOST_PARAMETERS)


def shallow_model(kind: Any) -> Any | None:
    """Return a class's own default model with few layers, whose widths are real, on the meta device, or None."""
    return _first_model(kind, (_COUNTS[:1], []), None)


def _first_model(kind: Any, tries: Any, most_parameters: int | None) -> Any | None:
    transformers.logging.set_verbosity_error()  # of token ids beyond a small vocabulary
    for rules in tries:
        with contextlib.suppress(Exception):  # each family raises its own where numbers do not fit each other
            config = kind.config_class()
            _shrink(config, rules)
            config.validate()
            with torch.device("meta"):
                model = kind(config)
            size = sum(param.numel() for param in model.parameters())
            if most_parameters is None or size <= most_parameters:
                return model
    return None


def _shrink(config: PreTrainedConfig, rules: list[tuple[str, int]]) -> None:
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            most = next((most for pattern, most in reversed(rules) if re.search(pattern, name)), None)
            if type(value) is int and most is not None and value > most:
                setattr(part, name, most)
        padding, vocabulary = getattr(part, "pad_token_id", None), getattr(part, "vocab_size", None)
        if type(padding) is int and type(vocabulary) is int and padding >= vocabulary:
            part.pad_token_id = 1
        _shorten_lists(part)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _shorten_lists(config: PreTrainedConfig) -> None:
    """Give lists with an entry a layer as many as there are layers, of different kinds where there are some."""
    layers = next((getattr(config, name, None) for name in ("num_hidden_layers", "num_layers")), None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        entries = getattr(config, name, None)
        if isinstance(entries, list) and type(layers) is int and len(entries) > layers:
            setattr(config, name, [*dict.fromkeys(entries), *entries][:layers])
