"""Read an embedded corpus: text that every installation has, so that the recipe trains without a network.

`stdlib` is the Python sources of the interpreter's standard library, on which settings are tuned; `torch-headers` is
the C++ headers of the torch wheel, on which nothing is.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pretraining.run.skipped import Skipped

END_OF_TEXT = "<|endoftext|>"

# One file in this many is held out, by the hash of its path: the same files on every machine.
_HELD_OUT_OF = 20


class Corpus(NamedTuple):
    """Documents to train on, held-out documents, a hash of both, and what was left out."""

    train: list[str]
    val: list[str]
    fingerprint: str
    skipped: Skipped


class _Source(NamedTuple):
    """Where a corpus comes from.

    Attributes:
        dataset: name in results.
        root: folder of the files.
        pattern: names of the files.
        left_out: names of folders that are no part of it.
        largest: bytes of the largest file that is; None for any.
        version: what the text depends on, beside the files.
        missing: why an installation may lack it.
    """

    dataset: str
    root: Callable[[], Path]
    pattern: str
    left_out: frozenset[str]
    largest: int | None
    version: Callable[[], object]
    missing: str


SOURCES = {
    "stdlib": _Source(
        dataset="python-standard-library",
        root=lambda: Path(sysconfig.get_paths()["stdlib"]),
        pattern="*.py",
        # Tables, not library code, or missing on some systems (Linux distributions package the tests separately).
        left_out=frozenset(
            {
                *("encodings", "test", "tests", "idle_test", "site-packages", "dist-packages"),
                *("__pycache__", "lib2to3", "pydoc_data"),
            }
        ),
        largest=None,
        version=lambda: sys.version_info[:3],
        missing="this interpreter has no standard library to train on",
    ),
    "torch-headers": _Source(
        dataset="torch-headers",
        root=lambda: Path(torch.__file__).parent / "include",
        pattern="*.h",
        left_out=frozenset({"ops", "google"}),  # generated, one like the other
        largest=200_000,  # larger ones are generated too
        version=lambda: torch.__version__.partition("+")[0],
        missing="this torch comes without headers",
    ),
}


def read_corpus(name: str = "stdlib") -> Corpus:
    """Read an embedded corpus, split by file.

    Args:
        name: key of SOURCES.

    Raises:
        ValueError: this installation lacks the sources.
    """
    source = SOURCES[name]
    root = source.root()
    files = sorted(
        path
        for path in root.rglob(source.pattern)
        if not source.left_out.intersection(path.relative_to(root).parts[:-1])
        and (source.largest is None or path.stat().st_size <= source.largest)
    )
    if len(files) < _HELD_OUT_OF:
        raise ValueError(
            f"only {len(files)} files {source.pattern} under {root}: {source.missing}; prepare a data set with "
            "recipes/prepare_data.py and pass --data_dir"
        )
    train: list[str] = []
    val: list[str] = []
    skipped = Skipped()
    fingerprint = hashlib.sha256(f"{source.version()} {_HELD_OUT_OF}".encode())
    for path in files:
        relative = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            skipped.add(relative, "unreadable")
            continue
        if not text.strip():
            skipped.add(relative, "empty")
            continue
        digest = hashlib.sha256(relative.encode()).digest()
        (val if digest[0] % _HELD_OUT_OF == 0 else train).append(text)
        fingerprint.update(digest + hashlib.sha256(text.encode()).digest())
    return Corpus(train, val, fingerprint.hexdigest(), skipped)


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's, with an end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )
