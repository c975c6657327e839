"""Check that the settings of a run agree with one another."""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import SchedulerType, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from pretraining.run import ignored
from pretraining.run.errors import did_you_mean, one_line
from pretraining.run.reading import Value


class Origins:
    """Where settings come from: the command line, before a file, before a default."""

    def __init__(self, values: Namespace, on_command_line: set[str], in_files: dict[str, Value]) -> None:
        """Keep what was given where.

        Args:
            values: all settings.
            on_command_line: names of those given on the command line.
            in_files: those given in a file.
        """
        self._values = values
        self.on_command_line = on_command_line
        self.in_files = in_files

    def is_given(self, name: str) -> bool:
        """Return whether a setting is not left at its default."""
        return name in self.on_command_line or name in self.in_files

    def together(self, *names: str) -> bool:
        """Return whether one command line, or one file that the command line does not override, gives all settings."""
        given = [name in self.on_command_line for name in names]
        return all(given) or (not any(given) and all(name in self.in_files for name in names))

    def __call__(self, name: str) -> str:
        """Return a setting as text, with its value and its place."""
        value = getattr(self._values, name)
        value = f"{value:g}" if isinstance(value, float) else value
        if name in self.on_command_line:
            return f"--{name} {value}"
        if name in self.in_files:
            return f"{self.in_files[name].where} {value}"
        return f"{name}={value} (the default)"


def check(values: Namespace, origins: Origins) -> None:
    """Raise ValueError at the first setting that is ignored, or that contradicts another."""
    _check_conditions(values, origins)
    _check_sizes(values, origins)
    _check_data(values, origins)
    _check_steps(values, origins)
    _check_schedule(values, origins)
    _check_reports(values, origins)
    _check_backend(values, origins)
    check_folder(Path(values.output_dir))


def refuse_ignored(given: Mapping[str, str]) -> None:
    """Raise ValueError at the first setting that the recipe never reads.

    Args:
        given: names of settings to the text that names the place.
    """
    for name, where in given.items():
        if name in ignored.ALWAYS:
            raise ValueError(f"{where} would be ignored: {ignored.ALWAYS[name]}")


def check_device(training: TrainingArguments, origins: Origins) -> None:
    """Raise ValueError for what needs another device than the one that was found."""
    if training.fp16 and training.device.type == "cpu":
        raise ValueError(f"{origins('fp16')} needs a GPU; leave it out, or use --bf16 true")


def _check_conditions(values: Namespace, origins: Origins) -> None:
    for name, (needed, accepted, flag) in ignored.ON_CONDITION.items():
        value = getattr(values, needed, None)
        # A file may keep settings for another strategy than the command line's.
        if name in origins.on_command_line and getattr(value, "value", value) not in accepted:
            raise ValueError(
                f"{origins(name)} would be ignored, because of {origins(needed)}; add {flag}, or leave it out"
            )


def _check_sizes(values: Namespace, origins: Origins) -> None:
    if values.n_embd % values.n_head:
        near = [n for n in range(1, values.n_embd + 1) if values.n_embd % n == 0]
        fitting = ", ".join(map(str, sorted(sorted(near, key=lambda n: abs(n - values.n_head))[:4])))
        raise ValueError(f"{origins('n_embd')} is not a multiple of {origins('n_head')}; fitting n_head: {fitting}")


def _check_data(values: Namespace, origins: Origins) -> None:
    if values.data_dir is not None and origins.is_given("embedded_corpus"):
        raise ValueError(f"{origins('embedded_corpus')} would be ignored, because of {origins('data_dir')}; give one")


def _check_steps(values: Namespace, origins: Origins) -> None:
    steps = values.max_steps
    if steps > 0 and origins.is_given("num_train_epochs") and _not_overridden(origins, "num_train_epochs", "max_steps"):
        raise ValueError(
            f"{origins('num_train_epochs')} would be ignored, because of {origins('max_steps')}; to train by epochs, "
            "add --max_steps -1"
        )
    if steps < 0 and origins.is_given("max_steps") and not origins.is_given("num_train_epochs"):
        raise ValueError(f"{origins('max_steps')} trains by epochs; add --num_train_epochs, or give a number of steps")
    if 0 < steps < values.warmup_steps and (
        "warmup_steps" in origins.on_command_line or origins.together("warmup_steps", "max_steps")
    ):
        raise ValueError(
            f"{origins('warmup_steps')} is more than {origins('max_steps')}: the learning rate would never reach its "
            "peak; give fewer"
        )


def _not_overridden(origins: Origins, name: str, other: str) -> bool:
    """Return whether `other` does not stand on the command line against a file's `name`."""
    return name in origins.on_command_line or other not in origins.on_command_line


def _check_schedule(values: Namespace, origins: Origins) -> None:
    """Make the schedule once for a parameter of its own: its settings depend on its kind."""
    kind = SchedulerType(values.lr_scheduler_type)
    settings = values.lr_scheduler_kwargs
    if isinstance(settings, str):
        settings = json.loads(settings)
    make: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
    function = inspect.signature(make)
    own = [name for name in function.parameters if name not in _SCHEDULERS_OWN]
    takes = f"{kind.value} takes {', '.join(own) or 'no settings'}"
    name = "lr_scheduler_kwargs" if origins.is_given("lr_scheduler_kwargs") else "lr_scheduler_type"
    for key in settings or {}:
        if key not in own and kind is not SchedulerType.REDUCE_ON_PLATEAU:
            raise ValueError(
                f"{origins(name)}: unknown {key}{did_you_mean(str(key), own)}; {takes}, given as "
                "--lr_scheduler_kwargs '{\"NAME\": VALUE}' ('{}' for none)"
            )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=values.learning_rate)
    try:
        get_scheduler(kind, optimizer, 1, 10, scheduler_specific_kwargs=settings)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{origins(name)}: {one_line(error)}; {takes}") from None


_SCHEDULERS_OWN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs")


def _check_reports(values: Namespace, origins: Origins) -> None:
    names: Any = values.report_to
    for name in [names] if isinstance(names, str) else names or []:
        if name in ("all", "none"):
            continue
        known = sorted(INTEGRATION_TO_CALLBACK)
        if name not in known:
            raise ValueError(f"{origins('report_to')}: unknown {name}; accepted: none, all, {', '.join(known)}")
        if name not in get_available_reporting_integrations():
            raise ValueError(f"{origins('report_to')}: {name} is not installed; install it, or give --report_to none")


def _check_backend(values: Namespace, origins: Origins) -> None:
    name = values.torch_compile_backend
    if name is not None and name not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"{origins('torch_compile_backend')} is unknown; accepted: {known}")


def check_folder(output: Path) -> None:
    """Raise ValueError if a file is where the output folder, or one above it, would be."""
    for folder in (output, *output.parents):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output_dir {output}: {folder} is a file; choose another name")
