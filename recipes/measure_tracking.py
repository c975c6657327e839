#!/usr/bin/env python
"""Measure, along a run of pretrain_gpt2.py, which first moment tracks the true gradient best.

    python recipes/measure_tracking.py --output_dir runs/tracking                       # the default job
    python recipes/measure_tracking.py --output_dir runs/tracking --optimizer adamw --max_steps 200
    python recipes/measure_tracking.py --output_dir runs/mine --data_dir data/mine --config gpt2-small --every 500

Any argument of pretrain_gpt2.py may follow. The run is the one without the measurement; it takes about four times as
long. Table, picture and every number go to tracking.md, .png and .json in the output folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pretrain_gpt2
from pretraining.compare import figures, tracking_probe
from pretraining.run import arguments, ranges, report
from pretraining.run.errors import one_line_errors
from transformers import Trainer


@one_line_errors("measure_tracking.py")
def main(argv: list[str] | None = None) -> None:
    """Train and measure; `argv` is the command line without the program's name."""
    settings, rest = _parse(argv)
    _check(settings, rest)
    moments = tracking_probe.grid(settings.betas, settings.gammas, settings.forms, [c or None for c in settings.clips])
    probes: list[tracking_probe.TrackingProbe] = []

    def add_probe(trainer: Trainer) -> None:
        probes.append(tracking_probe.TrackingProbe(trainer, moments, settings.every, settings.batches))
        trainer.add_callback(probes[0])

    run = pretrain_gpt2.train(rest, add_probe)
    rows = probes[0].rows
    if not rows:
        raise ValueError(f"--every {settings.every}: the run ended before step {settings.every}; give fewer steps")
    output = Path(str(run.training.output_dir))
    conclusion = tracking_probe.conclusion(rows, probes[0].beta1)
    write(rows, conclusion, output)
    print(f"\n{tracking_probe.table(rows)}\n\n{conclusion}\ntracking.md, .json and .png are in {output}")


def write(rows: list[dict[str, Any]], conclusion: str, output: Path) -> None:
    """Write the table, the numbers and the picture."""
    scopes = dict.fromkeys(row["scope"] for row in rows)
    text = [
        "# Which first moment tracks the gradient",
        conclusion + ".",
        "Medians over the measured steps. error, lag and noise are relative to the squared norm of the gradient of the "
        "whole training set.",
        "![Error along the run](tracking.png)",
        *(f"## {scope}\n\n{tracking_probe.table(rows, scope)}" for scope in scopes),
    ]
    report.write_text(output / "tracking.md", "\n\n".join(text) + "\n")
    report.write(output / "tracking.json", {"conclusion": conclusion, "rows": rows})
    figures.tracking(rows, output / "tracking.png")


def _check(settings: argparse.Namespace, rest: list[str]) -> None:
    """Stop before the run if it cannot be measured."""
    run = arguments.read(rest)[0]
    if settings.batches % 2:
        raise ValueError(f"--batches {settings.batches}: give an even number, for two independent halves")
    if run.resume_from_checkpoint is not None:
        raise ValueError("resume_from_checkpoint: checkpoints hold no averages of a measurement; start the run anew")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{os.environ['WORLD_SIZE']} processes: a measurement runs in one; start one")
    if run.per_device_train_batch_size * run.gradient_accumulation_steps < 2:
        raise ValueError("--per_device_train_batch_size 1: a measurement halves each step's samples; give 2 or more")
    if 0 < run.max_steps < settings.every:
        raise ValueError(f"--every {settings.every}: the run has {run.max_steps} steps; give {run.max_steps} or fewer")


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments, and those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    number, forms = ranges.NOT_NEGATIVE.read, ["approx", "exact"]
    add("--every", type=ranges.SIZE.read, default=50, help="steps between measurements; default: %(default)s")
    add("--batches", type=ranges.SIZE.read, default=64, help="micro-batches of a measurement; default: %(default)s")
    add("--betas", nargs="+", type=ranges.BELOW_ONE.read, default=[0.9, 0.95, 0.99], help="default: %(default)s")
    add("--gammas", nargs="+", type=number, default=[0.0, 0.0125, 0.025, 0.05, 0.1], help="default: %(default)s")
    add("--forms", nargs="+", choices=forms, default=forms, help="default: %(default)s")
    add("--clips", nargs="+", type=number, default=[0.0, 1.0], help="clip thresholds, 0 for none; default: %(default)s")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    main()
