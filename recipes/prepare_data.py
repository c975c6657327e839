#!/usr/bin/env python
"""Turn text into token files for pretrain_gpt2.py.

    python recipes/prepare_data.py --dataset openwebtext --output_dir data/openwebtext
    python recipes/prepare_data.py --dataset fineweb-edu --max_tokens 50000000000 --output_dir data/fineweb-edu
    python recipes/prepare_data.py --dataset roneneldan/TinyStories --output_dir data/tinystories
    python recipes/prepare_data.py --files corpus/*.jsonl --text_column body --output_dir data/mine
    python recipes/prepare_data.py --files shakespeare.txt --test_size 0.1 --output_dir data/shakespeare

The folder gets train.bin and val.bin (GPT-2's token ids, uint16, little endian, each document followed by the
end-of-text token: nanoGPT's format), meta.json (counts, hashes, settings) and tokenizer/ (for AutoTokenizer). It
appears under its name only when complete. A killed run leaves .NAME.partial beside it, which the next run removes. A
second run for the same folder is refused while the first one lives.

The split is nanoGPT's: a shuffled share of the documents, at least one, is held out. Documents are rows of a data set,
of .parquet, .jsonl or .json, or whole .txt files; empty ones count. Of a single document the end is held out. GPT-2's
vocabulary comes from the network or from tiktoken's cache (TIKTOKEN_CACHE_DIR). Disk space: the result, and for local
files a temporary copy of their text. For OpenWebText (8 million documents) the result is 18 GB, and the Hub's cache
(HF_HOME) keeps the data set itself, 54 GB by nanoGPT's count. FineWeb-Edu's sample of 10^11 tokens needs several times
that, see docs/data.md; --max_tokens makes its result smaller, not its download.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tiktoken
from pretraining.data import sources, token_files
from pretraining.run.errors import one_line_errors
from tiktoken.load import read_file_cached
from tqdm.auto import tqdm
from transformers import GPT2Tokenizer

from mars_hf.compare.files import locked

CONTEXT = 1024  # of GPT-2
_BATCH = 1000  # documents
_LARGE_SHARE = 0.1  # of the held-out text, for one document
_SETTINGS = ("dataset_config", "dataset_revision", "train_split", "text_column", "test_size", "seed", "max_tokens")
# As in tiktoken_ext.openai_public, so that transformers' tokenizer comes from the files that tiktoken caches.
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@one_line_errors("prepare_data.py")
def main(argv: list[str] | None = None) -> None:
    """Prepare the data; `argv` is the command line without the program's name."""
    args = parse(argv)
    output = args.output_dir
    if args.files:
        sources.find_files(args.files)  # complains before the vocabulary, which may need a network
    with locked(output, "writes"), token_files.writing(output, overwrite=args.overwrite) as partial:
        tokenizer = gpt2_tokenizer()
        tokenizer.save_pretrained(partial / "tokenizer")
        with tempfile.TemporaryDirectory(dir=partial) as scratch:
            name, documents = load(args, Path(scratch))
            print(f"data  {len(documents):,} documents of {name}")
            parts = sources.split(documents, test_size=args.test_size, seed=args.seed, cache_dir=Path(scratch))
            entries = {
                split: token_files.write_tokens(
                    partial / f"{split}.bin",
                    tokenize(part, args.num_proc),
                    max_tokens=args.max_tokens if split == "train" else None,
                )
                for split, part in parts.items()
            }
        meta = {
            "dataset": name,
            "settings": {key: getattr(args, key) for key in _SETTINGS},
            "tokenizer": "gpt2",
            "vocab_size": len(tokenizer),
            "end_of_text": tokenizer.eos_token_id,
            "versions": {"datasets": datasets.__version__, "tiktoken": tiktoken.__version__},
            **entries,
        }
        token_files.write_meta(partial, meta)
    for split, entry in entries.items():
        print(f"{split:<6}{entry['tokens']:,} tokens, {entry['documents']:,} documents, {entry['bytes']:,} bytes")
        if entry["tokens"] < CONTEXT:
            print(f"      less than one block of {CONTEXT}: train with a smaller --block_size")
    if len(documents) > 1 and (share := largest_share(output / "val.bin", meta["end_of_text"])) > _LARGE_SHARE:
        held_out = entries["val"]["tokens"] / sum(entry["tokens"] for entry in entries.values())
        print(
            f"warning: one document makes {share:.0%} of the held-out text, which is {held_out:.2%} of all. Its losses "
            "tell about this document; cut long documents, or give a larger --test_size"
        )
    print(f"ready: --data_dir {output}")


def gpt2_tokenizer() -> GPT2Tokenizer:
    """Return GPT-2's tokenizer for transformers.

    Raises:
        ValueError: its files are neither cached nor available from the network.
    """
    try:
        vocabulary, merges = (read_file_cached(URL + name, SHA256[name]) for name in ("encoder.json", "vocab.bpe"))
    except (OSError, ValueError) as error:  # no network or cache folder; wrong contents
        raise ValueError(
            f"cannot get GPT-2's vocabulary from {URL} ({type(error).__name__}); run once with a network, or set "
            "TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached the encoding 'gpt2'"
        ) from error
    _, *lines = merges.decode("utf-8").splitlines()  # the first names the version
    pairs: list[Any] = [tuple(line.split()) for line in lines if line]  # transformers declares lines but needs pairs
    return GPT2Tokenizer(vocab=json.loads(vocabulary), merges=pairs, model_max_length=CONTEXT)


def load(args: argparse.Namespace, scratch: Path) -> tuple[str, datasets.Dataset]:
    """Return the name of the documents, in printable characters, and the documents."""
    if args.files:
        name = Path(args.files[0]).resolve().name + (f" and {len(args.files) - 1} more" if args.files[1:] else "")
        files = sources.find_files(args.files)
        documents = sources.load_files(files, text_column=args.text_column, cache_dir=scratch)
    else:
        name = args.dataset
        documents = sources.load_named(
            args.dataset,
            config=args.dataset_config,
            revision=args.dataset_revision,
            split=args.train_split,
            text_column=args.text_column,
            num_proc=args.num_proc if args.num_proc > 1 else None,
        )
    return repr(name)[1:-1][:200], documents


def tokenize(documents: datasets.Dataset, num_threads: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield each document's token ids, the end-of-text token last, and the bytes of its text."""
    encoding = tiktoken.get_encoding("gpt2")

    def encode(text: str) -> tuple[np.ndarray, int]:
        ids = encoding.encode_ordinary(text)  # special tokens in a document are plain text
        return np.array([*ids, encoding.eot_token]), len(text.encode())

    with (
        ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=len(documents), desc="tokenizing", unit=" documents") as bar,
    ):
        for batch in documents.iter(_BATCH):
            yield from pool.map(encode, batch[sources.TEXT])
            bar.update(len(batch[sources.TEXT]))


def largest_share(path: Path, end_of_text: int) -> float:
    """Return the share of the longest document in the tokens of a file."""
    ends = np.flatnonzero(np.fromfile(path, token_files.DTYPE) == end_of_text)
    return float(np.diff(ends, prepend=-1).max() / (ends[-1] + 1))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dataset",
        help=f"{', '.join(sources.ALIASES)}, or any data set's name on the Hub",
    )
    source.add_argument(
        "--files",
        nargs="+",
        metavar="PATH",
        help="local files of one kind (.txt, .jsonl or .json, .parquet): files, folders (with all below), or globs",
    )
    add("--output_dir", type=Path, required=True, help="folder to make")
    add("--dataset_config", help="configuration of the Hub's data set; for fineweb-edu sample-100BT when left out")
    add(
        "--dataset_revision",
        help=f"branch, tag or commit of the Hub's data set, such as {sources.PARQUET}; left out: its main branch",
    )
    add("--train_split", default="train", help="split of the data set (default: %(default)s)")
    add("--text_column", default="text", help="column or JSON key with the documents (default: %(default)s)")
    add("--test_size", type=float, default=0.0005, help="share of documents to hold out (default: %(default)s)")
    add("--seed", type=int, default=2357, help="of the split (default: %(default)s)")
    add(
        "--max_tokens",
        type=int,
        help="most tokens in train.bin, in whole documents; left out: all. The held-out documents stay the same",
    )
    add(
        "--num_proc",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        help="processes that download, and threads that tokenize (default: cores, %(default)s)",
    )
    add("--overwrite", action="store_true", help="replace token files made before, once the new ones are complete")
    args = parser.parse_args(argv)
    if args.dataset in sources.ALIASES:
        args.dataset, config = sources.ALIASES[args.dataset]
        args.dataset_config = args.dataset_config or config
    return args


if __name__ == "__main__":
    main()
