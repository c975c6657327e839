"""Load universal checkpoints of a Mars under DeepSpeed, whole or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_hf import _compat
from mars_hf.optimizer import Mars
from mars_hf.universal.checkpoint import WEIGHTS, read_groups, read_parameter


def extend_deepspeed() -> None:
    """Let DeepSpeed load universal checkpoints of a `Mars` whole; making one calls this if DeepSpeed is imported."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    for kind, name, loader in (
        (ZeROOptimizer, "load_hp_checkpoint_state_from_checkpoint_dir", load_zero12),
        (DeepSpeedZeroOptimizer_Stage3, "load_hp_checkpoint_state_from_checkpoint_dir_stage3", load_zero3),
    ):
        _compat.replace_once(kind, name, functools.partial(_for_mars, loader))


def _for_mars(loader: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load(engine: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(engine.optimizer, Mars):
            loader(functools.partial(original, engine), engine, *args, **kwargs)
        else:
            original(engine, *args, **kwargs)

    return load


def load_zero12(original: Callable[..., None], engine: Any, groups_name: str, checkpoint_dir: str) -> None:
    """DeepSpeed's loader for ZeRO-1/2 and bf16 takes everything; what is there is checked before."""
    if getattr(engine, "round_robin_gradients", False):
        raise ValueError("DeepSpeed mixes up the places of parameters under round_robin_gradients; load with it off")
    _read(engine, checkpoint_dir, getattr(engine, groups_name), range(len(engine.optimizer.param_groups)))
    original(groups_name, checkpoint_dir)


def load_zero3(original: Callable[..., None], engine: Any, checkpoint_dir: str) -> None:
    """Weights and global state by DeepSpeed's loader for ZeRO-3, then the states and groups."""
    if engine.swap_optimizer:
        raise ValueError("universal checkpoints of Mars cannot be loaded with the optimizer offloaded to NVMe")
    group_of = [engine.sub_group_to_group_id[index] for index in range(len(engine.fp16_groups))]
    groups, states = _read(engine, checkpoint_dir, engine.fp16_groups, group_of)
    read = engine.load_hp_checkpoint_state

    def read_weights(folder: str, key: str, param: Tensor) -> Tensor:
        # It insists on Adam's moments, which not all parameters have; they are read below.
        return read(folder, key, param=param) if key == WEIGHTS else torch.empty(0)

    engine.load_hp_checkpoint_state = read_weights
    try:
        original(checkpoint_dir)
    finally:
        del engine.load_hp_checkpoint_state
    zero = Path(checkpoint_dir) / "zero"
    for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for flat, params in zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True):
        folders = [str(zero / engine.param_names[param]) for param in params]
        state = engine.optimizer.state[flat] = {}
        for key, value in states[params[0]].items():
            if key == "step":
                state[key] = value
            elif key != WEIGHTS:
                pieces = [read(folder, key, param=param) for folder, param in zip(folders, params, strict=True)]
                state[key] = torch.zeros_like(flat, dtype=pieces[0].dtype)  # what it was saved in
                state[key][: sum(map(len, pieces))] = torch.cat(pieces)


def _read(
    engine: Any, checkpoint_dir: str, parts: Iterable[Iterable[Tensor]], group_of: Iterable[int]
) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Tensor]]]:
    """Check all files, which DeepSpeed reads again in its own way; return the groups and each parameter's states."""
    zero = Path(checkpoint_dir) / "zero"
    groups = read_groups(zero, engine.optimizer)
    members = [(param, groups[index]) for params, index in zip(parts, group_of, strict=True) for param in params]
    return groups, {param: read_parameter(zero / engine.param_names[param], param, group) for param, group in members}
