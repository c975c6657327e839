"""End a program over wrong input or a refusal of the machine with one line on stderr."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from pretraining.run import launcher


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Decorate a program's `main`: wrong input ends it with one line and exit code 2, Ctrl-C with 130.

    Wrong input is a ValueError, an OSError, a number too large, or a setting that needs a package that is not here;
    other exceptions keep their traceback. Of several processes the first of each machine prints.

    Args:
        program: name before the message.
    """
    try:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if not re.fullmatch(r"-?\d+", value := os.environ.get(name, "0")):
                raise ValueError(f"{name}={value} in the environment is not a number; unset it, or launch anew")
        _check_launched()
        yield
    except (ValueError, OSError, OverflowError, ImportError) as error:
        _print(program, " ".join(str(error).split()) or type(error).__name__)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        _print(program, "interrupted")
        raise SystemExit(128 + signal.SIGINT) from error


def _check_launched() -> None:
    """Raise ValueError for a plugin that accelerate's launcher sets up, in a process that no launcher started."""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        value = os.environ.get(name, "")
        if value.lower() in ("1", "true", "yes", "on", "y", "t") and "RANK" not in os.environ:
            raise ValueError(f"{name}={value} in the environment is for accelerate launch; unset it, or launch with it")


def run(recipe: str) -> NoReturn:
    """Run a recipe as a program: import its module, call its `main`, and end.

    A recipe calls this above its imports. They take seconds, in which the launcher may be killed; the watch for that
    starts here, and never where a recipe is imported.

    DDP leaks a reference to its gloo process group, whose threads abort the process if they need the interpreter while
    it ends (torch 2.9 to 2.13). A process of several that has succeeded therefore ends before the interpreter does.

    Args:
        recipe: name of the module, which is the file that calls this.
    """
    launcher.watch()
    try:
        module = importlib.import_module(recipe)
    except ModuleNotFoundError as error:
        extras = "recipes,eval" if recipe == "evaluate_checkpoint" else "recipes"
        _print(f"{recipe}.py", f"{error}; it needs pip install -c constraints.txt -e '.[{extras}]'")
        raise SystemExit(2) from error
    module.main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit.register(_leave)
    sys.exit()


def _leave() -> None:
    """Run what else is registered to run at exit, and end the process."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _print(program: str, message: str) -> None:
    """Print a line; text of others may be long, and may hold what a terminal obeys."""
    if os.environ.get("LOCAL_RANK", "").lstrip("0").isdecimal():
        return
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in message.removeprefix(f"{program}: "))
    short = re.sub(r"\S{201,}", lambda word: f"{word[0][:200]}...", text)
    print(f"{program}: {short}", file=sys.stderr, flush=True)
