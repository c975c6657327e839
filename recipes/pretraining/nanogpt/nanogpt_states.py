"""Move an optimizer's state between nanoGPT's trainers and the optimizers of the recipe.

The official repository sums the gradients of G micro-batches where nanoGPT and Trainer average them. Its states move
over divided by G (second moments by G**2), and so do eps and the threshold of MARS's clip. The two runs then do the
same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

import mars_hf
from mars_hf import states
from mars_hf.param_groups import takes_mars
from pretraining.nanogpt import nanogpt_file, nanogpt_optimizer
from pretraining.nanogpt.nanogpt_file import LINEAR, Code, Sizes
from pretraining.nanogpt.nanogpt_optimizer import Kind, Saved
from pretraining.nanogpt.nanogpt_weights import turned
from pretraining.run.errors import one_line
from pretraining.run.optimizers import TorchFactory

FILE = "optimizer.pt"
TABLES = "*.w[tp]e.weight"
# Where the official trainer keeps it: its betas_1d is a tuple, which it does not save.
_BETAS_1D = (0.9, 0.95)
_POWERS = {"exp_avg": 1, "last_grad": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}


class Moved(NamedTuple):
    """An optimizer of the recipe with the state that moved over.

    Args:
        name: the recipe's name of it.
        settings: that made it: of `mars_hf.create`, or of AdamW.
        optimizer: the optimizer.
        share: of its peaks that the learning rates have now.
    """

    name: str
    settings: dict[str, Any]
    optimizer: torch.optim.Optimizer
    share: float


def to_ours(path: Path, model: GPT2LMHeadModel, saved: Saved, config: dict[str, Any], summed: int) -> Moved:
    """Return an optimizer for the model with the saved state.

    Args:
        path: the checkpoint, for messages.
        model: the converted model.
        saved: the checkpoint's optimizer.
        config: the checkpoint's, with the peak of the learning rate.
        summed: micro-batches whose gradients the trainer summed.

    Raises:
        ValueError: the state or a setting does not fit.
    """
    with nanogpt_optimizer.known_layout(path):
        peak = config.get("learning_rate")
        if isinstance(peak, bool) or not isinstance(peak, (int, float)) or not peak > 0:
            raise ValueError(
                f"--optimizer_state: the config of {path} has learning_rate={one_line(peak, 40)}; the peak of the "
                "schedule is needed, a number above 0"
            )
        share = float(_agreed(path, "lr", {f"group {index}": group["lr"] for index, group in enumerate(saved.groups)}))
        share /= peak
        settings = {"adamw": _of_adamw, "mars": _of_mars, "mars_m": _of_mars_m}[saved.kind](path, saved, config, summed)
        settings |= {"lr": float(peak)}
        of_tables: dict[str, Any] = {} if saved.decays_tables else {"weight_decay": 0.0}
        if settings.get("mars_type") == "mars-shampoo":  # orthogonalizes every matrix there
            of_tables["role"] = "matrix"
        if of_tables:
            settings["param_rules"] = [(TABLES, of_tables)]
        try:
            if saved.kind == "adamw":
                name, optimizer = "adamw", TorchFactory()(model, optimizer="adamw", **settings)
            else:
                name, optimizer = settings["mars_type"].replace("-", "_"), mars_hf.create(model, **settings)
        except ValueError as error:
            raise ValueError(f"--optimizer_state: {path}: {one_line(error)}") from error
        for group in optimizer.param_groups:
            if saved.kind == "mars" and group["role"] == "vector" and settings["optimize_1d"]:
                group["weight_decay"] = saved.groups[-1]["weight_decay"]  # here that of the matrices, there its own
            group["initial_lr"] = group["lr"]
            group["lr"] *= share
            for one, param in zip(group["param_names"], group["params"], strict=True):
                optimizer.state[param] = _to_ours(path, one, param, group, saved.states[one], summed)
    return Moved(name, settings, optimizer, share)


def from_ours(
    folder: Path, sizes: Sizes, code: Code, given: int | None, noted: int | None = None
) -> tuple[Saved, dict[str, Any]]:
    """Return the optimizer's state of a Trainer's checkpoint as a trainer of `code` has it, and its settings.

    Args:
        folder: the checkpoint.
        sizes: of nanoGPT's model.
        code: whose trainer goes on.
        given: micro-batches whose gradients that trainer sums; None: what MARS's clip says, else 1 with nanoGPT.
        noted: the same, of the run that had moved over.

    Raises:
        ValueError: the state is not of AdamW, MARS or MARS-M, or that trainer cannot go on from it.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"--optimizer_state: {folder} has no {FILE}; give a checkpoint of Trainer on one process or with "
            "DistributedDataParallel, or leave it out to convert the weights alone"
        )
    content = nanogpt_file.load(path)
    with nanogpt_optimizer.known_layout(path):
        groups = _named(path, content, sizes)
        kind = _kind_of(path, groups)
        if kind != "adamw" and code == "nanogpt":
            raise ValueError(
                f"--optimizer_state: {path} has the state of MARS, and nanoGPT's trainer runs AdamW; give --code mars, "
                "or leave it out to convert the weights alone"
            )
        if kind != "adamw":
            summed = _summed(path, groups, given)
        else:
            summed = given or (1 if code == "nanogpt" else noted or 0)
        if not summed:
            raise ValueError(
                "--optimizer_state: the official trainer sums the gradients of its gradient_accumulation_steps; give "
                "that number as --summed_micro_batches"
            )
        names = nanogpt_optimizer.order_for(kind, code, sizes)
        named = {
            name: _from_ours(path, name, *groups[name], kind=kind, summed=summed) for part in names for name in part
        }
        make = {"adamw": _as_adamw, "mars": _as_mars, "mars_m": _as_mars_m}[kind]
        settings = make(path, {name: group for name, (group, _) in groups.items()}, names, summed)
        first = groups[names[0][0]][0]
        config = {
            "learning_rate": float(first.get("initial_lr", first["lr"])),
            "weight_decay": float(first["weight_decay"]),
            "beta1": float(first["betas"][0]),
            "beta2": float(first["betas"][1]),
            "gradient_accumulation_steps": summed,
        }
        if kind != "adamw":
            vector = groups["transformer.ln_f.weight"][0]
            config |= {key: first[key] for key in ("gamma", "is_approx", "mars_type", "optimize_1d")}
            config |= {"lr_1d": float(vector.get("initial_lr", vector["lr"]))}
            config |= {"weight_decay_1d": float(vector["weight_decay"])}
        elif code == "nanogpt":
            del config["gradient_accumulation_steps"]
    return Saved(kind, names, settings, named), config


# Settings of the checkpoint


def _of_adamw(path: Path, saved: Saved, config: dict[str, Any], summed: int) -> dict[str, Any]:
    first, last = saved.groups
    if last["weight_decay"]:
        raise ValueError(
            f"--optimizer_state: {path} decays its vectors by {last['weight_decay']}, which AdamW here does not; leave "
            "it out to convert the weights alone"
        )
    return {
        "betas": tuple(first["betas"]),
        "eps": first["eps"] / summed,
        "weight_decay": first["weight_decay"],
    }


def _of_mars(path: Path, saved: Saved, config: dict[str, Any], summed: int) -> dict[str, Any]:
    first, last = saved.groups
    if not saved.decays_tables and last["weight_decay"]:
        raise ValueError(
            f"--optimizer_state: {path} decays its embeddings by {last['weight_decay']} and its linear maps by "
            f"{first['weight_decay']}; the official trainer decays no embedding"
        )
    orthogonal = first["mars_type"] == "mars-shampoo"  # of every matrix there, whole
    return {
        "mars_type": first["mars_type"],
        "betas": tuple(first["betas"]),
        "eps": first["eps"] / summed,
        "weight_decay": first["weight_decay"],
        "gamma": first["gamma"],
        "is_approx": config.get("is_approx", True),
        "clip_threshold": 1.0 / summed,
        "amsgrad": first["amsgrad"],
        "optimize_1d": first["optimize_1d"],
        "lr_1d": float(config.get("lr_1d", 3e-3)),
        "betas_1d": _BETAS_1D,
        "weight_decay_1d": first["weight_decay_1d"],
        **({"split_fused": "none"} if orthogonal else {}),
    }


def _of_mars_m(path: Path, saved: Saved, config: dict[str, Any], summed: int) -> dict[str, Any]:
    [group] = saved.groups
    return {
        "mars_type": "mars-m",
        "betas": (group["momentum"], 0.99),  # the second is of no use to this rule
        "eps": group["adamw_eps"] / summed,
        "weight_decay": group["wd"],
        "gamma": group["gamma"],
        "is_approx": group["is_approx"],
        "clip_threshold": 1.0 / summed,
        "lr_1d": float(config["learning_rate"]),
        "betas_1d": tuple(group["adamw_betas"]),
        "weight_decay_1d": group["wd"],
        "ns_steps": group["ns_steps"],
        "split_fused": "none",
    }


def _as_adamw(path: Path, groups: dict[str, Any], names: list[list[str]], summed: int) -> list[dict[str, Any]]:
    settings = []
    for part in names:
        betas, eps, decay, lr = (
            _agreed(path, key, {name: groups[name][key] for name in part})
            for key in ("betas", "eps", "weight_decay", "lr")
        )
        settings += [
            nanogpt_optimizer.adamw_group(lr=lr, betas=betas, eps=eps * summed, weight_decay=decay),
        ]
    return settings


def _as_mars(path: Path, groups: dict[str, Any], names: list[list[str]], summed: int) -> list[dict[str, Any]]:
    linear, others = names
    vectors = [name for name in others if groups[name]["role"] == "vector"]
    tables = [name for name in others if name not in vectors]
    moving = [*linear, *others] if groups[linear[0]]["optimize_1d"] else [*linear, *tables]
    shared = {
        key: _agreed(path, key, {name: groups[name][key] for name in moving})
        for key in ("lr", "betas", "gamma", "amsgrad", "mars_type", "optimize_1d")
    }
    shared["eps"] = summed * _agreed(path, "eps", {name: group["eps"] for name, group in groups.items()})
    shared["weight_decay_1d"] = _agreed(path, "weight_decay", {name: groups[name]["weight_decay"] for name in vectors})
    read = [set(part) & set(moving) for part in names]
    return [
        {**shared, "weight_decay": _agreed(path, "weight_decay", {name: groups[name]["weight_decay"] for name in part})}
        for part in map(sorted, read)
    ]


def _as_mars_m(path: Path, groups: dict[str, Any], names: list[list[str]], summed: int) -> list[dict[str, Any]]:
    linear = [name for name in names[0] if name.endswith(LINEAR)]
    others = [name for name in names[0] if name not in linear]

    def agreed(key: str, among: Iterable[str] = names[0]) -> Any:
        return _agreed(path, key, {name: groups[name][key] for name in among})

    momentum, gamma = agreed("betas", linear)[0], agreed("gamma", linear)
    group = {
        "lr": agreed("lr"),
        "wd": agreed("weight_decay"),
        "momentum": momentum,
        "ns_steps": agreed("ns_steps", linear),
        "adamw_betas": agreed("betas", others),
        "adamw_eps": agreed("eps", others) * summed,
        "gamma": gamma,
        "mars_factor": gamma * momentum / (1 - momentum),
        "clip_c": False,  # which that optimizer never reads: it clips
        "is_approx": True,
    }
    return [group]


def _agreed(path: Path, key: str, found: dict[str, Any]) -> Any:
    """Return the one value of all; ValueError if they differ, because there they have one setting."""
    (first, value), *rest = found.items()
    for name, other in rest:
        if other != value:
            raise ValueError(
                f"--optimizer_state: {path} has {key}={other} for {name} and {value} for {first}, which have one "
                "setting on the other side; leave it out to convert the weights alone"
            )
    return value


# States


def _to_ours(
    path: Path, name: str, param: Tensor, group: dict[str, Any], saved: dict[str, Any], summed: int
) -> dict[str, Any]:
    is_mars = "mars_type" in group
    needed = states.buffers_of(param, group, {}) if is_mars else ("exp_avg", "exp_avg_sq")
    lacking = [key for key in needed if key not in saved]
    if lacking:
        rule = group["mars_type"] if is_mars and takes_mars(group) else "adamw"
        raise ValueError(
            f"--optimizer_state: {path}: the state of {name} lacks {', '.join(lacking)}, which a {group['role']} under "
            f"{rule} has; it is of another rule"
        )
    moved: dict[str, Any] = {"step": torch.tensor(float(saved["step"]))}
    for key in needed:
        moved[key] = turned(name, saved[key]) / summed ** _POWERS[key]
    return moved


def _from_ours(
    path: Path, name: str, group: dict[str, Any], saved: dict[str, Any], *, kind: Kind, summed: int
) -> dict[str, Any]:
    if not saved or "exp_avg" not in saved:
        raise ValueError(f"--optimizer_state: {path} has no state for {name}; was it saved before the first step?")
    linear, table = name.endswith(LINEAR), name in ("transformer.wte.weight", "transformer.wpe.weight")
    expected = "adamw" if kind == "mars_m" and table else "matrix" if linear or table else "vector"
    if kind != "adamw" and group["role"] != expected:
        raise ValueError(
            f"--optimizer_state: {path}: {name} is in a group of role {group['role']}, and the official code treats "
            f"it as {expected}; leave it out to convert the weights alone"
        )
    state: dict[str, Tensor] = {key: saved[key] for key in _POWERS if key in saved}
    if kind == "adamw" and state.keys() != {"exp_avg", "exp_avg_sq"}:
        raise ValueError(f"--optimizer_state: {path}: the state of {name} is not AdamW's; it has {', '.join(saved)}")
    if kind != "adamw" and takes_mars(group) and "last_grad" not in state:
        raise ValueError(
            f"--optimizer_state: {path}: the state of {name} has no last gradient, which the official code needs; "
            "leave it out to convert the weights alone"
        )
    if "last_grad" in state and "last_grad_scale" in saved:
        state["last_grad"] = state["last_grad"] * saved["last_grad_scale"]
    if kind == "mars":  # the official optimizer reads all three, whatever its rule
        state = {key: torch.zeros_like(saved["exp_avg"]) for key in ("last_grad", "exp_avg_sq")} | state
    moved = {key: turned(name, value) * summed ** _POWERS[key] for key, value in state.items()}
    return {"step": int(saved["step"]), **moved}


# The checkpoint of a Trainer


def _named(path: Path, content: Any, sizes: Sizes) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the group and the state of every parameter by name."""
    found = {}
    for group in content["param_groups"]:
        if "param_names" not in group:
            raise ValueError(
                f"--optimizer_state: the groups of {path} have no names of parameters, so its states cannot be told "
                "apart; checkpoints of MARS and of this recipe have them"
            )
        for name, id_ in zip(group["param_names"], group["params"], strict=True):
            found[nanogpt_file.without_prefix(name)] = (group, content["state"].get(id_, {}))
    shapes = sizes.shapes()
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing:
        raise ValueError(f"--optimizer_state: {path} trains no {missing[0]}, which nanoGPT's trainer trains")
    if unknown:
        raise ValueError(
            f"--optimizer_state: {path} trains {unknown[0]}, which the converted model lacks; --bias true keeps biases "
            "that are zero"
        )
    return found


def _kind_of(path: Path, groups: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> Kind:
    """Return the optimizer of a checkpoint; ValueError for settings that the official code does not have."""
    first = next(iter(groups.values()))[0]
    if "mars_type" not in first:
        if "betas" not in first or "momentum_decay" in first or first.get("rule", "adamw") != "adamw":
            rule = first.get("rule", "another optimizer")
            raise ValueError(f"--optimizer_state: {path} has the state of {rule}; accepted are AdamW and MARS")
        return "adamw"
    for name, (group, _) in groups.items():
        for key, wanted in (("is_approx", True), ("second_moment", "corrected"), ("maximize", False)):
            if takes_mars(group) and group[key] != wanted:
                raise ValueError(
                    f"--optimizer_state: {path} has {key}={group[key]} for {name}, whose state the official code "
                    "cannot take up; leave it out to convert the weights alone"
                )
    return "mars_m" if first["mars_type"] == "mars-m" else "mars"


def _summed(path: Path, groups: dict[str, tuple[dict[str, Any], dict[str, Any]]], given: int | None) -> int:
    """Return how many summed gradients a clip threshold stands for: the official code clips their sum at 1."""
    clips = {name: group["clip_threshold"] for name, (group, _) in groups.items() if takes_mars(group)}
    clip = _agreed(path, "clip_threshold", clips)
    summed = round(1 / clip) if clip else 0
    if not clip or abs(summed * clip - 1) > 1e-6:
        raise ValueError(
            f"--optimizer_state: {path} has clip_threshold={clip}; the official code clips sums of micro-batches at 1, "
            "so it must be 1 divided by their number"
        )
    if given not in (None, summed):
        raise ValueError(
            f"--summed_micro_batches {given}: {path} has clip_threshold={clip:g}, which is that of {summed}; leave it "
            "out"
        )
    return summed
