"""Read and write token files: `train.bin`, `val.bin` (uint16, as nanoGPT reads them), `meta.json`, the tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from pretraining.data import meta_file
from pretraining.data.meta_file import MAX_VOCAB_SIZE, SPLITS
from pretraining.data.meta_file import read as read_meta

__all__ = ["DTYPE", "MAX_VOCAB_SIZE", "SPLITS", "TokenDataset", "TokenFile", "read_meta", "write_meta", "writing"]
DTYPE = np.dtype("<u2")
PART_BYTES = 2**26  # of a file that has a hash of its own, so that a damaged place can be named
_PART_DIGITS = 16


class TokenFile:
    """Write one split, one token array after the other, and count tokens, documents and bytes."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Args:
            path: path of the file.
        """
        self._file = path.open("wb")
        self._hash = PartedHash()
        self.tokens = 0
        self.documents = 0
        self.bytes = 0

    def write(self, documents: Iterable[np.ndarray], text_bytes: int) -> None:
        """Append documents, each an array of token ids that ends with the end-of-text token.

        Args:
            documents: token ids below 2**16.
            text_bytes: length of the documents' text in UTF-8, without end-of-text tokens.
        """
        arrays = [document.astype(DTYPE) for document in documents]
        if not arrays:
            return
        data = np.concatenate(arrays).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(data) // DTYPE.itemsize
        self.documents += len(arrays)
        self.bytes += text_bytes

    def close(self) -> dict[str, Any]:
        """Flush to disk and return the split's entry of meta.json."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            **self._hash.entry(),
        }


class PartedHash:
    """SHA-256 of a file, and of each of its parts of `PART_BYTES` bytes."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._whole = hashlib.sha256()
        self._part = hashlib.sha256()
        self._in_part = 0
        self._parts: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._whole.update(data)
        view = memoryview(data)
        while len(view):
            piece = view[: PART_BYTES - self._in_part]
            self._part.update(piece)
            self._in_part += len(piece)
            view = view[len(piece) :]
            if self._in_part == PART_BYTES:
                self._end_part()

    def entry(self) -> dict[str, Any]:
        """Return the hashes as keys of meta.json; no bytes may follow."""
        if self._in_part:
            self._end_part()
        return {"sha256": self._whole.hexdigest(), "sha256_parts": self._parts}

    def _end_part(self) -> None:
        self._parts.append(self._part.hexdigest()[:_PART_DIGITS])
        self._part = hashlib.sha256()
        self._in_part = 0


@contextmanager
def writing(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to write token files into; it becomes `directory` once the block succeeds.

    Args:
        directory: the final folder.
        overwrite: True replaces an existing folder, which stays until the new one is complete.

    Raises:
        ValueError: the folder exists, is not empty, and `overwrite` is False.
    """
    directory = Path(directory).absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    for stale in _stale(directory, "replaced"):
        if not directory.exists():  # killed between the two renames below
            stale.rename(directory)
            break
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise ValueError(f"{directory} exists already; choose another folder, or pass --overwrite to replace it")
    for stale in [*_stale(directory, "partial"), *_stale(directory, "replaced")]:
        shutil.rmtree(stale, ignore_errors=True)
    partial = beside(directory, "partial", os.getpid())
    replaced = beside(directory, "replaced", os.getpid())
    partial.mkdir()
    try:
        yield partial
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
    except BaseException:
        if replaced.exists() and not directory.exists():
            replaced.rename(directory)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def beside(directory: Path, kind: str, pid: int | str) -> Path:
    """Return the path of a process's unfinished (`partial`) or replaced folder on this machine."""
    return directory.with_name(f"{directory.name}.{kind}-{platform.node() or 'localhost'}-{pid}")


def _stale(directory: Path, kind: str) -> list[Path]:
    """Return folders beside `directory` that killed processes of this machine left, newest first."""
    prefix = beside(directory, kind, "").name
    pids = {path: path.name[len(prefix) :] for path in directory.parent.iterdir() if path.name.startswith(prefix)}
    found = [path for path, pid in pids.items() if pid.isdecimal() and not _is_running(int(pid))]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _is_running(pid: int) -> bool:
    """Return whether another process has this id; our own id is a leftover, since containers reuse ids."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json; call it last, since this file marks the folder as complete."""
    (directory / meta_file.NAME).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """Cut a split into consecutive blocks; labels are the inputs (the model shifts them), without the first."""

    def __init__(self, directory: Path, split: str, block_size: int, max_blocks: int | None = None) -> None:
        """Map the file into memory.

        Args:
            directory: folder with token files.
            split: `train` or `val`.
            block_size: tokens per block; an incomplete last block is dropped.
            max_blocks: use only the first blocks; None uses all.

        Raises:
            ValueError: the split does not fill one block.
        """
        self.tokens = np.memmap(Path(directory) / f"{split}.bin", dtype=DTYPE, mode="r")
        self.block_size = block_size
        blocks = len(self.tokens) // block_size
        if blocks == 0:
            raise ValueError(
                f"{split}.bin in {directory} has {len(self.tokens)} tokens, less than one block of {block_size}; "
                "lower --block_size or prepare more text"
            )
        self.blocks = blocks if max_blocks is None else min(blocks, max_blocks)

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.tokens[index * self.block_size : (index + 1) * self.block_size]
        ids = torch.from_numpy(block.astype(np.int64))
        labels = ids.clone()
        # Nothing predicts the first token. Trainer divides the loss by the number of valid labels, so a label there
        # would understate every loss by one part in block_size.
        labels[0] = -100
        return {"input_ids": ids, "labels": labels}
