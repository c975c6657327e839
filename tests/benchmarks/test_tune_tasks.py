"""The search for the starting rates of the recipes for other data and tasks, and its result."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import tune_tasks

ROWS = json.loads(tune_tasks.RESULTS.read_text())["runs"]


@pytest.mark.parametrize("center", [-3.2, 0.1, 2.6])
def test_the_search_ends_with_the_best_rate_inside_what_was_tried(center):
    losses = {}
    while (rate := tune_tasks.wanted(4e-3, losses)) is not None:
        assert rate not in losses
        losses[rate] = (math.log2(rate / 4e-3) - center) ** 2
    best = tune_tasks.best(losses)
    assert round(math.log2(best / 4e-3)) == round(center)
    assert {best / 2, best * 2} <= set(losses)


def test_a_run_that_diverged_is_never_best():
    assert tune_tasks.best({1e-3: math.nan, 2e-3: 5.0, 4e-3: math.nan}) == 2e-3


@pytest.mark.parametrize("recipe", tune_tasks.SEARCHES)
def test_recipes_start_from_the_best_rates(recipe):
    starts = importlib.import_module(recipe).STARTS
    losses = tune_tasks.losses_of(ROWS)
    assert set(starts) == set(tune_tasks.SEARCHES[recipe])
    for optim, (_, optim_args) in tune_tasks.SEARCHES[recipe].items():
        own = losses[recipe, optim]
        best = tune_tasks.best(own)
        assert tune_tasks.wanted(best, own) is None, f"{optim}: the search has not ended"
        assert starts[optim].learning_rate == best, optim
        assert starts[optim].optim_args == (optim_args and optim_args.format(twice=2 * best)), optim


def test_the_report_marks_the_best_rate_of_each_rule():
    table = tune_tasks.report(ROWS)
    assert len(table.splitlines()) == 2 + sum(map(len, tune_tasks.SEARCHES.values()))
    assert all(line.count("**") == 2 for line in table.splitlines()[2:])
    assert "not ended" not in table
