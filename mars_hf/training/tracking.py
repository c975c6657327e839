"""Measure along a run how well first moments with other settings would track the true gradient."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from mars_hf.groups.from_model import from_model
from mars_hf.training.guard import calling_trainer
from mars_hf.training.random_state import RandomState
from mars_hf.training.shadow_moments import Halves, Moment, ShadowMoments, Sums, grid
from mars_hf.training.snapshots import buffers_kept, copied

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class TrackingProbe(TrainerCallback):
    """Follow first moments over a grid of settings along a run of MarsTrainer, and measure how well they track.

    The run itself is not changed: weights, random state and buffers are those of a run without the probe. Each step's
    batch is split in two halves, which the moments of the grid take as their gradients; exact moments take the stale
    gradients of the same halves too. At every measured step the gradient of the whole training set is estimated from
    many micro-batches, in two independent halves as well, so that lag and noise can be told apart without bias.

    Micro-batches of a step weigh equally, and `max_grad_norm` does not apply: moments are those of unclipped gradients.
    After a resume, averages start anew.

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
            (corrected gradient over gradient) and `noise_scale`, in samples. Numbers are NaN where the norm of the true
            gradient drowns in its noise.

    Raises:
        ValueError: a setting out of range; in training, a step of one sample.
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
        for name, values, inside in (
            ("betas", betas, lambda value: 0 <= value < 1),
            ("gammas", gammas, lambda value: value >= 0),
            ("clips", clips, lambda value: value is None or value > 0),
            ("forms", list(forms), lambda value: value in ("approx", "exact")),
        ):
            if not values or not all(map(inside, values)):
                raise ValueError(f"{name}={values!r}: give one value or more, each in its range")
        self.moments = grid(betas, gammas, [form == "approx" for form in forms], clips)
        self.rows: list[dict[str, Any]] = []
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
        self._draws = self._micro_batches(args, data.dataset, data.collate_fn)
        self._samples = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the moments the gradients of the step to come; measure them if one is due."""
        trainer = self._trainer
        start = RandomState.capture(args.device)
        with buffers_kept(trainer.model):
            halves = self._halves()
            states = []
            gradients = []
            for half in halves:
                states.append(RandomState.capture(args.device))
                gradients.append(self._gradient(half))
            stale = self._stale(halves, states) if self._previous else None
            self._shadow.update((gradients[0], gradients[1]), stale)
            if self._shadow.needs_stale:
                self._previous = [param.detach().clone() for param in self._params]
            if (state.global_step + 1) % self._every == 0:
                self._measure(state.global_step + 1)
        start.restore()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drop what was followed; the rows stay."""
        del self._shadow, self._params, self._previous, self._draws, self._trainer

    def _halves(self) -> list[list[dict[str, Any]]]:
        """Return two halves of the step's samples, as lists of micro-batches."""
        trainer = self._trainer
        batches = [send_to_device(copied(inputs), trainer.args.device) for inputs in trainer.step_batches]
        sizes = [_samples(inputs) for inputs in batches]
        self._samples = sum(sizes)
        if all(size % 2 == 0 for size in sizes):
            return [[_part(inputs, half) for inputs in batches] for half in (0, 1)]
        if len(batches) % 2 == 0 and len(set(sizes)) == 1:
            return [batches[0::2], batches[1::2]]
        raise ValueError(
            f"TrackingProbe splits a step in two halves, and this one has micro-batches of {sizes} samples; take an "
            "even batch size, or an even number of accumulation steps"
        )

    def _gradient(self, batches: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Return the mean gradient of micro-batches; `p.grad` and the hooks on it are left alone."""
        trainer = self._trainer
        trainer.model.train()
        total = [torch.zeros_like(param, dtype=torch.float32) for param in self._params]
        for inputs in batches:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, inputs)
            found = torch.autograd.grad(loss, self._params, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, [gradient.float() for gradient in found], alpha=1 / len(batches))
        return total

    def _stale(self, halves: Sequence[Sequence[dict[str, Any]]], states: Sequence[RandomState]) -> Halves:
        """Return the halves' gradients at the parameters of the step before, with the same dropout masks."""
        here = [param.detach().clone() for param in self._params]
        found = []
        try:
            self._put(self._previous)
            for half, state in zip(halves, states, strict=True):
                state.restore()
                found.append(self._gradient(half))
        finally:
            self._put(here)
        return found[0], found[1]

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)

    def _micro_batches(self, args: TrainingArguments, dataset: Any, collate: Any) -> Iterator[dict[str, Any]]:
        """Yield micro-batches of the training data, shuffled anew whenever all were drawn."""
        loader = DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size,
            shuffle=True,
            drop_last=len(dataset) >= args.per_device_train_batch_size,
            generator=torch.Generator().manual_seed(self._seed),
            collate_fn=collate,
        )
        for _ in itertools.count():
            for inputs in loader:
                yield send_to_device(inputs, args.device)

    def _measure(self, step: int) -> None:
        half = self._batches // 2
        truth = (
            self._gradient(list(itertools.islice(self._draws, half))),
            self._gradient(list(itertools.islice(self._draws, half))),
        )
        variances = self._shadow.mean_gradient_variance
        for moment, sums in self._shadow.measure(truth).items():
            for scope, members in self._scopes.items():
                total = sum((sums[index] for index in members), Sums())
                trace = self._samples * sum(variances[index] for index in members)
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


def _samples(inputs: dict[str, Any]) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim)


def _part(inputs: dict[str, Any], half: int) -> dict[str, Any]:
    """Return the first or the second half of a micro-batch's samples."""
    size = _samples(inputs)
    cut = slice(0, size // 2) if half == 0 else slice(size // 2, size)
    return {
        name: value[cut] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for name, value in inputs.items()
    }
