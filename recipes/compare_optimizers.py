#!/usr/bin/env python
"""Compare optimizers on the same data, budget and seeds: does MARS help here?

    python recipes/compare_optimizers.py                                    # the default job
    python recipes/compare_optimizers.py --optimizers mars_adamw adamw --seeds 1 2 3 --max_steps 1000
    python recipes/compare_optimizers.py --preset controls --seeds 1 2 3 4 5 --jobs 2 --cpu_threads 1
    python recipes/compare_optimizers.py --launcher "accelerate launch --config_file accelerate_configs/ddp.yaml" \
        --config gpt2-small --output_dir runs/compare-small

All other arguments go to every run of recipes/pretrain_gpt2.py. Settings for one optimizer belong in the section
`optimizers` of a config; recipes/presets holds whole comparisons. Table, verdicts and picture go to comparison.json,
.md and .png in the output folder, and are there from the first runs on. The script skips runs that are finished there,
so start an interrupted comparison again to resume it.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.compare import comparison, comparison_page, comparison_tables, equal_time, presets
from pretraining.compare.launch import Diverged, RunFailed, metrics_of, pretrain, words_of
from pretraining.compare.presets import Preset
from pretraining.run import agreement, checkpoints, folder_lock, identity, ranges, report, run_folder
from pretraining.run.arguments import OPTIMIZERS, read
from pretraining.run.errors import one_line_errors
from tqdm.auto import tqdm

# Contender to its settings, for comparisons without a preset.
CONTENDERS: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS}
CONTENDERS |= {
    f"{name}_exact": {"optimizer": name, "is_approx": False} for name in OPTIMIZERS if name.startswith("mars_")
}
_DEFAULT = ["mars_adamw", "mars_adamw_exact", "mars_lion", "mars_shampoo", "mars_m", "adamw", "nadamw", "muon"]
# Turn off output of a single run that this script does not need.
_QUIET = ["--sample_tokens", "0", "--disable_tqdm", "true"]
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
    def _command(self) -> dict[str, Any]:
        return {"launcher": self.launcher, "argv": self.argv}

    @property
    def _settings(self) -> dict[str, Any]:
        """Return all settings, those of a config too, which may have changed under its name."""
        return identity.chosen(read(self.argv)[0])

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
            raise ValueError(
                f"{self.folder} holds a run that is not of a comparison; give another --output_dir, or move it away"
            ) from None
        remedy = "give another --output_dir, or remove that folder"
        settings = there.pop("settings", {})
        if there != self._command:
            raise ValueError(
                f"{self.folder} holds a run with other settings; {remedy}; there: {_command(there)}; asked: "
                f"{_command(self._command)}"
            )
        now = self._settings
        changed = [
            f"{key} {settings[key]}, now {now[key]}" for key in settings if key in now and settings[key] != now[key]
        ]
        if changed:
            raise ValueError(f"{self.folder} holds a run with other settings: {'; '.join(changed)}; {remedy}")

    def run(self) -> comparison.Run:
        """Start or resume the run, and return its result; a finished run is only read."""
        with folder_lock.held(self.folder, "trains", wait=True):  # a run whose comparison was killed saves and ends
            self.folder.mkdir(exist_ok=True)
        if not self.is_finished:
            resume = ["--resume_from_checkpoint", "true"] if self._can_resume() else []
            report.write(self.folder / "arguments.json", {**self._command, "settings": self._settings})
            try:
                pretrain([*self.argv, *resume], self.folder, self.launcher or [sys.executable])
            except Diverged as failure:
                report.write(self.folder / "diverged.json", {"message": str(failure)})
        if self._has_diverged:
            learning_rate = read(self.argv)[0].learning_rate
            return comparison.Run(self.contender, self.seed, learning_rate, math.nan, math.nan, ())
        metrics = metrics_of(self.folder)
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


@one_line_errors("compare_optimizers.py")
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
                steps = equal_time.steps_of(preset, [*_QUIET, *rest], output, launcher)
            wanted = [
                _Wanted(name, seed, output / f"{presets.folder_name(name)}-{seed}", launcher, argv)
                for seed in arguments.seeds
                for name in preset.arms
                for argv in [[*_QUIET, *rest, *preset.argv(name), *steps.get(name, []), "--seed", str(seed)]]
            ]
            for one in wanted:
                one.refuse_other_settings()
            result = _run(wanted, arguments.jobs, comparison_page.Result(preset, [], len(wanted), [], rest), output)
            print(f"\n{comparison_page.text(result)}\n\ncomparison.json, .md and .png are in {output}")
    except RunFailed as failure:
        raise SystemExit(str(failure)) from None


def _run(wanted: Sequence[_Wanted], jobs: int, result: comparison_page.Result, output: Path) -> comparison_page.Result:
    """Run what is missing; the table so far stands above the progress bar, and the page has it too."""
    _data([one for one in wanted if one.is_finished])
    done: dict[tuple[str, int], comparison.Run] = {}
    waits = [one.key for one in wanted if not one.is_finished]
    there = len(wanted) - len(waits)
    with tqdm(total=len(wanted), initial=there, unit="run") as progress, ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(one.run): one for one in wanted}
            for future in as_completed(futures):
                one = futures[future]
                done[one.key] = future.result()
                finished = [known for known in wanted if known.key in done]
                result = result._replace(runs=[done[known.key] for known in finished], data=_data(finished))
                if one.key in waits:
                    progress.update()
                    progress.set_description(str(done[one.key]))
                    if result.comparable and len(done) < len(wanted):
                        progress.write(_so_far(result))
                        comparison_page.write(result, output)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    comparison_page.write(result, output)
    return result


def _so_far(result: comparison_page.Result) -> str:
    rows = comparison.summarize(result.comparable, result.baseline)
    return comparison_tables.table(rows, result.baseline) + "\n"


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, Preset, list[str]]:
    """Return this script's arguments, what is compared, and the arguments of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
        raise ValueError("--preset and --optimizers both say what is compared; give one")
    if arguments.arms is not None and arguments.preset is None:
        raise ValueError("--arms names arms of a preset; give --preset, or --optimizers in place of it")
    for argument in rest:
        name = _flag(argument)
        if name in _OURS:
            raise ValueError(f"{name} differs between the runs; use {_OURS[name]}")
        if name == "--resume_from_checkpoint":
            raise ValueError(f"{name}: an interrupted comparison goes on by itself; leave it out")
    preset = presets.load(arguments.preset) if arguments.preset is not None else _chosen(arguments.optimizers)
    stated = {f"--{name}" for settings in preset.arms.values() for name in settings}
    for argument in rest:
        if _flag(argument) in stated:
            raise ValueError(
                f"{_flag(argument)}: the arms of {arguments.preset} state it themselves; leave it out, or give a YAML "
                f"file of your own, like those in {presets.FOLDER}"
            )
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


def _flag(argument: str) -> str:
    """Return the name of a flag, whose words may be joined by dashes."""
    name = argument.partition("=")[0]
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name


def _chosen(names: Sequence[str] | None) -> Preset:
    names = names or _DEFAULT
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"--optimizers: unknown {', '.join(unknown)}; accepted are {', '.join(CONTENDERS)}")
    return Preset({name: CONTENDERS[name] for name in names})


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _data(finished: Sequence[_Wanted]) -> list[dict[str, Any]]:
    """Return each data that finished runs had, once.

    Raises:
        ValueError: runs of one arm read different data.
    """
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for one in finished:
        data = one.data()
        if not data:
            continue
        folder, before = found.setdefault(one.contender, (one.folder, data))
        if before != data:
            raise ValueError(f"{folder} and {one.folder} read different data; remove the one whose data are gone")
    return [json.loads(text) for text in dict.fromkeys(json.dumps(data) for _, data in found.values())]


if __name__ == "__main__":
    main()
