"""Remember how a Mars was built, before an engine, a scheduler or a checkpoint changes it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mars_hf.groups.settings import GROUP_KEYS
from mars_hf.optimizer import Mars

# The loop owns the first two; loading a state checks the layout.
_NOT_COMPARED = ("max_grad_norm", "take_grad", "layout")


@dataclass(frozen=True)
class Origin:
    """The parameters and settings that an optimizer was built with.

    Args:
        params: weak references to its parameters; an engine may put other tensors into the groups.
        sizes: number of parameters in each group.
        groups: settings of each group.
        stated: names of the settings that the user gave, in the call or in TrainingArguments (`beta1` and `beta2`
            separately); None if `create` or `Mars` built it.
        unset: TrainingArguments' values that MARS's defaults replace, by our name.
    """

    params: tuple[weakref.ref[Tensor], ...]
    sizes: tuple[int, ...]
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
    """Return a group's hyperparameters; `lr` is the rate that its schedule starts from."""
    found = {key: group[key] for key in GROUP_KEYS if key in group and key not in _NOT_COMPARED}
    found["lr"] = rate(group)
    return found


def rate(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate before its schedule: the peak if a scheduler records one."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))
