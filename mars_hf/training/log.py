"""The one logger of training, "mars_hf": its lines show by default, as those of transformers do."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("mars_hf")


def info(message: str) -> None:
    """Log a line that tells what a run does."""
    _log(logging.INFO, message)


def warning(message: str) -> None:
    """Log a line that a user should act on."""
    _log(logging.WARNING, message)


def _log(level: int, message: str) -> None:
    # Now, not at import: the user's own logging decides where there is any.
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    if not _LOGGER.hasHandlers():
        _LOGGER.addHandler(logging.StreamHandler())
    _LOGGER.log(level, message)
