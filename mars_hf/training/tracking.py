"""Measure along a run how well first moments with other settings would track the true gradient."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from mars_hf.groups.from_model import from_model
from mars_hf.training.guard import calling_trainer, innermost
from mars_hf.training.probe_passes import ProbePasses, split
from mars_hf.training.random_state import RandomState
from mars_hf.training.shadow_moments import Moment, ShadowMoments, Sums, grid

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class TrackingProbe(TrainerCallback):
    """Follow first moments over a grid of settings along a run of MarsTrainer, and measure how well they track.

    The run itself is not changed: weights, random state, buffers and the Trainer's attributes are those of a run
    without the probe. `in_stale_pass` is True in its passes, so a loss that logs or counts can leave them out. Each
    step's batch is split in two halves, which the moments of the grid take as their gradients; exact moments take the
    stale gradients of the same halves too. At every measured step the gradient of the whole training set is estimated
    from many micro-batches, in two independent halves as well, so that lag and noise can be told apart without bias.

    Micro-batches of a step weigh equally, and so do its halves; a step of one sample is left out. `max_grad_norm` does
    not apply: moments are those of unclipped gradients. After a resume, averages start anew.

    A step then costs two more passes over its batch (four halves; two without exact moments), a measured one `batches`
    micro-batches. Memory: five copies of the gradients, and of the grid six for each beta1 and two for each clipped
    moment; 77 copies with the defaults.

    Args:
        every: steps between measurements.
        batches: micro-batches of a measurement, an even number.
        betas: values of beta1.
        gammas: values of gamma.
        forms: `"approx"`, `"exact"`, or both.
        clips: clip thresholds; None for no clipping.
        seed: of the micro-batches that are measured on.

    Attributes:
        rows: of the last training: one dict for each measured step, moment and scope (`"all"`, a role, or a layer of
            the model), with the keys `step`, `scope`, `beta1`, `gamma`, `form`, `clip`, `error` (squared distance to
            the true gradient, over its squared norm), `lag` and `noise` (whose sum it is), `cosine`, `variance_ratio`
            (corrected gradient over gradient) and `noise_scale`, in samples. All are estimates without bias from noise,
            so lag may be below 0 and a cosine above 1. They are NaN where the norm of the true gradient drowns in its
            noise.
        beta1: of the last training: the decay rate of the first moment of matrices; None where the optimizer has none.

    Raises:
        ValueError: a setting out of range; at train begin, steps of one sample.
        RuntimeError: at train begin, another Trainer than MarsTrainer, more than one process, or training data without
            a length.

    Source: simple noise scale, equation 2.9 of arXiv 1812.06162; moments, arXiv 2411.10438.
    """

    def __init__(
        self,
        every: int = 50,
        batches: int = 64,
        betas: Iterable[float] = (0.9, 0.95, 0.99),
        gammas: Iterable[float] = (0.0, 0.0125, 0.025, 0.05, 0.1),
        forms: Sequence[str] = ("approx", "exact"),
        clips: Iterable[float | None] = (None, 1.0),
        seed: int = 0,
    ) -> None:
        """See the class."""
        if every < 1:
            raise ValueError(f"every={every!r}: give the steps between two measurements, >= 1")
        if batches < 2 or batches % 2:
            raise ValueError(f"batches={batches!r}: give an even number of micro-batches, >= 2")
        betas, gammas, clips = list(betas), list(gammas), list(clips)
        for name, values, inside, accepted in (
            ("betas", betas, lambda value: 0 <= value < 1, "in [0, 1)"),
            ("gammas", gammas, lambda value: 0 <= value < math.inf, ">= 0 and finite"),
            ("clips", clips, lambda value: value is None or 0 < value < math.inf, "> 0, or None for no clipping"),
            ("forms", list(forms), lambda value: value in ("approx", "exact"), "'approx' or 'exact'"),
        ):
            if not values or not all(map(inside, values)):
                raise ValueError(f"{name}={values!r}: give one value or more, each {accepted}")
        self.moments = grid(betas, gammas, [form == "approx" for form in forms], clips)
        self.rows: list[dict[str, Any]] = []
        self.beta1: float | None = None
        self._every, self._batches, self._seed = every, batches, seed
        self._trainer: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the Trainer, and begin with no step followed."""
        trainer: Any = calling_trainer()
        if not hasattr(trainer, "step_batches"):
            raise RuntimeError(
                f"TrackingProbe needs the batches of a step, which {type(trainer).__name__} does not offer; use "
                "mars_hf.MarsTrainer"
            )
        if args.world_size > 1:
            raise RuntimeError(f"TrackingProbe runs in one process, and there are {args.world_size}; start one")
        if args.per_device_train_batch_size * args.gradient_accumulation_steps < 2:
            raise ValueError(
                "TrackingProbe splits a step in two halves, and per_device_train_batch_size=1 without accumulation has "
                "one sample; give 2 or more, or gradient_accumulation_steps"
            )
        data = trainer.get_train_dataloader()  # with the columns that the model takes
        if not hasattr(data.dataset, "__len__"):
            raise RuntimeError("TrackingProbe draws from the training data, which has no length; give one that has")
        self._trainer = trainer
        self.rows = []
        named = [(name, param) for name, param in trainer.model.named_parameters() if param.requires_grad]
        self._params = [param for _, param in named]
        self._scopes = _scopes(trainer.model, [name for name, _ in named])
        self._shadow = ShadowMoments(self.moments)
        self._previous: list[Tensor] = []
        self._passes = ProbePasses(trainer, self._params, data, self._seed)
        self.beta1 = _beta1(kwargs.get("optimizer"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the moments the gradients of the step to come; measure them if one is due."""
        start = RandomState.capture(args.device)
        with self._trainer.aside():
            if (step := split(self._trainer.step_batches)) is not None:
                gradients, stale = self._passes.of_halves(step.halves, self._previous)
                self._shadow.update(gradients, stale, step.samples)
            if self._shadow.needs_stale:
                self._previous = [param.detach().clone() for param in self._params]
            if (state.global_step + 1) % self._every == 0 and self._shadow.steps:
                self._measure(state.global_step + 1)
        start.restore()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drop what was followed; the rows stay."""
        del self._shadow, self._params, self._previous, self._passes, self._trainer

    def _measure(self, step: int) -> None:
        truth = self._passes.of_draws(self._batches // 2)
        variances = self._shadow.mean_sample_variance
        for moment, sums in self._shadow.measure(truth).items():
            for scope, members in self._scopes.items():
                total = sum((sums[index] for index in members), Sums())
                trace = sum(variances[index] for index in members)
                self.rows.append(
                    {
                        "step": step,
                        "scope": scope,
                        "beta1": moment.beta1,
                        "gamma": moment.gamma,
                        "form": "approx" if moment.is_approx else "exact",
                        "clip": moment.clip_threshold,
                        **total.tracking,
                        "noise_scale": trace / total.gradient if total.gradient > 0 else math.nan,
                    }
                )
        self._shadow.restart_window()

    def means(self, scope: str = "all") -> dict[Moment, dict[str, float]]:
        """Return each moment's measurements, the medians over the measured steps; NaN if no step gave a number.

        Args:
            scope: `"all"`, a role, or a layer.

        Raises:
            ValueError: nothing was measured there; the message names the scopes.
        """
        found: dict[Moment, list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["scope"] == scope:
                moment = Moment(row["beta1"], row["gamma"], row["form"] == "approx", row["clip"])
                found.setdefault(moment, []).append(row)
        if not found:
            known = sorted({row["scope"] for row in self.rows}) or "none: no step was measured"
            raise ValueError(f"scope={scope!r} was not measured; there are {known}")
        names = ("error", "lag", "noise", "cosine", "variance_ratio", "noise_scale")
        return {moment: {name: median(row[name] for row in own) for name in names} for moment, own in found.items()}

    def table(self, scope: str = "all") -> str:
        """Return the medians over the measured steps as a Markdown table, one line a moment, and the noise scale.

        Args:
            scope: `"all"`, a role, or a layer.

        Raises:
            ValueError: see `means`.
        """
        lines = [
            "| first moment | error | lag | noise | cosine | Var(c) / Var(g) |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        means = self.means(scope)
        for moment, own in means.items():
            cells = [f"{own[name]:.4g}" for name in ("error", "lag", "noise", "cosine", "variance_ratio")]
            lines.append(f"| {moment} | {' | '.join(cells)} |")
        errors = {row["step"]: row["error"] for row in self.rows if row["scope"] == scope}
        clear = sum(map(math.isfinite, errors.values()))
        lines += ["", f"Simple noise scale: {next(iter(means.values()))['noise_scale']:,.0f} samples."]
        if clear < len(errors):
            lines[-1] += f" At {len(errors) - clear} of {len(errors)} steps the gradient drowned in its noise."
        return "\n".join(lines)

    def conclusion(self, beta1: float | None = None) -> str:
        """Return one line: what would have tracked best here, among the moments without clipping if there are any.

        Args:
            beta1: what the run trained with, whose moments are compared; None compares all.
        """
        if not self.rows:
            return f"no step was measured: the run ended before step {self._every}"
        clip = shown_clip(self.rows)
        compared = {
            moment: own["error"]
            for moment, own in self.means().items()
            if moment.clip_threshold == clip and (beta1 is None or moment.beta1 == beta1)
        }
        if not compared:
            return f"no moment at beta1 {beta1} was followed"
        means = {moment: error for moment, error in compared.items() if math.isfinite(error)}
        if not means:
            return f"the gradient drowned in its noise: measure with more than {self._batches} micro-batches"
        best = min(means, key=means.__getitem__)
        rivals = (
            [moment for moment in means if moment.gamma and moment.is_approx],
            [moment for moment in means if moment.gamma and not moment.is_approx],
            [moment for moment in means if not moment.gamma],
        )
        nearest = [min(kind, key=means.__getitem__) for kind in rivals if kind and best not in kind]
        named = [f"{moment} {means[moment]:.3g}" for moment in nearest]
        others = f" ({'; '.join(named)})" if named else ""
        return f"{best} would have tracked the gradient best here: error {means[best]:.3g}{others}"


def shown_clip(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the clip threshold of the moments that stand for all: None, or else the largest."""
    clips = {row["clip"] for row in rows}
    return None if None in clips else max(clips)


def median(values: Iterable[float]) -> float:
    """Return the median of the finite values; NaN without any."""
    return statistics.median([value for value in values if math.isfinite(value)] or [math.nan])


def _beta1(optimizer: Any) -> float | None:
    """Return the decay rate of the first moment of the matrices, or else of the largest group."""
    groups = innermost(optimizer).param_groups
    matrices = [group for group in groups if group.get("role") == "matrix"] or groups
    group = max(matrices, key=lambda group: sum(param.numel() for param in group["params"]))
    return group["betas"][0] if "betas" in group else group.get("momentum")


def _scopes(model: nn.Module, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the parameters of the whole model, of each role and of each layer, by index."""
    roles = {name: group["role"] for group in from_model(model, mars_type="mars-m") for name, _ in group["params"]}
    scopes: dict[str, list[int]] = {"all": list(range(len(names)))}
    for index, name in enumerate(names):
        scopes.setdefault(roles[name], []).append(index)
    for index, name in enumerate(names):
        if (found := _LAYER.search(name)) is not None:
            scopes.setdefault(f"layer {found[1]}", []).append(index)
    return scopes
