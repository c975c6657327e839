"""Give parameters settings of their own by patterns of their names: `create(model, param_rules=...)`.

A rule is a pair of a shell pattern and settings. Strings hold rules as `pattern;key:value;key:value|pattern;...`.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mars_hf.groups import matrix_layouts

_FILES = (".yaml", ".yml", ".json")
_ACCEPTED = (
    "accepted: a list of pairs (pattern, settings), or of mappings with 'pattern' and settings, such as "
    "[('*.lora_*', {'lr': 1e-3})]"
)


class Rule(NamedTuple):
    """Settings of the parameters whose name matches a shell pattern."""

    pattern: str
    settings: Mapping[str, Any]


def rules_of(given: Any) -> list[Rule]:
    """Return rules from pairs, or from mappings with a `pattern`; settings are not checked.

    Raises:
        ValueError: something of another form, an empty pattern, or one that is there twice.
    """
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"param_rules={given!r} is no list of rules; {_ACCEPTED}")
    rules = [_rule(index, entry) for index, entry in enumerate(given)]
    patterns = [rule.pattern for rule in rules]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"param_rules: {pattern!r} is there twice; put its settings into one rule")
    return rules


def _rule(index: int, entry: Any) -> Rule:
    if isinstance(entry, Mapping) and "pattern" in entry:
        pattern, settings = entry["pattern"], {key: value for key, value in entry.items() if key != "pattern"}
    elif isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], Mapping):
        pattern, settings = entry[0], dict(entry[1])
    else:
        raise ValueError(f"param_rules[{index}]={entry!r} is no rule; {_ACCEPTED}")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"param_rules[{index}]: pattern={pattern!r} is not a shell pattern of names; {_ACCEPTED}")
    if settings.get("layout") is not None:
        settings["layout"] = matrix_layouts.to_plain(settings["layout"])
    return Rule(pattern, settings)


def assign(model: nn.Module, rules: Sequence[Rule]) -> dict[int, Rule]:
    """Map the ids of trainable parameters to their rules: to the first whose pattern matches.

    A tied parameter has several names, each of which may match.

    Raises:
        ValueError: a pattern that decides nothing, because it matches no trainable parameter, or because earlier
            patterns match all those that it matches.
    """
    if not rules:
        return {}
    names: dict[int, list[str]] = {}
    trainable: dict[int, bool] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        trainable[id(param)] = param.requires_grad
    found: dict[int, Rule] = {}
    for rule in rules:
        matched = [key for key, own in names.items() if any(fnmatch.fnmatchcase(name, rule.pattern) for name in own)]
        trained = [key for key in matched if trainable[key]]
        fresh = [key for key in trained if key not in found]
        if not fresh:
            frozen = [names[key][0] for key in matched]
            earlier = list(dict.fromkeys(found[key].pattern for key in trained))
            known = [name for key, own in names.items() if trainable[key] for name in own]
            raise ValueError(_why_unused(type(model).__name__, rule.pattern, earlier, frozen, known))
        found.update(dict.fromkeys(fresh, rule))
    return found


def _why_unused(model: str, pattern: str, earlier: Sequence[str], frozen: Sequence[str], names: Sequence[str]) -> str:
    if earlier:
        others = ", ".join(map(repr, earlier))
        return (
            f"param_rules: {pattern!r} decides nothing: all parameters that it matches are matched by {others} before, "
            "and the first match wins; put it first, or leave it out"
        )
    if frozen:
        listed = ", ".join(map(repr, frozen[:3]))
        return (
            f"param_rules: {pattern!r} matches frozen parameters of {model} only, such as {listed}; set "
            "requires_grad=True on those to be trained, or leave the pattern out"
        )
    plain = "".join(letter for letter in pattern if letter not in "*?[]!")
    near = ", ".join(map(repr, difflib.get_close_matches(plain, names, n=3, cutoff=0.0)))
    return f"param_rules: {pattern!r} matches no parameter of {model}; its trainable ones are named like {near}"


def from_text(text: str) -> list[Rule]:
    """Return the rules of a string, or of the file that it names; values may still be strings.

    Args:
        text: `*.lora_*;lr:1e-3;weight_decay:0|*.bias;role:vector`, or the path of a file that ends in .yaml, .yml or
            .json and lists mappings with `pattern` and settings.

    Raises:
        ValueError: the string or the file cannot be read.
    """
    if text.lower().endswith(_FILES) and ";" not in text:
        return _from_file(text)
    return rules_of([_from_text(part, text) for part in text.split("|")])


def _from_text(part: str, text: str) -> Rule:
    pattern, *fields = part.split(";")
    settings: dict[str, Any] = {}
    for field in fields:
        key, separator, value = field.partition(":")
        if not (key and separator and value):
            raise ValueError(
                f"param_rules={text!r}: {field!r} is not key:value; write a rule as pattern;key:value;key:value, "
                "separate rules by '|', or give the path of a .yaml or .json file"
            )
        if key in settings:
            raise ValueError(f"param_rules={text!r}: {key} is given twice for {pattern!r}; give it once")
        settings[key] = value
    return Rule(pattern, settings)


def _from_file(path: str) -> list[Rule]:
    where = f"param_rules={path!r}"
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8")
        loaded = json.loads(content) if path.lower().endswith(".json") else _load_yaml(content)
    except ImportError:
        raise ValueError(f"{where}: PyYAML is not installed; pip install pyyaml, or write the rules as JSON") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read ({' '.join(str(error).split())})") from None
    try:
        return rules_of(loaded)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _load_yaml(content: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
