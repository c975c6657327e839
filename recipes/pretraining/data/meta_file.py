"""Read meta.json, which describes a folder of token files, and check it key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretraining.run.errors import did_you_mean, one_line
from pretraining.run.marked import Marked, read_json

NAME = "meta.json"
SPLITS = ("train", "val")
MAX_VOCAB_SIZE = 2**16
AGAIN = "copy the folder again, or make it again with prepare_data.py --overwrite"

Check = tuple[str, Callable[[Any], bool]]


def _whole(low: int, high: int | None = None) -> Check:
    end = "on" if high is None else f"to {high:,}"
    return (
        f"a whole number from {low} {end}",
        lambda value: type(value) is int and low <= value and (high is None or value <= high),
    )


def _is_hex(value: Any, length: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{length}}}", value) is not None


_TEXT: Check = ("text", lambda value: isinstance(value, str))
_OBJECT: Check = ("an object", lambda value: isinstance(value, dict))
_HASH: Check = ("a SHA-256 of 64 hex digits", lambda value: _is_hex(value, 64))
_PARTS: Check = (
    "a list of 16 hex digits each",
    lambda value: isinstance(value, list) and all(_is_hex(part, 16) for part in value),
)
_FILES: Check = (
    "an object of file names and SHA-256s",
    lambda value: isinstance(value, dict) and all(_is_hex(digest, 64) for digest in value.values()),
)
# Keys that every file has, and those that older versions, or some sources, leave out.
_REQUIRED: Mapping[str, Check] = {
    "dataset": _TEXT,
    "tokenizer": _TEXT,
    "vocab_size": _whole(1, MAX_VOCAB_SIZE),
    "end_of_text": _whole(0, MAX_VOCAB_SIZE - 1),
    "train": _OBJECT,
    "val": _OBJECT,
}
_OPTIONAL: Mapping[str, Check] = {
    "source": _OBJECT,
    "split": _OBJECT,
    "versions": _OBJECT,
    "skipped": _OBJECT,
    "tokenizer_files": _FILES,
}
_SPLIT_REQUIRED: Mapping[str, Check] = {"tokens": _whole(1), "documents": _whole(1), "bytes": _whole(0)}
_SPLIT_OPTIONAL: Mapping[str, Check] = {"sha256": _HASH, "sha256_parts": _PARTS}


def read(directory: Path) -> Marked:
    """Read and check a folder's meta.json.

    Raises:
        ValueError: the folder holds no prepared data, or meta.json is damaged; the message names the key and the line.
    """
    path = Path(directory) / NAME
    if not path.is_file():
        what = (
            "no such folder" if not Path(directory).is_dir() else f"no {NAME} in it: it holds no prepared token files"
        )
        raise ValueError(f"{directory}: {what}; make them with recipes/prepare_data.py, and give their folder")
    meta = read_json(path)
    _check(meta, path, "", _REQUIRED, _OPTIONAL)
    for split in SPLITS:
        _check(meta[split], path, f"{split}: ", _SPLIT_REQUIRED, _SPLIT_OPTIONAL)
    if meta["end_of_text"] >= meta["vocab_size"]:
        raise ValueError(
            f"{path}, line {meta.lines.get('end_of_text')}: end_of_text {meta['end_of_text']} is not below vocab_size "
            f"{meta['vocab_size']}; {AGAIN}"
        )
    return meta


def _check(
    found: Marked, path: Path, section: str, required: Mapping[str, Check], optional: Mapping[str, Check]
) -> None:
    checks = {**required, **optional}
    for key, value in found.items():
        where = f"{path}, line {found.lines.get(key, '?')}: {section}"
        if key not in checks:
            known = ", ".join(checks)
            raise ValueError(f"{where}unknown key {key!r}{did_you_mean(key, checks)}; accepted: {known}; {AGAIN}")
        words, accepts = checks[key]
        if not accepts(value):
            raise ValueError(f"{where}{key}: {one_line(repr(value), 60)} is not {words}; {AGAIN}")
    for key, (words, _) in required.items():
        if key not in found:
            line = f", line {found.line}" if found.line else ""
            raise ValueError(f"{path}{line}: {section}the key {key!r} ({words}) is missing; {AGAIN}")
