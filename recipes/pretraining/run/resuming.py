"""Decide what a start continues: nothing, or a checkpoint that is whole and of this run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from pretraining.run import checkpoints, identity, run_folder
from pretraining.run.foreign_files import foreign_files
from pretraining.run.run_folder import Run

# What a complete run has left beside its checkpoints; metrics.json is written last.
_RESULT = ("metrics.json", "trainer_state.json", "README.md", "config.json", "tokenizer_config.json")
T = TypeVar("T")


class Start(NamedTuple):
    """Where a run starts.

    Args:
        run: id and settings.
        checkpoint: folder to resume from; None starts at step 0.
        manifest: the checkpoint's; None if it has none.
        is_complete: True if there is nothing left to do.
    """

    run: Run
    checkpoint: Path | None = None
    manifest: checkpoints.Manifest | None = None
    is_complete: bool = False


def on_main(training: TrainingArguments, work: Callable[[], T]) -> T | None:
    """Call `work` on the main process; what it refuses ends every process, and only the main one says why.

    Returns:
        The result of `work`; None on other processes.
    """
    result, refusal = None, None
    if training.process_index == 0:
        try:
            result = work()
        except ValueError as error:
            refusal = str(error)
    if training.world_size > 1:
        [refused] = broadcast_object_list([refusal is not None])
    else:
        refused = refusal is not None
    if refused:
        raise ValueError(refusal or "the main process refused to start")
    return result


def choose(training: Any, output: Path, settings: dict[str, Any]) -> Start:
    """Return where the run starts; every process gets the main one's choice.

    A new run moves aside what an earlier one left. `--resume_from_checkpoint true` takes the newest whole checkpoint of
    the folder's run, a path takes that one.

    Args:
        training: the recipe's arguments.
        output: the run's folder, which this process holds.
        settings: see `identity.settings_of`.

    Raises:
        ValueError: there is nothing to resume from, the settings are others, or the folder holds a finished run.
    """
    start = on_main(training, lambda: _choose(training, output, settings))
    if training.world_size > 1:
        [start] = broadcast_object_list([start])
    assert start is not None
    return start


def _choose(training: Any, output: Path, settings: dict[str, Any]) -> Start:
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return Start(_begin(training, output, settings))
    if str(wanted).lower() != "true":
        return _from_path(training, output, Path(str(wanted)), settings)
    return _newest(training, output, settings)


def _begin(training: Any, output: Path, settings: dict[str, Any]) -> Run:
    if (output / "metrics.json").exists() and not training.overwrite_output_dir:
        raise ValueError(
            f"{output} holds a finished run; give another --output_dir, or --overwrite_output_dir true to start again"
        )
    foreign = foreign_files(output)
    if foreign:
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise ValueError(
            f"--output_dir {output} holds files that no run of this recipe made: {names}; give another folder"
        )
    run, aside = run_folder.begin(output, settings)
    if aside:
        print(f"{output}: an earlier run's files are now in {aside}; --resume_from_checkpoint true would have gone on")
    return run


def _newest(training: Any, output: Path, settings: dict[str, Any]) -> Start:
    run = run_folder.read(output)
    if run is None:
        there = "has checkpoints, but no run.json that names their run" if checkpoints.checkpoints(output) else "is new"
        raise ValueError(
            f"--resume_from_checkpoint true: no checkpoint in {output}, which {there}; start without it, or give a "
            "checkpoint's path"
        )
    _refuse(run.settings, settings, output)
    if _is_complete(training, output):
        print(f"{output} holds this run, finished after step {training.max_steps}; nothing is missing")
        return Start(run, is_complete=True)
    folder, passed_over = checkpoints.newest_whole(output, run.id)
    for line in passed_over:
        print(line)
    if folder is None:
        raise ValueError(
            f"--resume_from_checkpoint true: no checkpoint in {output} "
            + (f"is whole, of {len(passed_over)}" if passed_over else "(a run saves some with --save_strategy steps)")
            + "; start without it"
        )
    return _resume(training, output, run, folder, checkpoints.read(folder), settings)


def _from_path(training: Any, output: Path, folder: Path, settings: dict[str, Any]) -> Start:
    if not folder.is_dir():
        raise ValueError(f"--resume_from_checkpoint {folder}: no such folder; give true or a checkpoint's path")
    try:
        if (folder / checkpoints.MANIFEST).exists():
            manifest = checkpoints.check(folder)
        else:
            checkpoints.check_resumable(folder)
            manifest = None
    except ValueError as error:
        raise ValueError(f"--resume_from_checkpoint {folder} cannot be used: {error}") from None
    if manifest is None:
        _refuse_another_optimizer(folder, settings["optimizer"]["optimizer"])
        print(f"resuming: {folder} has no {checkpoints.MANIFEST}, so its files and settings are taken as they are")
    else:
        _refuse(manifest.settings, settings, folder)
    run = run_folder.read(output)
    if run is None or manifest is None or manifest.run != run.id:  # another run goes on here
        run = _begin(training, output, settings)
        if folder.parent.resolve() == output.resolve():
            folder = _moved(folder, output)
    return _resume(training, output, run, folder, manifest, settings)


def _moved(folder: Path, output: Path) -> Path:
    """Return where a checkpoint of the output folder is after that was cleared."""
    return (
        folder
        if folder.is_dir()
        else max(output.glob(f"earlier-*/{folder.name}"), key=lambda path: path.stat().st_mtime)
    )


def _resume(
    training: Any,
    output: Path,
    run: Run,
    folder: Path,
    manifest: checkpoints.Manifest | None,
    settings: dict[str, Any],
) -> Start:
    """Say what goes on, and keep the result of a run that was shorter."""
    step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    for line in identity.changed(manifest.settings if manifest else run.settings, settings):
        print(line)
    if step >= training.max_steps:
        print(f"{folder} is the end of this run, step {step} of {training.max_steps}: only its result is written")
    elif (output / "metrics.json").exists():
        kept = output / "metrics-earlier.json"
        (output / "metrics.json").replace(kept)
        print(f"{output}: the result of the shorter run is now in {kept}")
    return Start(run, folder, manifest)


def _is_complete(training: Any, output: Path) -> bool:
    if any(not (output / name).is_file() for name in _RESULT) or not list(output.glob("model*.safetensors")):
        return False
    return TrainerState.load_from_json(str(output / TRAINER_STATE_NAME)).global_step >= training.max_steps


def _refuse(saved: dict[str, Any], given: dict[str, Any], where: Path) -> None:
    line = identity.refused(saved, given, where)
    if line:
        raise ValueError(line)


def _refuse_another_optimizer(folder: Path, wanted: str) -> None:
    """Compare the optimizer of a checkpoint without a manifest, where one file has its groups."""
    path = folder / "optimizer.pt"
    if not path.is_file():
        return
    try:
        groups = torch.load(path, weights_only=True, map_location="cpu", mmap=True)["param_groups"]
        rules = {
            str(group["mars_type"]).replace("-", "_")
            for group in groups
            if group.get("mars_type") not in (None, "adamw")
        }
    except Exception as error:  # whatever a damaged file makes torch raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"--resume_from_checkpoint {folder} cannot be used: damaged optimizer.pt ({reason})") from None
    found = rules or {"adamw"}
    if found != {wanted}:
        raise ValueError(
            f"--resume_from_checkpoint {folder} was trained with {', '.join(sorted(found))}, not {wanted}; give "
            f"--optimizer {sorted(found)[0]}, or start a new run"
        )
