"""Keep a second process out of a folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def held(directory: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder's lock, the file DIRECTORY.lock beside it, for a block.

    The system releases the lock of a process that was killed, so that the file it leaves locks nobody out. Systems and
    file systems without locks get none.

    Args:
        directory: the folder; it need not exist, but its parent must.
        what: what the holder does, for the message: "prepares data".
        wait: True waits for the holder; False refuses.

    Raises:
        ValueError: another process holds the lock, and `wait` is False.
    """
    path = directory.with_name(f"{directory.name}.lock")
    file = _acquire(path, wait)
    if file is None:
        raise ValueError(f"{directory}: {_holder(path)} {what} there; wait for it to end, or choose another folder")
    try:
        yield
    finally:
        if file >= 0:
            path.unlink(missing_ok=True)  # before the lock goes, so that nobody else's file is deleted
            os.close(file)


def _acquire(path: Path, wait: bool) -> int | None:
    """Return the locked file's descriptor, None if another process holds it, -1 where there are no locks."""
    if fcntl is None:
        return -1
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:  # a file system without locks
            os.close(file)
            path.unlink(missing_ok=True)
            return -1
        if _is_at(path, file):
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {platform.node() or 'localhost'}\n".encode())
            return file
        os.close(file)  # its holder deleted it while we waited


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"
