"""MARS where Trainer makes its own optimizer: `factory()` for scripts, `register()` for `--optim mars_adamw`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import transformers.trainer_optimizer
from torch import nn
from transformers.trainer import Trainer
from transformers.training_args import OptimizerNames, TrainingArguments
from typing_extensions import Unpack

from mars_hf import _compat
from mars_hf.creation import create, make, with_rates_of_mars
from mars_hf.groups import saved_settings
from mars_hf.groups.effects import check_arguments_read, without_unread
from mars_hf.groups.param_groups import param_groups, split_by_model
from mars_hf.groups.settings import (
    DEFAULTS,
    MODEL_DEFAULTS,
    PAIR_KEYS,
    SETTINGS,
    FactorySettings,
    check_arguments,
    check_decoupled_decay,
    check_names,
    expand,
    hint_of_number,
    parse_optim_args,
    shown,
    text_of_optim_args,
    without_torch_keywords,
)
from mars_hf.optimizer import Mars
from mars_hf.training.callback import OPTIM_NAMES  # guards every Trainer made from now on

# TrainingArguments' names of settings; MARS's defaults are in force where nobody has stated these.
_ARGUMENTS = {"weight_decay": "weight_decay", "adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "eps"}
# The Trainer whose `create_optimizer` runs.
_MAKING: ContextVar[Trainer | None] = ContextVar("maker", default=None)


class MarsFactory:
    """Make Mars where Trainer and others call an optimizer's class.

    Trainer calls `factory()(model)`; others call it with groups of parameters, which keep what they state, and whose
    roles `model` decides. The arguments are read at each call, because a search changes them in place.
    """

    def __init__(self, args: TrainingArguments, settings: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """See the class; the settings are checked."""
        self.args, self.settings, self.model = args, settings, model
        self.loss: nn.Module | None = None  # of sentence-transformers, around the model

    def __call__(
        self,
        model_or_params: Any = None,
        args: TrainingArguments | None = None,  # Axolotl
        /,
        *,
        params: Iterable[Any] | None = None,
        optimizer_dict: Iterable[Any] | None = None,  # sentence-transformers: groups in place of the model's
        model: Any = None,
        **settings: Any,
    ) -> Any:
        """Return Mars, or the factory itself if there is nothing to make it of."""
        groups = params if optimizer_dict is None else optimizer_dict
        if isinstance(model_or_params, nn.Module):
            model = model_or_params
        elif model_or_params is not None:
            groups = model_or_params
        if groups is None and model is None:
            return self
        args = args or self.args
        arguments = resolve({**self.settings, **checked_settings(settings)}, args)
        if groups is None:
            return make(model, arguments, decayed=_override_of_decay())
        # sentence-transformers' groups state the decay of `args` where MARS's settings may state another.
        is_another = arguments.get("weight_decay", args.weight_decay) != args.weight_decay
        if is_another or arguments.get("weight_decay_1d") is not None or arguments.get("adamw_rates"):
            groups = _without_decay_of_arguments(groups, args)
        return _from_groups(groups, model or self.model, self.loss, arguments)

    def of_trainer(self, args: TrainingArguments) -> MarsFactory:
        """Return the factory that reads a Trainer's own arguments: some, as TRL's, copy those that they are given.

        Raises:
            ValueError: they are others.
        """
        if args is self.args:
            return self
        ours, theirs = resolve(self.settings, self.args), resolve(self.settings, args)
        different = [name for name in (ours | theirs) if ours.get(name) != theirs.get(name)]
        if different:
            name = different[0]
            raise ValueError(
                "mars_hf.factory was given other TrainingArguments than the Trainer "
                f"({name}={shown(ours.get(name))} and {shown(theirs.get(name))}); give both the same"
            )
        return MarsFactory(args, self.settings, self.model)


def factory(args: TrainingArguments, **settings: Unpack[FactorySettings]) -> tuple[Any, dict[str, Any]]:
    """Return what `Trainer(optimizer_cls_and_kwargs=...)` takes to make Mars itself.

    Works where an instance cannot: `model_init`, `hyperparameter_search`, DeepSpeed, FSDP. The learning rate is
    TrainingArguments' `learning_rate`, always. Its `weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon` are
    treated as unset where they equal TrainingArguments' own defaults, and a subclass has stated no others; MARS's
    defaults apply then.

    Args:
        args: the Trainer's TrainingArguments, read at the moment it makes the optimizer.
        **settings: any hyperparameter of `Mars`, option of `create` (`param_rules`, `like`, ...), or `beta1`, `beta2`,
            `beta1_1d`, `beta2_1d`. What TrainingArguments state wins over what `like` takes up.

    Returns:
        A pair for `optimizer_cls_and_kwargs`.

    Raises:
        UnknownHyperparameterError: an unknown setting.
        ValueError: a value out of range, a `like` that cannot be read, or a setting given here and differently in
            TrainingArguments; also when the optimizer is made.
    """
    if not isinstance(args, TrainingArguments):
        raise TypeError(
            f"mars_hf.factory takes the Trainer's TrainingArguments, not {type(args).__name__}; mars_hf.create takes "
            "models"
        )
    rates_by_name = getattr(args, "learning_rate_mapping", None)  # of sentence-transformers
    if rates_by_name:
        raise ValueError(
            f"learning_rate_mapping={shown(rates_by_name)} does not reach mars_hf.factory; use "
            "optim='mars_adamw' after mars_hf.register(), or mars_hf.with_mars(SentenceTransformerTrainer)"
        )
    checked = checked_settings(settings)
    is_named = _optim(args) in OPTIM_NAMES
    if is_named and not parse_optim_args(args.optim_args).items() <= split_beta_pairs(checked).items():
        raise ValueError(
            f"optim_args={shown(args.optim_args)} in TrainingArguments does not reach mars_hf.factory; give these "
            "settings to factory, or use MarsTrainer, with_mars or optim alone, which read optim_args"
        )
    resolve(checked, args)  # complains here, where the caller can see it
    return MarsFactory(args, checked), {}


def checked_settings(settings: Mapping[str, Any], where: str = "mars_hf.factory") -> dict[str, Any]:
    """Return settings of `factory` as plain types, which can be read twice; errors about names begin with `where`."""
    ours = without_torch_keywords(settings)
    check_names(ours, [*SETTINGS, *PAIR_KEYS, "like"], where)
    return check_arguments(ours)


def resolve(settings: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments of `create`: checked settings, what TrainingArguments state, and what `like` takes up."""
    others = dict(settings)
    like = others.pop("like", None)
    saved = {} if like is None else split_beta_pairs(saved_settings.read(like, settings.get("mars_type")))
    chosen = {**DEFAULTS, **saved, **settings}["mars_type"]
    if OPTIM_NAMES.get(_optim(args), chosen) != chosen:
        is_saved = "mars_type" not in settings and like is not None
        where = f"the mars_type of like={shown(str(like))}," if is_saved else "mars_type"
        raise ValueError(
            f"optim={_optim(args)!r} and {where} {chosen!r} contradict each other; choose by optim alone, and with "
            f"factory by mars_type alone: {', '.join(OPTIM_NAMES)}"
        )
    of_mars = split_beta_pairs(others)
    if args.optim_target_modules:
        raise ValueError(
            f"optim_target_modules={shown(args.optim_target_modules)} is for GaLore, APOLLO and the like, and MARS has "
            "no use for it; remove it, and choose parameters with param_rules"
        )
    in_arguments = _settings_in_arguments(args)
    for name, (key, value) in in_arguments.items():
        if key in of_mars and float(of_mars[key]) != value:
            default = ", its default" if value == _default(type(args), name) else ""
            raise ValueError(
                f"{name}={shown(value)} in TrainingArguments{default}, and {key}={shown(of_mars[key])} for MARS "
                f"contradict each other; set {name}={shown(of_mars[key])} in TrainingArguments alone"
            )
    stated = dict(in_arguments.values()) | of_mars
    arguments = without_unread(join_beta_pairs(saved | stated), join_beta_pairs(stated))
    saved_settings.check_rates(like, arguments)
    check_arguments_read(arguments)
    check_decoupled_decay(arguments)
    return arguments


def _settings_in_arguments(args: TrainingArguments) -> dict[str, tuple[str, float]]:
    """Return what TrainingArguments state, by their names: MARS's name of the setting, and its value."""
    settings = {"learning_rate": ("lr", args.learning_rate)}
    for name, key in _ARGUMENTS.items():
        value = getattr(args, name)
        default, own_default = _default(TrainingArguments, name), _default(type(args), name)
        # The user has stated what is no default, and the author of a subclass what is no default of TrainingArguments.
        if value != own_default or own_default != default:
            settings[name] = key, value
    for name, (_, value) in settings.items():
        if isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} in TrainingArguments is not valid{hint_of_number(value)}")
    return settings


def join_beta_pairs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the betas as `Mars` has them; the other half of a pair is MARS's default."""
    joined = {name: value for name, value in settings.items() if name not in PAIR_KEYS}
    for half, (pair, index) in PAIR_KEYS.items():
        if half in settings:
            betas = list(joined.get(pair, DEFAULTS[pair]))
            betas[index] = settings[half]
            joined[pair] = tuple(betas)
    return joined


def split_beta_pairs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with each beta for itself, as TrainingArguments have them."""
    halved = {name: value for name, value in settings.items() if name not in ("betas", "betas_1d")}
    for half, (pair, index) in PAIR_KEYS.items():
        if pair in settings and half in settings:
            raise ValueError(
                f"{pair}={shown(settings[pair])} and {half}={shown(settings[half])} are both given; give one"
            )
        if pair in settings:
            halved[half] = settings[pair][index]
    return halved


def _default(arguments_class: type[TrainingArguments], name: str) -> Any:
    """Return the default of a field in a class of arguments: subclasses may have others."""
    field = arguments_class.__dataclass_fields__[name]
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _without_decay_of_arguments(groups: Iterable[Any], args: TrainingArguments) -> list[Any]:
    """Return a Trainer's groups without the decay, or its absence, that they have from TrainingArguments."""
    kept = []
    for group in groups:
        is_of_arguments = isinstance(group, dict) and group.get("weight_decay") in (0.0, args.weight_decay)
        kept.append({name: group[name] for name in group if name != "weight_decay"} if is_of_arguments else group)
    return kept


def _from_groups(
    groups: Iterable[Any], model: nn.Module | None, loss: nn.Module | None, arguments: dict[str, Any]
) -> Mars:
    """Make Mars of somebody else's groups, which keep what they state; roles and layouts are those in the model.

    A loss may hold the model and weights of its own, whose roles it decides.
    """
    if model is None:
        return create(groups, **arguments)
    groups = list(groups)
    arguments = with_rates_of_mars(arguments, groups)
    expanded = expand(arguments)
    mars_type = expanded.get("mars_type", DEFAULTS["mars_type"])
    options = {name: value for name, value in expanded.items() if name in MODEL_DEFAULTS}
    others = {name: value for name, value in expanded.items() if name not in MODEL_DEFAULTS}
    of_model = param_groups(model, mars_type=mars_type, **options)
    of_loss = []
    if loss is not None and loss is not model:
        rate = options.get("lr_embeddings")
        of_loss = param_groups(loss, mars_type=mars_type, lr_embeddings=rate, is_addition=True)
    mars = make(split_by_model(groups, [*of_loss, *of_model]), others)
    mars.created_with = {**expanded, **arguments}  # "muon" by its name, with the defaults that it stands for
    mars._follow_model(model)
    return mars


def register() -> None:
    """Make the rules' names values of `TrainingArguments.optim` and of `--optim`; safe to call twice.

    They are `mars_adamw`, `mars_lion`, `mars_shampoo`, `mars_m`, `mars_muon` and, where transformers has no such name,
    `muon`. Call it before TrainingArguments or a parser is made. Further settings come from `optim_args`, which are
    checked when TrainingArguments are made.
    """
    handlers: dict[Any, Any] = transformers.trainer_optimizer._OPTIMIZER_HANDLERS
    for name in OPTIM_NAMES:
        if name not in [member.value for member in OptimizerNames]:
            _compat.add_enum_member(OptimizerNames, name)
        handlers[OptimizerNames(name)] = _handler
    _compat.replace_once(TrainingArguments, "__post_init__", _checking_arguments)


def _checking_arguments(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def check_and_init(self: TrainingArguments, *args: Any, **kwargs: Any) -> None:
        _check_name(self.optim)
        post_init(self, *args, **kwargs)
        _check_arguments(self)

    return check_and_init


def _check_name(optim: Any) -> None:
    """Raise ValueError for a name that is nearly one of ours: transformers would list its own 50."""
    names = [str(member.value) for member in OptimizerNames]
    if not isinstance(optim, str) or isinstance(optim, OptimizerNames) or optim in names:
        return
    text = optim.strip().lower().replace("-", "_")
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.75)
    is_near = text.startswith("mars") or (close and close[0] in OPTIM_NAMES)
    if is_near:
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"optim={shown(optim)} is no optimizer; {meant}MARS has {', '.join(OPTIM_NAMES)}")


def _check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for settings in TrainingArguments, just made, with which a rule by name could not train."""
    optim_args: Any = args.optim_args
    if isinstance(optim_args, Mapping):  # from YAML; transformers reads text alone
        args.optim_args = text_of_optim_args(optim_args)
    if _optim(args) in OPTIM_NAMES:
        resolve(settings_by_name(args, {}), args)


def _handler(context: Any) -> tuple[MarsFactory, dict[str, Any]]:
    """Return what transformers asks for by an `--optim` name; `lr` is there because other handlers have it too."""
    args = context.args
    made_by = getattr(args, "mars_factory", None) or MarsFactory(args, settings_by_name(args, {}), context.model)
    made_by.loss = context.model  # sentence-transformers asks with its loss in place of the model
    return made_by, {"lr": args.learning_rate}


def _noting_maker(create_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_optimizer)
    def note_and_create(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        token = _MAKING.set(self)
        try:
            return create_optimizer(self, *args, **kwargs)
        finally:
            _MAKING.reset(token)

    return note_and_create


_compat.replace_once(Trainer, "create_optimizer", _noting_maker)


def _override_of_decay() -> Callable[[nn.Module], Iterable[str]] | None:
    """Return the method by which the user of a Trainer says what decays; None where it is transformers' own."""
    trainer: Any = _MAKING.get()
    if trainer is None:
        return None
    method = trainer.get_decay_parameter_names
    is_own = getattr(method, "__func__", None) is Trainer.get_decay_parameter_names
    return None if is_own else method


def _optim(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def settings_by_name(args: TrainingArguments, mars_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `optim_args` and `mars_kwargs`, checked, with the rule that `optim` names, if any."""
    from_text = parse_optim_args(args.optim_args)
    for name in from_text.keys() & mars_kwargs:
        raise ValueError(f"{name}: given in optim_args={shown(args.optim_args)} and in mars_kwargs; give one")
    settings = checked_settings({**from_text, **mars_kwargs}, "mars_kwargs")
    rule = OPTIM_NAMES.get(_optim(args))
    if rule is None or settings.get("like") is not None:  # which has a rule, too
        return settings
    return {"mars_type": rule, **settings}


def trainer_settings(args: TrainingArguments, mars_kwargs: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Return the settings of a trainer, a class of this name, that makes its own Mars; `optim` must not be another."""
    default = _default(type(args), "optim")
    if _optim(args) not in OPTIM_NAMES and _optim(args) != getattr(default, "value", default):
        raise ValueError(
            f"optim={_optim(args)!r} and {trainer}, which trains MARS, contradict each other; choose one of "
            f"{', '.join(OPTIM_NAMES)}, leave optim out, or train {_optim(args)!r} with transformers.Trainer or the "
            "class that with_mars was given"
        )
    settings = settings_by_name(args, mars_kwargs)
    resolve(settings, args)  # complains of what it cannot read
    return settings


def args_with_mars_optim(
    args: TrainingArguments, settings: Mapping[str, Any], model: nn.Module | None
) -> TrainingArguments:
    """Return a copy of the arguments that names MARS, for trainers that choose an optimizer by them."""
    asking: Any = copy.copy(args)
    asking.optim = OptimizerNames(next(iter(OPTIM_NAMES)))
    asking.mars_factory = MarsFactory(args, settings, model)
    return asking
