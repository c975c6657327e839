"""Read and write files whole or not at all, and keep other processes out of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mars_hf.compare.files import locked, write_json, write_text

__all__ = ["locked", "read_json", "write_json", "write_text"]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: it is no JSON, or nested more deeply than Python reads.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
