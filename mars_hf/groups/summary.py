"""Summarize parameter groups for `print(optimizer)`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from mars_hf.distributed.placement import shape_of
from mars_hf.groups.roles import rule_of


def summary(param_groups: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of parameter groups, then the parameters left out: names by reason, digits as `*`.

    The table has a column of patterns if any group has one.
    """
    param_groups = list(param_groups)
    with_patterns = any("pattern" in group for group in param_groups)
    rows = [("role", "rule", "tensors", "elements", "lr", "betas", "weight decay", *["pattern"] * with_patterns)]
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
