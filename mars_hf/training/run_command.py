"""Say how a run was started: its command without secrets, and the versions of what ran."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Packages that a card names if the run has imported them.
_PACKAGES = ("torch", "transformers", "accelerate", "mars_hf", "datasets", "tokenizers", "peft", "trl")
_HIDDEN = "***"
# The last word of an option that takes a secret; `--api_key` and the like by their last two.
_SECRET_OPTION = re.compile(
    r"(^|[-_.])(token|password|passwd|secret|credentials?|(api|access|secret|private|auth)[-_]?key)$", re.IGNORECASE
)
_SECRETS = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{16,}|(?:api_org|sk|pk|rk)[-_][A-Za-z0-9][A-Za-z0-9_-]{19,}"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AKIA[A-Z0-9]{16})"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_LONGEST_CHAIN = 5  # of launchers: timeout, accelerate launch, ...


def command(secrets: Iterable[str | None] = ()) -> str | None:
    """Return the command line that started the run, launcher included, as a shell would take it.

    Args:
        secrets: what must not appear in it, besides all that looks like a secret.

    Returns:
        None for a notebook or an interpreter in use, which have none.
    """
    own = list(getattr(sys, "orig_argv", ()))
    if "ipykernel" in sys.modules or len(own) < 2:
        return None
    found = _launched_by(own)
    return shlex.join(redacted(_readable(found), secrets))


def redacted(words: Sequence[str], secrets: Iterable[str | None] = ()) -> list[str]:
    """Return the words of a command line with every secret replaced by `***`."""
    found, hides_next = [], False
    for word in words:
        option, separator, value = word.partition("=")
        is_secret = bool(_SECRET_OPTION.search(option))
        if hides_next and not word.startswith("-"):
            word = _HIDDEN
        elif is_secret and separator and value:
            word = f"{option}={_HIDDEN}"
        hides_next = is_secret and not separator and option.startswith("-")
        for secret in secrets:
            if secret:
                word = word.replace(secret, _HIDDEN)
        found.append(_IN_ADDRESS.sub(_HIDDEN, _SECRETS.sub(_HIDDEN, word)))
    return found


def versions(trainer: Any) -> dict[str, str]:
    """Return the version of Python and of each package that the run has used."""
    names = [*_PACKAGES, *(["deepspeed"] if getattr(trainer, "is_deepspeed_enabled", False) else [])]
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {"python": platform.python_version()} | {name: str(text) for name, text in found.items() if text}


def _launched_by(own: list[str]) -> list[str]:
    """Return the command of the outermost process whose arguments end in this one's script and arguments."""
    tail = _script_and_arguments(own)
    try:
        import psutil
    except ImportError:
        return own
    try:
        process = psutil.Process()
        for _ in range(_LONGEST_CHAIN if tail else 0):
            process = process.parent()
            words = process.cmdline() if process is not None else []
            if len(words) <= len(tail) or words[-len(tail) :] != tail:
                break
            own = words
    except (OSError, psutil.Error):  # no such process any more, or somebody else's
        pass
    return own


def _script_and_arguments(own: list[str]) -> list[str]:
    """Return what follows the interpreter's own options; empty for `python -c`."""
    place = 1
    while place < len(own) and own[place].startswith("-"):
        if own[place] in ("-c", "-"):
            return []
        if own[place] == "-m":
            return own[place + 1 :]
        place += 2 if own[place] in ("-W", "-X") else 1
    return own[place:]


def _readable(words: list[str]) -> list[str]:
    """Return a command as it was typed: programs of the interpreter's folder by name."""
    program = Path(words[0])
    if len(words) > 1 and program.name.startswith("python"):
        script = Path(words[1])
        if script.parent == program.parent and script.is_absolute() and not script.suffix:
            return [script.name, *words[2:]]
    return [program.name, *words[1:]]
