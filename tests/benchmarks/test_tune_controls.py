"""The search for the rates of the controls."""

from __future__ import annotations

import json
import math

import pytest
import tune_controls
from pretraining.compare import presets
from pretraining.run import arguments


@pytest.mark.parametrize("center", [(2.4, 4.2), (5.2, 3.1), (0.2, 7.3), (3.0, 4.0)])
def test_the_search_ends_with_the_best_pair_inside_what_was_tried(center):
    def loss(pair):
        return (pair[0] - center[0]) ** 2 + (pair[1] - center[1]) ** 2

    found = {}
    while pairs := tune_controls.wanted(found):
        assert not set(pairs) & set(found)
        found |= {pair: loss(pair) for pair in pairs}
    assert tune_controls.best(found) == (round(center[0]), round(center[1]))
    assert set(tune_controls.neighbours(tune_controls.best(found))) <= set(found)
    assert len(found) < 25


def test_the_search_follows_a_ridge():
    """Each rate alone is best where it is, and both together are better doubled."""

    def loss(pair):
        return 9 * (pair[0] - pair[1] + 4) ** 2 + (pair[0] + pair[1] - 10) ** 2

    found = {}
    while pairs := tune_controls.wanted(found):
        found |= {pair: loss(pair) for pair in pairs}
    assert tune_controls.best(found) == (3, 7)


def test_a_run_that_diverged_is_never_best():
    assert tune_controls.best({(1, 4): math.nan, (2, 4): 5.0}) == (2, 4)


def test_a_search_that_diverges_goes_down_until_it_does_not():
    found = {}
    while pairs := tune_controls.wanted(found):
        found[pairs[0]] = sum(number * number for number in pairs[0]) if max(pairs[0]) < 0 else math.nan
    assert tune_controls.best(found) == (-1, -1)
    assert len(found) < 25


def test_rates_are_those_of_the_files():
    assert [tune_controls.rate(number) for number in (0, 1, 4, 7)] == [1e-3, 2e-3, 1.6e-2, 0.128]
    rows = [{"arm": "adamw", "learning_rate": 4e-3, "lr_embeddings": 1.6e-2, "eval_loss": None}]
    ((pair, loss),) = tune_controls.losses_of(rows)["adamw"].items()
    assert pair == (2, 4) and math.isnan(loss)


DEFAULTS = {"mars_adamw": "mars_adamw, gamma 1 - beta1", "mars_m": "mars_m, gamma 1 - beta1"}


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_m"])
def test_the_default_job_has_the_best_settings_of_each_rule(optimizer):
    found = tune_controls.losses_of(json.loads(tune_controls.RESULTS.read_text())["runs"])
    arms = presets.load("controls").arms
    own = [arm for arm in arms if arms[arm]["optimizer"] == optimizer and arms[arm].get("is_approx") is not False]
    best = min(own, key=lambda arm: found[arm][tune_controls.best(found[arm])])
    assert best == DEFAULTS.get(optimizer, optimizer)
    run, tuned = (
        arguments.parse([*argv, "--output_dir", "out"])
        for argv in (["--optimizer", optimizer], presets.load("controls").argv(best))
    )
    assert run.optimizer == tuned.optimizer
    assert (run.training.learning_rate, run.training.weight_decay) == (
        tuned.training.learning_rate,
        tuned.training.weight_decay,
    )


def test_the_preset_has_the_best_rates_of_every_search_that_ended():
    found = tune_controls.losses_of(json.loads(tune_controls.RESULTS.read_text())["runs"])
    rates = tune_controls.best_rates()
    arms = presets.load("controls").arms
    ended = [arm for arm in arms if found.get(arm) and not tune_controls.wanted(found[arm])]
    assert ended == list(arms)
    for arm in ended:
        assert {name: arms[arm][name] for name in rates[arm]} == rates[arm], arm
