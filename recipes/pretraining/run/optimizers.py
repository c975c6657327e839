"""Build the optimizer of a run as Trainer accepts it: a factory and its settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mars_hf
from mars_hf.arithmetic.update_rules import UPDATE_RULES
from mars_hf.groups.settings import check_values, read
from pretraining.run.arguments import OptimizerArguments, PretrainingArguments
from pretraining.run.torch_optimizers import SCALES, MuonWithAdamW

_OVERRIDE_OF_TORCH = {"role", "lr", "weight_decay"}  # what an override of param_rules may state there
# NAdam takes half of beta1 at first; momentum_decay is how fast that share grows. With this one it takes all of it from
# the first step, as optax does.
_WHOLE_MOMENTUM = 1e6


class TorchFactory:
    """Make torch's AdamW, NAdam or Muon with the parameter groups that MARS would have."""

    def __call__(
        self,
        model: nn.Module,
        *,
        optimizer: str,
        lr: float,
        fused: bool | None = None,
        adjust_lr_fn: str = SCALES[0],
        **settings: Any,
    ) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            model: whose matrices decay, and whose vectors do not, unless muon has a `weight_decay_1d`.
            optimizer: `adamw`, `nadamw` or `muon`.
            lr: learning rate, in Trainer's place in case a wrapper reads it.
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
        sorted_by_mars = mars_hf.create(model, mars_type=rule, lr=lr, **settings).param_groups
        groups = [_group_of(group, optimizer) for group in sorted_by_mars]
        if optimizer == "muon":
            of_muon = {"momentum": settings["betas"][0], "ns_steps": settings.get("ns_steps", 5)}
            return MuonWithAdamW(groups, lr=lr, eps=eps, adjust_lr_fn=adjust_lr_fn, **of_muon)
        if optimizer == "nadamw":
            settings = {"momentum_decay": _WHOLE_MOMENTUM, "decoupled_weight_decay": True}
            return torch.optim.NAdam(groups, lr=lr, eps=eps, **settings)
        return torch.optim.AdamW(groups, lr=lr, eps=eps, fused=fused)


def _group_of(group: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """Return the group of torch's optimizer for a group of `mars_hf.create`."""
    settings = {
        "params": list(zip(group["param_names"], group["params"], strict=True)),
        "role": group["role"],
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
    }
    if optimizer == "muon":
        # Whether matrices are stored (in, out), as Conv1D of transformers does.
        settings["transposed"] = bool((group.get("layout") or {}).get("transposed"))
    if optimizer != "muon" or group["role"] != "matrix":
        settings["betas"] = group["betas"]
    return settings


def for_trainer(arguments: OptimizerArguments, training: PretrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Return the value for `Trainer(optimizer_cls_and_kwargs=...)`.

    Raises:
        ValueError: MARS cannot use a setting's value, or two of them together.
    """
    name = arguments.optimizer
    settings = {key: value for key, value in vars(arguments).items() if value is not None}
    del settings["optimizer"]
    schedule = settings.pop("gamma_schedule", "constant")
    settings = {key: read(key, value) if isinstance(value, str) else value for key, value in settings.items()}
    if settings.get("clip_threshold") == 0:
        settings["clip_threshold"] = None
    settings = check_values(settings)
    shared: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if name.startswith("mars_"):
        mars_type = "muon" if name == "mars_muon" else name.replace("_", "-")
        squares_corrected = mars_type != "muon" and UPDATE_RULES[mars_type].has_second_moment
        keeps_last_gradient = squares_corrected and settings.get("second_moment") != "gradient"
        if schedule != "constant" and settings.get("clip_threshold", 1.0) is None and not keeps_last_gradient:
            raise ValueError(
                f"--gamma_schedule: without clipping {name} keeps no last gradient, so gamma cannot change; leave out "
                "--clip_threshold 0"
            )
        return mars_hf.factory(training, mars_type=mars_type, **shared, **settings)
    overridden = {key for override in settings.get("param_rules", ()) for key in override.settings}
    unknown = overridden - _OVERRIDE_OF_TORCH
    if unknown:
        raise ValueError(
            f"param_rules: optimizer {name} has no {', '.join(sorted(unknown))} of its own by name; it takes "
            f"{', '.join(sorted(_OVERRIDE_OF_TORCH))}"
        )
    return TorchFactory, {"optimizer": name, **shared, **_torch_settings(name, settings, training)}


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
