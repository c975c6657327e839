"""DeepSpeed's universal checkpoints with all of an optimizer's state, for another number of processes.

DeepSpeed's own converter writes Adam's two moments only, which loses the last gradient. Its loader for ZeRO-1/2 takes
what `to_universal` writes; that for ZeRO-3 takes Adam's states alone and gives every group the settings of the
first, which `extend_deepspeed` mends. Nothing in the files runs: `torch.load(weights_only=True)` reads them, with four
classes of DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mars_hf import _compat, log
from mars_hf.arithmetic.eight_bits import Coded, number_of_scales, scales_of_parts
from mars_hf.arithmetic.formulas import SCALES
from mars_hf.distributed.tensors import shape_of
from mars_hf.groups import settings
from mars_hf.groups.saved_settings import write_whole
from mars_hf.optimizer import Mars
from mars_hf.step.states import ROWS, check_saved_group, lacks_last_grad, with_all_settings

__all__ = ["extend_deepspeed", "load", "to_universal"]

WEIGHTS = "fp32"
_REMEDY = "convert the checkpoint with python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
_MODEL_FILE_OF_ZERO3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_MODEL_FILE_OF_ZERO12 = "mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model_rank>\d+)_optim_states\.pt")
_COMMON_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")  # of all ranks alike


# --- reading ----------------------------------------------------------------------------------------------------------


def load(folder: str | Path, model: nn.Module, optimizer: Mars) -> None:
    """Read a universal checkpoint into the parameters of one process, with or without DDP, and their optimizer.

    Frozen parameters and buffers stay as they are, as under DeepSpeed.

    Args:
        folder: what `to_universal` wrote.
        model: the model that the optimizer was built from.
        optimizer: built as the saved one was; takes its state and the settings of its groups.

    Raises:
        ValueError: no universal checkpoint, a damaged one, or one of another model or optimizer. Nothing has changed.
    """
    zero = Path(folder) / "zero"
    names = {param: name for name, param in model.named_parameters()}
    weights: dict[Tensor, Tensor] = {}
    states: dict[int, dict[str, Tensor]] = {}
    numbered = []  # the saved groups, with the numbers of their parameters as state dicts have them
    for saved, group in zip(read_groups(zero, optimizer), optimizer.param_groups, strict=True):
        numbers = []
        for param in group["params"]:
            number = len(states)
            if type(param.data) is not Tensor or param not in names:
                what = f"parameter {number} of the optimizer ({type(param.data).__name__}, {tuple(param.shape)})"
                raise ValueError(f"{what} is not a plain parameter of this model; load before it is sharded or wrapped")
            state = read_parameter(zero / names[param], param, saved)
            weights[param] = state.pop(WEIGHTS)
            states[number] = state
            numbers.append(number)
        numbered.append({**saved, "params": numbers})
    optimizer.load_state_dict({"state": states, "param_groups": numbered})
    with torch.no_grad():
        for param, weight in weights.items():
            param.copy_(weight)


def read(file: Path) -> Any:
    """Return what torch.save wrote; tensors stay on disk until they are used.

    ValueError if it is missing, damaged, or holds more than tensors, plain values and `_compat.CHECKPOINT_CLASSES`.
    """
    try:
        with safe_globals(_compat.checkpoint_classes(get_unsafe_globals_in_checkpoint(str(file)))):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except ImportError as error:
        raise ValueError(
            f"{file} holds classes of DeepSpeed, which cannot be imported ({error}); pip install 'mars_hf[deepspeed]'"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        # torch adds advice to read without protection; what it raised first says what was found.
        text = str(error.__context__ or error).strip() or type(error).__name__
        reason = text.splitlines()[0][:150]
        remedy = "take another checkpoint, or give a class that you trust to torch.serialization.add_safe_globals"
        raise ValueError(f"{file} cannot be read ({reason}); {remedy}") from None


@contextlib.contextmanager
def known_layout(file: Path) -> Iterator[None]:
    """Turn what a surprising content raises into a ValueError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{file} is not laid out as expected ({error!r}); is it of another DeepSpeed?") from error


def read_groups(zero: Path, optimizer: Mars) -> list[dict[str, Any]]:
    """Return what the optimizer's groups hold once the saved ones are loaded, but for their parameters.

    As in `Mars.load_state_dict`. ValueError for a bad setting, or if they are not those of the optimizer.
    """
    file = zero / "optimizer_state.pt"
    if not file.is_file():
        raise ValueError(f"{zero.parent} is not a universal checkpoint (no zero/{file.name} in it); {_REMEDY}")
    own = optimizer.param_groups
    groups = []
    with known_layout(file):
        saved = with_all_settings(read(file)["param_groups"])
        if len(saved) != len(own):
            raise ValueError(
                f"{file} has {len(saved)} param groups, this optimizer {len(own)}; build it from the same parameters, "
                "with the same settings, as when it was saved"
            )
        for index, (group, given) in enumerate(zip(saved, own, strict=True)):
            check_saved_group(index, group, given)
            values = {key: value for key, value in group.items() if key != "params"}
            values["state_dtype"] = settings.loaded_state_dtype(group["state_dtype"], given["state_dtype"])
            groups.append({**values, "max_grad_norm": given["max_grad_norm"], "fused": given["fused"]})
    _warn_of_other_settings(groups, own)
    return groups


def _warn_of_other_settings(loaded: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Say which settings of the checkpoint win over others given now; schedulers write the rates of both."""
    differences: dict[str, str] = {}
    for index, (group, given) in enumerate(zip(loaded, own, strict=True)):
        for name in settings.GROUP_KEYS:
            if name not in ("lr", "layout") and group[name] != given[name]:
                differences.setdefault(name, f"{name}={group[name]!r} of param group {index} ({given[name]!r} here)")
    if differences:
        log.warning(
            f"the checkpoint's settings win: {', '.join(differences.values())}; to change one, start a new run from "
            "the model"
        )


def read_parameter(folder: Path, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's weights and states; ValueError unless all that it needs are there, in its shape."""
    if not folder.is_dir():
        raise ValueError(f"the checkpoint has no parameter {folder.name!r} (no folder {folder})")
    values = {file.stem: _read_value(file) for file in sorted(folder.glob("*.pt"))}
    if WEIGHTS not in values:
        raise ValueError(f"{folder} holds no weights ({WEIGHTS}.pt): this universal checkpoint is incomplete")
    if lacks_last_grad(group, values):
        raise ValueError(f"{folder} holds no last gradient, as if DeepSpeed's own converter had made it; {_REMEDY}")
    for key, value in values.items():
        if not is_plain(value):
            raise ValueError(f"{folder / key}.pt holds {type(value).__name__} and should hold a tensor; convert anew")
        if key != "step" and value.shape != shape_of(param):
            what = "" if key == WEIGHTS else f"the state {key!r} of "
            shapes = f"shape {tuple(value.shape)} in {folder.parent.parent} and {tuple(shape_of(param))} here"
            raise ValueError(f"{what}{folder.name} has {shapes}; load the checkpoint of a model of this shape")
    return values


def _read_value(file: Path) -> Any:
    """Return the weights or the state in one file."""
    with known_layout(file):
        saved = read(file)
        value = saved["param"] if isinstance(saved, dict) else saved
        return parse_step(value) if file.stem == "step" else value


def parse_step(value: Any) -> Tensor:
    """Return a step counter of our own; others may keep a number. TypeError for anything else."""
    is_number = isinstance(value, (int, float))
    is_scalar = is_plain(value) and value.numel() == 1
    if not is_number and not is_scalar:
        raise TypeError(f"a step counter is {type(value).__name__}")
    return torch.as_tensor(value, dtype=torch.float32).reshape(()).clone()


def is_plain(value: Any) -> bool:
    """Tell whether a value is a dense tensor in memory whose every element was stored."""
    if not isinstance(value, Tensor):
        return False
    is_dense = value.layout == torch.strided and value.device.type == "cpu"
    return is_dense and value.is_contiguous()  # an expanded one would ask for more memory than the file has


# --- converting -------------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """What one rank saved: flat partitions of weights, their states, and where in them which parameter is."""

    zero3: bool
    weights: list[Tensor]
    states: list[dict[str, Any]]
    offsets: list[dict[str, tuple[int, int]]]  # start and length
    common: dict[str, Any]

    def flat(self, index: int, key: str) -> Any:
        """Return the weights of one partition, or one of its states."""
        return self.weights[index] if key == WEIGHTS else self.states[index][key]

    def piece(self, index: int, key: str, name: str) -> Tensor:
        """Return what one partition holds of a parameter's weights or state; states in 8 bits are decoded."""
        flat = self.flat(index, key)
        start, numel = self.offsets[index][name]
        piece = flat[start:][:numel]
        if key not in SCALES or SCALES[key] not in self.states[index]:
            return piece
        if not numel:
            return piece.float()
        parts = [(start, numel) for start, numel in self.offsets[index].values() if numel > 0]
        scales = self.states[index][SCALES[key]]
        if not is_plain(scales) or scales.shape != (number_of_scales(len(flat), len(parts)),):
            raise ValueError(f"the scales of {key} of {name} do not fit its 8-bit codes: the checkpoint is damaged")
        return Coded(piece, scales_of_parts(scales, parts)[parts.index((start, numel))]).decode()


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
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with known_layout(source):
            ranks, model, shapes = _read_zero(source)
            _write_parameters(ranks, shapes, partial / "zero")
            optimizer_state = _optimizer_state(ranks[0])
        torch.save(optimizer_state, partial / "zero" / "optimizer_state.pt")
        # ZeRO-1/2 and ZeRO-3 look for different files, which DeepSpeed unpickles: they hold what was read here.
        own, other = _MODEL_FILE_OF_ZERO12, _MODEL_FILE_OF_ZERO3
        if ranks[0].zero3:
            own, other = other, own
        torch.save(model, partial / own)
        torch.save({**model, "module": {}}, partial / other)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    write_whole(target.with_name("latest_universal"), target.name)


def _optimizer_state(rank: Rank) -> dict[str, Any]:
    """Return what DeepSpeed reads beside the parameters' folders: groups and global state."""
    step = None  # ZeRO-3's loader asks for one count, of any state
    for state in rank.states:
        if "step" in state:
            step = parse_step(state["step"])
            break
    state_dict = {"state": {0: {"step": step}}, "param_groups": rank.common["param_groups"]}
    return {**rank.common, "optimizer_state_dict": state_dict}


def _read_zero(folder: Path) -> tuple[list[Rank], dict[str, Any], dict[str, torch.Size]]:
    """Return what all ranks saved, the content of the model's file, and the shapes of all parameters."""
    files = _optimizer_files(folder)
    model_file = _model_file(folder)
    model = read(model_file)
    world = model["dp_world_size"]
    shapes = {}
    for group in model["param_shapes"]:
        for name, shape in group.items():
            shapes[name] = torch.Size(shape)
    _check_file_names(shapes, model_file)
    if len(files) != world or sorted(files) != list(range(len(files))):
        raise ValueError(f"{folder} is incomplete: *_optim_states.pt of ranks {sorted(files)} out of {world}")
    if model["ds_config"].get("zero_optimization", {}).get("round_robin_gradients"):
        reason = "round_robin_gradients, under which DeepSpeed mixes up the places of parameters"
        raise ValueError(f"{folder} was saved with {reason}; resume it with the same number of processes")
    ranks = [_read_rank(files[rank], rank, world, model) for rank in range(world)]
    _require_one_checkpoint(folder, ranks)
    return ranks, model, shapes


def _require_one_checkpoint(folder: Path, ranks: list[Rank]) -> None:
    """Raise ValueError if the files of ranks are of several steps."""
    for index, states in enumerate(zip(*(rank.states for rank in ranks), strict=True)):
        steps = sorted({int(parse_step(state["step"])) for state in states if "step" in state})
        if len(steps) > 1:
            raise ValueError(
                f"{folder}: param group {index} is of the steps {steps} on different ranks; the folder mixes files of "
                "several checkpoints; take another one"
            )


def _optimizer_files(folder: Path) -> dict[int, Path]:
    """Return the file of each rank's partition."""
    files = {}
    for file in folder.glob("*_optim_states.pt"):
        match = _OPTIMIZER_FILE.fullmatch(file.name)
        if match is None or int(match["model_rank"]) > 0:
            raise ValueError(f"{file} belongs to expert or tensor parallelism, which mars_hf does not know")
        files[int(match["rank"])] = file
    if not files:
        remedy = "give the folder that holds them, such as checkpoint-10/global_step10"
        raise ValueError(f"{folder} is not a DeepSpeed ZeRO checkpoint: no *_optim_states.pt in it; {remedy}")
    return files


def _model_file(folder: Path) -> Path:
    names = (_MODEL_FILE_OF_ZERO3, _MODEL_FILE_OF_ZERO12)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder} is incomplete: it has neither {' nor '.join(names)}")


def _read_rank(file: Path, rank: int, world: int, model: dict[str, Any]) -> Rank:
    saved = read(file)
    state = saved["optimizer_state_dict"]
    zero3 = "fp32_flat_groups" in state
    if zero3:
        base = state["optimizer_state_dict"]
        weights = state["fp32_flat_groups"]
        offsets = [_zero3_offsets(shapes, rank, world) for shapes in model["param_shapes"]]
    else:
        base = state["base_optimizer_state"]
        weights = state["single_partition_of_fp32_groups"]
        offsets = []
        for fragments in state["param_slice_mappings"]:
            offsets.append({name: (fragment.start, fragment.numel) for name, fragment in fragments.items()})
    common = {key: state[key] for key in _COMMON_KEYS if key in state}
    common["ds_version"] = saved["ds_version"]
    # `fused` belongs to the machine that loads them.
    common["param_groups"] = [
        {key: value for key, value in group.items() if key != "fused"} for group in base["param_groups"]
    ]
    states = [base["state"].get(index, {}) for index in range(len(weights))]
    for names_to_values in states:
        _check_file_names(names_to_values, file)
    return Rank(zero3, weights, states, offsets, common)


def _check_file_names(names: Iterable[Any], file: Path) -> None:
    """Refuse names out of a file that would lead, as part of a path, out of the folder they are written in."""
    for name in names:
        if not _stays_inside(name):
            raise ValueError(f"{file} names a parameter or state {name!r}, which cannot be the name of a file")


def _stays_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name.isprintable():
        return False
    parts = re.split(r"[/\\]", name)
    return not any(part in ("", ".", "..") for part in parts)


def _zero3_offsets(shapes: dict[str, torch.Size], rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Return where in a rank's partition each parameter is: all ranks have equal shares, the last ones padded."""
    offsets = {}
    start = 0
    for name, shape in shapes.items():
        share = -(-shape.numel() // world)
        rest = shape.numel() - rank * share  # what earlier ranks leave
        offsets[name] = start, min(share, max(0, rest))
        start += share
    return offsets


def _write_parameters(ranks: list[Rank], shapes: dict[str, torch.Size], folder: Path) -> None:
    """Make a folder for each parameter, with a file for its weights and each of its states."""
    from tqdm import tqdm

    names: dict[tuple[int, str], None] = {}  # as a set that keeps the order
    for index in range(len(ranks[0].offsets)):
        for rank in ranks:
            names |= dict.fromkeys((index, name) for name in rank.offsets[index])
    for index, name in tqdm(names, desc="parameters", delay=2):
        holders = [rank for rank in ranks if name in rank.offsets[index]]
        _write_parameter(holders, index, name, shapes[name], folder / name)


def _write_parameter(holders: list[Rank], index: int, name: str, shape: torch.Size, folder: Path) -> None:
    """Put a parameter together from the ranks that hold some of it, in their partitions of this index."""
    folder.mkdir(parents=True)
    for key in (WEIGHTS, *holders[0].states[index]):
        if key in SCALES.values():
            continue
        if key == ROWS:
            raise ValueError(
                f"{name} has {key}, of normalize_rows, which universal checkpoints cannot hold: resume on as many "
                "processes, without converting"
            )
        flats = [rank.flat(index, key) for rank in holders]
        if key == "step":
            torch.save(parse_step(flats[0]), folder / "step.pt")
            continue
        for flat in flats:
            if not is_plain(flat) or flat.ndim != 1:
                raise ValueError(
                    f"the state {key!r} of {name} is not laid out like its weights: it cannot be resharded"
                )
        whole = torch.cat([rank.piece(index, key, name) for rank in holders])
        if whole.numel() != shape.numel():
            raise ValueError(
                f"{key} of {name} has {whole.numel()} elements on all ranks and should have {tuple(shape)}"
            )
        torch.save({"param": whole.view(shape), "cat_dim": 0}, folder / f"{key}.pt")


# --- under DeepSpeed --------------------------------------------------------------------------------------------------


def extend_deepspeed() -> None:
    """Let DeepSpeed load universal checkpoints of a `Mars` whole; making one calls this if DeepSpeed is imported."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    zero12 = functools.partial(_for_mars, load_zero12)
    zero3 = functools.partial(_for_mars, load_zero3)
    _compat.replace_once(ZeROOptimizer, "load_hp_checkpoint_state_from_checkpoint_dir", zero12)
    name = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
    _compat.replace_once(DeepSpeedZeroOptimizer_Stage3, name, zero3)


def _for_mars(loader: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    """Return a method of DeepSpeed's ZeRO optimizers, with ours in its place if the one they wrap is a `Mars`."""

    @functools.wraps(original)
    def load_ours_or_original(zero: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(zero.optimizer, Mars):
            loader(functools.partial(original, zero), zero, *args, **kwargs)
        else:
            original(zero, *args, **kwargs)

    return load_ours_or_original


def load_zero12(original: Callable[..., None], zero: Any, groups_name: str, checkpoint_dir: str) -> None:
    """Check all files, and let DeepSpeed's loader for ZeRO-1/2 and bf16 read them; the groups follow."""
    if getattr(zero, "round_robin_gradients", False):
        raise ValueError("DeepSpeed mixes up the places of parameters under round_robin_gradients; load with it off")
    indices = range(len(zero.optimizer.param_groups))
    groups, _ = _read_all(zero, checkpoint_dir, getattr(zero, groups_name), indices)
    original(groups_name, checkpoint_dir)
    for group, values in zip(zero.optimizer.param_groups, groups, strict=True):
        group.update(values)


def load_zero3(original: Callable[..., None], zero: Any, checkpoint_dir: str) -> None:
    """Load weights and global state by DeepSpeed's loader for ZeRO-3, and then the states and groups."""
    if zero.swap_optimizer:
        raise ValueError("universal checkpoints of Mars cannot be loaded with the optimizer offloaded to NVMe")
    group_of = [zero.sub_group_to_group_id[index] for index in range(len(zero.fp16_groups))]
    groups, states = _read_all(zero, checkpoint_dir, zero.fp16_groups, group_of)
    read_state = zero.load_hp_checkpoint_state

    def read_weights(folder: str, key: str, param: Tensor) -> Tensor:
        # It insists on Adam's moments, which not all parameters have; they are read below.
        return read_state(folder, key, param=param) if key == WEIGHTS else torch.empty(0)

    zero.load_hp_checkpoint_state = read_weights
    try:
        original(checkpoint_dir)
    finally:
        del zero.load_hp_checkpoint_state
    for group, values in zip(zero.optimizer.param_groups, groups, strict=True):
        group.update(values)
    for flat, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        zero.optimizer.state[flat] = _flat_state(zero, checkpoint_dir, flat, params, states[params[0]])


def _flat_state(
    zero: Any, checkpoint_dir: str, flat: Tensor, params: list[Tensor], first: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the state of a flat tensor of ZeRO-3, from the files of its parameters; `first` is that of the first."""
    folder = Path(checkpoint_dir) / "zero"
    state: dict[str, Tensor] = {}
    for key, value in first.items():
        if key == "step":
            state[key] = value
        elif key != WEIGHTS:
            pieces = []  # this rank's
            for param in params:
                folder_of_param = str(folder / zero.param_names[param])
                pieces.append(zero.load_hp_checkpoint_state(folder_of_param, key, param=param))
            joined = torch.cat(pieces)
            state[key] = torch.zeros_like(flat, dtype=pieces[0].dtype)  # what it was saved in
            state[key][: len(joined)] = joined
    return state


def _read_all(
    zero: Any, checkpoint_dir: str, parts: Iterable[Iterable[Tensor]], group_of: Iterable[int]
) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Tensor]]]:
    """Check all files, which DeepSpeed reads again in its own way; return the groups and each parameter's states."""
    folder = Path(checkpoint_dir) / "zero"
    groups = read_groups(folder, zero.optimizer)
    states = {}
    for params, index in zip(parts, group_of, strict=True):
        for param in params:
            states[param] = read_parameter(folder / zero.param_names[param], param, groups[index])
    return groups, states
