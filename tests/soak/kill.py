#!/usr/bin/env python
"""Kill runs of the recipe, resume them, and compare each to the bit with a run that nobody touched.

    python tests/soak/kill.py --runs 40 --output_file kills.json

A trial starts a small run, kills it once or twice, resumes it with --resume_from_checkpoint true (or starts over if
there is no checkpoint yet), and lets it finish. Each kill has an aim:

    anytime     SIGKILL to all of its processes, at a random time
    checkpoint  the same, up to 60 ms after a checkpoint's folder appears: while it is written
    result      the same, up to 600 ms after the last checkpoint is sealed: while the result is written
    launcher    SIGKILL to `accelerate launch` alone, at a random time; its worker must end by itself
    term        SIGTERM, at a random time: the run saves and ends

Weights, results and log lines (all but their times) must be those of the run that was not killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "pretrain_gpt2.py"
AIMS = ("anytime", "checkpoint", "result", "launcher", "term")
OPTIMIZERS = {
    "mars_adamw": ["--optimizer", "mars_adamw"],
    "exact": ["--optimizer", "mars_adamw", "--is_approx", "false"],
    "mars_m": ["--optimizer", "mars_m", "--save_total_limit", "1"],
    "adamw": ["--optimizer", "adamw", "--save_total_limit", "2"],
}
STEPS = 40
SMALL = [
    *("--n_layer", "1", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--embedded_vocab_size", "512"),
    *("--max_steps", str(STEPS), "--warmup_steps", "2", "--logging_steps", "3", "--eval_steps", "10"),
    *("--max_eval_blocks", "8", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"),
    *("--sample_tokens", "0", "--cpu_threads", "1", "--disable_tqdm", "true", "--dropout", "0.1"),
    *("--save_strategy", "steps", "--save_steps", "4"),
]
TIMED = ("runtime", "per_second")
_PATIENCE = 600.0


class Trial:
    """One run, killed and resumed.

    Args:
        folder: where it works.
        number: seed of its aims and times.
        data: folder of the token files.
        reference: the untouched run of the same optimizer.
        seconds: what a start of that took.
    """

    def __init__(self, folder: Path, number: int, data: Path, reference: Path, seconds: float) -> None:
        self.output = folder / "run"
        self.random = random.Random(number)
        self.optimizer = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
        self.aims = [AIMS[number % len(AIMS)], *self.random.choices(AIMS, k=self.random.randint(0, 1))]
        self.log = folder / "log.txt"
        self._data, self._reference, self._seconds = data, reference, seconds
        self.starts = 0

    def run(self) -> dict[str, Any]:
        """Return what happened, with `verdict`: `to the bit`, or what differs."""
        for aim in self.aims:
            if self._start(aim):
                break  # too fast for that kill
        for _ in range(3):
            if self._start(None):
                break
        passed_over = self.log.read_text().count(" is passed over: ")
        row = {"optimizer": self.optimizer, "aims": self.aims, "starts": self.starts, "passed_over": passed_over}
        return {**row, "verdict": difference(self._reference, self.output) or "to the bit"}

    def _start(self, aim: str | None) -> bool:
        """Start or resume the run, kill it as told, and return whether it finished."""
        self.starts += 1
        argv = [*SMALL, *OPTIMIZERS[self.optimizer], "--data_dir", str(self._data), "--output_dir", str(self.output)]
        if (self.output / "run.json").is_file():
            argv += ["--resume_from_checkpoint", "true"]
        launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"] if aim == "launcher" else []
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *launcher, str(SCRIPT), *argv],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        family = _family(process.pid) if aim is None else self._kill(process, aim)
        process.wait(_PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=120)
        if alive:
            raise RuntimeError(f"processes {[one.pid for one in alive]} of {self.output} outlive their launcher")
        if process.returncode == 2 and "no checkpoint in" in self.log.read_text()[-2000:]:
            shutil.rmtree(self.output)  # as a user would, or without the flag
        return process.returncode == 0 and (self.output / "metrics.json").is_file()

    def _kill(self, process: subprocess.Popen[bytes], aim: str) -> list[psutil.Process]:
        ready: dict[str, Callable[[], bool]] = {
            "checkpoint": self._is_writing,
            "result": lambda: (self.output / f"checkpoint-{STEPS}" / "manifest.json").exists(),
        }
        if aim in ready:
            delay = self.random.uniform(0, 0.06 if aim == "checkpoint" else 0.6)
            self._skipped = self.random.randrange(STEPS // 4)
            while process.poll() is None and not ready[aim]():
                time.sleep(0.001)
        else:
            delay = self.random.uniform(0, 1.1 * self._seconds)
        deadline = time.monotonic() + delay
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        family = _family(process.pid)
        if process.poll() is None:
            if aim == "launcher":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGTERM if aim == "term" else signal.SIGKILL)
        return family

    def _is_writing(self) -> bool:
        """Return whether a checkpoint is begun and not sealed; a random one of those to come."""
        begun = [path for path in self.output.glob("checkpoint-*") if not (path / "manifest.json").exists()]
        return any(int(path.name.partition("-")[2]) > 4 * self._skipped for path in begun)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def difference(reference: Path, output: Path) -> str | None:
    """Return what differs between two finished runs; None if nothing does."""
    if not (output / "metrics.json").is_file():
        return "not finished"
    first, second = (load_file(folder / "model.safetensors") for folder in (reference, output))
    if first.keys() != second.keys() or any(not torch.equal(first[name], second[name]) for name in first):
        return "other weights"
    for name in ("metrics.json", "trainer_state.json"):
        one, two = (_without_times(json.loads((folder / name).read_text())) for folder in (reference, output))
        if name == "trainer_state.json":
            one, two = one["log_history"], two["log_history"]
        if one != two:
            return f"another {name}"
    return None


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not k.endswith(TIMED) and "second" not in k}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def trials(count: int, folder: Path, *, jobs: int, first: int = 0) -> list[dict[str, Any]]:
    """Run the trials, and return a row for each.

    Args:
        count: number of trials.
        folder: an empty folder; a trial that ended to the bit leaves nothing there.
        jobs: trials at a time.
        first: number of the first trial.
    """
    sys.path.insert(0, str(ROOT / "recipes"))
    from pretraining.data import embedded

    tokens = embedded.prepare(folder, vocab_size=512)
    references: dict[str, tuple[Path, float]] = {}

    def one(number: int) -> dict[str, Any]:
        own = folder / f"trial-{number}"
        own.mkdir()
        trial = Trial(own, number, tokens, *references[list(OPTIMIZERS)[number % len(OPTIMIZERS)]])
        row = {"trial": number, **trial.run()}
        if row["verdict"] == "to the bit":
            shutil.rmtree(own)
        return row

    def untouched(name: str) -> None:
        output = folder / f"untouched-{name}"
        began = time.monotonic()
        subprocess.run(
            [sys.executable, SCRIPT, *SMALL, *OPTIMIZERS[name], "--data_dir", tokens, "--output_dir", output],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        references[name] = output, time.monotonic() - began

    numbers = range(first, first + count)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(untouched, {list(OPTIMIZERS)[number % len(OPTIMIZERS)] for number in numbers}))
        return list(tqdm(pool.map(one, numbers), total=count, unit="run"))


def table(rows: list[dict[str, Any]]) -> str:
    """Return kills and verdicts by aim as a Markdown table; a run with two kills counts for its first."""
    lines = [
        "| first kill | runs | kills | checkpoints passed over | bit-for-bit | not |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for aim in (*AIMS, "all"):
        own = [row for row in rows if aim in ("all", row["aims"][0])]
        good = sum(row["verdict"] == "to the bit" for row in own)
        bad = Counter(row["verdict"] for row in own if row["verdict"] != "to the bit")
        said = ", ".join(f"{count} {verdict}" for verdict, count in bad.items()) or "-"
        kills = sum(len(row["aims"]) for row in own)
        passed_over = sum(row["passed_over"] for row in own)
        lines.append(f"| {aim} | {len(own)} | {kills} | {passed_over} | {good} | {said} |")
    return "\n".join(lines)


def main() -> None:
    """Run the trials of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time; default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat one")
    parser.add_argument("--output_file", type=Path, help="JSON with a row for each trial")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    rows = trials(arguments.runs, folder, jobs=arguments.jobs, first=arguments.first)
    if arguments.output_file:
        arguments.output_file.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{table(rows)}")
    if any(row["verdict"] != "to the bit" for row in rows):
        raise SystemExit(f"what differs is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
