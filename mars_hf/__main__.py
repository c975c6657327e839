"""`python -m mars_hf run SCRIPT ARGS...`: any Hugging Face script, unmodified, with MARS registered.

`Trainer` is MarsTrainer there: the script has exact MARS (`--optim_args is_approx=false`), clipping inside the step and
the optimizer it hands over. So it is in processes that the script starts, such as those of `trl sft`.

`python -m mars_hf configs`: the folder of the launch configs for `accelerate launch --config_file`.

`python -m mars_hf to_universal INPUT_FOLDER OUTPUT_FOLDER`: a DeepSpeed checkpoint for another number of processes.

`python -m mars_hf suggest --adamw-lr LR`: settings of MARS from those of AdamW.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from mars_hf import suggest

_EPILOG = """examples:
  python -m mars_hf run run_clm.py --optim mars_adamw --optim_args gamma=0.025,beta1=0.95 --learning_rate 3e-3 ...
  python -m mars_hf run -m trl.scripts.sft --optim mars_adamw --optim_args is_approx=false ...
  python -m mars_hf run $(which trl) sft --optim mars_adamw ...
  accelerate launch -m mars_hf run SCRIPT --optim mars_lion ...
  python -m mars_hf to_universal out/checkpoint-10/global_step10 out/checkpoint-10/global_step10_universal
  python -m mars_hf suggest --adamw-lr 3e-4 --batch-tokens 524288 --width 768"""


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that ends with one line and exit code 2, without a usage screen."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        self.exit(2, f"python -m mars_hf: {line}; --help shows how to use it\n")


def main(argv: list[str] | None = None) -> None:
    """Run a command line; `argv` is without the program's name, None takes sys.argv's."""
    parser = _Parser(prog="python -m mars_hf", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run a script with --optim mars_adamw, ..., and all of MarsTrainer", add_help=False
    )
    run.add_argument("-h", "--help", action="help")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument("script", metavar="SCRIPT", help="path of the script")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments, passed on untouched")
    convert = commands.add_parser("to_universal", help="convert a DeepSpeed ZeRO checkpoint into a universal one")
    convert.add_argument("source", metavar="INPUT_FOLDER", help="folder with the *_optim_states.pt of all ranks")
    convert.add_argument("target", metavar="OUTPUT_FOLDER", help="new folder beside it")
    commands.add_parser("configs", help="print the folder of the launch configs for accelerate")
    suggestions = commands.add_parser("suggest", help="suggest settings for MARS from those of AdamW")
    suggest.add_arguments(suggestions)
    command = parser.parse_args(argv)
    if command.command == "configs":
        folder = _launch_configs()
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder; this installation lacks the launch configs, install mars_hf again")
        print(folder)
        return
    if command.command == "suggest":
        try:
            print(suggest.run(command))
        except ValueError as error:
            suggestions.error(str(error))
        return
    if command.command == "to_universal":
        from mars_hf.universal import to_universal

        try:
            to_universal(command.source, command.target)
        except (ValueError, ImportError) as error:  # ImportError: the files hold classes of DeepSpeed
            convert.error(str(error) or repr(error))
        except OSError as error:
            convert.error(f"{error.filename or command.source}: {error.strerror or error}")
        return
    if command.module:
        _check_module(parser, command.script, imports=False)
    else:
        _check_script(parser, command.script)

    from mars_hf.training import child_processes
    from mars_hf.training.registry import register
    from mars_hf.training.script_trainer import replace_trainer

    register()
    replace_trainer()
    child_processes.inherit(os.environ)
    sys.argv = [command.script, *command.arguments]
    if command.module:
        _check_module(parser, command.script, imports=True)  # after register(), as packages above it are imported
        runpy.run_module(command.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(command.script))
        runpy.run_path(command.script, run_name="__main__")


def _check_script(parser: _Parser, script: str) -> None:
    """End with a line if there is no script; what a script does wrong is its own traceback."""
    if not os.path.exists(script):
        parser.error(f"no such script: {script!r} (give a path, or -m MODULE)")
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        parser.error(f"{script!r} is a folder (give the path of a script, or -m MODULE)")


def _check_module(parser: _Parser, module: str, *, imports: bool) -> None:
    """End with a line if there is no such module; without `imports`, look only for the package that holds it."""
    found = _find_module(module if imports else module.partition(".")[0])
    if found is None:
        parser.error(f"no such module: {module!r} (give a name that python -m finds, or a path without -m)")
    is_package = found.submodule_search_locations is not None
    if imports and is_package and _find_module(f"{module}.__main__") is None:
        parser.error(f"{module!r} is a package without a __main__, which cannot run (give one of its modules)")


def _find_module(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # an empty name
        return None
    except ImportError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it needs one that is not installed
        return None


def _launch_configs() -> Path:
    """Return the folder of the launch configs: in the package of a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    folders = [package / "accelerate_configs", package.parent / "accelerate_configs"]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


if __name__ == "__main__":
    main()
