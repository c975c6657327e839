#!/usr/bin/env python
"""Train 20,000 steps in one go and again with five stops, and compare the two to the bit; watch the memory.

    python tests/soak/long.py --output_file long.json

The stops are SIGTERM and SIGKILL in turn, at random times. Memory is the process's resident set, sampled from outside;
its growth is the median of the last quarter of the samples less that of the second quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from kill import ROOT, SCRIPT, difference

TINY = [
    *("--n_layer", "1", "--n_head", "1", "--n_embd", "16", "--block_size", "8", "--embedded_vocab_size", "512"),
    *("--warmup_steps", "100", "--logging_steps", "500", "--eval_steps", "5000", "--max_eval_blocks", "8"),
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4", "--sample_tokens", "0"),
    *("--cpu_threads", "1", "--disable_tqdm", "true", "--save_strategy", "steps", "--save_total_limit", "2"),
]


def train(output: Path, data: Path, steps: int, stop: tuple[float, signal.Signals] | None = None) -> list[int]:
    """Start or resume a run, and return samples of its resident set in bytes.

    Args:
        output: the run's folder.
        data: folder of the token files.
        steps: all steps of the run.
        stop: seconds after which a signal stops it, and the signal; None lets it finish.
    """
    argv = [*TINY, "--max_steps", str(steps), "--save_steps", str(steps // 40), "--data_dir", str(data)]
    if (output / "run.json").is_file():
        argv += ["--resume_from_checkpoint", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with output.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *argv, "--output_dir", output], stdout=log, stderr=log, env=environment
        )
        samples, began = [], time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            try:
                samples.append(psutil.Process(process.pid).memory_info().rss)
            except psutil.NoSuchProcess:
                break
            if stop and time.monotonic() - began > stop[0]:
                process.send_signal(stop[1])
                stop = None
        process.wait()
    return samples


def soak(folder: Path, steps: int, stops: int) -> dict[str, Any]:
    """Return the growth of memory in bytes, and what differs between the runs (None: nothing)."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from pretraining.data import embedded

    tokens = embedded.prepare(folder, vocab_size=512)
    began = time.monotonic()
    samples = train(folder / "whole", tokens, steps)
    seconds = time.monotonic() - began
    quarter = len(samples) // 4
    chance = random.Random(0)
    for stop in range(stops):
        number = (signal.SIGTERM, signal.SIGKILL)[stop % 2]
        train(folder / "stopped", tokens, steps, (chance.uniform(0.3, 1.0) * seconds / stops, number))
    train(folder / "stopped", tokens, steps)
    return {
        "steps": steps,
        "stops": stops,
        "seconds": round(seconds, 1),
        "growth_bytes": int(statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter])),
        "difference": difference(folder / "whole", folder / "stopped"),
    }


def main() -> None:
    """Run the soak of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--output_file", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    result = soak(folder, arguments.steps, arguments.stops)
    print(json.dumps(result))
    if arguments.output_file:
        arguments.output_file.write_text(json.dumps(result, indent=1) + "\n")
    if result["difference"]:
        raise SystemExit(f"the runs differ: {result['difference']}; they are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
