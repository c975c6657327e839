#!/usr/bin/env python
"""Do everything that waits for a GPU, in order of worth, within a time limit.

    python benchmarks/on_a_gpu.py --output_dir out --minutes 40      # tests, costs, throughput, controls
    python benchmarks/on_a_gpu.py --output_dir out --only controls   # one part

Each part leaves its log, JSON and pictures in the output folder. A part that fails or runs out of time does not stop
the next one; the controls go on where they were when the script is started again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def parts(output: Path) -> dict[str, tuple[float, list[str]]]:
    """Return each part's share of the time that is left, and its command.

    Args:
        output: folder of the results.
    """
    python = sys.executable
    sizes = ["28m", "small", "medium", "large", "xl"]
    return {
        "tests": (0.2, [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]),
        "step_cost": (
            0.3,
            [python, "benchmarks/step_cost.py", "--size", *sizes, "--output", str(output / "step_cost.json")],
        ),
        "throughput": (
            0.3,
            [
                *(python, "benchmarks/train_throughput.py", "--bf16", "--batch", "16"),
                *("--output", str(output / "train_throughput.json")),
            ],
        ),
        "controls": (
            1.0,
            [python, "recipes/compare_optimizers.py", "--preset", "gpu", "--output_dir", str(output / "controls")],
        ),
    }


def run(name: str, command: list[str], output: Path, seconds: float) -> str:
    """Run one part with its log in the output folder; return `done`, `failed` or `out of time`."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or "0"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with (output / f"{name}.log").open("a") as log:
        try:
            finished = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return "out of time"
    return "failed" if finished.returncode else "done"


def main(argv: list[str] | None = None) -> Mapping[str, str]:
    """Run the parts, print how each ended, and return that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "gpu", help="%(default)s")
    parser.add_argument("--minutes", type=float, default=40.0, help="for all parts: %(default)s")
    parser.add_argument("--only", nargs="+", choices=parts(Path()), help="left out: all")
    arguments = parser.parse_args(argv)
    output = arguments.output_dir.absolute()
    output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    chosen = {name: part for name, part in parts(output).items() if name in (arguments.only or parts(output))}
    ends = {}
    for index, (name, (share, command)) in enumerate(chosen.items()):
        share = 1.0 if index == len(chosen) - 1 else share
        began = time.monotonic()
        ends[name] = run(name, command, output, max(0.0, share * (end - began)))
        print(f"{name}: {ends[name]} after {time.monotonic() - began:.0f} s; {output / name}.log", flush=True)
    return ends


if __name__ == "__main__":
    main()
