"""Build GPT-2's tokenizer twice from the same two files: tiktoken's for speed, transformers' to ship with a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import GPT2Tokenizer

# Functions import what takes seconds: prepare_data.py reads its command line first.
NAME = "gpt2"
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 50256
CONTEXT = 1024


class _File(NamedTuple):
    url: str
    sha256: str


# The files of tiktoken_ext.openai_public, so that both tokenizers share one cached copy.
MERGES = _File(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)
VOCABULARY = _File(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)


class VocabularyError(ValueError):
    """Raised when GPT-2's vocabulary is neither cached nor available from the network."""


def build() -> GPT2Tokenizer:
    """Build GPT-2's tokenizer for transformers.

    Raises:
        VocabularyError: its files are not available.
    """
    from transformers import GPT2Tokenizer

    vocabulary = json.loads(_read(VOCABULARY))
    version, *lines = _read(MERGES).decode("utf-8").splitlines()
    assert version.startswith("#version")
    merges: list[Any] = [tuple(line.split()) for line in lines if line]  # transformers declares lines but needs pairs
    return GPT2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=CONTEXT)


def encode(texts: list[str]) -> dict[str, list[Any]]:
    """Tokenize a batch of documents with tiktoken, for `datasets.Dataset.map`.

    Args:
        texts: the documents; special tokens in them are plain text.

    Returns:
        `ids`: each document's token ids, with the end-of-text token appended; `bytes`: its length in UTF-8.
    """
    import numpy as np
    import tiktoken

    encoding = tiktoken.get_encoding(NAME)  # built once per process
    ids = [np.array([*encoding.encode_ordinary(text), END_OF_TEXT_ID], dtype=np.uint16) for text in texts]
    return {"ids": ids, "bytes": [len(text.encode()) for text in texts]}


def _read(file: _File) -> bytes:
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(file.url, file.sha256)
    except (OSError, ValueError) as error:  # no network or cache folder; wrong contents
        raise VocabularyError(
            f"cannot get GPT-2's vocabulary from {file.url} ({type(error).__name__}); run once with a network, or set "
            "TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached the encoding 'gpt2'"
        ) from error
