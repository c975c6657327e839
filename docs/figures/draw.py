#!/usr/bin/env python
"""Draw the figures of the documentation.

    python docs/figures/draw.py                       # writes docs/images/*.png
    python docs/figures/draw.py --output_dir runs/figures   # somewhere else

Those of the measurements read benchmarks/results; the others are computed from the formulas, with fixed seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import MaxNLocator
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import published  # noqa: E402 (needs the line above)
from published import by_contender, further_runs, runs  # noqa: E402

from mars_hf.compare import picture  # noqa: E402

IMAGES = ROOT / "docs" / "images"
NAMES = {"adamw": "AdamW", "nadamw": "NAdamW", "mars_adamw": "MARS-AdamW", "muon": "Muon", "mars_m": "MARS-M"}
# Arms with the best `beta1` of those that were searched on each text, where it is not 0.9. On the headers AdamW gets
# 0.7: 0.6 is better with the search's seed, but has a higher mean.
BEST_ON_PYTHON = {"adamw": "adamw 0.8", "mars_adamw": "mars_adamw 0.8"}
BEST_ON_HEADERS = {"adamw": "adamw 0.7", "nadamw": "nadamw 0.8", "mars_adamw": "mars_adamw 0.7"}
# Optimizers have the colors of picture.COLORS; everything else is in shades that none of them has.
SHADES = ("#80cdc1", "#35978f", "#01564f")
GREY = "0.45"
BETA1, GAMMA = 0.95, 0.025  # defaults of Mars


def main(argv: Sequence[str] | None = None) -> None:
    """Draw every figure; `argv` is the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=IMAGES, help="default: docs/images")
    output: Path = parser.parse_args(argv).output_dir
    output.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(output / name, dpi=160)
        plt.close(figure)
        print(output / name)


def draw_controls() -> Figure:
    """Show the final losses of five optimizers on both texts: seeds, means and 95% intervals of the means."""
    texts = {
        "Python sources": ("betas", "controls_embedded", BEST_ON_PYTHON, (3.85, 4.4)),
        "C++ headers": ("betas_headers", "controls_headers", BEST_ON_HEADERS, (2.1, 2.65)),
    }
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.6), layout="constrained", sharey=True)
    for axes, (title, (search, controls, best, range_of_losses)) in zip(panels, texts.items(), strict=True):
        arms = by_contender([*further_runs(search), *runs(controls)])
        for place, arm in enumerate(NAMES):
            losses = np.array([run.eval_loss for run in arms[best.get(arm, arm)]])
            half = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses)
            color = picture.COLORS[arm]
            axes.scatter(losses, [place + 0.2] * len(losses), s=10, color=color, alpha=0.5, linewidths=0)
            axes.errorbar(losses.mean(), place, xerr=half, fmt="o", color=color, capsize=3, markersize=6)
            axes.annotate(
                f"{losses.mean():.3f}", (losses.mean(), place - 0.18), ha="center", va="bottom", fontsize=8, color=color
            )
        axes.set(xlim=range_of_losses, ylim=(len(NAMES) - 0.5, -0.7))  # both panels to one scale
        axes.set_title(title, fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.grid(alpha=0.3, axis="x")
    panels[0].set_yticks(range(len(NAMES)), list(NAMES.values()))
    figure.suptitle("Held-out loss of a 1.3M-parameter GPT-2 after 500 steps", fontsize="large")
    axis = "nats per token, lower is better"
    legend = "large dot and bar: mean of 5 seeds and its 95 % interval; small dots: seeds"
    figure.supxlabel(f"{axis}\n{legend}", fontsize="small")
    return figure


def draw_loss_curve() -> Figure:
    """Show the held-out loss of MARS-M and AdamW over the default job: mean and range of the controls' seeds."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    arms = by_contender(runs("controls_embedded"))
    for optimizer, arm in (("adamw", "adamw"), ("mars_m", "mars_m, gamma 1 - beta1")):  # as the job has them
        steps, losses = np.array([run.curve for run in arms[arm]]).transpose(2, 1, 0)  # (step, seed) each
        beta1 = {"adamw": 0.9, "mars_m": 0.95}[optimizer]
        color, label = picture.COLORS[optimizer], f"{NAMES[optimizer]}, beta1 {beta1:g}"
        axes.fill_between(steps[:, 0], losses.min(axis=1), losses.max(axis=1), color=color, alpha=0.3, linewidth=0)
        axes.plot(steps[:, 0], losses.mean(axis=1), ".-", color=color, label=label)
    axes.set_xticks(steps[:, 0])
    axes.set(xlabel="steps of 2,048 tokens", ylabel="nats per token, lower is better")
    axes.set_title("Held-out loss of the default job: GPT-2, 1.3M parameters, Python sources", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(title=f"lines: means of {losses.shape[1]} seeds; shaded: their range")
    return figure


def draw_betas() -> Figure:
    """Show final losses over beta1, one line an optimizer: means, and a dot for each seed."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    lines = published.lines_of("betas_embedded")
    for name, line in lines.items():
        color = picture.color(name)
        betas = [beta1 for beta1, losses in line for _ in losses]
        axes.scatter(betas, [loss for _, losses in line for loss in losses], s=8, color=color, alpha=0.6)
        means = sorted((beta1, float(np.mean(losses))) for beta1, losses in line)
        dashes = "--" if " " in name else "-"
        axes.plot(*zip(*means, strict=True), marker=".", linestyle=dashes, color=color, label=name)
    places = sorted({beta1 for line in lines.values() for beta1, _ in line})
    # By the length of the average.
    axes.set_xscale("function", functions=(lambda beta: -np.log1p(-beta), lambda place: -np.expm1(-place)))
    axes.set_xticks(places, [f"{beta1:g}" for beta1 in places])
    axes.minorticks_off()
    axes.set(xlabel="beta1", ylabel="held-out loss, nats per token\n(lower is better)")
    axes.set_title("Final loss over beta1: GPT-2, 1.3M parameters, 500 steps, Python sources", fontsize="medium")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, title="lines: means of seeds; dots: seeds")
    return figure


def draw_finetuning() -> Figure:
    """Show the held-out loss of SmolLM2 over the learning rate, as the searches found it."""
    searched = published.read("tune_smollm2")["runs"]
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.2), layout="constrained", sharey=True)
    for axes, (mode, title) in zip(panels, {"all": "all weights", "lora": "LoRA, rank 16"}.items(), strict=True):
        rates = set()
        for optimizer, optim in (("adamw", "adamw(0.9)"), ("mars_adamw", "mars_adamw"), ("mars_m", "mars_m")):
            of_arm = {"text": "kjv", "mode": mode, "optim": optim, "seed": 100}.items()
            line = sorted((run["learning_rate"], run["eval_loss"]) for run in searched if of_arm <= run.items())
            axes.plot(*zip(*line, strict=True), ".-", color=picture.COLORS[optimizer], label=NAMES[optimizer])
            rates.update(rate for rate, _ in line)
        axes.set(xscale="log", xlabel="learning rate")
        axes.set_title(title, fontsize="medium")
        shown = sorted(rates)[::2]  # labels of all would touch
        axes.set_xticks(shown, [f"{rate:.1e}".replace("e-0", "e-").replace(".0e", "e") for rate in shown])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss (nats per token),\nlower is better")
    panels[1].legend()
    figure.suptitle("SmolLM2-135M on the King James Bible, 60 steps of 512 tokens, one seed", fontsize="medium")
    return figure


def draw_compare() -> Figure:
    """Show what `python -m mars_hf compare` draws for the example of its page."""
    baseline, *others = published.read("compare_minimal")["arms"]
    title = f"{' and '.join(others)} against {baseline} on pretrain_minimal.py: 0.1M parameters, 100 steps, 3 seeds"
    return picture.figure_of(published.findings("compare_minimal", title))


def draw_longer_finetuning(name: str, text: str) -> Figure:
    """Show a comparison of 200 steps on SmolLM2."""
    title = f"SmolLM2-135M with LoRA on {text}: 200 steps of 512 tokens, 3 new seeds"
    return picture.figure_of(published.findings(name, title))


def weights_of_past_gradients(beta1: float, gamma: float, length: int) -> np.ndarray:
    """Return the weight of g_{t-n} in the first moment m_t of approx MARS without clipping, for n = 0, 1, ...

    With c_t = g_t + k (g_t - g_{t-1}) and m_t = beta1 m_{t-1} + (1 - beta1) c_t, for one gradient of 1 at n = 0.
    """
    k = gamma * beta1 / (1 - beta1)
    weights = np.zeros(length)
    moment = last = 0.0
    for age in range(length):
        gradient = 1.0 if age == 0 else 0.0
        corrected = gradient + k * (gradient - last)
        moment = beta1 * moment + (1 - beta1) * corrected
        last = gradient
        weights[age] = moment
    return weights


def draw_weights() -> Figure:
    """Show how much each past gradient counts in the first moment."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    ages = np.arange(7)  # from age 1 on the curves run in parallel
    rows = [
        ("AdamW (gamma = 0)", 0.0, picture.COLORS["adamw"], "s"),
        (f"approx MARS (gamma = {GAMMA})", GAMMA, picture.COLORS["mars_adamw"], "o"),
        (f"Nesterov, NAdam (gamma = 1 - beta1 = {1 - BETA1:.2f})", 1 - BETA1, picture.COLORS["nadamw"], "^"),
    ]
    for label, gamma, color, marker in rows:
        weights = weights_of_past_gradients(BETA1, gamma, len(ages))
        axes.plot(ages, weights, color=color, marker=marker, markersize=5, linewidth=1.4, label=label)
    axes.set(xlabel="age of the gradient (steps)", ylabel="weight in the first moment", ylim=(0, None))
    axes.set_title(f"Weights of past gradients at beta1 = {BETA1}, without clipping")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


class _Errors(NamedTuple):
    """Relative errors of a first moment against the true gradient, for one form and gamma."""

    lag: float
    noise: float


def toy_errors(gammas: Sequence[float], *, exact: bool) -> list[_Errors]:
    """Measure lag and noise of the first moment on noisy least squares, along one fixed path of the parameters.

    f(x) = E (a x - b)^2 / 2 over batches of (a, b). The path is gradient descent on f, the same for every estimator, so
    that the two forms differ in their correction only. Lag is the error of the expected first moment, which follows
    from the true gradients and is the same for both forms. Noise is the standard deviation around it over 400 streams
    of batches. Both are taken at the last step, relative to the norm of the true gradient.
    """
    streams, steps, dimension, batch, rate = 400, 60, 8, 4, 0.02
    random = np.random.default_rng(0)
    solution = np.ones(dimension)
    path = [np.zeros(dimension)]
    for _ in range(steps):
        path.append(path[-1] - rate * (path[-1] - solution))  # E a a^T = 1, so the true gradient is x - solution
    features = random.standard_normal((steps + 1, streams, batch, dimension))
    labels = features @ solution + random.standard_normal((steps + 1, streams, batch))

    def gradient(step: int, point: np.ndarray) -> np.ndarray:
        """Gradient of each stream's batch of a step at a point."""
        residuals = features[step] @ point - labels[step]
        return np.einsum("sb,sbd->sd", residuals, features[step]) / batch

    found = []
    for gamma in gammas:
        k = gamma * BETA1 / (1 - BETA1)
        expected = path[0] - solution  # a warm start: no bias of zeros
        moment = np.broadcast_to(expected, (streams, dimension)).copy()
        last = gradient(0, path[0])
        for step in range(1, steps + 1):
            here = gradient(step, path[step])
            before = gradient(step, path[step - 1]) if exact else last
            moment = BETA1 * moment + (1 - BETA1) * (here + k * (here - before))
            last = here
            true = path[step] - solution
            expected = BETA1 * expected + (1 - BETA1) * (true + k * (path[step] - path[step - 1]))
        truth = path[steps] - solution
        scale = np.linalg.norm(truth)
        lag = float(np.linalg.norm(expected - truth) / scale)
        noise = float(np.sqrt(((moment - expected) ** 2).sum(axis=1).mean()) / scale)
        found.append(_Errors(lag, noise))
    return found


def draw_lag_and_noise() -> Figure:
    """Show what the correction does to lag and to noise, in both forms."""
    gammas = [0.0, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.6), layout="constrained", sharex=True)
    for exact, label, dashes, marker in ((False, "approx", "--", "o"), (True, "exact", "-", "^")):
        errors = toy_errors(gammas, exact=exact)
        style = {"color": SHADES[-1], "linestyle": dashes, "marker": marker, "markersize": 4, "label": label}
        if exact:
            left.plot(gammas, [error.lag for error in errors], **{**style, "label": "both forms"})
        right.plot(gammas, [error.noise for error in errors], **style)
    left.set_title("lag: error of\nthe expected moment", fontsize="medium")
    right.set_title("noise:\nspread around it", fontsize="medium")
    for axes in (left, right):
        axes.set(xlabel="gamma", ylabel="share of the true gradient's norm,\nlower is better", ylim=(0, None))
        axes.axvline(GAMMA, color=GREY, linewidth=0.8, linestyle=":", label=f"default, {GAMMA}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("What the correction does to the first moment: noisy least squares, beta1 0.95", fontsize="medium")
    return figure


def draw_step() -> Figure:
    """Draw one step of Mars: its five verbs, what each one reads, and what it makes."""
    verbs = [
        ("locate", "which part of a parameter\nis each tensor?", "parameters,\nflat tensors,\nDTensors", "shards"),
        ("build lists", "which tensors does one\nbackend call take?", "groups, state,\ngradients", "lists of\ntensors"),
        ("norms", "of whole corrected\ngradients, over all ranks", "g, last g", "clip factors,\nglobal scale"),
        ("orthogonalize", "Newton-Schulz\non whole matrices", "first\nmoments", "directions"),
        ("update", "one pass: correct, clip,\nmoments, parameter", "p, m, v,\ng, last g", "p, m, v,\nlast g\nin place"),
    ]
    figure, axes = plt.subplots(figsize=(6.4, 5.4), layout="constrained")
    axes.set(xlim=(0, 6.4), ylim=(5.1, -0.3))
    axes.axis("off")
    axes.set_title("One step of Mars", fontsize="large")
    for x, heading in ((0.8, "reads"), (5.6, "makes")):
        axes.text(x, -0.15, heading, color=GREY, ha="center", va="center", fontsize=11)
    for index, (verb, question, reads, makes) in enumerate(verbs):
        center = index + 0.5
        _box(axes, 3.2, center, 2.5, 0.76, SHADES[-1])
        axes.text(3.2, center - 0.22, verb, ha="center", va="center", color="white", fontsize=11, weight="bold")
        axes.text(3.2, center + 0.12, question, ha="center", va="center", color="white", fontsize=10)
        axes.text(0.8, center, reads, ha="center", va="center", fontsize=10)
        axes.text(5.6, center, makes, ha="center", va="center", fontsize=10)
        _arrow(axes, (1.45, center), (1.92, center))
        _arrow(axes, (4.48, center), (4.95, center))
        if index + 1 < len(verbs):
            _arrow(axes, (3.2, center + 0.38), (3.2, center + 0.62))
    return figure


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.06", color=color
        )
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=GREY, shrinkA=0, shrinkB=0))


FIGURES = {
    "loss_curve.png": draw_loss_curve,
    "betas.png": draw_betas,
    "controls.png": draw_controls,
    "finetuning.png": draw_finetuning,
    "finetuning_longer.png": partial(draw_longer_finetuning, "smollm2_long_kjv", "the King James Bible"),
    "finetuning_longer_headers.png": partial(draw_longer_finetuning, "smollm2_long_headers", "C++ headers"),
    "compare.png": draw_compare,
    "weights_of_past_gradients.png": draw_weights,
    "lag_and_noise.png": draw_lag_and_noise,
    "step.png": draw_step,
}

if __name__ == "__main__":
    main()
