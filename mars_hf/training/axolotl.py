"""MARS in Axolotl: `plugins: [mars_hf.AxolotlPlugin]` and `optimizer: mars_adamw` in its YAML file."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from mars_hf import _compat, log
from mars_hf.training import registry

# Axolotl knows these by identity, to leave out an argument that they do not accept; they take MARS by name alone.
_REWARD_TRAINERS = ("AxolotlRewardTrainer", "AxolotlPRMTrainer")


class AxolotlPlugin(BasePlugin):
    """Give Axolotl's configs MARS's optimizers, and its trainer everything that MarsTrainer adds.

    With `optimizer: mars_adamw`, `mars_lion`, `mars_shampoo` or `mars_m`, the trainer is `with_mars` of the class that
    Axolotl chooses, so exact MARS (`is_approx: false`) and clipping inside the step work. `optim_args` takes a mapping
    or `key=value,...`, with the keys of `mars_hf.register`. Other optimizers and their trainers stay as they are.
    """

    def register(self, cfg: Any) -> None:
        """Register the names of the optimizers, and log where Axolotl's own lines are: it drops other loggers' INFO."""
        super().register(cfg)
        registry.register()
        log.log_below("axolotl")

    def pre_model_load(self, cfg: Any) -> None:
        """Let Axolotl's builders add MARS to the class of trainers; safe to call twice."""
        from axolotl.core.builders.base import TrainerBuilderBase

        from mars_hf.training.trainer import with_mars

        super().pre_model_load(cfg)

        def adding_mars(hook: Any) -> Any:
            def hook_pre_create_trainer(self: Any, trainer_kwargs: dict[str, Any], trainer_cls: Any) -> tuple[Any, Any]:
                trainer_kwargs, trainer_cls = hook(self, trainer_kwargs, trainer_cls)
                # Its "muon" is Axolotl's own; ours is "mars_muon".
                is_mars = str(self.cfg.optimizer) in registry.OPTIM_NAMES.keys() - {"muon"}
                if is_mars and trainer_cls.__name__ not in _REWARD_TRAINERS:
                    trainer_cls = with_mars(trainer_cls)
                return trainer_kwargs, trainer_cls

            return hook_pre_create_trainer

        # Every class of trainers passes through it.
        _compat.replace_once(TrainerBuilderBase, "hook_pre_create_trainer", adding_mars)
