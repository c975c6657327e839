"""Form parameter groups: from a model's modules and names, or from the shapes of plain parameters.

The role of a group says what its parameters take: a `matrix` the MARS rule, a `vector` AdamW (the MARS rule with
`optimize_1d`), `adamw` AdamW, always.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mars_hf.arithmetic import matrix_layouts
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.arithmetic.newton_schulz import coefficients_of
from mars_hf.arithmetic.update_rules import UPDATE_RULES, update_rule
from mars_hf.distributed.shards import require_known_parts
from mars_hf.distributed.tensors import shape_of
from mars_hf.groups import heads, model_layouts
from mars_hf.groups.model_layouts import LeftOut
from mars_hf.groups.settings import (
    GROUP_KEYS,
    KEYS_1D,
    LABEL_KEYS,
    ROLES,
    SETTINGS,
    Override,
    check_decoupled_decay,
    check_names,
    check_values,
    shown,
    without_torch_keywords,
)

_NORM_CLASS = re.compile(r"norm(\dd)?$", re.IGNORECASE)
# Biases, and the magnitudes of DoRA, which for convolutions have the dimensions of the weight.
_VECTOR_NAME = re.compile(r"(?:^|[._])bias$|(?:^|\.)lora_magnitude_vector\.")
# The names that transformers.Trainer keeps out of weight decay.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
# Of parameters that no override matches; it sorts before the indices of overrides.
_NO_OVERRIDE = -1
_EMPTY = Override("", {})
# The groups of a model: role, and whether `weight_decay` applies.
_ORDER = [("matrix", True), ("matrix", False), ("adamw", True), ("adamw", False), ("vector", True), ("vector", False)]


def param_groups(
    model: nn.Module,
    *,
    mars_type: str = "mars-adamw",
    split_fused: Any = "auto",
    lr_embeddings: float | None = None,
    param_rules: Sequence[Override] = (),
    decayed: Mapping[str, float] | None = None,
    is_addition: bool = False,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model: decayed matrices, undecayed matrices, what takes AdamW, vectors.

    Groups hold trainable parameters, named, in the order of `model.named_parameters()`, each once (tied weights under
    their first name). Empty groups are omitted. The groups of each override of `param_rules` follow, in the order of
    the overrides; they hold what the override states, and its `pattern`.

    - Vectors: parameters of fewer than two dimensions, and whatever their shape every bias, every parameter of a
      normalization layer and the magnitudes of DoRA. They set no decay, so `weight_decay_1d` applies.
    - Matrices: all others, embeddings included. They decay as under `transformers.Trainer`.
    - mars-shampoo and mars-m orthogonalize weights that multiply activations (see `model_layouts.of_model`); each
      `layout` has its own group. Embeddings, heads, tables, scales and parameters of unknown modules have the role
      `adamw`; `left_out` of their group maps names to reasons.

    Args:
        model: any module; PEFT wrappers need nothing special, frozen weights are skipped.
        mars_type: see `Mars`.
        split_fused: for mars-shampoo and mars-m, see `model_layouts.of_model`.
        lr_embeddings: learning rate of embeddings and heads, tied ones included; None: that of their role.
        param_rules: settings by name, checked; they win over the other arguments. See `create`.
        decayed: names of the parameters that decay, where a Trainer's user says so, and the decay of a vector of that
            name; None: those that decay under `transformers.Trainer`.
        is_addition: the settings are those of an optimizer that exists, and may be for parameters frozen by now.

    Raises:
        ValueError: no trainable parameter, a pattern that matches nothing, an override's role that does not fit,
            `lr_embeddings` for a model without embeddings or heads, or a `split_fused` that does not fit.
    """
    of_model = _look_at_modules(model, mars_type, split_fused, param_rules, with_tables=lr_embeddings is not None)
    override_indices = _assign(model, param_rules, each_decides=not is_addition)
    groups: dict[tuple[int, int, str], dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        index = override_indices.get(param, _NO_OVERRIDE)
        override = param_rules[index] if param in override_indices else _EMPTY
        orthogonalizes = UPDATE_RULES[override.settings.get("mars_type", mars_type)].orthogonalizes
        settings = _settings_in_model(name, param, of_model, override.settings, orthogonalizes, lr_embeddings)
        settings |= _decay_by_name(name, settings["role"], decayed)
        order = _ORDER.index((settings["role"], "weight_decay" not in settings))
        settings |= override.settings
        if override is not _EMPTY:
            settings["pattern"] = override.pattern
        group = groups.setdefault((index, order, repr(settings)), {"params": [], **settings})
        group["params"].append((name, param))
        if orthogonalizes and settings["role"] != "matrix" and param in of_model.layouts:
            group.setdefault("left_out", {})[name] = _why_left_out(name, param, of_model, override.settings)
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad=True on those to be trained, or "
            "load a PEFT adapter with is_trainable=True"
        )
    if not is_addition:
        _require_tables(model, of_model, lr_embeddings)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]  # stable


def _require_tables(model: nn.Module, of_model: _OfModel, lr_embeddings: float | None) -> None:
    """Raise ValueError for a rate of embeddings and heads where none trains."""
    if lr_embeddings is not None and not any(param.requires_grad for param in of_model.tables):
        raise ValueError(
            f"lr_embeddings={lr_embeddings!r}: {type(model).__name__} trains no embedding or head; remove lr_embeddings"
        )


@dataclass(frozen=True)
class _OfModel:
    """What the modules of a model say about its parameters."""

    layouts: Mapping[nn.Parameter, MatrixLayout | LeftOut]  # empty if no rule orthogonalizes
    tables: Mapping[nn.Parameter, str]  # "embedding" or "head"; empty if nobody asks
    norms: frozenset[nn.Parameter]  # of normalization layers

    def is_vector(self, name: str, param: nn.Parameter) -> bool:
        return len(shape_of(param)) < 2 or param in self.norms or _VECTOR_NAME.search(name) is not None

    def reason(self, param: nn.Parameter) -> str | None:
        """Return why a parameter is not orthogonalized; an embedding or head is one under any module."""
        if param in self.tables:
            return self.tables[param]
        layout = self.layouts.get(param)
        return layout.reason if isinstance(layout, LeftOut) else None

    def role(self, name: str, param: nn.Parameter, orthogonalizes: bool) -> str:
        if self.is_vector(name, param):
            return "vector"
        if orthogonalizes and self.reason(param) is not None:
            return "adamw"
        return "matrix"


def _look_at_modules(
    model: nn.Module, mars_type: str, split_fused: Any, param_rules: Sequence[Override], *, with_tables: bool
) -> _OfModel:
    layouts: Mapping[nn.Parameter, MatrixLayout | LeftOut] = {}
    named_types = [mars_type, *(override.settings.get("mars_type", mars_type) for override in param_rules)]
    if any(UPDATE_RULES[name].orthogonalizes for name in named_types):
        layouts = model_layouts.of_model(model, split_fused)
    tables = heads.embeddings_and_heads(model) if layouts or with_tables else {}
    norms: set[nn.Parameter] = set()
    for module in model.modules():
        if _NORM_CLASS.search(type(module).__name__):
            norms.update(module.parameters(recurse=False))
    return _OfModel(layouts, tables, frozenset(norms))


def _settings_in_model(
    name: str,
    param: nn.Parameter,
    of_model: _OfModel,
    override: Mapping[str, Any],
    orthogonalizes: bool,
    lr_embeddings: float | None,
) -> dict[str, Any]:
    """Return what a parameter's place in the model decides; an override has the last word on the role alone."""
    role = override.get("role") or of_model.role(name, param, orthogonalizes)
    settings: dict[str, Any] = {"role": role}
    if role == "matrix" and orthogonalizes:
        layout = of_model.layouts.get(param)
        settings["layout"] = matrix_layouts.to_plain(layout) if isinstance(layout, MatrixLayout) else None
    is_table = param in of_model.tables and not of_model.is_vector(name, param)
    if lr_embeddings is not None and is_table:
        settings |= _rate_of_table(role, override, lr_embeddings)
    return settings


def _decay_by_name(name: str, role: str, decayed: Mapping[str, float] | None) -> dict[str, float]:
    """Return the decay that a parameter's name decides; nothing where that of its role applies."""
    if decayed is None:
        return {"weight_decay": 0.0} if role != "vector" and _NO_DECAY_NAME.search(name) else {}
    if name not in decayed:
        return {"weight_decay": 0.0}
    return {"weight_decay": decayed[name]} if role == "vector" else {}


def _why_left_out(name: str, param: nn.Parameter, of_model: _OfModel, override: Mapping[str, Any]) -> str:
    if "role" in override:
        return f"role {override['role']!r} in param_rules"
    reason = of_model.reason(param)
    if reason is None or of_model.is_vector(name, param):
        return "bias or norm"
    return reason


def _assign(model: nn.Module, overrides: Sequence[Override], *, each_decides: bool) -> dict[nn.Parameter, int]:
    """Map trainable parameters to the first override, by its index, that matches one of their names (tied have more).

    Raises:
        ValueError: with `each_decides`, an override that decides nothing: it matches no trainable parameter, or earlier
            ones match the same.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            names.setdefault(param, []).append(name)
    indices: dict[nn.Parameter, int] = {}
    for index, (pattern, _) in enumerate(overrides):
        matched = [param for param in names if _any_matches(names[param], pattern)]
        new = [param for param in matched if param not in indices]
        if not new and each_decides:
            free = [name for param in names if param not in indices for name in names[param]]
            raise ValueError(_of_no_effect(pattern, free))
        indices |= dict.fromkeys(new, index)
    return indices


def _of_no_effect(pattern: str, free: Sequence[str]) -> str:
    """Return the error of a pattern that matches none of the names that earlier patterns leave."""
    near = difflib.get_close_matches(pattern.strip("*"), free, n=3, cutoff=0.0)
    named = f"named like {', '.join(map(repr, near))}" if near else "none"
    return (
        f"param_rules: {shown(pattern)} decides nothing: it matches no remaining trainable parameter; those that "
        f"earlier patterns leave are {named}"
    )


def _any_matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _rate_of_table(role: str, override: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """Return the rate of an embedding or head, unless its override states one."""
    if "lr" in override or (role != "matrix" and "lr_1d" in override):
        return {}
    # A vector is under AdamW or, with optimize_1d, under the rule of the matrices.
    keys = {"matrix": ["lr"], "adamw": ["lr_1d"], "vector": ["lr", "lr_1d"]}[role]
    return dict.fromkeys(keys, lr)


def split_by_model(groups: Iterable[Any], model_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return somebody's groups, each split into those of its parameters that have the same settings in a model.

    Args:
        groups: what torch optimizers take: tensors, pairs (name, tensor) or dicts with `params`.
        model_groups: the model's groups, from `param_groups`; what they state wins. Other parameters keep their groups'
            own settings.
    """
    in_model, left_out = _by_param(model_groups)
    groups = [groups] if isinstance(groups, Tensor) else list(groups)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    parts: dict[tuple[int, str], dict[str, Any]] = {}
    for index, group in enumerate(groups):
        entries = entries_of(group, index)
        own = {key: value for key, value in group.items() if key != "left_out"}  # as of an earlier optimizer
        for entry in entries:
            param = _param_of(entry)
            settings = in_model.get(param, {})
            part = parts.setdefault((index, repr(settings)), {**own, **settings, "params": []})
            part["params"].append(entry)
            if left_out.get(param):
                part["left_out"] = {**part.get("left_out", {}), **left_out[param]}
    return list(parts.values())


def _by_param(model_groups: Iterable[Mapping[str, Any]]) -> tuple[dict[Any, Any], dict[Any, dict[str, str]]]:
    """Return what a model's groups state for each parameter, and its name with why it is left out, if it is."""
    stated: dict[Any, Mapping[str, Any]] = {}
    left_out: dict[Any, dict[str, str]] = {}
    for group in model_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "left_out")}
        reasons = group.get("left_out", {})
        for name, param in group["params"]:
            stated[param] = settings
            left_out[param] = {name: reasons[name]} if name in reasons else {}
    return stated, left_out


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of groups, without their names."""
    return [_param_of(entry) for group in groups for entry in group["params"]]


def _param_of(entry: Any) -> Any:
    return entry[1] if isinstance(entry, tuple) else entry


def split_by_role(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split one parameter group into matrices and vectors, in this order, each in the order given.

    Empty parts are omitted; an empty group stays, as a matrix group. A group with a `role` is not split. A group's own
    settings apply to all its parameters, with two exceptions for vectors: `lr_1d`, `betas_1d` and `weight_decay_1d`
    override the plain settings, and the group's `lr` is scaled by the ratio lr_1d / lr of the defaults (with
    lr_1d=None: 1/2, or 1 for mars-m). The role `adamw`, which only a group states, has the settings of vectors, and
    with weight_decay_1d=None the decay of matrices.

    Args:
        group: a dict with `params` (a tensor, or an iterable of tensors or (name, tensor) pairs) and any
            hyperparameter of `Mars`; other keys are kept.
        defaults: every hyperparameter of `Mars`.

    Raises:
        ValueError: a key that is nearly a setting's name, a value out of range, a vector in a group with role `matrix`,
            or a layout that does not fit.
    """
    entries = entries_of(group)
    _check_keys(group)
    group = {"layout": None, **check_values(group)}
    settings = {**defaults, **group}
    if UPDATE_RULES[settings["mars_type"]].orthogonalizes:
        coefficients_of(settings["ns_coefficients"], settings["ns_steps"])
    parts: dict[str, list[Any]] = {} if entries else {group.get("role", "matrix"): []}
    for entry in entries:
        parts.setdefault(_role_of(entry, group, settings), []).append(entry)
    without_1d = {key: value for key, value in group.items() if key not in KEYS_1D}
    split = []
    for role in sorted(parts, key=ROLES.index):
        one_role = {**without_1d, "params": parts[role], "role": role}
        if not update_rule({**settings, **one_role}).corrects:
            one_role |= _adamw_settings(role, group, defaults)
        # The decay of vectors is in weight_decay by now.
        check_decoupled_decay({**defaults, "weight_decay_1d": None, **one_role})
        split.append(one_role)
    return split


def _check_keys(group: Mapping[str, Any]) -> None:
    """Raise ValueError for keys of a group that are nearly settings, or are for all parameters together."""
    for name in group:
        is_of_create = name in SETTINGS and SETTINGS[name].scope in ("model", "run")
        if is_of_create or name in ("like", "process_group"):
            raise ValueError(
                f"parameter group: {name}={shown(group[name])} is an argument of mars_hf.create, for all parameters; "
                "give it there"
            )
    without_torch_keywords(group)
    names = [name for name in group if name not in LABEL_KEYS]
    check_names(names, (*GROUP_KEYS, *KEYS_1D, "role"), "parameter group", labels=True)


def entries_of(group: Mapping[str, Any], index: int | None = None) -> list[Any]:
    """Return a group's parameters as a list of tensors or (name, tensor) pairs.

    Raises:
        ValueError: it has none.
        TypeError: they have no order, or are no parameters.
    """
    where = "parameter group" if index is None else f"parameter group {index}"
    if "params" not in group:
        raise ValueError(
            f"{where} has no 'params', only {shown(list(group))}: give it the tensors, such as "
            "{'params': [...], 'lr': 1e-3}"
        )
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params is a set, whose order changes from run to run; use a list")
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(
            f"{where}: params is a {type(params).__name__}; give a list of tensors, such as list(model.parameters())"
        )
    return list(params)


def _role_of(entry: Any, group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the role of a group's entry; ValueError if it cannot have the role or the layout that the group states."""
    name, param = entry if isinstance(entry, tuple) else (None, entry)
    if not isinstance(param, Tensor):
        raise TypeError(
            f"optimizers take tensors, or (name, tensor) pairs; got {type(param).__name__}. mars_hf.create takes a "
            "module, or a list of modules"
        )
    require_known_parts(param)
    shape = shape_of(param)
    role = group.get("role") or ("matrix" if len(shape) >= 2 else "vector")
    if role != "matrix":
        return role
    if len(shape) < 2:
        where = f"param_rules {shown(group['pattern'])}: " if "pattern" in group else ""
        what = "a parameter" if name is None else repr(name)
        raise ValueError(
            f"{where}role='matrix' for {what} of shape {tuple(shape)}; a matrix has two or more dimensions, use "
            "role='vector' or a narrower pattern"
        )
    if UPDATE_RULES[settings["mars_type"]].orthogonalizes and group["layout"] is not None:
        matrix_layouts.check_shape(shape, MatrixLayout(**group["layout"]))
    return role


def _adamw_settings(role: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return learning rate, betas and decay for the parameters of a group that use AdamW."""
    return {
        "lr": _adamw_rate(group, defaults),
        "betas": group.get("betas_1d", group.get("betas", defaults["betas_1d"])),
        "weight_decay": _adamw_decay(role, group, defaults),
    }


def _adamw_rate(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Return the learning rate of parameters under AdamW: the first line that applies.

    | where                         | rate                                                           |
    | ----------------------------- | -------------------------------------------------------------- |
    | the group states `lr_1d`      | that                                                           |
    | the defaults have no `lr_1d`  | `lr` of the group or else the defaults, times the rule's ratio |
    | the group states `lr`         | that, times lr_1d / lr of the defaults                         |
    | otherwise, or at default lr 0 | `lr_1d` of the defaults                                        |
    """
    lr, lr_1d = defaults["lr"], defaults["lr_1d"]
    if group.get("lr_1d") is not None:
        return group["lr_1d"]
    if lr_1d is None:
        rule = UPDATE_RULES[group.get("mars_type", defaults["mars_type"])]
        return group.get("lr", lr) * rule.lr_1d_ratio
    if "lr" in group and lr > 0:
        return group["lr"] * (lr_1d / lr)
    return lr_1d


def _adamw_decay(role: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> float:
    """Return the decay of parameters under AdamW: embeddings and heads decay as matrices do, vectors if asked to."""
    if group.get("weight_decay_1d") is not None:
        return group["weight_decay_1d"]
    if "weight_decay" in group:
        return group["weight_decay"]
    if defaults["weight_decay_1d"] is not None:
        return defaults["weight_decay_1d"]
    return defaults["weight_decay"] if role == "adamw" else 0.0
