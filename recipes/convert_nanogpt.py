#!/usr/bin/env python
"""Turn ckpt.pt of nanoGPT, or of the official MARS repository, into a folder for transformers, and back.

    python recipes/convert_nanogpt.py out/ckpt.pt converted
    python recipes/convert_nanogpt.py out/ckpt.pt converted --optimizer_state
    accelerate launch recipes/pretrain_gpt2.py --config converted/pretrain.yaml --resume_from_checkpoint converted
    python recipes/convert_nanogpt.py runs/pretrain-mars_adamw/checkpoint-60000 out --to_nanogpt --optimizer_state

The folder holds a GPT2LMHeadModel with the same logits, and GPT-2's tokenizer if its vocabulary is there. A model
without biases gets zeros in their place; --bias false of pretrain_gpt2.py keeps them zero. With --optimizer_state the
folder is a checkpoint of Trainer's, and pretrain.yaml holds the run's settings. Nothing in a ckpt.pt is executed, and
output has its name only once it is whole.

A checkpoint does not say which GELU its model.py computes: nanoGPT's is exact (gelu), that of the official repository
and of nanoGPT before May 2023 the tanh form (gelu_new). --code and --activation_function state what is not so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pretraining.run import ranges
from pretraining.run.errors import one_line_errors


@one_line_errors("convert_nanogpt.py")
def main(argv: list[str] | None = None) -> None:
    """Convert; `argv` is the command line without the program's name."""
    settings = parse(argv)
    from pretraining.nanogpt import nanogpt_conversion  # imports for seconds, which a mistake need not wait for

    for line in (nanogpt_conversion.to_nanogpt if settings.to_nanogpt else nanogpt_conversion.from_nanogpt)(settings):
        print(line)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: it is invalid.
    """
    settings = _parser().parse_args(argv)
    if settings.bias is not None and not settings.to_nanogpt:
        raise ValueError("--bias goes with --to_nanogpt; a ckpt.pt says itself whether it has biases")
    if settings.summed_micro_batches is not None and not settings.optimizer_state:
        raise ValueError("--summed_micro_batches goes with --optimizer_state; weights do not depend on it")
    if not settings.source.exists():
        raise ValueError(f"{settings.source}: no such file or folder")
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_nanogpt.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="ckpt.pt; with --to_nanogpt a folder")
    parser.add_argument(
        "output_dir", type=Path, metavar="OUTPUT_DIR", help="folder to make; with --to_nanogpt it gets a ckpt.pt"
    )
    parser.add_argument("--to_nanogpt", action="store_true", help="convert a folder of transformers into a ckpt.pt")
    parser.add_argument("--optimizer_state", action="store_true", help="convert the optimizer's state too")
    parser.add_argument(
        "--code",
        choices=["nanogpt", "mars"],
        help="whose model.py and trainer: nanoGPT's, or the official MARS repository's; left out: what ckpt.pt or the "
        "model say",
    )
    parser.add_argument(
        "--activation_function",
        choices=["gelu", "gelu_new"],
        help="GELU of that model.py; left out: gelu (exact) with nanogpt, gelu_new (tanh) with mars",
    )
    parser.add_argument(
        "--summed_micro_batches",
        type=ranges.SIZE.read,
        help="micro-batches whose gradients that trainer sums; left out: 1 with nanogpt, which averages; with mars the "
        "config's gradient_accumulation_steps (8 times that for a run without DistributedDataParallel)",
    )
    parser.add_argument(
        "--bias",
        choices=["true", "false"],
        help="with --to_nanogpt, whether the model has biases; left out: false if all are zero",
    )
    return parser


if __name__ == "__main__":
    main()
