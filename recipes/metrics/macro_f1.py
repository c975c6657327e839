"""Macro F1: the F1 score of each class, averaged over the classes among predictions and references."""

from __future__ import annotations

import datasets
import evaluate
import numpy as np


class MacroF1(evaluate.Metric):
    """See the module. `evaluate` reads imports line by line: one a line."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        found, right = np.asarray(predictions), np.asarray(references)
        scores = []
        for number in np.union1d(found, right):
            hits = np.sum((found == number) & (right == number))
            scores.append(2 * hits / (np.sum(found == number) + np.sum(right == number)))
        return {"macro_f1": float(np.mean(scores))}
