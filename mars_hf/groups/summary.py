"""Summarize parameter groups, for `print(optimizer)`, logs and mars.json."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mars_hf.arithmetic import eight_bits
from mars_hf.arithmetic.update_rules import UPDATE_RULES, update_rule
from mars_hf.distributed.shards import first_dim_of_rows
from mars_hf.distributed.tensors import shape_of
from mars_hf.groups.settings import GROUP_KEYS, MUON

# Names of parameters that hold several projections.
_FUSED_NAME = re.compile(
    r"(?:.*\.)?(?:\w*qkv\w*|query_key_value|key_value|c_attn|kv_proj|gate_up_proj|W_pack|in_proj_ba"
    r"|\w*(?:attn|attention|mixer)\.in_proj)(?:\.weight|_weight)?",
    re.IGNORECASE,
)
_PLURALS = {"matrix": "matrices", "vector": "vectors"}
# Not what belongs to the loop or the matrices.
_SHOWN = tuple(key for key in GROUP_KEYS if key not in ("max_grad_norm", "layout"))


def summary(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of parameter groups, then the parameters left out, by reason, and those that stay fused.

    Digits in names are `*`. The table has a column of states in 8 bits, splits or patterns if any group has one.
    """
    header = ["role", "rule", "tensors", "elements", "lr", "betas", "weight decay"]
    rows = [_row(group) for group in param_groups]
    columns = {
        "in 8 bits": [_coded_of(group) for group in param_groups],
        "split": [_split_of(group) for group in param_groups],
        "pattern": [group.get("pattern", "") for group in param_groups],
    }
    for name, column in columns.items():
        if any(column):
            header.append(name)
            for row, cell in zip(rows, column, strict=True):
                row.append(cell)
    return "\n".join([*_aligned([header, *rows]), *_lines_below(param_groups)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose columns are as wide as their longest cells."""
    widths = [0] * len(rows[0])
    for row in rows:
        widths = list(map(max, widths, map(len, row)))
    lines = []
    for row in rows:
        lines.append("  ".join(map(str.ljust, row, widths)))
    return lines


def _lines_below(param_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is said below the table of names that are not orthogonalized, or not in parts."""
    lines = []
    left_out = names_left_out(param_groups)
    if left_out:
        lines.append("not orthogonalized:")
    for reason, names in left_out.items():
        lines.append(f"  {reason}: {_listed(names)}")
    fused = names_of_fused(param_groups)
    if fused:
        lines.append(f"orthogonalized as one matrix, though fused: {_listed(fused)} (split_fused splits them)")
    return lines


def names_of_fused(param_groups: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Count the projections in one tensor that are orthogonalized whole, by name with `*` for the numbers of layers."""
    names: Counter[str] = Counter()
    for group in param_groups:
        is_whole = group["layout"] is None or group["layout"]["parts"] is None
        if group["role"] != "matrix" or not update_rule(group).orthogonalizes or not is_whole:
            continue
        for name in group.get("param_names", ()):
            if _FUSED_NAME.fullmatch(name):
                names[_without_numbers(name)] += 1
    return names


def _listed(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names.items())


def _without_numbers(name: str) -> str:
    """Return a name with `*` for the numbers of layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _row(group: Mapping[str, Any]) -> list[str]:
    return [
        group["role"],
        _rule_of(group),
        str(len(group["params"])),
        f"{sum(shape_of(param).numel() for param in group['params']):,}",
        f"{float(group['lr']):g}",
        "({:g}, {:g})".format(*group["betas"]),
        _decay_of(group),
    ]


def _rule_of(group: Mapping[str, Any]) -> str:
    """Return the rule of a group, and whether rows are normalized."""
    rule = update_rule(group)
    return f"{rule.name}, rows" if rule.orthogonalizes and group["normalize_rows"] is not None else rule.name


def _decay_of(group: Mapping[str, Any]) -> str:
    """Return the weight decay of a group, and its mode unless it is AdamW's."""
    decay, mode = f"{group['weight_decay']:g}", group["weight_decay_mode"]
    return decay if mode == "standard" else f"{decay} {mode}"


def _split_of(group: Mapping[str, Any]) -> str:
    """Return into how many matrices each parameter of a group is split; "" for none."""
    layout = group["layout"]
    return f"in {len(layout['parts'])}" if layout is not None and layout["parts"] is not None else ""


def _coded_of(group: Mapping[str, Any]) -> str:
    """Return how many tensors of a group have moments in 8 bits, and their share of the elements.

    It is "" for a group that does not ask for 8 bits. Flat tensors of ZeRO have all of their parameters in 8 bits, and
    shards that cut blocks none.
    """
    if group["state_dtype"] != eight_bits.NAME:
        return ""
    sizes = [shape_of(param).numel() for param in group["params"]]
    coded = []
    if group["role"] != "vector":
        pairs = zip(group["params"], sizes, strict=True)
        coded = [size for param, size in pairs if first_dim_of_rows(param) is not None]
    return f"{len(coded)} of {len(sizes)} ({sum(coded) / max(1, sum(sizes)):.0%})"


def names_left_out(param_groups: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return by reason the names that are not orthogonalized, with `*` for the numbers of layers, and how many each."""
    left_out: dict[str, Counter[str]] = {}
    for group in param_groups:
        for name, reason in group.get("left_out", {}).items():
            left_out.setdefault(reason, Counter())[_without_numbers(name)] += 1
    return left_out


def trained_groups(param_groups: Iterable[Mapping[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Return groups as plain values: role, rule, tensors, their elements and settings before any schedule.

    Engines put flat tensors into groups; the names that `create(model)` gave still tell the parameters apart.
    """
    sizes = {name: shape_of(param).numel() for name, param in model.named_parameters()}
    return [_trained_group(group, sizes) for group in param_groups]


def _trained_group(group: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    names = group.get("param_names", ())
    if names and sizes.keys() >= set(names):
        counts = [sizes[name] for name in names]
    else:
        counts = [shape_of(param).numel() for param in group["params"]]
    row: dict[str, Any] = {"role": group["role"], "rule": update_rule(group).name}
    if "pattern" in group:
        row["pattern"] = group["pattern"]
    row |= {"tensors": len(counts), "parameters": sum(counts)}
    for key in _SHOWN:
        if key in group:
            row[key] = group.get(f"initial_{key}", group[key])
    row["lr"] = float(group.get("max_lr", group.get("initial_lr", group["lr"])))
    return row


def one_line_summary(param_groups: Iterable[Mapping[str, Any]], model: nn.Module, name: str | None = None) -> str:
    """Return rule, form, and each role's tensors, elements and learning rates, in at most 160 characters.

    `name` is the `mars_type` that `create` was given, if any: groups do not know of `"muon"`.
    """
    groups = trained_groups(param_groups, model)
    main = main_group(groups)
    rule = MUON if name == MUON else main["mars_type"]
    form = "approximate" if main["is_approx"] else "exact"
    betas = "({:g}, {:g})".format(*main["betas"])
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for group in groups:
        by_role.setdefault(group["role"], []).append(group)
    parts = []
    if UPDATE_RULES[main["mars_type"]].orthogonalizes and "matrix" not in by_role:
        parts.append("nothing is orthogonalized")
    elif not UPDATE_RULES[main["rule"]].corrects:
        parts.append("all takes AdamW")
    for role, of_role in by_role.items():
        parts.append(_part_of_line(role, of_role))
    decays = dict.fromkeys(_decay_of(group) for group in groups if group["weight_decay_mode"] != "standard")
    decay = f", weight_decay={' and '.join(decays)}" if decays else ""
    text = f"{rule} ({form}, gamma={main['gamma']:g}, betas={betas}{decay}): {', '.join(parts)}"
    return textwrap.shorten(text, 160, placeholder="...")


def main_group(groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first of trained groups that takes the MARS rule, or the first one if none does."""
    for group in groups:
        if UPDATE_RULES[group["rule"]].corrects:
            return group
    return groups[0]


def _part_of_line(role: str, groups: Sequence[Mapping[str, Any]]) -> str:
    tensors = sum(group["tensors"] for group in groups)
    elements = sum(group["parameters"] for group in groups)
    rates = sorted({group["lr"] for group in groups})
    lr = f"{rates[0]:.3g}"
    if f"{rates[-1]:.3g}" != lr:
        lr = f"{lr}-{rates[-1]:.3g}"
    noun = role if tensors == 1 else _PLURALS.get(role, role)
    return f"{tensors} {noun} ({elements:,}) at lr={lr}"
