"""`python -m mars_hf run SCRIPT ARGS...`: any Hugging Face script, unmodified, with MarsTrainer as its Trainer.

The other commands are `compare`, `check`, `configs`, `to_universal` and `suggest`; see `--help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import mars_hf
from mars_hf import log
from mars_hf.groups import suggest

if TYPE_CHECKING:
    from mars_hf.training.guard import StepWatch

_EPILOG = """examples:
  python -m mars_hf run run_clm.py --optim mars_adamw --optim_args beta1=0.9,beta2=0.999 --learning_rate 2.4e-5 ...
  python -m mars_hf run -m trl.scripts.sft --optim mars_adamw --optim_args is_approx=false ...
  accelerate launch -m mars_hf run SCRIPT --optim mars_lion ...
  python -m mars_hf to_universal out/checkpoint-10/global_step10 out/checkpoint-10/global_step10_universal
  python -m mars_hf suggest --adamw-lr 3e-4 --width 768
  python -m mars_hf compare train.py --optim adamw_torch mars_adamw muon -- --the_scripts own --arguments"""


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that ends with one line and exit code 2, without a usage screen."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        self.exit(2, f"python -m mars_hf: {line}; --help shows how to use it\n")


def main(argv: list[str] | None = None) -> None:
    """Run a command line; `argv` is without the program's name, None takes sys.argv's."""
    parser = _Parser(prog="python -m mars_hf", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"mars_hf {mars_hf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a script with --optim mars_adamw, ..., and all of MarsTrainer")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument("script", metavar="SCRIPT", help="path of the script")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments, passed on untouched")
    convert = commands.add_parser("to_universal", help="convert a DeepSpeed ZeRO checkpoint into a universal one")
    convert.add_argument("source", metavar="INPUT_FOLDER", help="folder with the *_optim_states.pt of all ranks")
    convert.add_argument("target", metavar="OUTPUT_FOLDER", help="new folder beside it")
    commands.add_parser("check", help="compare kernels with plain PyTorch on this machine")
    commands.add_parser("configs", help="print the folder of the launch configs for accelerate")
    suggest.add_arguments(commands.add_parser("suggest", help="suggest settings for MARS from those of AdamW"))
    commands.add_parser("compare", help="does an optimizer help on a script of yours? one command answers")
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return
    if argv[0] == "compare":  # it has a --help of its own
        from mars_hf.compare import command

        sys.exit(command.main(argv[1:]))
    options = parser.parse_args(suggest.with_hyphens(argv))
    if options.command == "run":
        _run(parser, options.script, options.arguments, is_module=options.module)
        return
    if options.command == "check":
        from mars_hf import selfcheck

        sys.exit(0 if selfcheck.run() else 1)
    try:
        if options.command == "configs":
            # A wheel holds the configs in the package; in a checkout they are beside it.
            package = Path(__file__).resolve().parent
            folders = [path / "accelerate_configs" for path in (package, package.parent)]
            print(folders[0] if folders[0].is_dir() else folders[1])
        elif options.command == "suggest":
            print(suggest.run(options))
        else:
            from mars_hf.universal import to_universal

            to_universal(options.source, options.target)
    except (ValueError, OSError, ImportError) as error:  # ImportError: the files hold classes of DeepSpeed
        parser.error(str(error) or repr(error))


def _run(parser: _Parser, script: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a script or module as `__main__`, after `Trainer` has become MarsTrainer."""
    if not is_module and not os.path.isfile(script):
        parser.error(f"no such script: {script!r} (give a path, or -m MODULE)")
    if not is_module:
        try:
            compile(Path(script).read_bytes(), script, "exec")
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes
            parser.error(f"{script} is no Python: {error}")
    replace_trainer()
    from mars_hf.training.guard import StepWatch

    sys.argv = [script, *arguments]
    with StepWatch.of_process() as watch:
        try:
            if is_module:
                _run_module(parser, script)
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(script))
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:  # as of scripts that end with sys.exit(main())
            if end.code in (0, None):
                _require_mars(watch, script, arguments)
            raise
        _require_mars(watch, script, arguments)


def _run_module(parser: _Parser, name: str) -> None:
    reason = "give a name that python -m can run, or a path without -m"
    try:  # only now, because looking for a module imports the packages above it, which may import Trainer
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        spec, reason = None, str(error)
    if spec is None:
        parser.error(f"no such module: {name!r} ({reason})")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _require_mars(watch: StepWatch, script: str, arguments: list[str]) -> None:
    """Judge a script that has ended well: exit with code 1 if another optimizer trained, or would have.

    If nothing trained at all, a warning says so.
    """
    problem = watch.problem()
    if problem is not None:
        sys.exit(f"python -m mars_hf run: {problem}" if log.is_first_rank() else 1)
    asks_for_help = "-h" in arguments or "--help" in arguments
    if not watch.mars_has_stepped and not asks_for_help:
        log.warning(
            f"{script} has ended, and MARS has trained nothing in this process. If the script trains in processes that "
            "it starts itself, start those with accelerate launch -m mars_hf run"
        )


def replace_trainer() -> None:
    """Register the rules' names, and make `transformers.Trainer` MarsTrainer for whatever is imported from now on.

    Classes derived from it, such as trl's, then have everything that MARS adds.
    """
    import transformers.trainer

    from mars_hf.training.trainer import MarsTrainer  # registers

    transformers.Trainer = transformers.trainer.Trainer = MarsTrainer  # type: ignore[misc]


if __name__ == "__main__":
    main()
