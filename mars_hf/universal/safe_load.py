"""Read what torch.save wrote without trusting it: a file may hold any class, but only known ones are made.

Every file that mars_hf reads with torch.load is read here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from mars_hf import _compat


def read(file: Path) -> Any:
    """Read a file without running anything in it; tensors stay on disk until they are used.

    Besides tensors and plain values it may hold `_compat.CHECKPOINT_CLASSES`, which need DeepSpeed, and what the user
    has given to torch.serialization.add_safe_globals.

    Raises:
        ValueError: the file is missing, damaged, or holds any other class or function; the message names both.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing, or is no file")
    if not file.stat().st_size:
        raise ValueError(f"{file} is empty; copy it again, or take another checkpoint")
    # What a hostile or damaged file can raise, no list covers.
    try:
        found = get_unsafe_globals_in_checkpoint(str(file))
    except Exception as error:
        raise ValueError(_damaged(file, error)) from None
    _refuse_unknown(file, found)
    with safe_globals(_classes(file, found)):
        try:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ValueError(_damaged(file, error)) from None


def read_dict(file: Path) -> dict[Any, Any]:
    """Read a file that should hold a dict, as `read` does; ValueError if it holds anything else."""
    content = read(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__} and should hold a dict; is it a checkpoint?")
    return content


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Hold every torch.load inside, of any package, to what `read` takes; needs DeepSpeed.

    PyTorch reads two environment variables for this; both get their old values back.
    """
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[names[0]] = "1"
    try:
        with safe_globals([kind for kind in _compat.checkpoint_classes() if kind not in get_safe_globals()]):
            yield
    finally:
        del os.environ[names[0]]
        os.environ.update(before)


@contextlib.contextmanager
def known_layout(file: Path) -> Iterator[None]:
    """Turn what a surprising content raises into a ValueError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{file} is not laid out as expected ({type(error).__name__}: {error}); it may be of another version of "
            "DeepSpeed, or not a checkpoint"
        ) from error


def is_plain(value: Any) -> bool:
    """Tell whether a value is a dense tensor in memory."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _refuse_unknown(file: Path, found: Collection[str]) -> None:
    known = _compat.CHECKPOINT_CLASSES
    foreign = sorted(set(found) - set(known))
    if foreign:
        names = ", ".join(name.rpartition(".")[2] for name in known)
        raise ValueError(
            f"{file} holds {foreign[0]}, which may run code when it is read; accepted: tensors, plain values and "
            f"DeepSpeed's {names}. If you trust the file and that name, give it to "
            "torch.serialization.add_safe_globals first"
        )


def _classes(file: Path, names: Collection[str]) -> list[Any]:
    try:
        return _compat.checkpoint_classes(names)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{file} holds classes of DeepSpeed, which cannot be imported ({error}); pip install 'mars_hf[deepspeed]'"
        ) from None


def _damaged(file: Path, error: Exception) -> str:
    # torch adds advice to read the file without protection; what it raised first says what was found.
    said = str(error.__context__ or error).strip() or type(error).__name__
    return (
        f"{file} is damaged, or not a file that torch.save writes ({said.splitlines()[0][:150]}); copy it again, or "
        "take another checkpoint"
    )
