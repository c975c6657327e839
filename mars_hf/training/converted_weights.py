"""Load weights that transformers saves under other names, or in other shapes, than the model has them.

Mixtral's experts are a stack in the model and a tensor each in its files, GPT-NeoX's `lm_head` is `embed_out` there,
and many models of images, sound or experts have something of the kind. `from_pretrained` converts them. Trainer does
not when it resumes: it leaves such weights as they were initialized, and goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def restore(model: Any, folder: str | Path) -> bool:
    """Give a model the weights that its `save_pretrained` wrote to a folder, where Trainer has not loaded them all.

    Models whose weights are saved as they are, and other modules, stay as Trainer left them.

    Returns:
        Whether weights had to be loaded.

    Raises:
        RuntimeError: if the model's own conversions do not give back what the folder holds.
    """
    if not isinstance(model, PreTrainedModel) or not _is_converted(model):
        return False
    if not _lost_weights(model, folder):
        return False
    kind = type(model).__name__
    problem = f"{kind} saves weights under other names than it has, and transformers does not read back {folder}"
    try:
        loaded, report = _load(model, folder)
    except Exception as error:  # each class may have a from_pretrained of its own
        raise RuntimeError(f"{problem}: {error}") from error
    model.load_state_dict(loaded.state_dict())
    lost = [*sorted(report["missing_keys"]), *_lost_weights(model, folder)]
    if lost:
        raise RuntimeError(f"{problem}: {len(lost)} are lost, {lost[0]} first")
    return True


def _is_converted(model: PreTrainedModel) -> bool:
    """Tell whether `save_pretrained` writes other names or values than the model's own."""
    own = model.state_dict()
    written = revert_weight_conversion(model, own)
    if written.keys() != own.keys():
        return True
    return any(not _is_same(written[name], own[name]) for name in own)


def _lost_weights(model: PreTrainedModel, folder: str | Path) -> list[str]:
    """Return the names of a folder's weights that the model would not write again as they are."""
    written = revert_weight_conversion(model, model.state_dict())
    lost = []
    for name, tensor in _read(folder):
        if name not in written or not _is_same(written[name].cpu(), tensor):
            lost.append(name)
    return lost


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: a NaN is the same as itself."""
    return tensor.reshape(-1).view(torch.uint8)


def _read(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a model's files, one tensor in memory at a time; none of a folder of adapters."""
    for file in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def _load(model: PreTrainedModel, folder: str | Path) -> Any:
    """Return another such model with the folder's weights, on the CPU, and what `from_pretrained` reports of it."""
    dtypes = {param.dtype for param in model.parameters()}
    # float32 holds the values of all parts of a model in mixed half precision.
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    config = copy.deepcopy(model.config)
    return type(model).from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
