"""Give parameters settings of their own by patterns of their names: `create(model, param_rules=...)`."""

from __future__ import annotations

import difflib
import fnmatch
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
    import yaml

    is_file = text.lower().endswith((".json", ".yaml", ".yml"))
    try:
        value = yaml.safe_load(Path(text).expanduser().read_text(encoding="utf-8") if is_file else text)  # JSON is YAML
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"param_rules={text!r} cannot be read ({' '.join(str(error).split())}); accepted: a .json or .yaml file, "
            'or a list in JSON, such as [{"pattern": "*.bias", "weight_decay": 0.01}]'
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
        trained = [
            param
            for param, param_names in names.items()
            if param.requires_grad and any(fnmatch.fnmatchcase(name, pattern) for name in param_names)
        ]
        if all(param in indices for param in trained):
            free = [name for param in names if param.requires_grad and param not in indices for name in names[param]]
            near = difflib.get_close_matches(pattern.strip("*"), free, n=3, cutoff=0.0)
            raise ValueError(
                f"param_rules: {pattern!r} decides nothing: it matches no trainable parameter that the rules before it "
                f"leave; those are named like {', '.join(map(repr, near))}"
            )
        for param in trained:
            indices.setdefault(param, index)
    return indices
