"""Read a recipe's command line into dataclasses, with the recipe's starting learning rates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pretraining.run.errors import did_you_mean
from transformers import HfArgumentParser
from transformers.training_args import OptimizerNames

import mars_hf


class Start(NamedTuple):
    """Settings to start from with one optimizer.

    Args:
        learning_rate: peak learning rate.
        optim_args: further settings, as `--optim_args` takes them; None for the optimizer's own.
    """

    learning_rate: float
    optim_args: str | None = None


def parse(
    kinds: Sequence[Any],
    argv: Sequence[str] | None,
    *,
    description: str | None,
    name: str | Callable[[argparse.Namespace], str],
    starts: Callable[[argparse.Namespace], Mapping[str, Start]],
) -> tuple[Any, ...]:
    """Return an instance of each dataclass; `--optim` knows the rules of MARS.

    Args:
        kinds: dataclasses with different fields.
        argv: command line without the program's name; None reads sys.argv.
        description: text of --help.
        name: without --output_dir, the output folder is runs/NAME-OPTIM; a function makes it of the settings.
        starts: makes of the settings what to start from by `--optim`; it fills in the learning rate and
            `optim_args` that the command line leaves out.

    Raises:
        ValueError: a setting is unknown, out of range, or would be ignored, or the recipe has no learning rate for the
            optimizer.
    """
    mars_hf.register()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        list(kinds),
        usage="%(prog)s [--SETTING VALUE ...]",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    values = parser.parse_args(argv)
    _fill(values, starts(values), name(values) if callable(name) else name)
    return parser.parse_dict(vars(values), allow_extra_keys=True)


def _fill(values: argparse.Namespace, starts: Mapping[str, Start], name: str) -> None:
    optim = values.optim
    known = [member.value for member in OptimizerNames]
    if optim not in known:
        raise ValueError(
            f"--optim {optim!r} is unknown{did_you_mean(optim, known)}; accepted: {', '.join(starts)} and the other "
            "names of transformers"
        )
    if values.learning_rate is None:
        if optim not in starts:
            raise ValueError(
                f"--optim {optim}: the recipe has no learning rate for it, only for {', '.join(starts)}; give "
                "--learning_rate (python -m mars_hf suggest derives one from AdamW's)"
            )
        values.learning_rate = starts[optim].learning_rate
    if values.optim_args is None and optim in starts:
        values.optim_args = starts[optim].optim_args
    if values.output_dir is None:
        values.output_dir = f"runs/{name}-{optim}"
