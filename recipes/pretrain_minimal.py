#!/usr/bin/env python
"""Pretrain GPT-2 with MARS on text. Copy this file and change it: it imports nothing else of this repository.

    accelerate launch pretrain_minimal.py --dataset_name HuggingFaceFW/fineweb-edu --dataset_config_name sample-10BT
    accelerate launch pretrain_minimal.py --dataset_name my_texts --tokenizer_name gpt2 --max_steps 1000 --bf16 true
    accelerate launch pretrain_minimal.py --data_dir data/openwebtext --max_steps 100000 --bf16 true

`--dataset_name` is a data set of the Hub or a folder of text files, which `datasets` tokenizes once and caches.
`--data_dir` is a folder with train.bin and val.bin of nanoGPT: uint16 token ids, end to end. `--optim mars_adamw` is
another rule; the baseline is `--optim adamw_torch --learning_rate 6e-4 --weight_decay 0.1`. All flags of
TrainingArguments work: `--resume_from_checkpoint True` resumes from the newest checkpoint in `--output_dir`.
"""

import argparse
import os
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
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
    """Text, and the sizes of GPT-2 small."""

    data_dir: str | None = option(None, "Folder with train.bin and val.bin.")
    dataset_name: str | None = option(None, "Data set of the Hub, or a folder of .txt, .jsonl or .parquet files.")
    dataset_config_name: str | None = option(None, "Configuration of a data set on the Hub.")
    text_column: str = option("text", "Column with the documents.")
    tokenizer_name: str = option("openai-community/gpt2", "Tokenizer for --dataset_name: of the Hub, or a folder.")
    n_layer: int = option(12, "Blocks of the model.")
    n_head: int = option(12, "Attention heads of a block.")
    n_embd: int = option(768, "Width of the model.")
    block_size: int = option(1024, "Tokens of a sequence.")
    vocab_size: int = option(50304, "Rows of the embedding: GPT-2's 50,257, rounded up to a multiple of 64.")


@dataclass
class Training(TrainingArguments):
    """Those of transformers, with the recipe's defaults."""

    _argument_group_name = "options of transformers.TrainingArguments"
    output_dir: str | None = option("pretrained", "Folder of the run.")
    learning_rate: float = option(6e-3, "Published for mars_m and mars_adamw on GPT-2 small; AdamW's is a tenth.")
    weight_decay: float = option(0.01, "Decoupled weight decay; AdamW's is 0.1.")


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the text above as it stands, and the default of each flag."""


class TokenFile(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of a file of uint16 token ids."""

    def __init__(self, path: Path, args: Arguments) -> None:
        """Check the file, which reads it once."""
        if not path.is_file():
            raise ValueError(f"--data_dir {path.parent} has no {path.name}; give a folder with train.bin and val.bin")
        self.path, self.size, tokens = path, args.block_size, path.stat().st_size // 2
        if not 0 < self.size <= tokens:
            raise ValueError(f"--block_size {self.size}: {path} has {tokens} tokens; give at least 1, at most those")
        self.blocks = tokens // self.size
        top = np.memmap(path, "<u2", "r", shape=(tokens,)).max()
        if top >= args.vocab_size:
            raise ValueError(f"--vocab_size {args.vocab_size}: {path} has token id {top}; give at least {top + 1}")

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(np.fromfile(self.path, "<u2", self.size, offset=2 * index * self.size).astype(np.int64))
        labels = ids.clone()  # the model shifts them
        labels[0] = -100  # nothing predicts the first, so Trainer must not count it
        return {"input_ids": ids, "labels": labels}


def tokenized(args: Arguments, tokenizer: Any) -> tuple[Dataset, Dataset]:
    """Return sequences of tokens of a data set: those to train on, and those held out."""
    if len(tokenizer) > args.vocab_size:
        raise ValueError(
            f"--vocab_size {args.vocab_size}: the tokenizer has {len(tokenizer)} tokens; give at least that"
        )
    name, end = str(args.dataset_name), [tokenizer.eos_token_id]
    options = {"sample_by": "document"} if any(Path(name).glob("**/*.txt")) else {}  # a file is a document
    parts = load_dataset(name, args.dataset_config_name, **options)

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = tokenizer(rows[args.text_column], add_special_tokens=False)["input_ids"]
        stream = list(chain.from_iterable(ids + end for ids in documents))
        starts = range(0, len(stream) - args.block_size + 1, args.block_size)
        sequences = [stream[start : start + args.block_size] for start in starts]
        return {"input_ids": sequences, "labels": [[-100, *ids[1:]] for ids in sequences]}

    columns = parts["train"].column_names
    if args.text_column not in columns:
        raise ValueError(f"--text_column {args.text_column}: the columns are {', '.join(columns)}")
    sequences = parts.map(cut, batched=True, remove_columns=columns, desc="tokenizing")
    if len(sequences["train"]) < 2:
        raise ValueError(f"{name} is shorter than two sequences of --block_size {args.block_size} tokens")
    if "validation" in sequences:
        return sequences["train"], sequences["validation"]
    train, held_out = sequences["train"].train_test_split(0.005, seed=0).values()
    return train, held_out


def build(args: Arguments, training: TrainingArguments) -> Trainer:
    """Return a Trainer, which has MARS's callback by itself; raise ValueError for wrong input."""
    if int(os.environ.get("WORLD_SIZE", "1")) != training.world_size:
        raise ValueError("the launched processes are not connected, so each would train alone; add --use_cpu true")
    counts = {**vars(args), "per_device_train_batch_size": training.per_device_train_batch_size}
    for name in ("n_layer", "n_head", "n_embd", "block_size", "per_device_train_batch_size"):
        if counts[name] < 1:
            raise ValueError(f"--{name} {counts[name]}: give at least 1")
    if not 0 <= training.learning_rate < float("inf"):
        raise ValueError(f"--learning_rate {training.learning_rate}: give a number >= 0")
    if (args.data_dir is None) == (args.dataset_name is None):
        raise ValueError("give the text: either --dataset_name, or --data_dir with train.bin and val.bin")
    if (given := training.resume_from_checkpoint) in ("True", "true"):
        output = str(training.output_dir)
        training.resume_from_checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
    if given and not Path(training.resume_from_checkpoint or "", "trainer_state.json").is_file():
        raise ValueError(
            f"--resume_from_checkpoint {given}: no checkpoint there; give the folder of one, True for the newest in "
            f"--output_dir {training.output_dir}, or start anew without the flag"
        )
    tokenizer, end_of_text = None, 50256 if args.vocab_size > 50256 else None  # if the ids are GPT-2's
    if args.dataset_name:
        with training.main_process_first():  # the others read its cache
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name, trust_remote_code=False)
            train, val = tokenized(args, tokenizer)
        end_of_text = tokenizer.eos_token_id
    else:
        train, val = (TokenFile(Path(str(args.data_dir), name), args) for name in ("train.bin", "val.bin"))
    set_seed(training.seed)
    config = GPT2Config(vocab_size=args.vocab_size, bos_token_id=end_of_text, eos_token_id=end_of_text)
    config.n_layer, config.n_head, config.n_embd = args.n_layer, args.n_head, args.n_embd
    config.n_positions = args.block_size
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return Trainer(GPT2LMHeadModel(config), training, default_data_collator, train, val, tokenizer)


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_m and the other names
    kinds: Any = (Arguments, Training)
    parser = HfArgumentParser(
        kinds, prog="pretrain_minimal.py", usage=argparse.SUPPRESS, description=__doc__, formatter_class=Help
    )
    parser.set_defaults(optim="mars_m", lr_scheduler_type="cosine", logging_steps=10)
    parser.set_defaults(ddp_find_unused_parameters=False)  # GPT-2 has none, and looking for them costs time
    try:
        args, training = parser.parse_args_into_dataclasses(argv)
        trainer = build(args, training)
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        parser.error(" ".join(str(error).split()))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()  # with the log, MARS's metrics included
    trainer.accelerator.end_training()
    if (
        training.world_size > 1 and training.device.type == "cpu"
    ):  # gloo's threads may abort a process that ends as usual
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
