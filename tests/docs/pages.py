"""The pages of the documentation, the examples in them, and names and files that examples may use."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from helpers import Blocks, arguments, gpt2
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import mars_hf

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": ROOT / "README.md"} | {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int  # of its first line of code
    language: str
    text: str
    directive: str  # the HTML comment on the line before it: what a text below an example is, what an example needs


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    content = PAGES[page].read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(content):
        before = content[: match.start()]
        comment = re.search(r"<!-- (\w+) -->\n\Z", before)
        found.append(Block(before.count("\n") + 2, match[1], match[2], comment[1] if comment else ""))
    return found


def commands(page: str) -> Iterator[str]:
    """Return the shell commands of a page, without comments, each on one line."""
    for block in blocks(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+# .*$", "", " ".join(line.split())).strip()
                if command and not command.startswith("#"):
                    yield command


def entry_points() -> list[str]:
    """Return the code in the middle column of the table of entry points in docs/trainer.md."""
    content = PAGES["trainer.md"].read_text(encoding="utf-8")
    table = content[content.index("| you have | you write |") :].split("\n\n")[0]
    rows = _ROW.findall(table)[2:]
    return [code for row in rows for code in _CODE.findall(row.split(" | ")[1])]


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


def names(folder: Path) -> dict[str, Any]:
    """Return the initial namespace for a page's examples: a tiny model, data and arguments."""
    dataset = Blocks(16)
    vocabulary = Tokenizer(models.WordLevel({str(index): index for index in range(64)}))
    return {
        "rows": Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in [list(range(12))] * 16]),
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="0", pad_token="1"),
        **{"__name__": "example", "model": gpt2(), "model_init": lambda: gpt2(), "dataset": dataset, "scheduler": None},
        "args": arguments(folder / "out", max_steps=2, per_device_train_batch_size=2),
        "loader": DataLoader(dataset, batch_size=4),
    }


def save_small_llama(folder: Path) -> None:
    """Write a tiny Llama and a tokenizer of numbers, to stand for a model of the Hub."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    _save_tokenizer(folder)


def save_small_qwen3(folder: Path) -> None:
    """Write a tiny Qwen3 whose tokenizer knows chats; its matrices are large enough to be quantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder, chat_template="{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}")


def save_chats(folder: Path) -> None:
    """Write sixteen chats of numbers, to stand for a data set of the Hub."""
    chat = [{"role": "user", "content": "1 2 3 4"}, {"role": "assistant", "content": "5 6 7 8"}]
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 16, encoding="utf-8")


def _save_tokenizer(folder: Path, **settings: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({str(index): index for index in range(64)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", pad_token="1", **settings)
    fast.save_pretrained(folder)


def save_zero_checkpoint(folder: Path) -> None:
    """Write a checkpoint of `gpt2()` and its Mars, as one rank of DeepSpeed ZeRO-3 does: it holds no classes."""
    model = gpt2()
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
    state = {"optimizer_state_dict": {"state": states, "param_groups": groups}, "fp32_flat_groups": weights}
    state |= {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False}
    folder.mkdir(parents=True)
    optimizer = {"optimizer_state_dict": state, "ds_version": "0.19.8"}
    torch.save(optimizer, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    module = {"dp_world_size": 1, "ds_config": {"zero_optimization": {"stage": 3}}, "param_shapes": shapes}
    torch.save({**module, "module": model.state_dict()}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
