"""Load the language model that a recipe fine-tunes, or pretrain a small one first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrain_gpt2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks import running

_LONGEST = 1024  # tokens


def make(folder: Path, settings: Sequence[str]) -> str:
    """Pretrain a GPT-2 on the embedded corpus, unless it is there; return its folder.

    Args:
        folder: output folder of pretrain_gpt2.py.
        settings: further words of its command line.

    Raises:
        ValueError: pretraining was stopped.
    """
    if not (folder / "metrics.json").is_file():
        print(f"pretraining a small GPT-2 in {folder}, once")
        threads = str(torch.get_num_threads())
        pretrain_gpt2.main([*settings, "--cpu_threads", threads, "--output_dir", str(folder)])
    if not (folder / "metrics.json").is_file():
        raise ValueError(f"{folder}: pretraining was stopped before its end; start again, or give --model_name_or_path")
    return str(folder)


def load(path: str) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer, from a folder or the Hub; no code of theirs runs."""
    with running.loading(f"--model_name_or_path {path}", "give a folder or a name on the Hub"):
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def context(model: Any, wanted: int | None, flag: str) -> int:
    """Return the length of sequences: the wanted one, or the model's context, 1,024 at most.

    Args:
        model: with a config.
        wanted: value of the flag; None if it was left out.
        flag: name of the flag, for messages.

    Raises:
        ValueError: the model's context is shorter than the wanted length.
    """
    longest = getattr(model.config, "max_position_embeddings", _LONGEST)
    if wanted is None:
        return min(longest, _LONGEST)
    if wanted > longest:
        raise ValueError(f"{flag} {wanted} is above the model's context; give at most {longest}")
    return wanted
