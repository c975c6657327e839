"""Find how many steps each arm of a comparison takes in the time of the baseline's run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from pretraining import report
from pretraining.arguments import read
from pretraining.comparison import baseline_of
from pretraining.launch import pretrain
from pretraining.mistakes import Mistake
from pretraining.presets import Preset, folder_name

# Long enough that the first steps, which compile and warm up, weigh little.
_STEPS, _REPEATS = 60, 3
# Evaluate once, at the end: other strategies would refuse a comparison's --eval_steps.
_SHORT = [
    *("--max_steps", str(_STEPS), "--warmup_steps", "0"),
    *("--eval_strategy", "steps", "--eval_steps", str(_STEPS), "--eval_on_start", "false"),
]


def steps_of(preset: Preset, shared: Sequence[str], output: Path, launcher: Sequence[str]) -> dict[str, list[str]]:
    """Return `--max_steps` of each arm; measured once and kept in speeds.json, so that a resumed comparison agrees.

    Speeds are medians of short runs, arm after arm in turn, so that a machine that slows down slows all of them. They
    run one at a time; the arms' own runs have a number of steps, and may run several at a time.

    Args:
        preset: the arms.
        shared: arguments of all runs.
        output: the comparison's folder.
        launcher: command that starts a Python script.

    Raises:
        RunFailed: a run ended with an error.
        Mistake: the baseline trains by epochs.
    """
    baseline = preset.baseline or baseline_of(list(preset.arms))
    steps = read([*shared, *preset.argv(baseline)])[0].max_steps
    if steps < 1:
        raise Mistake(f"max_steps {steps}: equal seconds are counted in steps of {baseline}; give --max_steps")
    file = output / "speeds.json"
    speeds = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else _measure(preset, shared, output, launcher)
    )
    report.write(file, speeds)
    return {name: ["--max_steps", str(max(1, round(steps * speeds[name] / speeds[baseline])))] for name in preset.arms}


def _measure(preset: Preset, shared: Sequence[str], output: Path, launcher: Sequence[str]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in preset.arms}
    rounds = [(repeat, name) for repeat in range(_REPEATS) for name in preset.arms]
    for repeat, name in tqdm(rounds, desc="measuring speeds", unit="run"):
        folder = output / "speeds" / f"{folder_name(name)}-{repeat}"
        argv = [*shared, *preset.argv(name), *_SHORT, "--overwrite_output_dir", "true"]
        found[name].append(pretrain(argv, folder, launcher)["tokens_per_second"])
    return {name: statistics.median(speeds) for name, speeds in found.items()}
