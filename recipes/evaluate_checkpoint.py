#!/usr/bin/env python
"""Evaluate a causal language model: held-out loss, and zero-shot tasks.

    python recipes/evaluate_checkpoint.py --model runs/embedded-mars_m --output_file evaluation.json
    python recipes/evaluate_checkpoint.py --model runs/mine --data_dir data/mine --output_file mine.json
    python recipes/evaluate_checkpoint.py --model openai-community/gpt2 --tasks paper --output_file gpt2.json

The model is a folder or a name on the Hub. The data are a folder made by prepare_data.py; without --data_dir and
--tasks they are the embedded corpus, as in pretrain_gpt2.py. Two losses are measured, each under its own name:

    loss           the full pass: consecutive blocks of val.bin, as eval_loss of pretrain_gpt2.py
    official_loss  random blocks of val.bin, as nanoGPT and the official trainer of MARS report

Tasks are those of lm-evaluation-harness: pip install -e '.[eval]'. `paper` means the nine of the MARS paper. On
several GPUs, accelerate launch shares out the losses; tasks take one process.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pretraining.run import ranges
from pretraining.run.errors import one_line_errors

_DTYPES = ("float32", "bfloat16", "float16", "auto")
_CORPORA = ("stdlib", "torch-headers")
_PACKAGES = ("torch", "transformers", "accelerate", "lm_eval")


@one_line_errors("evaluate_checkpoint.py")
def main(argv: list[str] | None = None) -> None:
    """Evaluate, write the results and print them; `argv` is the command line without the program's name."""
    settings = parse(argv)
    import torch  # imports for seconds, which a mistake need not wait for

    try:
        results = evaluate(settings)
    except torch.OutOfMemoryError:
        raise ValueError(f"--batch_size {settings.batch_size} needs more memory than there is; give less") from None
    if results is not None:
        from pretraining.run import report

        report.write(settings.output_file, results)
        print(f"\n{table(results)}\n\nresults are in {settings.output_file}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: it is invalid, or the output file cannot be written.
    """
    settings = _parser().parse_args(argv)
    settings.tasks = [name for word in settings.tasks for name in word.split(",") if name]
    output = settings.output_file
    if output.is_dir():
        raise ValueError(f"--output_file {output} is a folder; give the name of a JSON file")
    output.parent.mkdir(parents=True, exist_ok=True)
    if settings.data_dir and settings.embedded_corpus:
        raise ValueError("--data_dir and --embedded_corpus both name the data; leave one out")
    for flag in ("num_fewshot", "limit", "include_path"):
        if getattr(settings, flag) is not None and not settings.tasks:
            raise ValueError(f"--{flag} goes with --tasks; leave it out, or name tasks")
    if settings.include_path and not settings.include_path.is_dir():
        raise ValueError(f"--include_path {settings.include_path}: no such folder")
    if settings.tasks and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--tasks takes one process: start it with python, not accelerate launch")
    return settings


def evaluate(settings: argparse.Namespace) -> dict[str, Any] | None:
    """Return the results; None on all processes but the first.

    Args:
        settings: from `parse`.

    Raises:
        ValueError: model, data or tasks are missing or do not fit.
    """
    from accelerate import Accelerator
    from pretraining.data import data_folder
    from pretraining.run import evaluation_model, evaluation_tasks

    loaded = None
    if settings.tasks:
        evaluation_tasks.check_installed()
        manager = evaluation_tasks.manager(settings.include_path, settings.tasks)
        names = evaluation_tasks.names(settings.tasks, manager.all_tasks)
        loaded = evaluation_tasks.load(names, manager, settings.num_fewshot)
    accelerator = Accelerator(cpu=settings.use_cpu)
    with accelerator.main_process_first():
        directory = _data(settings)
    source = (
        data_folder.load(directory, verify=settings.verify_data and accelerator.is_main_process) if directory else None
    )
    model = evaluation_model.load(settings.model, settings.dtype)
    tokenizer = evaluation_model.tokenizer(settings.model)
    block = evaluation_model.block_size(model, settings.block_size)
    if source:
        evaluation_model.check_fits(model, tokenizer, settings.model, source)
    if settings.tasks and tokenizer is None:
        raise ValueError(f"--tasks need a tokenizer, and --model {settings.model} comes without one; save it there")
    model.to(accelerator.device)

    results: dict[str, Any] = {
        "model": settings.model,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bf16": settings.bf16,
    }
    if source:
        results |= _losses(settings, model, source, block, accelerator)
    if loaded:
        found = evaluation_tasks.evaluate(
            model, tokenizer, loaded, limit=settings.limit, batch_size=settings.batch_size, bf16=settings.bf16
        )
        results |= {"tasks": found, "mean_score": evaluation_tasks.mean_score(found)}
    results["versions"] = _versions()
    return results if accelerator.is_main_process else None


def _data(settings: argparse.Namespace) -> Path | None:
    """Return the folder of the data; None if only tasks are asked for."""
    from pretraining.data import data_folder

    if settings.data_dir:
        return Path(settings.data_dir)
    if settings.tasks and not settings.embedded_corpus:
        return None
    folder = Path(settings.model).absolute()
    if not folder.is_dir():
        beside = Path("runs")  # pretrain_gpt2.py's default
    elif folder.name.startswith("checkpoint-"):
        beside = folder.parent.parent
    else:
        beside = folder.parent
    corpus = settings.embedded_corpus or _CORPORA[0]
    return data_folder.prepare_embedded(beside / "data", settings.embedded_vocab_size, corpus)


def _losses(settings: argparse.Namespace, model: Any, source: Any, block: int, accelerator: Any) -> dict[str, Any]:
    """Return both losses and what they were measured on."""
    from pretraining.data.token_files import TokenDataset
    from pretraining.run import evaluation

    blocks = TokenDataset(source.directory, "val", block, settings.max_eval_blocks)
    random_blocks = None
    if settings.official_blocks:
        random_blocks = evaluation.RandomBlocks(
            source.directory, block, settings.official_blocks, settings.official_seed
        )
    shared: dict[str, Any] = {"batch_size": settings.batch_size, "bf16": settings.bf16}
    whole = evaluation.measure(model, blocks, accelerator, name="loss", **shared)
    if not math.isfinite(whole.mean):
        narrow = settings.bf16 or settings.dtype in ("bfloat16", "float16")
        remedy = "try --dtype float32" if narrow else "are its weights finite?"
        raise ValueError(f"--model {settings.model}: the loss is {whole.mean}; {remedy}")
    results = {
        "dataset": source.name,
        "data_dir": str(source.directory),
        "block_size": block,
        "loss": whole.mean,
        "loss_blocks": whole.blocks,
        "perplexity": whole.perplexity,
        "bits_per_byte": whole.bits_per_byte(source.bytes_per_token),
    }
    if random_blocks:
        drawn = evaluation.measure(model, random_blocks, accelerator, name="official_loss", **shared)
        results |= evaluation.as_metrics(drawn) | {"official_seed": settings.official_seed}
    return results


def _versions() -> dict[str, str]:
    import mars_hf

    found = {"python": platform.python_version(), "mars_hf": mars_hf.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(results: dict[str, Any]) -> str:
    """Return the results as text."""
    autocast = ", bfloat16 autocast" if results["bf16"] else ""
    rows = [("model", f"{results['model']} ({results['parameters']:,} parameters, {results['dtype']}{autocast})")]
    if "loss" in results:
        blocks = f"{results['loss_blocks']:,} blocks of {results['block_size']:,} tokens"
        rows += [
            ("data", results["dataset"]),
            ("loss", f"{results['loss']:.4f}  full pass over {blocks}"),
            ("perplexity", f"{results['perplexity']:.2f}"),
            ("bits per byte", f"{results['bits_per_byte']:.4f}"),
        ]
    if "official_loss" in results:
        error = results["official_loss_stderr"]
        either = f" ± {error:.4f}" if error is not None else ""
        blocks = f"{results['official_blocks']:,} random blocks"
        rows.append(("official loss", f"{results['official_loss']:.4f}{either}  mean over {blocks}"))
    for name, row in results.get("tasks", {}).items():
        if not row["is_part"]:
            rows.append((name, _score(row)))
    if results.get("mean_score") is not None and len(results["tasks"]) > 1:
        rows.append(("mean score", f"{100 * results['mean_score']:.2f}"))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)


def _score(row: dict[str, Any]) -> str:
    if row["score"] is None:
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        return ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
    error = row.get(f"{row['metric']}_stderr")
    either = f" ± {100 * error:.2f}" if error is not None else ""
    shots = f", {row['num_fewshot']}-shot" if row["num_fewshot"] is not None else ""
    return f"{100 * row['score']:.2f}{either}  {row['metric']}{shots}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate_checkpoint.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", type=_text, required=True, help="folder with config.json and weights, or a name on the Hub")
    add("--output_file", type=_path, required=True, help="JSON file for the results; replaced if it exists")
    add("--data_dir", type=_text, help="folder made by prepare_data.py; left out: the embedded corpus, or tasks alone")
    add("--verify_data", **_FLAG, help="read the token files whole first: hashes and every id")
    add("--embedded_corpus", choices=_CORPORA, help=f"default without --data_dir and --tasks: {_CORPORA[0]}")
    add(
        "--embedded_vocab_size",
        type=ranges.NUMBERS["embedded_vocab_size"].read,
        default=4096,
        help="vocabulary of the embedded corpus; default: %(default)s",
    )
    add("--block_size", type=ranges.NUMBERS["block_size"].read, help="default: the model's context, of at most 1,024")
    add("--max_eval_blocks", type=ranges.SIZE.read, help="blocks of the full pass, from the first; left out: all")
    add(
        "--official_blocks",
        type=ranges.whole(0).read,
        default=3000,
        help="random blocks of the official loss: 3,000 for GPT-2 small and medium, 1,000 for large and XL; 0: do not "
        "measure it; default: %(default)s",
    )
    add("--official_seed", type=ranges.SEED.read, default=5000, help="of the random blocks; default: %(default)s")
    add(
        "--tasks",
        nargs="+",
        type=_text,
        default=[],
        help="tasks of lm-evaluation-harness, or paper for the paper's nine",
    )
    add(
        "--num_fewshot", type=ranges.whole(0).read, help="examples before each question; left out: the task's, mostly 0"
    )
    add("--limit", type=ranges.SIZE.read, help="only the first questions of each task, to try it out")
    add("--include_path", type=_path, help="folder with task files of yours; Python functions that they name are run")
    add("--batch_size", type=ranges.SIZE.read, default=8, help="sequences per forward pass; default: %(default)s")
    add("--dtype", choices=_DTYPES, default="float32", help="of the weights; default: %(default)s")
    add("--bf16", **_FLAG, help="compute in bfloat16 autocast, as a run with --bf16 true does")
    add("--use_cpu", **_FLAG, help="do not use a GPU")
    return parser


def _text(value: str) -> str:
    if not value:
        raise argparse.ArgumentTypeError("is empty; give a value, or leave it out")
    return value


def _path(value: str) -> Path:
    return Path(_text(value))


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither true nor false")
    return value.lower() == "true"


_FLAG: dict[str, Any] = {"type": _flag, "nargs": "?", "const": True, "default": False}


if __name__ == "__main__":
    main()
