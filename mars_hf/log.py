"""The one logger, "mars_hf": its lines show by default, as those of transformers do."""

from __future__ import annotations

import logging

import torch.distributed as dist

_logger = logging.getLogger("mars_hf")


def log_below(parent: str) -> None:
    """Log as a child of another package's logger from now on, where that package shows its own lines alone."""
    global _logger
    _logger = logging.getLogger(f"{parent}.mars_hf")


def info(message: str) -> None:
    """Log a line that tells what a run does, on the first rank alone."""
    _log(logging.INFO, message)


def warning(message: str) -> None:
    """Log a line that a user should act on, on the first rank alone.

    Python's `warnings` are no way to a user: accelerate, transformers and DeepSpeed filter them by the module that they
    seem to come from.
    """
    _log(logging.WARNING, message)


def _log(level: int, message: str) -> None:
    is_other_rank = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    if is_other_rank:
        return
    # Now, not at import: the user's own logging decides where there is any.
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        _logger.addHandler(logging.StreamHandler())
    _logger.log(level, message)
