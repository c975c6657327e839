"""Build the optimizer of a run as Trainer accepts it: a factory and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mars_hf
from mars_hf.settings import ORTHOGONAL_KEYS, ORTHOGONAL_TYPES, read
from mars_hf.settings import check as check_settings
from pretraining.run.errors import one_line
from pretraining.run.muon import SCALES, MuonWithAdamW

if TYPE_CHECKING:
    from pretraining.run.agreement import Origins
    from pretraining.run.arguments import OptimizerArguments, PretrainingArguments

# Settings that a torch optimizer of the recipe has.
_ADAM = ("beta1", "beta2", "eps", "param_rules", "lr_embeddings")
_OF_TORCH = {
    "adamw": _ADAM,
    "nadamw": (*_ADAM, "momentum_decay"),
    "muon": (
        *("beta1", "lr_1d", "beta1_1d", "beta2_1d", "weight_decay_1d", "eps"),
        *("ns_steps", "param_rules", "lr_embeddings", "adjust_lr_fn"),
    ),
}
_RULE_OF_TORCH = {"role", "lr", "weight_decay"}  # what a rule of param_rules may state there
_OF_ONE = {"momentum_decay": "nadamw", "adjust_lr_fn": "muon"}  # the optimizer of torch that alone has it
_ORTHOGONAL_OPTIMIZERS = tuple(kind.replace("-", "_") for kind in ORTHOGONAL_TYPES)
# NAdam takes half of beta1 at first; momentum_decay is how fast that share grows. This one takes all of it from step 1.
_WHOLE_MOMENTUM = 1e6


class TorchFactory:
    """Make torch's AdamW, NAdam or Muon with the parameter groups that MARS would have."""

    def __call__(
        self,
        model: nn.Module,
        *,
        optimizer: str,
        lr: float,
        momentum_decay: float | None = None,
        fused: bool | None = None,
        adjust_lr_fn: str = SCALES[0],
        **settings: Any,
    ) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            model: whose matrices decay, and whose vectors do not, unless muon has a `weight_decay_1d`.
            optimizer: `adamw`, `nadamw` or `muon`.
            lr: learning rate, in Trainer's place in case a wrapper reads it.
            momentum_decay: of torch.optim.NAdam; None takes beta1 whole from the first step, as optax does.
            fused: of torch.optim.AdamW.
            adjust_lr_fn: of torch.optim.Muon, for matrices as (out, in).
            **settings: of `mars_hf.create`, for the groups and their betas.
        """
        rule = "mars-m" if optimizer == "muon" else "mars-adamw"
        if optimizer == "muon":
            settings["split_fused"] = "none"  # torch's Muon takes parameters whole
        else:
            settings |= {"lr_1d": lr, "betas_1d": settings["betas"], "weight_decay_1d": 0.0}
        eps = settings["eps"]
        groups = [
            {
                "params": list(zip(group["param_names"], group["params"], strict=True)),
                "role": group["role"],
                "rule": optimizer if group["role"] == "matrix" or optimizer != "muon" else "adamw",
                "lr": group["lr"],
                "weight_decay": group["weight_decay"],
                **({"transposed": _is_transposed(group)} if optimizer == "muon" else {}),
                **({"betas": group["betas"]} if optimizer != "muon" or group["role"] != "matrix" else {}),
            }
            for group in mars_hf.create(model, mars_type=rule, lr=lr, **settings).param_groups
        ]
        if optimizer == "muon":
            own = {"momentum": settings["betas"][0], "ns_steps": settings.get("ns_steps", 5)}
            return MuonWithAdamW(groups, lr=lr, eps=eps, adjust_lr_fn=adjust_lr_fn, **own)
        if optimizer == "nadamw":
            decay = _WHOLE_MOMENTUM if momentum_decay is None else momentum_decay
            return torch.optim.NAdam(groups, lr=lr, eps=eps, momentum_decay=decay, decoupled_weight_decay=True)
        return torch.optim.AdamW(groups, lr=lr, eps=eps, fused=fused)


def _is_transposed(group: dict[str, Any]) -> bool:
    """Return whether a group's matrices are stored (in, out), as Conv1D of transformers does."""
    return bool((group.get("layout") or {}).get("transposed"))


def check(arguments: OptimizerArguments, origins: Origins) -> None:
    """Raise ValueError for settings that the chosen optimizer does not have."""
    chosen = arguments.optimizer
    given = [name for name, value in vars(arguments).items() if name != "optimizer" and value is not None]
    if chosen in _OF_TORCH:
        foreign = [name for name in given if name not in _OF_TORCH[chosen]]
        has = f"; it takes {', '.join(_OF_TORCH[chosen])}"
    elif others := [name for name in given if name in _OF_ONE]:
        foreign, has = others[:1], f", which {_OF_ONE[others[0]]} has"
    else:
        foreign = [] if chosen in _ORTHOGONAL_OPTIMIZERS else [name for name in given if name in ORTHOGONAL_KEYS]
        has = f", which {' and '.join(_ORTHOGONAL_OPTIMIZERS)} have"
    falls = arguments.gamma_schedule in ("linear", "cosine")
    if falls and vars(arguments)["clip_threshold"] == 0 and not _keeps_last_gradient(arguments):
        raise ValueError(
            f"{origins('gamma_schedule')}: without clipping {chosen} keeps no last gradient, so gamma cannot change; "
            "leave out --clip_threshold 0"
        )
    if foreign:
        raise ValueError(f"{origins(foreign[0])}: optimizer {chosen} has no {', '.join(foreign)}{has}")


def _keeps_last_gradient(arguments: OptimizerArguments) -> bool:
    return arguments.optimizer == "mars_adamw" and vars(arguments)["second_moment"] != "gradient"


def for_trainer(arguments: OptimizerArguments, training: PretrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Return the value for `Trainer(optimizer_cls_and_kwargs=...)`, from arguments that `check` has passed.

    Raises:
        ValueError: MARS cannot use a setting's value, or two of them together.
    """
    ours = ("optimizer", "gamma_schedule")
    settings = {name: value for name, value in vars(arguments).items() if name not in ours and value is not None}
    shared = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    rules = settings.get("param_rules")
    if rules is not None:
        rules = read("param_rules", rules) if isinstance(rules, str) else rules
        settings |= check_settings({"param_rules": rules})
    if arguments.optimizer in _OF_TORCH:
        foreign = {key for rule in settings.get("param_rules", ()) for key in rule.settings} - _RULE_OF_TORCH
        if foreign:
            raise ValueError(
                f"param_rules: optimizer {arguments.optimizer} has no {', '.join(sorted(foreign))} of its own for some "
                f"parameters; it takes {', '.join(sorted(_RULE_OF_TORCH))}"
            )
        own = _torch_settings(arguments.optimizer, settings, training)
        return TorchFactory, {"optimizer": arguments.optimizer, **shared, **own}
    settings = {name: read(name, value) if isinstance(value, str) else value for name, value in settings.items()}
    if settings.get("clip_threshold") == 0:
        settings["clip_threshold"] = None
    try:
        return mars_hf.factory(training, mars_type=arguments.optimizer.replace("_", "-"), **shared, **settings)
    except ValueError as error:
        raise ValueError(one_line(error)) from error


def _torch_settings(optimizer: str, settings: dict[str, Any], training: PretrainingArguments) -> dict[str, Any]:
    """Return what TorchFactory takes: betas in pairs, and torch's defaults for what was left out."""
    rest = {name: value for name, value in settings.items() if not name.startswith("beta")}
    beta1 = settings.get("beta1", 0.95 if optimizer == "muon" else training.adam_beta1)
    return {
        "eps": training.adam_epsilon,
        **rest,
        "betas": (beta1, settings.get("beta2", training.adam_beta2)),
        "betas_1d": (settings.get("beta1_1d", 0.9), settings.get("beta2_1d", 0.95)),
    }
