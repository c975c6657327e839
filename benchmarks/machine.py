"""State the machine of a result that several machines may have made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
from pretraining.compare.launch import describe_machine as describe

__all__ = ["describe", "note"]


def note(result: dict[str, Any]) -> None:
    """Add this machine to a result, unless the result names it: a search may go on where another machine stopped."""
    here = describe()
    if here not in (result.setdefault("machine", here), *result.get("further_machines", ())):
        result.setdefault("further_machines", []).append(here)
