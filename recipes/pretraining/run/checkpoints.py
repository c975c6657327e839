"""Seal checkpoints that are whole, and find the newest whole one of a run.

Trainer writes a checkpoint file by file, so a kill leaves a part of one under a final name. The manifest, written last,
tells them apart: a folder without it, or with other files than it lists, is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*")  # one process and DDP, FSDP, DeepSpeed


class Manifest(NamedTuple):
    """What a whole checkpoint says of itself.

    Args:
        run: id of its run; see `run_folder`.
        step: optimizer steps made.
        settings: the run's settings; see `identity`.
        progress: what Trainer needs to go on but does not save; see `trainer`.
        files: size and SHA-256 by path within the checkpoint.
    """

    run: str
    step: int
    settings: dict[str, Any]
    progress: dict[str, Any]
    files: dict[str, list[Any]]


def seal(folder: Path, *, run: str, step: int, settings: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint whose other files are all there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        entries = pool.map(lambda path: [path.stat().st_size, _sha256(path)], paths)
        files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries, strict=True)}
    manifest = Manifest(run, step, settings, progress, files)
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest._asdict(), indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST)


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: it is missing or damaged; the message says what is wrong, without the folder's name.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"it has no {MANIFEST}: a run was killed while writing it, or it is not of this recipe"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"its {MANIFEST} cannot be read ({error})") from None
    kinds = {"run": str, "step": int, "settings": dict, "progress": dict, "files": dict}
    if not isinstance(found, dict) or any(not isinstance(found.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"its {MANIFEST} is not one of this recipe")
    return Manifest(**{key: found[key] for key in kinds})


def check(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after comparing every file with it.

    Raises:
        ValueError: the checkpoint is not whole, or holds no state to resume from; see `read`.
    """
    manifest = read(folder)
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size:,} bytes, not the {size:,} that were written")
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        hashes = pool.map(lambda name: _sha256(folder / name), manifest.files)
        for name, sha256 in zip(manifest.files, hashes, strict=True):
            if sha256 != manifest.files[name][1]:
                raise ValueError(f"{name} is not what was written: its SHA-256 differs from the one in {MANIFEST}")
    check_resumable(folder)
    return manifest


def check_resumable(folder: Path) -> None:
    """Raise ValueError if a checkpoint lacks a file without which Trainer would quietly start something afresh."""
    for names, what in (
        (("trainer_state.json",), "the step and the log"),
        (_OPTIMIZERS, "the optimizer's state"),
        (("scheduler.pt",), "the learning rate schedule's state"),
        (("rng_state*.pth",), "the random state"),
    ):
        if not any(next(folder.glob(name), None) for name in names):
            raise ValueError(f"it lacks {what} ({' or '.join(names)}); --save_only_model leaves that out")


def newest_whole(output: Path, run: str) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a run, or None, and one line for each newer one passed over."""
    passed_over = []
    for folder in reversed(checkpoints(output)):
        try:
            manifest = check(folder)
        except ValueError as error:
            passed_over.append(f"{folder} is passed over: {error}")
            continue
        if manifest.run == run:
            return folder, passed_over
        passed_over.append(f"{folder} is passed over: it belongs to another run")
    return None, passed_over


def rotate(output: Path, limit: int | None, keep: Path | None = None) -> None:
    """Delete all but the newest `limit` sealed checkpoints; those never sealed go too, once a newer one is.

    Args:
        output: the run's folder.
        limit: at least 1; None or 0 deletes nothing.
        keep: a checkpoint that stays in any case, and counts.
    """
    if not limit:
        return
    found = checkpoints(output)
    sealed = [folder for folder in found if (folder / MANIFEST).is_file()]
    kept = set(sealed[-limit:])
    if keep in sealed and keep not in kept:
        kept = {keep, *sealed[len(sealed) - limit + 1 :]}
    for folder in found:
        if folder not in kept and sealed and found.index(folder) < found.index(sealed[-1]):
            (folder / MANIFEST).unlink(missing_ok=True)  # first: what a kill leaves of it is no checkpoint
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(output: Path) -> list[Path]:
    """Return the folders named checkpoint-STEP, oldest first."""
    found = [(int(match[1]), path) for path, match in _named(output) if path.is_dir()]
    return [path for _, path in sorted(found)]


def _named(output: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    if output.is_dir():
        for path in output.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                yield path, match


def _sha256(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha256.update(piece)
    return sha256.hexdigest()
