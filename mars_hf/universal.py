"""DeepSpeed's universal checkpoints with all of an optimizer's state, for another number of processes.

DeepSpeed's own converter writes the two moments of Adam and nothing else, so that the last gradient would be lost, and
fails on mars-lion, which has one moment. What `to_universal` writes is laid out as DeepSpeed's loaders expect. ZeRO-1/2
take every state found there; ZeRO-3 takes Adam's, and gives all groups the settings of the first, which
`extend_deepspeed` mends.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mars_hf.distributed.placement import shape_of
from mars_hf.optimizer import Mars
from mars_hf.step.states import lacks_last_grad

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILES = {True: "zero_pp_rank_0_mp_rank_00_model_states.pt", False: "mp_rank_00_model_states.pt"}  # ZeRO-3 or not
_WEIGHTS = "fp32"


def to_universal(source: str | Path, target: str | Path) -> None:
    """Convert a DeepSpeed ZeRO checkpoint into a universal one, and name it in `latest_universal` beside it.

    Nothing is left under the name of `target` unless it is complete. Whole parameters are made one at a time.

    Args:
        source: folder with the `*_optim_states.pt` of all ranks, such as `checkpoint-10/global_step10`.
        target: new folder beside it, such as `checkpoint-10/global_step10_universal`.

    Raises:
        ValueError: `source` is no such checkpoint, is incomplete, or is laid out in a way that is not known here;
            `target` exists.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder, or remove it")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder, so {target.name!r} cannot be made in it")
    ranks, model = _read_zero(source)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        _write_parameters(ranks, _shapes(model), partial / "zero")
        torch.save(_common_state(ranks[0]), partial / "zero" / "optimizer_state.pt")
        # ZeRO-1/2 and ZeRO-3 look for different files; of neither does a universal load read the weights.
        kept = _MODEL_FILES[ranks[0].zero3]
        shutil.copy2(source / kept, partial / kept)
        torch.save({**model, "module": {}}, partial / _MODEL_FILES[not ranks[0].zero3])
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _replace_text(target.parent / "latest_universal", target.name)


def load(folder: str | Path, model: nn.Module, optimizer: Mars) -> None:
    """Read a universal checkpoint into the parameters of one process, with or without DDP, and their optimizer.

    Frozen parameters and buffers stay as they are, as under DeepSpeed.

    Args:
        folder: what `to_universal` wrote.
        model: the model that the optimizer was built from.
        optimizer: built as the saved one was; takes its state and the settings of its groups.

    Raises:
        ValueError: this is no universal checkpoint, one of another model or optimizer, or one whose weights or states
            have another shape than the parameters. Nothing has been changed.
    """
    zero = _universal(folder)
    names = {param: name for name, param in model.named_parameters()}
    groups = _saved_groups(zero)
    _check_groups(groups, optimizer)
    params = [
        (param, saved) for own, saved in zip(optimizer.param_groups, groups, strict=True) for param in own["params"]
    ]
    weights, states = {}, {}
    for index, (param, group) in enumerate(params):
        if type(param.data) is not Tensor or param not in names:
            raise ValueError(
                f"parameter {index} of the optimizer ({type(param.data).__name__} of shape {tuple(param.shape)}) is "
                "not a plain parameter of this model; load before it is sharded or wrapped"
            )
        _check_parameter(zero / names[param], param, group)
        saved = _read_states(zero / names[param])
        weights[param] = saved.pop(_WEIGHTS)
        states[index] = saved
    count = iter(range(len(params)))
    numbered = [
        {**saved, "params": [next(count) for _ in own["params"]]}
        for saved, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": states, "param_groups": numbered})
    with torch.no_grad():
        for param, weight in weights.items():
            param.copy_(weight)


def extend_deepspeed() -> None:
    """Let DeepSpeed load universal checkpoints of a `Mars` whole, or not at all; `import mars_hf` arranges it.

    Its ZeRO-3 reads two states of Adam's and gives every group the settings of the first, and the same step counter.
    Other optimizers are loaded as ever.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    for kind, name, loader in (
        (ZeROOptimizer, "load_hp_checkpoint_state_from_checkpoint_dir", _load_zero12),
        (DeepSpeedZeroOptimizer_Stage3, "load_hp_checkpoint_state_from_checkpoint_dir_stage3", _load_zero3),
    ):
        original = getattr(kind, name)
        if not hasattr(original, "__wrapped__"):
            setattr(kind, name, _for_mars(loader, original))


# --- loading under DeepSpeed -------------------------------------------------------------------------------------


def _for_mars(loader: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_hp_checkpoint_state(engine: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(engine.optimizer, Mars):
            loader(functools.partial(original, engine), engine, *args, **kwargs)
        else:
            original(engine, *args, **kwargs)

    return load_hp_checkpoint_state


def _load_zero12(original: Callable[..., None], engine: Any, groups_name: str, checkpoint_dir: str) -> None:
    """DeepSpeed's loader for ZeRO-1/2 and bf16 takes everything; what is there is checked before."""
    if getattr(engine, "round_robin_gradients", False):
        raise ValueError(
            "DeepSpeed mixes up the places of parameters under round_robin_gradients; load this universal checkpoint "
            "with it turned off"
        )
    _check(engine, checkpoint_dir, getattr(engine, groups_name), range(len(engine.optimizer.param_groups)))
    original(groups_name, checkpoint_dir)


def _load_zero3(original: Callable[..., None], engine: Any, checkpoint_dir: str) -> None:
    """Weights and global state by DeepSpeed's loader for ZeRO-3, then the states and groups."""
    if engine.swap_optimizer:
        raise ValueError("universal checkpoints of Mars cannot be loaded with the optimizer offloaded to NVMe")
    group_of = [engine.sub_group_to_group_id[index] for index in range(len(engine.fp16_groups))]
    _check(engine, checkpoint_dir, engine.fp16_groups, group_of)
    read = engine.load_hp_checkpoint_state

    def read_weights(folder: str, key: str, param: Tensor) -> Tensor:
        # It insists on Adam's moments, which not all parameters have; they are read below.
        return read(folder, key, param=param) if key == _WEIGHTS else torch.empty(0)

    engine.load_hp_checkpoint_state = read_weights
    try:
        original(checkpoint_dir)
    finally:
        del engine.load_hp_checkpoint_state
    zero = Path(checkpoint_dir) / "zero"
    for group, saved in zip(engine.optimizer.param_groups, _saved_groups(zero), strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for flat, params in zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True):
        folders = [zero / engine.param_names[param] for param in params]
        state = engine.optimizer.state[flat] = {}
        for key in _keys(folders[0]):
            if key == "step":
                state[key] = _step(_read(folders[0] / "step.pt"))
            elif key != _WEIGHTS:
                pieces = [read(str(folder), key, param=param) for folder, param in zip(folders, params, strict=True)]
                state[key] = torch.zeros_like(flat, dtype=pieces[0].dtype)  # what it was saved in
                state[key][: sum(map(len, pieces))] = torch.cat(pieces)


def _check(engine: Any, checkpoint_dir: str, parts: Iterable[Iterable[Tensor]], group_of: Iterable[int]) -> None:
    """Raise ValueError unless the parameters' states are all there, in their shapes, and groups have the same roles."""
    zero = _universal(checkpoint_dir)
    groups = _saved_groups(zero)
    _check_groups(groups, engine.optimizer)
    for params, group in zip(parts, group_of, strict=True):
        for param in params:
            _check_parameter(zero / engine.param_names[param], param, groups[group])


def _check_parameter(folder: Path, param: Tensor, group: dict[str, Any]) -> None:
    """Raise ValueError unless a folder has the weights and every state that a parameter needs, in its shape."""
    keys, shape = _keys(folder), shape_of(param)
    if _WEIGHTS not in keys:
        raise ValueError(f"{folder} holds no weights ({_WEIGHTS}.pt): this universal checkpoint is incomplete")
    if lacks_last_grad(group, keys):
        raise ValueError(
            f"{folder} holds no last gradient, as if DeepSpeed's own converter had made it; convert the "
            "checkpoint with python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
        )
    for key in keys:
        value = _value(_read(folder / f"{key}.pt"))
        found = value.shape if isinstance(value, Tensor) else torch.Size()
        expected = found if key == "step" and found.numel() == 1 else torch.Size() if key == "step" else shape
        if found != expected:
            what = "" if key == _WEIGHTS else f"the state {key!r} of "
            raise ValueError(
                f"{what}{folder.name} has shape {tuple(found)} in {folder.parent.parent} and "
                f"{tuple(expected)} here; load the checkpoint of a model of this shape, or start "
                "with a fresh optimizer"
            )


def _check_groups(saved: list[dict[str, Any]], optimizer: Mars) -> None:
    roles = [group.get("role") for group in saved], [group["role"] for group in optimizer.param_groups]
    if roles[0] != roles[1]:
        raise ValueError(
            f"the checkpoint has groups of roles {roles[0]}, this optimizer of {roles[1]}; build it from the same "
            "parameters, with the same settings, as when it was saved"
        )


# --- reading and writing universal folders -----------------------------------------------------------------------


def _universal(folder: str | Path) -> Path:
    zero = Path(folder) / "zero"
    if not (zero / "optimizer_state.pt").is_file():
        raise ValueError(
            f"{folder} is not a universal checkpoint (no zero/optimizer_state.pt in it); make one with "
            "python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
        )
    return zero


def _saved_groups(zero: Path) -> list[dict[str, Any]]:
    return _read(zero / "optimizer_state.pt")["param_groups"]


def _keys(folder: Path) -> list[str]:
    """What is known of the parameter a folder belongs to."""
    if not folder.is_dir():
        raise ValueError(f"the checkpoint has no parameter {folder.name!r} (no folder {folder})")
    return sorted(file.stem for file in folder.glob("*.pt"))


def _read_states(folder: Path) -> dict[str, Any]:
    saved = {key: _value(_read(folder / f"{key}.pt")) for key in _keys(folder)}
    return {key: _step(value) if key == "step" else value for key, value in saved.items()}


def _value(saved: Any) -> Any:
    """A weight or state, out of what a file of `zero` holds."""
    return saved["param"] if isinstance(saved, dict) else saved


def _step(value: Any) -> Tensor:
    """A step counter of our own; others may keep a number."""
    return torch.as_tensor(value, dtype=torch.float32).reshape(()).clone()


def _replace_text(file: Path, text: str) -> None:
    """Write a file at once: whoever reads it finds the old text or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as written:
        written.write(text)
    try:
        Path(written.name).chmod(0o644)
        Path(written.name).replace(file)
    finally:
        Path(written.name).unlink(missing_ok=True)


def _write_parameters(ranks: list[_Rank], shapes: dict[str, torch.Size], folder: Path) -> None:
    """A folder for each parameter, with a file for its weights and each of its states."""
    from tqdm import tqdm

    everything = [(index, name) for index, places in enumerate(ranks[0].places) for name in _names(ranks, index)]
    for index, name in tqdm(everything, desc="parameters", delay=2):
        (folder / name).mkdir(parents=True)
        for key, value in _whole(ranks, index, name, shapes[name]):
            torch.save(value if key == "step" else {"param": value, "cat_dim": 0}, folder / name / f"{key}.pt")


def _common_state(rank: _Rank) -> dict[str, Any]:
    """What belongs to no parameter; of the states ZeRO-3 asks for one step counter."""
    step = {0: {"step": next((_step(state["step"]) for state in rank.states if "step" in state), None)}}
    return {**rank.common, "optimizer_state_dict": {"state": step, "param_groups": rank.common["param_groups"]}}


# --- reading ZeRO checkpoints ------------------------------------------------------------------------------------


class _Rank(NamedTuple):
    """What one rank saved: flat partitions of weights, their states, and where in them which parameter is."""

    zero3: bool
    weights: list[Tensor]
    states: list[dict[str, Any]]
    places: list[dict[str, tuple[int, int]]]  # start and length
    common: dict[str, Any]


def _read_zero(folder: Path) -> tuple[list[_Rank], dict[str, Any]]:
    """What all ranks saved, and the model's file."""
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
    model_file = next((folder / name for name in _MODEL_FILES.values() if (folder / name).is_file()), None)
    if model_file is None:
        raise ValueError(f"{folder} is incomplete: it has neither {' nor '.join(_MODEL_FILES.values())}")
    model = _read(model_file)
    world = model["dp_world_size"]
    if sorted(files) != list(range(world)):
        raise ValueError(f"{folder} is incomplete: *_optim_states.pt of ranks {sorted(files)} out of {world}")
    if model["ds_config"].get("zero_optimization", {}).get("round_robin_gradients"):
        raise ValueError(
            f"{folder} was saved with round_robin_gradients, under which DeepSpeed mixes up the places of parameters; "
            "resume it with the same number of processes, or save it with that turned off"
        )
    return [_read_rank(files[rank], rank, world, model) for rank in range(world)], model


def _read_rank(file: Path, rank: int, world: int, model: dict[str, Any]) -> _Rank:
    saved = _read(file)
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
    return _Rank(zero3, weights, states, places, common)


def _zero3_places(shapes: dict[str, torch.Size], rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Each parameter is cut into equal shares, of which the last ones may be padded or empty."""
    places = {}
    start = 0
    for name, shape in shapes.items():
        share = -(-shape.numel() // world)
        places[name] = start, min(share, max(0, shape.numel() - rank * share))
        start += share
    return places


def _shapes(model: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: shape for group in model["param_shapes"] for name, shape in group.items()}


def _names(ranks: list[_Rank], index: int) -> list[str]:
    """Parameters of a partition, on whichever rank."""
    return list(dict.fromkeys(name for rank in ranks for name in rank.places[index]))


def _whole(ranks: list[_Rank], index: int, name: str, shape: torch.Size) -> Iterator[tuple[str, Any]]:
    """Weights and states of a whole parameter."""
    holders = [rank for rank in ranks if name in rank.places[index]]
    for key in (_WEIGHTS, *holders[0].states[index]):
        values = [rank.weights[index] if key == _WEIGHTS else rank.states[index][key] for rank in holders]
        if key == "step":
            yield key, _step(values[0])
            continue
        if not all(isinstance(value, Tensor) and value.ndim == 1 for value in values):
            raise ValueError(f"the state {key!r} of {name} is not laid out like its weights, so it cannot be resharded")
        pieces = []
        for rank, value in zip(holders, values, strict=True):
            start, numel = rank.places[index][name]
            pieces.append(value[start : start + numel])
        whole = torch.cat(pieces)
        if whole.numel() != shape.numel():
            raise ValueError(
                f"{key} of {name} has {whole.numel()} elements on all ranks and should have {tuple(shape)}"
            )
        yield key, whole.view(shape)


def _read(file: Path) -> Any:
    """A file of DeepSpeed's, which holds its classes; tensors stay on disk until they are used."""
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
