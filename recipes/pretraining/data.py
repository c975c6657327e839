"""Load a run's token files and tokenizer: prepared ones, or the embedded corpus tokenized on the spot."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pretraining import embedded, token_files


class Data(NamedTuple):
    """A folder of token files, its tokenizer, and the bytes of text per held-out token."""

    directory: Path
    tokenizer: PreTrainedTokenizerBase
    name: str
    bytes_per_token: float


def load(directory: Path) -> Data:
    """Load prepared data.

    Raises:
        FileNotFoundError: the folder holds no prepared data.
    """
    meta = token_files.read_meta(directory)
    tokenizer = AutoTokenizer.from_pretrained(Path(directory) / "tokenizer", trust_remote_code=False)
    val = meta["val"]
    return Data(Path(directory), tokenizer, meta["dataset"], val["bytes"] / val["tokens"])


def prepare_embedded(parent: Path, vocab_size: int) -> Path:
    """Tokenize the embedded corpus into a folder below `parent`, unless it exists; return the folder."""
    corpus = embedded.read_corpus()
    identity = hashlib.sha256(f"{corpus.fingerprint} {vocab_size}".encode()).hexdigest()[:12]
    directory = Path(parent) / f"embedded-{identity}"
    if (directory / "meta.json").is_file():
        return directory
    tokenizer = embedded.train_tokenizer(corpus.train, vocab_size)
    end = tokenizer.eos_token_id
    meta: dict[str, object] = {
        "dataset": "python-standard-library",
        "tokenizer": "byte-level BPE trained on the train split",
        "vocab_size": len(tokenizer),
        "end_of_text": end,
    }
    with token_files.writing(directory, overwrite=True) as partial:
        tokenizer.save_pretrained(partial / "tokenizer")
        for split, documents in zip(token_files.SPLITS, (corpus.train, corpus.val), strict=True):
            file = token_files.TokenFile(partial / f"{split}.bin")
            for start in tqdm(range(0, len(documents), 64), desc=f"tokenizing {split}", unit="batch"):
                texts = documents[start : start + 64]
                encoded = tokenizer.backend_tokenizer.encode_batch(texts)
                arrays = [np.array([*encoding.ids, end]) for encoding in encoded]
                file.write(arrays, sum(len(text.encode()) for text in texts))
            meta[split] = file.close()
        token_files.write_meta(partial, meta)
    return directory
