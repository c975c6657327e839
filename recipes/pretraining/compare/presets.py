"""Read the presets of a comparison: named arms, each with settings of pretrain_gpt2.py."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mars_hf.groups import plain_yaml

FOLDER = Path(__file__).resolve().parents[2] / "presets"
# What a comparison states itself, and how it is chosen.
RESERVED = {
    "seed": "give --seeds",
    "output_dir": "give --output_dir",
    "resume_from_checkpoint": "an interrupted comparison goes on by itself",
}


@dataclass
class Preset:
    """What is compared with what.

    Attributes:
        arms: name to the settings of its runs, by flag without dashes.
        baseline: the arm that all others are compared with; empty: adamw, or the first.
        pairs: further pairs to compare, each an arm and the one that it is measured against.
        axis: the setting that the table's columns run over; None: there is no such table.
        lines: the setting that names a line; "name": the arm's name without its last word.
        equal_seconds: True trains arms for as many steps as take the time of the baseline's.
        seeds: seeds if none are given.
        about: one line for the page.
    """

    arms: Mapping[str, Mapping[str, Any]]
    baseline: str = ""
    pairs: Sequence[tuple[str, str]] = ()
    axis: str | None = None
    lines: str | None = None
    equal_seconds: bool = False
    seeds: Sequence[int] = (1, 2)
    about: str = ""

    def __post_init__(self) -> None:
        """Choose the baseline, and refuse arms that do not exist."""
        if not self.baseline:
            self.baseline = "adamw" if "adamw" in self.arms else next(iter(self.arms))
        for name in (self.baseline, *itertools.chain(*self.pairs)):
            if name not in self.arms:
                raise ValueError(f"unknown arm {name!r}; accepted: {', '.join(self.arms)}")

    def only(self, names: Sequence[str]) -> Preset:
        """Return the comparison of some of the arms with the baseline."""
        if unknown := [name for name in names if name not in self.arms]:
            raise ValueError(f"--arms {unknown[0]!r}: no such arm; accepted: {', '.join(map(repr, self.arms))}")
        arms = {name: settings for name, settings in self.arms.items() if name in (self.baseline, *names)}
        return replace(self, arms=arms, pairs=[pair for pair in self.pairs if set(pair) <= set(arms)])

    def position_of(self, arm: str) -> tuple[str, float] | None:
        """Return the line that an arm belongs to and its position on the axis; None if it has none."""
        settings = self.arms[arm]
        if self.axis is None or self.axis not in settings:
            return None
        line = arm.rpartition(" ")[0] if self.lines == "name" else str(settings.get(self.lines or "", ""))
        return line, float(settings[self.axis])


def load(name: str) -> Preset:
    """Load a preset by name, or from a YAML file of one's own.

    Raises:
        ValueError: there is no such preset, or it is not one.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"--preset {name!r}: no such preset; accepted: {', '.join(names())}, or a YAML file")
    try:
        sections = plain_yaml.read(path.read_text(encoding="utf-8"))
        shared = sections.pop("shared", {})
        arms = {str(arm): {**shared, **settings} for arm, settings in sections.pop("arms", {}).items()}
        pairs = [(one, other) for one, other in sections.pop("pairs", [])]
        return Preset(arms, pairs=pairs, **sections)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}; recipes/presets has examples") from error


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of the recipe."""
    return [word for name, value in settings.items() for word in (f"--{name}", _text(value))]


def names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _text(value: Any) -> str:
    """Return a value as a flag takes it: numbers with all their digits, sections as JSON."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
