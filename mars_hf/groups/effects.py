"""Tell settings that would do nothing from those that parameters read, and decays that would ruin weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mars_hf import log
from mars_hf.arithmetic.update_rules import UPDATE_RULES, update_rule
from mars_hf.groups.settings import DEFAULTS, KEYS_1D, READERS, ROLES, SETTINGS, expand, shown

# Numbers of AdamW, which people state for all rules and models: where nobody reads them, a line says so.
_STATED_FOR_ALL = ("eps", *KEYS_1D)
# The most that a decoupled decay takes from a weight in a step without a word: 0.1 %, so weights halve in 693 steps.
_FAST_DECAY = 1e-3


class Statement(NamedTuple):
    """Settings that somebody has stated, and the groups of parameters that they are for."""

    where: str  # in errors
    settings: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]


# --- settings that do nothing -----------------------------------------------------------------------------------------


def reject_unread(statements: Sequence[Statement]) -> None:
    """Raise ValueError for a stated setting that no parameter reads, or log a line if it is stated for all rules.

    One value in several statements need be read once: trainers split one group of the user into many.
    """
    read = set()
    for statement in statements:
        for name, value in statement.settings.items():
            if _is_read(name, statement.groups):
                read.add((name, repr(value)))
    for where, settings, groups in statements:
        for name, value in settings.items():
            if (name, repr(value)) in read:
                continue
            line = where + _of_unread(name, value, groups)
            if name not in _STATED_FOR_ALL:
                raise ValueError(line)
            log.warning(line)


def statements_of_defaults(defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[Statement]:
    """Return what the arguments of `Mars` state, and for whom: its groups, and matrices that another model may have.

    Settings of vectors may be stated for models without vectors, such as adapters.
    """
    stated = _different(defaults, DEFAULTS)
    matrix, vector = ({**defaults, "role": role} for role in ("matrix", "vector"))
    of_vectors = {name: stated.pop(name) for name in (*_STATED_FOR_ALL, "optimize_1d") if name in stated}
    return [Statement("", stated, [*groups, matrix]), Statement("", of_vectors, [*groups, matrix, vector])]


def statement_of_group(
    where: str, stated: Mapping[str, Any], defaults: Mapping[str, Any], made: Sequence[Mapping[str, Any]]
) -> Statement:
    """Return what a group states besides the settings of the optimizer; `made`: the groups it was split into."""
    settings = _different(stated, {**defaults, "layout": None})
    for name in KEYS_1D:
        plain = name.removesuffix("_1d")
        repeats = plain in stated and repr(settings.get(name)) == repr(stated[plain])
        if repeats or settings.get(name) is None:
            settings.pop(name, None)
    return Statement(where, settings, made)


def reject_unread_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for checked arguments of `create` that no parameter of any model would read.

    Groups of parameters are not there yet; the optimizer asks them, and says what it finds.
    """
    expanded = expand(arguments)
    for name in set(unread_arguments(arguments)).difference(_STATED_FOR_ALL):
        raise ValueError(_of_unread(name, arguments[name], _possible_groups(expanded)))
    for override in expanded.get("param_rules", ()):
        groups = _groups_of_one_rule({**expanded, **override.settings})
        stated = _different(override.settings, {**DEFAULTS, **expanded, "layout": None})
        for name, value in stated.items():
            if name not in _STATED_FOR_ALL and not _is_read(name, groups):
                raise ValueError(f"param_rules {shown(override.pattern)}: {_of_unread(name, value, groups)}")


def unread_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of those arguments of `create`, not at their defaults, that no parameter would read."""
    groups = _possible_groups(expand(arguments))
    stated = _different(arguments, {name: setting.default for name, setting in SETTINGS.items()})
    return [name for name in stated if not _is_read(name, groups)]


def without_unread(arguments: Mapping[str, Any], stated: Collection[str]) -> dict[str, Any]:
    """Return arguments of `create` without those that `like` takes up from another rule, and that this one ignores."""
    unread = [name for name in unread_arguments(arguments) if name not in stated]
    return {name: value for name, value in arguments.items() if name not in unread}


def may_read(mars_type: str, name: str) -> bool:
    """Return whether parameters under a rule, or beside it under AdamW, may read a setting."""
    choices = [{"mars_type": mars_type, "optimize_1d": optimize_1d} for optimize_1d in (False, True)]
    return any(_is_read(name, _groups_of_one_rule(settings)) for settings in choices)


def _is_read(name: str, groups: Iterable[Mapping[str, Any]]) -> bool:
    return any(READERS[name].include(group) for group in groups)


def _different(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not the defaults; keys that are no settings are left out."""
    return {
        name: value for name, value in settings.items() if name in READERS and repr(value) != repr(defaults.get(name))
    }


def _possible_groups(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups that arguments of `create` may make of a model, with those of its overrides."""
    groups = _groups_of_one_rule(arguments)
    for override in arguments.get("param_rules", ()):
        groups += _groups_of_one_rule({**arguments, **override.settings})
    return groups


def _groups_of_one_rule(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups that one `mars_type` may make: of the stated role, or of all that a model may give."""
    of_all = {**DEFAULTS, **settings}
    roles = [role for role in ROLES if role != "adamw" or UPDATE_RULES[of_all["mars_type"]].orthogonalizes]
    if settings.get("role") is not None:
        roles = [settings["role"]]
    return [{**of_all, "role": role} for role in roles]


def _of_unread(name: str, value: Any, groups: Iterable[Mapping[str, Any]]) -> str:
    """Return the error of a setting that none of the groups reads."""
    kinds = dict.fromkeys(_kind_of(group) for group in groups)
    readers = READERS[name]
    return (
        f"{name}={shown(value)} would be ignored: here are only {' and '.join(kinds)}, and that {readers.others}. It "
        f"is for {readers.named()}; leave it out"
    )


def _kind_of(group: Mapping[str, Any]) -> str:
    what = {"matrix": "matrices", "vector": "vectors", "adamw": "embeddings and heads"}[group["role"]]
    rule = update_rule(group)
    return f"{what} under {rule.name if rule.corrects else 'AdamW'}"


# --- decays -----------------------------------------------------------------------------------------------------------


def warn_of_decays(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of decoupled decays that only AdamW's mode makes sense of, and of a mode where nothing decays."""
    modes = [group["weight_decay_mode"] for group in groups if group["weight_decay_mode"] != "standard"]
    if modes and not any(group["weight_decay"] for group in groups):
        log.warning(f"weight_decay_mode={modes[0]!r} does nothing: weight_decay is 0 in all groups; give a decay")
    for group in groups:
        decay, lr = group["weight_decay"], float(group["lr"])
        if group["weight_decay_mode"] != "decoupled" or decay <= _FAST_DECAY:
            continue
        steps = math.log(0.5) / math.log1p(-decay)
        log.warning(
            f"weight_decay={decay:g} with weight_decay_mode='decoupled' is not multiplied by the learning rate: it "
            f"halves weights every {steps:.3g} steps at the peak of the schedule. What AdamW's {decay:g} does at "
            f"lr={lr:g} is weight_decay={decay * lr:.3g} here"
        )
        break
