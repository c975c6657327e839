"""Read the values of settings from a command line and from a YAML file by the same rules."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

from transformers.activations import ACT2FN
from transformers.hf_argparser import string_to_bool

from mars_hf.settings import SETTINGS, check, read
from pretraining.run.errors import did_you_mean, one_line
from pretraining.run.marked import Marked
from pretraining.run.ranges import FINITE, NUMBERS, Range

_WHOLE = Range("a whole number", lambda number: True, is_whole=True)
_CHOICES = {
    "attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "activation_function": tuple(ACT2FN),
    "split_fused": ("auto", "none"),
}
_JSON = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
_NAMES = ("output_dir", "data_dir", "sample_prompt", "hub_model_id", "resume_from_checkpoint", "run_name")


class Value(NamedTuple):
    """A setting of a file: its value, its text (None for a mapping, a list or null), and where it stands."""

    value: Any
    text: str | None
    where: str


def reader(action: argparse.Action) -> Callable[[str], Any] | None:
    """Return what parses an argument's text, with messages that name the accepted values."""
    name, kind = action.dest, action.type
    if action.choices is not None:
        return kind if callable(kind) else None
    if name in NUMBERS:
        return NUMBERS[name].read
    if kind is int or kind is float:
        return (_WHOLE if kind is int else FINITE).read
    if kind is string_to_bool:
        return _flag
    if name in _CHOICES:
        return _one_of(_CHOICES[name])
    if name in SETTINGS:
        return _setting(name)
    if name in _JSON:
        return _json
    if name in _FILES:
        return _json_or_file
    if name in _NAMES:
        return _name
    return kind if callable(kind) else None


def from_file(settings: Marked, path: str, section: str = "") -> dict[str, Value]:
    """Return the settings of a file, or of one section of it, with where they stand."""
    return {
        name: Value(value, settings.texts.get(name), f"{path}, line {settings.lines[name]}: {section}{name}")
        for name, value in settings.items()
    }


def refuse_unknown(names: dict[str, Value], accepted: Iterable[str], what: str) -> None:
    """Raise ValueError at the first name that is not accepted."""
    accepted = list(accepted)
    for name, given in names.items():
        if name not in accepted:
            listed = f"; accepted: {', '.join(accepted)}" if len(accepted) < 10 else "; --help lists the settings"
            hint = did_you_mean(str(name), accepted)
            where = given.where.removesuffix(str(name)).removesuffix(": ")
            raise ValueError(f"{where}: unknown {name}, which is no {what}{hint}{listed}")


def as_on_command_line(action: argparse.Action, given: Value, hint: Any) -> Any:
    """Parse a file's value as the same text on a command line.

    Args:
        action: the parser's argument.
        given: the file's value.
        hint: type of the dataclass field.

    Raises:
        ValueError: the command line would refuse it, or it is a list, a mapping or null where none is accepted.
    """
    value, text, where = given
    kinds = _kinds(hint)
    if value is None:
        if type(None) not in kinds:
            raise ValueError(f"{where} has no value; give one, or remove the line")
        return None
    if action.dest == "param_rules" and isinstance(value, (dict, list)):
        return _rules(value, where)
    if isinstance(value, dict):
        if dict not in kinds:
            raise ValueError(f"{where} is a mapping, not {_in_words(kinds)}")
        _refuse_infinite(value, where)
        return dict(value)
    if isinstance(value, list):
        if list not in kinds:
            raise ValueError(f"{where} is a list, not {_in_words(kinds)}")
        if not all(isinstance(item, str) for item in value):
            raise ValueError(f"{where}: {value!r} is not a list of words; put each in quotes")
        return value
    if isinstance(value, bool) and bool in kinds:
        return value
    text = str(value) if text is None else text
    try:
        made = action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        raise ValueError(f"{where}: {one_line(error)}") from None
    if action.choices is not None and made not in action.choices:
        raise ValueError(f"{where}: {text!r} is unknown; accepted: {', '.join(map(str, action.choices))}")
    return [made] if list in kinds and str not in kinds else made


def _kinds(hint: Any) -> set[Any]:
    """Return the plain types of a type hint: of `dict[str, Any] | str | None`, dict, str and NoneType."""
    parts = get_args(hint)
    if not parts:
        return {hint}
    origin = getattr(hint, "__origin__", None)
    if origin in (list, dict):
        return {origin}
    return set().union(*(_kinds(part) for part in parts))


def _in_words(kinds: set[Any]) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}
    return " or ".join(word for kind, word in words.items() if kind in kinds) or "a word"


def _refuse_infinite(settings: dict[Any, Any], where: str) -> None:
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {name}: {value} is not a finite number")


def _flag(text: str) -> bool:
    try:
        return bool(string_to_bool(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false") from None


def _one_of(accepted: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in accepted:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; accepted: {', '.join(map(repr, accepted))}")
        return text

    return read


def _setting(name: str) -> Callable[[str], Any]:
    """Return a parser for a setting of MARS, which checks the value and returns the text."""

    def checked(text: str) -> str:
        if text.lower() in ("none", "null"):
            return text
        try:
            check({name: read(name, text)})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}=")) from None
        return text

    return checked


def _rules(value: Any, where: str) -> list[Any]:
    """Check the rules of `param_rules` and return them as plain mappings."""
    try:
        check({"param_rules": value})
    except ValueError as error:
        raise ValueError(f"{where}: {one_line(error)}") from None
    return [dict(rule) if isinstance(rule, dict) else rule for rule in value]


def _json(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, like '{{\"min_lr_rate\": 0.1}}'")
    for name, number in value.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise argparse.ArgumentTypeError(f"{name}: {number} is not a finite number")
    return text


def _json_or_file(text: str) -> str:
    if text.lstrip().startswith("{"):
        return _json(text)
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file; give the path of a JSON file")
    return text


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a value, or leave it out")
    return text
