"""Tell a run's own folder from a folder with other people's files, which a run would overwrite."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path

MARKER = "run.json"
# Names that a run makes and that hardly anybody else's file has; README.md and weights need the marker.
RUN_FILES = (
    *("run.json*", "checkpoint-*", "earlier-*", "metrics*.json*", "trainer_state.json"),
    *("runs", "arguments.json*"),
)
# What systems leave in any folder.
_NOBODYS = (".DS_Store", "Thumbs.db", "desktop.ini", ".nfs*")


def foreign_files(folder: Path, ours: Iterable[str] = RUN_FILES) -> list[str]:
    """Return the names of a folder's files that no run has made, sorted; empty if a run may write here.

    A folder with the marker of a run is that run's, whatever else is in it: a run writes only its own names. So is a
    folder with the metrics.json of a run from before there was a marker. Elsewhere a name such as README.md or
    model.safetensors is somebody else's.

    Args:
        folder: the output folder; it need not exist.
        ours: names, or shell patterns of names, that a run may have made before it wrote the marker.
    """
    if not folder.is_dir():
        return []
    if (folder / MARKER).is_file() or _is_old_run(folder):
        return []
    accepted = (*ours, *_NOBODYS)
    return sorted(
        path.name for path in folder.iterdir() if not any(fnmatch.fnmatchcase(path.name, name) for name in accepted)
    )


def _is_old_run(folder: Path) -> bool:
    """Return whether the folder holds the metrics of a finished run."""
    try:
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(metrics, dict) and {"optimizer", "bits_per_byte", "tokens_per_second"} <= metrics.keys()
