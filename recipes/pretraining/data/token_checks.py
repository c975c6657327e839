"""Check token files against meta.json before the first step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from pretraining.data import token_files
from pretraining.data.meta_file import AGAIN
from pretraining.run.errors import one_line

# Files up to this size are looked at whole, which takes milliseconds; of larger ones, windows spread over them.
_WHOLE_BYTES = 2**25
_WINDOWS = 256
_WINDOW_TOKENS = 2**12
_READ_TOKENS = 2**22


def check(directory: Path, meta: dict[str, Any], *, whole: bool = False) -> None:
    """Check sizes and ids of a folder's token files and the hashes of its tokenizer.

    Sizes count always. Ids count everywhere in small files, and in 256 windows, first and last included, of large ones.

    Args:
        directory: folder with token files.
        meta: its meta.json.
        whole: True also reads every byte, with a progress bar: all ids and the hashes.

    Raises:
        ValueError: something differs; the message names the file and the position.
    """
    for split in token_files.SPLITS:
        path = Path(directory) / f"{split}.bin"
        _check_size(path, meta[split]["tokens"])
        if whole:
            _check_whole(path, meta[split], meta["vocab_size"])
        else:
            _check_windows(path, meta["vocab_size"])
    _check_tokenizer(Path(directory) / "tokenizer", meta.get("tokenizer_files"), whole)


def _check_size(path: Path, tokens: int) -> None:
    expected = tokens * token_files.DTYPE.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; meta.json promises {tokens:,} tokens; {AGAIN}") from None
    if size != expected:
        ends = f"it ends after token {size // token_files.DTYPE.itemsize:,} of {tokens:,}"
        raise ValueError(
            f"{path} has {size:,} bytes, but meta.json promises {expected:,}: "
            f"{ends if size < expected else f'{size - expected:,} bytes too many'}; {AGAIN}"
        )


def _check_windows(path: Path, vocab_size: int) -> None:
    tokens = np.memmap(path, dtype=token_files.DTYPE, mode="r")
    if tokens.nbytes <= _WHOLE_BYTES:
        _check_ids(path, tokens, 0, vocab_size)
        return
    for start in np.linspace(0, len(tokens) - _WINDOW_TOKENS, _WINDOWS, dtype=np.int64).tolist():
        _check_ids(path, tokens[start : start + _WINDOW_TOKENS], start, vocab_size)


def _check_ids(path: Path, tokens: np.ndarray, start: int, vocab_size: int) -> None:
    if vocab_size >= token_files.MAX_VOCAB_SIZE or int(tokens.max()) < vocab_size:
        return
    index = int(np.argmax(tokens >= vocab_size))
    position = start + index
    raise ValueError(
        f"{path}: token {position:,} (byte {position * token_files.DTYPE.itemsize:,}) is {int(tokens[index])}, not "
        f"below the vocabulary's size {vocab_size} in meta.json; {AGAIN}"
    )


def _check_whole(path: Path, entry: dict[str, Any], vocab_size: int) -> None:
    tokens = np.memmap(path, dtype=token_files.DTYPE, mode="r")
    found = token_files.PartedHash()
    with tqdm(total=tokens.nbytes, desc=f"checking {path.name}", unit="B", unit_scale=True) as progress:
        for start in range(0, len(tokens), _READ_TOKENS):
            piece = np.asarray(tokens[start : start + _READ_TOKENS])
            _check_ids(path, piece, start, vocab_size)
            found.update(piece.view(np.uint8).data)
            progress.update(piece.nbytes)
    if "sha256" not in entry:
        print(f"{path}: meta.json has no hash, as an older prepare_data.py wrote it; sizes and ids are right")
        return
    hashes = found.entry()
    if hashes["sha256"] != entry["sha256"]:
        raise ValueError(
            f"{path}{_damaged(entry.get('sha256_parts', []), hashes['sha256_parts'])} differs from what was prepared: "
            f"SHA-256 {hashes['sha256'][:12]}..., but {entry['sha256'][:12]}... in meta.json; {AGAIN}"
        )


def _damaged(expected: list[str], found: list[str]) -> str:
    """Return the first damaged part in words; nothing where meta.json has no parts."""
    pairs = enumerate(zip(expected, found, strict=False))
    part = next((number for number, (before, now) in pairs if before != now), None)
    if part is None:
        return ""
    start = part * token_files.PART_BYTES
    return f", bytes {start:,} to {start + token_files.PART_BYTES - 1:,},"


def _check_tokenizer(folder: Path, hashes: dict[str, str] | None, say: bool) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; {AGAIN}")
    if hashes is None:
        if say:
            print(f"{folder}: meta.json has no hashes of its files, as an older prepare_data.py wrote it")
        return
    for name, expected in hashes.items():
        path = folder / name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; {AGAIN}") from None
        if found != expected:
            raise ValueError(
                f"{path} differs from what was prepared: SHA-256 {found[:12]}..., but {expected[:12]}... in meta.json; "
                f"{AGAIN}"
            )


def tokenizer_hashes(folder: Path) -> dict[str, str]:
    """Return the files of a tokenizer's folder with their SHA-256, for meta.json."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def check_tokenizer_fits(tokenizer: Any, folder: Path, meta: dict[str, Any]) -> None:
    """Raise ValueError if a tokenizer is not the one that meta.json describes."""
    if len(tokenizer) != meta["vocab_size"]:
        raise ValueError(
            f"{folder} has {len(tokenizer):,} tokens, but vocab_size in meta.json is {meta['vocab_size']:,}; {AGAIN}"
        )
    if tokenizer.eos_token_id != meta["end_of_text"]:
        raise ValueError(
            f"{folder}: the end of text is {tokenizer.eos_token_id}, but end_of_text in meta.json is "
            f"{meta['end_of_text']}; {AGAIN}"
        )


def unreadable_tokenizer(folder: Path, error: Exception) -> ValueError:
    """Return the mistake for a tokenizer that cannot be loaded."""
    return ValueError(f"{folder}: transformers cannot load this tokenizer ({one_line(error, 150)}); {AGAIN}")
