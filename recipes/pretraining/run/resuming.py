"""Decide what a start continues: nothing, or a checkpoint that is whole and of this run.

A run's folder holds run.json, its id and settings. One process at a time writes there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from pretraining import files
from pretraining.run import checkpoints
from pretraining.run.arguments import RunArguments

RUN = "run.json"
# What a run writes there, for Hub and resume; all of it moves when another run begins.
_WRITTEN = (
    RUN,
    "checkpoint-*",
    "metrics*.json",
    "trainer_state.json",
    "training_args.bin",
    "runs",
    "README.md",
    "mars.json",
    "losses.png",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# A resume takes these from the checkpoint: state, group settings and base rates are loaded.
OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# A resume takes these as given, and says so.
TRAINING = (
    "max_steps",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
    "tf32",
)
_FREE_MODEL = ("dropout", "attn_implementation")


class RunIdentity(NamedTuple):
    """A run, as its folder names it: a random id, and the settings that its weights depend on."""

    id: str
    settings: dict[str, Any]


class ResumePoint(NamedTuple):
    """Where a run starts.

    Args:
        run: id and settings.
        checkpoint: folder to resume from; None starts at step 0.
        manifest: the checkpoint's.
        is_complete: True if there is nothing left to do.
    """

    run: RunIdentity
    checkpoint: Path | None = None
    manifest: checkpoints.Manifest | None = None
    is_complete: bool = False


def settings_of(run: RunArguments, data: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the settings of a run in four sections, of which only `training` may change when it is resumed.

    Args:
        run: parsed arguments.
        data: what identifies the tokens.
        world_size: number of processes.
    """
    model, training = dataclasses.asdict(run.model), run.training
    sections = {
        "model": {key: value for key, value in model.items() if key not in _FREE_MODEL},
        "data": data,
        "optimizer": dataclasses.asdict(run.optimizer) | {key: getattr(training, key) for key in OPTIMIZER},
        "training": {
            **{key: getattr(training, key) for key in TRAINING},
            **{key: model[key] for key in _FREE_MODEL},
            "processes": world_size,
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(sections, default=str))  # as they are read back
    return plain


def read_run(output: Path) -> RunIdentity | None:
    """Return the run of a folder; None if it names none that can be read."""
    try:
        content = files.read_json(output / RUN)
        return RunIdentity(str(content["id"]), dict(content["settings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin(output: Path, settings: dict[str, Any]) -> RunIdentity:
    """Name a new run of a folder, and move what an earlier run wrote there into earlier-1, or the next.

    A kill at any moment leaves one run complete or none: the result moves first, and checkpoints that have not moved
    when the new name is there belong to another run.

    Raises:
        ValueError: the folder holds files that no run made.
    """
    output.mkdir(parents=True, exist_ok=True)
    run = RunIdentity(uuid.uuid4().hex, settings)
    if not (output / RUN).exists():
        # A killed start leaves run.json.partial.
        names = (path.name for path in output.iterdir() if not path.name.startswith((".", RUN)))
        if foreign := sorted(names):
            raise ValueError(
                f"--output_dir {output} holds files that no run of this recipe made: {', '.join(foreign[:3])}; give "
                "another folder"
            )
    if written := sorted({path for pattern in _WRITTEN for path in output.glob(pattern)} - {output / RUN}):
        aside = next(path for number in itertools.count(1) if not (path := output / f"earlier-{number}").exists())
        aside.mkdir()
        print(f"{output}: an earlier run's files are now in {aside}")
        for path in (path for path in written if path.match("metrics*.json")):
            shutil.move(path, aside / path.name)
        shutil.copy2(output / RUN, aside / RUN)
    files.write_json(output / RUN, run._asdict())
    for path in (path for path in written if path.exists()):
        shutil.move(path, aside / path.name)
    return run


def choose(training: Any, output: Path, settings: dict[str, Any]) -> ResumePoint:
    """Return where the run starts.

    Args:
        training: the recipe's arguments.
        output: the run's folder, which this process has locked.
        settings: see `settings_of`.

    Raises:
        ValueError: there is nothing to resume from, the settings are others, or the folder holds a finished run.
    """
    wanted, result = str(training.resume_from_checkpoint or "false"), output / "metrics.json"
    if wanted.lower() == "false":
        if result.exists() and not training.overwrite_output_dir:
            raise ValueError(
                f"{output} holds a finished run; give another --output_dir, or --overwrite_output_dir true to start "
                "again"
            )
        return ResumePoint(begin(output, settings))
    run = read_run(output)
    if wanted.lower() not in ("true", "auto"):
        return _from_path(output, run, Path(wanted), settings)
    if run is None:
        print(f"--resume_from_checkpoint {wanted}: no run in {output}, so a new one begins")
        return ResumePoint(begin(output, settings))
    _compare(run.settings, settings, output)
    if result.exists():
        try:
            steps = int(files.read_json(result)["steps"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{result} is damaged ({error!r:.200}); delete it, and the run resumes") from error
        if steps >= training.max_steps:
            print(f"{output} holds this run, finished after step {steps}; nothing is missing")
            return ResumePoint(run, is_complete=True)
    folder, passed_over = checkpoints.newest_whole(output, run.id)
    for line in passed_over:
        print(line)
    if folder is None:
        message = f"no checkpoint in {output} is whole, of {len(passed_over)}"
        if wanted.lower() == "true":
            raise ValueError(f"--resume_from_checkpoint true: {message}; give auto, or remove the flag, to start again")
        print(f"--resume_from_checkpoint auto: {message}, so a new run begins")
        return ResumePoint(begin(output, settings))
    if result.exists():
        print(f"{output}: the result of the shorter run is now in {result.replace(output / 'metrics-earlier.json')}")
    manifest = checkpoints.read(folder)
    if manifest.step >= training.max_steps:
        print(
            f"{folder} is the end of this run, step {manifest.step} of {training.max_steps}: only its result is written"
        )
    checkpoints.rotate(output, None)  # remains of older ones whose deletion was killed
    return ResumePoint(run, folder, manifest)


def _from_path(output: Path, run: RunIdentity | None, folder: Path, settings: dict[str, Any]) -> ResumePoint:
    if not folder.is_dir():
        raise ValueError(f"--resume_from_checkpoint {folder}: no such folder")
    try:
        manifest = checkpoints.check(folder)
    except ValueError as error:
        raise ValueError(f"--resume_from_checkpoint {folder} cannot be used: {error}") from None
    _compare(manifest.settings, settings, folder)
    if run is None or manifest.run != run.id:  # another run goes on here
        run = begin(output, settings)
    return ResumePoint(run, folder, manifest)


def _compare(saved: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Print which settings of the training have changed; refuse others."""
    changes: dict[str, list[str]] = {"training": [], "others": []}
    for section, values in wanted.items():
        kind = "training" if section == "training" else "others"
        for key, value in values.items():
            if (old := saved.get(section, {}).get(key, value)) != value:
                changes[kind].append(f"{key}={old!s:.80} (now {value!s:.80})")
    if changes["others"]:
        raise ValueError(
            f"{where} was trained with {', '.join(changes['others'])}; resume with the same settings, or start a new "
            "run in another --output_dir"
        )
    if changes["training"]:
        print(f"resuming: {where} was trained with {', '.join(changes['training'])}")
