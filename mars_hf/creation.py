"""`create` makes an optimizer for a model or for parameters, and refuses what would not train as it was asked to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import Never, Unpack

from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.groups import saved_settings
from mars_hf.groups.effects import check_arguments_read, without_unread
from mars_hf.groups.param_groups import param_groups
from mars_hf.groups.settings import (
    DEFAULTS,
    MODEL_DEFAULTS,
    SETTINGS,
    CreateSettings,
    check_arguments,
    check_names,
    expand,
    shown,
    without_torch_keywords,
)
from mars_hf.groups.suggest import from_adamw
from mars_hf.optimizer import Mars
from mars_hf.step.release import GradientRelease


def create(
    model_or_params: nn.Module | Iterable[Any],
    *others: Never,
    like: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    **settings: Unpack[CreateSettings],
) -> Mars:
    """Make a Mars optimizer for a model (preferred) or for parameters.

    With a model, or several, module types and shapes decide which parameter is a matrix and which one decays (see
    `param_groups`). Frozen parameters are left out, tied weights appear once. For mars-shampoo and mars-m, modules also
    decide which (out, in) matrices a parameter holds. These rules orthogonalize the weights that multiply activations;
    everything else takes AdamW, heads included, and `print(optimizer)` says why. Plain parameters have shapes and
    nothing else, so these rules orthogonalize all their matrices, with a warning.

    Args:
        model_or_params: a module, a list of modules (whose parameters are then named as those of an nn.ModuleList,
            `0.weight`), or what `Mars` takes as `params`.
        *others: none; settings have names.
        like: whose settings to reuse, for continued pretraining: a folder with the mars.json of a run, or the name
            of such a repository on the Hub. Arguments given here override them, also the rates that mars.json has for
            vectors and embeddings. Not reused: what the loop and the machine decide (`max_grad_norm`, `fused`,
            `process_group`), and what a rule given here ignores. None takes the defaults.
        process_group: as `Mars`.
        **settings: any of `Mars`, and with a model:

            - `mars_type`: also `"muon"`, torch.optim.Muon's update: mars-m with other defaults, gamma = 1 - beta1,
              `clip_threshold=None` and `split_fused="none"`. One buffer a matrix; AdamW for everything else.
            - `split_fused`: for mars-shampoo and mars-m: `"auto"` orthogonalizes query, key and value of known fused
              projections apart, `"none"` nothing; or patterns of names to sizes, see `model_layouts.of_model`.
            - `lr_embeddings`: learning rate of embeddings and heads, with any rule; None: that of matrices, or `lr_1d`
              where they take AdamW.
            - `param_rules`: pairs of a shell pattern of names and settings (`[("*.wte.weight", {"weight_decay": 0.0}),
              ("*.gate.*", {"role": "adamw"})]`), or mappings with `pattern`. The first pattern that matches a
              parameter's name in `model.named_parameters()` decides. An override states any setting of a parameter
              group except `max_grad_norm`, and wins over the other arguments; `role` is `"matrix"`, `"vector"` or
              `"adamw"`. Its `lr` is that of matrices: what takes AdamW has it times lr_1d / lr, unless the override
              states `lr_1d`.
            - `adamw_rates`: True takes `lr` and `weight_decay` for AdamW's, and trains with those that `python -m
              mars_hf suggest` derives for the rule and its betas; `lr_1d`, if left out, is AdamW's rate. Rates that you
              state for some parameters (`lr_1d`, `lr_embeddings`, `param_rules`) stay as they are: an override's `lr`
              is then that of its vectors, too. An override of another rule states its rate. Not saved: the results are.
            - `release_gradients`: True steps each parameter inside `backward()`, as soon as its gradient is there,
              and frees that: the loop never holds all gradients. `step()` only checks. For one
              micro-batch a step, in one process or with FSDP2; without `max_grad_norm`, gradient scaler and exact form.
              Not saved.

    Raises:
        TypeError: neither a module nor parameters, or a setting without name.
        UnknownHyperparameterError: a setting `Mars` does not have.
        ValueError: as `Mars`; no `lr`, unless `like` or every group has one; a model without trainable parameters; a
            pattern that matches or decides nothing; what needs a model with parameters; `release_gradients` with what
            needs all gradients; a `like` without settings that can be read.
    """
    _check_types(model_or_params, others)
    stated = without_torch_keywords(settings)
    check_names(stated, SETTINGS, "mars_hf.create")
    saved = {} if like is None else saved_settings.read(like, stated.get("mars_type"))
    arguments = without_unread({**saved, **check_arguments(stated)}, stated)
    saved_settings.check_rates(like, arguments)
    check_arguments_read(arguments)
    return make(model_or_params, arguments, process_group=process_group)


def make(
    model_or_params: Any,
    arguments: Mapping[str, Any],
    *,
    process_group: Any = None,
    decayed: Callable[[nn.Module], Iterable[str]] | None = None,
) -> Mars:
    """Make what `create` returns. Arguments are checked here, too: a Trainer's come as its user has written them.

    `decayed` gives the names of a model's parameters that decay, where a Trainer's user has said so; see
    `param_groups`.
    """
    arguments = check_arguments(arguments)
    release_gradients = arguments.pop("release_gradients", False)
    if isinstance(model_or_params, Iterator):
        model_or_params = list(model_or_params)  # read twice
    arguments = with_rates_of_mars(arguments, model_or_params)
    _require_rate(model_or_params, arguments)
    expanded = expand(arguments)
    options = {name: expanded[name] for name in MODEL_DEFAULTS if name in expanded}
    hyperparameters = {name: value for name, value in expanded.items() if name not in options}
    model = _as_model(model_or_params)
    if model is not None:
        if decayed is not None:
            options["decayed"] = _decays_by_name(decayed(model), expanded)
        groups = param_groups(model, mars_type=expanded.get("mars_type", DEFAULTS["mars_type"]), **options)
        mars = Mars(groups, process_group=process_group, **hyperparameters)
        mars._follow_model(model, options.get("decayed"))
        if decayed is not None and expanded.get("weight_decay_1d"):
            _require_decay_of_vectors(mars, decayed, expanded["weight_decay_1d"])
    else:
        _check_options(arguments)
        params: Any = model_or_params
        mars = Mars(params, process_group=process_group, **hyperparameters)
    mars.created_with = {**expanded, **arguments}  # "muon" by its name, with the defaults that it stands for
    if release_gradients:
        _check_release(mars)
        mars._release = GradientRelease(mars, mars._step)
    return mars


def with_rates_of_mars(arguments: Mapping[str, Any], model_or_params: Any) -> dict[str, Any]:
    """Return arguments without `adamw_rates`, with the rates that it derives; see `create`."""
    stated = dict(arguments)
    if not stated.pop("adamw_rates", False):
        return stated
    _check_rates_of_groups(model_or_params)
    return without_unread(from_adamw(stated), stated)


def _decays_by_name(names: Iterable[str], settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the decay of a vector of each name: `weight_decay_1d`, or without one that of matrices."""
    full = {**DEFAULTS, **settings}
    decay = full["weight_decay"] if full["weight_decay_1d"] is None else full["weight_decay_1d"]
    return dict.fromkeys(names, decay)


def _require_decay_of_vectors(mars: Mars, decayed: Callable[..., Any], weight_decay_1d: float) -> None:
    """Raise ValueError for a decay of vectors if a Trainer's override names no vector that takes it."""
    if any(group["weight_decay"] for group in mars.param_groups if not update_rule(group).corrects):
        return
    raise ValueError(
        f"weight_decay_1d={weight_decay_1d:g}, and {decayed.__qualname__} names nothing that takes it: return names of "
        "vectors, too, or leave weight_decay_1d out"
    )


def _check_release(mars: Mars) -> None:
    """Raise ValueError for settings that need all gradients of a step at once."""
    for group in mars.param_groups:
        if group["max_grad_norm"] is not None:
            needing = f"max_grad_norm={group['max_grad_norm']!r}"
        elif not group["is_approx"]:
            needing = "is_approx=False"
        else:
            continue
        raise ValueError(
            f"release_gradients=True and {needing} contradict each other: one steps each parameter alone, the other "
            "needs all gradients of a step; leave one out"
        )


def _require_rate(model_or_params: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if no learning rate is given, and groups do not all state theirs."""
    if "lr" in arguments:
        return
    is_list = isinstance(model_or_params, (list, tuple)) and len(model_or_params) > 0
    if is_list and all(isinstance(group, dict) and "lr" in group for group in model_or_params):
        return
    raise ValueError(
        "create needs a learning rate, which depends on the rule and its betas: give lr, or AdamW's as lr=2e-5, "
        "adamw_rates=True (python -m mars_hf suggest prints a table)"
    )


def _check_rates_of_groups(model_or_params: Any) -> None:
    """Raise ValueError for groups that state what `adamw_rates` would have to derive."""
    groups = model_or_params if isinstance(model_or_params, (list, tuple)) else ()
    for index, group in enumerate(groups):
        for name in ("lr", "weight_decay"):
            if isinstance(group, dict) and name in group:
                raise ValueError(
                    f"adamw_rates=True, and param group {index} states {name}={shown(group[name])}: give rates of MARS "
                    "(python -m mars_hf suggest), or no rates in groups"
                )


def _check_types(model_or_params: Any, others: Sequence[Any]) -> None:
    """Raise TypeError for what is no model and no parameters, and for arguments without a name."""
    if model_or_params is None or isinstance(model_or_params, (str, bytes, Mapping)):
        what = f"{type(model_or_params).__name__} {shown(model_or_params)}"
        raise TypeError(f"create takes a model, or its parameters, not {what}; from_pretrained loads a model by name")
    if not others:
        return
    if isinstance(others[0], nn.Module):
        raise TypeError("create takes one model, or several as a list: write create([a, b], ...)")
    raise TypeError(f"create takes settings by name: write lr={shown(others[0])} for a learning rate")


def _as_model(model_or_params: Any) -> nn.Module | None:
    """Return a module, or a list of modules as one; None for parameters."""
    if isinstance(model_or_params, nn.Module):
        return model_or_params
    is_list = isinstance(model_or_params, (list, tuple)) and len(model_or_params) > 0
    if is_list and all(isinstance(part, nn.Module) for part in model_or_params):
        return nn.ModuleList(model_or_params)
    return None


def _check_options(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that ask for names or modules, which plain parameters do not have."""
    options = []
    for name, default in MODEL_DEFAULTS.items():
        if name in settings and settings[name] != default:
            options.append(f"{name}={shown(settings[name])}")
    if options:
        raise ValueError(f"{', '.join(options)}: plain parameters have neither names nor modules; pass the model")
