"""Build the parameter groups of a model by module, name and shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mars_hf import _compat
from mars_hf.distributed.placement import shape_of
from mars_hf.groups import adapters, heads, matrix_layouts
from mars_hf.groups.param_rules import Rule, assign
from mars_hf.groups.roles import role_of
from mars_hf.groups.settings import ORTHOGONAL_TYPES

# The names transformers.Trainer keeps out of weight decay.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)

_NORM_MODULES = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    _compat.BATCH_NORM,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)

_NORM_CLASS_NAME = re.compile(r"norm(\dd)?$", re.IGNORECASE)

# Biases, and the magnitudes of DoRA, which for convolutions have the dimensions of the weight.
_VECTOR_NAME = re.compile(r"(?:^|[._])bias$|(?:^|\.)lora_magnitude_vector\.")

_NO_RULE = Rule("", {})

# The groups of a model: role, and whether `weight_decay` applies.
_ORDER = [("matrix", True), ("matrix", False), ("adamw", True), ("adamw", False), ("vector", True)]


def from_model(
    model: nn.Module,
    *,
    mars_type: str = "mars-adamw",
    split_fused: Any = "auto",
    lr_embeddings: float | None = None,
    param_rules: Sequence[Rule] = (),
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model: decayed matrices, undecayed matrices, what takes AdamW, vectors.

    Groups hold trainable parameters, named, in the order of `model.named_parameters()`, each once (tied weights under
    their first name). Empty groups are omitted. The groups of each rule of `param_rules` follow, in the order of the
    rules; they hold what the rule states, and its `pattern`.

    - Vectors: parameters of fewer than two dimensions, and whatever their shape every bias, every parameter
      of a normalization layer and the magnitudes of DoRA. They set no decay, so `weight_decay_1d` applies.
    - Matrices: all others, embeddings included. They decay as under `transformers.Trainer`.
    - mars-shampoo and mars-m orthogonalize a matrix only if activations are multiplied with it (see
      `matrix_layouts.left_out`); each `layout` has its own group (see `matrix_layouts.of_model`). Embeddings, heads,
      tables and scales have the role `adamw`: AdamW with the settings of vectors; `left_out` of their group maps names
      to reasons.

    Args:
        model: any module; PEFT wrappers need nothing special, frozen weights are skipped.
        mars_type: see `Mars`.
        split_fused: for mars-shampoo and mars-m: fused projections to orthogonalize part by part, see
            `matrix_layouts.of_model`. A pattern also admits parameters of unknown modules.
        lr_embeddings: learning rate of embeddings and heads, tied ones included, with any rule; None: that of their
            role.
        param_rules: settings by name, checked; they win over the other arguments. See `create`.

    Raises:
        ValueError: no trainable parameter, trainable adapters that are merged, a pattern that matches nothing, a rule's
            role that does not fit, a `split_fused` that does not fit, `lr_embeddings` for a model without embeddings or
            heads, or `split_fused` with a rule that does not orthogonalize.
    """
    norms = {
        id(param)
        for module in model.modules()
        if isinstance(module, _NORM_MODULES) or _NORM_CLASS_NAME.search(type(module).__name__)
        for param in module.parameters(recurse=False)
    }
    adapted = adapters.layers(model)
    if (why := adapters.why_untrainable(adapted)) is not None:
        raise ValueError(why)
    rules = assign(model, param_rules)
    kinds = {mars_type, *(rule.settings.get("mars_type", mars_type) for rule in rules.values())}
    left_out, stated = _orthogonal(model, kinds, mars_type, split_fused)
    outside = heads.embeddings_and_heads(model) if lr_embeddings is not None else {}
    groups: dict[tuple[int, int, str], dict[str, Any]] = {}
    has_outside = False
    places = {rule.pattern: index for index, rule in enumerate(param_rules, 1)}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        rule = rules.get(id(param), _NO_RULE)
        orthogonal = rule.settings.get("mars_type", mars_type) in ORTHOGONAL_TYPES
        is_vector = role_of(param) == "vector" or id(param) in norms or bool(_VECTOR_NAME.search(name))
        role = "vector" if is_vector else "adamw" if orthogonal and name in left_out else "matrix"
        own: dict[str, Any] = {"role": _stated_role(rule, name, param) or role}
        if own["role"] == "matrix" and orthogonal:
            own |= stated.get(name, {})
        if own["role"] != "vector" and _NO_DECAY_NAME.search(name):
            own["weight_decay"] = 0.0
        if id(param) in outside and not is_vector:
            has_outside = True
            own |= _rate_of_embedding(own["role"], rule, lr_embeddings)
        place = _ORDER.index((own["role"], "weight_decay" not in own))
        own |= rule.settings
        if rule is not _NO_RULE:
            own["pattern"] = rule.pattern
        group = groups.setdefault((places.get(rule.pattern, 0), place, repr(own)), {"params": [], **own})
        group["params"].append((name, param))
        if own["role"] != "matrix" and orthogonal and name in stated:
            reason = _reason_of_vector(name, id(param) in norms) if is_vector else left_out.get(name, "")
            stated_by = f"role {own['role']!r} in param_rules" if "role" in rule.settings else ""
            group.setdefault("left_out", {})[name] = stated_by or reason
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad=True on those to be trained"
            + (", or load the adapter with PeftModel.from_pretrained(..., is_trainable=True)" if adapted else "")
        )
    found = [groups[key] for key in sorted(groups, key=lambda key: key[:2])]  # stable
    if lr_embeddings is not None and not has_outside:
        raise ValueError(
            f"lr_embeddings={lr_embeddings!r}: {type(model).__name__} trains no embedding or head; leave it out"
        )
    return found


def _stated_role(rule: Rule, name: str, param: Tensor) -> str | None:
    """Return the role that a rule gives a parameter, if any; raise ValueError for one that it cannot have."""
    role = rule.settings.get("role")
    shape = tuple(shape_of(param))
    if role == "matrix" and len(shape) < 2:
        raise ValueError(
            f"param_rules {rule.pattern!r}: role='matrix' for {name!r} of shape {shape}; a matrix has two or more "
            "dimensions, narrow the pattern or put a rule for the vectors before"
        )
    return role


def _rate_of_embedding(role: str, rule: Rule, lr: float | None) -> dict[str, Any]:
    """Return the rate of an embedding or head, unless its rule states one."""
    if "lr" in rule.settings or (role != "matrix" and "lr_1d" in rule.settings):
        return {}
    # A vector is under AdamW or, with optimize_1d, under the rule of the matrices.
    keys = {"matrix": ["lr"], "adamw": ["lr_1d"], "vector": ["lr", "lr_1d"]}[role]
    return dict.fromkeys(keys, lr)


def _reason_of_vector(name: str, is_norm: bool) -> str:
    """Return why a parameter of two or more dimensions is a vector."""
    return "normalization" if is_norm else "magnitude" if "lora_magnitude_vector" in name else "bias"


def _orthogonal(
    model: nn.Module, kinds: Collection[str], mars_type: str, split_fused: Any
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Return, by name, why matrices use AdamW, and the keys that groups of orthogonalized matrices need.

    Args:
        model: any module.
        kinds: every `mars_type` that a parameter has.
        mars_type: that of parameters without a rule.
        split_fused: see `from_model`.
    """
    if not set(ORTHOGONAL_TYPES).isdisjoint(kinds):
        found = matrix_layouts.of_model(model, split_fused=split_fused)
        stated = split_fused if isinstance(split_fused, Mapping) else ()
        left_out = matrix_layouts.left_out(model, projections=stated)
        return left_out, {name: {"layout": matrix_layouts.to_plain(layout)} for name, layout in found.items()}
    if split_fused != "auto":
        raise ValueError(
            f"split_fused={split_fused!r} for mars_type={mars_type!r}, which orthogonalizes nothing; accepted with "
            f"{', '.join(map(repr, ORTHOGONAL_TYPES))}"
        )
    return {}, {}
