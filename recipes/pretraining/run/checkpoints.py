"""Seal checkpoints that are whole, find the newest whole one of a run, and train on as if nothing had happened.

Trainer writes a checkpoint file by file, so a kill leaves a part of one under a final name. The manifest, written last,
tells them apart: a folder without it, or with other files than it lists, is no checkpoint. A run logs what an
uninterrupted one logs, because the manifest also holds Trainer's sums of losses that are not logged yet, which no
checkpoint of Trainer's has; see `PRIVATE_NAMES`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

import mars_hf
from pretraining import files

MANIFEST = "manifest.json"

# The private names of Trainer that `PretrainingTrainer` uses, and what breaks without each; seen in transformers 5.19
# to 5.23. A test compares them with what the class accesses, and with what the installed Trainer has.
PRIVATE_NAMES = {
    "_save_checkpoint": "No checkpoint is sealed, so none is resumed.",
    "_run_epoch": "Nothing below is restored, and resuming a run at its end makes one step more.",
    "_tr_loss": "The first loss logged after a resume lacks the steps before the checkpoint.",
    "_globalstep_last_logged": "The first loss logged after a resume is divided by too few steps.",
    "_total_loss_scalar": "The mean training loss of a resumed run lacks the steps before the checkpoint.",
    "_initial_global_step": "The mean training loss of a resumed run is divided by too few steps.",
}


class Manifest(NamedTuple):
    """What a whole checkpoint says of itself.

    Args:
        run: id of its run; see `resuming`.
        step: optimizer steps made.
        settings: the run's settings; see `resuming`.
        progress: what Trainer needs to go on but does not save.
        files: size and SHA-256 by path within the checkpoint.
    """

    run: str
    step: int
    settings: dict[str, Any]
    progress: dict[str, Any]
    files: dict[str, list[Any]]

    def digest(self) -> str:
        """Return the SHA-256 of the manifest itself."""
        return hashlib.sha256(json.dumps(self._asdict(), sort_keys=True).encode()).hexdigest()


def seal(folder: Path, *, run: str, step: int, settings: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint whose other files are all there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)] for path in paths}
    manifest = Manifest(run, step, settings, progress, entries)
    text = json.dumps({**manifest._asdict(), "sha256": manifest.digest()}, indent=1)
    files.write_text(folder / MANIFEST, f"{text}\n")


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: it is missing or damaged; the message says what is wrong, without the folder's name.
    """
    try:
        content = files.read_json(folder / MANIFEST)
        digest = content.pop("sha256")
        manifest = Manifest(**content)
    except FileNotFoundError:
        raise ValueError(
            f"it has no {MANIFEST}: a run was killed while writing or deleting it, or had --save_only_model, or it is "
            "not of this recipe"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its {MANIFEST} is damaged ({error})") from None
    if manifest.digest() != digest:
        raise ValueError(f"its {MANIFEST} is damaged (its SHA-256 differs)")
    return manifest


def check(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after comparing every file with it.

    Raises:
        ValueError: the checkpoint is not whole; see `read`.
    """
    manifest = read(folder)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size:,} bytes, not the {size:,} that were written")
        if _sha256(path) != digest:
            raise ValueError(f"{name} is not what was written: its SHA-256 differs from the one in {MANIFEST}")
    return manifest


def newest_whole(output: Path, run: str) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a run, or None, and one line for each newer one passed over."""
    passed_over: list[str] = []
    for folder in reversed(checkpoints(output)):
        try:
            if check(folder).run == run:
                return folder, passed_over
            passed_over.append(f"{folder} is passed over: it belongs to another run")
        except ValueError as error:
            passed_over.append(f"{folder} is passed over: {error}")
    return None, passed_over


def rotate(output: Path, limit: int | None, keep: Path | None = None) -> None:
    """Delete all but the newest `limit` sealed checkpoints, and those older ones that were never sealed.

    Args:
        output: the run's folder.
        limit: at least 1; None or 0 deletes no sealed one.
        keep: a checkpoint that stays in any case, and counts.
    """
    sealed = [folder for folder in checkpoints(output) if (folder / MANIFEST).is_file()]
    if not sealed:
        return
    kept = sealed[-limit:] if limit else sealed
    if keep in sealed and keep not in kept:
        kept = [keep, *kept[1:]]
    for folder in checkpoints(output):
        if folder not in kept and _step(folder) < _step(sealed[-1]):
            (folder / MANIFEST).unlink(missing_ok=True)  # first: what a kill leaves of it is no checkpoint
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(output: Path) -> list[Path]:
    """Return the folders named checkpoint-STEP, oldest first."""
    folders = (path for path in output.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdecimal())
    return sorted(folders, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _sha256(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha256.update(piece)
    return sha256.hexdigest()


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Raise ValueError with folder and free bytes for an error while saving: libraries raise several kinds."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's own is a RuntimeError
        free = shutil.disk_usage(folder.parent).free
        raise ValueError(
            f"{folder} cannot be written, with {free:,} bytes free ({error}); checkpoints before it are kept"
        ) from error


class PretrainingTrainer(mars_hf.MarsTrainer):
    """MarsTrainer whose checkpoints are sealed and whose interrupted runs log what an uninterrupted one logs.

    It also runs other optimizers.

    Args:
        *args: see MarsTrainer.
        run: id and settings of the run, which checkpoints carry.
        resumed: manifest of the checkpoint that training goes on from; None for a new run.
        **kwargs: see MarsTrainer.
    """

    requires_mars = False

    def __init__(
        self, *args: Any, run: tuple[str, dict[str, Any]], resumed: Manifest | None = None, **kwargs: Any
    ) -> None:
        """Build the Trainer; see the class."""
        super().__init__(*args, **kwargs)
        self.step_batches: list[Any] = []
        self._run = run
        self._progress = resumed.progress if resumed else {}
        self.earlier_seconds: float = self._progress.get("seconds", 0.0)  # of sessions before
        self._began = time.monotonic()
        self._limit = None
        if not self.args.save_only_model:  # Trainer would delete old checkpoints before the new one is sealed
            self._limit, self.args.save_total_limit = self.args.save_total_limit, None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step from Trainer, and keep them for a callback that looks at them."""
        self.step_batches, num_items = super().get_batch_samples(*args, **kwargs)
        return self.step_batches, num_items

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch; the first goes on from the checkpoint's sums of losses, which Trainer has set to zero."""
        if self._progress:
            sums = self._progress["unlogged_losses"]
            loss = sums[self.args.process_index] if len(sums) == self.args.world_size else sum(sums) / len(sums)
            self._tr_loss = torch.tensor(loss, device=self.args.device)
            self._total_loss_scalar = self._progress["logged_losses"]
            self._globalstep_last_logged = self._progress["last_logged_step"]
            self._initial_global_step, self._progress = 0, {}
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:  # Trainer would make one step more
            self.control.should_training_stop = True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, seal it, and only then delete older ones."""
        output, step = Path(str(self.args.output_dir)), self.state.global_step
        folder = output / f"checkpoint-{step}"
        if self.is_world_process_zero() and folder.exists():  # left by a run that was killed while writing it
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        with saving(folder):
            super()._save_checkpoint(model, trial)
        losses = self.accelerator.gather(self._tr_loss.detach().reshape(1).float())
        self.accelerator.wait_for_everyone()  # all ranks' files are there
        if not self.is_world_process_zero() or self.args.save_only_model:  # which leaves out what a resume needs
            return
        progress = {
            "seconds": self.earlier_seconds + time.monotonic() - self._began,
            "unlogged_losses": losses.tolist(),
            "logged_losses": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
        }
        run, settings = self._run
        with saving(folder):
            seal(folder, run=run, step=step, settings=settings, progress=progress)
        best = self.state.best_model_checkpoint
        rotate(output, self._limit, keep=Path(best) if best else None)
