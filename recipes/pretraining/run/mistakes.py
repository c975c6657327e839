"""Tell a user's mistake in one line on stderr, with exit code 2; a traceback means a bug of ours."""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

# What the machine refuses, whatever the program does.
_ENVIRONMENT = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}

# Negative numbers that argparse takes for values.
_PLAIN_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
# Packages whose errors come from the network or the Hub.
_NETWORK = {"huggingface_hub", "httpx"}


class Mistake(ValueError):
    """Raised for what a user can mend; the message names the value, the accepted ones and the remedy."""


class Told(SystemExit):
    """End a program whose mistake was printed: exit code 2; as a string, the printed message."""

    def __init__(self, message: str) -> None:
        """Keep the message.

        Args:
            message: what was printed, without the program's name.
        """
        super().__init__(2)
        self.message = message

    def __str__(self) -> str:
        return self.message


def told(program: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator for a program's `main`, which prints a mistake in one line and ends with exit code 2.

    Of several processes only the first of each machine prints. What ends with a text of several lines, such as the log
    of a failed run, is no mistake and passes. Ctrl-C ends it with a line too, and a shell's exit code for it, 130.

    Args:
        program: name before the message.
    """

    def decorate(main: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(main)
        def run(*given: Any, **settings: Any) -> Result:
            try:
                return main(*given, **settings)
            except Mistake as mistake:
                message = str(mistake)
            except SystemExit as end:
                if not isinstance(end.code, str) or "\n" in end.code:
                    raise
                message = end.code
            except KeyboardInterrupt:
                _print(program, "interrupted")
                raise SystemExit(128 + signal.SIGINT) from None
            except Exception as error:
                known = _of_the_world(error)
                if known is None:
                    raise
                message = known
            return _tell(program, message)

        return run

    return decorate


def _of_the_world(error: Exception) -> str | None:
    """Return the message for what the machine or the network refuses; None for other errors."""
    if type(error).__module__.partition(".")[0] in _NETWORK:
        return (
            f"the Hugging Face Hub refused, or is out of reach: {one_line(error)}; log in with hf auth login, or leave "
            "out --push_to_hub"
        )
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None


def _tell(program: str, message: str) -> NoReturn:
    message = " ".join(message.split())
    _print(program, message)
    raise Told(message) from None


def _print(program: str, message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") in ("", "0", "-1"):
        print(f"{program}: {message.removeprefix(f'{program}: ')}", file=sys.stderr, flush=True)


def one_line(value: object, length: int = 300) -> str:
    """Return an error or a value as one line of at most `length` characters."""
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= length else f"{text[:length]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the names close to a wrong one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.7)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


class OneLine(argparse.ArgumentParser):
    """An ArgumentParser that raises Mistake in place of printing a usage screen.

    It also takes negative numbers such as -1e-3 and -inf for values, which argparse takes for flags.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown arguments raise Mistake unless a caller has asked for them."""
        args = sys.argv[1:] if args is None else args
        return super().parse_known_args(_with_negative_numbers(list(args)), namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an unknown argument raises Mistake."""
        known, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return known

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raise Mistake if arguments were not understood."""
        if not unknown:
            return
        first = unknown[0]
        if not first.startswith("-"):
            raise Mistake(f"{first!r} belongs to no flag; settings are given as --NAME VALUE (--help lists them)")
        name = first.partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings if "-" not in flag[2:]]
        raise Mistake(f"unknown flag {name}{did_you_mean(name, flags)}; --help lists the flags")

    def error(self, message: str) -> NoReturn:
        """Raise Mistake."""
        if message.startswith("argument "):
            flags, _, rest = message.removeprefix("argument ").partition(": ")
            name = flags.partition("/")[0]
            message = f"{name} has no value; give one" if rest.startswith("expected ") else f"{name}: {rest}"
        raise Mistake(message)


def _with_negative_numbers(args: list[str]) -> list[str]:
    joined: list[str] = []
    for arg in args:
        before = joined[-1] if joined else ""
        is_flag_to_argparse = arg.startswith("-") and _PLAIN_NEGATIVE.match(arg) is None
        if is_flag_to_argparse and before.startswith("--") and "=" not in before and _is_number(arg):
            joined[-1] = f"{before}={arg}"
        else:
            joined.append(arg)
    return joined


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
