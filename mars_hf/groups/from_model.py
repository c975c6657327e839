"""Which parameter takes which rule: parameters or a model become groups with a role, a learning rate and decay."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mars_hf.distributed import placement as sharding
from mars_hf.groups import matrix_layouts as layouts
from mars_hf.groups import settings as hyperparameters
from mars_hf.groups.matrix_layouts import shape_of

# The names transformers.Trainer keeps out of weight decay.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
_NORM_MODULES = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
_NORM_CLASS_NAME = re.compile(r"norm(\dd)?$", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(?:^|[._])bias$")
# The groups of a model: role, and whether `weight_decay` holds.
_ORDER = [("matrix", True), ("matrix", False), ("embedding", True), ("embedding", False), ("vector", True)]


def role_of(param: Tensor, matrix_ndim: str) -> str:
    """`matrix` or `vector` by the number of dimensions: two or more (`">=2"`), or exactly two (`"==2"`)."""
    ndim = len(shape_of(param))
    return "matrix" if (ndim == 2 if matrix_ndim == "==2" else ndim >= 2) else "vector"


def takes_mars(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of an optimizer's group take the MARS rule; plain AdamW otherwise."""
    return bool(group["role"] == "matrix" or (group["role"] == "vector" and group["optimize_1d"]))


def rule_of(group: Mapping[str, Any]) -> str:
    """The rule that the parameters of an optimizer's group take: a `mars_type`, or plain `adamw`."""
    if not takes_mars(group):
        return "adamw"
    if group["mars_type"] in hyperparameters.ORTHOGONAL_TYPES and group["role"] != "matrix":
        return "mars-adamw"  # as in the official code
    return str(group["mars_type"])


def orthogonalizes(group: Mapping[str, Any]) -> bool:
    """Whether the first moments of an optimizer's group are orthogonalized."""
    return rule_of(group) in hyperparameters.ORTHOGONAL_TYPES


def split_by_role(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split one parameter group into matrices, vectors and embeddings, in this order, each in the order given.

    A part without parameters is left out (a group that had none stays, as a matrix group). A group that states its
    `role` is not split. What a group states itself holds for all of its parameters, except that vectors take
    `lr_1d`, `betas_1d` and `weight_decay_1d` where the group states those, and that a stated `lr` is the matrices':
    vectors take it times the ratio lr_1d / lr of the defaults (where lr_1d is None 1/2, or 1 for mars-m). Embeddings,
    which are only what a group states to be such, have the settings of vectors.

    Args:
        group: a dict with `params` (a tensor, an iterable of tensors, or of (name, tensor) pairs) and any
            hyperparameter of `Mars`; other keys are carried along.
        defaults: every hyperparameter of `Mars`.

    Raises:
        ValueError: a key that is nearly a setting's name, a value out of range, a vector in a group whose role is
            `matrix`, a layout that does not fit, `capturable` with a rule that orthogonalizes.
    """
    hyperparameters.reject_misspelled(group, "parameter group")
    hyperparameters.check(group)
    group = {**group, **hyperparameters.plain({key: value for key, value in group.items() if key != "params"})}
    settings = {**defaults, **group}
    hyperparameters.ns_coefficients(settings)
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params is a set, whose order changes from run to run; use a list")
    entries = [params] if isinstance(params, Tensor) else list(params)

    parts: dict[str, list[Any]] = {role: [] for role in hyperparameters.ROLES}
    for entry in entries:
        param = entry[1] if isinstance(entry, tuple) else entry
        if not isinstance(param, Tensor):
            raise TypeError(f"optimizers take tensors, or (name, tensor) pairs; got {type(param).__name__}")
        sharding.reject_fsdp1(param)
        role = group.get("role") or role_of(param, settings["matrix_ndim"])
        if role == "matrix" and len(shape_of(param)) < 2:
            raise ValueError(
                f"role='matrix' for a parameter of shape {tuple(shape_of(param))}; "
                "a matrix has two or more dimensions, use role='vector'"
            )
        parts[role].append(entry)
    if not entries:
        parts = {group.get("role", "matrix"): []}
    stated = {key: value for key, value in group.items() if key not in hyperparameters.KEYS_1D}
    stated["layout"] = layouts.to_plain(settings["layout"])
    split = []
    for role, part in parts.items():
        if part or not entries:
            own = {"params": part, "role": role}
            _check_orthogonal({**settings, **own})
            if not takes_mars({**settings, **own}):
                own |= _vector_settings(group, defaults)
            split.append({**stated, **own})
    return split


def _check_orthogonal(group: Mapping[str, Any]) -> None:
    """Raise ValueError for matrices that are to be orthogonalized and cannot be."""
    if not orthogonalizes(group):
        return
    if group["capturable"]:
        raise ValueError(
            f"capturable=True and mars_type={group['mars_type']!r}: the step of its matrices cannot be captured; use "
            "capturable=False"
        )
    layout = layouts.from_plain(group["layout"])
    for entry in group["params"]:
        shape = shape_of(entry[1] if isinstance(entry, tuple) else entry)
        layouts.check(shape, layout or layouts.of_shape(shape))


def _vector_settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate, betas and decay of the vectors or embeddings of a group, which take AdamW."""
    ratio_base, lr_1d = defaults["lr"], defaults["lr_1d"]
    if group.get("lr_1d") is not None:
        lr = group["lr_1d"]
    elif lr_1d is None:
        lr = group.get("lr", ratio_base) * hyperparameters.lr_1d_ratio(group.get("mars_type", defaults["mars_type"]))
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
    """Warn if a cyclic schedule has given matrices and vectors one rate, where their rates have another ratio."""
    peaks = {bool(takes_mars(group)): group.get("max_lr") for group in groups}
    lr_1d = _vector_settings({}, defaults)["lr"]
    if len(peaks) == 2 and None not in peaks.values() and peaks[True] == peaks[False] and lr_1d != defaults["lr"]:
        warnings.warn(
            f"the schedule gives all groups max_lr={peaks[True]:g}; vectors had {float(lr_1d):g} where matrices had "
            f"{float(defaults['lr']):g}; give OneCycleLR and CyclicLR a list of rates, one a group",
            stacklevel=4,
        )


def from_model(
    model: nn.Module,
    *,
    matrix_ndim: str = ">=2",
    no_decay: Sequence[str] = (),
    mars_type: str = "mars-adamw",
    split_fused: Any = "auto",
    orthogonalize_embeddings: bool = False,
    adamw: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups of a model, by module and shape: decayed matrices, undecayed matrices, embeddings, vectors.

    Trainable parameters only, each once (tied weights under the first of their names), named, in the order of
    `model.named_parameters()`; a group without parameters is left out.

    - Vectors: parameters that are no matrix by `matrix_ndim`, every bias and every parameter of a normalization layer
      whatever its shape. They state no decay and so take `weight_decay_1d`.
    - Matrices: all others, embeddings included. Decayed as `transformers.Trainer` would; those whose name matches a
      pattern of `no_decay` have `weight_decay` 0 as well.
    - With mars-shampoo and mars-m, a matrix is orthogonalized only if activations are multiplied with it (see
      `layouts.left_out`), in a group for each `layout` (see `layouts.of_model`). Embeddings, heads, tables, scales and
      what `adamw` names take AdamW with the settings of vectors. `left_out` of their group has names and reasons.

    Args:
        model: any module; PEFT wrappers need nothing special, their frozen weights are left out like any other.
        matrix_ndim: `">=2"` or `"==2"`, see `Mars`.
        no_decay: shell patterns of parameter names (`"*.wte.weight"`); each must match at least one matrix.
        mars_type: as `Mars`. The arguments below are for mars-shampoo and mars-m.
        split_fused: which fused projections are orthogonalized part by part, see `layouts.of_model`. A pattern also
            vouches for parameters of modules that nothing is known of.
        orthogonalize_embeddings: embeddings and heads are orthogonalized like other matrices.
        adamw: shell patterns of names of further parameters that take AdamW; each must match one.

    Raises:
        ValueError: the model has no trainable parameter, a pattern matches nothing, a `split_fused` that does not fit,
            or one of the last three arguments for a rule without orthogonalization.
    """
    norms = {
        id(param)
        for module in model.modules()
        if isinstance(module, _NORM_MODULES) or _NORM_CLASS_NAME.search(type(module).__name__)
        for param in module.parameters(recurse=False)
    }
    rest = {"orthogonalize_embeddings": orthogonalize_embeddings, "adamw": adamw}
    left_out, stated = _orthogonal(model, mars_type, split_fused, **rest)
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    unused = list(no_decay)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        own: dict[str, Any] = {"role": "vector"}
        if role_of(param, matrix_ndim) == "matrix" and id(param) not in norms and not _BIAS_NAME.search(name):
            own = {"role": "embedding"} if name in left_out else {"role": "matrix", **stated.get(name, {})}
            matched = [pattern for pattern in no_decay if fnmatch.fnmatchcase(name, pattern)]
            unused = [pattern for pattern in unused if pattern not in matched]
            if matched or _NO_DECAY_NAME.search(name):
                own["weight_decay"] = 0.0
        place = _ORDER.index((own["role"], "weight_decay" not in own))
        group = groups.setdefault((place, repr(own)), {"params": [], **own})
        group["params"].append((name, param))
        if own["role"] != "matrix" and name in stated:
            is_vector = own["role"] == "vector"
            reason = _reason_of_vector(param, matrix_ndim, id(param) in norms) if is_vector else left_out[name]
            group.setdefault("left_out", {})[name] = reason
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad=True on those to be trained"
        )
    found = [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # stable
    if unused:
        names = [name for group in found if group["role"] != "vector" for name, _ in group["params"]]
        raise ValueError(
            f"no_decay={unused!r} matches no matrix of {type(model).__name__}; its matrices are named like "
            f"{', '.join(map(repr, names[:3]))}"
        )
    return found


def _reason_of_vector(param: Tensor, matrix_ndim: str, is_norm: bool) -> str:
    """Why a parameter of two or more dimensions is a vector."""
    if role_of(param, matrix_ndim) == "vector":
        return f"matrix_ndim={matrix_ndim!r}"
    return "normalization" if is_norm else "bias"


def _orthogonal(
    model: nn.Module, mars_type: str, split_fused: Any, **rest: Any
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """For rules that orthogonalize: why matrices take AdamW, by name, and what the groups of the others state."""
    if mars_type in hyperparameters.ORTHOGONAL_TYPES:
        found = layouts.of_model(model, split_fused=split_fused)
        stated = split_fused if isinstance(split_fused, Mapping) else ()
        left_out = layouts.left_out(model, projections=stated, **rest)
        return left_out, {name: {"layout": layouts.to_plain(layout)} for name, layout in found.items()}
    options = {"split_fused": split_fused if split_fused != "auto" else None, **rest}
    given = [f"{name}={value!r}" for name, value in options.items() if value]
    if given:
        raise ValueError(
            f"{', '.join(given)} for mars_type={mars_type!r}, which orthogonalizes nothing; accepted with "
            f"{', '.join(map(repr, hyperparameters.ORTHOGONAL_TYPES))}"
        )
    return {}, {}


def summary(param_groups: Iterable[Mapping[str, Any]]) -> str:
    """A table of parameter groups, and below it what is not orthogonalized: names by reason, digits as `*`."""
    rows = [("role", "rule", "tensors", "elements", "lr", "betas", "weight decay")]
    left_out: dict[str, list[str]] = {}
    for group in param_groups:
        rows.append(
            (
                group["role"],
                rule_of(group),
                str(len(group["params"])),
                f"{sum(shape_of(param).numel() for param in group['params']):,}",
                f"{float(group['lr']):g}",
                "({:g}, {:g})".format(*group["betas"]),
                f"{group['weight_decay']:g}",
            )
        )
        for name, reason in (group.get("left_out") or {}).items():
            left_out.setdefault(reason, []).append(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if left_out:
        lines.append("not orthogonalized:")
    for reason, names in left_out.items():
        counts = [f"{name} ({count})" if count > 1 else name for name, count in Counter(names).items()]
        lines.append(f"  {reason}: {', '.join(counts)}")
    return "\n".join(lines)
