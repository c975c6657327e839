"""The one logger, "mars_hf": its lines show by default, as those of transformers do."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

_name = "mars_hf"


def log_below(parent: str) -> None:
    """Log as a child of another package's logger from now on, where that package shows its own lines alone."""
    global _name
    _name = f"{parent}.mars_hf"


def info(message: str) -> None:
    """Log a line that tells what a run does, on the first rank alone."""
    if is_first_rank():
        _log(logging.INFO, message)


def warning(message: str) -> None:
    """Log a line that a user should act on, on the first rank alone.

    Python's `warnings` are no way to a user: accelerate, transformers and DeepSpeed filter them by the module that they
    seem to come from.
    """
    if is_first_rank():
        _log(logging.WARNING, message)


def warning_on_machine(message: str) -> None:
    """Log a line about a machine that a user should act on, on the first rank of each machine."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        _log(logging.WARNING, message)


def is_first_rank() -> bool:
    """Return whether this is the first rank; launchers name the rank before there is a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def _log(level: int, message: str) -> None:
    # All of this now, not at import: the user's own logging decides where there is any, and may be set up later.
    logger = logging.getLogger(_name)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if logger.hasHandlers():
        logger.log(level, message)
        return
    handler = logging.StreamHandler()  # for this line alone: beside the user's later handlers it would repeat theirs
    logger.addHandler(handler)
    try:
        logger.log(level, message)
    finally:
        logger.removeHandler(handler)
