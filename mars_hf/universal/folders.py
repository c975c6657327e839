"""Read and check universal folders: `zero/optimizer_state.pt`, and a folder of weights and states per parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_hf.distributed.placement import shape_of
from mars_hf.groups import settings
from mars_hf.optimizer import Mars
from mars_hf.step.states import lacks_last_grad
from mars_hf.universal.safe_load import is_plain, known_layout, read, read_dict

MODEL_FILES = {True: "zero_pp_rank_0_mp_rank_00_model_states.pt", False: "mp_rank_00_model_states.pt"}  # ZeRO-3 or not
WEIGHTS = "fp32"


def zero_folder(folder: str | Path) -> Path:
    """Return the folder `zero` of a universal checkpoint; ValueError if it is none."""
    zero = Path(folder) / "zero"
    if not (zero / "optimizer_state.pt").is_file():
        raise ValueError(
            f"{folder} is not a universal checkpoint (no zero/optimizer_state.pt in it); make one with "
            "python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
        )
    return zero


def saved_groups(zero: Path) -> list[dict[str, Any]]:
    """Return the groups of the optimizer that was saved; ValueError if a setting has a value that MARS cannot use."""
    file = zero / "optimizer_state.pt"
    with known_layout(file):
        groups = read_dict(file)["param_groups"]
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise TypeError(f"param_groups is no list of dicts but {type(groups).__name__}")
        for index, group in enumerate(groups):
            try:
                settings.check(group)
            except ValueError as error:
                raise ValueError(f"{file}, param group {index}: {error}") from None
    return groups


def keys_of(folder: Path) -> list[str]:
    """Return what is known of the parameter a folder belongs to."""
    if not folder.is_dir():
        raise ValueError(f"the checkpoint has no parameter {folder.name!r} (no folder {folder})")
    return sorted(file.stem for file in folder.glob("*.pt"))


def read_states(folder: Path) -> dict[str, Any]:
    """Return the weights and states of a parameter."""
    saved = {key: read_value(folder / f"{key}.pt") for key in keys_of(folder)}
    return {key: step_of(value) if key == "step" else value for key, value in saved.items()}


def read_value(file: Path) -> Any:
    """Return the weight or state that a file of `zero` holds."""
    with known_layout(file):
        saved = read(file)
        return saved["param"] if isinstance(saved, dict) else saved


def step_of(value: Any) -> Tensor:
    """Return a step counter of our own; others may keep a number.

    Raises:
        TypeError: the value is no number and no tensor with one element.
    """
    if not isinstance(value, (int, float)) and not (is_plain(value) and value.numel() == 1):
        raise TypeError(f"a step counter is {type(value).__name__}")
    return torch.as_tensor(value, dtype=torch.float32).reshape(()).clone()


def check_parameter(folder: Path, param: Tensor, group: dict[str, Any]) -> None:
    """Raise ValueError unless a folder has the weights and every state that a parameter needs, in its shape."""
    keys, shape = keys_of(folder), shape_of(param)
    if WEIGHTS not in keys:
        raise ValueError(f"{folder} holds no weights ({WEIGHTS}.pt): this universal checkpoint is incomplete")
    if lacks_last_grad(group, keys):
        raise ValueError(
            f"{folder} holds no last gradient, as if DeepSpeed's own converter had made it; convert the "
            "checkpoint with python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER"
        )
    for key in keys:
        file = folder / f"{key}.pt"
        value = read_value(file)
        if not is_plain(value) and (key != "step" or not isinstance(value, (int, float))):
            raise ValueError(
                f"{file} holds {type(value).__name__} and should hold a tensor; convert the checkpoint anew"
            )
        found = value.shape if isinstance(value, Tensor) else torch.Size()
        expected = found if key == "step" and found.numel() == 1 else torch.Size() if key == "step" else shape
        if found != expected:
            what = "" if key == WEIGHTS else f"the state {key!r} of "
            raise ValueError(
                f"{what}{folder.name} has shape {tuple(found)} in {folder.parent.parent} and "
                f"{tuple(expected)} here; load the checkpoint of a model of this shape, or start "
                "with a fresh optimizer"
            )


def check_groups(saved: list[dict[str, Any]], optimizer: Mars) -> None:
    """Raise ValueError unless the groups that were saved have the roles of an optimizer's."""
    roles = [group.get("role") for group in saved], [group["role"] for group in optimizer.param_groups]
    if roles[0] != roles[1]:
        raise ValueError(
            f"the checkpoint has groups of roles {roles[0]}, this optimizer of {roles[1]}; build it from the same "
            "parameters, with the same settings, as when it was saved"
        )
