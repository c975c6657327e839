#!/usr/bin/env python
"""Compare optimizers on the same data, budget and seeds: does MARS help here?

    python recipes/compare_optimizers.py                                    # the default job
    python recipes/compare_optimizers.py --optimizers mars_adamw adamw --seeds 1 2 3 --max_steps 1000
    python recipes/compare_optimizers.py --preset controls --seeds 1 2 3 4 5 --jobs 2 --cpu_threads 1
    python recipes/compare_optimizers.py --launcher "accelerate launch --config_file accelerate_configs/ddp.yaml" \
        --config gpt2-small --output_dir runs/compare-small

All other arguments go to every run of recipes/pretrain_gpt2.py. Settings for one optimizer belong in the section
`optimizers` of a config; recipes/presets holds whole comparisons. Table, verdicts and picture go to comparison.json,
.md and .png in the output folder. The script skips runs that are finished there, so start an interrupted comparison
again to resume it.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from pretraining import (
    agreement,
    checkpoints,
    comparison,
    equal_time,
    figures,
    folder_lock,
    presets,
    ranges,
    report,
    run_folder,
)
from pretraining.arguments import OPTIMIZERS, read
from pretraining.launch import Diverged, RunFailed, pretrain, words_of
from pretraining.mistakes import Mistake, OneLine, told
from pretraining.presets import Preset
from tqdm.auto import tqdm

# Contender to its settings, for comparisons without a preset.
CONTENDERS: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS}
CONTENDERS |= {
    f"{name}_exact": {"optimizer": name, "is_approx": False} for name in OPTIMIZERS if name.startswith("mars_")
}
_DEFAULT = ["mars_adamw", "mars_adamw_exact", "mars_lion", "mars_shampoo", "mars_m", "adamw"]
# Turn off output of a single run that this script does not need.
_QUIET = ["--sample_tokens", "0", "--disable_tqdm", "true"]
# From this many intervals on, the page says how many of them miss the truth.
_MANY = 10
_OURS = {"--optimizer": "--optimizers", "--is_approx": "--optimizers NAME_exact", "--seed": "--seeds"}


class _Wanted(NamedTuple):
    """A run that the comparison needs, and its folder."""

    contender: str
    seed: int
    folder: Path
    launcher: list[str]
    argv: list[str]

    @property
    def key(self) -> tuple[str, int]:
        """Return what tells it from the other runs."""
        return self.contender, self.seed

    @property
    def _settings(self) -> dict[str, Any]:
        return {"launcher": self.launcher, "argv": self.argv}

    @property
    def is_finished(self) -> bool:
        """Return whether its result is there."""
        return self._has_diverged or (self.folder / "metrics.json").exists()

    @property
    def _has_diverged(self) -> bool:
        return (self.folder / "diverged.json").exists()

    def refuse_other_settings(self) -> None:
        """Stop if the folder holds a run with other settings."""
        if not self.is_finished and not checkpoints.checkpoints(self.folder):
            return
        try:
            there = _load(self.folder / "arguments.json")
        except (OSError, ValueError):
            raise Mistake(
                f"{self.folder} holds a run that is not of a comparison; give another --output_dir, or move it away"
            ) from None
        if there != self._settings:
            raise Mistake(
                f"{self.folder} holds a run with other settings; give another --output_dir, or remove that folder; "
                f"there: {_command(there)}; asked: {_command(self._settings)}"
            )

    def run(self) -> comparison.Run:
        """Start or resume the run, and return its result; a finished run is only read."""
        with folder_lock.held(self.folder, "trains", wait=True):  # a run whose comparison was killed saves and ends
            self.folder.mkdir(exist_ok=True)
        if not self.is_finished:
            resume = ["--resume_from_checkpoint", "true"] if self._can_resume() else []
            report.write(self.folder / "arguments.json", self._settings)
            try:
                pretrain([*self.argv, *resume], self.folder, self.launcher or [sys.executable])
            except Diverged as failure:
                report.write(self.folder / "diverged.json", {"message": str(failure)})
        if self._has_diverged:
            learning_rate = read(self.argv)[0].learning_rate
            return comparison.Run(self.contender, self.seed, learning_rate, math.nan, math.nan, ())
        metrics = _load(self.folder / "metrics.json")
        history = _load(self.folder / "trainer_state.json")["log_history"]
        return comparison.Run(
            contender=self.contender,
            seed=self.seed,
            learning_rate=metrics["learning_rate"],
            eval_loss=metrics["eval_loss"],
            tokens_per_second=metrics["tokens_per_second"],
            curve=tuple((row["step"], row["eval_loss"]) for row in history if "eval_loss" in row),
        )

    def data(self) -> dict[str, Any]:
        """Return the data of a finished run: name, vocabulary and the hashes of its token files."""
        run = run_folder.read(self.folder)
        found: dict[str, Any] = run.settings.get("data", {}) if run is not None else {}
        return found

    def _can_resume(self) -> bool:
        run = run_folder.read(self.folder)
        return run is not None and checkpoints.newest_whole(self.folder, run.id)[0] is not None


def _command(settings: dict[str, Any]) -> str:
    return shlex.join([*settings["launcher"], "pretrain_gpt2.py", *settings["argv"]])


@told("compare_optimizers.py")
def main(argv: list[str] | None = None) -> None:
    """Run the missing runs, then report; `argv` is the command line without the program's name."""
    arguments, preset, rest = _parse(argv)
    output = Path(arguments.output_dir)
    launcher = words_of(arguments.launcher)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock.held(output, "compares"):
            steps = {}
            if preset.equal == "seconds":
                steps = equal_time.steps_of(preset, [*_QUIET, *rest], output, launcher or [sys.executable])
            wanted = [
                _Wanted(name, seed, output / f"{presets.folder_name(name)}-{seed}", launcher, argv)
                for seed in arguments.seeds
                for name in preset.arms
                for argv in [[*_QUIET, *rest, *preset.argv(name), *steps.get(name, []), "--seed", str(seed)]]
            ]
            for one in wanted:
                one.refuse_other_settings()
            runs = _run(wanted, arguments.jobs, preset)
            _conclude(runs, _data(wanted), output, preset, rest)
    except RunFailed as failure:
        raise SystemExit(str(failure)) from None


def _run(wanted: Sequence[_Wanted], jobs: int, preset: Preset) -> list[comparison.Run]:
    """Return the results in the order asked for; the table so far stands above the progress bar."""
    done: dict[tuple[str, int], comparison.Run] = {}
    waits = [one.key for one in wanted if not one.is_finished]
    there = len(wanted) - len(waits)
    with tqdm(total=len(wanted), initial=there, unit="run") as progress, ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(one.run): one for one in wanted}
            for future in as_completed(futures):
                one = futures[future]
                done[one.key] = future.result()
                if one.key in waits:
                    progress.update()
                    progress.set_description(str(done[one.key]))
                    progress.write(_so_far([done[known.key] for known in wanted if known.key in done], preset))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[one.key] for one in wanted]


def _so_far(runs: Sequence[comparison.Run], preset: Preset) -> str:
    """Return the table of what is finished, or a line while the baseline is not."""
    base = preset.baseline or comparison.baseline_of(list(preset.arms))
    seeds = {run.seed for run in runs if run.contender == base}
    shown = [run for run in runs if run.seed in seeds]
    if not shown:
        return str(runs[-1])
    return comparison.table(comparison.summarize(shown, base), base) + "\n"


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, Preset, list[str]]:
    """Return this script's arguments, what is compared, and the arguments of all runs."""
    parser = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--optimizers",
        nargs="+",
        metavar="NAME",
        help=f"among {', '.join(CONTENDERS)}; default: {' '.join(_DEFAULT)}",
    )
    parser.add_argument("--preset", help=f"{', '.join(presets.names())}, or a YAML file; in place of --optimizers")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="of the preset, besides its baseline; default: all")
    parser.add_argument("--seeds", nargs="+", type=ranges.SEED.read, help="default: 1 2, or the preset's")
    parser.add_argument("--jobs", type=ranges.SIZE.read, default=1, help="runs at a time; default: %(default)s")
    parser.add_argument("--output_dir", help="default: runs/compare, or runs/PRESET")
    parser.add_argument("--launcher", help="what starts a run, such as 'accelerate launch'; default: this Python")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.preset is not None and arguments.optimizers is not None:
        raise Mistake("--preset and --optimizers both say what is compared; give one")
    if arguments.arms is not None and arguments.preset is None:
        raise Mistake("--arms names arms of a preset; give --preset, or --optimizers in place of it")
    for argument in rest:
        name = argument.partition("=")[0]
        if name in _OURS:
            raise Mistake(f"{name} differs between the runs; use {_OURS[name]}")
    preset = presets.load(arguments.preset) if arguments.preset is not None else _chosen(arguments.optimizers)
    if arguments.arms is not None:
        preset = preset.only(arguments.arms)
    arguments.output_dir = arguments.output_dir or (
        "runs/compare" if arguments.preset is None else f"runs/{Path(arguments.preset).stem}"
    )
    agreement.check_folder(Path(arguments.output_dir))
    arguments.seeds = list(dict.fromkeys(arguments.seeds or preset.seeds))
    for name in preset.arms:
        read([*rest, *preset.argv(name)])  # a mistake ends the comparison before its first run
    return arguments, preset, rest


def _chosen(names: Sequence[str] | None) -> Preset:
    names = names or _DEFAULT
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise Mistake(f"--optimizers: unknown {', '.join(unknown)}; accepted are {', '.join(CONTENDERS)}")
    return Preset({name: CONTENDERS[name] for name in names})


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _data(wanted: Sequence[_Wanted]) -> list[dict[str, Any]]:
    """Return each data that finished runs had, once; arms may differ in it."""
    found: list[dict[str, Any]] = []
    for one in wanted:
        data = one.data()
        if data and data not in found:
            found.append(data)
    return found


def _conclude(
    runs: Sequence[comparison.Run], data: Sequence[dict[str, Any]], output: Path, preset: Preset, rest: Sequence[str]
) -> None:
    """Print the result, and write comparison.json, .md and .png."""
    rows = comparison.summarize(runs, preset.baseline)
    table = comparison.table(rows, preset.baseline)
    verdicts = comparison.verdicts(runs, preset.baseline, preset.pairs)
    figures.comparison(runs, output / "comparison.png", preset.baseline)
    pictures = ["![Losses](comparison.png)"]
    lines = _lines(runs, preset)
    grid = comparison.grid(lines, str(preset.axis)) if lines else ""
    if lines:
        figures.along_axis(lines, output / "axis.png", str(preset.axis))
        pictures.append("![Losses along the axis](axis.png)")
    sensitivities = _sensitivities(runs, preset) if preset.axis == "learning_rate" else {}
    notes = [f"{name}: a wrong learning rate costs {cost:.3f} nats per token" for name, cost in sensitivities.items()]
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in runs))
    about = f"Seeds {seeds}; settings: {shlex.join(rest) or 'those of the default job'}."
    about += "".join(f" Data: {one['dataset']}, SHA-256 {str(one['train tokens'])[:12]}." for one in data)
    if len({run.seed for run in runs}) > 1 and len(verdicts) >= _MANY:
        about += f" Of {len(verdicts)} intervals at 95%, {len(verdicts) / 20:.1f} miss the truth on average."
    if preset.equal == "seconds":
        about += f" Arms train for as long as {preset.baseline or comparison.baseline_of(list(preset.arms))} does."
    sections = [preset.about, grid, table, "\n".join(f"- {line}" for line in (*verdicts, *notes)), about, *pictures]
    report.write_text(output / "comparison.md", "\n\n".join(filter(None, sections)) + "\n")
    report.write(
        output / "comparison.json",
        {
            "arguments": list(rest),
            "data": list(data),
            "arms": {name: dict(settings) for name, settings in preset.arms.items()},
            "rows": [row.as_json() for row in rows],
            "verdicts": verdicts,
            "sensitivity": sensitivities,
            "runs": [run.as_json() for run in runs],
        },
    )
    printed = [
        "",
        table,
        *(["", grid] if grid else []),
        "",
        *verdicts,
        *notes,
        "",
        f"comparison.json, .md and .png are in {output}",
    ]
    print("\n".join(printed))


def _lines(runs: Sequence[comparison.Run], preset: Preset) -> dict[str, list[tuple[float, list[float]]]]:
    """Return the lines of a picture over the preset's axis: places and the losses of all seeds."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for name, own in comparison.by_contender(runs).items():
        place = preset.place(name)
        if place is not None:
            lines.setdefault(place[0], []).append((place[1], [run.eval_loss for run in own]))
    return lines


def _sensitivities(runs: Sequence[comparison.Run], preset: Preset) -> dict[str, float]:
    """Return `comparison.sensitivity` of each line, where the loss before training is known."""
    found: dict[str, float] = {}
    start = max((run.curve[0][1] for run in runs if run.curve and run.curve[0][0] == 0), default=None)
    if start is not None:
        for name, line in _lines(runs, preset).items():
            losses = {place: statistics.fmean(own) for place, own in line}
            found[name] = comparison.sensitivity(losses, start)
    return found


if __name__ == "__main__":
    main()
