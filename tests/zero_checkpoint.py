"""Hand-made ZeRO checkpoints of two ranks, with stand-ins for the classes of DeepSpeed that real ones hold."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import mars_hf
from mars_hf._compat import REPLACED_NAMES


@dataclass
class fragment_address:
    numel: int
    start: int


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class DynamicLossScaler(LossScaler):
    pass


class ZeroStageEnum(int, enum.Enum):
    disabled, optimizer_states, gradients, weights = range(4)


PLACES = {
    "deepspeed.runtime.fp16.loss_scaler": (LossScaler, DynamicLossScaler),
    "deepspeed.runtime.zero.config": (ZeroStageEnum,),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
}


def stand_in_for_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the classes above where DeepSpeed's are; without the import, which takes seconds."""
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    for place, kinds in PLACES.items():
        module = ModuleType(place)
        monkeypatch.setitem(sys.modules, place, module)
        for kind in kinds:
            monkeypatch.setattr(kind, "__module__", place)
            setattr(module, kind.__name__, kind)
    for entry in REPLACED_NAMES:  # making a Mars replaces its loaders
        place, _, path = entry.partition(":")
        if place.startswith("deepspeed"):
            kind_name, name = path.split(".")
            module = ModuleType(place)
            monkeypatch.setitem(sys.modules, place, module)
            setattr(module, kind_name, type(kind_name, (), {name: lambda *args: None}))


WORLD = 2
SIZES = {"weight": (3, 5), "bias": (3,)}


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)


def trained(**settings) -> tuple[Net, mars_hf.Mars]:
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(1)
    model = Net()
    mars = mars_hf.create(model, **settings)
    train(model, mars, 2)
    return model, mars


def train(model: nn.Module, mars: mars_hf.Mars, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        mars.step()


def half(x: Tensor, rank: int) -> Tensor:
    """Return this rank's share, padded with nines that must never be read."""
    share = -(-x.numel() // WORLD)
    piece = x.detach().flatten()[rank * share : (rank + 1) * share]
    return torch.cat([piece, torch.full((share - piece.numel(),), 9.0)])


def save_zero(folder: Path, model: Net, mars: mars_hf.Mars, stage: int = 2) -> Path:
    """Write ZeRO's checkpoint of a model with one matrix and one vector, each in its own group."""
    folder.mkdir(parents=True)
    params = dict(model.named_parameters())
    groups = [{**group, "params": [index]} for index, group in enumerate(mars.param_groups)]
    shapes = [OrderedDict({name: params[name].shape}) for name in SIZES]
    for rank in range(WORLD):
        weights = [half(params[name], rank) for name in SIZES]
        states = {
            index: {key: x if key == "step" else half(x, rank) for key, x in mars.state[params[name]].items()}
            for index, name in enumerate(SIZES)
        }
        base = {"state": states, "param_groups": groups}
        state = {
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "zero_stage": ZeroStageEnum(stage),
        }
        if stage == 3:
            state |= {"optimizer_state_dict": base, "fp32_flat_groups": weights}
        else:
            numels = [min(len(w), params[name].numel() - rank * len(w)) for w, name in zip(weights, SIZES, strict=True)]
            places = [{name: fragment_address(numel=n, start=0)} for name, n in zip(SIZES, numels, strict=True)]
            state |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": weights}
            state |= {"param_slice_mappings": places}
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, file)
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    module = {"dp_world_size": WORLD, "ds_config": {"zero_optimization": {"stage": stage}}, "param_shapes": shapes}
    torch.save({**module, "module": model.state_dict()}, folder / f"{prefix}mp_rank_00_model_states.pt")
    return folder
