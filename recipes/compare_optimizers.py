#!/usr/bin/env python
"""Compare optimizers on the same data, budget and seeds: does MARS help here?

    python recipes/compare_optimizers.py                                    # the default job
    python recipes/compare_optimizers.py --optimizers mars_adamw adamw --seeds 1 2 3 --max_steps 1000
    python recipes/compare_optimizers.py --launcher "accelerate launch --config_file accelerate_configs/ddp.yaml" \
        --config gpt2-small --output_dir runs/compare-small

All other arguments go to every run of recipes/pretrain_gpt2.py. Settings for one optimizer belong in the section
`optimizers` of a config. Table, verdicts and picture go to comparison.json, .md and .png in the output folder. The
script skips runs that are finished there, so start an interrupted comparison again to resume it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretraining import agreement, checkpoints, comparison, figures, folder_lock, ranges, report, run_folder
from pretraining.arguments import OPTIMIZERS, read
from pretraining.launch import RunFailed, pretrain, words_of
from pretraining.mistakes import Mistake, OneLine, told
from tqdm.auto import tqdm

# Contender to its arguments.
CONTENDERS = {name: ["--optimizer", name] for name in OPTIMIZERS}
CONTENDERS |= {
    f"{name}_exact": ["--optimizer", name, "--is_approx", "false"] for name in OPTIMIZERS if name.startswith("mars_")
}
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
    def _settings(self) -> dict[str, Any]:
        return {"launcher": self.launcher, "argv": self.argv}

    @property
    def _is_finished(self) -> bool:
        return (self.folder / "metrics.json").exists()

    def refuse_other_settings(self) -> None:
        """Stop if the folder holds a run with other settings."""
        if not self._is_finished and not checkpoints.checkpoints(self.folder):
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
        if not self._is_finished:
            resume = ["--resume_from_checkpoint", "true"] if self._can_resume() else []
            report.write(self.folder / "arguments.json", self._settings)
            pretrain([*self.argv, *resume], self.folder, self.launcher or [sys.executable])
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

    def _can_resume(self) -> bool:
        run = run_folder.read(self.folder)
        return run is not None and checkpoints.newest_whole(self.folder, run.id)[0] is not None


def _command(settings: dict[str, Any]) -> str:
    return shlex.join([*settings["launcher"], "pretrain_gpt2.py", *settings["argv"]])


@told("compare_optimizers.py")
def main(argv: list[str] | None = None) -> None:
    """Run the missing runs, then report; `argv` is the command line without the program's name."""
    arguments, rest = _parse(argv)
    output = Path(arguments.output_dir)
    launcher = words_of(arguments.launcher)
    wanted = [
        _Wanted(
            name, seed, output / f"{name}-{seed}", launcher, [*_QUIET, *rest, *CONTENDERS[name], "--seed", str(seed)]
        )
        for seed in arguments.seeds
        for name in arguments.optimizers
    ]
    output.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock.held(output, "compares"):
            for one in wanted:
                one.refuse_other_settings()
            _conclude(_run(wanted), output, rest)
    except RunFailed as failure:
        raise SystemExit(str(failure)) from None


def _run(wanted: Sequence[_Wanted]) -> list[comparison.Run]:
    runs = []
    with tqdm(wanted, unit="run") as progress:
        for one in progress:
            progress.set_description(f"{one.contender}, seed {one.seed}")
            runs.append(one.run())
    return runs


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments, and those of the runs."""
    parser = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--optimizers",
        nargs="+",
        metavar="NAME",
        default=["mars_adamw", "mars_adamw_exact", "mars_lion", "mars_shampoo", "mars_m", "adamw"],
        help=f"among {', '.join(CONTENDERS)}; default: %(default)s",
    )
    parser.add_argument("--seeds", nargs="+", type=ranges.SEED.read, default=[1, 2], help="default: %(default)s")
    parser.add_argument("--output_dir", default="runs/compare", help="default: %(default)s")
    parser.add_argument("--launcher", help="what starts a run, such as 'accelerate launch'; default: this Python")
    arguments, rest = parser.parse_known_args(argv)
    unknown = [name for name in arguments.optimizers if name not in CONTENDERS]
    if unknown:
        raise Mistake(f"--optimizers: unknown {', '.join(unknown)}; accepted are {', '.join(CONTENDERS)}")
    for argument in rest:
        name = argument.partition("=")[0]
        if name in _OURS:
            raise Mistake(f"{name} differs between the runs; use {_OURS[name]}")
    agreement.check_folder(Path(arguments.output_dir))
    arguments.optimizers = list(dict.fromkeys(arguments.optimizers))
    arguments.seeds = list(dict.fromkeys(arguments.seeds))
    for name in arguments.optimizers:
        read([*rest, *CONTENDERS[name]])  # a mistake ends the comparison before its first run
    return arguments, rest


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _conclude(runs: Sequence[comparison.Run], output: Path, rest: Sequence[str]) -> None:
    """Print the result, and write comparison.json, .md and .png."""
    rows = comparison.summarize(runs)
    table, verdicts = comparison.table(rows), comparison.verdicts(rows)
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in runs))
    figures.comparison(runs, output / "comparison.png")
    about = f"Seeds {seeds}; settings: {shlex.join(rest) or 'those of the default job'}."
    lines = [table, "", *(f"- {verdict}" for verdict in verdicts), "", about, "", "![Losses](comparison.png)", ""]
    report.write_text(output / "comparison.md", "\n".join(lines))
    report.write(
        output / "comparison.json",
        {
            "arguments": list(rest),
            "rows": [row._asdict() for row in rows],
            "verdicts": verdicts,
            "runs": [dataclasses.asdict(run) for run in runs],
        },
    )
    print("\n".join(["", table, "", *verdicts, "", f"comparison.json, .md and .png are in {output}"]))


if __name__ == "__main__":
    main()
