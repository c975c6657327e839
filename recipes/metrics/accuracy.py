"""Accuracy: the share of predictions that equal their reference."""

from __future__ import annotations

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """See the module. `evaluate` reads imports line by line: one a line."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
