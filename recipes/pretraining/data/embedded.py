"""An embedded corpus: text that every installation has, so that the recipes train without a network.

`stdlib` is the Python sources of the interpreter's standard library, on which settings are tuned; `torch-headers` is
the C++ headers of the torch wheel, on which nothing is.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from mars_hf.compare.files import locked
from pretraining.data import token_files

END_OF_TEXT = "<|endoftext|>"
NAMES = {"stdlib": "python-standard-library", "torch-headers": "torch-headers"}  # corpus to data set, in results

# One file in this many is held out, by the hash of its path: the same files on every machine.
_HELD_OUT_OF = 20
# Folders of tables rather than library code, and such as some systems lack (Linux distributions package tests apart).
_NOT_LIBRARY = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
_GENERATED_HEADERS = {"ops", "google"}
_LARGEST_HEADER = 200_000  # bytes; larger ones are generated too


class Corpus(NamedTuple):
    """Documents to train on, held-out documents, and a hash of both."""

    train: list[str]
    val: list[str]
    fingerprint: str


def read_corpus(name: str = "stdlib") -> Corpus:
    """Read an embedded corpus (`stdlib` or `torch-headers`), split by file; empty files are left out.

    Raises:
        ValueError: this installation lacks the sources.
    """
    if name == "stdlib":
        root, version = Path(sysconfig.get_paths()["stdlib"]), str(sys.version_info[:3])
        files = [path for path in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts[:-1])]
    else:
        root, version = Path(torch.__file__).parent / "include", torch.__version__.partition("+")[0]
        headers = (path for path in root.rglob("*.h") if path.stat().st_size <= _LARGEST_HEADER)
        files = [path for path in headers if _GENERATED_HEADERS.isdisjoint(path.relative_to(root).parts[:-1])]
    if len(files) < _HELD_OUT_OF:
        raise ValueError(
            f"the embedded corpus {name} has only {len(files)} files in {root}: this installation lacks them; prepare "
            "a data set with recipes/prepare_data.py and pass --data_dir"
        )
    train: list[str] = []
    val: list[str] = []
    fingerprint = hashlib.sha256(f"{version} {_HELD_OUT_OF}".encode())
    for path in sorted(filter(Path.is_file, files)):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
            (val if digest[0] % _HELD_OUT_OF == 0 else train).append(text)
            fingerprint.update(digest + hashlib.sha256(text.encode()).digest())
    return Corpus(train, val, fingerprint.hexdigest())


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's, with an end-of-text token."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        iter(documents),
        vocab_size,
        min_frequency=0,
        show_progress=sys.stderr.isatty(),
        special_tokens=[END_OF_TEXT],
        length=len(documents),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )


def prepare(parent: Path, vocab_size: int, name: str = "stdlib") -> Path:
    """Tokenize an embedded corpus into a folder below `parent`, unless it is there, whole; return the folder."""
    corpus = read_corpus(name)
    identity = hashlib.sha256(f"{corpus.fingerprint} {vocab_size}".encode()).hexdigest()[:12]
    directory = Path(parent) / f"embedded-{identity}"
    with locked(directory, "prepares", wait=True):
        if directory.exists():
            try:
                return token_files.load(directory).directory
            except ValueError as error:
                print(f"the embedded corpus is made again: {error}")
        with token_files.writing(directory, overwrite=True) as partial:
            tokenizer = train_tokenizer(corpus.train, vocab_size)
            tokenizer.save_pretrained(partial / "tokenizer")
            meta: dict[str, object] = {
                "dataset": NAMES[name],
                "source": {"fingerprint": corpus.fingerprint},
                "tokenizer": "byte-level BPE trained on the train split",
                "vocab_size": len(tokenizer),
                "end_of_text": tokenizer.eos_token_id,
            }
            for split, documents in (("train", corpus.train), ("val", corpus.val)):
                tokens = _tokenize(documents, tokenizer, f"tokenizing {split}")
                meta[split] = token_files.write_tokens(partial / f"{split}.bin", tokens)
            token_files.write_meta(partial, meta)
    return directory


def _tokenize(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, description: str
) -> Iterator[tuple[np.ndarray, int]]:
    for start in tqdm(range(0, len(documents), 64), desc=description, unit="batch"):
        texts = documents[start : start + 64]
        for text, encoding in zip(texts, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
            yield np.array([*encoding.ids, tokenizer.eos_token_id]), len(text.encode())
