"""Remember how a Mars was built, before an engine, a scheduler or a checkpoint changes it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mars_hf.distributed.placement import shape_of
from mars_hf.groups.param_rules import Rule
from mars_hf.groups.roles import rule_of, takes_mars
from mars_hf.groups.settings import GROUP_KEYS, lr_1d_ratio
from mars_hf.optimizer import Mars

# The loop owns the first two; loading a state checks the layout.
_NOT_COMPARED = ("max_grad_norm", "layout")


@dataclass(frozen=True)
class Origin:
    """The parameters and settings that an optimizer was built with.

    Args:
        params: weak references to its parameters; an engine may put other tensors into the groups.
        sizes: number of parameters in each group.
        elements: number of their elements in each group.
        groups: settings of each group.
        stated: names of the settings that the user gave, in the call or in TrainingArguments (`beta1` and `beta2`
            separately); None if `create` or `Mars` built it.
        unset: TrainingArguments' values that MARS's defaults replace, by our name.
    """

    params: tuple[weakref.ref[Tensor], ...]
    sizes: tuple[int, ...]
    elements: tuple[int, ...]
    groups: tuple[dict[str, Any], ...]
    stated: frozenset[str] | None = None
    unset: Mapping[str, tuple[str, Any]] | None = None


_known: weakref.WeakKeyDictionary[Mars, Origin] = weakref.WeakKeyDictionary()


def remember(
    mars: Mars, stated: Collection[str] | None = None, unset: Mapping[str, tuple[str, Any]] | None = None
) -> None:
    """Record how an optimizer was built, replacing an earlier record.

    Args:
        mars: the optimizer, just built.
        stated: see `Origin`; None keeps the earlier value.
        unset: see `Origin`; None keeps the earlier value.
    """
    earlier = _known.get(mars)
    if earlier is not None:
        stated = earlier.stated if stated is None else stated
        unset = earlier.unset if unset is None else unset
    params = [param for group in mars.param_groups for param in group["params"]]
    _known[mars] = Origin(
        params=tuple(weakref.ref(param) for param in params),
        sizes=tuple(len(group["params"]) for group in mars.param_groups),
        elements=tuple(sum(math.prod(shape_of(param)) for param in group["params"]) for group in mars.param_groups),
        groups=tuple(settings(group) for group in mars.param_groups),
        stated=None if stated is None else frozenset(stated),
        unset=unset,
    )


def is_known(mars: Mars) -> bool:
    """Return whether an optimizer's origin was recorded."""
    return mars in _known


def of(mars: Mars) -> Origin:
    """Return an optimizer's origin; if none was recorded, record its present form."""
    if mars not in _known:
        remember(mars)
    return _known[mars]


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters; of those with a schedule (`lr`, `gamma`), what the schedule starts from."""
    kept = (key for key in GROUP_KEYS if key in group and key not in _NOT_COMPARED)
    found = {key: group.get(f"initial_{key}", group[key]) for key in kept}
    found["lr"] = rate(group)
    return found


def rate(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate before its schedule: the peak if a scheduler records one."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def changes(mars: Mars) -> Iterator[tuple[Mapping[str, Any], str, Any, Any]]:
    """Yield group, setting, value at the start and value now, for each setting of a group that a checkpoint changed."""
    for before, group in zip(of(mars).groups, mars.param_groups, strict=False):
        for key, now in settings(group).items():
            if key == "betas" and "max_momentum" in group:  # a scheduler cycles them
                continue
            if key in before and not _same(before[key], now):
                yield group, key, before[key], now


def follow_checkpoint(mars: Mars) -> None:
    """Make the arguments that mars.json keeps those of the checkpoint just loaded, whose settings win."""
    if mars.created_with is None:
        return
    arguments = dict(mars.created_with)
    rules = {rule.pattern: dict(rule.settings) for rule in arguments.get("param_rules", ())}
    found: dict[tuple[str | None, str], list[Any]] = {}
    for group, key, before, now in changes(mars):
        stated = _setting_of_rule(group, key, rules)
        place = (None, _argument(group, key, before, arguments)) if stated is None else (group["pattern"], stated)
        found.setdefault(place, []).append(now)
    if any(not _same(value, values[0]) for values in found.values() for value in values):
        mars.created_with = None  # no call of create gives this
        return
    for (pattern, name), values in found.items():
        (arguments if pattern is None else rules[pattern])[name] = values[0]
    if rules:
        arguments["param_rules"] = [Rule(*rule) for rule in rules.items()]
    if mars.created_with.get("lr_1d") is None and (None, "lr_1d") in found:
        kind, lr = mars.defaults["mars_type"], arguments.get("lr", mars.defaults["lr"])
        if math.isclose(arguments["lr_1d"], lr * lr_1d_ratio(kind), rel_tol=1e-9):
            del arguments["lr_1d"]
    mars.created_with = arguments


def _argument(group: Mapping[str, Any], key: str, before: Any, arguments: Mapping[str, Any]) -> str:
    """Return the argument of `create` that gives a group this setting."""
    of_embeddings = arguments.get("lr_embeddings")
    if key == "lr" and group["role"] != "vector" and of_embeddings is not None and before == of_embeddings:
        return "lr_embeddings"
    if key in ("lr", "betas", "weight_decay") and not takes_mars(group):
        return f"{key}_1d"
    return key


def _setting_of_rule(group: Mapping[str, Any], key: str, rules: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the setting of the group's rule that gives it this one; None if its rule states none that does."""
    stated = rules.get(group.get("pattern", ""), {})
    key_1d = f"{key}_1d" if key in ("lr", "betas", "weight_decay") and not takes_mars(group) else key
    return key_1d if key in stated or key_1d in stated else None


def trained_groups(mars: Mars) -> list[dict[str, Any]]:
    """Return role, rule, pattern, number of parameters and settings of each group, for mars.json."""
    elements = of(mars).elements
    return [
        {
            "role": group["role"],
            "rule": rule_of(group),
            **({"pattern": group["pattern"]} if "pattern" in group else {}),
            **({"parameters": elements[index]} if index < len(elements) else {}),
            **settings(group),
        }
        for index, group in enumerate(mars.param_groups)
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Iterable) and not isinstance(one, str):
        return list(map(str, one)) == list(map(str, other))
    return bool(one == other)
