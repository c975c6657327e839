"""MARS where Trainer makes its own optimizer: `factory()` for scripts, `register()` for `--optim mars_adamw`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mars_hf import hyperparameters
from mars_hf.optimizer import DEFAULTS, MODEL_DEFAULTS, Mars, create

if TYPE_CHECKING:
    from transformers import TrainingArguments

# `--optim` names and the rule each one chooses.
OPTIM_NAMES = {f"{kind.replace('-', '_')}": kind for kind in hyperparameters.MARS_TYPES}

# One float of a pair, because `optim_args` can hold neither commas nor tuples in a value.
_PAIR_KEYS = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "beta1_1d": ("betas_1d", 0),
    "beta2_1d": ("betas_1d", 1),
}
# TrainingArguments' name of a setting -> ours.
_ARGUMENT_NAMES = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
}
# layout is that of one matrix: a model has its own.
_ACCEPTED = tuple(key for key in (*DEFAULTS, *_PAIR_KEYS, *MODEL_DEFAULTS) if key != "layout")


class MarsFactory:
    """What Trainer calls with the model, and the settings of `factory`, when it makes its optimizer."""

    def __call__(self, model: Any, *, args: TrainingArguments | None = None, **settings: Any) -> Mars:
        """Make the optimizer: settings, then TrainingArguments, then the defaults of Mars.

        Args:
            model: the model, as Trainer has prepared it.
            args: where lr, weight_decay, betas and eps come from; None takes those of the Trainer that is calling.
            **settings: as `factory`.
        """
        if args is None:
            args = _calling_trainer_arguments()
        return create(model, **resolve(settings, args))


def factory(args: TrainingArguments | None = None, **settings: Any) -> tuple[type[MarsFactory], dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=...)` takes to make Mars itself.

    Works where an instance cannot: `model_init`, `hyperparameter_search`, DeepSpeed, FSDP. lr, weight_decay, betas and
    eps come from TrainingArguments (`learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2`, `adam_epsilon`) where
    they differ from TrainingArguments' own defaults, which count as not set, so that MARS's defaults stand.

    Args:
        args: the TrainingArguments to read; None reads those of the Trainer, at the moment it makes the optimizer.
        **settings: any hyperparameter of `Mars`, option of `create` (`no_decay`, `split_fused`, ...), or `beta1`,
            `beta2`, `beta1_1d`, `beta2_1d`.

    Returns:
        A pair for `optimizer_cls_and_kwargs`.

    Raises:
        UnknownHyperparameterError: an unknown setting; the message lists the known ones.
        ValueError: a value out of range; when the optimizer is made, a setting given here and differently in
            TrainingArguments.
    """
    resolve(settings, args)  # complain here, where the caller can see it
    return MarsFactory, ({"args": args} if args is not None else {}) | settings


def resolve(settings: Mapping[str, Any], args: TrainingArguments | None) -> dict[str, Any]:
    """Hyperparameters for `create` from settings and TrainingArguments; see `factory`."""
    hyperparameters.reject_unknown(settings, _ACCEPTED, "mars_hf.factory")
    flat = dict(settings)
    for key, (pair, index) in _PAIR_KEYS.items():
        if pair in settings:
            if key in settings:
                raise ValueError(f"both {pair}={settings[pair]!r} and {key}={settings[key]!r} are given; give one")
            hyperparameters.check({pair: settings[pair]})
            flat[key] = settings[pair][index]
    for argument, key in _ARGUMENT_NAMES.items():
        value = _value_if_set(args, argument)
        if value is None:
            continue
        if key in flat and float(flat[key]) != value:
            raise ValueError(
                f"{argument}={value!r} in TrainingArguments and {key}={flat[key]!r} for MARS contradict each other; "
                "give one of them"
            )
        flat[key] = value
    resolved = {key: value for key, value in flat.items() if key not in _PAIR_KEYS}
    for key, (pair, index) in _PAIR_KEYS.items():
        if key in flat:
            values = list(resolved.get(pair, DEFAULTS[pair]))
            values[index] = flat[key]
            resolved[pair] = tuple(values)
    hyperparameters.check(resolved)
    return resolved


def parse_optim_args(optim_args: Mapping[str, str]) -> dict[str, Any]:
    """Settings from the strings of `TrainingArguments.optim_args`: "gamma=0.025,clip_threshold=none,beta1=0.9".

    Numbers, `true` / `false`, `none`, names; pairs are given by their halves (`beta1`, `beta2`, `beta1_1d`,
    `beta2_1d`), several patterns of `no_decay` and `adamw` are separated by `|`.

    Raises:
        UnknownHyperparameterError: an unknown key; the message lists the known ones.
        ValueError: a value that cannot be read.
    """
    accepted = [key for key in _ACCEPTED if key not in ("betas", "betas_1d")]
    hyperparameters.reject_unknown(optim_args, accepted, "optim_args")
    return {key: _parse_value(key, text) for key, text in optim_args.items()}


def register() -> None:
    """Make the rules' names values of `TrainingArguments.optim` and of `--optim`; safe to call twice.

    They are `mars_adamw`, `mars_lion`, `mars_shampoo` and `mars_m`. Call it before TrainingArguments or a parser is
    made. Further settings come from `optim_args`; such runs get LastGradientCallback's guard and metrics without
    passing the callback.

    Raises:
        ImportError: transformers is older than 5.2, which has no registry of optimizers.
    """
    from transformers.training_args import OptimizerNames

    try:
        from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
    except ImportError as error:
        import transformers

        raise ImportError(
            f"mars_hf.register() needs transformers >= 5.2 (found {transformers.__version__}); upgrade it, or use "
            "Trainer(optimizer_cls_and_kwargs=mars_hf.factory(...))"
        ) from error
    import mars_hf.callbacks  # noqa: F401  (adds the default callback)

    for name, mars_type in OPTIM_NAMES.items():
        if name not in [member.value for member in OptimizerNames]:
            _add_enum_member(OptimizerNames, name)
        _OPTIMIZER_HANDLERS[OptimizerNames(name)] = _handler(mars_type)


def _handler(mars_type: str) -> Callable[[Any], tuple[type[MarsFactory], dict[str, Any]]]:
    """What transformers calls for one `--optim` name."""

    def handler(context: Any) -> tuple[type[MarsFactory], dict[str, Any]]:
        settings = parse_optim_args(context.optim_args)
        if settings.setdefault("mars_type", mars_type) != mars_type:
            raise ValueError(
                f"optim={mars_type.replace('-', '_')!r} and mars_type={settings['mars_type']!r} contradict each other; "
                f"choose by optim alone: {', '.join(OPTIM_NAMES)}"
            )
        return factory(context.args, **settings)

    return handler


def _add_enum_member(enum: Any, value: str) -> None:
    """Add a member to a str Enum, as if it had been written in its class body.

    Python has no public way: an enum with members cannot be subclassed, and `_missing_` alone does not reach the
    choices of a command line.
    """
    name = value.upper()
    member = str.__new__(enum, value)
    member._name_, member._value_, member.__objclass__ = name, value, enum
    member._sort_order_ = len(enum._member_names_)
    # Pickled as a plain string, so that training_args.bin loads on machines without mars_hf.
    member.__reduce_ex__ = lambda protocol: (str, (value,))
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    type.__setattr__(enum, name, member)
    if enum(value) is not member or member not in list(enum):
        raise RuntimeError(f"this Python ({sys.version.split()[0]}) does not let {enum.__name__} take {value!r}")


def _value_if_set(args: TrainingArguments | None, name: str) -> float | None:
    """The value of a TrainingArguments field, or None where it equals TrainingArguments' own default."""
    if args is None:
        return None
    from transformers import TrainingArguments

    value = getattr(args, name)
    return None if value == TrainingArguments.__dataclass_fields__[name].default else value


def _calling_trainer_arguments() -> TrainingArguments | None:
    """The TrainingArguments of the Trainer that is making its optimizer, or None outside of one.

    Trainer hands a factory the model and nothing else, and changes its arguments between the trials of a search, so
    they are read from the caller.
    """
    from transformers import Trainer

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller.args
        frame = frame.f_back
    return None


def _parse_value(key: str, text: str) -> Any:
    lowered = text.lower()
    default = {**DEFAULTS, **MODEL_DEFAULTS}.get(key)
    if lowered in ("none", "null") and key != "split_fused":
        return None
    if isinstance(default, list):
        return text.split("|")
    if isinstance(default, bool) or key in ("foreach", "fused"):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if lowered not in words:
            raise ValueError(f"optim_args: {key}={text!r} is not a bool; accepted: true, false")
        return words[lowered]
    if isinstance(default, str) or key.endswith("_dtype"):
        return text
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        raise ValueError(f"optim_args: {key}={text!r} is not a number") from None
