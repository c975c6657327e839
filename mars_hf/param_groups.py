"""Form parameter groups: from a model's modules and names, or from the shapes of plain parameters.

The role of a group says what its parameters take: a `matrix` the MARS rule, a `vector` AdamW (the MARS rule with
`optimize_1d`), `adamw` AdamW, always.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mars_hf import matrix_layouts
from mars_hf.distributed.shards import reject_parts
from mars_hf.distributed.tensors import shape_of
from mars_hf.matrix_layouts import LeftOut, MatrixLayout
from mars_hf.newton_schulz import coefficients_of
from mars_hf.settings import (
    GROUP_KEYS,
    KEYS_1D,
    LABEL_KEYS,
    ORTHOGONAL_TYPES,
    ROLES,
    Override,
    check_values,
    reject_unknown,
)
from mars_hf.update_rules import UPDATE_RULES, update_rule

_NORM_CLASS = re.compile(r"norm(\dd)?$", re.IGNORECASE)
# Biases, and the magnitudes of DoRA, which for convolutions have the dimensions of the weight.
_VECTOR_NAME = re.compile(r"(?:^|[._])bias$|(?:^|\.)lora_magnitude_vector\.")
# The names that transformers.Trainer keeps out of weight decay.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
# Layers that turn hidden states into scores, tokens, labels or boxes, by the last part of their path. Attention and
# pooling have heads of another kind.
_HEAD_NAME = re.compile(
    r"(?:\w+_)?(?:classifier|head|predictor|pred)(?:_distill)?|heads|score|cls|qa_outputs|seq_relationship|embed_out"
    r"|(?:class|bbox)_embed|vocab_projector|ctc_proj|\w*logits_proj"
)
# The groups of a model: role, and whether `weight_decay` applies.
_ORDER = [("matrix", True), ("matrix", False), ("adamw", True), ("adamw", False), ("vector", True)]


def param_groups(
    model: nn.Module,
    *,
    mars_type: str = "mars-adamw",
    split_fused: Any = "auto",
    lr_embeddings: float | None = None,
    param_rules: Sequence[Override] = (),
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model: decayed matrices, undecayed matrices, what takes AdamW, vectors.

    Groups hold trainable parameters, named, in the order of `model.named_parameters()`, each once (tied weights under
    their first name). Empty groups are omitted. The groups of each override of `param_rules` follow, in the order of
    the overrides; they hold what the override states, and its `pattern`.

    - Vectors: parameters of fewer than two dimensions, and whatever their shape every bias, every parameter of a
      normalization layer and the magnitudes of DoRA. They set no decay, so `weight_decay_1d` applies.
    - Matrices: all others, embeddings included. They decay as under `transformers.Trainer`.
    - mars-shampoo and mars-m orthogonalize weights that multiply activations (see `matrix_layouts.of_model`); each
      `layout` has its own group. Embeddings, heads, tables, scales and parameters of unknown modules have the role
      `adamw`; `left_out` of their group maps names to reasons.

    Args:
        model: any module; PEFT wrappers need nothing special, frozen weights are skipped.
        mars_type: see `Mars`.
        split_fused: for mars-shampoo and mars-m, see `matrix_layouts.of_model`.
        lr_embeddings: learning rate of embeddings and heads, tied ones included; None: that of their role.
        param_rules: settings by name, checked; they win over the other arguments. See `create`.

    Raises:
        ValueError: no trainable parameter, a pattern that matches nothing, an override's role that does not fit,
            `lr_embeddings` for a model without embeddings or heads, `split_fused` with a rule that does not
            orthogonalize, or one that does not fit.
    """
    override_indices = _assign(model, param_rules) if param_rules else {}
    layouts: dict[nn.Parameter, MatrixLayout | LeftOut] = {}
    named_types = [mars_type, *(override.settings.get("mars_type", mars_type) for override in param_rules)]
    if any(UPDATE_RULES[name].orthogonalizes for name in named_types):
        layouts = matrix_layouts.of_model(model, split_fused)
    elif split_fused != "auto":
        raise ValueError(
            f"split_fused={split_fused!r} for mars_type={mars_type!r}, which orthogonalizes nothing; accepted with "
            f"{', '.join(map(repr, ORTHOGONAL_TYPES))}"
        )
    tables = embeddings_and_heads(model) if layouts or lr_embeddings is not None else {}
    # Why a parameter is not orthogonalized; an embedding or head is one under any module.
    reasons = {param: layout.reason for param, layout in layouts.items() if isinstance(layout, LeftOut)} | tables
    norms = {
        param
        for module in model.modules()
        if _NORM_CLASS.search(type(module).__name__)
        for param in module.parameters(recurse=False)
    }
    groups: dict[tuple[int, int, str], dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        index = override_indices.get(param, -1)
        stated = dict(param_rules[index].settings) if index >= 0 else {}
        orthogonal = UPDATE_RULES[stated.get("mars_type", mars_type)].orthogonalizes
        is_vector = len(shape_of(param)) < 2 or param in norms or _VECTOR_NAME.search(name) is not None
        role = "vector" if is_vector else "adamw" if orthogonal and param in reasons else "matrix"
        settings: dict[str, Any] = {"role": stated.get("role", role)}
        if settings["role"] == "matrix" and orthogonal:
            known = layouts.get(param)
            settings["layout"] = matrix_layouts.to_plain(known) if isinstance(known, MatrixLayout) else None
        if settings["role"] != "vector" and _NO_DECAY_NAME.search(name):
            settings["weight_decay"] = 0.0
        if lr_embeddings is not None and param in tables and not is_vector:
            settings |= _rate_of_table(settings["role"], stated, lr_embeddings)
        place = _ORDER.index((settings["role"], "weight_decay" not in settings))
        settings |= stated | ({"pattern": param_rules[index].pattern} if index >= 0 else {})
        group = groups.setdefault((index, place, repr(settings)), {"params": [], **settings})
        group["params"].append((name, param))
        if orthogonal and settings["role"] != "matrix" and param in layouts:
            by_itself = reasons[param] if role == "adamw" else "bias or norm"
            reason = f"role {stated['role']!r} in param_rules" if "role" in stated else by_itself
            group.setdefault("left_out", {})[name] = reason
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad=True on those to be trained, or "
            "load a PEFT adapter with is_trainable=True"
        )
    if lr_embeddings is not None and not any(param.requires_grad for param in tables):
        raise ValueError(
            f"lr_embeddings={lr_embeddings!r}: {type(model).__name__} trains no embedding or head; remove lr_embeddings"
        )
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]  # stable


def _assign(model: nn.Module, overrides: Sequence[Override]) -> dict[nn.Parameter, int]:
    """Map trainable parameters to the first override, by its index, that matches one of their names (tied have more).

    Raises:
        ValueError: an override that decides nothing: it matches no trainable parameter, or earlier ones match the same.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    indices: dict[nn.Parameter, int] = {}
    for index, (pattern, _) in enumerate(overrides):
        trained = [
            param
            for param, param_names in names.items()
            if param.requires_grad and any(fnmatch.fnmatchcase(name, pattern) for name in param_names)
        ]
        if all(param in indices for param in trained):
            free = [name for param in names if param.requires_grad and param not in indices for name in names[param]]
            near = difflib.get_close_matches(pattern.strip("*"), free, n=3, cutoff=0.0)
            raise ValueError(
                f"param_rules: {pattern!r} decides nothing: it matches no trainable parameter that those before "
                f"it leave; those are named like {', '.join(map(repr, near))}"
            )
        for param in trained:
            indices.setdefault(param, index)
    return indices


def _rate_of_table(role: str, stated: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """Return the rate of an embedding or head, unless its override states one."""
    if "lr" in stated or (role != "matrix" and "lr_1d" in stated):
        return {}
    # A vector is under AdamW or, with optimize_1d, under the rule of the matrices.
    keys = {"matrix": ["lr"], "adamw": ["lr_1d"], "vector": ["lr", "lr_1d"]}[role]
    return dict.fromkeys(keys, lr)


def embeddings_and_heads(model: nn.Module) -> dict[nn.Parameter, str]:
    """Map parameters of embeddings and heads, tied ones included, to `"embedding"` or `"head"`.

    Heads are the model's own output embeddings or classifier, and the last layer of each module with the name of a
    head. Adapters of PEFT count as what they adapt.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tables: dict[nn.Parameter, str] = {}
    heads: list[nn.Module] = []
    for path, module in modules.items():
        base = module
        while isinstance(wrapped := getattr(base, "base_layer", None), nn.Module):
            base = wrapped
        if isinstance(base, (nn.Embedding, nn.EmbeddingBag)):
            tables |= dict.fromkeys(module.parameters(), "embedding")
        heads += _outputs(module)
        parent, _, name = path.rpartition(".")
        kinds = f"{type(module).__name__} {type(modules[parent]).__name__}"
        ends_model = path == "fc" and module is list(model.children())[-1]
        if ends_model or (_HEAD_NAME.fullmatch(name) and "Attention" not in kinds):
            heads += _last_layers(module)
    return dict.fromkeys((param for head in heads for param in head.parameters()), "head") | tables


def _outputs(module: nn.Module) -> list[nn.Module]:
    """Return the output embeddings of a transformers model, or the classifier of a timm model."""
    for getter in ("get_output_embeddings", "get_classifier"):
        try:
            outputs = getattr(module, getter)()
        except (AttributeError, TypeError, NotImplementedError):  # none, or one with arguments of its own
            continue
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return [output for output in outputs if isinstance(output, nn.Module)]
    return []


def _last_layers(module: nn.Module) -> list[nn.Module]:
    """Return the last layer with a weight; for a list or dict of modules, the last of each."""
    children = [child for child in module.children() if any(len(shape_of(param)) > 1 for param in child.parameters())]
    if hasattr(module, "base_layer") or not children:
        return [module]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [layer for child in children for layer in _last_layers(child)]
    return _last_layers(children[-1])


def split_by_role(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split one parameter group into matrices and vectors, in this order, each in the order given.

    Empty parts are omitted; an empty group stays, as a matrix group. A group with a `role` is not split. A group's own
    settings apply to all its parameters, with two exceptions for vectors: `lr_1d`, `betas_1d` and `weight_decay_1d`
    override the plain settings, and the group's `lr` is scaled by the ratio lr_1d / lr of the defaults (with
    lr_1d=None: 1/2, or 1 for mars-m). The role `adamw`, which only a group states, has the settings of vectors.

    Args:
        group: a dict with `params` (a tensor, or an iterable of tensors or (name, tensor) pairs) and any
            hyperparameter of `Mars`; other keys are kept.
        defaults: every hyperparameter of `Mars`.

    Raises:
        ValueError: a key that is nearly a setting's name, a value out of range, a vector in a group with role `matrix`,
            or a layout that does not fit.
    """
    names = [name for name in group if name not in LABEL_KEYS]
    reject_unknown(names, (*GROUP_KEYS, *KEYS_1D, "role"), "parameter group", labels=True)
    group = {"layout": None, **check_values(group)}
    settings = {**defaults, **group}
    if UPDATE_RULES[settings["mars_type"]].orthogonalizes:
        coefficients_of(settings["ns_coefficients"], settings["ns_steps"])
    lr, lr_1d = float(settings["lr"]), settings["lr_1d"]
    follows = group.get("role") in ("adamw", "matrix") or ("lr" in group and "lr_1d" not in group)
    if lr_1d is not None and not follows and float(lr_1d) > (1 + 1e-9) * 10 * lr:  # often `lr` was left at its default
        warnings.warn(
            f"lr_1d={float(lr_1d):g}, the rate of vectors (biases, norms), is more than ten times lr={lr:g}, that of "
            "matrices. Set lr (learning_rate in TrainingArguments, 5e-5 by default), or leave lr_1d out: vectors then "
            "follow lr",
            stacklevel=3,
        )
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params is a set, whose order changes from run to run; use a list")
    entries = [params] if isinstance(params, Tensor) else list(params)

    parts: dict[str, list[Any]] = {} if entries else {group.get("role", "matrix"): []}
    for entry in entries:
        name, param = entry if isinstance(entry, tuple) else (None, entry)
        if not isinstance(param, Tensor):
            raise TypeError(f"optimizers take tensors, or (name, tensor) pairs; got {type(param).__name__}")
        reject_parts(param)
        shape = shape_of(param)
        role = group.get("role") or ("matrix" if len(shape) >= 2 else "vector")
        if role == "matrix" and len(shape) < 2:
            where = f"param_rules {group['pattern']!r}: " if "pattern" in group else ""
            what = "a parameter" if name is None else repr(name)
            raise ValueError(
                f"{where}role='matrix' for {what} of shape {tuple(shape)}; a matrix has two or more dimensions, use "
                "role='vector' or a narrower pattern"
            )
        if role == "matrix" and UPDATE_RULES[settings["mars_type"]].orthogonalizes and group["layout"] is not None:
            matrix_layouts.check_shape(shape, MatrixLayout(**group["layout"]))
        parts.setdefault(role, []).append(entry)
    stated = {key: value for key, value in group.items() if key not in KEYS_1D}
    split = []
    for role in sorted(parts, key=ROLES.index):
        one_role = {**stated, "params": parts[role], "role": role}
        if not update_rule({**settings, **one_role}).corrects:
            one_role |= _vector_settings(group, defaults)
        split.append(one_role)
    return split


def _vector_settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return learning rate, betas and decay for the parameters of a group that use AdamW."""
    ratio_base, lr_1d = defaults["lr"], defaults["lr_1d"]
    if group.get("lr_1d") is not None:
        lr = group["lr_1d"]
    elif lr_1d is None:
        lr = group.get("lr", ratio_base) * UPDATE_RULES[group.get("mars_type", defaults["mars_type"])].lr_1d_ratio
    elif "lr" in group and ratio_base > 0:
        lr = group["lr"] * (lr_1d / ratio_base)
    else:
        lr = lr_1d
    return {
        "lr": lr,
        "betas": group.get("betas_1d", group.get("betas", defaults["betas_1d"])),
        "weight_decay": group.get("weight_decay_1d", group.get("weight_decay", defaults["weight_decay_1d"])),
    }


def warn_of_one_rate(groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Warn if a schedule gives matrices and vectors the same rate although their rates differ."""
    peaks = {update_rule(group).corrects: group.get("swa_lr", group.get("max_lr")) for group in groups}
    lr_1d = _vector_settings({}, defaults)["lr"]
    if len(peaks) == 2 and None not in peaks.values() and peaks[True] == peaks[False] and lr_1d != defaults["lr"]:
        warnings.warn(
            f"the schedule takes all groups to a rate of {peaks[True]:g}; vectors had {float(lr_1d):g} where matrices "
            f"had {float(defaults['lr']):g}; give OneCycleLR, CyclicLR or SWALR a list of rates, one a group",
            stacklevel=10,  # of the call of step(), which schedulers wrap
        )
