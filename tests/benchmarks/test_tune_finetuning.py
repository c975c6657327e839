"""The search for the rates of fine-tuning, what it compares, and its result."""

from __future__ import annotations

import json
import math

import finetune_lm
import pytest
import tune_finetuning
from PIL import Image
from pretraining.compare import presets
from pretraining.run import arguments
from tune_finetuning import DEFAULT, SEARCH_SEED, SEEDS, Arm

RESULT = json.loads(tune_finetuning.RESULTS.read_text())
ROWS = RESULT["runs"]


def row(arm: Arm, rate: float, seed: int, loss: float | None) -> dict:
    return {**arm._asdict(), "learning_rate": rate, "seed": seed, "eval_loss": loss, "pretraining_loss": loss}


@pytest.mark.parametrize(
    ("diverges_from", "searched"),
    [
        (8e-3, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3]),
        (2e-3, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),  # the first rate is one of those
    ],
)
def test_a_search_runs_each_rate_once_and_then_the_seeds_at_the_best(diverges_from, searched):
    arm = Arm(DEFAULT, "full", "adamw_torch")
    rows: list[dict] = []

    def run(arm, rate, seed):
        loss = math.log2(rate / 5e-4) ** 2 if rate < diverges_from else None
        rows.append(row(arm, rate, seed, loss))

    tune_finetuning.work_on(arm, rows, run)
    found = [(each["learning_rate"], each["seed"]) for each in rows]
    assert len(set(found)) == len(found)
    assert sorted(rate for rate, seed in found if seed == SEARCH_SEED) == searched
    assert [pair for pair in found if pair[1] != SEARCH_SEED] == [(5e-4, seed) for seed in SEEDS]
    before = len(rows)
    tune_finetuning.work_on(arm, rows, run)
    assert len(rows) == before  # nothing is repeated


def test_arms_that_only_search_run_no_further_seeds():
    rows: list[dict] = []
    arm = Arm(DEFAULT, "lora", "mars_m")
    tune_finetuning.work_on(arm, rows, lambda arm, rate, seed: rows.append(row(arm, rate, seed, rate)))
    assert {each["seed"] for each in rows} == {SEARCH_SEED}


def test_settings_follow_the_rate():
    assert tune_finetuning.optim_args(Arm(DEFAULT, "full", "mars_m"), 5e-4) == "beta1=0.95,lr_1d=0.0005"
    assert tune_finetuning.optim_args(Arm(DEFAULT, "full", "mars_shampoo"), 8e-3) == "beta1=0.95,lr_1d=0.001"
    assert tune_finetuning.optim_args(Arm(DEFAULT, "full", "adamw_torch"), 8e-3) is None


def test_bases_have_the_settings_that_are_stated():
    assert {base: own["settings"] for base, own in RESULT["bases"].items()} == tune_finetuning.PRETRAINING


@pytest.mark.parametrize("arm", tune_finetuning.ARMS, ids=" ".join)
def test_every_search_ended_with_the_best_rate_between_others(arm):
    losses = tune_finetuning.losses_of(ROWS)[arm]
    assert tune_finetuning.wanted(0, losses) is None
    rates = sorted(losses)
    assert tune_finetuning.best(losses) not in (rates[0], rates[-1])


def test_what_is_compared_ran_with_every_seed_at_its_best_rate():
    losses = tune_finetuning.losses_of(ROWS)
    compared = [arm for arm in tune_finetuning.ARMS if arm.mode == "full" and arm.optim in tune_finetuning.COMPARED]
    assert len(compared) == 9
    for arm in compared:
        for seed in SEEDS:
            assert set(tune_finetuning.losses_of(ROWS, seed)[arm]) == {tune_finetuning.best(losses[arm])}


def test_the_page_shows_these_results():
    page = (tune_finetuning.ROOT / "docs" / "finetuning.md").read_text()
    assert tune_finetuning.search_table(ROWS) in page
    assert tune_finetuning.bases_table(ROWS, RESULT["bases"]) in page


DIVERGED = row(Arm(DEFAULT, "lora", "adamw_torch"), 1e-3, SEARCH_SEED, None)


@pytest.mark.parametrize(
    "rows", [ROWS, [], [DIVERGED], [*ROWS, DIVERGED]], ids=["all", "none yet", "diverged", "one diverged"]
)
def test_the_report_draws_the_searches(rows, tmp_path):
    tune_finetuning.draw(rows, tmp_path / "rates.png")
    with Image.open(tmp_path / "rates.png") as picture:
        picture.verify()


def test_the_recipes_model_is_that_of_the_search():
    searched = presets.words(RESULT["bases"][DEFAULT]["settings"])
    mine, theirs = (arguments.parse([*argv, "--output_dir", "x"]) for argv in (finetune_lm._BASE_SETTINGS, searched))
    assert mine.optimizer == theirs.optimizer and mine.model == theirs.model
    assert mine.training.learning_rate == theirs.training.learning_rate == 0.001
    assert mine.training.weight_decay == theirs.training.weight_decay


@pytest.mark.parametrize(("mode", "use_peft"), [("full", False), ("lora", True)])
def test_the_recipe_starts_from_the_best_rates(mode, use_peft):
    losses = tune_finetuning.losses_of(ROWS)
    starts = finetune_lm.STARTS[use_peft]
    assert set(starts) == set(tune_finetuning.RULES[mode])
    for optim, start in starts.items():
        arm = Arm(DEFAULT, mode, optim)
        best = tune_finetuning.best(losses[arm])
        assert tune_finetuning.wanted(0, losses[arm]) is None, f"{optim}: the search has not ended"
        assert start.learning_rate == best, optim
        assert start.optim_args == tune_finetuning.optim_args(arm, best), optim
