"""`python -m mars_hf suggest`: print what `groups.suggestions` suggests, as a table, to paste, or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mars_hf.groups.settings import DEFAULTS, MARS_TYPES, PAIR_KEYS
from mars_hf.groups.suggestions import AdamW, Suggestion, half_life, suggest

HELP = "suggest learning rates, betas and decays for MARS from those of AdamW"
# Names of a model's width in the config.json of transformers' models.
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
_COLUMNS = ("lr", "lr_1d", "lr_embeddings", "betas", "betas_1d", "gamma", "weight_decay", "weight_decay_1d")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--adamw-lr", type=float, required=True, metavar="LR", help="AdamW's tuned peak learning rate")
    parser.add_argument(
        "--adamw-betas",
        type=float,
        nargs=2,
        default=AdamW.betas,
        metavar=("BETA1", "BETA2"),
        help="its betas (default: 0.9 0.95, those of pretraining; Trainer's own are 0.9 0.999)",
    )
    parser.add_argument(
        "--adamw-weight-decay",
        type=float,
        default=AdamW.weight_decay,
        metavar="DECAY",
        help="its decoupled weight decay (default: 0.1)",
    )
    parser.add_argument("--batch-tokens", type=_tokens, metavar="N", help="tokens a step, over all processes")
    parser.add_argument(
        "--adamw-batch-tokens",
        type=_tokens,
        metavar="N",
        help="tokens a step in the runs that tuned AdamW (default: --batch-tokens)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--width", type=int, metavar="N", help="width of the model, which mars-shampoo needs")
    size.add_argument("--model", type=Path, metavar="FOLDER", help="folder of the model, whose config.json has it")
    parser.add_argument("--rule", type=_rule, choices=MARS_TYPES, help="one rule only")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> str:
    """Return the command's output.

    Raises:
        ValueError: a value out of range, a width that is missing, or a config.json that has none.
    """
    there = options.batch_tokens
    if options.adamw_batch_tokens is not None and there is None:
        raise ValueError("--adamw-batch-tokens says where AdamW was tuned; give --batch-tokens of the MARS run too")
    before = options.adamw_batch_tokens or there
    ratio = there / before if there else 1.0
    width = options.width if options.model is None else _width(options.model)
    adamw = AdamW(options.adamw_lr, tuple(options.adamw_betas), options.adamw_weight_decay)
    rules = [options.rule] if options.rule else list(MARS_TYPES)
    if width is None:
        if options.rule == "mars-shampoo":
            raise ValueError("mars-shampoo's update depends on the width of the model; give --width or --model")
        rules = [rule for rule in rules if rule != "mars-shampoo"]
    found = {rule: suggest(rule, adamw, batch_ratio=ratio, width=width) for rule in rules}
    moved = adamw.at_batch(ratio)
    if options.json:
        return _as_json(moved, found)
    tuned = f", tuned at {before:,} tokens a step" if before else ""
    lines = [f"AdamW{tuned}: {_settings_of(adamw)}"]
    if ratio != 1:
        lines.append(f"AdamW, moved to {there:,} tokens a step: {_settings_of(moved)}")
    lines += [_half_lives(moved, there), "", *_table(found)]
    if width is None and not options.rule:
        lines += ["", "mars-shampoo's update depends on the width of the model: add --width or --model"]
    for rule, suggestion in found.items():
        lines += ["", rule, *(f"  {line}" for form in forms(suggestion.settings) for line in form.splitlines())]
    return "\n".join(lines)


def forms(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of a command line, and as a call of `create`, without those at their defaults."""
    rule, lr, decay = (settings[name] for name in ("mars_type", "lr", "weight_decay"))
    own = {name: settings[pair][index] for name, (pair, index) in PAIR_KEYS.items()}
    own |= {name: settings[name] for name in ("lr_1d", "gamma", "weight_decay_1d")}
    usual = {name: DEFAULTS[pair][index] for name, (pair, index) in PAIR_KEYS.items()}
    arguments = ",".join(_stated(own, {**DEFAULTS, **usual}))
    keywords = _stated({name: value for name, value in settings.items() if name != "mars_type"}, DEFAULTS)
    # No line breaks inside pairs.
    words = [f'mars_type="{rule}"', *(keyword.replace(" ", "\N{NO-BREAK SPACE}") for keyword in keywords)]
    lines = textwrap.wrap(", ".join(["model", *words]), 100, break_long_words=False, break_on_hyphens=False)
    call = "\n".join(f"  {line}" for line in lines).replace("\N{NO-BREAK SPACE}", " ")
    shared = f"--learning_rate {_text('lr', lr)} --weight_decay {_text('decay', decay)}"
    return [
        f"--optim {rule.replace('-', '_')} {shared} \\\n  --optim_args {arguments}",
        f"mars_hf.create(\n{call}\n)",
    ]


def _stated(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    texts = {name: _text(name, value) for name, value in values.items()}
    return [
        f"{name}={text}"
        for name, text in texts.items()
        if defaults[name] is None or text != _text(name, defaults[name])
    ]


def _tokens(text: str) -> int:
    try:
        number = float(text)  # accepts 5e5
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 1 and number == int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; accepted: an integer >= 1, also as 5e5")
    return int(number)


def _rule(text: str) -> str:
    return text.replace("_", "-")


def _width(model: Path) -> int:
    """Return the width in a model's config.json; `model` is its folder or the file itself."""
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--model {str(model)!r}: {path.name}: {error.strerror}; give the model's folder") from None
    except ValueError:
        raise ValueError(f"--model {str(model)!r}: {path.name} is not JSON; give --width") from None
    whole = config if isinstance(config, dict) else {}
    text = whole.get("text_config")  # of models with several towers
    for part in (whole, text if isinstance(text, dict) else {}):
        for key in _WIDTH_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    raise ValueError(f"--model {str(model)!r}: {path.name} has none of {', '.join(_WIDTH_KEYS)}; give --width")


def _text(name: str, value: Any) -> str:
    """Return a setting as text, with three significant digits; of a beta, those of 1 - beta."""
    if isinstance(value, tuple):
        return f"({', '.join(_text('beta', beta) for beta in value)})"
    if name.startswith("beta"):
        return f"{round(value, 2 - math.floor(math.log10(1 - value))):.15g}"
    return f"{value:.3g}"


def _settings_of(adamw: AdamW) -> str:
    decay = _text("weight_decay", adamw.weight_decay)
    return f"lr {_text('lr', adamw.lr)}, betas {_text('betas', adamw.betas)}, weight decay {decay}"


def _half_lives(adamw: AdamW, tokens: int | None) -> str:
    """Return the half-lives of the moments, and that of a weight that only decays."""
    steps = {"first moment": half_life(adamw.betas[0]), "second moment": half_life(adamw.betas[1])}
    if adamw.weight_decay:
        steps["a weight that only decays"] = math.log(2) / (adamw.lr * adamw.weight_decay)
    unit = "tokens" if tokens else "steps"
    return f"Half-lives in {unit}: " + ", ".join(
        f"{name} {_short(number * (tokens or 1))}" for name, number in steps.items()
    )


def _short(number: float) -> str:
    """Return a count with three significant digits and a suffix."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def _table(found: Mapping[str, Suggestion]) -> Iterable[str]:
    rows: list[tuple[str, ...]] = [("rule", *_COLUMNS)]
    for rule, suggestion in found.items():
        values = {**suggestion.settings, "lr_embeddings": suggestion.lr_embeddings}
        rows.append((rule, *(_text(name, values[name]) for name in _COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _as_json(adamw: AdamW, found: Mapping[str, Suggestion]) -> str:
    """Return full precision; `settings` are keywords of `create`."""
    rules = {
        rule: {
            "settings": suggestion.settings,
            "lr_embeddings": suggestion.lr_embeddings,
            "update_rms": suggestion.update_rms,
        }
        for rule, suggestion in found.items()
    }
    adamw_settings = {"lr": adamw.lr, "betas": adamw.betas, "weight_decay": adamw.weight_decay}
    return json.dumps({"adamw": adamw_settings, "rules": rules}, indent=1)
