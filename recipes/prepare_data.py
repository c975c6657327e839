#!/usr/bin/env python
"""Turn text into token files for pretrain_gpt2.py.

    python recipes/prepare_data.py --dataset openwebtext --output_dir data/openwebtext
    python recipes/prepare_data.py --dataset roneneldan/TinyStories --output_dir data/tinystories
    python recipes/prepare_data.py --files corpus/*.jsonl --text_column body --output_dir data/mine

The folder gets train.bin and val.bin (GPT-2's token ids, uint16, little endian, each document followed by the
end-of-text token: nanoGPT's format), meta.json (counts, hashes, settings) and tokenizer/ (for AutoTokenizer). It
appears under its name only when complete. A killed run leaves OUTPUT_DIR.partial-*, which the next run removes.

The split is nanoGPT's: a shuffled share of the documents, at least one, is held out. Documents are rows of a data set
on the Hub, rows of .parquet, lines of .jsonl (or .json), or whole .txt files; empty ones count. GPT-2's vocabulary
comes from the network or from tiktoken's cache (TIKTOKEN_CACHE_DIR). Disk space: twice the result while it is made,
once afterwards; local files also need a temporary copy of their text. For OpenWebText (8 million documents) the result
is 18 GB, and the Hub's cache (HF_HOME) keeps the data set itself, 54 GB by nanoGPT's count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import tiktoken
from pretraining import gpt2_tokenizer, sources, token_files
from tqdm.auto import tqdm

_MADE_HERE = {"train.bin", "val.bin", "meta.json", "tokenizer"}
_ENCODE_BATCH = 100  # documents; small, so that the progress bar moves
_WRITE_BATCH = 1000
_TOKENS = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16")), "bytes": datasets.Value("int64")})


def main(argv: list[str] | None = None) -> None:
    """Prepare the data; `argv` is the command line without the program's name."""
    settings = parse(argv)
    try:
        meta = prepare(settings)
    except (sources.SourceError, OSError) as error:  # OSError: the disk is full, a folder may not be written, ...
        raise SystemExit(f"prepare_data.py: {error}") from error
    for split in token_files.SPLITS:
        entry = meta[split]
        print(f"{split:<6}{entry['tokens']:,} tokens, {entry['documents']:,} documents, {entry['bytes']:,} bytes")
        if entry["tokens"] < gpt2_tokenizer.CONTEXT:
            print(f"      less than one block of {gpt2_tokenizer.CONTEXT}: train with a smaller --block_size")
    print(f"ready: --data_dir {settings.output_dir}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; end the program with a message if it is invalid."""
    parser = _parser()
    settings = parser.parse_args(argv)
    # datasets would read a path its own way and copy it to its cache.
    if settings.dataset and settings.dataset not in sources.ALIASES and Path(settings.dataset).exists():
        settings.dataset, settings.files = None, [settings.dataset]
    if settings.files:
        given = [name for name in ("dataset_config", "train_split") if getattr(settings, name) is not None]
        if given:
            parser.error(f"--{given[0]} goes with --dataset, not with --files")
        output = settings.output_dir.resolve()
        for path in map(Path, settings.files):
            if path.is_dir() and output.is_relative_to(path.resolve()):
                parser.error(f"--output_dir {settings.output_dir} is inside --files {path}; choose a folder outside")
    return settings


def prepare(settings: argparse.Namespace) -> dict[str, Any]:
    """Make the folder and return the contents of its meta.json.

    Raises:
        SourceError: the documents are not available.
        VocabularyError: GPT-2's vocabulary is not available.
        FileExistsError: the folder exists and may not be replaced.
    """
    output = settings.output_dir.resolve()  # keep a link as it is; its target gets the data
    _check_output(output)
    with token_files.writing(output, overwrite=settings.overwrite) as partial:
        scratch = partial / "scratch"
        scratch.mkdir()
        tokenizer = gpt2_tokenizer.build()
        tokenizer.save_pretrained(partial / "tokenizer")
        name, source, load = _source(settings)
        parts = sources.split(load(scratch), test_size=settings.test_size, seed=settings.seed, cache_dir=scratch)
        meta = {
            "dataset": name,
            "source": source,
            "split": {"test_size": settings.test_size, "seed": settings.seed, "shuffle": True},
            "tokenizer": settings.tokenizer,
            "vocab_size": len(tokenizer),
            "end_of_text": gpt2_tokenizer.END_OF_TEXT_ID,
            "versions": {"datasets": datasets.__version__, "tiktoken": tiktoken.__version__},
        }
        for split in token_files.SPLITS:
            meta[split] = _write_split(partial / f"{split}.bin", parts[split], scratch / "tokens", settings.num_proc)
        shutil.rmtree(scratch)
        token_files.write_meta(partial, meta)
    return meta


def _source(settings: argparse.Namespace) -> tuple[str, dict[str, Any], Callable[[Path], datasets.Dataset]]:
    """Return the documents' name, their source in detail, and a function that loads them via a scratch folder."""
    if settings.files:
        files = sources.find_files(settings.files)
        kind = sources.kind(files)
        if kind == "txt" and settings.text_column is not None:
            raise sources.SourceError(f"--text_column {settings.text_column}: .txt files have no columns; leave it out")
        column = settings.text_column or sources.TEXT
        name = Path(settings.files[0]).resolve().name
        if len(settings.files) > 1:
            name += f" and {len(settings.files) - 1} more"
        source = {"files": len(files), "kind": kind} | ({} if kind == "txt" else {"text_column": column})
        return name, source, lambda scratch: sources.load_files(files, text_column=column, cache_dir=scratch)
    name = sources.ALIASES.get(settings.dataset, settings.dataset)
    column = settings.text_column or sources.TEXT
    config, split = settings.dataset_config, settings.train_split or "train"
    source = {"config": config, "split": split, "text_column": column}
    num_proc = _processes(settings.num_proc)
    return (
        name,
        source,
        lambda _: sources.load_hub(name, config=config, split=split, text_column=column, num_proc=num_proc),
    )


def _write_split(path: Path, documents: datasets.Dataset, scratch: Path, num_proc: int) -> dict[str, Any]:
    """Tokenize one split into a file; return its entry of meta.json."""
    scratch.mkdir()
    tokens = documents.map(
        gpt2_tokenizer.encode,
        input_columns=[sources.TEXT],
        remove_columns=documents.column_names,
        batched=True,
        batch_size=_ENCODE_BATCH,
        features=_TOKENS,
        num_proc=_processes(min(num_proc, len(documents))),
        cache_file_name=str(scratch / "tokens.arrow"),  # not in the Hub's cache, where it would stay
        load_from_cache_file=False,
        desc=f"tokenizing {path.stem}",
    )
    file = token_files.TokenFile(path)
    with tqdm(total=len(tokens), desc=f"writing {path.name}", unit=" documents") as progress:
        for batch in tokens.with_format("arrow").iter(_WRITE_BATCH):
            file.write(_arrays(batch["ids"]), sum(batch["bytes"].to_pylist()))
            progress.update(len(batch))
    shutil.rmtree(scratch)
    return file.close()


def _arrays(column: pyarrow.ChunkedArray) -> Iterator[np.ndarray]:
    """Yield the rows of a column of lists, without a copy."""
    for chunk in column.chunks:
        values = chunk.values.to_numpy()
        for start, end in pairwise(chunk.offsets.to_numpy()):
            yield values[start:end]


def _processes(num_proc: int) -> int | None:
    """Return `num_proc` for datasets, None instead of 1: for 1 it would start a process."""
    return num_proc if num_proc > 1 else None


def _check_output(output: Path) -> None:
    """Raise FileExistsError for a folder with other files, whatever --overwrite says."""
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"--output_dir {output} is a file; choose another name")
    others = sorted({path.name for path in output.iterdir()} - _MADE_HERE) if output.exists() else []
    if others:
        raise FileExistsError(
            f"--output_dir {output} holds other files ({', '.join(others[:3])}), which --overwrite would delete; "
            "choose another folder"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dataset",
        type=_text,
        help="openwebtext (Skylion007/openwebtext), any data set's name on the Hub, or a local path as in --files",
    )
    source.add_argument(
        "--files",
        nargs="+",
        type=_text,
        metavar="PATH",
        help="local files of one kind (.txt, .jsonl or .json, .parquet): files, folders (with all below), or globs",
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to make")
    parser.add_argument("--dataset_config", help="configuration of the Hub's data set; left out: its only one")
    parser.add_argument("--train_split", help="split of the Hub's data set, train when left out")
    parser.add_argument("--text_column", help="column or JSON key with the documents, text when left out")
    parser.add_argument(
        "--test_size", type=_share, default=0.0005, help="share of documents to hold out (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_seed, default=2357, help="of the split (default: %(default)s)")
    parser.add_argument(
        "--num_proc", type=_positive, default=_cores(), help="processes that tokenize (default: cores, %(default)s)"
    )
    parser.add_argument(
        "--tokenizer", choices=[gpt2_tokenizer.NAME], default=gpt2_tokenizer.NAME, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder made before, once the new one is complete"
    )
    return parser


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(value: str) -> str:
    if not value:
        raise argparse.ArgumentTypeError("is empty; give a name or a path")
    return value


def _positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from 1 on")
    return int(value)


def _seed(value: str) -> int:
    if not value.isdecimal() or int(value) >= 2**32:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from 0 to 2**32 - 1")
    return int(value)


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise argparse.ArgumentTypeError(f"{value!r} is not a share between 0 and 1, like 0.0005")
    return share


def _end_with_parent() -> None:
    """End this forked child once its parent is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    if hasattr(os, "register_at_fork"):
        # If this process is killed, the workers of datasets would wait forever and hold the space of deleted files.
        os.register_at_fork(after_in_child=_end_with_parent)
    main()
