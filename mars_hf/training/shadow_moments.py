"""Follow first moments that no optimizer steps by, and measure how well they track the true gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Gradients = Sequence[Tensor]
Halves = tuple[Gradients, Gradients]


class Moment(NamedTuple):
    """Settings of one first moment.

    Attributes:
        beta1: decay rate, below 1.
        gamma: scale of the correction; 0 for none.
        is_approx: whether the correction takes the gradient of the step before, or the stale gradient.
        clip_threshold: largest norm of a corrected gradient, per parameter; None for no clipping.
    """

    beta1: float
    gamma: float
    is_approx: bool
    clip_threshold: float | None

    @property
    def weight(self) -> float:
        """Return the weight of the correction, gamma beta1 / (1 - beta1)."""
        return self.gamma * self.beta1 / (1 - self.beta1)

    def __str__(self) -> str:
        """Return the settings in words."""
        form = "" if not self.gamma else " approx" if self.is_approx else " exact"
        clip = "" if self.clip_threshold is None else f" clip {self.clip_threshold:g}"
        return f"beta1 {self.beta1:g} gamma {self.gamma:g}{form}{clip}"


def grid(
    betas: Iterable[float], gammas: Iterable[float], forms: Iterable[bool], clips: Iterable[float | None]
) -> list[Moment]:
    """Return all combinations, each once; without a correction both forms are one.

    Args:
        betas: values of beta1.
        gammas: values of gamma.
        forms: True for approx, False for exact.
        clips: clip thresholds, None for no clipping.
    """
    forms, clips, gammas = list(forms), list(clips), list(gammas)
    found = [
        Moment(beta1, gamma, is_approx, clip)
        for beta1 in betas
        for clip in clips
        for gamma in gammas
        for is_approx in (forms if gamma else forms[:1])
    ]
    return list(dict.fromkeys(found))


@dataclass
class Sums:
    """Squared norms and inner products of one first moment, over some parameters.

    The batch of a step is split in two independent halves, and so is the estimate of the true gradient G. Products of
    independent halves have no bias from their noise.

    Attributes:
        lag: squared distance of the moment's expectation from G.
        noise: variance of the moment, summed over elements.
        along: inner product of the moment and G.
        moment: squared norm of the moment.
        gradient: squared norm of G.
        corrected_variance: variance of the corrected gradient, of the steps since the measurement before.
        gradient_variance: variance of the gradient, of the same steps.
    """

    lag: float = 0.0
    noise: float = 0.0
    along: float = 0.0
    moment: float = 0.0
    gradient: float = 0.0
    corrected_variance: float = 0.0
    gradient_variance: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over both sets of parameters."""
        return Sums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def tracking(self) -> dict[str, float]:
        """Return the error and its parts relative to the squared norm of G, the cosine, and the ratio of variances."""
        norm = self.gradient if self.gradient > 0 else math.nan
        across = math.sqrt(self.moment * norm) if self.moment > 0 and norm > 0 else math.nan
        return {
            "error": (self.lag + self.noise) / norm,
            "lag": self.lag / norm,
            "noise": self.noise / norm,
            "cosine": self.along / across,
            "variance_ratio": self.corrected_variance / self.gradient_variance if self.gradient_variance else math.nan,
        }


class ShadowMoments:
    """First moments of a grid of settings, along the gradients of somebody else's run.

    A moment without clipping is linear in gamma: m = e + k d, e being the average of the gradients and d that of their
    corrections. So all gammas of one beta1 and form share three buffers; each clipped moment has two of its own.
    Moments are bias-corrected, m / (1 - beta1^t), as AdamW's are.

    Args:
        moments: the settings to follow.

    Source: the corrected gradient is equation (5) of arXiv 2411.10438 with the clipping of its Algorithm 2.
    """

    def __init__(self, moments: Sequence[Moment]) -> None:
        """Follow no gradient yet."""
        self.moments = list(dict.fromkeys(moments))  # one twice would take every gradient twice
        self.steps = 0
        self._last: list[list[Tensor]] = []
        # (beta1, source) -> buffers of both halves; the source is what is averaged.
        self._linear: dict[tuple[float, str], list[list[Tensor]]] = {}
        self._clipped: dict[Moment, list[list[Tensor]]] = {}
        self._gradient_variance: list[float] = []
        self._sample_variance: list[float] = []
        self._corrected_variance: dict[Moment, list[float]] = {}

    @property
    def needs_stale(self) -> bool:
        """Return whether a step needs stale gradients, from the second one on."""
        return any(moment.gamma and not moment.is_approx for moment in self.moments)

    @property
    def mean_sample_variance(self) -> list[float]:
        """Return, per parameter, the variance of one sample's gradient, averaged since the last `restart_window`."""
        return [value / max(1, self._window) for value in self._sample_variance]

    @torch.no_grad()
    def update(self, gradients: Halves, stale: Halves | None = None, samples: float = 1.0) -> None:
        """Take a step's gradients.

        Args:
            gradients: of the two halves of the batch, each a mean over its samples; one tensor per parameter.
            stale: the same at the parameters of the step before; None at the first step, or where no moment needs them.
            samples: of the whole batch, whose gradient is the mean of its halves'.

        Raises:
            ValueError: stale gradients are missing.
        """
        if self.steps and stale is None and self.needs_stale:
            raise ValueError("exact moments need the stale gradients of every step after the first")
        if not self.steps:
            self.restart_window(len(gradients[0]))
        nothing = [[torch.zeros_like(g) for g in half] for half in gradients]
        # MARS's first step has a last gradient of zero; here it has no correction, which the average forgets sooner.
        approx = [
            [g - last for g, last in zip(*pair, strict=True)] for pair in zip(gradients, self._last, strict=False)
        ]
        exact = [[g - old for g, old in zip(*pair, strict=True)] for pair in zip(gradients, stale or (), strict=False)]
        corrections = {"approx": approx or nothing, "exact": exact or nothing}
        self._last = [[g.clone() for g in half] for half in gradients]
        self.steps += 1
        self._window += 1
        sources = {"gradient": gradients, **corrections}
        for beta1, source in {
            (moment.beta1, source)
            for moment in self.moments
            if moment.clip_threshold is None
            for source in ("gradient", _form(moment))
        }:
            if (beta1, source) not in self._linear:
                self._linear[beta1, source] = [[torch.zeros_like(g) for g in half] for half in gradients]
            for half, buffers in zip(sources[source], self._linear[beta1, source], strict=True):
                torch._foreach_lerp_(buffers, list(half), 1 - beta1)
        for index in range(len(gradients[0])):
            self._take_variances(index, gradients, corrections, samples)
        for moment in self.moments:
            if moment.clip_threshold is not None:
                self._take_clipped(moment, gradients, corrections[_form(moment)])

    def _take_variances(
        self, index: int, gradients: Halves, corrections: Mapping[str, Sequence[Gradients]], samples: float
    ) -> None:
        """Add a parameter's variances: of its gradient, and of corrected gradients that are not clipped."""
        apart = gradients[0][index] - gradients[1][index]
        own = _square(apart) / 4
        self._gradient_variance[index] += own
        self._sample_variance[index] += own * samples
        linear = [moment for moment in self.moments if moment.clip_threshold is None]
        for form in {_form(moment) for moment in linear if moment.gamma}:
            moved = corrections[form][0][index] - corrections[form][1][index]
            both, square = _dot(apart, moved) / 2, _square(moved) / 4
            for moment in linear:
                if moment.gamma and _form(moment) == form:
                    weight = moment.weight
                    self._corrected_variance[moment][index] += own + weight * both + weight**2 * square
        for moment in linear:
            if not moment.gamma:
                self._corrected_variance[moment][index] += own

    def _take_clipped(self, moment: Moment, gradients: Halves, corrections: Sequence[Gradients]) -> None:
        """Add clipped corrected gradients to their average and variance."""
        if moment not in self._clipped:
            self._clipped[moment] = [[torch.zeros_like(g) for g in half] for half in gradients]
        for index in range(len(gradients[0])):
            one, two = (gradients[half][index] + moment.weight * corrections[half][index] for half in (0, 1))
            # The whole batch decides, as in a step: a half has a larger norm.
            norm = torch.linalg.vector_norm((one + two) / 2)
            factor = 1 / (norm / moment.clip_threshold).clamp(min=1)
            for half, buffers in zip((one, two), self._clipped[moment], strict=True):
                buffers[index].lerp_(half.mul_(factor), 1 - moment.beta1)
            self._corrected_variance[moment][index] += _square(one - two) / 4

    def restart_window(self, parameters: int | None = None) -> None:
        """Begin a new average of the variances."""
        count = len(self._gradient_variance) if parameters is None else parameters
        self._window = 0
        self._gradient_variance, self._sample_variance = [0.0] * count, [0.0] * count
        self._corrected_variance = {moment: [0.0] * count for moment in self.moments}

    @torch.no_grad()
    def measure(self, truth: Halves) -> dict[Moment, list[Sums]]:
        """Return each moment's sums, one per parameter.

        Args:
            truth: two independent estimates of the gradient of the whole loss at the current parameters.

        Raises:
            RuntimeError: there has been no step.
        """
        if not self.steps:
            raise RuntimeError("no step has been followed yet")
        return {moment: self._measured(moment, truth) for moment in self.moments}

    def _measured(self, moment: Moment, truth: Halves) -> list[Sums]:
        found = []
        for index, (first, second) in enumerate(zip(*truth, strict=True)):
            one, two = (self._moment(moment, half, index) for half in (0, 1))
            whole, mean = (one + two) / 2, (first + second) / 2
            found.append(
                Sums(
                    lag=_dot(one - first, two - second),
                    noise=_square(one - two) / 4,
                    along=_dot(whole, mean),
                    moment=_square(whole),
                    gradient=_dot(first, second),
                    corrected_variance=self._corrected_variance[moment][index],
                    gradient_variance=self._gradient_variance[index],
                )
            )
        return found

    def _moment(self, moment: Moment, half: int, index: int) -> Tensor:
        debias = 1 / (1 - moment.beta1**self.steps)
        if moment.clip_threshold is not None:
            return self._clipped[moment][half][index] * debias
        average = self._linear[moment.beta1, "gradient"][half][index]
        correction = self._linear[moment.beta1, _form(moment)][half][index]
        return (average + moment.weight * correction) * debias


def _form(moment: Moment) -> str:
    return "approx" if moment.is_approx else "exact"


def _dot(one: Tensor, two: Tensor) -> float:
    """Return an inner product, summed in float64."""
    return float((one * two).sum(dtype=torch.float64))


def _square(tensor: Tensor) -> float:
    """Return a squared norm, summed in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
