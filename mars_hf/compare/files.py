"""Write files whole or not at all, and keep other processes out of a folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


@contextlib.contextmanager
def locked(folder: Path, verb: str, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes out of a folder for a block, by the file .NAME.lock beside it.

    Args:
        folder: it need not exist; a link stands for its target.
        verb: what the holder does there, for the message.
        wait: True waits for the holder; False refuses.

    Raises:
        ValueError: no folder can be there, or another process is there and `wait` is False.
        OSError: the lock's path is a symbolic link, which is not followed.
    """
    target = Path(os.path.realpath(folder))
    if not target.name or target.is_symlink():
        raise ValueError(f"{folder} is {'a loop of links' if target.name else 'the root'}; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(target.with_name(f".{target.name}.lock")).acquire(blocking=wait)
    except Timeout:
        raise ValueError(
            f"{folder}: another process {verb} there; wait for it to end, or choose another folder"
        ) from None
    with lock:
        yield


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of what `plain` makes of the content."""
    write_text(path, json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: enums as their values, NaN and infinity as None, other objects as text."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)  # int: bool too
