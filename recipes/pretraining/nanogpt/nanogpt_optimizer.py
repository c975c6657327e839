"""Read and write the optimizer's part of ckpt.pt, whose states have numbers in place of names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pretraining.nanogpt.nanogpt_file import EMBEDDING, LINEAR, Checkpoint, Code, Sizes
from pretraining.run.errors import one_line

Kind = Literal["adamw", "mars", "mars_m"]
# The official MARS-M's names for what the other optimizers call exp_avg and exp_avg_sq.
_OF_MARS_M = {"momentum_buffer": "exp_avg", "moment1": "exp_avg", "moment2": "exp_avg_sq"}
_TENSORS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad")


class Saved(NamedTuple):
    """An optimizer's state by parameter.

    Args:
        kind: which optimizer: torch's AdamW, or the official repository's MARS or MARS-M.
        names: the parameters of each group, in its order.
        groups: the settings of each group.
        states: by name: `step`, a number, and tensors of nanoGPT's shapes under AdamW's names, and `last_grad`.
    """

    kind: Kind
    names: list[list[str]]
    groups: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]

    @property
    def decays_tables(self) -> bool:
        """Whether embeddings are in one group with the linear maps, and so have their decay."""
        return EMBEDDING in self.names[0]


def orders(sizes: Sizes) -> dict[str, list[list[str]]]:
    """Return the parameters of each group in the order that each trainer gives them to its optimizer.

    nanoGPT: matrices, then vectors, in the model's order. The official repository: linear maps, then all others, each
    sorted by name. Its MARS-M: one group, linear maps first.
    """
    shapes = sizes.shapes()
    linear = [name for name in shapes if name.endswith(LINEAR)]
    others = [name for name in shapes if name not in set(linear)]
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    vectors = [name for name, shape in shapes.items() if len(shape) == 1]
    return {
        "nanogpt": [matrices, vectors],
        "mars": [sorted(linear), sorted(others)],
        "mars_m": [[*linear, *others]],
    }


def read(path: Path, checkpoint: Checkpoint) -> Saved:
    """Return the optimizer's state of a checkpoint.

    Raises:
        ValueError: there is none, it is of an unknown optimizer, or does not fit the model.
    """
    optimizer = checkpoint.optimizer
    if optimizer is None:
        raise ValueError(f"--optimizer_state: {path} has no optimizer; leave it out to convert the weights alone")
    with known_layout(path):
        groups, states = optimizer["param_groups"], optimizer["state"]
        lengths = [len(group["params"]) for group in groups]
        found = orders(checkpoint.sizes)
        order = next((name for name, names in found.items() if [len(part) for part in names] == lengths), None)
        kind = _kind(groups[0], {key for state in states.values() for key in state})
        if kind is None:
            keys = sorted({str(key) for state in states.values() for key in state})
            raise ValueError(
                f"--optimizer_state: the optimizer of {path} keeps {', '.join(keys) or 'nothing'}; accepted are the "
                "states of torch's AdamW, and of the official MARS and MARS-M"
            )
        if order is None or (kind == "mars_m") != (order == "mars_m"):
            raise ValueError(
                f"--optimizer_state: the optimizer of {path} has groups of {', '.join(map(str, lengths))} parameters, "
                "which is how no trainer of nanoGPT's or of the official repository groups this model"
            )
        named = {
            name: dict(states.get(id_) or {})
            for names, group in zip(found[order], groups, strict=True)
            for name, id_ in zip(names, group["params"], strict=True)
        }
        if kind == "mars_m":
            named = _renamed(named)
        for name, state in named.items():
            _check(path, name, state, checkpoint.sizes.shapes()[name])
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return Saved(kind, found[order], settings, named)


def state_dict(saved: Saved) -> dict[str, Any]:
    """Return what `optimizer.load_state_dict` of nanoGPT's trainer takes."""
    numbers = {name: number for number, name in enumerate(name for names in saved.names for name in names)}
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(saved.groups, saved.names, strict=True)
    ]
    states = saved.states
    if saved.kind == "mars_m":
        states = {name: _of_mars_m(name, state) for name, state in states.items()}
    elif saved.kind == "adamw":
        states = {name: {**state, "step": torch.tensor(float(state["step"]))} for name, state in states.items()}
    return {
        "state": {number: states[name] for name, number in numbers.items() if name in states},
        "param_groups": groups,
    }


def fresh(code: Code, sizes: Sizes, config: dict[str, Any]) -> Saved:
    """Return an optimizer that has made no step, because a resume of nanoGPT's loads one in any case.

    Args:
        code: nanoGPT's trainer starts AdamW, the official one MARS, or AdamW if `config` says so.
        sizes: of the model.
        config: of a run; what it lacks has the trainer's published value.
    """
    names = orders(sizes)[code]
    if code == "mars" and config.get("optimizer_name", "mars") == "mars":
        published = {"learning_rate": 6e-3, "beta1": 0.95, "beta2": 0.99, "weight_decay": 1e-2}
        of_mars = {"mars_type": "mars-adamw", "gamma": 0.025, "optimize_1d": False, "weight_decay_1d": 0.1}
        given = published | of_mars | config
        group = {
            "lr": given["learning_rate"],
            "betas": (given["beta1"], given["beta2"]),
            "eps": 1e-8,
            "weight_decay": given["weight_decay"],
            "amsgrad": False,
            **{key: given[key] for key in of_mars},
        }
        return Saved("mars", names, [group, {**group, "weight_decay": 0.0}], {})
    given = {"learning_rate": 6e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1} | config
    betas = (given["beta1"], given["beta2"])
    decays = (given["weight_decay"], 0.0)
    groups = [adamw_group(lr=given["learning_rate"], betas=betas, weight_decay=decay) for decay in decays]
    return Saved("adamw", names, groups, {})


def adamw_group(**settings: Any) -> dict[str, Any]:
    """Return a group of torch's AdamW with all keys that this version of torch has."""
    made = torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))], **settings)
    return {key: value for key, value in made.param_groups[0].items() if key != "params"}


def order_for(kind: Kind, code: Code, sizes: Sizes) -> list[list[str]]:
    """Return the parameters of each group as the trainer of `code` orders them for an optimizer."""
    return orders(sizes)["mars_m" if kind == "mars_m" else code]


@contextlib.contextmanager
def known_layout(path: Path) -> Iterator[None]:
    """Turn what a surprising content raises into a ValueError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"--optimizer_state: {path} is not laid out as expected ({type(error).__name__}: {one_line(error, 80)}); "
            "leave it out to convert the weights alone"
        ) from error


def _kind(group: dict[str, Any], keys: set[str]) -> Kind | None:
    if "mars_type" in group and {"exp_avg", "exp_avg_sq", "last_grad"} <= keys:
        return "mars"
    if "mars_factor" in group and {*_OF_MARS_M, "last_grad"} <= keys:
        return "mars_m"
    if "betas" in group and {"exp_avg", "exp_avg_sq"} <= keys and "last_grad" not in keys:
        return "adamw"
    return None


def _renamed(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return MARS-M's states under AdamW's names; matrices, which count no steps, get the count of the others."""
    step = next(state["step"] for state in states.values() if "step" in state)
    return {
        name: {"step": step} | {_OF_MARS_M.get(key, key): value for key, value in state.items() if key != "use_muon"}
        for name, state in states.items()
    }


def _of_mars_m(name: str, state: dict[str, Any]) -> dict[str, Any]:
    if name.endswith(LINEAR):
        return {"use_muon": True, "momentum_buffer": state["exp_avg"], "last_grad": state["last_grad"]}
    return {
        "use_muon": False,
        "step": state["step"],
        "moment1": state["exp_avg"],
        "moment2": state["exp_avg_sq"],
    }


def _check(path: Path, name: str, state: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless every tensor of a state has its parameter's shape."""
    if not state:
        raise ValueError(f"--optimizer_state: {path} has no state for {name}; was it saved before the first step?")
    step = state["step"]
    if not (isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1)):
        raise ValueError(f"--optimizer_state: {path}: step of {name} is {one_line(step, 40)}, not a number")
    for key in _TENSORS:
        if key not in state:
            continue
        value = state[key]
        if not (isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == shape):
            look = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else one_line(value, 40)
            raise ValueError(f"--optimizer_state: {path}: {key} of {name} has {look}; its parameter has {shape}")
