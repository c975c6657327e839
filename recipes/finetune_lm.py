#!/usr/bin/env python
"""Fine-tune all weights of a language model on text with MARS. Copy this file and change it.

    python finetune_lm.py                 # a small GPT-2 with random weights, on Python's standard library
    python finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories --bf16 true
    python finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my_texts --bf16 true

`--optim mars_m` is another rule, `--optim adamw_torch` the baseline. `--learning_rate` is AdamW's for all of them, and
MARS converts it: 2e-5 if you give none, and 5e-3 without a model. All flags of TrainingArguments work.
"""

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_dataset_builder
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.hf_argparser import HfArg

import mars_hf


@dataclass
class Arguments:
    """Model and text."""

    model_name_or_path: str | None = HfArg(default=None, help="Hub or folder; left out: a small model, from scratch.")
    dataset_name: str | None = HfArg(default=None, help="Hub, or a folder of .txt, .jsonl, .csv or .parquet files.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of a data set on the Hub.")
    text_column: str = HfArg(default="text", help="Column with the documents.")
    block_size: int = HfArg(default=256, help="Tokens of a sequence.")


def load_texts(args: Arguments) -> DatasetDict:
    """Return the documents; a .txt file is one of them."""
    name, column = args.dataset_name, args.text_column
    if name is None:
        paths = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
        return DatasetDict(train=Dataset.from_dict({column: [path.read_text(encoding="utf-8") for path in paths]}))
    # Only the reader of .txt files has this option; a folder of .jsonl files may hold a LICENSE.txt, too.
    is_txt = Path(name).is_dir() and hasattr(load_dataset_builder(name).config, "sample_by")
    texts = load_dataset(name, args.dataset_config_name, **({"sample_by": "document"} if is_txt else {}))
    if column not in texts.column_names.get("train", []):
        raise SystemExit(f"--dataset_name {name} has no column {column!r} in a split 'train': {texts.column_names}")
    return texts


def load_model(args: Arguments, texts: DatasetDict) -> tuple[Any, Any]:
    """Return the model, with float32 weights, and its tokenizer."""
    if path := args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32", trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    print("A small GPT-2 with random weights trains on two CPU cores in about two minutes.", flush=True)
    tokenizer = GPT2Tokenizer().train_new_from_iterator(texts["train"][args.text_column], vocab_size=1024)
    end = tokenizer.eos_token_id
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=args.block_size, bos_token_id=end, eos_token_id=end)
    config.n_layer, config.n_head, config.n_embd = 2, 4, 128
    return GPT2LMHeadModel(config), tokenizer


def cut(texts: DatasetDict, args: Arguments, tokenizer: Any) -> DatasetDict:
    """Return sequences of tokens, cut from the documents end to end; an end-of-text token follows each document."""

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in rows[args.text_column]]  # an empty cell of a .csv file is None
        documents = tokenizer(texts, add_special_tokens=False)["input_ids"]
        stream = list(chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in documents))
        starts = range(0, len(stream) - args.block_size + 1, args.block_size)
        sequences = [stream[start : start + args.block_size] for start in starts]
        # Nothing predicts the first token, and Trainer divides the loss by the number of labels.
        return {"input_ids": sequences, "labels": [[-100, *ids[1:]] for ids in sequences]}

    sequences = texts.map(blocks, batched=True, remove_columns=texts["train"].column_names, desc="tokenizing")
    if {"validation", "test"} & sequences.keys() or len(sequences["train"]) < 2:
        return sequences
    return sequences["train"].train_test_split(0.05, shuffle=False)


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_adamw and the other names
    parser = HfArgumentParser((Arguments, TrainingArguments))
    # AdamW's rate and betas; from the rate follows MARS's.
    parser.set_defaults(learning_rate=None, optim="mars_adamw", optim_args="adamw_rates=true,beta1=0.9,beta2=0.999")
    parser.set_defaults(output_dir="finetuned-lm", lr_scheduler_type="cosine", warmup_steps=0.05)
    parser.set_defaults(logging_steps=25, eval_on_start=True)
    args, training = parser.parse_args_into_dataclasses(argv)
    if training.learning_rate is None:
        training.learning_rate = 2e-5 if args.model_name_or_path else 5e-3
    set_seed(training.seed)

    texts = load_texts(args)
    model, tokenizer = load_model(args, texts)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or args.block_size
    if args.block_size > context:
        raise SystemExit(f"--block_size {args.block_size} is more than the {context} tokens of the model's context")
    with training.main_process_first():  # the others read its cache
        sequences = cut(texts, args, tokenizer)
    train, held_out = sequences["train"], sequences.get("validation", sequences.get("test", []))
    if not len(train) or not len(held_out):
        found = f"{len(train)} blocks of {args.block_size} tokens to train on, and {len(held_out)} held out"
        raise SystemExit(f"the text fills {found}; give more text or a lower --block_size")
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()
    if training.push_to_hub:
        trainer.push_to_hub(dataset=args.dataset_name)
    else:
        trainer.create_model_card(dataset=args.dataset_name)
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
