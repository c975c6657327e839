"""Tell settings that would do nothing from those that parameters read, and decays that would ruin weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mars_hf import log
from mars_hf.arithmetic.update_rules import UPDATE_RULES, update_rule
from mars_hf.groups.settings import DEFAULTS, KEYS_1D, READERS, SETTINGS, expand, shown

# Settings that people state for all rules and models: where nobody reads them, a line says so.
_STATED_FOR_ALL = ("eps", "ns_dtype", *KEYS_1D)
_DEFAULTS_OF_CREATE = {name: setting.default for name, setting in SETTINGS.items()}
# The most that a decoupled decay takes from a weight in a step without a word: 0.1 %, so weights halve in 693 steps.
_FAST_DECAY = 1e-3


class Statement(NamedTuple):
    """A setting that somebody has stated, and the groups of parameters that it is for."""

    where: str  # in errors
    name: str
    value: Any
    groups: Sequence[Mapping[str, Any]]

    def is_read(self) -> bool:
        """Return whether any parameter reads the setting."""
        return any(READERS[self.name].include(group) for group in self.groups)

    def error(self) -> str:
        """Return what is said of a setting that no parameter reads."""
        readers = READERS[self.name]
        kinds = " and ".join(dict.fromkeys(map(_kind_of, self.groups)))
        return (
            f"{self.where}{self.name}={shown(self.value)} would be ignored: here are only {kinds}, and that "
            f"{readers.others}. It is for {readers.named()}; leave it out"
        )


def _kind_of(group: Mapping[str, Any]) -> str:
    what = {"matrix": "matrices", "vector": "vectors", "adamw": "embeddings and heads"}[group["role"]]
    rule = update_rule(group)
    return f"{what} under {rule.name if rule.corrects else 'AdamW'}"


def _statements(
    where: str, settings: Mapping[str, Any], defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[Statement]:
    """Return a statement for each setting that is not the default; keys that are no settings are left out."""
    statements = []
    for name, value in settings.items():
        if name in READERS and repr(value) != repr(defaults.get(name)):
            statements.append(Statement(where, name, value, groups))
    return statements


# --- settings that do nothing, in an optimizer ------------------------------------------------------------------------


def check_read(statements: Sequence[Statement]) -> None:
    """Raise ValueError for a stated setting that no parameter reads, or log a line if it is stated for all rules.

    One value in several statements need be read once: trainers split one group of the user into many.
    """
    read = {(statement.name, repr(statement.value)) for statement in statements if statement.is_read()}
    for statement in statements:
        if (statement.name, repr(statement.value)) in read:
            continue
        if statement.name not in _STATED_FOR_ALL:
            raise ValueError(statement.error())
        log.warning(statement.error())


def statements_of_defaults(defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[Statement]:
    """Return what the arguments of `Mars` state, for its groups and for matrices, which may be missing here.

    Settings of vectors may be stated for models without vectors, such as adapters.
    """
    matrix, vector = {**defaults, "role": "matrix"}, {**defaults, "role": "vector"}
    statements = []
    for statement in _statements("", defaults, DEFAULTS, [*groups, matrix]):
        if statement.name in (*_STATED_FOR_ALL, "optimize_1d"):
            statement = statement._replace(groups=[*statement.groups, vector])
        statements.append(statement)
    return statements


def statements_of_group(
    group: Mapping[str, Any], defaults: Mapping[str, Any], made: Sequence[Mapping[str, Any]]
) -> list[Statement]:
    """Return what a group, checked, states besides the settings of the optimizer.

    A rate of vectors that repeats the group's own, or is None, states nothing.

    Args:
        group: as it was given.
        defaults: the settings of the optimizer.
        made: the groups that it was split into.
    """
    where = f"param_rules {shown(group['pattern'])}: " if "pattern" in group else "parameter group: "
    stated = dict(group)
    for name in KEYS_1D:
        if repr(group.get(name)) in ("None", repr(group.get(name.removesuffix("_1d")))):
            stated.pop(name, None)
    return _statements(where, stated, defaults, made)


# --- and in arguments of `create` -------------------------------------------------------------------------------------


def check_arguments_read(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for checked arguments of `create` that no parameter of any model would read.

    Groups of parameters are not there yet; the optimizer asks them, and says what it finds.
    """
    statements = _statements_of_arguments(arguments)
    expanded = expand(arguments)
    defaults = {**DEFAULTS, **expanded}
    for override in expanded.get("param_rules", ()):
        groups = _possible_groups({**expanded, **override.settings})
        statements += _statements(f"param_rules {shown(override.pattern)}: ", override.settings, defaults, groups)
    for statement in statements:
        if statement.name not in _STATED_FOR_ALL and not statement.is_read():
            raise ValueError(statement.error())


def without_unread(arguments: Mapping[str, Any], stated: Collection[str]) -> dict[str, Any]:
    """Return arguments of `create` without those that `like` takes up from another rule, and that this one ignores."""
    kept = dict(arguments)
    for statement in _statements_of_arguments(arguments):
        if statement.name not in stated and not statement.is_read():
            kept.pop(statement.name)
    return kept


def may_read(mars_type: str, name: str) -> bool:
    """Return whether parameters under a rule, or beside it under AdamW, may read a setting."""
    groups = _possible_groups({"mars_type": mars_type})
    groups += _possible_groups({"mars_type": mars_type, "optimize_1d": True})
    return Statement("", name, None, groups).is_read()


def _statements_of_arguments(arguments: Mapping[str, Any]) -> list[Statement]:
    """Return what arguments of `create` state, for all groups that they and their overrides may make."""
    expanded = expand(arguments)
    groups = _possible_groups(expanded)
    for override in expanded.get("param_rules", ()):
        groups += _possible_groups({**expanded, **override.settings})
    return _statements("", arguments, _DEFAULTS_OF_CREATE, groups)


def _possible_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups that settings may make: of the role that they state, or of all that a model may give."""
    of_all = {**DEFAULTS, **settings}
    roles = ["matrix", "vector"]
    if UPDATE_RULES[of_all["mars_type"]].orthogonalizes:
        roles.append("adamw")
    if settings.get("role") is not None:
        roles = [settings["role"]]
    return [{**of_all, "role": role} for role in roles]


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
