"""End a program over wrong input or a refusal of the machine with one line on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Decorate a program's `main`: wrong input ends it with one line and exit code 2, Ctrl-C with 130.

    Wrong input is a ValueError, an OSError, or a setting that needs a package that is not here; other exceptions keep
    their traceback. Of several processes the first of each machine prints.

    Args:
        program: name before the message.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        _print(program, " ".join(str(error).split()) or type(error).__name__)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        _print(program, "interrupted")
        raise SystemExit(128 + signal.SIGINT) from error


def _print(program: str, message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: {message.removeprefix(f'{program}: ')}", file=sys.stderr, flush=True)
