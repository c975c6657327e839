"""Run the recipe in processes of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

import mars_hf
from pretraining import files
from pretraining.compare.presets import Preset, words
from pretraining.run import arguments, resuming

SCRIPT = Path(__file__).resolve().parents[2] / "pretrain_gpt2.py"
# The messages of mars_hf.NonFiniteError and of the fine-tuning recipes; launchers do not hand on exit codes.
DIVERGED = re.compile(r"\d+ steps in a row with a non-finite loss or gradient; |the held-out loss is non-finite; ")
# Long enough that the first steps, which compile and warm up, weigh little.
_SPEED_STEPS, _SPEED_RUNS = 60, 3
_SPEED_SETTINGS = (
    f"--max_steps {_SPEED_STEPS} --warmup_steps 0 --eval_on_start false "
    f"--eval_strategy steps --eval_steps {_SPEED_STEPS} --overwrite_output_dir true"
).split()


class Diverged(Exception):
    """Raised when a run ends because its loss or gradients stayed non-finite."""


def run_recipe(
    argv: Sequence[str], output: Path, launcher: Sequence[str] = (), script: Path | None = None
) -> dict[str, Any]:
    """Run a recipe, append what it prints to OUTPUT.log, and return its metrics.json.

    Args:
        argv: the recipe's arguments, without --output_dir.
        output: the recipe's output folder.
        launcher: command that starts a Python script; empty: this Python.
        script: None: pretrain_gpt2.py.

    Raises:
        Diverged: its loss or gradients stayed non-finite.
        ValueError: the run was refused, failed or was stopped.
    """
    script = script or SCRIPT
    command = [*(launcher or [sys.executable]), str(script), *argv, "--output_dir", str(output)]
    log = output.with_name(f"{output.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        begin = file.tell()  # an earlier attempt may have logged another end
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if not code and (output / "metrics.json").is_file():
        return metrics_of(output)
    if not code:
        raise ValueError(f"the run in {output} was stopped before its end; start again to go on from where it is")
    printed = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    # The last line of the recipe; a launcher adds reports of its own.
    messages = re.findall(rf"^{re.escape(script.name)}: (.+)$", re.sub(r"\r\n?", "\n", printed), re.MULTILINE)
    if not messages:
        raise ValueError(f"the run in {output} ended with code {code}; see {log}")
    raise (Diverged if DIVERGED.match(messages[-1]) else ValueError)(f"{output}: {messages[-1]}")


def curve_of(output: Path) -> tuple[tuple[int, float], ...]:
    """Return step and held-out loss of every evaluation of a finished run, in order."""
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return tuple((row["step"], row["eval_loss"]) for row in history if "eval_loss" in row)


def metrics_of(output: Path) -> dict[str, Any]:
    """Return a finished run's metrics.json; a held-out loss that is not finite is NaN."""
    metrics: dict[str, Any] = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    return {**metrics, "eval_loss": math.nan if metrics["eval_loss"] is None else metrics["eval_loss"]}


def settings_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return all settings of a run by name, those of its config too.

    Raises:
        ValueError: the recipe would refuse the arguments.
    """
    values, _ = arguments.read(argv)
    kinds = (arguments.ModelArguments, arguments.DataArguments, arguments.OptimizerArguments)
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    settings = {name: getattr(values, name) for name in (*names, *resuming.OPTIMIZER, *resuming.TRAINING)}
    return dict(json.loads(json.dumps(settings, default=str)))


def equal_seconds(preset: Preset, shared: Sequence[str], output: Path, launcher: Sequence[str]) -> dict[str, list[str]]:
    """Return `--max_steps` with which each arm trains for as long as the baseline, and `--warmup_steps` in proportion.

    Speeds are medians of short runs, arm after arm in turn, so that a machine that slows down slows all of them.
    speeds.json keeps them, so that a resumed comparison agrees.
    """
    argv = {arm: [*shared, *words(preset.arms[arm])] for arm in preset.arms}
    settings = {arm: settings_of(flags) for arm, flags in argv.items()}
    steps = settings[preset.baseline]["max_steps"]
    file, commands = output / "speeds.json", {arm: [*launcher, *flags] for arm, flags in argv.items()}
    saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if saved.get("commands") != commands:
        measured: dict[str, list[float]] = {arm: [] for arm in preset.arms}
        for repeat, arm in tqdm([(repeat, arm) for repeat in range(_SPEED_RUNS) for arm in measured], "speeds"):
            folder = output / "speeds" / f"{folder_name(arm)}-{repeat}"
            measured[arm].append(run_recipe([*argv[arm], *_SPEED_SETTINGS], folder, launcher)["tokens_per_second"])
        saved = {"commands": commands, "speeds": {arm: statistics.median(runs) for arm, runs in measured.items()}}
        files.write_json(file, saved)
    budgets = {}
    for arm, speed in saved["speeds"].items():
        arm_steps = max(1, round(steps * speed / saved["speeds"][preset.baseline]))
        budgets[arm] = ["--max_steps", str(arm_steps)]
        warmup, planned = settings[arm]["warmup_steps"], settings[arm]["max_steps"]
        if warmup >= 1:  # else it is a share of the steps
            budgets[arm] += ["--warmup_steps", str(round(warmup * arm_steps / planned))]
    return budgets


def folder_name(arm: str) -> str:
    """Return the name of the folder for an arm's runs."""
    return arm.replace(" ", "_").replace("/", "_")


def describe_machine() -> dict[str, str | int]:
    """Return processor, cores, accelerator and versions, for results."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next((line.partition(": ")[2] for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mars_hf": mars_hf.__version__,
    }
