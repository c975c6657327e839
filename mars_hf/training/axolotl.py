"""MARS in Axolotl: `plugins: [mars_hf.AxolotlPlugin]` and `optimizer: mars_adamw` in its YAML file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin

from mars_hf.training import registry


class AxolotlPlugin(BasePlugin):
    """Give Axolotl's configs MARS's optimizers, and its trainer everything that MarsTrainer adds.

    With `optimizer: mars_adamw`, `mars_lion`, `mars_shampoo` or `mars_m`, the trainer is `with_mars` of the class that
    Axolotl chooses, so exact MARS (`is_approx: false`) and clipping inside the step work. `optim_args` takes a mapping
    or `key=value,...`, with the keys of `mars_hf.register`. Other optimizers and their trainers stay as they are.

    Raises:
        ValueError: when the config is read: an optimizer that is not one of the four but is called mars,
            `optim_args` that MARS cannot read, FSDP1, ReLoRA, or exact MARS with DeepSpeed or GRPO.
        RuntimeError: this version of Axolotl makes its trainer in another way.
    """

    def register(self, cfg: Any) -> None:
        """Check the config and register the names; `cfg` is the parsed file."""
        super().register(cfg)
        if _trains_with_mars(cfg):
            check(cfg)
            registry.register()

    def pre_model_load(self, cfg: Any) -> None:
        """Let Axolotl's builders make trainers that have MARS."""
        super().pre_model_load(cfg)
        if _trains_with_mars(cfg):
            _extend_builders()

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raise unless the trainer has MARS."""
        from mars_hf.training.trainer_with_mars import TrainerWithMars

        super().post_trainer_create(cfg, trainer)
        if _trains_with_mars(cfg) and not isinstance(trainer, TrainerWithMars):
            raise RuntimeError(
                f"optimizer: {cfg['optimizer']} trains in a {type(trainer).__name__} without MARS: this version of "
                "Axolotl does not call hook_pre_create_trainer (0.19.0 does); remove mars_hf.AxolotlPlugin and start "
                "Axolotl by python -m mars_hf run"
            )


def check(cfg: Mapping[str, Any]) -> None:
    """Raise for a config in which MARS cannot train.

    Args:
        cfg: Axolotl's config, as it is in the file.

    Raises:
        ValueError: the setting, why it cannot work, and what to do.
    """
    name = str(cfg["optimizer"])
    if name not in registry.OPTIM_NAMES:
        raise ValueError(f"optimizer: {name} is none of MARS's; choose one of {', '.join(registry.OPTIM_NAMES)}")
    settings = registry.settings_by_name(
        registry.OPTIM_NAMES[name], registry.parse_optim_args(_optim_args(cfg.get("optim_args")))
    )
    fsdp = cfg.get("fsdp_config") or {}
    version = cfg.get("fsdp_version") or fsdp.get("fsdp_version") or fsdp.get("version") or 1
    if (cfg.get("fsdp") or fsdp) and str(version) != "2":
        raise ValueError(
            f"fsdp_version: {version} with optimizer: {name}: FSDP1 flattens parameters, and MARS needs each matrix; "
            "set fsdp_version: 2"
        )
    if cfg.get("relora"):
        raise ValueError(
            f"relora: {cfg['relora']} with optimizer: {name}: its restarts clear the averages of Adam alone, and "
            "MARS's last gradient would be that of the merged adapter; remove relora, or choose another optimizer"
        )
    if settings.get("is_approx", True):
        return
    if cfg.get("deepspeed"):
        raise ValueError(
            f"is_approx: false in optim_args with deepspeed: {cfg['deepspeed']}: exact MARS needs two gradients a "
            "step, and DeepSpeed keeps one; use DDP or fsdp_version: 2, or remove is_approx"
        )
    if str(cfg.get("rl")) in _GENERATING:
        raise ValueError(
            f"is_approx: false in optim_args with rl: {cfg['rl']}: exact MARS takes two gradients of one batch, and "
            "each would get other completions; remove is_approx"
        )


_GENERATING = ("grpo", "gdpo", "ebft")


def _trains_with_mars(cfg: Mapping[str, Any]) -> bool:
    return str(cfg.get("optimizer")).lower().startswith("mars")


def _optim_args(given: Any) -> dict[str, str]:
    """Return what Axolotl will make of `optim_args`, key by key."""
    if isinstance(given, Mapping):
        given = ",".join(f"{key}={value}" for key, value in given.items())
    return registry.split_optim_args(given)


def _extend_builders() -> None:
    """Make `hook_pre_create_trainer`, through which every trainer's class passes, add MARS; safe to call twice.

    A plugin's `get_trainer_cls` would not do: for `rl:` Axolotl then leaves the model out.
    """
    from axolotl.core.builders.base import TrainerBuilderBase

    hook = TrainerBuilderBase.hook_pre_create_trainer
    if hasattr(hook, "_adds_mars"):
        return

    @functools.wraps(hook)
    def hook_pre_create_trainer(self: Any, trainer_kwargs: dict[str, Any], trainer_cls: Any) -> tuple[Any, Any]:
        trainer_kwargs, trainer_cls = hook(self, trainer_kwargs, trainer_cls)
        return trainer_kwargs, _with_mars(trainer_cls) if _trains_with_mars(self.cfg) else trainer_cls

    hook_pre_create_trainer._adds_mars = True  # type: ignore[attr-defined]
    TrainerBuilderBase.hook_pre_create_trainer = hook_pre_create_trainer


@functools.cache
def _with_mars(trainer_class: Any) -> Any:
    """Return the class with MARS.

    Axolotl gives `dataset_tags` to all classes but its own reward trainers, which it knows by identity and which do
    not accept them.
    """
    from mars_hf.training.trainer import with_mars

    made: Any = with_mars(trainer_class)
    if trainer_class.__name__ not in ("AxolotlRewardTrainer", "AxolotlPRMTrainer"):
        return made

    def __init__(self: Any, *args: Any, dataset_tags: Any = None, **kwargs: Any) -> None:
        made.__init__(self, *args, **kwargs)

    return type(made.__name__, (made,), {"__init__": __init__, "__doc__": made.__doc__, "__module__": __name__})
