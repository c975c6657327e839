"""The halves of a step, and the number of samples that their mean stands for."""

from __future__ import annotations

import pytest
import torch

from mars_hf.training.probe_passes import split


def batches(*sizes):
    return [{"x": 10.0 * index + torch.arange(float(size)), "scale": 2.0} for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "halves", "samples"),
    [
        ((4,), ([[0, 1]], [[2, 3]]), 4),
        ((2, 4), ([[0], [10, 11]], [[1], [12, 13]]), 16 / 3),
        ((3,), ([[0]], [[1, 2]]), 8 / 3),
        ((1, 1), ([[0]], [[10]]), 2),
        ((1, 1, 1), ([[0], [20]], [[10]]), 8 / 3),
        ((2, 1), ([[0, 1]], [[10]]), 8 / 3),
    ],
)
def test_every_sample_is_in_one_half(sizes, halves, samples):
    found = split(batches(*sizes))
    assert [[part["x"].tolist() for part in half] for half in found.halves] == [list(half) for half in halves]
    assert found.samples == pytest.approx(samples)
    assert all(part["scale"] == 2.0 for half in found.halves for part in half)


def test_a_single_sample_has_no_halves():
    assert split(batches(1)) is None


@pytest.mark.parametrize("sizes", [(3,), (2, 5), (1, 1, 1), (4, 4)])
def test_samples_are_those_of_the_variance_of_the_mean(sizes):
    """Of samples with variance 1, the mean of the halves has variance 1 / samples."""
    found = split(batches(*sizes))
    weights = {}
    for half in found.halves:
        for part in half:
            for value in part["x"].tolist():
                weights[value] = weights.get(value, 0) + 1 / (2 * len(half) * len(part["x"]))
    assert len(weights) == sum(sizes) and sum(weights.values()) == pytest.approx(1)
    assert sum(weight**2 for weight in weights.values()) == pytest.approx(1 / found.samples)
