#!/usr/bin/env python
"""Fine-tune a language model once, as the plans finetuning and smollm2 do: all of its weights, or LoRA adapters.

    python benchmarks/finetune.py --model_name_or_path runs/bases/mars_adamw --optim mars_m --learning_rate 0.016

Without --dataset_name the text is one in eight of the C++ headers that come with torch. recipes/finetune_lm.py is the
file for models and texts of your own; this one also measures what a model forgets.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import mars_hf

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes"))
from pretraining.data import embedded

SETTINGS: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "max_steps": 100,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "logging_steps": 25,
    "save_strategy": "no",
}


@dataclass
class Arguments:
    """Model, texts and adapters."""

    model_name_or_path: str
    dataset_name: str | None = None
    general_dataset_name: str | None = field(default=None, metadata={"help": "Text to evaluate on at the end, too."})
    block_size: int | None = field(default=None, metadata={"help": "Left out: the model's context."})
    max_eval_blocks: int = 256
    dtype: str = field(default="float32", metadata={"help": "Of the model's weights; adapters are in float32."})
    use_peft: bool = False
    lora_r: int = 8
    lora_alpha: int = 16
    lora_targets: str = field(default="all-linear", metadata={"help": "`none`: PEFT's default, queries and values."})
    attn_implementation: str | None = field(default=None, metadata={"help": "`eager` is the fastest on a CPU."})


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, and write metrics.json; `argv` is the command line without the program's name."""
    mars_hf.register()
    parser = HfArgumentParser((Arguments, TrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(**SETTINGS)
    args, training = parser.parse_args_into_dataclasses(argv)
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        trust_remote_code=False,
    )
    size = args.block_size or model.config.max_position_embeddings
    if args.use_peft:
        targets = None if args.lora_targets == "none" else args.lora_targets
        settings: dict[str, Any] = {"target_modules": targets, "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, **settings))
    train_text, held_out_text = load(args.dataset_name)
    held_out = blocks(held_out_text, tokenizer, size)[: args.max_eval_blocks]
    trainer: Any = Trainer(model, training, default_data_collator, blocks(train_text, tokenizer, size), held_out)
    result = trainer.train()
    metrics = {"steps": trainer.state.global_step, "train_loss": result.training_loss, **trainer.evaluate()}
    if not math.isfinite(metrics["eval_loss"]):
        sys.exit(f"finetune.py: the held-out loss is non-finite; give a --learning_rate below {training.learning_rate}")
    if args.general_dataset_name:
        general = blocks(load(args.general_dataset_name)[1], tokenizer, size)[: args.max_eval_blocks]
        metrics |= trainer.evaluate(general, metric_key_prefix="general")
    trainer.save_state()
    Path(str(training.output_dir), "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def load(name: str | None) -> tuple[list[str], list[str]]:
    """Return documents to train on and held-out ones."""
    if name is None:
        corpus = embedded.read_corpus("torch-headers")
        return corpus.train[::8], corpus.val
    parts = datasets.load_dataset(name)
    return parts["train"]["text"][:], parts["validation"]["text"][:]


def blocks(documents: list[str], tokenizer: Any, size: int) -> list[dict[str, list[int]]]:
    """Return sequences of `size` tokens, cut from the documents end to end; an end-of-text token follows each."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream = chain.from_iterable([*ids, *end] for ids in tokenizer(documents, add_special_tokens=False)["input_ids"])
    sequences = [list(ids) for ids in zip(*[stream] * size, strict=False)]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in sequences]


if __name__ == "__main__":
    main()
