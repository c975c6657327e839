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
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from pretraining import pretrained
from pretraining.data import embedded, token_files
from pretraining.data.token_files import TokenDataset
from pretraining.run import processes
from pretraining.run.errors import one_line_errors
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

# The paper's, in its order (tables 7 and 8).
PAPER = ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande", "mmlu", "sciq")


@dataclass
class Arguments:
    """What to evaluate, and on what."""

    model: str = HfArg(help="Folder with config.json and weights, or a name on the Hub.")
    output_file: str = HfArg(help="JSON file for the results; replaced if it exists.")
    data_dir: str | None = HfArg(default=None, help="Folder made by prepare_data.py.")
    block_size: int | None = HfArg(default=None, help="Tokens of a block; left out: the context, 1,024 at most.")
    max_eval_blocks: int | None = HfArg(default=None, help="Only the first blocks of val.bin.")
    tasks: list[str] = field(default_factory=list, metadata={"help": "Tasks of lm-evaluation-harness, or paper."})
    num_fewshot: int | None = HfArg(default=None, help="Examples before a question; left out: the task's own number.")
    limit: int | None = HfArg(default=None, help="Only the first questions of each task, to try it out.")
    include_path: str | None = HfArg(default=None, help="Folder with task files of yours; functions they name are run.")
    batch_size: int = HfArg(default=8, help="Sequences per forward pass.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = HfArg(default="float32", help="Of the weights.")
    bf16: bool = HfArg(default=False, help="Compute in bfloat16 autocast, as runs with --bf16 true do.")
    use_cpu: bool = HfArg(default=False, help="Do not use a GPU.")


@one_line_errors("evaluate_checkpoint.py")
def main(argv: list[str] | None = None) -> None:
    """Evaluate, write the results and print them; `argv` is the command line without the program's name."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    output = Path(args.output_file)
    if output.is_dir():
        raise ValueError(f"--output_file {output} is a folder; name a file for the results")
    output.parent.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=args.use_cpu)
    if args.tasks and accelerator.num_processes > 1:
        raise ValueError("--tasks takes one process: start it with python, not accelerate launch")
    names, manager = find_tasks(args.tasks, args.include_path) if args.tasks else ([], None)
    model = pretrained.load(args.model, args.dtype).to(accelerator.device)
    model.config.use_cache = False
    tokenizer = pretrained.load_tokenizer(args.model)
    if args.tasks and tokenizer is None:
        raise ValueError(f"--tasks need a tokenizer, and --model {args.model} comes without one; save it there")
    results = {
        "model": args.model,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bf16": args.bf16,
    }
    if args.data_dir or not args.tasks:
        results |= held_out_loss(args, model, tokenizer, accelerator)
    for name, value in results.items() if accelerator.is_main_process else ():
        print(f"{name.replace('_', ' '):<14}{value}")
    if args.tasks:
        results["tasks"] = run_tasks(args, model, tokenizer, names, manager)
    if accelerator.is_main_process:
        output.write_text(json.dumps(results, indent=2) + "\n")
        print(f"results are in {output}")


def held_out_loss(args: Arguments, model: Any, tokenizer: Any | None, accelerator: Accelerator) -> dict[str, Any]:
    """Return the loss, and what it was measured on.

    Raises:
        ValueError: there are no such data, they are those of another tokenizer, or the loss is not finite.
    """
    block = pretrained.block_size(model, args.block_size)
    with accelerator.main_process_first():
        if args.data_dir:
            directory = Path(args.data_dir)
        else:  # where pretrain_gpt2.py puts it: beside the run
            run = Path(args.model).absolute()
            runs = run.parent.parent if run.name.startswith("checkpoint-") else run.parent
            directory = embedded.prepare((runs if run.is_dir() else Path("runs")) / "data", 4096)
    data = token_files.load(directory)
    vocabulary, other = data.tokenizer.get_vocab(), None if tokenizer is None else tokenizer.get_vocab()
    if model.get_input_embeddings().weight.shape[0] < len(vocabulary) or (
        other and not vocabulary.items() <= other.items()
    ):
        raise ValueError(f"--model {args.model} has another tokenizer than {directory}; give data of its own tokenizer")
    blocks = TokenDataset(directory, "val", block, args.max_eval_blocks)
    loss = mean_loss(model, blocks, accelerator, args)
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


@torch.no_grad()
def mean_loss(model: Any, blocks: TokenDataset, accelerator: Accelerator, args: Arguments) -> float:
    """Return the mean loss over blocks, which does not depend on batch size or number of processes."""
    loader: Any = accelerator.prepare_data_loader(DataLoader(blocks, batch_size=args.batch_size))
    losses: list[torch.Tensor] = []
    model.eval()
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=args.bf16):
        for batch in tqdm(loader, desc="loss", unit="batch", disable=not accelerator.is_main_process):
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
            each = functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
            losses.append(accelerator.gather_for_metrics(each.mean(1)).double().cpu())
    return float(torch.cat(losses).mean())


def find_tasks(names: list[str], include_path: str | None) -> tuple[list[str], Any]:
    """Return lm_eval's names of tasks and the TaskManager that has them, which takes some ten seconds.

    Raises:
        ValueError: lm_eval has no such task, or is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("--tasks needs the package lm_eval: pip install -e '.[eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=include_path)
    names = [task for name in names for task in (PAPER if name == "paper" else (name,))]
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise ValueError(
            f"--tasks {' '.join(unknown)}: lm_eval has no such task; accepted: paper, what `lm_eval ls tasks` "
            "lists, or a task of --include_path"
        )
    return names, manager


def run_tasks(args: Arguments, model: Any, tokenizer: Any, names: list[str], manager: Any) -> dict[str, Any]:
    """Print and return the results of lm_eval."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    harness = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        mixed_precision_dtype="bfloat16" if args.bf16 else None,
    )
    settings: dict[str, Any] = {"num_fewshot": args.num_fewshot, "limit": args.limit, "log_samples": False}
    scores: Any = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, **settings)
    print(make_table(scores))
    return {key: scores[key] for key in ("results", "versions", "n-shot", "n-samples") if key in scores}


if __name__ == "__main__":
    main()
    processes.leave()
