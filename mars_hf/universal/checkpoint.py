"""Read universal checkpoints: `zero/optimizer_state.pt`, and a folder of weights and states for each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mars_hf import _compat, settings
from mars_hf.distributed.shards import shape_of
from mars_hf.optimizer import Mars
from mars_hf.states import lacks_last_grad

WEIGHTS = "fp32"
_REMEDY = "convert the checkpoint with python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"


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
    numbered = []
    for saved, group in zip(read_groups(zero, optimizer), optimizer.param_groups, strict=True):
        first = len(states)
        for index, param in enumerate(group["params"], first):
            if type(param.data) is not Tensor or param not in names:
                what = f"parameter {index} of the optimizer ({type(param.data).__name__}, {tuple(param.shape)})"
                raise ValueError(f"{what} is not a plain parameter of this model; load before it is sharded or wrapped")
            states[index] = read_parameter(zero / names[param], param, saved)
            weights[param] = states[index].pop(WEIGHTS)
        numbered.append({**saved, "params": list(range(first, len(states)))})
    optimizer.load_state_dict({"state": states, "param_groups": numbered})
    with torch.no_grad():
        for param, weight in weights.items():
            param.copy_(weight)


def read(file: Path) -> Any:
    """Return what torch.save wrote; tensors stay on disk until they are used.

    ValueError if it is missing, damaged, or holds more than tensors, plain values and `_compat.CHECKPOINT_CLASSES`.
    """
    try:
        classes = _compat.checkpoint_classes(get_unsafe_globals_in_checkpoint(str(file)))
        with safe_globals(classes):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except ImportError as error:
        reason = f"classes of DeepSpeed, which cannot be imported ({error})"
        raise ValueError(f"{file} holds {reason}; pip install 'mars_hf[deepspeed]'") from None
    except Exception as error:  # a damaged file can raise anything
        # torch adds advice to read without protection; what it raised first says what was found.
        reason = (str(error.__context__ or error).strip() or type(error).__name__).splitlines()[0][:150]
        remedy = "take another checkpoint, or give a class that you trust to torch.serialization.add_safe_globals"
        raise ValueError(f"{file} cannot be read ({reason}); {remedy}") from None


@contextlib.contextmanager
def known_layout(file: Path) -> Iterator[None]:
    """Turn what a surprising content raises into a ValueError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is not laid out as expected ({reason}); is it of another DeepSpeed?") from error


def read_groups(zero: Path, optimizer: Mars) -> list[dict[str, Any]]:
    """Return the saved groups; ValueError for a bad setting, or if their roles are not those of the optimizer's."""
    file = zero / "optimizer_state.pt"
    if not file.is_file():
        raise ValueError(f"{zero.parent} is not a universal checkpoint (no zero/{file.name} in it); {_REMEDY}")
    with known_layout(file):
        groups: list[dict[str, Any]] = list(read(file)["param_groups"])
        saved, roles = [group["role"] for group in groups], [group["role"] for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        try:
            settings.check(group)
        except ValueError as error:
            raise ValueError(f"{file}, param group {index}: {error}") from None
    if saved != roles:
        remedy = "build it from the same parameters, with the same settings, as when it was saved"
        raise ValueError(f"the checkpoint has groups of roles {saved}, this optimizer of {roles}; {remedy}")
    return groups


def read_parameter(folder: Path, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's weights and states; ValueError unless all that it needs are there, in its shape."""
    if not folder.is_dir():
        raise ValueError(f"the checkpoint has no parameter {folder.name!r} (no folder {folder})")
    values = {}
    for file in sorted(folder.glob("*.pt")):
        with known_layout(file):
            saved = read(file)
            value = saved["param"] if isinstance(saved, dict) else saved
            values[file.stem] = step_of(value) if file.stem == "step" else value
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


def step_of(value: Any) -> Tensor:
    """Return a step counter of our own; others may keep a number. TypeError for anything else."""
    if not isinstance(value, (int, float)) and not (is_plain(value) and value.numel() == 1):
        raise TypeError(f"a step counter is {type(value).__name__}")
    return torch.as_tensor(value, dtype=torch.float32).reshape(()).clone()


def is_plain(value: Any) -> bool:
    """Tell whether a value is a dense tensor in memory whose every element was stored."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return is_dense and value.is_contiguous()  # an expanded one would ask for more memory than the file has
