#!/usr/bin/env python
"""Fine-tune all weights of a language model on text with MARS. Copy this file and change it.

    python finetune_lm.py                 # a small GPT-2 with random weights on made-up stories, about two minutes
    python finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories --bf16 true
    python finetune_lm.py --model_name_or_path Qwen/Qwen3-0.6B --train_file mine.txt --bf16 true

`--optim mars_m` is another rule, `--optim adamw_torch` the baseline. `--learning_rate` is AdamW's for all of them:
unless you give `--optim_args`, MARS converts it. All flags of TrainingArguments work; `--resume_from_checkpoint True`
resumes from the newest checkpoint in `--output_dir`. For chats, and for LoRA, there is sft_lora.py.
"""

import argparse
import math
import os
import random
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
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
from transformers.trainer_utils import get_last_checkpoint

import mars_hf


def option(default: Any, text: str) -> Any:
    """Return a flag's default and help."""
    return field(default=default, metadata={"help": text})


@dataclass
class Arguments:
    """Model and text."""

    model_name_or_path: str | None = option(None, "Hub or folder; left out: a small GPT-2 with random weights.")
    dataset_name: str | None = option(None, "Hub, or a folder of .txt, .jsonl, .csv or .parquet files.")
    dataset_config_name: str | None = option(None, "Configuration of a data set on the Hub.")
    train_file: str | None = option(None, "A .txt, .json, .jsonl, .csv or .parquet file, in place of --dataset_name.")
    validation_file: str | None = option(None, "Held-out text; left out: a twentieth of the training text.")
    text_column: str = option("text", "Column with the documents.")
    block_size: int | None = option(None, "Tokens of a sequence; left out: the model's context, at most 1,024.")
    max_eval_samples: int = option(256, "Evaluate on this many sequences at most.")


@dataclass
class Training(TrainingArguments):
    """Those of transformers, with the recipe's defaults."""

    _argument_group_name = "options of transformers.TrainingArguments"
    output_dir: str | None = option("finetuned-lm", "Folder of the run.")
    learning_rate: float = option(None, "AdamW's rate, which MARS converts; left out: 2e-5, without a model 5e-3.")
    optim_args: str | None = option(
        None, "Settings of the rule, such as gamma=0.05; left out: adamw_rates=true, and AdamW's betas for mars_adamw."
    )


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the text above as it stands, and the default of each flag."""


def stories() -> DatasetDict:
    """Return stories that this file makes up, a hundred of them held out."""
    names, things = "Anna Ben Clara David Emma Felix Greta Hugo".split(), "ball kite boat drum lamp book".split()
    places, colors = "park garden forest school beach station".split(), "red blue green yellow small big".split()
    dice, texts = random.Random(0), []
    for _ in range(8000):
        (name, friend), thing = dice.sample(names, 2), f"{dice.choice(colors)} {dice.choice(things)}"
        texts.append(
            f"{name} has a {thing}. One day {name} takes the {thing} to the {dice.choice(places)}. There {name} meets "
            f"{friend}. {friend} says: What a {thing}! {name} and {friend} play with the {thing}."
        )
    texts = list(dict.fromkeys(texts))  # each one once
    parts = {"train": texts[:-100], "validation": texts[-100:]}
    return DatasetDict({name: Dataset.from_dict({"text": part}) for name, part in parts.items()})


def load_documents(args: Arguments) -> DatasetDict:
    """Return the documents; a .txt file is one of them."""
    if not (args.dataset_name or args.train_file):
        return stories()
    files = {"train": args.train_file, "validation": args.validation_file} if args.train_file else {}
    suffix = Path(args.train_file or "").suffix[1:]
    name = {"txt": "text", "jsonl": "json"}.get(suffix, suffix) if files else str(args.dataset_name)
    has_texts = name == "text" or any(Path(name).glob("**/*.txt"))
    options = {"sample_by": "document"} if has_texts else {}
    data_files = {part: file for part, file in files.items() if file}
    return load_dataset(name, args.dataset_config_name, data_files=data_files or None, **options)


def load_model(args: Arguments, documents: DatasetDict) -> tuple[Any, Any]:
    """Return the model, with float32 weights, and its tokenizer."""
    if path := args.model_name_or_path:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32", trust_remote_code=False)
            return model, AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except OSError as error:
            raise ValueError(f"--model_name_or_path {path}: {error}") from error
    text = documents["train"][:10_000][args.text_column]
    tokenizer = GPT2Tokenizer().train_new_from_iterator(text, vocab_size=1024)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "n_positions": 64, "n_layer": 2, "n_head": 4, "n_embd": 128}
    ends: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(GPT2Config(initializer_range=0.1, **sizes, **ends))
    model.loss_type = "ForCausalLM"  # or transformers warns
    return model, tokenizer


def blocks(documents: Dataset, column: str, tokenizer: Any, size: int) -> Dataset:
    """Return sequences of `size` tokens, cut from the documents end to end; an end-of-text token follows each."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = tokenizer(rows[column], add_special_tokens=False)["input_ids"]
        stream = list(chain.from_iterable([*ids, *end] for ids in documents))
        sequences = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
        # Nothing predicts the first token, and Trainer divides the loss by the number of labels.
        return {"input_ids": sequences, "labels": [[-100, *ids[1:]] for ids in sequences]}

    return documents.map(cut, batched=True, remove_columns=documents.column_names, desc="tokenizing")


def build(args: Arguments, training: TrainingArguments) -> Trainer:
    """Return the Trainer; raise ValueError for wrong input."""
    if int(os.environ.get("WORLD_SIZE", "1")) != training.world_size:
        raise ValueError("the launched processes are not connected, so each would train alone; add --use_cpu true")
    if (given := training.resume_from_checkpoint) in ("True", "true"):
        output = str(training.output_dir)
        training.resume_from_checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
    if given and not Path(training.resume_from_checkpoint or "", "trainer_state.json").is_file():
        raise ValueError(f"--resume_from_checkpoint {given}: no checkpoint there; leave the flag out to start anew")
    set_seed(training.seed)
    with training.main_process_first():
        documents = load_documents(args)
        if args.text_column not in (columns := documents["train"].column_names):
            raise ValueError(f"--text_column {args.text_column}: the columns are {', '.join(columns)}")
        model, tokenizer = load_model(args, documents)
        size = args.block_size or min(getattr(model.config, "max_position_embeddings", 1024), 1024)
        train = blocks(documents["train"].shuffle(seed=0), args.text_column, tokenizer, size)
        if "validation" in documents:
            held_out = blocks(documents["validation"], args.text_column, tokenizer, size)
        elif len(train) > 1:
            train, held_out = train.train_test_split(0.05, shuffle=False).values()
    if len(train) < 2 or not len(held_out):
        raise ValueError(f"the text is shorter than two blocks of {size} tokens; give more, or a smaller --block_size")
    held_out = held_out.select(range(min(args.max_eval_samples, len(held_out))))
    return Trainer(model, training, default_data_collator, train, held_out, processing_class=tokenizer)


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_adamw and the other names
    kinds: Any = (Arguments, Training)
    parser = HfArgumentParser(
        kinds, prog="finetune_lm.py", usage=argparse.SUPPRESS, description=__doc__, formatter_class=Help
    )
    parser.set_defaults(
        optim="mars_adamw", lr_scheduler_type="cosine", warmup_steps=0.05, per_device_train_batch_size=16
    )
    parser.set_defaults(logging_steps=25, eval_on_start=True)
    try:
        args, training = parser.parse_args_into_dataclasses(argv)
        if args.model_name_or_path is None:
            print("A small GPT-2 with random weights trains on two CPU cores in about two minutes.", flush=True)
        if training.learning_rate is None:
            training.learning_rate = 2e-5 if args.model_name_or_path else 5e-3
        if training.optim_args is None and training.optim.startswith("mars_"):
            training.optim_args = "adamw_rates=true"
            training.optim_args += ",beta1=0.9,beta2=0.999" if training.optim == "mars_adamw" else ""  # AdamW's
        trainer: Any = build(args, training)
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        parser.error(" ".join(str(error).split()))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", metrics)
    before = next((row["eval_loss"] for row in trainer.state.log_history if row["step"] == 0), math.nan)
    if trainer.is_world_process_zero():
        trainer.create_model_card(dataset=args.dataset_name)
        print(f"\nheld-out loss: {before:.3f} before, {metrics['eval_loss']:.3f} after")
        print(f"saved in {training.output_dir}; --push_to_hub true, or hf upload NAME FOLDER, uploads it")
    if training.push_to_hub:
        trainer.push_to_hub(dataset=args.dataset_name)
    if training.world_size == 1:
        block = trainer.eval_dataset[0]["input_ids"]
        prompt = torch.tensor([block[: len(block) // 5]], device=training.device)
        ids = trainer.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_length=min(len(block), 80))
        begin, continued = trainer.processing_class.batch_decode([prompt[0], ids[0, prompt.shape[1] :]])
        print(f"prompt: {begin}\ncontinued: {continued}")
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
