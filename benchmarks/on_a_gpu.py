#!/usr/bin/env python
"""Do everything that waits for a GPU, in order of worth, within a time limit.

    python benchmarks/on_a_gpu.py --output_dir out --minutes 40                  # everything
    python benchmarks/on_a_gpu.py --output_dir out --only controls --minutes 9   # one part, or what time allows of it

Each part leaves its log, JSON and pictures in the output folder, from its first result on. A part that fails or runs
out of time does not stop the next one; comparisons go on where they were when the script is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_GRACE = 20.0  # seconds between asking a part to end and ending it


def parts(output: Path) -> dict[str, tuple[float, list[str]]]:
    """Return each part's share of the time that is left, and its command.

    Args:
        output: folder of the results.
    """
    python = sys.executable
    sizes = ["28m", "small", "medium", "large", "xl"]
    compare = [python, "recipes/compare_optimizers.py"]
    return {
        "tests": (0.15, [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]),
        "controls": (0.55, [*compare, "--preset", "gpu", "--output_dir", str(output / "controls")]),
        "step_cost": (
            0.4,
            [python, "benchmarks/step_cost.py", "--size", *sizes, "--output", str(output / "step_cost.json")],
        ),
        "memory": (0.3, [python, "benchmarks/memory.py", "--output", str(output / "memory.json")]),
        "throughput": (
            0.5,
            [
                *(python, "benchmarks/train_cost.py", "--bf16", "--batch", "16"),
                *("--output", str(output / "train_cost.json")),
            ],
        ),
        "controls_small": (1.0, [*compare, "--preset", "gpu-98m", "--output_dir", str(output / "controls_small")]),
    }


def run(name: str, command: list[str], output: Path, seconds: float) -> str:
    """Run one part with its log in the output folder; return `done`, `failed` or `out of time`."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or "0"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with (output / f"{name}.log").open("a") as log:
        # A session of its own, so that the runs of a comparison end with it and leave the GPU to the next part.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            return "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started; runs of the recipe save when they are asked to end."""
    with contextlib.suppress(ProcessLookupError):
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            end = time.monotonic() + _GRACE
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)  # raises when all are gone
                time.sleep(0.05)


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
