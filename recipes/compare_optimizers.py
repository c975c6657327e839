#!/usr/bin/env python
"""Compare optimizers on the same data, budget and seeds: does MARS help here?

    python recipes/compare_optimizers.py                                    # the default job
    python recipes/compare_optimizers.py --optimizers mars_adamw adamw --seeds 1 2 3 --max_steps 1000
    python recipes/compare_optimizers.py --preset controls --seeds 1 2 3 4 5 --jobs 2 --cpu_threads 1
    python recipes/compare_optimizers.py --launcher "accelerate launch --config_file accelerate_configs/ddp.yaml" \
        --config gpt2-small --output_dir runs/compare-small

All other arguments go to every run of recipes/pretrain_gpt2.py. Settings for one optimizer belong in the section
`optimizers` of a config; recipes/presets holds whole comparisons. The result, comparison.md, .json and .png in the
output folder, is there from the first runs on. Start an interrupted comparison again to resume it.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from pretraining import files
from pretraining.compare import launch, page, presets
from pretraining.compare.comparison import FinishedRun
from pretraining.compare.presets import Preset
from pretraining.run import checkpoints, resuming
from pretraining.run.arguments import OPTIMIZERS
from pretraining.run.errors import one_line_errors
from tqdm.auto import tqdm

# Arm to its settings, for comparisons without a preset.
ARMS: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS}
ARMS |= {f"{name}_exact": {"optimizer": name, "is_approx": False} for name in OPTIMIZERS if name.startswith("mars_")}
_DEFAULT = ["mars_adamw", "mars_adamw_exact", "mars_lion", "mars_shampoo", "mars_m", "adamw", "nadamw", "muon"]
# Turn off output of a single run that this script does not need.
_QUIET = ["--sample_tokens", "0", "--disable_tqdm", "true"]


class _Job(NamedTuple):
    """A run of the comparison, and its folder."""

    arm: str
    seed: int
    folder: Path
    launcher: list[str]
    argv: list[str]

    @property
    def is_finished(self) -> bool:
        """Return whether its result is there."""
        return (self.folder / "diverged.json").exists() or (self.folder / "metrics.json").exists()

    @property
    def settings(self) -> dict[str, Any]:
        """Return all settings of the run, and what starts it."""
        return {"launcher": self.launcher, **launch.settings_of(self.argv)}

    def refuse_other_runs(self) -> None:
        """Raise ValueError if the folder holds somebody else's run, or one with other settings."""
        if not self.is_finished and not checkpoints.checkpoints(self.folder):
            return
        if not (self.folder / "arguments.json").is_file():
            raise ValueError(f"{self.folder} holds a run that is not of a comparison; give another --output_dir")
        saved = json.loads((self.folder / "arguments.json").read_text(encoding="utf-8"))
        changed = [
            f"{key} {saved.get(key)}, now {value}" for key, value in self.settings.items() if saved.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{self.folder} holds a run with other settings: {'; '.join(changed)}; give another --output_dir, or "
                "remove that folder"
            )

    def run(self) -> FinishedRun:
        """Start or resume the run, and return its result."""
        with files.locked(self.folder, "trains", wait=True):  # a killed comparison leaves its runs training
            pass
        if self.is_finished:
            return self.result()
        self.folder.mkdir(exist_ok=True)
        files.write_json(self.folder / "arguments.json", self.settings)
        resume = ["--resume_from_checkpoint", "auto"] if checkpoints.checkpoints(self.folder) else []
        try:
            launch.run_recipe([*self.argv, *resume], self.folder, self.launcher)
        except launch.Diverged as error:
            files.write_json(self.folder / "diverged.json", {"message": str(error)})
        return self.result()

    def result(self) -> FinishedRun:
        """Return the result of a finished run."""
        if (self.folder / "diverged.json").exists():
            return FinishedRun(self.arm, self.seed, self.settings["learning_rate"], math.nan, math.nan)
        metrics = launch.metrics_of(self.folder)
        return FinishedRun(
            self.arm,
            self.seed,
            metrics["learning_rate"],
            metrics["eval_loss"],
            metrics["tokens_per_second"],
            curve=launch.curve_of(self.folder),
        )


@one_line_errors("compare_optimizers.py")
def main(argv: list[str] | None = None) -> None:
    """Run the missing runs, then report; `argv` is the command line without the program's name."""
    arguments, preset, rest = parse(argv)
    output, launcher = Path(arguments.output_dir), shlex.split(arguments.launcher)
    output.mkdir(parents=True, exist_ok=True)
    with files.locked(output, "compares"):
        shared = [*_QUIET, *rest]
        steps = launch.equal_seconds(preset, shared, output, launcher) if preset.equal_seconds else {}
        jobs = []
        for seed in dict.fromkeys(arguments.seeds or preset.seeds):
            for arm in preset.arms:
                words = [*shared, *presets.words(preset.arms[arm]), *steps.get(arm, []), "--seed", str(seed)]
                jobs.append(_Job(arm, seed, output / f"{launch.folder_name(arm)}-{seed}", launcher, words))
        for job in jobs:
            job.refuse_other_runs()
        print(f"\n{_run(jobs, arguments.jobs, preset, rest, output)}\n\ncomparison.json, .md and .png are in {output}")


def _run(jobs: Sequence[_Job], at_once: int, preset: Preset, arguments: Sequence[str], output: Path) -> str:
    """Run what is missing, write the page after every run, and return its tables."""
    runs = {job.folder: job.result() for job in jobs if job.is_finished}

    def write() -> str:
        finished = [job for job in jobs if job.folder in runs]
        if not any(job.arm == preset.baseline for job in finished):
            return ""
        data = [run.settings["data"] for job in finished if (run := resuming.read_run(job.folder))]
        results, missing = [runs[job.folder] for job in finished], len(jobs) - len(finished)
        return page.write(output, preset, results, missing=missing, data=data, arguments=arguments)

    with tqdm(total=len(jobs), initial=len(runs), unit="run") as progress, ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(job.run): job.folder for job in jobs if job.folder not in runs}
        try:
            for future in as_completed(futures):
                runs[futures[future]] = future.result()
                progress.update()
                write()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return write()


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Preset, list[str]]:
    """Return this script's arguments, what is compared, and the arguments of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, compared = parser.add_argument, parser.add_mutually_exclusive_group()
    compared.add_argument("--optimizers", nargs="+", choices=ARMS, metavar="NAME", help=f"among {', '.join(ARMS)}")
    compared.add_argument("--preset", help=f"{', '.join(presets.names())}, or a YAML file")
    add("--arms", nargs="+", metavar="NAME", help="of the preset, besides its baseline; default: all")
    add("--seeds", nargs="+", type=int, help="default: 1 2, or the preset's")
    add("--jobs", type=int, default=1, help="runs at a time; default: %(default)s")
    add("--output_dir", help="default: runs/compare, or runs/PRESET")
    add("--launcher", default="", help="what starts a run, such as 'accelerate launch'; default: this Python")
    arguments, rest = parser.parse_known_args(argv)
    arms = {name: ARMS[name] for name in arguments.optimizers or _DEFAULT}
    preset = Preset(arms) if arguments.preset is None else presets.load(arguments.preset)
    for seed in arguments.seeds or ():
        if not 0 <= seed < 2**32:
            raise ValueError(f"--seeds {seed}: give numbers from 0 on, below 2^32")
    if arguments.arms:
        preset = preset.only(arguments.arms)
    of_arms = {name for settings in preset.arms.values() for name in settings}
    for name in (word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")):
        if name in presets.RESERVED:
            raise ValueError(f"--{name} differs between the runs; remove it: {presets.RESERVED[name]}")
        if name in of_arms:
            raise ValueError(f"--{name}: the arms state it themselves; remove the flag, or write a preset of your own")
    for arm in preset.arms:
        launch.settings_of([*rest, *presets.words(preset.arms[arm])])  # wrong ones end the comparison at once
    arguments.output_dir = arguments.output_dir or f"runs/{Path(arguments.preset or 'compare').stem}"
    return arguments, preset, rest


if __name__ == "__main__":
    main()
