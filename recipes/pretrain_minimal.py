#!/usr/bin/env python
"""Pretrain GPT-2 with MARS on nanoGPT's token files. Copy this file and change it: it imports no other recipe.

    accelerate launch pretrain_minimal.py --data_dir data/openwebtext --output_dir out --max_steps 100000 --bf16 true

`--optim mars_adamw` is another rule; the baseline is `--optim adamw_torch --learning_rate 6e-4 --weight_decay 0.1`.
The folder holds train.bin and val.bin: uint16 token ids, end to end. All flags of TrainingArguments work:
`--resume_from_checkpoint True` resumes from the newest checkpoint in `--output_dir`, a path from that checkpoint.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import mars_hf


@dataclass
class Arguments(TrainingArguments):
    """The data, the sizes of GPT-2 small, and defaults that differ from those of TrainingArguments."""

    data_dir: str = "."
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64
    optim: str = "mars_m"
    learning_rate: float = 6e-3  # published for mars_m and mars_adamw on GPT-2 small; AdamW's is a tenth
    weight_decay: float = 0.01
    lr_scheduler_type: str = "cosine"
    logging_steps: float = 10


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
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


def checkpoint(given: str | None, output: str) -> str | None:
    """Return the folder to resume from, or None."""
    newest = get_last_checkpoint(output) if given in ("True", "true") and os.path.isdir(output) else None
    if given and not Path(newest or given, "trainer_state.json").is_file():
        raise ValueError(
            f"--resume_from_checkpoint {given}: no checkpoint there; give the folder of one, True for the newest in "
            f"--output_dir {output}, or start anew without the flag"
        )
    return newest or given


def build(args: Arguments) -> Trainer:
    """Return a Trainer, which has MARS's callback by itself; raise ValueError for wrong input."""
    if int(os.environ.get("WORLD_SIZE", "1")) != args.world_size:
        raise ValueError("the launched processes are not connected, so each would train alone; add --use_cpu true")
    for name in ("n_layer", "n_head", "n_embd", "per_device_train_batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give at least 1")
    if not 0 <= args.learning_rate < float("inf"):
        raise ValueError(f"--learning_rate {args.learning_rate}: give a number >= 0")
    args.resume_from_checkpoint = checkpoint(args.resume_from_checkpoint, str(args.output_dir))
    train, val = (Blocks(Path(args.data_dir, name), args) for name in ("train.bin", "val.bin"))
    set_seed(args.seed)
    end_of_text = 50256 if args.vocab_size > 50256 else None  # if the ids are GPT-2's
    config = GPT2Config(vocab_size=args.vocab_size, bos_token_id=end_of_text, eos_token_id=end_of_text)
    config.n_layer, config.n_head, config.n_embd = args.n_layer, args.n_head, args.n_embd
    config.n_positions = args.block_size
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return Trainer(GPT2LMHeadModel(config), args, train_dataset=train, eval_dataset=val)


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_m and the other names
    try:
        parser = HfArgumentParser(Arguments, usage="%(prog)s --data_dir FOLDER [...]")  # type: ignore[arg-type]
        (args,) = parser.parse_args_into_dataclasses(argv)
        trainer = build(args)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: --report_to names a tracker that is not here
        sys.exit(f"pretrain_minimal.py: {error}")
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()  # with the log, MARS's metrics included
    trainer.accelerator.end_training()
    if args.world_size > 1 and args.device.type == "cpu":  # gloo's threads may abort a process that ends as usual
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
