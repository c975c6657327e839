"""Read ZeRO checkpoints of DeepSpeed: flat partitions of weights and states, one file for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.universal.folders import MODEL_FILES, WEIGHTS, step_of
from mars_hf.universal.safe_load import is_plain, known_layout, read_dict

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class Rank(NamedTuple):
    """What one rank saved: flat partitions of weights, their states, and where in them which parameter is."""

    zero3: bool
    weights: list[Tensor]
    states: list[dict[str, Any]]
    places: list[dict[str, tuple[int, int]]]  # start and length
    common: dict[str, Any]


def read_zero(folder: Path) -> tuple[list[Rank], dict[str, Any]]:
    """Return what all ranks saved, and the content of the model's file.

    Raises:
        ValueError: the folder is no ZeRO checkpoint, is incomplete or damaged, or laid out in a way not known here.
    """
    files = {}
    for file in folder.glob("*_optim_states.pt"):
        match = _OPTIMIZER_FILE.fullmatch(file.name)
        if match is None or int(match[2]):
            raise ValueError(f"{file} belongs to expert or tensor parallelism, which mars_hf does not know")
        files[int(match[1])] = file
    if not files:
        raise ValueError(
            f"{folder} is not a DeepSpeed ZeRO checkpoint: no *_optim_states.pt in it; give the folder that holds "
            "them, such as checkpoint-10/global_step10"
        )
    if (folder / "offloaded_tensors").exists():
        raise ValueError(f"the states of {folder} were offloaded to NVMe, which mars_hf does not know")
    model_file = next((folder / name for name in MODEL_FILES.values() if (folder / name).is_file()), None)
    if model_file is None:
        raise ValueError(f"{folder} is incomplete: it has neither {' nor '.join(MODEL_FILES.values())}")
    with known_layout(model_file):
        model = read_dict(model_file)
        world, shapes = model["dp_world_size"], shapes_of(model)
        round_robin = model["ds_config"].get("zero_optimization", {}).get("round_robin_gradients")
    for name in shapes:
        _refuse_escape(name, model_file)
    if len(files) != world or sorted(files) != list(range(len(files))):
        raise ValueError(f"{folder} is incomplete: *_optim_states.pt of ranks {sorted(files)} out of {world}")
    if round_robin:
        raise ValueError(
            f"{folder} was saved with round_robin_gradients, under which DeepSpeed mixes up the places of parameters; "
            "resume it with the same number of processes, or save it with that turned off"
        )
    ranks = []
    for rank in range(world):
        with known_layout(files[rank]):
            ranks.append(_read_rank(files[rank], rank, world, model))
    return ranks, model


def _read_rank(file: Path, rank: int, world: int, model: dict[str, Any]) -> Rank:
    saved = read_dict(file)
    state = saved["optimizer_state_dict"]
    zero3 = "fp32_flat_groups" in state
    base = state["optimizer_state_dict" if zero3 else "base_optimizer_state"]
    if not isinstance(base, dict):
        raise ValueError(f"{file} was saved with elastic_checkpoint, which mars_hf does not know")
    if zero3:
        weights = state["fp32_flat_groups"]
        places = [_zero3_places(shapes, rank, world) for shapes in model["param_shapes"]]
    else:
        weights = state["single_partition_of_fp32_groups"]
        places = [
            {name: (place.start, place.numel) for name, place in mapping.items()}
            for mapping in state["param_slice_mappings"]
        ]
    keys = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    common = {key: state[key] for key in keys if key in state}
    common |= {"ds_version": saved["ds_version"], "param_groups": base["param_groups"]}
    states = [base["state"].get(index, {}) for index in range(len(weights))]
    for key in {key for state in states for key in state}:
        _refuse_escape(key, file)
    return Rank(zero3, weights, states, places, common)


def _refuse_escape(name: Any, file: Path) -> None:
    """Refuse a name out of a file that would lead, as part of a path, out of the folder it is written in."""
    if not isinstance(name, str) or not name.isprintable() or {"", ".", ".."} & set(re.split(r"[/\\]", name)):
        raise ValueError(
            f"{file} names a parameter or state {name!r}, which cannot be the name of a file; do not use it"
        )


def _zero3_places(shapes: dict[str, torch.Size], rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Each parameter is cut into equal shares; the last ones may be padded or empty."""
    places = {}
    start = 0
    for name, shape in shapes.items():
        share = -(-shape.numel() // world)
        places[name] = start, min(share, max(0, shape.numel() - rank * share))
        start += share
    return places


def shapes_of(model: dict[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of all parameters, by name."""
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    for name, shape in shapes.items():
        if not isinstance(shape, torch.Size) or min(shape, default=0) < 0:
            raise TypeError(f"the shape of {name} is {shape!r}")
    return shapes


def names(ranks: list[Rank], index: int) -> list[str]:
    """Return the parameters of a partition, on whichever rank."""
    return list(dict.fromkeys(name for rank in ranks for name in rank.places[index]))


def whole(ranks: list[Rank], index: int, name: str, shape: torch.Size) -> Iterator[tuple[str, Any]]:
    """Yield the weights and states of a whole parameter, each with its key."""
    holders = [rank for rank in ranks if name in rank.places[index]]
    for key in (WEIGHTS, *holders[0].states[index]):
        values = [rank.weights[index] if key == WEIGHTS else rank.states[index][key] for rank in holders]
        if key == "step":
            yield key, step_of(values[0])
            continue
        if not all(is_plain(value) and value.ndim == 1 for value in values):
            raise ValueError(f"the state {key!r} of {name} is not laid out like its weights, so it cannot be resharded")
        pieces = []
        for rank, value in zip(holders, values, strict=True):
            start, numel = rank.places[index][name]
            pieces.append(value[start : start + numel])
        joined = torch.cat(pieces)
        if joined.numel() != shape.numel():
            raise ValueError(
                f"{key} of {name} has {joined.numel()} elements on all ranks and should have {tuple(shape)}"
            )
        yield key, joined.view(shape)
