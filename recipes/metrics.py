"""Give Trainer the metrics of the fine-tuning recipes: metrics of `evaluate` that need no network.

    trainer = Trainer(model, args, ..., **metrics.classification())
    trainer = SFTTrainer(model, args=args, ..., **metrics.language_modeling())

`evaluate.load("accuracy")` needs the Hub; `metrics.Accuracy()` does not. Each has the interface of `evaluate.Metric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch.nn import functional


class _Metric(evaluate.Metric):
    """A metric whose inputs are the columns of `dtypes`."""

    dtypes: ClassVar[dict[str, str]] = {"predictions": "int64", "references": "int64"}

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value(dtype) for name, dtype in self.dtypes.items()})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)


class Accuracy(_Metric):
    """Share of predictions that equal their reference."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}


class MacroF1(_Metric):
    """F1 of each class, averaged over the classes among predictions and references."""

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"macro_f1": float(f1_score(references, predictions, average="macro"))}


class Perplexity(_Metric):
    """Exponential of the mean loss per predicted token, of at most e^700."""

    dtypes: ClassVar[dict[str, str]] = {"losses": "float64"}

    def _compute(self, losses: Sequence[float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(float(np.mean(losses)), 700.0))}


def classification() -> dict[str, Any]:
    """Return Trainer's arguments for a classifier, with accuracy and macro F1; also for `batch_eval_metrics=True`."""
    return {
        "compute_metrics": _compute(
            [Accuracy(), MacroF1()],
            lambda prediction: {"predictions": prediction.predictions, "references": prediction.label_ids},
        ),
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }


def language_modeling() -> dict[str, Any]:
    """Return Trainer's arguments for a causal language model, with accuracy of tokens and perplexity.

    Both are means over predicted tokens: those whose label is not -100, without the first of each sequence. Two numbers
    per token are kept, never the logits. Also for `batch_eval_metrics=True`.
    """

    def predict(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1].float()  # a cache may follow
        losses = functional.cross_entropy(scores.transpose(1, 2), labels[:, 1:], reduction="none")
        return scores.argmax(-1), losses

    def columns(prediction: Any) -> dict[str, Any]:
        (tokens, losses), labels = prediction.predictions, prediction.label_ids[:, 1:]
        counts = labels != -100
        return {"predictions": tokens[counts], "references": labels[counts], "losses": losses[counts]}

    return {"compute_metrics": _compute([Accuracy(), Perplexity()], columns), "preprocess_logits_for_metrics": predict}


def _compute(metrics: list[_Metric], columns: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    combined = evaluate.combine(metrics)

    def compute_metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        combined.add_batch(**columns(prediction))
        return combined.compute() if compute_result else {}

    return compute_metrics
