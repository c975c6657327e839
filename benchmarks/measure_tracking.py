#!/usr/bin/env python
"""Measure, along a run of pretrain_gpt2.py, which first moment tracks the true gradient best.

    python benchmarks/measure_tracking.py --output_dir runs/tracking                       # the default job
    python benchmarks/measure_tracking.py --output_dir runs/tracking --optimizer adamw --max_steps 200
    python benchmarks/measure_tracking.py --output_dir runs/mine --data_dir data/mine --config gpt2-small --every 500

Any argument of pretrain_gpt2.py may follow. The run is the one without the measurement; it takes about four times as
long. The table and every number go to tracking.md and .json in the output folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes"))
import argparse
import os
from typing import Any

import pretrain_gpt2
import tracking
from pretraining.run import arguments
from pretraining.run.errors import one_line_errors
from tracking import TrackingProbe

from mars_hf.compare import files


@one_line_errors("measure_tracking.py")
def main(argv: list[str] | None = None) -> None:
    """Train and measure; `argv` is the command line without the program's name."""
    settings, rest = parse(argv)
    moments = tracking.grid(settings.betas, settings.gammas, settings.clips)
    probes: list[TrackingProbe] = []

    def add_probe(trainer: Any) -> None:
        get = trainer.get_batch_samples

        def keep(*args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
            trainer.step_batches, count = get(*args, **kwargs)  # Trainer gives them to no callback
            return trainer.step_batches, count

        trainer.get_batch_samples = keep
        probes.append(TrackingProbe(trainer, moments, settings.every, settings.batches))
        trainer.add_callback(probes[0])

    run = pretrain_gpt2.train(rest, add_probe)
    if not probes or not probes[0].rows:
        raise ValueError(f"--every {settings.every}: nothing was measured; start a new run of at least that many steps")
    write(probes[0].rows, tracking.conclusion(probes[0].rows, probes[0].beta1), Path(str(run.training.output_dir)))


def write(rows: list[dict[str, Any]], conclusion: str, output: Path) -> None:
    """Write the table and the numbers, and print the table."""
    text = [
        "# Which first moment tracks the gradient",
        conclusion + ".",
        "Medians over the measured steps. error, lag and noise are relative to the squared norm of the gradient of the "
        "whole training set.",
    ]
    for scope in dict.fromkeys(row["scope"] for row in rows):
        text.append(f"## {scope}\n\n{tracking.table(rows, scope)}")
    files.write_text(output / "tracking.md", "\n\n".join(text) + "\n")
    files.write_json(output / "tracking.json", {"conclusion": conclusion, "rows": rows})
    print(f"\n{tracking.table(rows)}\n\n{conclusion}\ntracking.md and .json are in {output}")


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments, and those of the run.

    Raises:
        ValueError: the run cannot be measured.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--every", type=int, default=50, help="steps between measurements; default: %(default)s")
    add("--batches", type=int, default=64, help="micro-batches of a measurement; default: %(default)s")
    add("--betas", nargs="+", type=float, default=[0.9, 0.95, 0.99], help="default: %(default)s")
    add("--gammas", nargs="+", type=float, default=[0.0, 0.0125, 0.025, 0.05, 0.1], help="default: %(default)s")
    add(
        "--clips", nargs="+", type=float, default=[1.0], help="clip thresholds besides none, 0 for no other; default: 1"
    )
    settings, rest = parser.parse_known_args(argv)
    is_even = settings.batches >= 2 and settings.batches % 2 == 0
    if settings.every < 1 or not is_even or not all(0 <= beta1 < 1 for beta1 in settings.betas):
        raise ValueError(
            f"--every {settings.every} --batches {settings.batches} --betas {settings.betas}: give 1 or more, an even "
            "number, and numbers from 0 to below 1"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{os.environ['WORLD_SIZE']} processes: a measurement runs in one; start one")
    run, _ = arguments.read(rest)
    if str(run.resume_from_checkpoint or "false").lower() != "false":
        raise ValueError("resume_from_checkpoint: checkpoints hold no averages of a measurement; start the run anew")
    if run.max_steps < settings.every:
        raise ValueError(f"--every {settings.every}: the run has {run.max_steps} steps; give that or fewer")
    return settings, rest
