"""Keep compiled libraries in a folder that nobody else can write, and load only those that are whole.

A library's code runs in every process that loads it. So its folder and its file must belong to this user, nobody else
may write either, and the file's name ends in the SHA-256 of its content. Name and content come into being together, by
one rename. A file that was cut off, or exchanged for another, does not fit its name: it is removed and made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

# Names of the folders that compilers write into, and what shows that the process of one is alive.
WORKPLACE = ".compiling-"
LOCK = "lock"
# Seconds after which a folder whose lock tells nothing is left by a dead process: one without a lock, and one in a file
# system without locks.
UNLOCKED_AGE, UNLOCKABLE_AGE = 60, 86400


class Folder:
    """A folder of libraries that only this user can write, open so that no other can take its place.

    Args:
        path: where it is.
        descriptor: of the open folder; closed by `close`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """See the class."""
        self.path, self._descriptor = path, descriptor

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def load(self, name: str) -> ctypes.CDLL | None:
        """Load the library kept as `name`; None if there is none. One that is not whole is removed."""
        for file in sorted(os.listdir(self._descriptor)):
            if file.startswith(f"{name}_") and file.endswith(".so"):
                try:
                    descriptor, digest = _open_library(file, self._descriptor)
                    if file == f"{name}_{digest}.so":
                        return _load(descriptor, self.path / file)
                    os.close(descriptor)
                    reason = "is damaged"
                except _Untrusted as error:
                    reason = f"is not trusted: {error}"
                except OSError as error:
                    reason = f"cannot be loaded ({error})"
                logger.warning("The compiled library %s %s; it is made again.", self.path / file, reason)
                with contextlib.suppress(OSError):
                    os.unlink(file, dir_fd=self._descriptor)
        return None

    def keep(self, name: str, made: Path) -> ctypes.CDLL:
        """Load a library that a compiler has made, and move it here, so that the next `load(name)` finds it.

        Raises:
            OSError: it cannot be loaded, and is not kept then; or the folder cannot be written.
        """
        made.chmod(0o700)  # compilers leave it to the umask, which may let the group write
        descriptor, digest = _open_library(made)
        library = _load(descriptor, made)
        os.fsync(descriptor)
        os.rename(made, f"{name}_{digest}.so", dst_dir_fd=self._descriptor)
        return library


def existing_folders() -> Iterator[Folder]:
    """Yield the folders that may hold libraries, best first."""
    for path in _places():
        if os.path.exists(path):
            yield from _trusted(path)


def new_folders() -> Iterator[Folder]:
    """Yield folders to make libraries in, best first; the last one goes when the iteration ends.

    Raises:
        OSError: there is no folder for temporary files.
    """
    for path in _places():
        try:
            _make(path)
        except OSError as error:
            _say_once(f"{path} cannot keep compiled libraries: {error}")
            continue
        yield from _trusted(path)
    with workplace(Path(tempfile.gettempdir()), f"{_user_name()}-") as own:
        yield from _trusted(own)


@contextlib.contextmanager
def workplace(parent: Path, prefix: str = WORKPLACE) -> Iterator[Path]:
    """Make a private folder for one compile; remove it afterwards, and those that dead processes have left.

    Args:
        parent: folder in which it is made.
        prefix: how its name begins; names of all workplaces there begin so, and nothing else's.
    """
    _sweep(parent, prefix)
    while True:
        path = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            break
        os.close(lock)  # another process has swept it before it was locked
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the workplaces of dead processes, on whichever machine they ran."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_if_dead(path, time.time() - found.st_mtime)


def _remove_if_dead(path: Path, age: float) -> None:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if age > UNLOCKED_AGE:
            shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dead = True
    except OSError as error:
        dead = error.errno not in (errno.EWOULDBLOCK, errno.EACCES) and age > UNLOCKABLE_AGE
    if dead:
        shutil.rmtree(path, ignore_errors=True)  # locked meanwhile: whoever made it waits, and sees that it is gone
    os.close(lock)


# --- folders ---------------------------------------------------------------------------------------------------------


def _places() -> Iterator[Path]:
    """Yield where libraries may be kept, best first: the user's cache, then the folder for temporary files."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # the XDG specification has others ignored
        yield Path(cache) / "mars_hf"
    elif home := _home():
        yield home / ".cache" / "mars_hf"
    yield Path(tempfile.gettempdir()) / _user_name()


def _home() -> Path | None:
    """Return the user's home; None if it is not known, where expanduser would give a folder named ~."""
    try:
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(home) if os.path.isabs(home) else None


def _user_name() -> str:
    return f"mars_hf-{os.getuid()}"


def _make(path: Path) -> None:
    """Make a folder, with missing ones above it, for this user alone."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)


def _trusted(path: Path) -> Iterator[Folder]:
    """Yield a folder, opened, if nobody else can write it."""
    try:
        if path.is_symlink() and path.lstat().st_uid == os.getuid():
            path = path.resolve()  # this user's own link, such as to a larger disk
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        _say_once(f"{path} cannot keep compiled libraries: {error}")
        return
    with Folder(path, descriptor) as folder:
        try:
            _require_private(descriptor)
        except _Untrusted as error:
            _say_once(
                f"Compiled libraries in {path} are not trusted: {error}. They are kept elsewhere; remove that folder, "
                "or set XDG_CACHE_HOME to one of your own."
            )
            return
        yield folder


class _Untrusted(OSError):
    """Somebody else could have written a file or folder."""


def _require_private(descriptor: int) -> None:
    """Raise _Untrusted unless an open file or folder is this user's, and nobody else's to write."""
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid():
        raise _Untrusted(f"it belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Untrusted(f"its mode {stat.S_IMODE(found.st_mode):o} lets others write it")


@functools.cache
def _say_once(line: str) -> None:
    logger.warning("%s", line)


# --- libraries -------------------------------------------------------------------------------------------------------


def _open_library(file: str | Path, folder: int | None = None) -> tuple[int, str]:
    """Open a library that is this user's alone; return its descriptor and the SHA-256 of its content.

    Raises:
        OSError: it cannot be opened, or is a link.
        _Untrusted: it is somebody else's, or no file.
    """
    # Without O_NONBLOCK a pipe would be waited for.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _Untrusted("it is no file")
        _require_private(descriptor)
        digest = hashlib.sha256()
        with open(descriptor, "rb", closefd=False) as content:
            while block := content.read(1 << 20):
                digest.update(block)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, digest.hexdigest()


def _load(descriptor: int, path: Path) -> ctypes.CDLL:
    """Load an open library: what was hashed, whatever has its name by now.

    The descriptor stays open, because the loader takes two libraries of one name for the same.
    """
    opened = f"/proc/self/fd/{descriptor}"
    try:
        return ctypes.CDLL(opened if os.path.exists(opened) else str(path))
    except OSError:
        os.close(descriptor)
        raise
