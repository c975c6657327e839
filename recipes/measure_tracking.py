#!/usr/bin/env python
"""Measure, along a run of pretrain_gpt2.py, which first moment tracks the true gradient best.

    python recipes/measure_tracking.py --output_dir runs/tracking                       # the default job
    python recipes/measure_tracking.py --output_dir runs/tracking --optimizer adamw --max_steps 200
    python recipes/measure_tracking.py --output_dir runs/mine --data_dir data/mine --config gpt2-small --every 500

Any argument of pretrain_gpt2.py may follow. The run is the one without the measurement; it takes about four times as
long. Table, picture and every number go to tracking.md, .png and .json in the output folder. See mars_hf.TrackingProbe
for what is measured.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pretrain_gpt2
from pretraining import arguments, figures, ranges, report
from pretraining.mistakes import Mistake, OneLine, told

import mars_hf


@told("measure_tracking.py")
def main(argv: list[str] | None = None) -> None:
    """Train and measure; `argv` is the command line without the program's name."""
    settings, rest = _parse(argv)
    clips = [clip or None for clip in settings.clips]
    try:
        probe = mars_hf.TrackingProbe(
            settings.every, settings.batches, settings.betas, settings.gammas, settings.forms, clips
        )
    except ValueError as error:
        raise Mistake(f"--{error}") from None
    _check(settings, rest)
    run = pretrain_gpt2.train(rest, [probe])
    if not probe.rows:
        raise Mistake(f"--every {settings.every}: the run ended before step {settings.every}; give fewer steps")
    output = Path(str(run.training.output_dir))
    followed = probe.beta1 in {moment.beta1 for moment in probe.moments}
    conclusion = probe.conclusion(probe.beta1 if followed else None)
    write(probe, output, conclusion)
    print(f"\n{probe.table()}\n\n{conclusion}\ntracking.md, .json and .png are in {output}")


def write(probe: mars_hf.TrackingProbe, output: Path, conclusion: str) -> None:
    """Write the table, the numbers and the picture."""
    scopes = list(dict.fromkeys(row["scope"] for row in probe.rows))
    tables = [f"## {scope}\n\n{probe.table(scope)}" for scope in scopes]
    text = [
        "# Which first moment tracks the gradient",
        conclusion + ".",
        "Medians over the measured steps. error, lag and noise are relative to the squared norm of the gradient of the "
        "whole training set.",
        "![Error along the run](tracking.png)",
        *tables,
    ]
    report.write_text(output / "tracking.md", "\n\n".join(text) + "\n")
    report.write(output / "tracking.json", {"conclusion": conclusion, "rows": probe.rows})
    figures.tracking(probe.rows, output / "tracking.png")


def _check(settings: argparse.Namespace, rest: list[str]) -> None:
    """Stop before the run if it cannot be measured."""
    run = arguments.read(rest)[0]
    if run.resume_from_checkpoint is not None:
        raise Mistake("resume_from_checkpoint: checkpoints hold no averages of a measurement; start the run anew")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Mistake(f"{os.environ['WORLD_SIZE']} processes: a measurement runs in one; start one")
    if run.per_device_train_batch_size * run.gradient_accumulation_steps < 2:
        raise Mistake(
            "--per_device_train_batch_size 1: a measurement splits the samples of a step in two halves; give 2 or "
            "more, or --gradient_accumulation_steps"
        )
    if 0 < run.max_steps < settings.every:
        raise Mistake(f"--every {settings.every}: the run has {run.max_steps} steps; give {run.max_steps} or fewer")


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments, and those of the run."""
    parser = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--every", type=ranges.SIZE.read, default=50, help="steps between measurements; default: %(default)s")
    add("--batches", type=ranges.SIZE.read, default=64, help="micro-batches of a measurement; default: %(default)s")
    number = ranges.NOT_NEGATIVE.read
    add("--betas", nargs="+", type=ranges.BELOW_ONE.read, default=[0.9, 0.95, 0.99], help="default: %(default)s")
    add("--gammas", nargs="+", type=number, default=[0.0, 0.0125, 0.025, 0.05, 0.1], help="default: %(default)s")
    add("--forms", nargs="+", default=["approx", "exact"], help="approx, exact or both; default: %(default)s")
    add("--clips", nargs="+", type=number, default=[0.0, 1.0], help="clip thresholds, 0 for none; default: %(default)s")
    settings, rest = parser.parse_known_args(argv)
    return settings, rest


if __name__ == "__main__":
    main()
