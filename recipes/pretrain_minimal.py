#!/usr/bin/env python
"""Pretrain GPT-2 with MARS on text. Copy this file and change it.

    python pretrain_minimal.py            # a small GPT-2 on Python's standard library
    accelerate launch pretrain_minimal.py --dataset_name HuggingFaceFW/fineweb-edu --dataset_config_name sample-10BT
    accelerate launch pretrain_minimal.py --dataset_name my_texts --max_steps 1000 --bf16 true
    accelerate launch pretrain_minimal.py --data_dir data/openwebtext --max_steps 100000 --bf16 true

`--data_dir` has train.bin and val.bin of nanoGPT: uint16 token ids, end to end. `--optim mars_adamw` is another rule;
the baseline is `--optim adamw_torch --learning_rate 6e-4 --weight_decay 0.1`. All flags of TrainingArguments work.
"""

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_dataset, load_dataset_builder
from transformers import (
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
    """Text, and the sizes of GPT-2 small."""

    dataset_name: str | None = HfArg(default=None, help="Hub, or a folder of .txt, .jsonl, .csv or .parquet files.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of a data set on the Hub.")
    text_column: str = HfArg(default="text", help="Column with the documents.")
    tokenizer_name: str = HfArg(default="openai-community/gpt2", help="Tokenizer of --dataset_name: Hub, or a folder.")
    data_dir: str | None = HfArg(default=None, help="Folder with train.bin and val.bin, in place of --dataset_name.")
    n_layer: int = HfArg(default=12, help="Blocks of the model.")
    n_head: int = HfArg(default=12, help="Attention heads of a block.")
    n_embd: int = HfArg(default=768, help="Width of the model.")
    block_size: int = HfArg(default=1024, help="Tokens of a sequence.")
    vocab_size: int = HfArg(default=50304, help="Rows of the embedding: GPT-2's 50,257, up to a multiple of 64.")


class TokenFile(torch.utils.data.Dataset):
    """Consecutive blocks of a file of uint16 token ids."""

    def __init__(self, path: Path, block_size: int) -> None:
        """Map the file into memory."""
        if not path.is_file() or not path.stat().st_size:
            raise SystemExit(f"--data_dir: {path} is missing or empty")
        tokens = np.memmap(path, dtype="<u2", mode="r")
        self.blocks = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        # Nothing predicts the first token, and Trainer divides the loss by the number of labels.
        return {"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), ids[1:]])}


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


def cut(texts: DatasetDict, args: Arguments, tokenizer: Any) -> DatasetDict:
    """Return sequences of tokens, cut from the documents end to end; an end-of-text token follows each document."""

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in rows[args.text_column]]  # an empty cell of a .csv file is None
        documents = tokenizer(texts, add_special_tokens=False)["input_ids"]
        stream = list(chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in documents))
        starts = range(0, len(stream) - args.block_size + 1, args.block_size)
        sequences = [stream[start : start + args.block_size] for start in starts]
        return {"input_ids": sequences, "labels": [[-100, *ids[1:]] for ids in sequences]}

    sequences = texts.map(blocks, batched=True, remove_columns=texts["train"].column_names, desc="tokenizing")
    if "validation" in sequences or len(sequences["train"]) < 2:
        return sequences
    train, held_out = sequences["train"].train_test_split(0.005, shuffle=False).values()
    return DatasetDict(train=train, validation=held_out)


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_m and the other names
    parser = HfArgumentParser((Arguments, TrainingArguments))
    # Published for mars_m and mars_adamw on GPT-2 small.
    parser.set_defaults(optim="mars_m", learning_rate=6e-3, weight_decay=0.01, lr_scheduler_type="cosine")
    parser.set_defaults(output_dir="pretrained", logging_steps=10)
    parser.set_defaults(ddp_find_unused_parameters=False)  # GPT-2 has none, and looking for them costs time
    args, training = parser.parse_args_into_dataclasses(argv)
    if args.dataset_name and args.data_dir:
        raise SystemExit("--dataset_name and --data_dir are two sources of data; give one of them")
    if not args.dataset_name and not args.data_dir:
        print("A small GPT-2 trains on two CPU cores in about two minutes.", flush=True)
        parser.set_defaults(n_layer=2, n_head=4, n_embd=128, block_size=256, vocab_size=1024)
        args, training = parser.parse_args_into_dataclasses(argv)
    set_seed(training.seed)

    tokenizer, end_of_text = None, 50256 if args.vocab_size > 50256 else None  # of GPT-2's tokens
    if args.data_dir:
        train, held_out = (TokenFile(Path(args.data_dir, name), args.block_size) for name in ("train.bin", "val.bin"))
    else:
        texts = load_texts(args)
        if args.dataset_name:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name, trust_remote_code=False)
        else:
            tokenizer = GPT2Tokenizer().train_new_from_iterator(texts["train"][args.text_column], args.vocab_size)
        if len(tokenizer) > args.vocab_size:
            raise SystemExit(f"--vocab_size {args.vocab_size} is less than the tokenizer's {len(tokenizer)} tokens")
        with training.main_process_first():  # the others read its cache
            sequences = cut(texts, args, tokenizer)
        train, held_out, end_of_text = sequences["train"], sequences.get("validation", []), tokenizer.eos_token_id
    if not len(train) or not len(held_out):
        found = f"{len(train)} blocks of {args.block_size} tokens to train on, and {len(held_out)} held out"
        raise SystemExit(f"the data fill {found}; give more of them or a lower --block_size")
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    config = GPT2Config(vocab_size=args.vocab_size, n_positions=args.block_size, **ends)
    config.n_layer, config.n_head, config.n_embd = args.n_layer, args.n_head, args.n_embd
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    trainer = Trainer(GPT2LMHeadModel(config), training, default_data_collator, train, held_out, tokenizer)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
