"""Follow first moments of a grid of settings along a run, and measure how well they track the true gradient.

Each step's batch is split in two halves, whose gradients the moments average. At every measured step the gradient G of
the whole training set is estimated from two sets of micro-batches. Products of independent halves have no bias from
noise: they tell lag (squared distance of the moment's expectation from G) and noise (the moment's variance) apart.
Estimates of lag may be below 0, and cosines above 1. Clipped halves share one factor, which couples them: of clipped
moments only the error, lag and noise together, has no bias.

Sources: corrected gradient, equation (5) and clipping of Algorithm 2 of arXiv 2411.10438; simple noise scale, equation
2.9 of arXiv 1812.06162.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import mars_hf

Batch = dict[str, Tensor]
Row = dict[str, Any]

_MEASURED = ("error", "lag", "noise", "cosine", "variance_ratio", "noise_scale")


class Moment(NamedTuple):
    """Settings of one first moment; `form` is "approx" or "exact", and `clip` None for no clipping."""

    beta1: float
    gamma: float
    form: str
    clip: float | None

    @property
    def weight(self) -> float:
        """Return the correction coefficient, gamma beta1 / (1 - beta1)."""
        return self.gamma * self.beta1 / (1 - self.beta1)

    def __str__(self) -> str:
        form = f" {self.form}" if self.gamma else ""
        clip = "" if self.clip is None else f" clip {self.clip:g}"
        return f"beta1 {self.beta1:g} gamma {self.gamma:g}{form}{clip}"


def grid(betas: Iterable[float], gammas: Iterable[float], clips: Iterable[float]) -> list[Moment]:
    """Return all combinations in both forms, also without clipping; without a correction both forms are one."""
    moments = itertools.product(betas, [None, *filter(None, clips)], gammas, ("approx", "exact"))
    return list(
        dict.fromkeys(Moment(beta1, gamma, form if gamma else "approx", clip) for beta1, clip, gamma, form in moments)
    )


class ShadowMoments:
    """First moments along the gradients of a run, bias-corrected as AdamW's are: m / (1 - beta1^t).

    Gradients are flat, both halves of a batch in one tensor of shape [2, elements].

    Args:
        moments: the settings to follow.
        sizes: elements of each parameter.
    """

    def __init__(self, moments: Sequence[Moment], sizes: Sequence[int]) -> None:
        """Follow no gradient yet."""
        self.moments, self.steps = moments, 0
        self._sizes = list(sizes)
        self._last: Tensor | None = None
        self._averages: dict[Moment, Tensor] = {}
        self._restart_variances()

    def update(self, gradients: Tensor, stale: Tensor | None, samples: float) -> None:
        """Take a step's gradients.

        Args:
            gradients: of both halves.
            stale: the same at the parameters of the step before; None at the first step.
            samples: number of samples in both halves.
        """
        # MARS's first step has a last gradient of zero; here it has no correction, which the average forgets sooner.
        before = {"approx": self._last, "exact": stale}
        corrections = {form: gradients - (gradients if old is None else old) for form, old in before.items()}
        self._last = gradients
        self.steps += 1
        self._window += 1

        variance = self._variance(gradients)
        self._gradient_variance += variance
        self._sample_variance += variance * samples
        for moment in self.moments:
            corrected = gradients + moment.weight * corrections[moment.form]
            if moment.clip is not None:
                for piece in corrected.split(self._sizes, dim=1):
                    # The whole batch decides, as in a step: a half has a larger norm.
                    piece.div_((torch.linalg.vector_norm(piece.mean(0)) / moment.clip).clamp(min=1))
            self._corrected_variance[moment] += self._variance(corrected)
            average = self._averages.setdefault(moment, torch.zeros_like(gradients))
            average.lerp_(corrected, 1 - moment.beta1)

    def measure(self, truth: Tensor, scopes: Mapping[str, Sequence[int]]) -> Iterator[Row]:
        """Yield a row for each moment and scope, and begin new means of the variances.

        Args:
            truth: two independent estimates of G, flat, in one tensor of shape [2, elements].
            scopes: parameters by index.
        """
        mean_truth = truth.mean(0)
        shared = {
            "gradient": self._dot(truth[0], truth[1]),
            "gradient_variance": self._gradient_variance,
            "sample_variance": self._sample_variance / self._window,
        }
        for moment in self.moments:
            halves = self.value(moment)
            mean, error = halves.mean(0), halves - truth
            per_param = {
                **shared,
                "lag": self._dot(error[0], error[1]),
                "noise": self._variance(halves),
                "along": self._dot(mean, mean_truth),
                "moment": self._dot(mean, mean),
                "corrected_variance": self._corrected_variance[moment],
            }
            for scope, members in scopes.items():
                sums = {name: float(values[list(members)].sum()) for name, values in per_param.items()}
                yield {"scope": scope, **moment._asdict(), **_ratios(sums)}
        self._restart_variances()

    def value(self, moment: Moment) -> Tensor:
        """Return a moment of both halves, flat."""
        return self._averages[moment] / (1 - moment.beta1**self.steps)

    def _restart_variances(self) -> None:
        self._window = 0
        self._gradient_variance, self._sample_variance = torch.zeros(2, len(self._sizes), dtype=torch.float64)
        self._corrected_variance = {moment: self._gradient_variance.clone() for moment in self.moments}

    def _variance(self, halves: Tensor) -> Tensor:
        """Return the variance of the mean of two independent halves, summed over each parameter's elements."""
        difference = halves[0] - halves[1]
        return self._dot(difference, difference) / 4

    def _dot(self, one: Tensor, two: Tensor) -> Tensor:
        """Return the inner product of each parameter's elements, in float64."""
        return torch.stack([piece.sum(dtype=torch.float64) for piece in (one * two).split(self._sizes)]).cpu()


def _ratios(sums: Mapping[str, float]) -> dict[str, float]:
    """Return what is measured of a scope: NaN where the squared norm of G drowns in its noise."""
    norm = sums["gradient"] if sums["gradient"] > 0 else math.nan
    lengths = math.sqrt(sums["moment"] * norm) if sums["moment"] > 0 else math.nan
    variance = sums["gradient_variance"] or math.nan
    return {
        "error": (sums["lag"] + sums["noise"]) / norm,
        "lag": sums["lag"] / norm,
        "noise": sums["noise"] / norm,
        "cosine": sums["along"] / lengths,
        "variance_ratio": sums["corrected_variance"] / variance,
        "noise_scale": sums["sample_variance"] / norm,
    }


class TrackingProbe(TrainerCallback):
    """Measure moments along the run of a Trainer, which it does not change.

    A step costs two more passes over its batch, a measured one `batches` micro-batches. Moments are those of unclipped
    gradients. A step of a single sample, which has no halves, is left out, and so is the last sample of an odd number.

    Args:
        trainer: the PretrainingTrainer, before training.
        moments: the settings to follow.
        every: steps between measurements.
        batches: micro-batches of a measurement, an even number.

    `rows` has a dict for each measured step, moment and scope: `"all"`, or a role.
    """

    def __init__(self, trainer: Any, moments: Sequence[Moment], every: int, batches: int) -> None:
        """Measure nothing yet."""
        self.rows: list[Row] = []
        self._trainer = trainer
        self._every, self._batches = every, batches
        named = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
        self._params = list(named.values())
        self._scopes = _scopes(trainer.model, list(named))
        self._moments = ShadowMoments(moments, [param.numel() for param in self._params])
        self._previous: list[Tensor] = []
        self._draws = _micro_batches(trainer)

    @property
    def beta1(self) -> float:
        """Return the run's beta1 of matrices."""
        groups = (group for group in self._trainer.optimizer.param_groups if group["role"] == "matrix")
        return next(float(group["betas"][0] if "betas" in group else group["momentum"]) for group in groups)

    @torch.no_grad()
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the moments the gradients of the step to come; measure them if one is due."""
        step = state.global_step + 1
        with _random_state_kept(args.device):
            halves = split(self._trainer.step_batches, args.per_device_train_batch_size)
            if halves[0]:
                stale = self._stale(halves) if self._previous else None  # first: both draw the same dropout masks
                self._moments.update(
                    self._gradients(halves), stale, 2 * sum(len(batch["labels"]) for batch in halves[0])
                )
            self._previous = [param.clone() for param in self._params]
            if step % self._every == 0 and self._moments.steps:
                truth = self._gradients([list(itertools.islice(self._draws, self._batches // 2)) for _ in range(2)])
                self.rows += [{"step": step, **row} for row in self._moments.measure(truth, self._scopes)]

    def _stale(self, halves: Sequence[Sequence[Batch]]) -> Tensor:
        """Return the gradients at the parameters of the step before."""
        current = [param.clone() for param in self._params]
        torch._foreach_copy_(self._params, self._previous)
        try:
            with _random_state_kept(self._trainer.args.device):
                return self._gradients(halves)
        finally:
            torch._foreach_copy_(self._params, current)

    def _gradients(self, halves: Sequence[Sequence[Batch]]) -> Tensor:
        """Return the mean gradient over the samples of each half, flat and in float32; `p.grad` stays."""
        trainer = self._trainer
        trainer.model.train()
        total = torch.zeros(len(halves), sum(param.numel() for param in self._params), device=trainer.args.device)
        for row, batches in zip(total, halves, strict=True):
            samples = sum(len(batch["labels"]) for batch in batches)
            for batch in batches:
                with torch.enable_grad(), trainer.compute_loss_context_manager():
                    loss = trainer.compute_loss(trainer.model, send_to_device(batch, trainer.args.device))
                gradients = torch.autograd.grad(loss, self._params, allow_unused=True, materialize_grads=True)
                flat = torch.cat([gradient.flatten().float() for gradient in gradients])
                row.add_(flat, alpha=len(batch["labels"]) / samples)
        return total


def split(batches: Sequence[Batch], size: int) -> list[list[Batch]]:
    """Return the halves of a step's samples, in batches of at most `size`."""
    step = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    half = len(step["labels"]) // 2
    places = [[slice(at, min(at + size, end)) for at in range(end - half, end, size)] for end in (half, 2 * half)]
    return [[{key: value[place] for key, value in step.items()} for place in part] for part in places]


def _micro_batches(trainer: Any) -> Iterator[Batch]:
    """Yield micro-batches of the training data, shuffled anew whenever all were drawn."""
    loader = DataLoader(
        trainer.train_dataset,
        batch_size=trainer.args.per_device_train_batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        collate_fn=trainer.data_collator,
    )
    while True:
        yield from loader


def _random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _scopes(model: nn.Module, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the parameters of the whole model and of each of mars-m's roles, by index."""
    scopes: dict[str, list[int]] = {"all": list(range(len(names)))}
    for group in mars_hf.create(model, lr=1.0, mars_type="mars-m").param_groups:
        role = group["role"].replace("adamw", "embedding")
        scopes.setdefault(role, []).extend(map(names.index, group["param_names"]))
    return scopes


def medians(rows: Iterable[Row], scope: str = "all") -> dict[Moment, dict[str, float]]:
    """Return each moment's medians over the measured steps; NaN if no step gave a number."""
    measured: dict[Moment, list[Row]] = {}
    for row in rows:
        if row["scope"] == scope:
            measured.setdefault(Moment(*(row[name] for name in Moment._fields)), []).append(row)
    return {
        moment: {
            name: statistics.median([row[name] for row in steps if math.isfinite(row[name])] or [math.nan])
            for name in _MEASURED
        }
        for moment, steps in measured.items()
    }


def table(rows: Sequence[Row], scope: str = "all") -> str:
    """Return the medians as a Markdown table, one line a moment, and the noise scale."""
    values = medians(rows, scope)
    lines = [
        "| {} | {error:.4g} | {lag:.4g}, {noise:.4g} | {cosine:.4g} | {variance_ratio:.4g} |".format(moment, **numbers)
        for moment, numbers in values.items()
    ]
    scale = f"Simple noise scale: {next(iter(values.values()))['noise_scale']:,.0f} samples."
    if drowned := len({row["step"] for row in rows if row["scope"] == scope and math.isnan(row["error"])}):
        scale += f" At {drowned} of the measured steps the gradient drowned in its noise."
    titles = "| first moment | error | lag, noise | cosine | Var(c) / Var(g) |"
    return "\n".join([titles, f"| --- |{' ---: |' * 4}", *lines, "", scale])


def conclusion(rows: Sequence[Row], beta1: float) -> str:
    """Return one line: which of the moments without clipping would have tracked best.

    Args:
        rows: of a TrackingProbe.
        beta1: what the run trained with; only its moments are compared, if it is in the grid.
    """
    measured = medians([row for row in rows if row["clip"] is None and math.isfinite(row["error"])])
    errors = {moment: numbers["error"] for moment, numbers in measured.items()}
    errors = {moment: error for moment, error in errors.items() if moment.beta1 == beta1} or errors
    if not errors:
        return "the gradient drowned in its noise: measure with more --batches"
    best: dict[str, Moment] = {}  # of each form, and of those without a correction
    for moment in sorted(errors, key=errors.__getitem__):
        best.setdefault(moment.form if moment.gamma else "none", moment)
    winner, *others = best.values()
    rivals = "; ".join(f"{moment} {errors[moment]:.3g}" for moment in others)
    line = f"{winner} would have tracked the gradient best here: error {errors[winner]:.3g}"
    return f"{line} ({rivals})" if rivals else line
