"""Describe a run: its first log line, and warnings about settings that differ from the given ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainingArguments

from mars_hf.groups.roles import label_of, rule_of, takes_mars
from mars_hf.groups.settings import DEFAULTS, PAIR_KEYS, SETTINGS, lr_1d_ratio
from mars_hf.optimizer import Mars
from mars_hf.training import provenance as origins

# What the line states once for all groups; those of `param_rules` may differ.
_SHARED = ("is_approx", "gamma", "eps", "clip_threshold")
_NAMES = {"matrix": ("matrix", "matrices"), "vector": ("vector", "vectors"), "adamw": ("other", "others")}


def _announced(scope: str) -> list[str]:
    """Return the settings that the first line lists among the defaults; each beta separately."""
    names = [name for name, setting in SETTINGS.items() if setting.is_announced and setting.scope == scope]
    halves = {pair: [half for half, (of, _) in PAIR_KEYS.items() if of == pair] for pair in ("betas", "betas_1d")}
    return [own for name in names for own in halves.get(name, [name])]


_NAMED, _NAMED_1D = _announced("group"), _announced("1d")


def describe(mars: Mars, sizes: Sequence[int] | None = None) -> str:
    """Return rule, form and groups of an optimizer in one line.

    Args:
        mars: the optimizer with its final settings.
        sizes: number of parameters in each group; None counts the groups' tensors.
    """
    shared = _shared(mars)
    form = "approximate" if shared["is_approx"] else "exact"
    clip = shared["clip_threshold"]
    parts = [
        f"{shared['mars_type']} ({form}, gamma={shared['gamma']:g}, eps={shared['eps']:g}, "
        f"clip_threshold={clip if clip is None else format(clip, 'g')})"
    ]
    merged: dict[str, list[Any]] = {}
    for index, group in enumerate(mars.param_groups):
        count = len(group["params"]) if sizes is None or index >= len(sizes) else sizes[index]
        rule = rule_of(group)
        own = f" of {group['pattern']!r}" if "pattern" in group else ""
        own += "" if rule == shared["mars_type"] else f" under {rule}"
        rest = (
            f"{own}: lr={origins.rate(group):g}, betas=({group['betas'][0]:g}, {group['betas'][1]:g}), "
            f"weight_decay={group['weight_decay']:g}"
        )
        used = ("eps",) if rule == "adamw" else _SHARED
        others = [name for name in used if "pattern" in group and group[name] != shared[name]]
        rest += "".join(f", {name}={_text(group[name])}" for name in others)
        merged.setdefault(f"{group['role']}{rest}", [group["role"], 0, rest])[1] += count
    for role, count, rest in merged.values():
        if count:
            parts.append(f"{count} {_NAMES[role][count != 1]}{rest}")
    return "; ".join(parts)


def defaults_in_force(mars: Mars) -> str:
    """Return the settings that are MARS's defaults, each with the user's argument that it replaces."""
    origin = origins.of(mars)
    matrix = _shared(mars)
    vector = next((group for group in mars.param_groups if not takes_mars(group)), None)
    found = []
    for name in (*_NAMED, *(_NAMED_1D if vector is not None else ())):
        key, half = PAIR_KEYS.get(name, (name, None))
        default = DEFAULTS[key] if half is None else DEFAULTS[key][half]
        if origin.stated is None:
            given = mars.defaults[key] if half is None else mars.defaults[key][half]
            if given != default:
                continue
        elif name in origin.stated:
            continue
        runs = vector if vector is not None and name in _NAMED_1D else matrix
        if name == "lr_1d":
            default = lr_1d_ratio(matrix["mars_type"])
            value = origins.rate(runs) / origins.rate(matrix) if origins.rate(matrix) else default
            text = f"lr_1d={'lr' if default == 1 else f'{default:g} lr'}"
        else:
            value = runs[key.removesuffix("_1d")] if half is None else runs[key.removesuffix("_1d")][half]
            text = f"{name}={default:g}" if isinstance(default, (int, float)) else f"{name}={default}"
        if value != default:  # a checkpoint or a group has set its own
            continue
        argument, replaced = (origin.unset or {}).get(name, ("", default))
        if replaced != default:
            text += f" (not {argument}={replaced!r})"
        found.append(text)
    return ", ".join(found)


def introduce(mars: Mars, args: TrainingArguments, *, flattened: bool = False) -> str:
    """Return the first log line of a run.

    Args:
        mars: the optimizer with its final settings.
        args: the Trainer's arguments.
        flattened: whether an engine has put other tensors into the groups.
    """
    origin = origins.of(mars)
    line = f"MARS trains with {describe(mars, origin.sizes if flattened else None)}"
    defaults = defaults_in_force(mars)
    if defaults:
        line += f". MARS's defaults: {defaults}"
    peak = max(origins.rate(group) for group in mars.param_groups if group["params"] or flattened)
    if origin.stated is None and args.learning_rate != peak:
        line += f". learning_rate={args.learning_rate!r} in TrainingArguments is not used: the optimizer was given"
    return line


def saved_settings_that_win(mars: Mars) -> str | None:
    """Return a line about settings of the checkpoint that override those given now; None if there are none.

    Loading an optimizer's state replaces the settings of its groups; loading a scheduler's state replaces its base
    rates. The shape of the schedule (kind, warmup, number of steps) and `max_grad_norm` stay this run's.
    """
    changes = {
        f"{label_of(group)} {key}={_text(now)} (now given: {_text(before)})": None
        for group, key, before, now in origins.changes(mars)
    }
    if not changes:
        return None
    return (
        f"resuming: the checkpoint's settings win, {'; '.join(changes)}. The schedule's shape and max_grad_norm are "
        "this run's. To change a setting, start with a fresh optimizer or set it in optimizer.param_groups after "
        "loading"
    )


def lost_ratio(mars: Mars, scheduler: Any) -> str | None:
    """Return a warning if a cyclic scheduler gives all groups one rate although vectors have their own; else None."""
    kind = type(scheduler).__name__
    if kind not in ("OneCycleLR", "CyclicLR"):
        return None
    peaks = getattr(scheduler, "max_lrs", None) or [group.get("max_lr") for group in mars.param_groups]
    shares = {_share_of_lr(mars, group) for group in mars.param_groups if group["params"]}
    if len({peak for peak in peaks if peak is not None}) != 1 or len(shares) < 2:
        return None
    cycles = any("max_momentum" in group for group in mars.param_groups)
    return (
        f"{kind} with one max_lr={peaks[0]:g} trains vectors and embeddings at the matrices' rate, not at lr_1d "
        f"({min(shares):g} of it)"
        + (", and cycles beta1 of every group" if cycles else "")
        + "; give it one rate a group, such as max_lr=[group['lr'] for group in optimizer.param_groups]"
        + (", and cycle_momentum=False to keep the betas" if cycles else "")
    )


def clipped_before(mars: Mars, args: TrainingArguments) -> str | None:
    """Return a warning if Trainer clips gradients below the optimizer's own `max_grad_norm`; else None."""
    own = mars.max_grad_norm
    if own is None or not 0 < args.max_grad_norm < own:
        return None
    return (
        f"max_grad_norm={own:g} of the optimizer has no effect: Trainer clips at max_grad_norm={args.max_grad_norm:g} "
        "before; set it in TrainingArguments, or use mars_hf.MarsTrainer"
    )


def _shared(mars: Mars) -> Mapping[str, Any]:
    """Return the settings of the first group under the MARS rule, or of the first group."""
    return next((group for group in mars.param_groups if takes_mars(group)), mars.param_groups[0])


def _share_of_lr(mars: Mars, group: Mapping[str, Any]) -> float:
    if takes_mars(group):
        return 1.0
    lr, lr_1d = float(mars.defaults["lr"]), mars.defaults["lr_1d"]
    if lr_1d is None or not lr:
        return lr_1d_ratio(group["mars_type"])
    return float(lr_1d / lr)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
