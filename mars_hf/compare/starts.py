"""Where each arm starts: its TrainingArguments, from what the script has and from the baseline's best rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mars_hf.compare.plan import Arm, Plan
from mars_hf.compare.search import rounded
from mars_hf.groups.settings import text_of_optim_args
from mars_hf.groups.suggest import suggest


@dataclass(frozen=True)
class Script:
    """What the first run has shown of the script.

    Args:
        learning_rate: its own.
        betas: of its AdamW.
        weight_decay: its own.
        width: of its model's hidden states, if known.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    width: int | None = None

    @classmethod
    def of_training(cls, training: Mapping[str, Any]) -> Script:
        """Read what a run recorded."""
        args = training["arguments"]
        betas = args["adam_beta1"], args["adam_beta2"]
        return cls(args["learning_rate"], betas, args["weight_decay"], training["width"])


def arguments_of_arm(arm: Arm, plan: Plan, factor: float, script: Script | None, best: float | None) -> dict[str, Any]:
    """Return the values of TrainingArguments that make a run an arm's.

    Args:
        arm: the arm.
        plan: it is in.
        factor: of its first rate.
        script: None in the first run, which tells it.
        best: the baseline's best learning rate; None for the baseline itself.
    """
    changed = dict(arm.set)
    if "optim" in changed:  # a script's own optim_args are those of its own optimizer
        changed.setdefault("optim_args", text_of_optim_args(arm.optim_args) or None)
    if arm.rule is not None and best is not None and script is not None:
        return changed | _suggested(arm, plan, factor, script, best)
    if arm.first:
        return changed | {"learning_rate": rounded(arm.first[0] * factor)}
    if script is not None and best is not None and "optim" in arm.set:
        return changed | {"learning_rate": rounded(best * factor)}
    if script is not None and factor != 1:
        return changed | {"learning_rate": rounded(script.learning_rate * factor)}
    return changed


def _suggested(arm: Arm, plan: Plan, factor: float, script: Script, best: float) -> dict[str, Any]:
    """Return what `suggest` makes of the baseline's best rate, and of the betas and decay that the script has."""
    assert arm.rule is not None
    found = suggest(arm.rule, best, script.betas, script.weight_decay, width=script.width)
    if arm.first:
        factor *= arm.first[0] / found["lr"]
    elif plan.baseline.rule is not None:  # its best rate is not AdamW's
        of_baseline = suggest(plan.baseline.rule, best, script.betas, script.weight_decay, width=script.width)
        factor *= best / of_baseline["lr"]
    beta1, beta2 = (float(f"{beta:.6g}") for beta in found["betas"])
    settings = {"beta1": beta1, "beta2": beta2, "beta1_1d": script.betas[0], "beta2_1d": script.betas[1]}
    settings |= {"lr_1d": rounded(found["lr_1d"] * factor), **arm.optim_args}
    # TrainingArguments that contradict optim_args would be refused.
    return {
        "learning_rate": rounded(found["lr"] * factor),
        "weight_decay": settings.get("weight_decay", rounded(found["weight_decay"])),
        "adam_beta1": settings["beta1"],
        "adam_beta2": settings["beta2"],
        "optim_args": text_of_optim_args(settings),
    }
