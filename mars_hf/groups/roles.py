"""Assign rules to parameter groups, and split groups by role."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mars_hf.distributed.placement import reject_parts, shape_of
from mars_hf.groups import matrix_layouts
from mars_hf.groups.settings import (
    KEYS_1D,
    ORTHOGONAL_TYPES,
    ROLES,
    check,
    lr_1d_ratio,
    ns_coefficients,
    plain,
    reject_misspelled,
)


def role_of(param: Tensor) -> str:
    """Return `matrix` for two or more dimensions, else `vector`."""
    return "matrix" if len(shape_of(param)) >= 2 else "vector"


def takes_mars(group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's group uses the MARS rule; otherwise it uses plain AdamW."""
    return bool(group["role"] == "matrix" or (group["role"] == "vector" and group["optimize_1d"]))


def rule_of(group: Mapping[str, Any]) -> str:
    """Return the rule of an optimizer's group: a `mars_type`, or plain `adamw`."""
    if not takes_mars(group):
        return "adamw"
    if group["mars_type"] in ORTHOGONAL_TYPES and group["role"] != "matrix":
        return "mars-adamw"  # as in the official code
    return str(group["mars_type"])


def orthogonalizes(group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's group orthogonalizes its first moments."""
    return rule_of(group) in ORTHOGONAL_TYPES


def label_of(group: Mapping[str, Any]) -> str:
    """Return the role of an optimizer's group, with the pattern of its rule in `param_rules` if it has one."""
    return f"{group['role']} {group['pattern']!r}" if "pattern" in group else str(group["role"])


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
    reject_misspelled(group, "parameter group")
    check(group)
    group = {**group, **plain({key: value for key, value in group.items() if key != "params"})}
    settings = {**defaults, **group}
    ns_coefficients(settings)
    if "lr_1d" in group and group.get("role") != "adamw":
        warn_of_fast_vectors(settings["lr"], group["lr_1d"])
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params is a set, whose order changes from run to run; use a list")
    entries = [params] if isinstance(params, Tensor) else list(params)

    parts: dict[str, list[Any]] = {role: [] for role in ROLES}
    for entry in entries:
        param = entry[1] if isinstance(entry, tuple) else entry
        if not isinstance(param, Tensor):
            raise TypeError(f"optimizers take tensors, or (name, tensor) pairs; got {type(param).__name__}")
        reject_parts(param)
        role = group.get("role") or role_of(param)
        if role == "matrix" and len(shape_of(param)) < 2:
            raise ValueError(
                f"role='matrix' for a parameter of shape {tuple(shape_of(param))}; "
                "a matrix has two or more dimensions, use role='vector'"
            )
        parts[role].append(entry)
    if not entries:
        parts = {group.get("role", "matrix"): []}
    stated = {key: value for key, value in group.items() if key not in KEYS_1D}
    stated["layout"] = matrix_layouts.to_plain(group.get("layout"))
    split = []
    for role, part in parts.items():
        if part or not entries:
            own = {"params": part, "role": role}
            _check_orthogonal({**settings, **stated, **own})
            if not takes_mars({**settings, **own}):
                own |= _vector_settings(group, defaults)
            split.append({**stated, **own})
    return split


def _check_orthogonal(group: Mapping[str, Any]) -> None:
    """Raise ValueError if the group's rule orthogonalizes and a matrix or setting does not allow it."""
    if not orthogonalizes(group):
        return
    layout = matrix_layouts.from_plain(group["layout"])
    for entry in group["params"]:
        shape = shape_of(entry[1] if isinstance(entry, tuple) else entry)
        matrix_layouts.check(shape, layout or matrix_layouts.of_shape(shape))


def _vector_settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return learning rate, betas and decay for the parameters of a group that use AdamW."""
    ratio_base, lr_1d = defaults["lr"], defaults["lr_1d"]
    if group.get("lr_1d") is not None:
        lr = group["lr_1d"]
    elif lr_1d is None:
        lr = group.get("lr", ratio_base) * lr_1d_ratio(group.get("mars_type", defaults["mars_type"]))
    elif "lr" in group and ratio_base > 0:
        lr = group["lr"] * (lr_1d / ratio_base)
    else:
        lr = lr_1d
    return {
        "lr": lr,
        "betas": group.get("betas_1d", group.get("betas", defaults["betas_1d"])),
        "weight_decay": group.get("weight_decay_1d", group.get("weight_decay", defaults["weight_decay_1d"])),
    }


def warn_of_fast_vectors(lr: float | Tensor, lr_1d: float | None) -> None:
    """Warn if `lr_1d` is more than ten times `lr`: often `lr` was left at its default."""
    if lr_1d is not None and float(lr_1d) > (1 + 1e-9) * 10 * float(lr):
        warnings.warn(
            f"lr_1d={float(lr_1d):g}, the rate of vectors (biases, norms), is more than ten times lr={float(lr):g}, "
            "that of matrices. Set lr (learning_rate in TrainingArguments, 5e-5 by default), or leave lr_1d out: "
            "vectors then follow lr",
            stacklevel=3,
        )


def warn_of_one_rate(groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Warn if a cyclic schedule gives matrices and vectors the same rate although their rates differ."""
    peaks = {bool(takes_mars(group)): group.get("max_lr") for group in groups}
    lr_1d = _vector_settings({}, defaults)["lr"]
    if len(peaks) == 2 and None not in peaks.values() and peaks[True] == peaks[False] and lr_1d != defaults["lr"]:
        warnings.warn(
            f"the schedule gives all groups max_lr={peaks[True]:g}; vectors had {float(lr_1d):g} where matrices had "
            f"{float(defaults['lr']):g}; give OneCycleLR and CyclicLR a list of rates, one a group",
            stacklevel=4,
        )
