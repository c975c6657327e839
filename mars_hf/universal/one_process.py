"""Load a universal checkpoint without DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mars_hf.optimizer import Mars
from mars_hf.universal import folders


def load(folder: str | Path, model: nn.Module, optimizer: Mars) -> None:
    """Read a universal checkpoint into the parameters of one process, with or without DDP, and their optimizer.

    Frozen parameters and buffers stay as they are, as under DeepSpeed. Nothing in the files runs.

    Args:
        folder: what `to_universal` wrote.
        model: the model that the optimizer was built from.
        optimizer: built as the saved one was; takes its state and the settings of its groups.

    Raises:
        ValueError: this is no universal checkpoint, one of another model or optimizer, one whose weights or states
            have another shape than the parameters, or a file is damaged or holds a class that is not known. Nothing
            has been changed.
    """
    zero = folders.zero_folder(folder)
    names = {param: name for name, param in model.named_parameters()}
    groups = folders.saved_groups(zero)
    folders.check_groups(groups, optimizer)
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
        folders.check_parameter(zero / names[param], param, group)
        saved = folders.read_states(zero / names[param])
        weights[param] = saved.pop(folders.WEIGHTS)
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
