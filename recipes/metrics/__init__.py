"""Give Trainer the metrics of the fine-tuning recipes: modules of `evaluate` in this folder, which need no network.

    trainer = Trainer(model, args, ..., **metrics.classification())
    trainer = SFTTrainer(model, args=args, ..., **metrics.language_modeling())

Names such as `evaluate.load("accuracy")` need the Hub. The modules here are loaded by path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from torch.nn import functional
from transformers import EvalPrediction

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))
_IGNORED = -100  # label of what counts in no loss


def load(*names: str) -> evaluate.CombinedEvaluations:
    """Return metrics of this folder, combined: `add_batch` gives each what it needs, `compute` returns one dictionary.

    Args:
        *names: of NAMES.

    Raises:
        ValueError: there is no such metric.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"{name!r} is no metric of this folder; accepted: {', '.join(NAMES)}")
    return evaluate.combine([evaluate.load(str(FOLDER / f"{name}.py"), keep_in_memory=True) for name in names])


def classification(*names: str) -> dict[str, Callable[..., Any]]:
    """Return Trainer's arguments for a classifier: `compute_metrics` and `preprocess_logits_for_metrics`.

    They also work with `batch_eval_metrics=True`.

    Args:
        *names: metrics that take predictions and references; none: accuracy and macro_f1.
    """
    combined = load(*(names or ("accuracy", "macro_f1")))

    def predict(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        return _first(logits).argmax(-1)

    def add(prediction: EvalPrediction) -> None:
        labels = _array(prediction.label_ids)
        counts = labels != _IGNORED
        combined.add_batch(predictions=_array(prediction.predictions)[counts], references=labels[counts])

    return _arguments(combined, predict, add)


def language_modeling(*names: str) -> dict[str, Callable[..., Any]]:
    """Return Trainer's arguments for a causal language model: `compute_metrics` and `preprocess_logits_for_metrics`.

    Both metrics are means over predicted tokens: those whose label is not -100, without the first of each sequence.
    Two numbers per token are kept, never the logits. They also work with `batch_eval_metrics=True`.

    Args:
        *names: metrics that take predictions and references, or losses; none: accuracy (of tokens) and perplexity.
    """
    combined = load(*(names or ("accuracy", "perplexity")))

    def predict(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, targets = _first(logits)[:, :-1].float(), labels[:, 1:]
        losses = functional.cross_entropy(
            scores.transpose(1, 2), targets.clamp(min=0), reduction="none"
        )  # where the label is -100, never read
        return scores.argmax(-1), losses

    def add(prediction: EvalPrediction) -> None:
        tokens, losses = (_array(each) for each in prediction.predictions)
        labels = _array(prediction.label_ids)[:, 1:]
        counts = labels != _IGNORED
        combined.add_batch(predictions=tokens[counts], references=labels[counts], losses=losses[counts])

    return _arguments(combined, predict, add)


def _arguments(
    combined: evaluate.CombinedEvaluations,
    predict: Callable[..., Any],
    add: Callable[[EvalPrediction], None],
) -> dict[str, Callable[..., Any]]:
    def compute_metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        add(prediction)
        return combined.compute() if compute_result else {}

    return {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": predict}


def _first(logits: Any) -> torch.Tensor:
    """Return the logits of outputs that may hold more, such as a cache."""
    found: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    return found


def _array(values: Any) -> np.ndarray:
    """Return an array: Trainer gives arrays, and tensors with `batch_eval_metrics`."""
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
