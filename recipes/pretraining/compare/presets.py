"""Read the presets of a comparison: named arms, each with settings of pretrain_gpt2.py."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretraining.compare.comparison import baseline_of
from pretraining.run.errors import did_you_mean
from pretraining.run.marked import Marked, read_yaml

FOLDER = Path(__file__).resolve().parent.parent.parent / "presets"
# Settings that a comparison gives to each run, and where they come from.
_OURS = {"seed": "seeds", "output_dir": "--output_dir", "resume_from_checkpoint": "the same command to go on"}
_KEYS = ("about", "arms", "grid", "shared", "baseline", "pairs", "axis", "lines", "equal", "seeds")


@dataclass(frozen=True)
class Preset:
    """What is compared with what.

    Attributes:
        arms: name to the settings of its runs, by flag without dashes.
        baseline: the arm that all others are compared with; None: adamw, or the first.
        pairs: further pairs to compare, each an arm and the one that it is measured against.
        axis: the setting that the picture's lines run over; None: the picture has a bar for each arm.
        lines: the setting that names a line; "name": the arm's name without its last word.
        equal: "tokens", or "seconds": arms train as many steps as take the time of the baseline's.
        seeds: seeds if none are given.
        about: one line for the page.
    """

    arms: Mapping[str, Mapping[str, Any]]
    baseline: str | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    axis: str | None = None
    lines: str | None = None
    equal: str = "tokens"
    seeds: tuple[int, ...] = (1, 2)
    about: str = ""

    def argv(self, arm: str) -> list[str]:
        """Return the recipe's arguments of an arm."""
        return words(self.arms[arm])

    def only(self, names: Sequence[str]) -> Preset:
        """Return the comparison of some of the arms with the baseline.

        Raises:
            ValueError: there is no such arm.
        """
        for name in names:
            if name not in self.arms:
                accepted = ", ".join(map(shlex.quote, self.arms))
                raise ValueError(f"--arms {name!r}: no such arm{did_you_mean(name, self.arms)}; accepted: {accepted}")
        base = self.baseline or baseline_of(list(self.arms))  # of all arms, before some are gone
        arms = {name: settings for name, settings in self.arms.items() if name in names or name == base}
        pairs = tuple(pair for pair in self.pairs if set(pair) <= set(arms))
        return replace(self, arms=arms, pairs=pairs, baseline=base)

    def place(self, arm: str) -> tuple[str, float] | None:
        """Return the line that an arm belongs to and its place on the axis; None if it has none."""
        settings = self.arms[arm]
        if self.axis is None or self.axis not in settings:
            return None
        if self.lines == "name":
            line = arm.rpartition(" ")[0]
        else:
            line = _text(settings.get(self.lines, "")) if self.lines else ""
        return line, float(settings[self.axis])


def load(name: str) -> Preset:
    """Load a preset by name, or from a YAML file of one's own.

    Raises:
        ValueError: there is no such preset, or it is not one; the message names the key and the line.
    """
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = names()
        raise ValueError(
            f"--preset {name!r}: no such preset{did_you_mean(name, known)}; accepted: {', '.join(known)}, or the path "
            "of a YAML file"
        )
    found = read_yaml(path)
    for key in found:
        if key not in _KEYS:
            raise ValueError(
                f"{path.name}, line {found.lines.get(key)}: unknown key {key!r}{did_you_mean(key, _KEYS)}; accepted: "
                f"{', '.join(_KEYS)}"
            )
    for key in ("arms", "grid", "shared"):
        if not isinstance(found.get(key, {}), dict):
            raise ValueError(f"{path.name}, line {found.lines[key]}: {key}: {found[key]!r} is not a section")
    arms = {**_arms(found, path), **_grid(found, path)}
    if not arms:
        raise ValueError(f"{path.name}: no arms; give `arms`, a section each, or `grid`, a list for each setting")
    _refuse_shared_folders(arms, path)
    pairs = found.get("pairs", [])
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{path.name}, line {found.lines['pairs']}: pairs: {pairs!r} is not a list of two arms each")
    pairs = [(_text(one), _text(other)) for one, other in pairs]
    seeds = found.get("seeds", [1, 2])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"{path.name}, line {found.lines['seeds']}: seeds: {seeds!r} is not a list of whole numbers")
    baseline = None if found.get("baseline") is None else _text(found["baseline"])
    for arm in (*itertools.chain(*pairs), *([baseline] if baseline is not None else [])):
        if arm not in arms:
            raise ValueError(f"{path.name}: unknown arm {arm!r}{did_you_mean(arm, arms)}; accepted: {', '.join(arms)}")
    equal = found.get("equal", "tokens")
    if equal not in ("tokens", "seconds"):
        raise ValueError(f"{path.name}, line {found.lines.get('equal')}: equal: {equal!r} is not tokens or seconds")
    _check_picture(found, arms, path)
    return Preset(
        arms=arms,
        baseline=baseline,
        pairs=tuple(pairs),
        axis=found.get("axis"),
        lines=found.get("lines"),
        equal=equal,
        seeds=tuple(seeds),
        about=" ".join(str(found.get("about", "")).split()),
    )


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of the recipe."""
    return [word for name, value in settings.items() for word in (f"--{name}", _text(value))]


def folder_name(arm: str) -> str:
    """Return the name of the folder for an arm's runs."""
    return arm.replace(" ", "_").replace("/", "_")


def names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _arms(found: Marked, path: Path) -> dict[str, dict[str, Any]]:
    arms = {}
    for name, settings in (found.get("arms") or {}).items():
        if not isinstance(settings, dict):
            raise ValueError(f"{path.name}: arms: {name} is not a section; write its settings below its name")
        arms[_text(name)] = {**_shared(found, path), **_checked(settings, f"{path.name}: arms: {name}")}
    return arms


def _shared(found: Marked, path: Path) -> dict[str, Any]:
    return _checked(found.get("shared") or {}, f"{path.name}: shared")


def _checked(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return settings that are flags of a run, with values, and not a comparison's own."""
    for name, value in settings.items():
        if name in _OURS:
            raise ValueError(f"{where}: {name} differs between the runs of an arm; leave it out, and use {_OURS[name]}")
        if value is None or isinstance(value, list):
            raise ValueError(f"{where}: {name}: {value!r} is no value of a flag; give a number or a word")
    return dict(settings)


def _refuse_shared_folders(arms: Mapping[str, Any], path: Path) -> None:
    """Stop if the runs of two arms would go to one folder; file systems may ignore case."""
    known: dict[str, str] = {}
    for arm in arms:
        other = known.setdefault(folder_name(arm).casefold(), arm)
        if other != arm:
            raise ValueError(
                f"{path.name}: the arms {other!r} and {arm!r} have one folder, {folder_name(arm)}; rename one"
            )


def _check_picture(found: Marked, arms: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Stop if arms do not state the setting of the axis, or that of its lines."""
    settings = list(dict.fromkeys(name for own in arms.values() for name in own))
    for key, extra in (("axis", ()), ("lines", ("name",))):
        chosen = found.get(key)
        if chosen is not None and (not isinstance(chosen, str) or chosen not in (*settings, *extra)):
            close = did_you_mean(chosen, settings) if isinstance(chosen, str) else ""
            raise ValueError(
                f"{path.name}, line {found.lines[key]}: {key}: no arm has a setting {chosen!r}{close}; accepted: "
                f"{', '.join((*settings, *extra))}"
            )
    axis = str(found.get("axis"))
    for arm, own in arms.items():
        if axis in own and (isinstance(own[axis], bool) or not isinstance(own[axis], (int, float))):
            raise ValueError(
                f"{path.name}, line {found.lines['axis']}: axis: {axis} is {own[axis]!r} in {arm!r}; choose a setting "
                "whose values are numbers"
            )


def _grid(found: Marked, path: Path) -> dict[str, dict[str, Any]]:
    """Return an arm for every combination, named by its values."""
    grid = found.get("grid") or {}
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path.name}: grid: {name}: {values!r} is not a list of values")
    if not grid:
        return {}
    where, shared = f"{path.name}: grid", _shared(found, path)
    return {
        " ".join(map(_text, values)): {**shared, **_checked(dict(zip(grid, values, strict=True)), where)}
        for values in itertools.product(*grid.values())
    }


def _text(value: Any) -> str:
    """Return a value as a flag takes it: numbers with all their digits, sections as JSON."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
