#!/usr/bin/env python
"""Evaluate a causal language model: held-out loss, and zero-shot tasks.

    python recipes/evaluate_checkpoint.py --model runs/embedded-mars_m --output_file evaluation.json
    python recipes/evaluate_checkpoint.py --model runs/mine --data_dir data/mine --output_file mine.json
    python recipes/evaluate_checkpoint.py --model openai-community/gpt2 --tasks paper --output_file gpt2.json

The data are a folder made by prepare_data.py; without --data_dir and --tasks they are the embedded corpus, as in
pretrain_gpt2.py. The loss is that of consecutive blocks of val.bin: eval_loss of pretrain_gpt2.py. Tasks are those of
lm-evaluation-harness (pip install -e '.[eval]'); `paper` means the nine of the MARS paper. On several GPUs, accelerate
launch shares out the loss; tasks take one process.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from pretraining.data import embedded, token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run import errors
from tasks import evaluation, models
from transformers import HfArgumentParser


@dataclass
class Arguments:
    """What to evaluate, and on what."""

    model: str = field(metadata={"help": "Folder with config.json and weights, or a name on the Hub."})
    output_file: str = field(metadata={"help": "JSON file for the results; replaced if it exists."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder made by prepare_data.py."})
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of a block; left out: the model's context, 1,024 at most."}
    )
    max_eval_blocks: int | None = field(default=None, metadata={"help": "Only the first blocks of val.bin."})
    tasks: list[str] = field(default_factory=list, metadata={"help": "Tasks of lm-evaluation-harness, or paper."})
    num_fewshot: int | None = field(
        default=None, metadata={"help": "Examples before each question; left out: the task's own number."}
    )
    limit: int | None = field(default=None, metadata={"help": "Only the first questions of each task, to try it out."})
    include_path: str | None = field(
        default=None, metadata={"help": "Folder with task files of yours; Python functions that they name are run."}
    )
    batch_size: int = field(default=8, metadata={"help": "Sequences per forward pass."})
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = field(
        default="float32", metadata={"help": "Of the weights."}
    )
    bf16: bool = field(default=False, metadata={"help": "Compute in bfloat16 autocast, as runs with --bf16 true do."})
    use_cpu: bool = field(default=False, metadata={"help": "Do not use a GPU."})


@errors.one_line_errors("evaluate_checkpoint.py")
def main(argv: list[str] | None = None) -> None:
    """Evaluate, write the results and print them; `argv` is the command line without the program's name."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    output = Path(args.output_file)
    if output.is_dir():
        raise ValueError(f"--output_file {output} is a folder; give the name of a JSON file")
    output.parent.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=args.use_cpu)
    if args.tasks and accelerator.num_processes > 1:
        raise ValueError("--tasks takes one process: start it with python, not accelerate launch")
    names, manager = evaluation.find_tasks(args.tasks, args.include_path) if args.tasks else ([], None)
    model = models.load(args.model, args.dtype).to(accelerator.device)
    model.config.use_cache = False
    tokenizer = models.load_tokenizer(args.model)
    if args.tasks and tokenizer is None:
        raise ValueError(f"--tasks need a tokenizer, and --model {args.model} comes without one; save it there")
    results: dict[str, Any] = {
        "model": args.model,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bf16": args.bf16,
    }
    if args.data_dir or not args.tasks:
        results |= held_out_loss(args, model, tokenizer, accelerator)
    if args.tasks:
        settings = {key: getattr(args, key) for key in ("batch_size", "bf16", "num_fewshot", "limit")}
        scores = evaluation.run_tasks(model, tokenizer, names, manager, **settings)
        results["tasks"] = {key: scores[key] for key in ("results", "versions", "n-shot", "n-samples") if key in scores}
    if accelerator.is_main_process:
        output.write_text(json.dumps(results, indent=2) + "\n")
        for name in ("model", "parameters", "dataset", "loss_blocks", "loss", "perplexity", "bits_per_byte"):
            if name in results:
                print(f"{name.replace('_', ' '):<14}{results[name]}")
        if args.tasks:
            from lm_eval.utils import make_table

            print(make_table(scores))
        print(f"results are in {output}")


def held_out_loss(args: Arguments, model: Any, tokenizer: Any | None, accelerator: Accelerator) -> dict[str, Any]:
    """Return the loss, and what it was measured on.

    Raises:
        ValueError: there are no such data, they are those of another tokenizer, or the loss is not finite.
    """
    block = models.block_size(model, args.block_size)
    with accelerator.main_process_first():
        if args.data_dir:
            directory = Path(args.data_dir)
        else:  # where pretrain_gpt2.py puts it: beside the run
            run = Path(args.model).absolute()
            runs = run.parent.parent if run.name.startswith("checkpoint-") else run.parent
            directory = embedded.prepare((runs if run.is_dir() else Path("runs")) / "data", 4096)
    data = token_files.load(directory)
    vocabulary = data.tokenizer.get_vocab()
    if tokenizer is not None and not vocabulary.items() <= tokenizer.get_vocab().items():
        raise ValueError(f"--model {args.model} has another tokenizer than {directory}; give data of its own tokenizer")
    if model.get_input_embeddings().weight.shape[0] < len(vocabulary):
        raise ValueError(
            f"--model {args.model} has fewer tokens than the {len(vocabulary):,} of {directory}; give data of its own "
            "tokenizer"
        )
    blocks = TokenDataset(directory, "val", block, args.max_eval_blocks)
    loss = evaluation.mean_loss(model, blocks, accelerator, batch_size=args.batch_size, bf16=args.bf16)
    if not math.isfinite(loss):
        raise ValueError(f"--model {args.model}: the loss is {loss}; are its weights finite? Try --dtype float32")
    return {
        "dataset": data.name,
        "data_dir": str(directory),
        "block_size": block,
        "loss": loss,
        "loss_blocks": len(blocks),
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) / data.bytes_per_token,
    }


if __name__ == "__main__":
    errors.run(main)
