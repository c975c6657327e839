"""Convert DeepSpeed's ZeRO checkpoints, flat partitions in one file for each rank, into universal ones."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.saved_settings import write_whole
from mars_hf.universal.checkpoint import WEIGHTS, is_plain, known_layout, read, step_of

_MODEL_FILES = {True: "zero_pp_rank_0_mp_rank_00_model_states.pt", False: "mp_rank_00_model_states.pt"}  # ZeRO-3 or not
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class Rank(NamedTuple):
    """What one rank saved: flat partitions of weights, their states, and where in them which parameter is."""

    zero3: bool
    weights: list[Tensor]
    states: list[dict[str, Any]]
    offsets: list[dict[str, tuple[int, int]]]  # start and length
    common: dict[str, Any]


def to_universal(source: str | Path, target: str | Path) -> None:
    """Convert a DeepSpeed ZeRO checkpoint into a universal one, and name it in `latest_universal` beside it.

    `target` is there only if it is complete. Whole parameters are made one at a time.

    Args:
        source: folder with the `*_optim_states.pt` of all ranks, such as `checkpoint-10/global_step10`.
        target: new folder beside it, such as `checkpoint-10/global_step10_universal`.

    Raises:
        ValueError: `source` is no such checkpoint, incomplete, damaged or of an unknown layout, or `target` exists.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder, or remove it")
    with known_layout(source):
        ranks, model, shapes = _read_zero(source)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with known_layout(source):
            _write_parameters(ranks, shapes, partial / "zero")
            # Of the states ZeRO-3 asks for one step counter.
            step = next((step_of(state["step"]) for state in ranks[0].states if "step" in state), None)
            state = {"state": {0: {"step": step}}, "param_groups": ranks[0].common["param_groups"]}
        torch.save({**ranks[0].common, "optimizer_state_dict": state}, partial / "zero" / "optimizer_state.pt")
        # ZeRO-1/2 and ZeRO-3 look for different files, which DeepSpeed unpickles: they hold what was read here.
        torch.save(model, partial / _MODEL_FILES[ranks[0].zero3])
        torch.save({**model, "module": {}}, partial / _MODEL_FILES[not ranks[0].zero3])
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    write_whole(target.with_name("latest_universal"), target.name)


def _read_zero(folder: Path) -> tuple[list[Rank], dict[str, Any], dict[str, torch.Size]]:
    """Return what all ranks saved, the content of the model's file, and the shapes of all parameters."""
    files = {}
    for file in folder.glob("*_optim_states.pt"):
        match = _OPTIMIZER_FILE.fullmatch(file.name)
        if match is None or int(match[2]):
            raise ValueError(f"{file} belongs to expert or tensor parallelism, which mars_hf does not know")
        files[int(match[1])] = file
    if not files:
        remedy = "give the folder that holds them, such as checkpoint-10/global_step10"
        raise ValueError(f"{folder} is not a DeepSpeed ZeRO checkpoint: no *_optim_states.pt in it; {remedy}")
    model_file = next((folder / name for name in _MODEL_FILES.values() if (folder / name).is_file()), None)
    if model_file is None:
        raise ValueError(f"{folder} is incomplete: it has neither {' nor '.join(_MODEL_FILES.values())}")
    model = read(model_file)
    world = model["dp_world_size"]
    shapes = {name: torch.Size(shape) for group in model["param_shapes"] for name, shape in group.items()}
    _refuse_paths(shapes, model_file)
    if len(files) != world or sorted(files) != list(range(len(files))):
        raise ValueError(f"{folder} is incomplete: *_optim_states.pt of ranks {sorted(files)} out of {world}")
    if model["ds_config"].get("zero_optimization", {}).get("round_robin_gradients"):
        reason = "round_robin_gradients, under which DeepSpeed mixes up the places of parameters"
        raise ValueError(f"{folder} was saved with {reason}; resume it with the same number of processes")
    return [_read_rank(files[rank], rank, world, model) for rank in range(world)], model, shapes


def _read_rank(file: Path, rank: int, world: int, model: dict[str, Any]) -> Rank:
    saved = read(file)
    state = saved["optimizer_state_dict"]
    zero3 = "fp32_flat_groups" in state
    base = state["optimizer_state_dict" if zero3 else "base_optimizer_state"]
    if zero3:
        weights = state["fp32_flat_groups"]
        offsets = [_zero3_offsets(shapes, rank, world) for shapes in model["param_shapes"]]
    else:
        weights = state["single_partition_of_fp32_groups"]
        offsets = [
            {name: (fragment.start, fragment.numel) for name, fragment in mapping.items()}
            for mapping in state["param_slice_mappings"]
        ]
    keys = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    common = {key: state[key] for key in keys if key in state}
    common |= {"ds_version": saved["ds_version"], "param_groups": base["param_groups"]}
    states = [base["state"].get(index, {}) for index in range(len(weights))]
    _refuse_paths({key for state in states for key in state}, file)
    return Rank(zero3, weights, states, offsets, common)


def _refuse_paths(names: Iterable[Any], file: Path) -> None:
    """Refuse names out of a file that would lead, as part of a path, out of the folder they are written in."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or {"", ".", ".."} & set(re.split(r"[/\\]", name)):
            raise ValueError(f"{file} names a parameter or state {name!r}, which cannot be the name of a file")


def _zero3_offsets(shapes: dict[str, torch.Size], rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Each parameter is cut into equal shares; the last ones may be padded or empty."""
    offsets, start = {}, 0
    for name, shape in shapes.items():
        share = -(-shape.numel() // world)
        offsets[name] = start, min(share, max(0, shape.numel() - rank * share))
        start += share
    return offsets


def _write_parameters(ranks: list[Rank], shapes: dict[str, torch.Size], folder: Path) -> None:
    """Make a folder for each parameter, with a file for its weights and each of its states."""
    from tqdm import tqdm

    names = [(index, name) for index in range(len(ranks[0].offsets)) for rank in ranks for name in rank.offsets[index]]
    for index, name in tqdm(dict.fromkeys(names), desc="parameters", delay=2):
        (folder / name).mkdir(parents=True)
        holders = [rank for rank in ranks if name in rank.offsets[index]]
        for key in (WEIGHTS, *holders[0].states[index]):
            flat = [rank.weights[index] if key == WEIGHTS else rank.states[index][key] for rank in holders]
            if key == "step":
                torch.save(step_of(flat[0]), folder / name / "step.pt")
                continue
            if not all(is_plain(value) and value.ndim == 1 for value in flat):
                raise ValueError(
                    f"the state {key!r} of {name} is not laid out like its weights: it cannot be resharded"
                )
            slices = [slice(start, start + numel) for start, numel in (rank.offsets[index][name] for rank in holders)]
            whole = torch.cat([value[part] for value, part in zip(flat, slices, strict=True)])
            if whole.numel() != shapes[name].numel():
                shape = tuple(shapes[name])
                raise ValueError(f"{key} of {name} has {whole.numel()} elements on all ranks and should have {shape}")
            torch.save({"param": whole.view(shapes[name]), "cat_dim": 0}, folder / name / f"{key}.pt")
