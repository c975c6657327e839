"""Read the embedded corpus: the Python sources of the interpreter's standard library.

Every machine has this text, so the recipe trains without a network and ships no data.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pretraining.mistakes import Mistake
from pretraining.skipped import Skipped

END_OF_TEXT = "<|endoftext|>"

# Tables, not library code, or missing on some systems (Linux distributions package the tests separately).
_LEFT_OUT = {
    "encodings",
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
}
# One file in this many is held out, by the hash of its path: the same files on every machine.
_HELD_OUT_OF = 20


class Corpus(NamedTuple):
    """Documents to train on, held-out documents, a hash of both, and what was left out."""

    train: list[str]
    val: list[str]
    fingerprint: str
    skipped: Skipped


def read_corpus() -> Corpus:
    """Read the standard library's sources, split by file.

    Raises:
        Mistake: this interpreter ships without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1]))
    if len(files) < _HELD_OUT_OF:
        raise Mistake(
            f"only {len(files)} Python sources under {root}: this interpreter has no standard library to train on; "
            "prepare a data set with recipes/prepare_data.py and pass --data_dir"
        )
    train: list[str] = []
    val: list[str] = []
    skipped = Skipped()
    fingerprint = hashlib.sha256(f"{sys.version_info[:3]} {_HELD_OUT_OF}".encode())
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            skipped.add(name, "unreadable")
            continue
        if not text.strip():
            skipped.add(name, "empty")
            continue
        digest = hashlib.sha256(name.encode()).digest()
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
