"""The folder of a run: which run it is, and what earlier runs left."""

from __future__ import annotations

import itertools
import json
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.run import report

RUN = "run.json"
# What a run writes there, for Hub and resume; compare_optimizers.py's arguments.json is not among them.
WRITTEN = (
    *(RUN, "metrics*.json", "trainer_state.json", "README.md", "mars.json"),
    *("training_args.bin", "runs"),
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "checkpoint-*"),
)


class Run(NamedTuple):
    """A run, as its folder names it.

    Args:
        id: random; checkpoints carry it too.
        settings: those that its weights depend on; see `identity`.
    """

    id: str
    settings: dict[str, Any]


def read(output: Path) -> Run | None:
    """Return the run of a folder; None if it names none that can be read."""
    try:
        found = json.loads((output / RUN).read_text(encoding="utf-8"))
        return Run(str(found["id"]), dict(found["settings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin(output: Path, settings: dict[str, Any]) -> tuple[Run, Path | None]:
    """Name a new run of a folder, and move all that an earlier run wrote into a folder there: earlier-1 or the next.

    A kill at any moment leaves one run complete or none: the result moves first, and checkpoints that have not moved
    when the new name is there belong to another run.

    Returns:
        The run, and the folder of the earlier one, if any.
    """
    output.mkdir(parents=True, exist_ok=True)
    run = Run(uuid.uuid4().hex, settings)
    found = {path for pattern in WRITTEN for path in output.glob(pattern)}
    if not found:
        report.write(output / RUN, run._asdict())
        return run, None
    aside = next(path for number in itertools.count(1) if not (path := output / f"earlier-{number}").exists())
    aside.mkdir()
    results = {path for path in found if path.match("metrics*.json")}
    for path in sorted(results):
        shutil.move(path, aside / path.name)
    if (output / RUN).is_file():
        shutil.copy2(output / RUN, aside / RUN)
    report.write(output / RUN, run._asdict())
    for path in sorted(found - results - {output / RUN}):
        shutil.move(path, aside / path.name)
    return run, aside
