"""A tiny GPT-2 and a Trainer for it, for tests of the Hugging Face side."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

import mars_hf
from mars_hf.arithmetic.update_rules import UPDATE_RULES, update_rule
from mars_hf.kernels import cpu
from mars_hf.step.lists import build_lists
from mars_hf.step.ranks import SharedStep

VOCAB = 64


def _has_compiler() -> bool:
    if sys.platform != "linux":
        return False
    try:
        cpu.find_compiler()
    except RuntimeError:
        return False
    return True


# A compiler that exists but fails must fail tests.
needs_compiler = pytest.mark.skipif(
    not _has_compiler(), reason="not Linux, or no C++ compiler (g++, clang++ or c++) is on the PATH, and CXX names none"
)


# With CUDA_VISIBLE_DEVICES=0 python -m pytest -m gpu: conftest.py hides the GPUs otherwise.
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

fused_and_plain = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_compiler)])


def logged(call: Callable[[], Any], word: str = "") -> list[str]:
    """Return the warnings with a word that a call sends to the logger of mars_hf."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("mars_hf")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records if word in record.getMessage()]


class Blocks(Dataset):
    """Random blocks of tokens, the same for every instance."""

    def __init__(self, length: int = 64, block: int = 12) -> None:
        self.ids = torch.randint(0, VOCAB, (length, block), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def gpt2(seed: int = 0, **settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": VOCAB}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **without_dropout, "bos_token_id": 0, "eos_token_id": 0, **settings}))


def arguments(output_dir: Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "data_seed": 5,  # the data order does not depend on other random draws
    }
    return TrainingArguments(output_dir=str(output_dir), **{**defaults, **settings})


def trainer(args: TrainingArguments, model: Any = None, **settings: Any) -> Trainer:
    if model is None and "model_init" not in settings:
        model = gpt2()
    return Trainer(model=model, args=args, train_dataset=Blocks(), data_collator=default_data_collator, **settings)


def mars_trainer(args: TrainingArguments, model: Any, *positional: Any, **settings: Any) -> mars_hf.MarsTrainer:
    settings = {"train_dataset": Blocks(), "data_collator": default_data_collator, **settings}
    return mars_hf.MarsTrainer(model, args, *positional, **settings)


def backend_names(optimizer: mars_hf.Mars) -> list[str]:
    """The backends that a step with the present gradients takes, list by list."""
    rules = list(map(update_rule, optimizer.param_groups))
    shared = SharedStep(optimizer._ranks, optimizer.param_groups, process_group=None, model=None)
    shared.plan(max_grad_norm=None, metrics=None)
    lists, _ = build_lists(optimizer.param_groups, rules, dict(optimizer.state), {}, shared.chunk_of)
    return [tensors.backend.name for tensors in lists]


@contextmanager
def refused(match: str) -> Iterator[None]:
    """Expect a recipe's `main` to end with exit code 2, because of an error whose message matches."""
    with pytest.raises(SystemExit) as end:
        yield
    assert end.value.code == 2
    assert re.search(match, str(end.value.__context__))


def orthogonalizes(mars_type: str | None) -> bool:
    """Tell whether a name is that of a rule that orthogonalizes."""
    return mars_type in UPDATE_RULES and UPDATE_RULES[mars_type].orthogonalizes


def newton_schulz_in(dtype: str, mars_type: str | None) -> dict[str, Any]:
    """Return the setting of a dtype for rules that have Newton-Schulz; None is the default rule."""
    return {"ns_dtype": dtype} if orthogonalizes(mars_type) else {}


def equal(one: Any, other: Any) -> bool:
    """Return whether two state dicts, or what is in them, are bit-identical."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
