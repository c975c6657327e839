"""GPT-2's tokenizer twice, from the same two files of tiktoken's cache: tiktoken's for speed, transformers' to ship."""

from __future__ import annotations

import json
from typing import Any

from tiktoken.load import read_file_cached
from transformers import GPT2Tokenizer

NAME = "gpt2"
END_OF_TEXT_ID = 50256
CONTEXT = 1024

# As in tiktoken_ext.openai_public, so that both tokenizers share one cached copy.
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def build() -> GPT2Tokenizer:
    """Build GPT-2's tokenizer for transformers.

    Raises:
        ValueError: its files are neither cached nor available from the network.
    """
    vocabulary = json.loads(_read("encoder.json"))
    _, *lines = _read("vocab.bpe").decode("utf-8").splitlines()  # the first names the version
    merges: list[Any] = [tuple(line.split()) for line in lines if line]  # transformers declares lines but needs pairs
    return GPT2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=CONTEXT)


def _read(name: str) -> bytes:
    try:
        return read_file_cached(URL + name, SHA256[name])
    except (OSError, ValueError) as error:  # no network or cache folder; wrong contents
        raise ValueError(
            f"cannot get GPT-2's vocabulary from {URL}{name} ({type(error).__name__}); run once with a network, or "
            f"set TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached the encoding {NAME!r}"
        ) from error
