"""List every setting of MARS in one table: name, default, accepted values, and its other readers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mars_hf import param_rules
from mars_hf.groups import values
from mars_hf.groups.values import DTYPES, is_triple, one_of, optional, optional_dtype
from mars_hf.newton_schulz import SCHEDULES, Coefficients

MARS_TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
ORTHOGONAL_TYPES = ("mars-shampoo", "mars-m")  # orthogonalize the first moment of their matrices
ROLES = ("matrix", "vector", "adamw")


@dataclass(frozen=True)
class Setting:
    """Describe one setting.

    Attributes:
        name: keyword of `Mars` or `create`, and key of a parameter group.
        default: default value, equal to the signature's.
        kind: accepted values.
        scope: `"group"`: a key of every parameter group. `"1d"`: used up when a group is split by role; it becomes the
            vectors' `lr`, `betas` or `weight_decay`, so schedulers see one of each. `"model"`: an option of `create`,
            for models only.
        is_live: whether every step reads it. A change of any other setting sorts the buckets again, so a forgotten
            entry costs time, never correctness.
        is_orthogonal: whether it applies only to rules that orthogonalize.
        is_announced: whether the first log line of a run lists it among the defaults in force.
        help: one line for command lines.
    """

    name: str
    default: Any
    kind: values.Kind
    help: str
    scope: Literal["group", "1d", "model"] = "group"
    is_live: bool = False
    is_orthogonal: bool = False
    is_announced: bool = False


def _check_rules(name: str, value: Any) -> None:
    for pattern, settings in param_rules.rules_of(value):
        _check_rule(f"{name} {pattern!r}", settings)


_PARAM_RULES = values.Kind(_check_rules, read=lambda name, text: read_rules(param_rules.from_text(text)))
_NON_NEGATIVE, _FLAG = values.NON_NEGATIVE, values.FLAG
_TABLE = (
    Setting("lr", 3e-3, _NON_NEGATIVE, "Learning rate of the matrices.", is_live=True),
    Setting("betas", (0.95, 0.99), values.BETAS, "Decay rates of the moments.", is_live=True, is_announced=True),
    Setting("eps", 1e-8, _NON_NEGATIVE, "Added to the root of the second moment.", is_live=True, is_announced=True),
    Setting("weight_decay", 0.0, _NON_NEGATIVE, "Decoupled decay of the matrices.", is_live=True, is_announced=True),
    Setting("gamma", 0.025, _NON_NEGATIVE, "Scale of the correction.", is_live=True, is_announced=True),
    Setting("mars_type", "mars-adamw", one_of(*MARS_TYPES), "Update rule of the matrices."),
    Setting("is_approx", True, _FLAG, "False: exact MARS, which takes two gradients a step."),
    Setting(
        "clip_threshold",
        1.0,
        values.THRESHOLD,
        "Largest norm of a corrected gradient.",
        is_announced=True,
    ),
    Setting("amsgrad", False, _FLAG, "Divide by the running maximum of the second moment."),
    Setting("optimize_1d", False, _FLAG, "Vectors take the MARS rule as well."),
    Setting(
        "lr_1d",
        None,
        optional(_NON_NEGATIVE),
        "Learning rate of what takes AdamW: vectors, and with mars-shampoo and mars-m embeddings. Left out: half "
        "of the matrices', all of it with mars-m.",
        scope="1d",
        is_announced=True,
    ),
    Setting(
        "betas_1d",
        (0.9, 0.95),
        values.BETAS,
        "Decay rates of the moments of what takes AdamW.",
        scope="1d",
        is_announced=True,
    ),
    Setting(
        "weight_decay_1d", 0.0, _NON_NEGATIVE, "Decoupled decay of what takes AdamW.", scope="1d", is_announced=True
    ),
    Setting(
        "second_moment",
        "corrected",
        one_of("corrected", "gradient"),
        "What the second moment averages the squares of: corrected or gradient.",
    ),
    Setting("ns_steps", 5, values.POSITIVE_INTEGER, "Steps of Newton-Schulz.", is_orthogonal=True),
    Setting(
        "ns_coefficients",
        "quintic",
        values.COEFFICIENTS,
        f"Coefficients of Newton-Schulz: {' or '.join(SCHEDULES)}.",
        is_orthogonal=True,
    ),
    # No float16: the entries of a first moment underflow in it.
    Setting(
        "ns_dtype",
        None,
        optional_dtype(*DTYPES[1:]),
        "Dtype of Newton-Schulz; None: the processor's.",
        is_orthogonal=True,
    ),
    Setting("max_grad_norm", None, values.THRESHOLD, "Largest global norm of all gradients.", is_live=True),
    Setting("state_dtype", None, optional_dtype(*DTYPES), "Dtype of the states; left out: float32, or float64."),
    Setting(
        "rounding",
        "nearest",
        one_of("nearest", "stochastic", "kahan"),
        "Rounding of bfloat16 parameters: nearest, stochastic or kahan.",
    ),
    Setting("maximize", False, _FLAG, "Ascend instead of descend."),
    Setting("fused", None, optional(_FLAG), "True: the kernels made for the device, or an error; False: none."),
    Setting(
        "split_fused",
        "auto",
        values.SPLIT_FUSED,
        "auto: orthogonalize query, key and value apart; none: as one matrix.",
        scope="model",
        is_orthogonal=True,
    ),
    Setting(
        "lr_embeddings",
        None,
        optional(_NON_NEGATIVE),
        "Learning rate of embeddings and heads. Left out: that of matrices, and with mars-shampoo and mars-m lr_1d.",
        scope="model",
    ),
    Setting(
        "param_rules",
        [],
        _PARAM_RULES,
        "Settings of parameters by name: a .yaml or .json file, or a list in JSON.",
        scope="model",
    ),
)
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
# Defaults of `Mars`, and of the options that only `create` has.
DEFAULTS: Mapping[str, Any] = {setting.name: setting.default for setting in _TABLE if setting.scope != "model"}
MODEL_DEFAULTS: Mapping[str, Any] = {setting.name: setting.default for setting in _TABLE if setting.scope == "model"}
# Settings that a parameter group may contain. `layout` depends on the parameter, so that only groups have it.
GROUP_KEYS = (*(setting.name for setting in _TABLE if setting.scope == "group"), "layout")
KEYS_1D = tuple(setting.name for setting in _TABLE if setting.scope == "1d")
ORTHOGONAL_KEYS = tuple(setting.name for setting in _TABLE if setting.is_orthogonal)
# A change of one of these sorts the buckets again.
STRUCTURAL_KEYS = ("role", *(name for name in GROUP_KEYS if name == "layout" or not SETTINGS[name].is_live))
# Names for the halves of a pair, where a value can hold neither commas nor tuples.
PAIR_KEYS = {f"beta{index + 1}{suffix}": (f"betas{suffix}", index) for suffix in ("", "_1d") for index in (0, 1)}
# Bookkeeping keys of groups, ours and torch's; they change no arithmetic. `gamma_of_average` is the gamma of the steps
# behind exp_avg, for states without last gradient; `left_out` maps matrices that are not orthogonalized to reasons;
# `pattern` is that of the group's rule in `param_rules`.
LABEL_KEYS = ("params", "param_names", "role", "name", "initial_lr", "gamma_of_average", "left_out", "pattern")
# What a rule of `param_rules` may state: what a group may, except for the norm of all gradients.
RULE_KEYS = ("role", *(name for name in (*GROUP_KEYS, *KEYS_1D) if name != "max_grad_norm"))
# Other libraries' names for our settings: kept as labels, they would be ignored silently.
_OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "step_size"), "lr"),
    **dict.fromkeys(("wd", "adam_weight_decay"), "weight_decay"),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2", "momentum", "b1", "b2"), "betas"),
    **dict.fromkeys(("epsilon", "adam_epsilon"), "eps"),
    **dict.fromkeys(("max_norm", "clip_grad", "grad_clip", "clip_grad_norm"), "max_grad_norm"),
}


class UnknownHyperparameterError(TypeError, ValueError):
    """Raised for an unknown setting: a TypeError as a keyword, a ValueError as a key of a group or of `optim_args`."""


def reject_unknown(names: Iterable[str], accepted: Iterable[str], where: str) -> None:
    """Raise UnknownHyperparameterError, listing the accepted names, if `names` has any other."""
    accepted = tuple(accepted)
    unknown = [name for name in names if name not in accepted]
    if unknown:
        raise UnknownHyperparameterError(
            f"{where}: unknown {', '.join(map(repr, unknown))}; accepted are {', '.join(accepted)}"
        )


def reject_misspelled(names: Iterable[str], where: str) -> None:
    """Raise UnknownHyperparameterError for names close to a setting's; others pass as labels.

    Schedulers and wrappers add keys of their own to groups (`lr_scale`, `rho`, `max_lr`), which torch keeps.
    """
    settings = (*GROUP_KEYS, *KEYS_1D, "role")
    for name in names:
        if name in settings or name in LABEL_KEYS:
            continue
        plain = str(name).lower().replace("-", "_")
        close = difflib.get_close_matches(plain, settings, n=1, cutoff=0.8)
        meant = _OTHER_NAMES.get(plain) or (close[0] if close else None)
        if meant is not None:
            raise UnknownHyperparameterError(
                f"{where}: unknown {name!r}; did you mean {meant!r}? Settings are {', '.join(settings)}"
            )


def ns_coefficients(settings: Mapping[str, Any]) -> tuple[Coefficients, ...]:
    """Return the coefficients of each Newton-Schulz step, from `ns_coefficients` and `ns_steps`.

    Raises:
        ValueError: the schedule's length is not `ns_steps`.
    """
    given, steps = settings["ns_coefficients"], settings["ns_steps"]
    schedule: Any = SCHEDULES[given] if isinstance(given, str) else given
    if is_triple(schedule):
        schedule = [schedule] * steps
    if len(schedule) != steps:
        raise ValueError(
            f"ns_coefficients={given!r} is a schedule of {len(schedule)} steps and ns_steps={steps!r}; give as many "
            "triples as steps, or one for all"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in schedule)


def check(settings: Mapping[str, Any]) -> None:
    """Raise ValueError at the first setting with a value that MARS cannot use; ignore other keys."""
    for name, value in settings.items():
        if name == "role":
            one_of(*ROLES).check(name, value)
        elif name == "layout":
            values.LAYOUT.check(name, value)
        elif name in SETTINGS:
            SETTINGS[name].kind.check(name, value)
    if "ns_steps" in settings and "ns_coefficients" in settings:
        ns_coefficients(settings)


def _check_rule(where: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that a rule of `param_rules` cannot state."""
    if "max_grad_norm" in settings:
        raise ValueError(f"{where}: max_grad_norm is the norm of all gradients; give it to create")
    reject_misspelled(settings, where)
    reject_unknown(settings, RULE_KEYS, where)
    try:
        check(settings)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked settings as plain types for checkpoints: NumPy numbers become Python's, pairs tuples."""
    return {name: _plain(name, value) for name, value in settings.items()}


def _plain(name: str, value: Any) -> Any:
    if name == "param_rules":
        return [param_rules.Rule(pattern, plain(settings)) for pattern, settings in param_rules.rules_of(value)]
    if name in ("betas", "betas_1d"):
        return tuple(_plain("beta", beta) for beta in value)
    if type(value) in (int, float, bool, str, type(None)) or isinstance(value, torch.Tensor):
        return value
    is_number = name == "beta" or (name in SETTINGS and SETTINGS[name].kind.is_number)
    return float(value) if is_number else value


def read(name: str, text: str) -> Any:
    """Parse a setting's value from a string, as in `optim_args`; `none` means None.

    Args:
        name: name of a setting, or of half a pair (`beta1`).
        text: the value as text.

    Raises:
        ValueError: the string is not a value of this kind.
    """
    if text.lower() in ("none", "null") and name != "split_fused":
        return None
    kind = values.NON_NEGATIVE if name in PAIR_KEYS else SETTINGS[name].kind
    return kind.read(name, text)


def read_rules(given: Iterable[Any]) -> list[param_rules.Rule]:
    """Return the rules of `param_rules` with their strings parsed, as which files hold some numbers.

    Raises:
        ValueError: an unknown setting, or a string that is not a value of its kind.
    """
    return [
        param_rules.Rule(pattern, _read_rule(pattern, settings)) for pattern, settings in param_rules.rules_of(given)
    ]


def _read_rule(pattern: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the strings among the settings of a rule; halves of a pair become the pair."""
    where = f"param_rules {pattern!r}"
    reject_unknown(settings, [*RULE_KEYS, *PAIR_KEYS], where)
    found = {}
    for name, value in settings.items():
        try:
            found[name] = read(name, value) if isinstance(value, str) and name != "role" else value
        except ValueError as error:
            raise ValueError(f"{where}: {str(error).removeprefix('optim_args: ')}") from None
    for pair in ("betas", "betas_1d"):
        halves = [half for half, (of, _) in PAIR_KEYS.items() if of == pair]
        given = [found.pop(half) for half in halves if half in found]
        if given and (len(given) == 1 or pair in found):
            raise ValueError(f"{where}: give both {' and '.join(halves)}, or {pair} alone in a file")
        if given:
            found[pair] = tuple(given)
    return found


def lr_1d_ratio(mars_type: str) -> float:
    """Return the ratio lr_1d / lr that lr_1d=None stands for: that of every published configuration."""
    check({"mars_type": mars_type})
    return 1.0 if mars_type == "mars-m" else 0.5
