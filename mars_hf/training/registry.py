"""MARS where Trainer makes its own optimizer: `factory()` for scripts, `register()` for `--optim mars_adamw`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mars_hf import _compat
from mars_hf.groups import saved_settings
from mars_hf.groups.settings import (
    DEFAULTS,
    MARS_TYPES,
    MODEL_DEFAULTS,
    ORTHOGONAL_TYPES,
    PAIR_KEYS,
    check,
    read,
    reject_unknown,
)
from mars_hf.optimizer import Mars, create
from mars_hf.param_groups import param_groups

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

# `--optim` names and the rule each one chooses.
OPTIM_NAMES = {f"{kind.replace('-', '_')}": kind for kind in MARS_TYPES}

# TrainingArguments' name of a setting -> ours. Left at the default of their class, these leave MARS's in force.
_ARGUMENT_NAMES = {
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
}
_ACCEPTED = (*DEFAULTS, *PAIR_KEYS, *MODEL_DEFAULTS, "like")


class MarsFactory:
    """What stands where Trainer expects an optimizer's class; it makes Mars of a model or of parameter groups.

    Trainer, which takes it for a factory, calls `MarsFactory()(model, **settings)`. Scripts and other trainers call
    `MarsFactory(groups, **settings)`, as they would a class, or pass TrainingArguments as the second argument.
    """

    def __new__(cls, *given: Any, **settings: Any) -> Any:
        """Return a factory if nothing is given, and otherwise what that factory makes of it."""
        made = super().__new__(cls)
        return made(*given, **settings) if given or settings else made

    def __call__(
        self,
        given: nn.Module | Iterable[Any] | None = None,
        given_args: TrainingArguments | None = None,
        /,
        *,
        args: TrainingArguments | None = None,
        params: Iterable[Any] | None = None,
        optimizer_dict: Iterable[Any] | None = None,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> Mars:
        """Make the optimizer: settings, then TrainingArguments, then the defaults of Mars.

        Args:
            given: the model, as Trainer has prepared it, or parameters or groups of them.
            given_args: as `args`, before which it counts.
            args: where lr, weight_decay, betas and eps come from; None takes those of the Trainer that is calling.
            params: groups in place of those that a model's parameters would form. They keep what they state; modules
                of the model still decide about roles.
            optimizer_dict: the same under another name (sentence-transformers).
            model: the model, where groups are given; None takes that of the Trainer that is calling.
            **settings: as `factory`.

        Raises:
            ValueError: as `factory`.
        """
        trainer = _calling_trainer()
        args = given_args or args or getattr(trainer, "args", None)
        if isinstance(given, nn.Module):
            given, model = None, given
        groups = next((groups for groups in (optimizer_dict, params, given) if groups is not None), None)
        if groups is None and model is None:
            raise ValueError("neither a model nor parameters are given; pass one of them as the first argument")
        resolved = resolve(settings, args)
        if groups is None:
            mars = create(model, **resolved)  # type: ignore[arg-type]
        else:
            mars = _from_groups(groups, model or getattr(trainer, "model", None), resolved)
            mars.created_with = saved_settings.normalized(resolved)
        return mars


def factory(args: TrainingArguments | None = None, **settings: Any) -> tuple[type[MarsFactory], dict[str, Any]]:
    """Return what `Trainer(optimizer_cls_and_kwargs=...)` takes to make Mars itself.

    Works where an instance cannot: `model_init`, `hyperparameter_search`, DeepSpeed, FSDP. The learning rate is
    TrainingArguments' `learning_rate`, always. Its `weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon` count
    unless they equal the defaults of the arguments' class (`type(args)`): then they are treated as unset, MARS's
    defaults apply, and a line at the beginning of training says so. mars-lion has the same defaults as the other rules,
    those of the official code.

    Args:
        args: the TrainingArguments to read; None reads those of the Trainer, at the moment it makes the optimizer.
        **settings: any hyperparameter of `Mars`, option of `create` (`split_fused`, `param_rules`, ...), or `beta1`,
            `beta2`, `beta1_1d`, `beta2_1d`. `like` takes up saved settings, as in `create`; what TrainingArguments
            state wins over them.

    Returns:
        A pair for `optimizer_cls_and_kwargs`.

    Raises:
        UnknownHyperparameterError: an unknown setting; the message lists the known ones.
        ValueError: a value out of range, a `like` without settings that can be read; when the optimizer is made, a
            setting given here and differently in TrainingArguments.
    """
    from mars_hf.training.callback import install  # imports transformers.trainer

    install()
    settings = saved_settings.normalized(settings)
    resolve(settings, args)  # complain here, where the caller can see it
    return MarsFactory, ({"args": args} if args is not None else {}) | settings


def resolve(settings: Mapping[str, Any], args: TrainingArguments | None) -> dict[str, Any]:
    """Return hyperparameters for `create` from settings and TrainingArguments; see `factory`."""
    flat = _stated(settings, args)
    resolved = {key: value for key, value in flat.items() if key not in PAIR_KEYS}
    for key, (pair, index) in PAIR_KEYS.items():
        if key in flat:
            values = list(resolved.get(pair, DEFAULTS[pair]))
            values[index] = flat[key]
            resolved[pair] = tuple(values)
    resolved = saved_settings.normalized(resolved)
    check(resolved)
    return resolved


def _stated(settings: Mapping[str, Any], args: TrainingArguments | None) -> dict[str, Any]:
    """Return what the user has stated, saved settings included, with each beta for itself."""
    like = settings.get("like")
    saved = {} if like is None else _flatten(saved_settings.read(like), None)
    return saved | _flatten(settings, args)


def _flatten(settings: Mapping[str, Any], args: TrainingArguments | None) -> dict[str, Any]:
    """Return what the user has stated, here or in TrainingArguments, with each beta for itself."""
    reject_unknown(settings, _ACCEPTED, "mars_hf.factory")
    flat = {key: value for key, value in settings.items() if key not in ("betas", "betas_1d", "like")}
    for key, (pair, index) in PAIR_KEYS.items():
        if pair in settings:
            if key in settings:
                raise ValueError(f"both {pair}={settings[pair]!r} and {key}={settings[key]!r} are given; give one")
            check({pair: settings[pair]})
            flat[key] = settings[pair][index]
    if args is None:
        return flat
    if "lr" in flat and float(flat["lr"]) != args.learning_rate:
        raise ValueError(
            f"lr={flat['lr']!r} for MARS and learning_rate={args.learning_rate!r} in TrainingArguments contradict each "
            f"other: learning_rate is what trains; set learning_rate={float(flat['lr']):g} and leave lr out"
        )
    flat["lr"] = args.learning_rate
    for argument, key in _ARGUMENT_NAMES.items():
        value = getattr(args, argument)
        if value == _class_default(args, argument):
            continue
        if key in flat and float(flat[key]) != value:
            raise ValueError(
                f"{argument}={value!r} in TrainingArguments and {key}={flat[key]!r} for MARS contradict each other; "
                "give one of them"
            )
        flat[key] = value
    return flat


def _from_groups(groups: Iterable[Any], model: nn.Module | None, resolved: dict[str, Any]) -> Mars:
    """Make Mars of somebody else's groups, which keep what they state; roles and layouts are those in the model."""
    groups = [groups] if isinstance(groups, Tensor) else list(groups)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    options = {key: value for key, value in resolved.items() if key in MODEL_DEFAULTS}
    own = {key: value for key, value in resolved.items() if key not in MODEL_DEFAULTS}
    mars_type = own.get("mars_type", DEFAULTS["mars_type"])
    if model is None:
        if mars_type in ORTHOGONAL_TYPES:
            logger.warning(
                "mars_type=%r from plain parameter groups orthogonalizes every matrix, embeddings and heads included: "
                "nothing but their shapes is known; pass model=... to leave those to AdamW",
                mars_type,
            )
        return create(groups, **resolved)
    stated = {
        id(param): {key: value for key, value in group.items() if key != "params"}
        for group in param_groups(model, mars_type=mars_type, **options)
        for _, param in group["params"]
    }
    split: list[dict[str, Any]] = []
    for group in groups:
        entries = group["params"]
        parts: dict[str, dict[str, Any]] = {}
        for entry in [entries] if isinstance(entries, Tensor) else entries:
            known = stated.get(id(entry[1] if isinstance(entry, tuple) else entry), {})
            parts.setdefault(repr(known), {**group, **known, "params": []})["params"].append(entry)
        split += parts.values()
    return create(split, **own)


def parse_optim_args(optim_args: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from the strings of `TrainingArguments.optim_args`: "gamma=0.025,clip_threshold=none,beta1=0.9".

    Numbers, `true` / `false`, `none`, names; pairs are given by their halves (`beta1`, `beta2`, `beta1_1d`,
    `beta2_1d`); `like` is a folder or a repository; `param_rules` is a .json
    or .yaml file.

    Raises:
        UnknownHyperparameterError: an unknown key; the message lists the known ones.
        ValueError: a value that cannot be read.
    """
    accepted = [key for key in _ACCEPTED if key not in ("betas", "betas_1d")]
    reject_unknown(optim_args, accepted, "optim_args")
    return {key: text if key == "like" else read(key, text) for key, text in optim_args.items()}


def split_optim_args(text: str | None) -> dict[str, str]:
    """Split `TrainingArguments.optim_args` into keys and values, as transformers does.

    Raises:
        ValueError: what is between two commas is not one key=value, or a key comes twice.
    """
    found: dict[str, str] = {}
    if not text:
        return found
    for pair in text.replace(" ", "").split(","):
        key, separator, value = pair.partition("=")
        if not (key and separator and value) or "=" in value:
            raise ValueError(
                f"optim_args={text!r}: {pair!r} is not key=value; give pairs without further '=', separated by commas, "
                f"such as gamma=0.025,beta1=0.9,beta2=0.95"
            )
        if key in found:
            raise ValueError(f"optim_args={text!r}: {key} is given twice ({found[key]} and {value}); give it once")
        found[key] = value
    return found


def register() -> None:
    """Make the rules' names values of `TrainingArguments.optim` and of `--optim`; safe to call twice.

    They are `mars_adamw`, `mars_lion`, `mars_shampoo` and `mars_m`. Call it before TrainingArguments or a parser is
    made. Further settings come from `optim_args`, which are checked when TrainingArguments are made.

    Raises:
        ImportError: transformers is too old to have a registry of optimizers.
    """
    try:
        import transformers.trainer_optimizer
    except ImportError as error:
        if error.name != "transformers.trainer_optimizer":
            raise  # transformers, or something that it needs, is missing or broken
        import transformers

        raise ImportError(
            f"mars_hf.register() needs transformers >= 5.19 (found {transformers.__version__}); upgrade it, or use "
            "Trainer(optimizer_cls_and_kwargs=mars_hf.factory(...))"
        ) from error
    from transformers.training_args import OptimizerNames, TrainingArguments

    from mars_hf.training.callback import install

    for name in OPTIM_NAMES:
        if name not in [member.value for member in OptimizerNames]:
            _compat.add_enum_member(OptimizerNames, name)
    handlers = _compat.optimizer_handlers(transformers.trainer_optimizer)
    for name, mars_type in OPTIM_NAMES.items():
        handlers[OptimizerNames(name)] = _handler(mars_type)
    _compat.call_after(TrainingArguments, "__post_init__", _check_arguments)
    install()


def _check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for settings in TrainingArguments, just made, with which a rule by name could not train."""
    kind = OPTIM_NAMES.get(str(getattr(args.optim, "value", args.optim)))
    if kind is not None:
        resolve(settings_by_name(kind, parse_optim_args(split_optim_args(args.optim_args))), args)


def _handler(mars_type: str) -> Callable[[Any], tuple[type[MarsFactory], dict[str, Any]]]:
    """Return what transformers calls for one `--optim` name."""

    def handler(context: Any) -> tuple[type[MarsFactory], dict[str, Any]]:
        settings = getattr(context.args, "mars_kwargs", None)  # of `asking_for_mars`
        if settings is None:
            settings = settings_by_name(mars_type, parse_optim_args(context.optim_args))
        made_by, settings = factory(context.args, **settings)
        return made_by, {"lr": context.args.learning_rate} | settings  # lr, because other handlers have it too

    return handler


def settings_by_name(mars_type: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that chose MARS by `optim`, with those that it gave besides."""
    settings = dict(given)
    optim = mars_type.replace("-", "_")
    saved = saved_settings.read(settings["like"]).get("mars_type", mars_type) if "like" in settings else mars_type
    if saved != mars_type:
        raise ValueError(
            f"optim={optim!r} and like={settings['like']!r}, which was trained with {saved!r}, "
            f"contradict each other; use optim={saved.replace('-', '_')!r}, or leave like out"
        )
    if settings.setdefault("mars_type", mars_type) != mars_type:
        raise ValueError(
            f"optim={optim!r} and mars_type={settings['mars_type']!r} contradict each other; "
            f"choose by optim alone: {', '.join(OPTIM_NAMES)}"
        )
    return settings


def trainer_settings(args: TrainingArguments, mars_kwargs: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Return the settings with which a trainer of MARS makes its own optimizer.

    Args:
        args: `optim` names the rule, or is the default of the arguments' class; `optim_args` are read too.
        mars_kwargs: as `factory`.
        trainer: the name of the trainer's class, for messages.

    Raises:
        ValueError: `optim` names another optimizer, a setting is given twice, or as `factory`.
    """
    optim, default = (str(getattr(own, "value", own)) for own in (args.optim, _class_default(args, "optim")))
    if optim not in OPTIM_NAMES and optim != default:
        raise ValueError(
            f"optim={optim!r} and {trainer}, which trains MARS, contradict each other; choose one of "
            f"{', '.join(OPTIM_NAMES)}, leave optim out, or train {optim!r} with transformers.Trainer or the class "
            "that with_mars was given"
        )
    if not isinstance(mars_kwargs, Mapping):
        raise TypeError(f"mars_kwargs={mars_kwargs!r}: give a dict of settings, such as {{'gamma': 0.05}}")
    settings = parse_optim_args(split_optim_args(args.optim_args))
    twice = sorted(settings.keys() & mars_kwargs)
    if twice:
        raise ValueError(f"{', '.join(twice)}: given in optim_args={args.optim_args!r} and in mars_kwargs; give one")
    settings |= mars_kwargs
    if optim in OPTIM_NAMES:
        settings = settings_by_name(OPTIM_NAMES[optim], settings)
    factory(args, **settings)  # complains of what it cannot read
    return settings


def asking_for_mars(args: TrainingArguments, settings: Mapping[str, Any]) -> TrainingArguments:
    """Return a copy of the arguments that names MARS, for trainers that choose an optimizer by them.

    Args:
        args: a trainer's arguments.
        settings: as `trainer_settings` returns them.
    """
    from transformers.training_args import OptimizerNames

    asks: Any = copy.copy(args)
    asks.optim, asks.mars_kwargs = OptimizerNames(next(iter(OPTIM_NAMES))), settings
    return asks


def _class_default(args: TrainingArguments, name: str) -> Any:
    """Return the default that a field has in the arguments' own class: subclasses have others."""
    field = getattr(type(args), "__dataclass_fields__", {}).get(name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING if field is None else field.default


def _calling_trainer() -> Any:
    """Return the Trainer that is making its optimizer, or None outside of one.

    Trainer hands a factory the model and nothing else, and changes its arguments between the trials of a search, so
    they are read from the caller.
    """
    from transformers import Trainer

    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
