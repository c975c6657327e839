#!/usr/bin/env python
"""Do everything that waits for a GPU, the most telling first: is it right, what does it cost, what does it bring.

    python benchmarks/on_a_gpu.py --output_dir out                        # everything: 15 minutes
    python benchmarks/on_a_gpu.py --output_dir out --only step_cost       # parts whose names begin so
    python benchmarks/on_a_gpu.py --output_dir out --minutes 65           # the comparisons too

Each part leaves its log, JSON and pictures in the output folder, from its first result on, and may take the seconds
that stand beside it. A part that fails or runs out of time does not stop the next one. Started again, the script skips
what is done, and goes on with the rest where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_GRACE = 20.0  # seconds between asking a part to end and ending it
# The files with tests marked gpu.
TESTS = ("tests/kernels", "tests/step/test_formulas.py", "tests/step/test_gradients.py", "tests/step/test_resting.py")
ENGINES = "tests/distributed/test_one_gpu.py"


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take; parts that measure no time run `beside` the ones before them."""

    command: list[str]
    seconds: float
    beside: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def parts(output: Path) -> dict[str, Part]:
    """Return all parts by name, in the order of their worth.

    Args:
        output: folder of the results.
    """
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    clipped = ["--gradient-norm", "100", "--contenders", "AdamW|^Mars$|kahan|8bit"]
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]

    def measured(script: str, name: str, *options: str) -> list[str]:
        return [python, f"benchmarks/{script}.py", *options, "--output", str(output / f"{name}.json")]

    def compared(name: str, plan: str) -> list[str]:
        words = ["recipes/pretrain_gpt2.py", "--plan", f"benchmarks/plans/{plan}.yaml"]
        return [python, "-m", "mars_hf", "compare", *words, "--output_dir", str(output / name)]

    def trained(name: str, *options: str) -> list[str]:
        return measured("train_cost", name, "--bf16", "--rounds", "6", *options)

    return {
        "check": Part([python, "-m", "mars_hf", "check"], 120),
        "tests": Part([*pytest, "-n", "8", *TESTS], 120, beside=True),
        "engines": Part([*pytest, "-n", "0", ENGINES], 120, beside=True),
        "memcheck": Part(
            [*sanitizer, *pytest, "-k", "update or rounding or noise", "tests/kernels/test_contract.py"],
            120,
            beside=True,
            # Every tensor is an allocation of its own, so that an access behind its end is seen.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
        "step_cost": Part(
            measured("step_cost", "step_cost", "--resume", "--rounds", "20", "--size", "small", "large", "28m"), 140
        ),
        "step_cost_clipped": Part(
            measured("step_cost", "step_cost_clipped", "--rounds", "20", "--size", "small", *clipped), 40
        ),
        "train_cost_default": Part(
            trained("train_cost_default", "--size", "default", "--batch", "16", "--block", "128"), 50
        ),
        "kernels": Part(measured("gpu_kernels", "kernels", "--resume", "--rounds", "8", "--size", "small"), 110),
        "kernels_large": Part(
            measured("gpu_kernels", "kernels_large", "--size", "large", "--only", "newton_schulz", "forms", "chunks"),
            50,
        ),
        "gpt2_small": Part(compared("gpt2_small", "gpu-gpt2-small"), 210),
        "train_cost_small": Part(trained("train_cost_small", "--batch", "16"), 70),
        "memory": Part(measured("memory", "memory", "--resume", "--steps", "100"), 70),
        "default_job": Part(
            [python, "recipes/pretrain_gpt2.py", "--use_cpu", "false", "--output_dir", str(output / "default_job")], 40
        ),
        "controls": Part(compared("controls", "gpu"), 1200),
        "controls_small": Part(compared("controls_small", "gpu-98m"), 1800),
    }


def run(name: str, part: Part, output: Path, seconds: float) -> str:
    """Run one part with its log in the output folder; return `done`, `failed` or `out of time`."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or "0"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment |= part.environment
    with (output / f"{name}.log").open("a") as log:
        try:
            # A session of its own, so that the runs of a comparison end with it and leave the GPU to the next part.
            process = subprocess.Popen(
                part.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )
        except OSError as error:
            log.write(f"{error}\n")
            return "failed"
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


def run_all(chosen: Mapping[str, Part], output: Path, minutes: float) -> dict[str, str]:
    """Run the parts, those `beside` others at the same time, and return how each ended."""
    end = time.monotonic() + 60 * minutes
    ends: dict[str, str] = {}
    running: list[threading.Thread] = []

    def run_one(name: str, part: Part) -> None:
        began = time.monotonic()
        ends[name] = run(name, part, output, min(part.seconds, max(0.0, end - began)))
        if ends[name] == "done":
            (output / f"{name}.done").touch()
        print(f"{name}: {ends[name]} after {time.monotonic() - began:.0f} s; {output / name}.log", flush=True)

    for name, part in chosen.items():
        if (output / f"{name}.done").exists():
            ends[name] = "done before"
            continue
        if not part.beside:
            for thread in running:
                thread.join()
            running.clear()
        running.append(threading.Thread(target=run_one, args=(name, part)))
        running[-1].start()
    for thread in running:
        thread.join()
    return ends


def main(argv: list[str] | None = None) -> Mapping[str, str]:
    """Run the parts, print how each ended, and return that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "gpu", help="%(default)s")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all parts: %(default)s")
    parser.add_argument("--only", nargs="+", help=f"beginnings of names; left out: all of {', '.join(parts(Path()))}")
    arguments = parser.parse_args(argv)
    output = arguments.output_dir.absolute()
    output.mkdir(parents=True, exist_ok=True)
    beginnings = tuple(arguments.only or [""])
    chosen = {name: part for name, part in parts(output).items() if name.startswith(beginnings)}
    if not chosen:
        parser.error(f"no part begins with {' or '.join(beginnings)}; the parts are {', '.join(parts(output))}")
    return run_all(chosen, output, arguments.minutes)


if __name__ == "__main__":
    main()
