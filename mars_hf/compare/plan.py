"""What is compared: arms from a command line or from a YAML file, and the settings that each starts from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from transformers.training_args import OptimizerNames, TrainingArguments

from mars_hf.groups import plain_yaml
from mars_hf.groups.settings import SETTINGS, parse_optim_args, text_of_optim_args
from mars_hf.groups.suggest import suggest
from mars_hf.training.callback import OPTIM_NAMES
from mars_hf.training.registry import register

SCRIPT = "script"  # the arm that trains what the script trains
SEARCH_SEEDS = (42, 43, 44)
# Settings of MARS that TrainingArguments have, too, and their names there. If the two contradict, MARS refuses both.
_ALSO_ARGUMENTS = {"weight_decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2"}


@dataclass(frozen=True)
class Arm:
    """One contender."""

    name: str
    set: Mapping[str, Any] = field(default_factory=dict)  # values of TrainingArguments, `optim` among them
    optim_args: Mapping[str, Any] = field(default_factory=dict)  # of its optimizer; for MARS, over those suggested
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the script's command line, by flag without dashes
    first: Sequence[float] = ()  # rates to search from; (): from the script's, or from the baseline's best

    @property
    def rule(self) -> str | None:
        """Return MARS's rule; None for another optimizer."""
        return OPTIM_NAMES.get(str(self.set.get("optim", "")))

    @classmethod
    def of_text(cls, text: str) -> Arm:
        """Read NAME or NAME:SETTINGS, such as mars_adamw:is_approx=false."""
        name, _, settings = text.partition(":")
        if name == SCRIPT and not settings:
            return cls(text)
        known = [each.name for each in fields(TrainingArguments)]
        values: dict[str, Any] = {"optim": name}
        first, of_optimizer = [], []
        try:
            for pair in filter(None, settings.split(",")):
                key, value = setting(pair)
                if key == "learning_rate":
                    first.append(float(value))
                elif key in known and not (name in OPTIM_NAMES and key in SETTINGS):
                    values[key] = value
                else:
                    of_optimizer.append(pair)
            if name in OPTIM_NAMES:
                return cls(text, values, parse_optim_args(",".join(of_optimizer)), first=first)
            return cls(text, values, dict(pair.split("=", 1) for pair in of_optimizer), first=first)
        except ValueError as error:
            raise ValueError(f"--optim {text}: {error}") from error


@dataclass
class Plan:
    """A comparison: the first arm is the baseline."""

    arms: list[Arm]
    rates: Sequence[str] = ("learning_rate",)  # what is searched; others than the first are flags of the script
    seeds: Sequence[int] = (1, 2, 3)  # of the comparison
    search_seeds: Sequence[int] = SEARCH_SEEDS  # others; (): the first rates are taken
    grid: Sequence[int] = ()  # powers of two of the first rates, which all arms run in place of the search
    set: Mapping[str, Any] = field(default_factory=dict)  # values of TrainingArguments in all runs
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the script in all runs
    further: Mapping[str, Any] = field(default_factory=dict)  # of the script, in the runs with the comparison's seeds
    pairs: Sequence[tuple[str, str]] = ()  # of arms to compare besides each with the baseline
    about: str = ""  # a line for the page

    @property
    def baseline(self) -> Arm:
        """Return the arm that all others are compared with."""
        return self.arms[0]

    @classmethod
    def of_file(cls, path: str) -> Plan:
        """Read a YAML file: the fields of `Plan`, with arms as name to the fields of `Arm`."""
        try:
            sections = plain_yaml.read(Path(path).read_text(encoding="utf-8"))
            _check_keys(cls, sections, "")
            for name, own in sections["arms"].items():
                _check_keys(Arm, own or {}, f"arm {name}: ")
            arms = [Arm(str(name), **(own or {})) for name, own in sections.pop("arms").items()]
            pairs = [(one, other) for one, other in sections.pop("pairs", [])]
            return cls(arms, pairs=pairs, **sections)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}; docs/compare.md has an example") from error

    def check(self) -> None:
        """Raise ValueError for what cannot be compared."""
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names) or len(names) < 2:
            raise ValueError("give two or more different arms: --optim adamw_torch mars_adamw ...")
        for name in itertools.chain(*self.pairs):
            if name not in names:
                raise ValueError(f"pairs: unknown arm {name!r}; accepted: {', '.join(names)}")
        for arm in self.arms:
            self._check_arm(arm)
        self._check_rates_in_flags()
        if both := set(self.search_seeds) & set(self.seeds):
            raise ValueError(f"seed {min(both)} is one of the search and of the comparison; those must differ")
        for name, seeds in (("seeds", self.seeds), ("search_seeds", self.search_seeds)):
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"{name}: one of {', '.join(map(str, seeds))} is there twice; give each once")
        if not self.seeds:
            raise ValueError("--seeds: give one or more")
        _check_set(self.set, "--set ")

    def _check_rates_in_flags(self) -> None:
        """Raise ValueError for flags of the first run that name its rate: only a run tells the script's own."""
        for name, value in {**self.arguments, **self.baseline.arguments, **self.further}.items():
            if not self.baseline.first and isinstance(value, str) and ("{rate}" in value or "{twice}" in value):
                raise ValueError(f"{name}: {value!r}: give arm {self.baseline.name} a `first`, the rate it begins at")

    def _check_arm(self, arm: Arm) -> None:
        register()
        optim, accepted = arm.set.get("optim"), [member.value for member in OptimizerNames]
        if optim is not None and optim not in accepted:
            raise ValueError(f"arm {arm.name}: optim {optim!r}; accepted are {', '.join(accepted)}, and {SCRIPT} alone")
        if len(self.rates) > 1 and len(arm.first) != len(self.rates):
            raise ValueError(f"arm {arm.name}: give `first`, a rate for each of {', '.join(self.rates)}")
        _check_set(arm.set, f"arm {arm.name}: ")
        instead = {"learning_rate": "`first`", "optim_args": "each of its settings"}
        if arm.rule is not None:
            instead |= {theirs: f"MARS's setting {ours}" for ours, theirs in _ALSO_ARGUMENTS.items()}
        for name in arm.set:
            if name in instead:
                raise ValueError(f"arm {arm.name}: the comparison sets {name} itself; give {instead[name]} instead")


def _check_set(given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for TrainingArguments that differ from run to run."""
    for name in ("seed", "data_seed", "output_dir"):
        if name in given:
            raise ValueError(f"{where}{name}: the comparison sets it itself; see --seeds and --output_dir")


class Script(NamedTuple):
    """What the first run has shown of the script: its own rate, betas and decay, the width of its model if known."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    width: int | None = None

    @classmethod
    def of_training(cls, training: Mapping[str, Any], own_rate: float | None = None) -> Script:
        """Read what a run recorded; `own_rate` is the script's own rate if the run trained at another, else None."""
        args = training["arguments"]
        betas = args["adam_beta1"], args["adam_beta2"]
        rate = args["learning_rate"] if own_rate is None else own_rate
        return cls(float(rate), betas, args["weight_decay"], training["width"])


def arguments_of_arm(arm: Arm, plan: Plan, factor: float, script: Script | None, best: float | None) -> dict[str, Any]:
    """Return the values of TrainingArguments that make a run an arm's.

    Args:
        arm: the arm.
        plan: it is in.
        factor: of its first rate.
        script: None in the first run, which tells it.
        best: the baseline's best learning rate; None for the baseline itself.
    """
    changed = dict(arm.set)
    if "optim" in changed:  # a script's own optim_args are those of its own optimizer
        changed["optim_args"] = text_of_optim_args(arm.optim_args) or None
    if arm.rule is not None:
        changed |= _as_arguments(arm.optim_args)
    if arm.rule is not None and script is not None and best is not None:
        return changed | _suggested(arm, plan, factor, script, best)
    if arm.first:
        return changed | {"learning_rate": rounded(arm.first[0] * factor)}
    if best is not None and "optim" in arm.set:
        return changed | {"learning_rate": rounded(best * factor)}
    if script is not None and factor != 1:
        return changed | {"learning_rate": rounded(script.learning_rate * factor)}
    return changed


def _suggested(arm: Arm, plan: Plan, factor: float, script: Script, best: float) -> dict[str, Any]:
    """Return what `suggest` makes of the baseline's best rate, and of the betas and decay that the script has."""
    assert arm.rule is not None
    found = suggest(arm.rule, best, script.betas, script.weight_decay, width=script.width)
    if arm.first:
        factor *= arm.first[0] / found["lr"]
    elif plan.baseline.rule is not None:  # its best rate is not AdamW's
        of_baseline = suggest(plan.baseline.rule, best, script.betas, script.weight_decay, width=script.width)
        factor *= best / of_baseline["lr"]
    beta1, beta2 = map(rounded, found["betas"])
    settings = {"beta1": beta1, "beta2": beta2, "beta1_1d": script.betas[0], "beta2_1d": script.betas[1]}
    settings |= {"lr_1d": rounded(found["lr_1d"] * factor), **arm.optim_args}
    also = _as_arguments({"weight_decay": rounded(found["weight_decay"]), **settings})
    return {"learning_rate": rounded(found["lr"] * factor), **also, "optim_args": text_of_optim_args(settings)}


def _as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of MARS's settings that TrainingArguments have, too, by their names there."""
    return {theirs: settings[ours] for ours, theirs in _ALSO_ARGUMENTS.items() if ours in settings}


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line; sections as JSON."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return [word for name, text in texts.items() for word in (f"--{name}", text)]


def setting(text: str) -> tuple[str, Any]:
    """Return name and value of NAME=VALUE; JSON's numbers, words and sections are read as such, Python's words, too."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r}: give NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, {"True": True, "False": False, "None": None}.get(value, value)


def rounded(number: float) -> float:
    """Return a number with the digits that a command line shows."""
    return float(f"{number:.6g}")


def _check_keys(kind: type[Plan | Arm], given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for keys that are not fields of a class, and for values of another shape than the field's."""
    known = {each.name: str(each.type) for each in fields(kind) if each.name != "name"}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{where}unknown {name!r}; accepted: {', '.join(known)}")
        if known[name].startswith("Sequence") and not isinstance(value, list):
            raise ValueError(f"{where}{name}: give a list, as in [{value}]")
        if known[name].startswith("Mapping") and not isinstance(value, dict):
            raise ValueError(f"{where}{name}: give a mapping, as in {{name: value}}")
