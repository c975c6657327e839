"""`python -m mars_hf suggest`: settings of each rule from AdamW's; docs/choosing.md derives them.

A rule gets the learning rate at which its update of a matrix has the root mean square of AdamW's, if gradients are
independent from step to step, and betas and decays of the same half-lives in tokens.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import Any, NamedTuple

from mars_hf.newton_schulz import muon_scale, shampoo_scale
from mars_hf.settings import DEFAULTS, MARS_TYPES, ORTHOGONAL_TYPES, check

_MARS_M = (
    "mars-m without its clip (clip_threshold=None) keeps one buffer instead of two; comparisons show no gain from it.",
    "muon is mars-m without the clip and without the split of query, key and value, at the same rates.",
)


class AdamW(NamedTuple):
    """AdamW's tuned settings; the decay is that of matrices, decoupled as in torch.optim.AdamW."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1

    def at_batch(self, ratio: float) -> AdamW:
        """Return the settings for `ratio` times as many tokens a step: half-lives in tokens stay."""
        betas = (self.betas[0] ** ratio, self.betas[1] ** ratio)
        return AdamW(self.lr * math.sqrt(ratio), betas, self.weight_decay * math.sqrt(ratio))


def suggest(rule: str, adamw: AdamW, *, batch_ratio: float = 1.0, width: int | None = None) -> dict[str, Any]:
    """Return keywords of `create`; `batch_ratio` is tokens a step over those that AdamW was tuned at."""
    orthogonal = rule in ORTHOGONAL_TYPES
    target = adamw.at_batch(batch_ratio)
    # Published configurations that orthogonalize have beta1 0.95 where AdamW has 0.9: about twice the half-life.
    beta1, tuned_beta1 = (betas[0] ** (0.5 if orthogonal else 1.0) for betas in (target.betas, adamw.betas))
    # The correction keeps its strength if gamma keeps its share of 1 - beta1.
    gamma = DEFAULTS["gamma"] * (1 - beta1) / (1 - tuned_beta1)
    lr = target.lr * first_moment_rms(target.betas[0]) / update_rms(rule, beta1=beta1, gamma=gamma, width=width)
    return {
        "mars_type": rule,
        "lr": lr,
        "lr_1d": target.lr,
        "betas": (beta1, target.betas[1]),
        "betas_1d": target.betas,
        "gamma": gamma,
        # A step shrinks a weight by lr * weight_decay.
        "weight_decay": target.weight_decay * target.lr / lr,
        # AdamW decays embeddings; in these rules they are among the parameters that take `*_1d`.
        "weight_decay_1d": target.weight_decay if orthogonal else 0.0,
    }


def update_rms(rule: str, *, beta1: float, gamma: float, width: int | None = None) -> float:
    """Return the root mean square of a matrix's update for lr = 1, from independent gradients."""
    if rule == "mars-lion":
        return 1.0
    if rule == "mars-adamw":
        k = gamma * beta1 / (1 - beta1)
        return first_moment_rms(beta1, gamma) / math.hypot(1 + k, k)
    if width is None and rule == "mars-shampoo":
        raise ValueError("mars-shampoo's update depends on the width of the model; give --width")
    width = width or 1  # mars-m's does not
    scale = {"mars-shampoo": shampoo_scale, "mars-m": muon_scale}[rule]
    # The matrices of a transformer's block: query, key, value and output, then an MLP four times as wide.
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    squares = sum(scale(*shape) ** 2 * min(shape) for shape in shapes)
    # 0.9: RMS of the singular values that Newton-Schulz leaves of a Gaussian matrix, 0.85 to 0.95 by shape.
    return 0.9 * math.sqrt(squares / sum(rows * cols for rows, cols in shapes))


def first_moment_rms(beta1: float, gamma: float = 0.0) -> float:
    """Return the root mean square of m over that of g, from m = (1 - γ) e + γ g with independent g."""
    # e weighs a gradient of age i by (1 - β₁) β₁ⁱ; the squares of these weights add up to (1 - β₁) / (1 + β₁).
    average = (1 - gamma) ** 2 * (1 - beta1) / (1 + beta1)
    return math.sqrt(average + 2 * gamma * (1 - gamma) * (1 - beta1) + gamma**2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add = parser.add_argument
    add("--adamw-lr", type=float, required=True, help="AdamW's tuned peak learning rate")
    add("--adamw-betas", type=float, nargs=2, default=(0.9, 0.95), help="its betas (default: 0.9 0.95)")
    add("--adamw-weight-decay", type=float, default=0.1, help="its decoupled weight decay (default: 0.1)")
    add("--batch-tokens", type=count, help="tokens a step, over all processes")
    add("--adamw-batch-tokens", type=count, help="tokens a step where AdamW was tuned (default: --batch-tokens)")
    add("--width", type=count, help="width of the model; mars-shampoo needs it, and is left out without")
    add("--rule", type=lambda text: text.replace("_", "-"), choices=MARS_TYPES, help="one rule only")


def run(options: argparse.Namespace) -> str:
    """Return the command's output; ValueError for a value out of range or a missing one."""
    adamw = AdamW(options.adamw_lr, tuple(options.adamw_betas), options.adamw_weight_decay)
    check({"lr": adamw.lr, "betas": adamw.betas, "weight_decay": adamw.weight_decay})
    if not adamw.lr > 0:
        raise ValueError(f"--adamw-lr {adamw.lr!r} is not a learning rate; accepted: a finite number > 0")
    tokens, tuned_tokens = options.batch_tokens, options.adamw_batch_tokens or options.batch_tokens
    if tuned_tokens and not tokens:
        raise ValueError("--adamw-batch-tokens says where AdamW was tuned; give --batch-tokens of the MARS run too")
    ratio = tokens / tuned_tokens if tokens else 1.0
    lines = [f"AdamW{f', tuned at {tuned_tokens:,} tokens a step' if tokens else ''}: {_settings_of(adamw)}"]
    if ratio != 1:
        lines.append(f"AdamW, moved to {tokens:,} tokens a step: {_settings_of(adamw.at_batch(ratio))}")
    rules = [options.rule] if options.rule else [rule for rule in MARS_TYPES if rule != "mars-shampoo" or options.width]
    suggestions = [suggest(rule, adamw, batch_ratio=ratio, width=options.width) for rule in rules]
    rows = [list(suggestions[0]), *([_text(value) for value in settings.values()] for settings in suggestions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
    if "mars-m" in rules:
        lines += ["", *_MARS_M]
    return "\n".join([*lines, *map(_forms, suggestions)])


def _forms(settings: dict[str, Any]) -> str:
    """Return settings as arguments of a command line and as a call of `create`, without those at their defaults."""
    rule, lr, decay = (_text(settings[name]) for name in ("mars_type", "lr", "weight_decay"))
    stated = {name: _text(value) for name, value in settings.items() if _text(value) != _text(DEFAULTS[name])}
    keywords = ", ".join(f"{name}={text}" for name, text in stated.items() if name != "mars_type")
    call = f'mars_hf.create(model, mars_type="{rule}", {keywords})'
    arguments = [f"{name}={text}" for name, text in stated.items() if name in ("lr_1d", "gamma", "weight_decay_1d")]
    for name in stated.keys() & {"betas", "betas_1d"}:
        arguments += [f"{name.replace('s', str(i))}={_beta(beta)}" for i, beta in enumerate(settings[name], 1)]
    return f"""
{rule}
  --optim {rule.replace("-", "_")} --learning_rate {lr} --weight_decay {decay} \\
    --optim_args {",".join(sorted(arguments))}
{textwrap.indent(textwrap.fill(call, 100, break_on_hyphens=False, subsequent_indent="    "), "  ")}"""


def _settings_of(adamw: AdamW) -> str:
    return f"lr {_text(adamw.lr)}, betas {_text(adamw.betas)}, weight decay {_text(adamw.weight_decay)}"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_beta, value))})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _beta(beta: float) -> str:
    """Return a beta as text, with three significant digits of 1 - beta."""
    return f"{round(beta, 2 - math.floor(math.log10(1 - beta))):.15g}"


def count(text: str) -> int:
    """Parse an integer >= 1, also written as 5e5."""
    number = float(text)
    if not (number >= 1 and number % 1 == 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(number)
