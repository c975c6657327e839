#!/usr/bin/env python
"""Kill runs of the recipe, resume them, and compare each to the bit with a run that nobody touched.

    python tests/soak/kill.py --runs 40 --output_file kills.json
    python tests/soak/kill.py --steps 20000     # one long run against one with five stops, and its memory

A trial starts a small run, kills it once or twice, resumes it with --resume_from_checkpoint true, and lets it finish.
Each kill has an aim:

    anytime     SIGKILL to all of its processes, at a random time
    checkpoint  the same, up to 60 ms after a checkpoint's folder appears: while it is written
    result      the same, up to 600 ms after the last checkpoint is whole: while the result is written
    launcher    SIGKILL to `accelerate launch` alone, at a random time; its worker must end by itself
    term        SIGTERM, at a random time: the run saves and ends

Weights, results and held-out losses must be those of the run that was not killed. Memory is the
process's resident set, sampled from outside; its growth is the median of the last quarter less that of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
    "--n_layer",
    "1",
    "--n_head",
    "2",
    "--n_embd",
    "32",
    "--block_size",
    "32",
    "--embedded_vocab_size",
    "512",
    "--max_steps",
    str(STEPS),
    "--warmup_steps",
    "2",
    "--logging_steps",
    "3",
    "--eval_steps",
    "10",
    "--max_eval_blocks",
    "8",
    "--per_device_train_batch_size",
    "4",
    "--per_device_eval_batch_size",
    "4",
    "--sample_tokens",
    "0",
    "--cpu_threads",
    "1",
    "--disable_tqdm",
    "true",
    "--dropout",
    "0.1",
    "--save_strategy",
    "steps",
    "--save_steps",
    "4",
    "--resume_from_checkpoint",
    "true",
]
TINY = ["--n_embd", "16", "--n_head", "1", "--block_size", "8", "--per_device_train_batch_size", "2", "--dropout", "0"]
TINY += ["--warmup_steps", "100", "--logging_steps", "500", "--eval_steps", "5000", "--save_total_limit", "2"]
_PATIENCE = 600.0


def start(output: Path, data: Path, argv: Sequence[str], launcher: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start or resume a run in a session of its own; what it prints goes to OUTPUT.log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*launcher, SCRIPT, *SMALL, *argv, "--data_dir", data, "--output_dir", output]
    with output.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *words], stdout=log, stderr=log, start_new_session=True, env=environment
        )


def family(pid: int) -> list[psutil.Process]:
    """Return the processes below one."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end(process: subprocess.Popen[bytes], below: list[psutil.Process], timeout: float = _PATIENCE) -> int:
    """Wait for a process and those below it, and return its exit code."""
    process.wait(timeout)
    _, alive = psutil.wait_procs(below, timeout=120)
    if alive:
        raise RuntimeError(f"processes {[one.pid for one in alive]} outlive their launcher")
    return process.returncode


def kill(process: subprocess.Popen[bytes], output: Path, aim: str, chance: random.Random, seconds: float) -> int:
    """Kill a run unless it ends first, and return its exit code; `seconds`: duration of an uninterrupted run."""
    skipped = chance.randrange(STEPS // 4)

    def is_writing() -> bool:
        """Return whether a checkpoint is begun and not whole; a random one of those to come."""
        begun = [path for path in output.glob("checkpoint-*") if not (path / "trainer_state.json").exists()]
        return any(int(path.name.partition("-")[2]) > 4 * skipped for path in begun)

    moments: dict[str, tuple[float, Callable[[], bool]]] = {
        "checkpoint": (0.06, is_writing),
        "result": (0.6, lambda: (output / f"checkpoint-{STEPS}" / "trainer_state.json").exists()),
    }
    latest, is_ready = moments.get(aim, (1.1 * seconds, lambda: True))
    while process.poll() is None and not is_ready():
        time.sleep(0.001)
    deadline = time.monotonic() + chance.uniform(0, latest)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    below = family(process.pid)
    if process.poll() is None and aim == "launcher":
        process.kill()
    elif process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM if aim == "term" else signal.SIGKILL)
    return end(process, below)


def difference(reference: Path, output: Path) -> str | None:
    """Return what differs between two finished runs; None if nothing does."""
    if not (output / "metrics.json").is_file():
        return "not finished"
    first, second = (load_file(folder / "model.safetensors") for folder in (reference, output))
    if first.keys() != second.keys() or any(not torch.equal(first[name], second[name]) for name in first):
        return "other weights"
    results, logs = (
        [_read(folder / name) for folder in (reference, output)] for name in ("metrics.json", "trainer_state.json")
    )
    if _comparable(results[0]) != _comparable(results[1]):
        return "another metrics.json"
    evaluations = [[_comparable(row) for row in log["log_history"] if "eval_loss" in row] for log in logs]
    return None if evaluations[0] == evaluations[1] else "another trainer_state.json"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out times, and training losses: the first after a resume is that of the steps since."""
    return {name: value for name, value in row.items() if not re.search("runtime|second|train_loss", name)}


def prepare(folder: Path) -> Path:
    """Return the folder of the embedded corpus, which is made in `folder`."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from pretraining.data import embedded

    return embedded.prepare(folder, vocab_size=512)


def trials(count: int, folder: Path, *, jobs: int, first: int = 0) -> list[dict[str, Any]]:
    """Run the trials, and return a row for each, with `verdict`: `to the bit`, or what differs.

    Args:
        count: number of trials.
        folder: an empty folder; a trial that ended to the bit leaves nothing there.
        jobs: trials at a time.
        first: number of the first trial.
    """
    data, references = prepare(folder), {}

    def untouched(optimizer: str) -> None:
        output, began = folder / f"untouched-{optimizer}", time.monotonic()
        if end(start(output, data, OPTIMIZERS[optimizer]), []):
            raise RuntimeError(output.with_suffix(".log").read_text()[-3000:])
        references[optimizer] = output, time.monotonic() - began

    def trial(number: int) -> dict[str, Any]:
        output, chance = folder / f"trial-{number}", random.Random(number)
        optimizer = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
        aims = [AIMS[number % len(AIMS)], *chance.choices(AIMS, k=chance.randint(0, 1))]
        reference, seconds = references[optimizer]
        for aim in [*aims, None]:
            launcher = (
                ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"] if aim == "launcher" else []
            )
            process = start(output, data, OPTIMIZERS[optimizer], launcher)
            code = end(process, []) if aim is None else kill(process, output, aim, chance, seconds)
            if code == 0 and (output / "metrics.json").is_file():
                break  # too fast for that kill, or the end
        passed_over = output.with_suffix(".log").read_text().count(" is passed over: ")
        verdict = difference(reference, output) or "to the bit"
        if verdict == "to the bit":
            shutil.rmtree(output)
        row = {"trial": number, "optimizer": optimizer, "aims": aims}
        return {**row, "passed_over": passed_over, "verdict": verdict}

    numbers = range(first, first + count)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(untouched, {list(OPTIMIZERS)[number % len(OPTIMIZERS)] for number in numbers}))
        return list(tqdm(pool.map(trial, numbers), total=count, unit="run"))


def table(rows: list[dict[str, Any]]) -> str:
    """Return kills and verdicts by aim as a Markdown table; a run with two kills counts for its first."""
    lines = ["| first kill | runs | kills | checkpoints passed over | bit-for-bit | not |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
    for aim in (*AIMS, "all"):
        chosen = [row for row in rows if aim in ("all", row["aims"][0])]
        verdicts = Counter(row["verdict"] for row in chosen)
        good = verdicts.pop("to the bit", 0)
        bad = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "-"
        kills, passed_over = (
            sum(counts) for counts in ([len(r["aims"]) for r in chosen], [r["passed_over"] for r in chosen])
        )
        lines.append(f"| {aim} | {len(chosen)} | {kills} | {passed_over} | {good} | {bad} |")
    return "\n".join(lines)


def long(folder: Path, steps: int, stops: int = 5) -> dict[str, Any]:
    """Train in one go and again with stops, SIGTERM and SIGKILL in turn, at random times.

    Returns:
        The growth of memory in bytes, and what differs between the runs (None: nothing).
    """
    data, chance, began = prepare(folder), random.Random(0), time.monotonic()
    argv = [*TINY, "--max_steps", str(steps), "--save_steps", str(steps // 40)]
    process, samples = start(folder / "whole", data, argv), []
    while process.poll() is None:
        time.sleep(0.5)
        samples.append(psutil.Process(process.pid).memory_info().rss)
    seconds = time.monotonic() - began
    for stop in range(stops):
        process = start(folder / "stopped", data, argv)
        time.sleep(chance.uniform(0.3, 1.0) * seconds / stops)
        process.send_signal((signal.SIGTERM, signal.SIGKILL)[stop % 2])
        process.wait()
    end(start(folder / "stopped", data, argv), [])
    quarter = len(samples) // 4
    growth = statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter])
    verdict = difference(folder / "whole", folder / "stopped")
    return {"steps": steps, "stops": stops, "seconds": seconds, "growth_bytes": int(growth), "difference": verdict}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time; default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat one")
    parser.add_argument("--steps", type=int, help="of a long run with stops, in place of trials")
    parser.add_argument("--output_file", type=Path, help="JSON with a row for each trial, or the long run's result")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    result: Any = (
        long(folder, options.steps)
        if options.steps
        else trials(options.runs, folder, jobs=options.jobs, first=options.first)
    )
    if options.output_file:
        options.output_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.steps else f"\n{table(result)}")
    if result["difference"] if options.steps else any(row["verdict"] != "to the bit" for row in result):
        raise SystemExit(f"what differs is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
