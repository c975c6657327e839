#!/usr/bin/env python
"""Turn text into token files for pretrain_gpt2.py.

    python recipes/prepare_data.py --dataset openwebtext --output_dir data/openwebtext
    python recipes/prepare_data.py --dataset fineweb-edu --max_tokens 50000000000 --output_dir data/fineweb-edu
    python recipes/prepare_data.py --dataset roneneldan/TinyStories --output_dir data/tinystories
    python recipes/prepare_data.py --files corpus/*.jsonl --text_column body --output_dir data/mine

The folder gets train.bin and val.bin (GPT-2's token ids, uint16, little endian, each document followed by the
end-of-text token: nanoGPT's format), meta.json (counts, hashes, settings) and tokenizer/ (for AutoTokenizer). It
appears under its name only when complete. A killed run leaves OUTPUT_DIR.partial-* and OUTPUT_DIR.lock, which the next
run removes. A second run for the same folder is refused while the first one lives.

The split is nanoGPT's: a shuffled share of the documents, at least one, is held out. Documents are rows of a data set
on the Hub, rows of .parquet, lines of .jsonl (or .json), or whole .txt files; empty ones count. Files of a folder that
hold no text (empty, binary, not UTF-8, unreadable, of another kind) are skipped, counted and named. GPT-2's vocabulary
comes from the network or from tiktoken's cache (TIKTOKEN_CACHE_DIR). Disk space: the result and up to 4 GB more while
it is made; local files also need a temporary copy of their text. For OpenWebText (8 million documents) the result is
18 GB, and the Hub's cache (HF_HOME) keeps the data set itself, 54 GB by nanoGPT's count. FineWeb-Edu's sample of 10^11
tokens needs several times that, see docs/recipes.md; --max_tokens makes its result smaller, not its download.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

from pretraining.data import gpt2_tokenizer, meta_file, sources
from pretraining.run import ranges
from pretraining.run.errors import one_line_errors

_MADE_HERE = {"train.bin", "val.bin", "meta.json", "tokenizer"}


@one_line_errors("prepare_data.py")
def main(argv: list[str] | None = None) -> None:
    """Prepare the data; `argv` is the command line without the program's name."""
    settings = parse(argv)
    from pretraining.data import preparation  # imports for seconds, which a mistake need not wait for

    meta, skipped = preparation.prepare(settings)
    if skipped:
        print(skipped)
    for split in meta_file.SPLITS:
        entry = meta[split]
        print(f"{split:<6}{entry['tokens']:,} tokens, {entry['documents']:,} documents, {entry['bytes']:,} bytes")
        if entry["tokens"] < gpt2_tokenizer.CONTEXT:
            print(f"      less than one block of {gpt2_tokenizer.CONTEXT}: train with a smaller --block_size")
    print(f"ready: --data_dir {settings.output_dir}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: it is invalid, or the output folder holds other files.
    """
    parser = _parser()
    settings = parser.parse_args(argv)
    # datasets would read a path its own way and copy it to its cache.
    if settings.dataset and settings.dataset not in sources.ALIASES and Path(settings.dataset).exists():
        settings.dataset, settings.files = None, [settings.dataset]
    output = settings.output_dir.resolve()
    if settings.files:
        given = [name for name in ("dataset_config", "train_split") if getattr(settings, name) is not None]
        if given:
            raise ValueError(f"--{given[0]} goes with --dataset, not with --files; leave it out")
        for path in map(Path, settings.files):
            if path.is_dir() and output.is_relative_to(path.resolve()):
                raise ValueError(f"--output_dir {settings.output_dir} is inside --files {path}; choose another")
    _check_output(output)
    return settings


def _check_output(output: Path) -> None:
    """Raise ValueError for a folder with other files, whatever --overwrite says."""
    for folder in (output, *output.parents):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output_dir {output}: {folder} is a file; choose another name")
    others = sorted({path.name for path in output.iterdir()} - _MADE_HERE) if output.exists() else []
    if others:
        raise ValueError(
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
        help=f"{_aliases()}, any data set's name on the Hub, or a local path as in --files",
    )
    source.add_argument(
        "--files",
        nargs="+",
        type=_text,
        metavar="PATH",
        help="local files of one kind (.txt, .jsonl or .json, .parquet): files, folders (with all below), or globs",
    )
    parser.add_argument("--output_dir", type=_folder, required=True, help="folder to make")
    parser.add_argument(
        "--dataset_config",
        type=_text,
        help="configuration of the Hub's data set; left out: its only one, and for fineweb-edu sample-100BT",
    )
    parser.add_argument("--train_split", type=_text, help="split of the Hub's data set, train when left out")
    parser.add_argument("--text_column", type=_text, help="column or JSON key with the documents, text when left out")
    parser.add_argument(
        "--test_size",
        type=ranges.HELD_OUT.read,
        default=0.0005,
        help="share of documents to hold out (default: %(default)s)",
    )
    parser.add_argument("--seed", type=ranges.SEED.read, default=2357, help="of the split (default: %(default)s)")
    parser.add_argument(
        "--max_tokens",
        type=ranges.TOKENS.read,
        help="most tokens in train.bin, in whole documents; left out: all. The held-out documents stay the same",
    )
    parser.add_argument(
        "--num_proc",
        type=ranges.SIZE.read,
        default=_cores(),
        help="processes that tokenize (default: cores, %(default)s)",
    )
    parser.add_argument(
        "--tokenizer", choices=[gpt2_tokenizer.NAME], default=gpt2_tokenizer.NAME, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder made before, once the new one is complete"
    )
    return parser


def _aliases() -> str:
    return ", ".join(f"{alias} ({' '.join(filter(None, name))})" for alias, name in sources.ALIASES.items())


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(value: str) -> str:
    if not value:
        raise argparse.ArgumentTypeError("is empty; give a name or a path")
    return value


def _folder(value: str) -> Path:
    return Path(_text(value))


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
