"""Load a run's token files and tokenizer: prepared ones, or the embedded corpus tokenized on the spot."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pretraining.data import embedded, meta_file, token_checks, token_files
from pretraining.run import folder_lock


class Data(NamedTuple):
    """A folder of token files, its tokenizer, the bytes of text per held-out token, and what tells it from others."""

    directory: Path
    tokenizer: PreTrainedTokenizerBase
    name: str
    bytes_per_token: float
    identity: dict[str, Any]


def load(directory: Path, *, verify: bool = False) -> Data:
    """Check and load prepared data.

    Args:
        directory: folder of prepare_data.py.
        verify: True reads the token files whole: every id and the hashes.

    Raises:
        ValueError: the folder holds no prepared data, or something in it is not what meta.json describes.
    """
    meta = token_files.read_meta(directory)
    token_checks.check(directory, meta, whole=verify)
    folder = Path(directory) / "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself
        raise token_checks.unreadable_tokenizer(folder, error) from error
    token_checks.check_tokenizer_fits(tokenizer, folder, meta)
    val = meta["val"]
    identity = {"dataset": meta["dataset"], "vocabulary": len(tokenizer)}
    identity |= {f"{split} tokens": meta[split].get("sha256", meta[split]["tokens"]) for split in token_files.SPLITS}
    return Data(Path(directory), tokenizer, meta["dataset"], val["bytes"] / val["tokens"], identity)


def prepare_embedded(parent: Path, vocab_size: int, name: str = "stdlib") -> Path:
    """Tokenize an embedded corpus into a folder below `parent`, unless it exists; return the folder."""
    corpus = embedded.read_corpus(name)
    identity = hashlib.sha256(f"{corpus.fingerprint} {vocab_size}".encode()).hexdigest()[:12]
    directory = Path(parent) / f"embedded-{identity}"
    if _is_whole(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock.held(directory, "prepares the embedded corpus", wait=True):
        if not _is_whole(directory):  # nobody made it while we waited
            _make_embedded(directory, corpus, vocab_size, embedded.SOURCES[name].dataset)
    return directory


def _is_whole(directory: Path) -> bool:
    """Return whether the corpus is there; one that is damaged is named, and made again."""
    if not (directory / meta_file.NAME).is_file():
        return False
    try:
        token_checks.check(directory, meta_file.read(directory))
    except ValueError as mistake:
        print(f"{str(mistake).removesuffix(meta_file.AGAIN)}the embedded corpus is made again")
        return False
    return True


def _make_embedded(directory: Path, corpus: embedded.Corpus, vocab_size: int, dataset: str) -> None:
    tokenizer = embedded.train_tokenizer(corpus.train, vocab_size)
    end = tokenizer.eos_token_id
    meta: dict[str, object] = {
        "dataset": dataset,
        "source": {"fingerprint": corpus.fingerprint},
        "tokenizer": "byte-level BPE trained on the train split",
        "vocab_size": len(tokenizer),
        "end_of_text": end,
        "skipped": corpus.skipped.as_meta(),
    }
    with token_files.writing(directory, overwrite=True) as partial:
        tokenizer.save_pretrained(partial / "tokenizer")
        meta["tokenizer_files"] = token_checks.tokenizer_hashes(partial / "tokenizer")
        for split, documents in zip(token_files.SPLITS, (corpus.train, corpus.val), strict=True):
            file = token_files.TokenFile(partial / f"{split}.bin")
            for start in tqdm(range(0, len(documents), 64), desc=f"tokenizing {split}", unit="batch"):
                texts = documents[start : start + 64]
                encoded = tokenizer.backend_tokenizer.encode_batch(texts)
                arrays = [np.array([*encoding.ids, end]) for encoding in encoded]
                file.write(arrays, sum(len(text.encode()) for text in texts))
            meta[split] = file.close()
        token_files.write_meta(partial, meta)
