"""Read YAML and JSON with the line of every key, so that an error can name it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from pretraining.run.errors import one_line


class Marked(dict[Any, Any]):
    """A mapping of a file that knows its own line, and its keys' lines and texts.

    Attributes:
        line: number of the line where the mapping starts.
        lines: key to the number of its line.
        texts: key to its value as written, for values that are neither mappings, lists nor null.
    """

    def __init__(self, line: int) -> None:
        """Make an empty mapping."""
        super().__init__()
        self.line = line
        self.lines: dict[Any, int] = {}
        self.texts: dict[Any, str] = {}


class _Twice(yaml.YAMLError):
    """Raised for a key that a mapping has twice."""


class _Loader(yaml.SafeLoader):
    """Load YAML as people write it: 6e-3 is a number, although YAML 1.1 requires a dot."""

    def marked(self, node: yaml.MappingNode) -> Marked:
        """Return a mapping with lines; a key that is there twice is an error, as the first would be ignored."""
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self._key(key_node)
            line = key_node.start_mark.line + 1
            if key in first:
                raise _Twice(f"line {line}: {key} is there twice, first in line {first[key]}; remove one of them")
            first[key] = line
        self.flatten_mapping(node)
        made = Marked(node.start_mark.line + 1)
        for key_node, value_node in node.value:
            key = self._key(key_node)
            made[key] = self.construct_object(value_node, deep=True)
            made.lines[key] = key_node.start_mark.line + 1
            made.texts.pop(key, None)
            if isinstance(value_node, yaml.ScalarNode) and made[key] is not None:
                made.texts[key] = value_node.value
        return made

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise _Twice(f"line {node.start_mark.line + 1}: a key must be a word, not a list or a mapping")
        return self.construct_object(node)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.marked)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> Marked:
    """Read a YAML file of settings.

    Raises:
        ValueError: it cannot be read, is not YAML, has a key twice, or holds something other than `key: value`.
    """
    text = _text(path)
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except _Twice as error:
        raise ValueError(f"{path}, {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date that does not exist
        raise ValueError(f"{path}{_where(error)} is not YAML: {_problem(error)}") from None
    if not isinstance(loaded, Marked):
        kind = "nothing" if loaded is None else type(loaded).__name__
        raise ValueError(f"{path} holds {kind}, not settings; write them as 'key: value', one a line")
    return loaded


def read_json(path: Path) -> Marked:
    """Read a JSON object.

    Raises:
        ValueError: it cannot be read, is not JSON, has a key twice, or is no object.
    """
    text = _text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f", line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}{where}: not JSON ({_problem(error)}); the file is damaged or cut off") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}, not a JSON object")
    try:  # JSON is YAML, but for tabs; this gives the lines
        marks = yaml.load(text.replace("\t", " "), Loader=_Loader)
    except _Twice as error:
        raise ValueError(f"{path}, {error}") from None
    except (yaml.YAMLError, ValueError):
        marks = None
    return _mark(values, marks)


def _mark(values: dict[str, Any], marks: Any) -> Marked:
    """Return a JSON object with the lines of the same text read as YAML."""
    known = isinstance(marks, Marked)
    made = Marked(marks.line if known else 0)
    for key, value in values.items():
        inner = marks.get(key) if known else None
        made[key] = _mark(value, inner) if isinstance(value, dict) else value
        if known and key in marks.lines:
            made.lines[key] = marks.lines[key]
    return made


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 (byte {error.start}: {error.reason}); is it the right file?"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}," if mark else ""


def _problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return one_line(getattr(error, "problem", None) or getattr(error, "msg", None) or error, 120)
