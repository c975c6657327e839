"""Summarize parameter groups, for `print(optimizer)`, logs and mars.json."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mars_hf.distributed.tensors import shape_of
from mars_hf.settings import GROUP_KEYS, MUON
from mars_hf.update_rules import UPDATE_RULES, update_rule

_PLURALS = {"matrix": "matrices", "vector": "vectors"}
# Not what belongs to the loop or the matrices.
_SHOWN = tuple(key for key in GROUP_KEYS if key not in ("max_grad_norm", "layout"))


def summary(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of parameter groups, then the parameters left out: names by reason, digits as `*`.

    The table has a column of patterns if any group has one.
    """
    with_patterns = any("pattern" in group for group in param_groups)
    rows = [("role", "rule", "tensors", "elements", "lr", "betas", "weight decay", *["pattern"] * with_patterns)]
    left_out: dict[str, list[str]] = {}
    for group in param_groups:
        rows.append(
            (
                group["role"],
                update_rule(group).name,
                str(len(group["params"])),
                f"{sum(shape_of(param).numel() for param in group['params']):,}",
                f"{float(group['lr']):g}",
                "({:g}, {:g})".format(*group["betas"]),
                f"{group['weight_decay']:g}",
                *[group.get("pattern", "")] * with_patterns,
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


def trained_groups(param_groups: Iterable[Mapping[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Return groups as plain values: role, rule, tensors, their elements and settings before any schedule.

    Engines put flat tensors into groups; the names that `create(model)` gave still tell the parameters apart.
    """
    sizes = {name: shape_of(param).numel() for name, param in model.named_parameters()}
    rows = []
    for group in param_groups:
        names = group.get("param_names", ())
        are_of_model = names and sizes.keys() >= set(names)
        counts = (
            [sizes[name] for name in names] if are_of_model else [shape_of(param).numel() for param in group["params"]]
        )
        rows.append(
            {
                "role": group["role"],
                "rule": update_rule(group).name,
                **({"pattern": group["pattern"]} if "pattern" in group else {}),
                "tensors": len(counts),
                "parameters": sum(counts),
                **{key: group.get(f"initial_{key}", group[key]) for key in _SHOWN if key in group},
                "lr": float(group.get("max_lr", group.get("initial_lr", group["lr"]))),
            }
        )
    return rows


def one_line_summary(param_groups: Iterable[Mapping[str, Any]], model: nn.Module, name: str | None = None) -> str:
    """Return rule, form, and each role's tensors, elements and learning rates, in at most 160 characters.

    `name` is the `mars_type` that `create` was given, if any: groups do not know of `"muon"`.
    """
    groups = trained_groups(param_groups, model)
    first = next((group for group in groups if UPDATE_RULES[group["rule"]].corrects), groups[0])
    parts = []
    for role in dict.fromkeys(group["role"] for group in groups):
        members = [group for group in groups if group["role"] == role]
        tensors, elements = (sum(group[key] for group in members) for key in ("tensors", "parameters"))
        rates = [f"{lr:.3g}" for lr in sorted({group["lr"] for group in members})]
        lr = "-".join(dict.fromkeys((rates[0], rates[-1])))
        parts.append(f"{tensors} {role if tensors == 1 else _PLURALS.get(role, role)} ({elements:,}) at lr={lr}")
    betas, form = "({:g}, {:g})".format(*first["betas"]), "approximate" if first["is_approx"] else "exact"
    rule = MUON if name == MUON else first["mars_type"]
    text = f"{rule} ({form}, gamma={first['gamma']:g}, betas={betas}): {', '.join(parts)}"
    return textwrap.shorten(text, 160, placeholder="...")
