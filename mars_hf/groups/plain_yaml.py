"""Read settings from YAML or JSON: numbers, words, lists and mappings."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

_FLOAT = "tag:yaml.org,2002:float"
# Dates, sets and bytes are no settings.
_SCALARS = ("null", "bool", "int", "float", "str")
_COLLECTIONS = ("seq", "map", "merge")


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes 1e-3 for a number, as YAML 1.2 does, and has neither aliases nor types of its own."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases: a few lines of them may stand for more values than a memory holds."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="found an alias; write its value", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Refuse a key that comes twice: the last one would win in silence."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"found {key.value} twice; write it once", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Refuse values of other types than settings have."""
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in (*_SCALARS, *_COLLECTIONS):
            raise yaml.MarkedYAMLError(
                problem=f"found {kind}; write a number, a word, a list or a mapping", problem_mark=node.start_mark
            )
        return super().construct_object(node, deep)


_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read(text: str) -> Any:
    """Return the value that a text states.

    Raises:
        ValueError: the text is not YAML, or holds something else than settings.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("lists or mappings are nested too deeply") from None


def read_json(text: str) -> Any:
    """Return the value that a text in JSON states; ValueError if it is none, or has a key twice."""
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"found {key} twice; write it once")
        mapping[key] = value
    return mapping
