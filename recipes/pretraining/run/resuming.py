"""Decide what a start continues: nothing, or the newest whole checkpoint of the run in its folder.

A run's folder holds run.json, the settings that its weights depend on. One process at a time writes there. Trainer
writes a checkpoint file by file, trainer_state.json last, and deletes older ones after that; so a checkpoint whose
trainer_state.json can be read is whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerState

import mars_hf
from mars_hf.compare.files import write_json
from pretraining.run.arguments import RunArguments

RUN, STATE, RESULT = "run.json", "trainer_state.json", "metrics.json"
# A resume takes the optimizer's state, group settings and base rates from the checkpoint, so these must be the same.
_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# Of the model, and free to change.
_FREE = ("dropout", "attn_implementation")


class PretrainingTrainer(mars_hf.MarsTrainer):
    """MarsTrainer that runs other optimizers, too, makes no step after a run's end, and saves once all ranks have."""

    requires_mars = False

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:  # Trainer would make one step more
            self.control.should_training_stop = True

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # what all write is there before trainer_state.json


class ResumePoint(NamedTuple):
    """Where a run starts: the checkpoint and its step, None and 0 for a new run; whether nothing is left to do."""

    checkpoint: Path | None = None
    step: int = 0
    is_complete: bool = False


def settings_of(run: RunArguments, data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must stay the same; `data` is what identifies the tokens."""
    settings = {key: value for key, value in dataclasses.asdict(run.model).items() if key not in _FREE}
    settings |= data | dataclasses.asdict(run.optimizer) | {key: getattr(run.training, key) for key in _OPTIMIZER}
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))  # as they are read back
    return plain


def begin(output: Path, settings: dict[str, Any]) -> ResumePoint:
    """Begin a run; an earlier one's folder gets a name with a number at the end.

    Raises:
        ValueError: the folder holds files that no run made.
    """
    # A killed start leaves run.json.partial.
    names = sorted(path.name for path in output.glob("*") if not path.name.startswith((".", f"{RUN}.")))
    if names and RUN not in names:
        raise ValueError(
            f"--output_dir {output} holds files that no run of this recipe made: {', '.join(names[:3])}; give another "
            "folder"
        )
    if names:
        numbered = (output.with_name(f"{output.name}-earlier-{number}") for number in itertools.count(1))
        aside = next(path for path in numbered if not path.exists())
        output.rename(aside)
        print(f"the earlier run in {output} is now in {aside}")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / RUN, settings)
    return ResumePoint()


def choose(training: Any, output: Path, settings: dict[str, Any]) -> ResumePoint:
    """Return where the run starts.

    Args:
        training: the recipe's arguments.
        output: the run's folder, which this process has locked.
        settings: see `settings_of`.

    Raises:
        ValueError: there is no such checkpoint, or the settings are others.
    """
    wanted = str(training.resume_from_checkpoint or "false")
    if wanted.lower() == "false":
        return begin(output, settings)
    if wanted.lower() != "true":
        folder = Path(wanted)
        if not (folder / STATE).is_file():
            raise ValueError(f"--resume_from_checkpoint {folder}: no checkpoint there; give its folder, or true")
        _compare(folder.parent, settings)
        if folder.parent.resolve() != output.resolve():
            begin(output, settings)
        return ResumePoint(folder, _step_of(folder))
    if not (output / RUN).is_file():
        print(f"--resume_from_checkpoint true: no run in {output}, so a new one begins")
        return begin(output, settings)
    _compare(output, settings)
    if (output / RESULT).is_file():
        steps = json.loads((output / RESULT).read_text(encoding="utf-8"))["steps"]
        if steps >= training.max_steps:
            print(f"{output} holds this run, finished after step {steps}; nothing is missing")
            return ResumePoint(is_complete=True)
    checkpoint = newest_whole(output)
    if checkpoint is None:
        print(f"--resume_from_checkpoint true: no checkpoint in {output} is whole, so a new run begins")
        return begin(output, settings)
    return ResumePoint(checkpoint, _step_of(checkpoint))


def newest_whole(output: Path) -> Path | None:
    """Return the newest checkpoint of a run that is whole, and print which are passed over; None if none is."""
    folders = [path for path in output.glob("checkpoint-*") if path.name[11:].isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name[11:]), reverse=True):
        try:
            _step_of(folder)
            return folder
        except (OSError, ValueError, TypeError) as error:
            print(f"{folder} is passed over: a run was killed while writing it ({error})")
    return None


def _step_of(checkpoint: Path) -> int:
    return TrainerState.load_from_json(str(checkpoint / STATE)).global_step


def _compare(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise ValueError if the run in a folder had other settings."""
    saved = json.loads((folder / RUN).read_text(encoding="utf-8"))
    changes = [
        f"{key}={saved[key]!s:.80} (now {value!s:.80})" for key, value in wanted.items() if saved.get(key) != value
    ]
    if changes:
        raise ValueError(
            f"{folder} was trained with {', '.join(changes)}; resume with the same settings, or start a new run in "
            "another --output_dir"
        )
