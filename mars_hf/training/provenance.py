"""What a Mars was made of, before an engine, a scheduler or a checkpoint changes it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mars_hf.groups.settings import GROUP_KEYS
from mars_hf.optimizer import Mars

# The loop's business, not the optimizer's; and the modules' shapes, which loading checks.
_NOT_COMPARED = ("max_grad_norm", "take_grad", "layout")


@dataclass(frozen=True)
class Origin:
    """What an optimizer was made of.

    Args:
        params: weak references to its parameters; an engine may put other tensors into the groups.
        sizes: number of parameters in each group.
        groups: settings of each group.
        stated: names of the settings that the user stated, in the call or in TrainingArguments (`beta1` and `beta2`
            apart); None if it was made by `create` or `Mars`.
        unset: TrainingArguments' values that MARS's defaults stand in for, by our name.
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
    """Note what an optimizer is made of, in place of an earlier note.

    Args:
        mars: as it was made.
        stated: see `Origin`; None keeps what is noted.
        unset: see `Origin`; None keeps what is noted.
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
    """Whether what an optimizer was made of has been noted."""
    return mars in _known


def of(mars: Mars) -> Origin:
    """Return what is known about an optimizer; its present form if nothing is."""
    if mars not in _known:
        remember(mars)
    return _known[mars]


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group that training runs with; `lr` is the rate its schedule starts from."""
    found = {key: group[key] for key in GROUP_KEYS if key in group and key not in _NOT_COMPARED}
    found["lr"] = rate(group)
    return found


def rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group before its schedule: the peak, where a scheduler notes one."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))
