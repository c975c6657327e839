"""The settings of MARS: one table, their types, one check of their values, one parser of `optim_args`."""

from __future__ import annotations

import ast
import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from typing_extensions import TypedDict

from mars_hf.arithmetic import eight_bits, matrix_layouts
from mars_hf.arithmetic.newton_schulz import SCHEDULES, coefficients_of
from mars_hf.arithmetic.update_rules import ADAMW, UPDATE_RULES, UpdateRule, update_rule

MARS_TYPES = tuple(name for name, rule in UPDATE_RULES.items() if rule.corrects)
ROLES = ("matrix", "vector", "adamw")
# A name for mars-m as torch.optim.Muon computes it; see `expand`.
MUON = "muon"
_LARGEST_COEFFICIENT = 1000  # of Newton-Schulz, whose iteration overflows far above


class Kind(NamedTuple):
    """A kind of values."""

    accepted: str  # in errors
    fits: Callable[[Any], bool]  # an exception means no
    plain: Callable[[Any], Any] = lambda value: value  # makes a plain type of it, which any checkpoint can hold
    type: Any = str  # on a command line; None if a command line cannot hold it
    names: tuple[str, ...] = ()  # the accepted ones, if they are few


def _number(value: Any) -> float:
    """Return a finite number as a float, NaN for anything else."""
    if isinstance(value, (str, bytes, bool, torch.Tensor)):
        return math.nan
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _one_of(*names: str) -> Kind:
    return Kind(_quoted(names), lambda value: isinstance(value, str) and value in names, names=names)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _or_none(kind: Kind) -> Kind:
    def fits(value: Any) -> bool:
        return value is None or kind.fits(value)

    def plain(value: Any) -> Any:
        return None if value is None else kind.plain(value)

    return kind._replace(accepted=f"{kind.accepted}, or None", fits=fits, plain=plain)


def _dtype(*names: str, others: tuple[str, ...] = ()) -> Kind:
    """Return the kind of a torch.dtype or its name, of other names that are no dtypes, or None."""

    def fits(value: Any) -> bool:
        if not isinstance(value, (str, torch.dtype)):
            return False
        return value in others or str(value).removeprefix("torch.") in names

    return _or_none(_one_of(*others, *names)._replace(fits=fits))


def _is_rate(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return _number(value) >= 0


def _plain_rate(value: Any) -> float | torch.Tensor:
    return value if isinstance(value, torch.Tensor) else float(value)


def _is_beta(value: Any) -> bool:
    return 0 <= _number(value) < 1


def _are_betas(value: Any) -> bool:
    return len(value) == 2 and all(_is_beta(beta) for beta in value)


def _plain_betas(value: Any) -> tuple[float, ...]:
    return tuple(float(beta) for beta in value)


def _are_coefficients(value: Any) -> bool:
    if isinstance(value, str):
        return value in SCHEDULES
    if isinstance(value[0], (list, tuple)):
        return all(_is_triple(triple) for triple in value)
    return _is_triple(value)


def _is_triple(value: Any) -> bool:
    return len(value) == 3 and all(abs(_number(coefficient)) <= _LARGEST_COEFFICIENT for coefficient in value)


def _is_split(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("auto", "none")
    return all(_are_sizes(sizes) for sizes in value.values())


def _are_sizes(value: Any) -> bool:
    return all(type(size) is int and size > 0 for size in value)


def _is_layout(value: Any) -> bool:
    return matrix_layouts.to_plain(value) is not None


_NUMBER = Kind("a finite number >= 0", lambda value: _number(value) >= 0, float, float)
_RATE = Kind("a finite number >= 0, or a tensor of one element", _is_rate, _plain_rate, float)
_THRESHOLD = _or_none(Kind("a finite number > 0", lambda value: _number(value) > 0, float, float))
_BETA = Kind("a number in [0, 1)", _is_beta, float, float)
_BETAS = Kind("two numbers in [0, 1)", _are_betas, _plain_betas, None)
_DECAY_MODE = _one_of("standard", "cautious", "decoupled")
_FLAG = Kind("True, False", lambda value: isinstance(value, bool), type=bool)
_STEPS = Kind("an integer from 1 to 100", lambda value: type(value) is int and 1 <= value <= 100, type=int)
_COEFFICIENTS = Kind(
    f"{_quoted(SCHEDULES)}, three numbers from -1000 to 1000, or a list of such triples, one a step",
    _are_coefficients,
    names=tuple(SCHEDULES),
)
_TYPE = _one_of(*MARS_TYPES)._replace(accepted=f"{_quoted(MARS_TYPES)}; {MUON!r} in create")
_SPLIT = Kind("'auto', 'none', or a mapping of name patterns to sizes", _is_split, names=("auto", "none"))
_STATE_DTYPE = _dtype("float16", "bfloat16", "float32", "float64", others=(eight_bits.NAME,))
_LAYOUT = Kind(
    "a MatrixLayout or a dict of its fields (transposed, batched: True, False; parts: sizes > 0)",
    _is_layout,
    matrix_layouts.to_plain,
)


class Readers(NamedTuple):
    """Who reads a setting: parameters of these rules; with `role`, only those of that role."""

    others: str = ""  # what an error says of all others
    rules: Callable[[UpdateRule], bool] = lambda rule: True
    role: str | None = None

    def include(self, group: Mapping[str, Any]) -> bool:
        """Return whether the parameters of a group read the setting."""
        return self.rules(update_rule(group)) and self.role in (None, group["role"])

    def named(self) -> str:
        """Return whom an error names."""
        if self.role is not None:
            return "vectors (biases, norms)"
        names = [repr(name) for name in MARS_TYPES if self.rules(UPDATE_RULES[name])]
        if self.rules(ADAMW):
            names.append("what takes AdamW (vectors, embeddings, heads)")
        return ", ".join(names)


_EVERY = Readers()
_CORRECTED = Readers("corrects no gradient", lambda rule: rule.corrects)
_ORTHOGONALIZED = Readers("orthogonalizes nothing", lambda rule: rule.orthogonalizes)
_WITH_SECOND_MOMENT = Readers("has no second moment", lambda rule: rule.has_second_moment)
# AdamW's gradients are not corrected, so both kinds of second moment are the same.
_SECOND_MOMENT_OF_TWO = Readers(
    "has no second moment of corrected gradients", lambda rule: rule.corrects and rule.has_second_moment
)
_WITH_EPS = Readers("has no eps", lambda rule: rule.has_second_moment or rule.has_eps_of_groups)
_UNDER_ADAMW = Readers("leaves nothing to AdamW", lambda rule: not rule.corrects)
_VECTORS = Readers("is no vector", role="vector")


class Setting(NamedTuple):
    """A keyword of `Mars` or `create`.

    Scope `group`: a key of every parameter group. `1d`: becomes the vectors' `lr`, `betas` or `weight_decay`, so that
    schedulers see one of each. `model`: an option of `create` for models. `run`: an option of `create` that is not
    saved.
    """

    name: str
    default: Any
    kind: Kind
    help: str
    scope: Literal["group", "1d", "model", "run"] = "group"
    readers: Readers = _EVERY


_TABLE = (
    Setting("lr", 3e-3, _RATE, "Learning rate of the matrices."),
    Setting("betas", (0.95, 0.99), _BETAS, "Decay rates of the moments."),
    Setting("eps", 1e-8, _NUMBER, "Added to the root of the second moment.", readers=_WITH_EPS),
    Setting("weight_decay", 0.0, _NUMBER, "Decoupled decay of the matrices."),
    Setting("gamma", 0.025, _NUMBER, "Scale of the correction.", readers=_CORRECTED),
    Setting("mars_type", "mars-adamw", _TYPE, "Update rule of the matrices."),
    Setting("is_approx", True, _FLAG, "False: exact MARS, which takes two gradients a step.", readers=_CORRECTED),
    Setting("clip_threshold", 1.0, _THRESHOLD, "Largest norm of a corrected gradient.", readers=_CORRECTED),
    Setting(
        "amsgrad", False, _FLAG, "Divide by the running maximum of the second moment.", readers=_WITH_SECOND_MOMENT
    ),
    Setting("optimize_1d", False, _FLAG, "Vectors take the MARS rule as well.", readers=_VECTORS),
    Setting(
        "lr_1d",
        None,
        _or_none(_RATE),
        "Learning rate of what takes AdamW; left out: lr / 2, and lr with mars-m.",
        "1d",
        _UNDER_ADAMW,
    ),
    Setting("betas_1d", (0.9, 0.95), _BETAS, "Decay rates of the moments of what takes AdamW.", "1d", _UNDER_ADAMW),
    Setting(
        "weight_decay_1d",
        None,
        _or_none(_NUMBER),
        "Decoupled decay of what takes AdamW; left out: embeddings and heads as matrices, vectors 0.",
        "1d",
        _UNDER_ADAMW,
    ),
    Setting("weight_decay_mode", "standard", _DECAY_MODE, "cautious: only toward zero; decoupled: not times lr."),
    Setting(
        "second_moment",
        "corrected",
        _one_of("corrected", "gradient"),
        "What the second moment averages.",
        readers=_SECOND_MOMENT_OF_TWO,
    ),
    Setting("ns_steps", 5, _STEPS, "Steps of Newton-Schulz.", readers=_ORTHOGONALIZED),
    Setting(
        "ns_coefficients",
        "quintic",
        _COEFFICIENTS,
        f"Coefficients of Newton-Schulz: {', '.join(SCHEDULES)}.",
        readers=_ORTHOGONALIZED,
    ),
    Setting(  # no float16: the entries of a first moment underflow in it
        "ns_dtype",
        None,
        _dtype("bfloat16", "float32", "float64"),
        "Dtype of Newton-Schulz; left out: the best.",
        readers=_ORTHOGONALIZED,
    ),
    Setting(
        "normalize_rows",
        None,
        _or_none(_BETA),
        "NorMuon: beta of the rows' second moments; left out: none.",
        readers=_ORTHOGONALIZED,
    ),
    Setting("max_grad_norm", None, _THRESHOLD, "Largest global norm of all gradients."),
    Setting("state_dtype", None, _STATE_DTYPE, "Dtype of the states; 8bit: codes with scales, for matrices."),
    Setting("rounding", "nearest", _one_of("nearest", "stochastic", "kahan"), "Rounding of bfloat16 parameters."),
    Setting("maximize", False, _FLAG, "Ascend instead of descend."),
    Setting("fused", None, _or_none(_FLAG), "True: kernels, or an error; False: PyTorch; left out: where they pay."),
    Setting(
        "split_fused",
        "auto",
        _SPLIT,
        "auto: orthogonalize query, key and value apart; none: as one.",
        "model",
        _ORTHOGONALIZED,
    ),
    Setting("lr_embeddings", None, _or_none(_NUMBER), "Learning rate of embeddings and heads.", "model"),
    # Checked by `_overrides`, not by its kind.
    Setting("param_rules", [], Kind("overrides", bool), "Settings by name: a .yaml or .json file, or JSON.", "model"),
    Setting("adamw_rates", False, _FLAG, "lr and weight_decay are AdamW's; the rule's follow from them.", "run"),
    Setting("release_gradients", False, _FLAG, "Step each parameter inside backward, and drop its gradient.", "run"),
)


# Types of the settings, for editors and type checkers. Names as plain strings are accepted too: they may come from a
# command line.
Pair = tuple[float, float] | list[float]
Dtype = torch.dtype | Literal["float16", "bfloat16", "float32", "float64"] | str


class CreateSettings(TypedDict, total=False):
    """Settings of `create`."""

    lr: float | torch.Tensor
    betas: Pair
    eps: float
    weight_decay: float
    gamma: float
    mars_type: Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "muon"] | str
    is_approx: bool
    clip_threshold: float | None
    amsgrad: bool
    optimize_1d: bool
    lr_1d: float | torch.Tensor | None
    betas_1d: Pair
    weight_decay_1d: float | None
    weight_decay_mode: Literal["standard", "cautious", "decoupled"] | str
    second_moment: Literal["corrected", "gradient"] | str
    ns_steps: int
    ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]]
    ns_dtype: Dtype | None
    normalize_rows: float | None
    max_grad_norm: float | None
    state_dtype: Dtype | Literal["8bit"] | None
    rounding: Literal["nearest", "stochastic", "kahan"] | str
    maximize: bool
    fused: bool | None
    split_fused: Literal["auto", "none"] | str | Mapping[str, Sequence[int]]
    lr_embeddings: float | None
    param_rules: Iterable[tuple[str, Mapping[str, Any]] | Mapping[str, Any]]
    adamw_rates: bool
    release_gradients: bool


class FactorySettings(CreateSettings, total=False):
    """Settings of `factory` and `mars_kwargs`."""

    beta1: float
    beta2: float
    beta1_1d: float
    beta2_1d: float
    like: str | os.PathLike[str] | None


def _defaults_of(*scopes: str) -> dict[str, Any]:
    return {setting.name: setting.default for setting in _TABLE if setting.scope in scopes}


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
DEFAULTS: Mapping[str, Any] = _defaults_of("group", "1d")
MODEL_DEFAULTS: Mapping[str, Any] = _defaults_of("model")
KEYS_1D = tuple(_defaults_of("1d"))
GROUP_DEFAULTS: Mapping[str, Any] = {**_defaults_of("group"), "layout": None}  # no keyword: groups alone have a layout
GROUP_KEYS = tuple(GROUP_DEFAULTS)
# What an override of `param_rules` may state: not the norm of all gradients.
OVERRIDE_KEYS = ("role", *(name for name in (*GROUP_KEYS, *KEYS_1D) if name != "max_grad_norm"))
# What each step checks in groups that may have been edited: not the numbers, which schedulers write.
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "gamma", "max_grad_norm")
STRUCTURAL_KEYS = ("role", *(name for name in GROUP_KEYS if name not in _NUMBERS))
# Names for the halves of a pair, where a value can hold no comma.
PAIR_KEYS = {"beta1": ("betas", 0), "beta2": ("betas", 1), "beta1_1d": ("betas_1d", 0), "beta2_1d": ("betas_1d", 1)}
# Labels of groups, ours and torch's. `gamma_of_average`: the gamma of the steps behind exp_avg, for states without last
# gradient; `left_out`: why matrices are not orthogonalized; `pattern`: of the group's override in `param_rules`;
# `peak_lr`: the largest rate of a group with decoupled decay.
LABEL_KEYS = (
    "params",
    "param_names",
    "role",
    "name",
    "initial_lr",
    "gamma_of_average",
    "left_out",
    "pattern",
    "peak_lr",
)
_KINDS = {name: setting.kind for name, setting in SETTINGS.items()}
_KINDS |= dict.fromkeys(PAIR_KEYS, _BETA)
_KINDS |= {"role": _one_of(*ROLES), "layout": _or_none(_LAYOUT)}
READERS = {name: setting.readers for name, setting in SETTINGS.items()}
_OTHER_NAMES = {  # of other libraries
    "learning_rate": "lr",
    "step_size": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "adam_epsilon": "eps",
    "beta1": "betas",
    "beta2": "betas",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "momentum": "betas",
    "max_norm": "max_grad_norm",
    "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
}
# Keywords of torch's optimizers, which configurations for several optimizers state.
_OF_TORCH = {"foreach": None, "capturable": False, "differentiable": False}
_EXAMPLE = "write gamma=0.025,beta1=0.9"
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_OVERRIDES = (
    "accepted: a list of pairs (pattern, settings), or of mappings with 'pattern' and settings, such as "
    "[('*.lora_*', {'lr': 1e-3})]"
)


class UnknownHyperparameterError(TypeError, ValueError):
    """Raised for an unknown setting: a TypeError as a keyword, a ValueError as a key of a group or of `optim_args`."""


class Override(NamedTuple):
    """Settings of the parameters whose name matches a shell pattern."""

    pattern: str
    settings: Mapping[str, Any]


def shown(value: Any) -> str:
    """Return what an error shows of a value: one line of at most 200 characters."""
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def check_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain types; keys that are no settings stay as they are.

    Raises:
        ValueError: a value that MARS cannot use, or an unknown name in an override of `param_rules`.
    """
    checked = dict(settings)
    for name, value in settings.items():
        if name == "param_rules":
            checked[name] = [_checked_override(override) for override in _overrides(value)]
        elif name in _KINDS:
            checked[name] = _checked(name, value, _KINDS[name])
    if "ns_steps" in settings and "ns_coefficients" in settings:
        coefficients_of(settings["ns_coefficients"], settings["ns_steps"])
    check_decoupled_decay(checked)
    return checked


def check_decoupled_decay(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a decoupled decay that would take a weight away, or more than that, in one step.

    With `adamw_rates` it is AdamW's, which is multiplied by the learning rate first.
    """
    if settings.get("weight_decay_mode") != "decoupled" or settings.get("adamw_rates"):
        return
    for name in ("weight_decay", "weight_decay_1d"):
        value = settings.get(name)
        if value is not None and value >= 1:
            raise ValueError(
                f"{name}={value:g} is not valid with weight_decay_mode='decoupled', which takes that part of a weight "
                f"at each step; accepted: numbers below 1. For AdamW's {value:g} give {value:g} * lr, or leave "
                "weight_decay_mode out"
            )


def loaded_state_dtype(saved: Any, own: Any) -> Any:
    """Return the `state_dtype` that a group has after loading: the saved one, or its own if exactly one is 8 bits."""
    is_converted = (saved == eight_bits.NAME) != (own == eight_bits.NAME)
    return own if is_converted else saved


def check_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `create`, checked; unlike a group's, their `mars_type` may be `"muon"`."""
    if str(settings.get("mars_type")) != MUON:
        return check_values(settings)
    checked = check_values({**settings, "mars_type": "mars-m"})
    return {**checked, "mars_type": MUON}


def expand(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `create` with what `mars_type="muon"` stands for: its defaults differ from those of mars-m.

    mars-m at gamma = 1 - beta1 without clipping has the momentum of torch.optim.Muon, with Nesterov's form; without the
    split it orthogonalizes each parameter whole, scaled as by `adjust_lr_fn="match_rms_adamw"`.
    """
    if arguments.get("mars_type") != MUON:
        return dict(arguments)
    gamma = 1 - arguments.get("betas", DEFAULTS["betas"])[0]
    return {"gamma": gamma, "clip_threshold": None, "split_fused": "none", **arguments, "mars_type": "mars-m"}


def _checked(name: str, value: Any, kind: Kind) -> Any:
    with contextlib.suppress(Exception):  # a value of any class may raise anything
        if kind.fits(value):
            return kind.plain(value)
    names = (*kind.names, MUON) if name == "mars_type" and str(value) != MUON else kind.names
    hint = hint_of_number(value) if kind.type is float else _hint_of_name(value, names)
    raise ValueError(f"{name}={shown(value)} is not valid{hint}; accepted: {kind.accepted}")


def _hint_of_name(value: Any, names: Sequence[str]) -> str:
    text = shown(value).strip("'").lower().replace("_", "-")
    close = difflib.get_close_matches(text, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def hint_of_number(value: Any) -> str:
    """Return what to write in place of a number that is text: YAML takes 1e-3 for text, for it has no point."""
    if not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    return f"; it is text: write {number!r} (YAML reads 1e-3 as text, and 1.0e-3 as a number)"


def _checked_override(override: Override) -> Override:
    where = f"param_rules {shown(override.pattern)}"
    check_names(override.settings, OVERRIDE_KEYS, where)
    values = {}
    for name, value in override.settings.items():
        values[name] = read(name, value) if isinstance(value, str) else value
    try:
        return Override(override.pattern, check_values(values))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _overrides(value: Any) -> list[Override]:
    """Return overrides from pairs, or from mappings with a `pattern`; settings are not checked.

    Raises:
        ValueError: something of another form, an empty pattern, or a duplicated one.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"param_rules={shown(value)} is not a list of overrides; {_OVERRIDES}")
    overrides: dict[str, Override] = {}  # by pattern
    for index, entry in enumerate(value):
        override = _override(entry, f"param_rules[{index}]")
        if override.pattern in overrides:
            raise ValueError(
                f"param_rules: {shown(override.pattern)} is duplicated; put its settings into one override"
            )
        overrides[override.pattern] = override
    return list(overrides.values())


def _override(entry: Any, where: str) -> Override:
    """Return the override that one entry of `param_rules` states."""
    if isinstance(entry, Mapping) and "pattern" in entry:
        settings = dict(entry)
        pattern = settings.pop("pattern")
    elif isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], Mapping):
        settings = dict(entry[1])
        pattern = entry[0]
    else:
        raise ValueError(f"{where}={shown(entry)} is not an override; {_OVERRIDES}")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{where}: pattern={shown(pattern)} is not a shell pattern of names; {_OVERRIDES}")
    return Override(pattern, settings)


def _overrides_from_text(text: str) -> list[Override]:
    """Return the overrides of a JSON list, or of the .json, .yaml or .yml file that the text names.

    Values may be strings.

    Raises:
        ValueError: they cannot be read.
    """
    from mars_hf.groups import plain_yaml

    names_file = text.lower().endswith((".json", ".yaml", ".yml"))
    try:
        if names_file:
            content = Path(text).expanduser().read_text(encoding="utf-8")
            value = plain_yaml.read(content)  # a .json file is YAML, too
        else:
            value = plain_yaml.read_json(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"param_rules={shown(text)} cannot be read ({_shortened(str(error))}); accepted: a .json or .yaml file, "
            'or a list in JSON, such as [{"pattern": "*.bias", "weight_decay": 0.01}]'
        ) from None
    return _overrides(value)


def without_torch_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those keywords of torch's optimizers that MARS has no use for; ValueError for others."""
    ours = dict(settings)
    for name, default in _OF_TORCH.items():
        value = ours.pop(name, default)
        if value is not default:
            raise ValueError(f"{name}={shown(value)} is for torch's own optimizers; leave it out, or give {default}")
    return ours


def check_names(names: Iterable[str], accepted: Iterable[str], where: str, *, labels: bool = False) -> None:
    """Raise UnknownHyperparameterError for a name that is not accepted, with the one that was probably meant.

    With `labels`, names that resemble none pass: schedulers and wrappers add keys of their own to groups.
    """
    accepted = tuple(accepted)
    for name in names:
        if name in accepted:
            continue
        meant = _meant(str(name), accepted)
        hint = f"; did you mean {meant!r}?" if meant else ""
        if name in PAIR_KEYS and meant == PAIR_KEYS[name][0] and isinstance(names, Mapping):
            hint = f"; give {_pair_of(name, names)}"
        if meant or not labels:
            raise UnknownHyperparameterError(f"{where}: unknown {shown(name)}{hint}; accepted: {', '.join(accepted)}")


def _pair_of(half: str, settings: Mapping[str, Any]) -> str:
    """Return a pair of betas, as `create` takes it, with the halves that somebody gave."""
    pair, _ = PAIR_KEYS[half]
    halves = [name for name, (of_pair, _) in PAIR_KEYS.items() if of_pair == pair]
    betas = [settings.get(name, default) for name, default in zip(halves, DEFAULTS[pair], strict=True)]
    return f"{pair}=({', '.join(map(shown, betas))})"


def _meant(name: str, accepted: Sequence[str]) -> str | None:
    """Return the accepted name that another library calls so, or that is nearly spelt so."""
    text = name.lower().replace("-", "_")
    ours = _OTHER_NAMES.get(text)
    if ours in accepted:
        return ours
    close = difflib.get_close_matches(text, accepted, n=1, cutoff=0.8)
    return close[0] if close else None


def read(name: str, text: str) -> Any:
    """Return the value that a string states; `check_values` decides whether it fits."""
    word = text.lower()
    if word in _WORDS and word not in _KINDS[name].names:  # split_fused has a "none" of its own
        return _WORDS[word]
    if name == "param_rules":
        return _overrides_from_text(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def text_of_optim_args(settings: Mapping[str, Any]) -> str:
    """Return a mapping, as YAML has it, as the text that `TrainingArguments.optim_args` holds.

    Raises:
        ValueError: a value that such a text cannot hold.
    """
    single = {name: value for name, value in settings.items() if name not in ("betas", "betas_1d")}
    for half, (pair, index) in PAIR_KEYS.items():
        if pair in settings:
            single[half] = _checked(pair, settings[pair], _BETAS)[index]
    for name, value in single.items():
        if not isinstance(value, (str, float, int, type(None))):
            raise ValueError(f"optim_args: {name}={shown(value)} is no number, word or path; give it in mars_kwargs")
    return ",".join(f"{name}={value}" for name, value in single.items())


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Return the settings of `TrainingArguments.optim_args`, such as "gamma=0.025,clip_threshold=none,beta1=0.9".

    Raises:
        ValueError: something that is not name=value, an unknown name, or one that comes twice.
    """
    texts = _split_pairs(text) if text else {}
    accepted = [name for name in (*SETTINGS, *PAIR_KEYS, "like") if name not in ("betas", "betas_1d")]
    check_names(texts, accepted, "optim_args")
    settings = {}
    for name, value in texts.items():
        settings[name] = value if name == "like" else read(name, value)
    return settings


def _split_pairs(text: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for pair in map(str.strip, text.split(",")):
        name, value = (part.strip() for part in pair.partition("=")[::2])
        where = f"optim_args={shown(text)}: {shown(pair)}"
        if name in texts:
            raise ValueError(f"{where} is given twice; {_EXAMPLE}")
        if name in ("betas", "betas_1d"):
            raise ValueError(f"{where} is half of a pair, for commas end values here; write beta1=0.9,beta2=0.95")
        if not name or not value or "=" in value:
            raise ValueError(f"{where} is not name=value; {_EXAMPLE}")
        texts[name] = value
    return texts
