"""Make a folder of token files from documents: the work of prepare_data.py."""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import tiktoken
from tqdm.auto import tqdm

from pretraining.data import gpt2_tokenizer, sources, token_checks, token_files
from pretraining.run import folder_lock
from pretraining.run.skipped import Skipped

_ENCODE_BATCH = 100  # documents; small, so that the progress bar moves
_WRITE_BATCH = 1000
_TOKENIZE = 2**20  # documents whose tokens are on disk twice; about a billion tokens
_TOKENS = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16")), "bytes": datasets.Value("int64")})


def prepare(settings: argparse.Namespace) -> tuple[dict[str, Any], Skipped]:
    """Make the folder; return the contents of its meta.json, and the files that were skipped.

    Raises:
        ValueError: documents or vocabulary are not available, the folder exists and may not be replaced, or another
            process is making it.
    """
    output = settings.output_dir.resolve()  # keep a link as it is; its target gets the data
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        folder_lock.held(output, "prepares data"),
        token_files.writing(output, overwrite=settings.overwrite) as partial,
    ):
        scratch = partial / "scratch"
        scratch.mkdir()
        tokenizer = gpt2_tokenizer.build()
        tokenizer.save_pretrained(partial / "tokenizer")
        name, source, load, skipped = _source(settings)
        parts = sources.split(load(scratch), test_size=settings.test_size, seed=settings.seed, cache_dir=scratch)
        meta: dict[str, Any] = {
            "dataset": name,
            "source": source,
            "split": {"test_size": settings.test_size, "seed": settings.seed, "shuffle": True},
            "tokenizer": settings.tokenizer,
            "tokenizer_files": token_checks.tokenizer_hashes(partial / "tokenizer"),
            "vocab_size": len(tokenizer),
            "end_of_text": gpt2_tokenizer.END_OF_TEXT_ID,
            "versions": {"datasets": datasets.__version__, "tiktoken": tiktoken.__version__},
        }
        if settings.max_tokens is not None:
            meta["split"]["max_tokens"] = settings.max_tokens
        for split in token_files.SPLITS:
            limit = settings.max_tokens if split == "train" else None
            meta[split] = _write_split(
                partial / f"{split}.bin", parts[split], scratch / "tokens", settings.num_proc, limit
            )
        if skipped:
            meta["skipped"] = skipped.as_meta()
        shutil.rmtree(scratch)
        token_files.write_meta(partial, meta)
    return meta, skipped


def _source(settings: argparse.Namespace) -> tuple[str, dict[str, Any], Callable[[Path], datasets.Dataset], Skipped]:
    """Return the documents' name, their source in detail, a function that loads them, and what it skips.

    The function takes a scratch folder, and counts while it loads.
    """
    if settings.files:
        found = sources.find_files(settings.files)
        kind = sources.kind(found.files)
        if kind == "txt" and settings.text_column is not None:
            raise sources.SourceError(f"--text_column {settings.text_column}: .txt files have no columns; leave it out")
        column = settings.text_column or sources.TEXT
        name = Path(settings.files[0]).resolve().name
        if len(settings.files) > 1:
            name += f" and {len(settings.files) - 1} more"
        source = {"files": len(found.files), "kind": kind} | ({} if kind == "txt" else {"text_column": column})
        load = functools.partial(sources.load_files, found, text_column=column)
        return name, source, lambda scratch: load(cache_dir=scratch), found.skipped
    name, config = sources.ALIASES.get(settings.dataset, sources.HubName(settings.dataset))
    column = settings.text_column or sources.TEXT
    config, split = settings.dataset_config or config, settings.train_split or "train"
    source = {"config": config, "split": split, "text_column": column}
    num_proc = _processes(settings.num_proc)
    return (
        name,
        source,
        lambda _: sources.load_hub(name, config=config, split=split, text_column=column, num_proc=num_proc),
        Skipped(),
    )


def _write_split(
    path: Path, documents: datasets.Dataset, scratch: Path, num_proc: int, max_tokens: int | None
) -> dict[str, Any]:
    """Tokenize one split into a file, a stretch of documents after the other; return its entry of meta.json.

    Raises:
        ValueError: the first document alone has more than `max_tokens` tokens.
    """
    file = token_files.TokenFile(path)
    with tqdm(total=len(documents), desc=f"writing {path.name}", unit=" documents") as progress:
        for start in range(0, len(documents), _TOKENIZE):
            stretch = documents.select(range(start, min(start + _TOKENIZE, len(documents))))
            scratch.mkdir()
            is_full = False
            for batch in _tokens(stretch, scratch, num_proc, path.stem).with_format("arrow").iter(_WRITE_BATCH):
                arrays, sizes = list(_arrays(batch["ids"])), batch["bytes"].to_pylist()
                fitting = len(arrays) if max_tokens is None else _fitting(arrays, max_tokens - file.tokens)
                file.write(arrays[:fitting], sum(sizes[:fitting]))
                progress.update(fitting)
                is_full = fitting < len(arrays)
                if is_full and not file.documents:
                    raise ValueError(f"--max_tokens {max_tokens}: the first document has {len(arrays[0])}; give more")
                if is_full:
                    break
            shutil.rmtree(scratch)
            if is_full:
                break
    return file.close()


def _tokens(documents: datasets.Dataset, scratch: Path, num_proc: int, split: str) -> datasets.Dataset:
    return documents.map(
        gpt2_tokenizer.encode,
        input_columns=[sources.TEXT],
        remove_columns=documents.column_names,
        batched=True,
        batch_size=_ENCODE_BATCH,
        features=_TOKENS,
        num_proc=_processes(min(num_proc, len(documents))),
        cache_file_name=str(scratch / "tokens.arrow"),  # not in the Hub's cache, where it would stay
        load_from_cache_file=False,
        desc=f"tokenizing {split}",
    )


def _fitting(arrays: list[np.ndarray], tokens: int) -> int:
    """Return how many of the first arrays have at most `tokens` elements together."""
    return int(np.searchsorted(np.cumsum([len(array) for array in arrays]), tokens, side="right"))


def _arrays(column: pyarrow.ChunkedArray) -> Iterator[np.ndarray]:
    """Yield the rows of a column of lists, without a copy."""
    for chunk in column.chunks:
        values = chunk.values.to_numpy()
        for start, end in pairwise(chunk.offsets.to_numpy()):
            yield values[start:end]


def _processes(num_proc: int) -> int | None:
    """Return `num_proc` for datasets, None instead of 1: for 1 it would start a process."""
    return num_proc if num_proc > 1 else None
