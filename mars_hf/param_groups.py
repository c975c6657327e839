"""Which parameter takes which rule: parameters or a model become groups with a role, a learning rate and decay."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mars_hf import hyperparameters, sharding

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


def shape_of(param: Tensor) -> torch.Size:
    """The parameter's own shape, also where DeepSpeed's `zero.Init` has left an empty tensor in its place."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def role_of(param: Tensor, matrix_ndim: str) -> str:
    """`matrix` or `vector` by the number of dimensions: two or more (`">=2"`), or exactly two (`"==2"`)."""
    ndim = len(shape_of(param))
    return "matrix" if (ndim == 2 if matrix_ndim == "==2" else ndim >= 2) else "vector"


def takes_mars(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of an optimizer's group take the MARS rule; plain AdamW otherwise."""
    return bool(group["role"] == "matrix" or group["optimize_1d"])


def split_by_role(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split one parameter group into its matrices and its vectors, in this order, each in the order given.

    A part without parameters is left out (a group that had none stays, as a matrix group). A group that states its
    `role` is not split. What a group states itself holds for all of its parameters, except that vectors take
    `lr_1d`, `betas_1d` and `weight_decay_1d` where the group states those, and that a stated `lr` is the matrices':
    vectors take it times the ratio lr_1d / lr of the defaults (1/2 where lr_1d is None).

    Args:
        group: a dict with `params` (a tensor, an iterable of tensors, or of (name, tensor) pairs) and any
            hyperparameter of `Mars`.
        defaults: every hyperparameter of `Mars`.

    Raises:
        ValueError: an unknown key, a value out of range, a vector in a group whose role is `matrix`.
        NotImplementedError: a value that is planned.
    """
    hyperparameters.reject_unknown(
        group,
        (*hyperparameters.LABEL_KEYS, *hyperparameters.GROUP_KEYS, *hyperparameters.KEYS_1D),
        "parameter group",
    )
    hyperparameters.check(group)
    settings = {**defaults, **group}
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params is a set, whose order changes from run to run; use a list")
    entries = [params] if isinstance(params, Tensor) else list(params)

    parts: dict[str, list[Any]] = {"matrix": [], "vector": []}
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
    split = []
    for role, part in parts.items():
        if part or not entries:
            own = _vector_settings(group, defaults) if role == "vector" and not settings["optimize_1d"] else {}
            split.append({**stated, **own, "params": part, "role": role})
    return split


def _vector_settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate, betas and decay of the vectors of a group, which take AdamW."""
    ratio_base, lr_1d = defaults["lr"], defaults["lr_1d"]
    if group.get("lr_1d") is not None:
        lr = group["lr_1d"]
    elif lr_1d is None:
        lr = group.get("lr", ratio_base) * hyperparameters.LR_1D_RATIO
    elif "lr" in group and ratio_base > 0:
        lr = group["lr"] * (lr_1d / ratio_base)
    else:
        lr = lr_1d
    return {
        "lr": lr,
        "betas": group.get("betas_1d", group.get("betas", defaults["betas_1d"])),
        "weight_decay": group.get("weight_decay_1d", group.get("weight_decay", defaults["weight_decay_1d"])),
    }


def from_model(model: nn.Module, *, matrix_ndim: str = ">=2", no_decay: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Parameter groups of a model, by module and shape: decayed matrices, undecayed matrices, vectors.

    Trainable parameters only, each once (tied weights under the first of their names), named, in the order of
    `model.named_parameters()`; a group without parameters is left out.

    - Vectors: parameters that are no matrix by `matrix_ndim`, every bias and every parameter of a normalization layer
      whatever its shape. They state no decay and so take `weight_decay_1d`.
    - Matrices: all others, embeddings included. Decayed as `transformers.Trainer` would; those whose name matches a
      pattern of `no_decay` have `weight_decay` 0 as well.

    Args:
        model: any module; PEFT wrappers need nothing special, their frozen weights are left out like any other.
        matrix_ndim: `">=2"` or `"==2"`, see `Mars`.
        no_decay: shell patterns of parameter names (`"*.wte.weight"`); each must match at least one matrix.

    Raises:
        ValueError: the model has no trainable parameter, or a pattern matches no matrix.
    """
    norms = {
        id(param)
        for module in model.modules()
        if isinstance(module, _NORM_MODULES) or _NORM_CLASS_NAME.search(type(module).__name__)
        for param in module.parameters(recurse=False)
    }
    groups: dict[str, list[tuple[str, Tensor]]] = {"decayed": [], "undecayed": [], "vectors": []}
    unused = list(no_decay)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if role_of(param, matrix_ndim) == "vector" or id(param) in norms or _BIAS_NAME.search(name):
            groups["vectors"].append((name, param))
            continue
        matched = [pattern for pattern in no_decay if fnmatch.fnmatchcase(name, pattern)]
        unused = [pattern for pattern in unused if pattern not in matched]
        groups["undecayed" if matched or _NO_DECAY_NAME.search(name) else "decayed"].append((name, param))
    if not any(groups.values()):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: set requires_grad=True on those to be trained"
        )
    if unused:
        names = [name for name, _ in groups["decayed"] + groups["undecayed"]]
        raise ValueError(
            f"no_decay={unused!r} matches no matrix of {type(model).__name__}; its matrices are named like "
            f"{', '.join(map(repr, names[:3]))}"
        )
    settings: dict[str, dict[str, Any]] = {
        "decayed": {"role": "matrix"},
        "undecayed": {"role": "matrix", "weight_decay": 0.0},
        "vectors": {"role": "vector"},
    }
    return [{"params": params, **settings[kind]} for kind, params in groups.items() if params]


def summary(param_groups: Iterable[Mapping[str, Any]]) -> str:
    """A table of parameter groups: role, rule, tensors, elements, learning rate, betas, decay."""
    rows = [("role", "rule", "tensors", "elements", "lr", "betas", "weight decay")]
    for group in param_groups:
        mars = takes_mars(group)
        rows.append(
            (
                group["role"],
                group["mars_type"] if mars else "adamw",
                str(len(group["params"])),
                f"{sum(shape_of(param).numel() for param in group['params']):,}",
                f"{float(group['lr']):g}",
                "({:g}, {:g})".format(*group["betas"]),
                f"{group['weight_decay']:g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
