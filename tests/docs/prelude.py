"""Names that examples may use: a tiny model, data and arguments."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import mars_hf

# An ordinary script, without MARS.
SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 64}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
ids = torch.arange(12)
trainer = Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
trainer.train()
optimizer = trainer.optimizer
while hasattr(optimizer, "optimizer"):
    optimizer = optimizer.optimizer
print("TRAINED WITH", type(optimizer).__name__, optimizer.param_groups[0]["mars_type"])
"""


class _Blocks(Dataset):
    """Return random blocks of tokens."""

    def __init__(self) -> None:
        self._ids = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def tiny_gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 of about 2,000 parameters."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def names(folder: Path) -> dict[str, Any]:
    """Return the initial namespace for a page's examples."""
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    dataset = _Blocks()
    return {
        "__name__": "example",
        "model": tiny_gpt2(),
        "model_init": tiny_gpt2,
        "args": args,
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=4),
        "scheduler": None,
    }


def save_zero_checkpoint(folder: Path) -> None:
    """Write a checkpoint of `tiny_gpt2` and its Mars, as one rank of DeepSpeed ZeRO-3 does: it holds no classes."""
    model = tiny_gpt2()
    mars = mars_hf.create(model, lr=6e-4)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    mars.step()
    named = {param: name for name, param in model.named_parameters()}
    states, weights, shapes = {}, [], []
    for index, group in enumerate(mars.param_groups):
        params = group["params"]
        keys = [key for key in mars.state[params[0]] if key != "step"]
        flat = {key: torch.cat([mars.state[param][key].flatten() for param in params]) for key in keys}
        states[index] = {"step": mars.state[params[0]]["step"], **flat}
        weights.append(torch.cat([param.detach().flatten() for param in params]))
        shapes.append(OrderedDict((named[param], param.shape) for param in params))
    groups = [{**group, "params": [index]} for index, group in enumerate(mars.param_groups)]
    state = {
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": weights,
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
    }
    folder.mkdir(parents=True)
    torch.save(
        {"optimizer_state_dict": state, "ds_version": "0.19.8"},
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    module = {"dp_world_size": 1, "ds_config": {"zero_optimization": {"stage": 3}}, "param_shapes": shapes}
    torch.save({**module, "module": model.state_dict()}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
