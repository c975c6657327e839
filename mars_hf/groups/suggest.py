"""`python -m mars_hf suggest`: settings of each rule from AdamW's; docs/choosing.md derives them.

A rule gets the learning rate at which its update of a matrix has the root mean square of AdamW's, if gradients are
independent from step to step, and decays that shrink weights alike.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from mars_hf.arithmetic.update_rules import UPDATE_RULES, first_moment_rms
from mars_hf.groups.settings import DEFAULTS, MARS_TYPES, MUON, PAIR_KEYS, Override, check_values, expand, shown

_ADAMW_BETA1 = 0.9
_MARS_M = (
    "mars-m with clip_threshold=None keeps one buffer less; the clip showed no gain.",
    "muon is mars-m without the clip and the split of query, key, value: same rates.",
)
_SEARCH_UPWARD = (
    "For fine-tuning no rate of mars-m or muon is recommended. In short runs at 2e-5",
    "mars-m ended far above AdamW, so search upward (docs/finetuning.md).",
)
FINETUNING_BETAS = (0.9, 0.999)  # AdamW's


def suggest(
    rule: str,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    *,
    width: int | None = None,
) -> dict[str, Any]:
    """Return keywords of `create` from AdamW's tuned settings; its decay is decoupled, as in torch.optim.AdamW."""
    if rule == MUON:  # its updates are as large as those of mars-m
        return {**suggest("mars-m", lr, betas, weight_decay, width=width), "mars_type": MUON}
    orthogonal = UPDATE_RULES[rule].orthogonalizes
    # Published configurations that orthogonalize have beta1 0.95 where AdamW has 0.9: about twice the half-life.
    beta1 = betas[0] ** (0.5 if orthogonal else 1.0)
    rule_lr = lr * first_moment_rms(betas[0]) / update_rms(rule, beta1=beta1, gamma=DEFAULTS["gamma"], width=width)
    return {
        "mars_type": rule,
        "lr": rule_lr,
        "lr_1d": lr,
        "betas": (beta1, betas[1]),
        "betas_1d": betas,
        # A step shrinks a weight by lr * weight_decay.
        "weight_decay": weight_decay * lr / rule_lr,
    }


def from_adamw(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `create` whose `lr` and `weight_decay` are AdamW's (beta1 0.9) with those of their rule.

    Rates that are stated for some parameters stay: `lr` in an override of `param_rules` is that of its vectors, too.

    Raises:
        ValueError: no learning rate, a rule whose update depends on the width of the model, or an override that makes
            updates of another size and states no rate.
    """
    if "lr" not in arguments:
        raise ValueError("adamw_rates=True: give AdamW's learning rate as lr")
    expanded = expand(arguments)
    factor = _factor_of_adamw(expanded)
    derived = {"lr_1d": arguments["lr"], **arguments, "lr": arguments["lr"] * factor}
    if "weight_decay" in arguments:  # AdamW shrinks a weight by lr * weight_decay in a step
        if arguments.get("weight_decay_mode") == "decoupled":
            derived["weight_decay"] = arguments["weight_decay"] * float(arguments["lr"])
        else:
            derived["weight_decay"] = arguments["weight_decay"] / factor
    if "param_rules" in arguments:
        derived["param_rules"] = [_with_stated_rate(rule, expanded, factor) for rule in arguments["param_rules"]]
    return derived


def _factor_of_adamw(settings: Mapping[str, Any]) -> float:
    """Return what AdamW's rate is multiplied by, for an update of its size.

    Raises:
        ValueError: that depends on the width of the model.
    """
    full = {**DEFAULTS, **settings}
    rule, beta1, gamma = full["mars_type"], full["betas"][0], full["gamma"]
    if depends_on_width(rule):
        raise ValueError(
            f"adamw_rates=True: the size of {rule}'s updates depends on the width of the model; take the rates of "
            "python -m mars_hf suggest --width"
        )
    if rule == "mars-adamw" and full["second_moment"] == "gradient":
        of_rule = first_moment_rms(beta1, gamma)
    else:
        of_rule = update_rms(rule, beta1=beta1, gamma=gamma)
    return first_moment_rms(_ADAMW_BETA1) / of_rule


def _with_stated_rate(override: Override, arguments: Mapping[str, Any], factor: float) -> Override:
    """Return an override whose rate, if it states one, is that of all its parameters."""
    settings = override.settings
    if "lr" in settings:
        return override._replace(settings={"lr_1d": settings["lr"], **settings})
    of_override = _factor_of_adamw({**arguments, **settings})
    if not math.isclose(of_override, factor, rel_tol=0.05):
        raise ValueError(
            f"adamw_rates=True: updates under param_rules {shown(override.pattern)} have another size than the others, "
            f"for which rates are derived; state lr there: AdamW's times {of_override:.3g}"
        )
    return override


_WORD_COLUMNS = 2  # of the table, before those of numbers
# AdamW's usual rates, by what is trained.
USUAL_RATES = {"from scratch": 3e-4, "all weights of a pretrained model": 2e-5, "LoRA adapters": 2e-4}


def table() -> str:
    """Return AdamW's usual rates and what becomes of them, as plain text of at most 80 columns."""
    header, *rows = cells_of_table()
    wrapped = [textwrap.wrap(title, 10) for title in header]
    height = max(map(len, wrapped))
    titles = zip(*([""] * (height - len(title)) + title for title in wrapped), strict=True)
    cells = [*map(list, titles), *rows]  # words to the left, numbers to the right
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        words = map(str.ljust, row[:_WORD_COLUMNS], widths)
        numbers = map(str.rjust, row[_WORD_COLUMNS:], widths[_WORD_COLUMNS:])
        lines.append("  ".join([*words, *numbers]).rstrip())
    return "\n".join(lines)


def cells_of_table() -> list[list[str]]:
    """Return the header of the table, and a row for each rule and betas."""
    adamw = first_moment_rms(_ADAMW_BETA1)
    default = "({:g}, {:g}), the default".format(*DEFAULTS["betas"])
    gamma = DEFAULTS["gamma"]
    rows = [
        ("AdamW", "its own", 1.0),
        ("mars-adamw", "AdamW's", adamw / update_rms("mars-adamw", beta1=0.9, gamma=gamma)),
        ("mars-adamw", default, adamw / update_rms("mars-adamw", beta1=DEFAULTS["betas"][0], gamma=gamma)),
        ("mars-m, muon", default, adamw / update_rms("mars-m", beta1=DEFAULTS["betas"][0], gamma=gamma)),
        ("mars-lion", "AdamW's", adamw / update_rms("mars-lion", beta1=0.9, gamma=gamma)),
    ]
    cells = [["rule", "betas", "times AdamW's rate", *USUAL_RATES]]
    for rule, betas, factor in rows:
        rates = [_rate(factor * rate) for rate in USUAL_RATES.values()]
        if rule.startswith("mars-m"):  # fine-tuned, its best rate in our search was 12.5 times as high
            rates[1:] = ["search"] * 2
        cells.append([rule, betas, f"{factor:.2g}", *rates])
    return cells


def _rate(rate: float) -> str:
    """Return a rate with two digits, as people write it."""
    digits, exponent = f"{rate:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def update_rms(rule: str, *, beta1: float, gamma: float, width: int | None = None) -> float:
    """Return the root mean square of a matrix's update for lr = 1, from independent gradients."""
    update_rule = UPDATE_RULES[rule]
    if update_rule.update_scale is None:
        return update_rule.update_rms(beta1, gamma)
    if width is None and depends_on_width(rule):
        raise ValueError(f"{rule}'s update depends on the width of the model; give --width")
    return _rms_of_block(update_rule.update_scale, width or 1)


def depends_on_width(rule: str) -> bool:
    """Return whether the size of a rule's update depends on the width of the model."""
    scale = UPDATE_RULES[rule].update_scale
    return scale is not None and not math.isclose(_rms_of_block(scale, 1), _rms_of_block(scale, 2))


def _rms_of_block(scale: Callable[[int, int], float], width: int) -> float:
    """Return the root mean square of the orthogonalized updates of a transformer's block."""
    # Query, key, value and output, then an MLP four times as wide.
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    squares = sum(scale(*shape) ** 2 * min(shape) for shape in shapes)
    # 0.9: RMS of the singular values that Newton-Schulz leaves of a Gaussian matrix, 0.85 to 0.95 by shape.
    return 0.9 * math.sqrt(squares / sum(rows * cols for rows, cols in shapes))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add = parser.add_argument
    add("--adamw-lr", type=float, help="AdamW's tuned peak learning rate; left out: a table for its usual rates")
    add("--finetuning", action="store_true", help="defaults of fine-tuning: betas 0.9 0.999, no weight decay")
    add("--adamw-betas", type=float, nargs=2, help="its betas (default: 0.9 0.95; in fine-tuning 0.9 0.999)")
    add("--adamw-weight-decay", type=float, help="its decoupled weight decay (default: 0.1; in fine-tuning 0)")
    needing = ", ".join(filter(depends_on_width, MARS_TYPES))
    add("--width", type=int, help=f"width of the model; left out without: {needing}")
    add("--rule", type=lambda text: text.replace("_", "-"), choices=(*MARS_TYPES, MUON), help="one rule only")


def with_hyphens(argv: list[str]) -> list[str]:
    """Return the command's line with flags as its parser spells them: those of scripts have underscores."""
    if argv[0] != "suggest":
        return argv
    return [word.replace("_", "-") if word.startswith("--") else word for word in argv]


def run(options: argparse.Namespace) -> str:
    """Return the command's output; ValueError for a value out of range or a missing one."""
    lr, width = options.adamw_lr, options.width
    if lr is None:
        return _table_alone(options)
    betas, decay = _betas_and_decay(options)
    _check_ranges(lr, betas, decay, width)
    rules = [options.rule] if options.rule else [rule for rule in MARS_TYPES if width or not depends_on_width(rule)]
    texts = [_forms(suggest(rule, lr, betas, decay, width=width)) for rule in rules]
    if not options.rule and not width:
        texts.append(f"left out without --width: {', '.join(filter(depends_on_width, MARS_TYPES))}")
    return "\n\n".join([*_notes(rules, is_finetuning=options.finetuning), *texts])


def _notes(rules: list[str], *, is_finetuning: bool) -> list[str]:
    """Return what there is to say of mars-m and muon, as one paragraph, or nothing."""
    lines = [*_MARS_M] if "mars-m" in rules else []
    if is_finetuning and ("mars-m" in rules or MUON in rules):
        lines += _SEARCH_UPWARD
    return ["\n".join(lines)] if lines else []


def _check_ranges(lr: float, betas: tuple[float, float], decay: float, width: int | None) -> None:
    """Raise ValueError for values of AdamW that no training has."""
    given: dict[str, dict[str, Any]] = {
        "--adamw-lr": {"lr": lr},
        "--adamw-betas": {"betas": betas},
        "--adamw-weight-decay": {"weight_decay": decay},
    }
    for flag, setting in given.items():
        try:
            check_values(setting)
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
    if lr == 0 or (width is not None and width < 1):
        raise ValueError("--adamw-lr and --width are numbers > 0")


def _table_alone(options: argparse.Namespace) -> str:
    """Return the table of AdamW's usual rates; ValueError for an option that it would ignore."""
    for name in ("finetuning", "adamw_betas", "adamw_weight_decay", "width", "rule"):
        value = getattr(options, name)
        if value is not None and value is not False:
            raise ValueError(f"--{name.replace('_', '-')} needs --adamw-lr; without both, there is a table")
    return table()


def _betas_and_decay(options: argparse.Namespace) -> tuple[tuple[float, float], float]:
    """Return AdamW's betas and decay: those given, or the usual ones of the kind of training."""
    betas, decay = (FINETUNING_BETAS, 0.0) if options.finetuning else ((0.9, 0.95), 0.1)
    if options.adamw_betas is not None:
        betas = tuple(options.adamw_betas)
    if options.adamw_weight_decay is not None:
        decay = options.adamw_weight_decay
    return betas, decay


def _forms(settings: dict[str, Any]) -> str:
    """Return settings as arguments of a command line and as a call of `create`, without those at their defaults."""
    rule, lr, decay = (_text(settings[name]) for name in ("mars_type", "lr", "weight_decay"))
    defaults = {**DEFAULTS, "lr": None}  # `create` has no rate of its own
    texts = {name: _text(value) for name, value in settings.items() if _text(value) != _text(defaults[name])}
    keywords = ", ".join(f"{name}={text}" for name, text in texts.items() if name != "mars_type")
    call = f'mars_hf.create(model, mars_type="{rule}", {keywords})'
    arguments = [f"{name}={text}" for name, text in texts.items() if name == "lr_1d"]
    for half, (pair, index) in PAIR_KEYS.items():
        if pair in texts:
            arguments.append(f"{half}={_beta(settings[pair][index])}")
    optim = "mars_muon" if rule == MUON else rule.replace("-", "_")  # transformers may have a muon of its own
    return f"""{rule}
  --optim {optim} --learning_rate {lr} --weight_decay {decay} \\
    --optim_args {",".join(sorted(arguments))}
{textwrap.indent(textwrap.fill(call, 78, break_on_hyphens=False, subsequent_indent="    "), "  ")}"""


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_beta, value))})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _beta(beta: float) -> str:
    """Return a beta as text, with three significant digits of 1 - beta."""
    return f"{round(beta, 2 - math.floor(math.log10(1 - beta))):.15g}"
