"""Give parameters settings of their own by patterns of their names: `create(model, param_rules=...)`."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

_ACCEPTED = (
    "accepted: a list of pairs (pattern, settings), or of mappings with 'pattern' and settings, such as "
    "[('*.lora_*', {'lr': 1e-3})]"
)


class Rule(NamedTuple):
    """Settings of the parameters whose name matches a shell pattern."""

    pattern: str
    settings: Mapping[str, Any]


def rules_of(value: Any) -> list[Rule]:
    """Return rules from pairs, or from mappings with a `pattern`; settings are not checked.

    Raises:
        ValueError: something of another form, an empty pattern, or a duplicated one.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"param_rules={value!r} is not a list of rules; {_ACCEPTED}")
    rules: list[Rule] = []
    for index, entry in enumerate(value):
        if isinstance(entry, Mapping) and "pattern" in entry:
            pattern, settings = entry["pattern"], {key: value for key, value in entry.items() if key != "pattern"}
        elif isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], Mapping):
            pattern, settings = entry[0], dict(entry[1])
        else:
            raise ValueError(f"param_rules[{index}]={entry!r} is not a rule; {_ACCEPTED}")
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"param_rules[{index}]: pattern={pattern!r} is not a shell pattern of names; {_ACCEPTED}")
        if any(pattern == rule.pattern for rule in rules):
            raise ValueError(f"param_rules: {pattern!r} is duplicated; put its settings into one rule")
        rules.append(Rule(pattern, settings))
    return rules


def from_text(text: str) -> list[Rule]:
    """Return the rules of a JSON list, or of the .json, .yaml or .yml file that the text names; values may be strings.

    Raises:
        ValueError: they cannot be read.
    """
    where = f"param_rules={text!r}"
    try:
        if text.lower().endswith((".yaml", ".yml")):
            import yaml

            try:
                value = yaml.safe_load(Path(text).expanduser().read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise ValueError(error) from None
        else:
            is_file = text.lower().endswith(".json")
            value = json.loads(Path(text).expanduser().read_text(encoding="utf-8") if is_file else text)
    except (ImportError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} cannot be read ({' '.join(str(error).split())}); accepted: a .json or .yaml file, or a list in "
            'JSON, such as [{"pattern": "*.bias", "weight_decay": 0.01}]'
        ) from None
    return rules_of(value)


def assign(model: nn.Module, rules: Sequence[Rule]) -> dict[nn.Parameter, int]:
    """Map trainable parameters to the first rule, by its index, that matches one of their names (tied ones have more).

    Raises:
        ValueError: a rule that decides nothing: it matches no trainable parameter, or earlier ones match the same.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    indices: dict[nn.Parameter, int] = {}
    for index, (pattern, _) in enumerate(rules):
        matched = [
            param
            for param, param_names in names.items()
            if any(fnmatch.fnmatchcase(name, pattern) for name in param_names)
        ]
        trained = [param for param in matched if param.requires_grad]
        if all(param in indices for param in trained):
            earlier = {rules[indices[param]].pattern: None for param in trained}
            frozen = [names[param][0] for param in matched]
            trainable = [name for param, param_names in names.items() if param.requires_grad for name in param_names]
            raise ValueError(_why_unused(pattern, earlier, frozen, trainable))
        for param in trained:
            indices.setdefault(param, index)
    return indices


def _why_unused(pattern: str, earlier: Iterable[str], frozen: Sequence[str], trainable: Sequence[str]) -> str:
    if earlier:
        return (
            f"param_rules: {pattern!r} decides nothing: {', '.join(map(repr, earlier))} before it match the same "
            "parameters, and the first match wins; put it first, or remove it"
        )
    if frozen:
        return (
            f"param_rules: {pattern!r} matches frozen parameters only, such as {', '.join(map(repr, frozen[:3]))}; set "
            "requires_grad=True on those to be trained, or remove the rule"
        )
    plain = "".join(letter for letter in pattern if letter not in "*?[]!")
    near = ", ".join(map(repr, difflib.get_close_matches(plain, trainable, n=3, cutoff=0.0)))
    return f"param_rules: {pattern!r} matches no parameter; trainable ones are named like {near}"
