"""`python -m mars_hf compare SCRIPT --optim adamw_torch mars_adamw ... -- ARGS`: does it help on this script?"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # --help and a missing package answer before these imports
    from mars_hf.compare.order import Order
    from mars_hf.compare.plan import Plan

_ARMS = ["adamw_torch", "mars_adamw", "mars_m", "muon"]
_NEEDED = ("scipy", "matplotlib")

_DESCRIPTION = """\
Does an optimizer help on a script of yours, at which rate, and how sure is that? The script is not changed: each run
trains it in a process of its own, with optimizer, learning rate, decay, seed and output folder set where
TrainingArguments are made, hard-coded ones too; what else is changed is said. Nothing goes to the Hub or to trackers.

The learning rate of each arm is searched in factors of two: the first arm starts at the script's own, rules of MARS at
what `suggest` makes of the first arm's best. The best three rates get more seeds, and new seeds at each arm's best are
compared in pairs with the first arm. The first run is timed, and tells how long all takes. Ctrl-C stops; the same
command goes on.
"""
_EXAMPLES = """examples:
  python -m mars_hf compare train.py --optim adamw_torch mars_adamw mars_m muon -- --its own --arguments
  python -m mars_hf compare -m trl.scripts.sft --set eval_strategy=steps eval_steps=0.2 -- --model_name_or_path ...
  python -m mars_hf compare train.py --optim adamw_torch adamw_torch_fused:adam_beta1=0.8 mars_m:clip_threshold=none
  python -m mars_hf compare train.py --optim script mars_adamw --metric accuracy --greater_is_better
  python -m mars_hf compare train.py --launcher "accelerate launch -m" --gpus 0,1 2,3
  python -m mars_hf compare train.py --dry_run > wave.sh       # commands for a cluster; again when they have ended

The result is comparison.md, .json and .png in --output_dir. See docs/compare.md."""


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that ends with one line and exit code 2, without a usage screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"python -m mars_hf compare: {' '.join(message.split())}; --help shows how to use it\n")


def main(argv: list[str]) -> int:
    """Run what is missing, then report; return the exit code."""
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    found = parser()
    options, unknown = found.parse_known_args(own)
    if unknown:
        found.error(f"unknown arguments: {shlex.join(unknown)}; the script's own come after --")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"python -m mars_hf compare needs {' and '.join(missing)}: pip install 'mars_hf[compare]'", file=sys.stderr
        )
        return 2
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # schedulers and `timeout` send it
    try:
        return _compare(options, rest)
    except (ValueError, OSError) as error:
        print(f"python -m mars_hf compare: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped, and its runs with it; the same command goes on where it was", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare(options: argparse.Namespace, arguments: list[str]) -> int:
    from mars_hf.compare import files
    from mars_hf.compare.comparison import Comparison
    from mars_hf.compare.work import Work

    plan = _plan(options)
    if options.greater_is_better and options.metric is None:
        raise ValueError("--greater_is_better is of --metric; give both")
    jobs = max(1, len(options.gpus)) if options.jobs is None else options.jobs
    if jobs < 1:
        raise ValueError("--jobs: give 1 or more")
    template = _template(options, arguments)
    output = Path(options.output_dir).resolve()
    with files.locked(output, "compares"):
        output.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(plan, template, output, options.metric, options.greater_is_better)
        if options.dry_run:
            for run in itertools.islice(comparison.missing(), 1000):
                print(run.shell_line)
            return 0
        first, *others = (arm.name for arm in plan.arms)
        there = "the first run tells metric and time" if comparison.metric is None else "it goes on there"
        print(
            f"{options.script}: {', '.join(others)} against {first}, new seeds {', '.join(map(str, plan.seeds))}; runs "
            f"go to {output}, {there}"
        )
        work = Work(comparison, jobs, options.gpus, options.max_runs)
        work.until_done()
        if comparison.metric is not None:
            is_done = next(comparison.missing(), None) is None
            go_on = "" if is_done else "; runs are missing, and the same command goes on"
            print(f"\n{work.report()}\ncomparison.md, .json and .png are in {output}{go_on}")
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    """Return what is compared.

    Raises:
        ValueError: something that cannot be.
    """
    from mars_hf.compare.plan import Arm, Plan, setting

    if options.plan and options.optim:
        raise ValueError("--plan and --optim both say what is compared; give one of them")
    plan = Plan.of_file(options.plan) if options.plan else Plan(list(map(Arm.of_text, options.optim or _ARMS)))
    if options.seeds is not None:
        plan.seeds = tuple(range(1, options.seeds + 1))
    if options.search_seeds is not None:
        plan.search_seeds = tuple(options.search_seeds)
    plan.set = {**plan.set, **dict(map(setting, options.set))}
    plan.check()
    return plan


def _template(options: argparse.Namespace, arguments: list[str]) -> Order:
    """Return what all runs have in common.

    Raises:
        ValueError: there is no such script or module.
    """
    from mars_hf.compare.order import Order, hash_of

    text_hash = hash_of(options.script, options.module)
    return Order(options.script, options.module, text_hash, arguments, shlex.split(options.launcher))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = _Parser(
        prog="python -m mars_hf compare",
        usage="python -m mars_hf compare [-m] SCRIPT [--optim ARM ...] [options] [-- arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("script", metavar="SCRIPT", help="path of the script")
    add("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    add("--output_dir", default="runs/compare", metavar="FOLDER", help="default: %(default)s")

    add = found.add_argument_group("what is compared").add_argument
    about = "names of --optim, with settings after a colon: mars_m:clip_threshold=none; `script` trains what the script"
    add("--optim", nargs="+", action="extend", metavar="ARM", help=f"{about} trains; the first is the baseline")
    add("--plan", metavar="FILE", help="YAML with arms and more, in place of --optim; see docs/compare.md")
    about = "TrainingArguments of all runs: max_steps=200"
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=about)
    about = "of the evaluations; default: the script's metric_for_best_model, or eval_loss; `loss` is that of training"
    add("--metric", metavar="NAME", help=about)
    add("--greater_is_better", action="store_true", help="a higher value of --metric is better")

    add = found.add_argument_group("how sure, and how long").add_argument
    add("--seeds", type=int, metavar="COUNT", help="new seeds at the best rates; default: 3")
    about = "the first finds the best rate, and all choose among the best three; default: 42 43 44"
    add("--search_seeds", type=int, nargs="+", metavar="SEED", help=about)
    about = "the first rates alone: numbers, and no verdict"
    add("--no_search", dest="search_seeds", action="store_const", const=(), help=about)
    add("--max_runs", type=int, metavar="COUNT", help="stop after so many runs; the same command goes on")

    add = found.add_argument_group("how it runs").add_argument
    add("--launcher", default="", metavar="WORDS", help="what starts a module: 'accelerate launch -m'")
    add("--jobs", type=int, metavar="COUNT", help="runs at a time; default: one, or one for each of --gpus")
    about = "CUDA_VISIBLE_DEVICES of each job; 0,1 gives a job two"
    add("--gpus", nargs="+", action="extend", default=[], metavar="IDS", help=about)
    add("--dry_run", action="store_true", help="print the commands that can run now, for a cluster, and run nothing")
    return found
