"""Find how many steps each arm of a comparison takes in the time of the baseline's run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from pretraining.compare.comparison import baseline_of
from pretraining.compare.launch import pretrain
from pretraining.compare.presets import Preset, folder_name
from pretraining.run import report
from pretraining.run.arguments import read

# Long enough that the first steps, which compile and warm up, weigh little.
_STEPS, _REPEATS = 60, 3
# Evaluate once, at the end: other strategies would refuse a comparison's --eval_steps.
_SHORT = [
    *("--max_steps", str(_STEPS), "--warmup_steps", "0"),
    *("--eval_strategy", "steps", "--eval_steps", str(_STEPS), "--eval_on_start", "false"),
]


def steps_of(preset: Preset, shared: Sequence[str], output: Path, launcher: Sequence[str]) -> dict[str, list[str]]:
    """Return `--max_steps` of each arm, and `--warmup_steps` in proportion, so that schedules keep their shape.

    Speeds are medians of short runs, arm after arm in turn, so that a machine that slows down slows all of them. They
    run one at a time; the arms' own runs have a number of steps, and may run several at a time. speeds.json keeps the
    ratios to the baseline's speed, and with what arguments they were measured, so that a resumed comparison agrees.

    Args:
        preset: the arms.
        shared: arguments of all runs.
        output: the comparison's folder.
        launcher: command that starts a Python script; empty: this Python.

    Raises:
        RunFailed: a run ended with an error.
        ValueError: the baseline trains by epochs.
    """
    baseline = preset.baseline or baseline_of(list(preset.arms))
    settings = {name: read([*shared, *preset.argv(name)])[0] for name in preset.arms}
    steps = settings[baseline].max_steps
    if steps < 1:
        raise ValueError(f"max_steps {steps}: equal seconds are counted in steps of {baseline}; give --max_steps")
    speeds = _speeds(preset, baseline, shared, output, launcher)
    return {name: _budget(settings[name], max(1, round(steps * speeds[name]))) for name in preset.arms}


def _budget(settings: argparse.Namespace, steps: int) -> list[str]:
    """Return the arguments of a run with other steps; a warmup that is a share of them needs none."""
    words = ["--max_steps", str(steps)]
    if settings.warmup_steps >= 1 and settings.max_steps >= 1:
        words += ["--warmup_steps", str(round(settings.warmup_steps * steps / settings.max_steps))]
    return words


def _speeds(
    preset: Preset, baseline: str, shared: Sequence[str], output: Path, launcher: Sequence[str]
) -> dict[str, float]:
    """Return each arm's speed over the baseline's; those not in speeds.json are measured beside the baseline."""
    file = output / "speeds.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    commands = {name: [*launcher, *shared, *preset.argv(name)] for name in preset.arms}
    there = {name for name in preset.arms if name in known and known[name]["command"] == commands[name]}
    missing = [name for name in preset.arms if name != baseline and not {name, baseline} <= there]
    if missing:
        found = _measure(preset, [baseline, *missing], shared, output, launcher or [sys.executable])
        known |= {name: {"command": commands[name], "speed": found[name] / found[baseline]} for name in found}
        report.write(file, known)
    return {name: 1.0 if name == baseline else known[name]["speed"] for name in preset.arms}


def _measure(
    preset: Preset, names: Sequence[str], shared: Sequence[str], output: Path, launcher: Sequence[str]
) -> dict[str, float]:
    """Return tokens per second of some arms."""
    found: dict[str, list[float]] = {name: [] for name in names}
    rounds = [(repeat, name) for repeat in range(_REPEATS) for name in names]
    for repeat, name in tqdm(rounds, desc="measuring speeds", unit="run"):
        folder = output / "speeds" / f"{folder_name(name)}-{repeat}"
        argv = [*shared, *preset.argv(name), *_SHORT, "--overwrite_output_dir", "true"]
        found[name].append(pretrain(argv, folder, launcher)["tokens_per_second"])
    return {name: statistics.median(speeds) for name, speeds in found.items()}
