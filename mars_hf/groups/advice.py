"""What a user should hear about an optimizer's groups: settings that train, but probably not as they were meant to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mars_hf import log
from mars_hf.arithmetic.formulas import HALF_DTYPES
from mars_hf.arithmetic.update_rules import update_rule

Groups = Sequence[Mapping[str, Any]]


class Advice:
    """Give each piece of advice once in the life of an optimizer, through the logger."""

    def __init__(self) -> None:
        """Start with nothing said."""
        self._said: set[str] = set()
        # The groups and the rates that they were made with: the groups themselves, since DeepSpeed's ZeRO-1 and 2 show
        # an optimizer one group at a time.
        self._made: list[tuple[Mapping[str, Any], float]] = []

    def say(self, kind: str, message: str) -> None:
        """Log a message, unless one of its kind has been said: its numbers may change from step to step."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning(message)

    def add(self, group: Mapping[str, Any]) -> None:
        """Remember the learning rate that a group begins with: it is new, or has been loaded."""
        self._made.append((group, float(group.get("initial_lr", group["lr"]))))

    def follow(self, groups: Groups) -> None:
        """Take loaded groups in the place of those before; what has been said stays said."""
        self._made = []
        for group in groups:
            self.add(group)

    def on_large_lr_1d(self, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Warn if vectors would have more than ten times the rate of matrices: often `lr` was left at its default.

        Args:
            group: a new group, before it is split by role.
            defaults: of the optimizer.
        """
        settings = {**defaults, **group}
        lr, lr_1d = float(settings["lr"]), settings["lr_1d"]
        has_one_rate = group.get("role") in ("adamw", "matrix")
        follows_lr = "lr" in group and "lr_1d" not in group
        if lr_1d is None or has_one_rate or follows_lr:
            return
        if float(lr_1d) > (1 + 1e-9) * 10 * lr:
            self.say(
                "large lr_1d",
                f"lr_1d={float(lr_1d):g}, the learning rate of vectors (biases, norms), is more than ten times "
                f"lr={lr:g}, that of matrices. Set lr (in TrainingArguments: learning_rate, which is 5e-5 by default), "
                "or leave lr_1d out: vectors then follow lr",
            )

    def on_unknown_roles(self, groups: Groups) -> None:
        """Warn if matrices are orthogonalized whose shape alone is known: embeddings and heads may be among them.

        Args:
            groups: groups to which nobody has given roles; a layout shows that their matrices are known.
        """
        count = 0
        rules: list[str] = []
        for group in groups:
            rule = update_rule(group)
            if not rule.orthogonalizes or group["layout"] is not None:
                continue
            count += len(group["params"])
            rules.append(rule.name)
        if not count:
            return
        self.say(
            "unknown roles",
            f"{rules[0]} orthogonalizes every matrix of plain parameters ({count}), embeddings and heads included, "
            "because it knows nothing but their shapes. Pass the model, create(model), or several, create([a, b]): "
            "embeddings and heads then take AdamW. Or give each group its role, 'matrix' or 'adamw'",
        )

    def on_lost_updates(self, groups: Groups) -> None:
        """Warn if half-precision weights of about 1 cannot move: their rate is below half a unit in the last place."""
        counts: Counter[torch.dtype] = Counter()
        rates: set[float] = set()
        for group in groups:
            rate = float(group.get("initial_lr", group["lr"]))  # schedules begin with a warm-up
            for param in group["params"]:
                if not _rounds_to_nearest(param.dtype, group["rounding"]):
                    continue
                if 0 < rate < _half_unit_below_one(param.dtype):
                    counts[param.dtype] += 1
                    rates.add(rate)
        if not counts:
            return
        dtype = counts.most_common(1)[0][0]
        largest = max(rates) / _half_unit_below_one(dtype)
        name = str(dtype).removeprefix("torch.")
        remedies = "Load the model in float32 (dtype=torch.float32)"
        if dtype == torch.bfloat16:
            remedies += ", or give rounding='stochastic' or 'kahan'"
        self.say(
            "lost updates",
            f"{counts.total()} parameters are {name} and take rounding='nearest': at a learning rate of "
            f"{max(rates):.3g} weights above about {largest:.2g} do not move, because updates below half a unit in "
            f"the last place are lost. {remedies}",
        )

    def on_one_rate(self) -> None:
        """Warn if groups that were made with several rates all have one: something assigns one number to all."""
        made = sorted({rate for _, rate in self._made})
        if len(made) < 2:
            return
        rates = [group["lr"] for group, _ in self._made]
        goals = [group.get("swa_lr", group.get("max_lr")) for group, _ in self._made]  # of SWALR and OneCycleLR
        for values, what in ((rates, ""), (goals, " as the goal of their schedule")):
            if not _are_one_number(values):
                continue
            self._made = []
            self.say(
                "one rate",
                f"all {len(values)} groups have the learning rate {values[0]:g}{what}; they were made with {made[0]:g} "
                f"to {made[-1]:g}. A scheduler (OneCycleLR, CyclicLR or SWALR with one rate for all, DeepSpeed's "
                "WarmupLR, one at its eta_min), a rate finder or your loop assigns one number to every group. Give the "
                "scheduler a list of rates, one for each group, or scale each group's own: "
                "group['lr'] = group['initial_lr'] * factor",
            )
            return


def _are_one_number(rates: Sequence[Any]) -> bool:
    """Return whether all rates are the same one; not if they are on a device, or 0, as at the end of a schedule."""
    if any(rate is None or isinstance(rate, Tensor) for rate in rates):
        return False
    return len(set(rates)) == 1 and rates[0] > 0


def _rounds_to_nearest(dtype: torch.dtype, rounding: str) -> bool:
    """Return whether a parameter loses small updates; only bfloat16 has other roundings."""
    if dtype == torch.bfloat16:
        return rounding == "nearest"
    return dtype in HALF_DTYPES


def _half_unit_below_one(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 4  # below 1 the spacing is eps / 2
