"""The published searches of learning rates: plans, recipes and pages have the best ones."""

from __future__ import annotations

import math
import statistics

import published
import pytest
from pretraining.run import arguments
from published import ROOT

from mars_hf.compare.plan import words

SEEDS = {"betas": 100, "betas_headers": 100, "additions": 100, "controls": 100, "finetuning": 100, "smollm2": 100}
SEEDS |= {"tasks": 42}
LOSSES = {name: published.searched(name) for name in (*SEEDS, "embedded", "decay")}
# At the best rates of others, without a search of their own.
GIVEN = ("kjv all mars_adamw(8bit)", "mars_muon")


def parse(argv):
    return arguments.parse([*argv, "--output_dir", "out"])


@pytest.mark.parametrize("name", SEEDS)
def test_best_rates_lie_between_others(name):
    """With the seed of the search; the plan of the controls begins at them."""
    for arm, losses in LOSSES[name].items():
        if arm in GIVEN:
            continue
        searched = {rates: by_seed for rates, by_seed in losses.items() if SEEDS[name] in by_seed}
        middle = published.best({rates: {0: by_seed[SEEDS[name]]} for rates, by_seed in searched.items()})
        assert math.isfinite(losses[middle][SEEDS[name]])
        for at, rate in enumerate(middle):
            for factor in (0.5, 2.0):
                neighbour = tuple(
                    pytest.approx(own * (factor if place == at else 1)) for place, own in enumerate(middle)
                )
                assert any(rates == neighbour for rates in searched), (arm, rate)
        if name == "controls":
            (own,) = [each for each in published.plan("controls").arms if each.name == arm]
            assert tuple(own.first) == middle, arm


def test_searches_were_of_arms_of_the_plans():
    for name, plan in (("betas", "betas"), ("betas_headers", "betas"), ("additions", "additions"), ("decay", "decay")):
        assert set(LOSSES[name]) <= {arm.name for arm in published.plan(plan).arms}
    arms = {arm.name: arm for arm in published.plan("embedded").arms}
    assert set(LOSSES["embedded"]) == set(arms)
    for arm, losses in LOSSES["embedded"].items():
        for (rate,) in losses:
            factor = math.log2(rate / arms[arm].first[0])
            assert factor == pytest.approx(round(factor)) and abs(factor) <= 2, arm


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_m"])
def test_default_job_has_the_best_settings_of_controls(optimizer):
    plan = published.plan("controls")
    settings = {arm.name: published.settings(plan, arm.name) for arm in plan.arms}
    arms = [arm for arm, own in settings.items() if (own["optimizer"], own.get("is_approx", True)) == (optimizer, True)]
    arm = min(arms, key=lambda arm: min(by_seed[100] for by_seed in LOSSES["controls"][arm].values()))
    assert arm == (f"{optimizer}, gamma 1 - beta1" if "mars" in optimizer else optimizer)
    run, tuned = parse(["--optimizer", optimizer]), parse([*words(settings[arm]), "--bf16", "false"])
    assert run.optimizer == tuned.optimizer
    assert run.training.learning_rate == tuned.training.learning_rate
    assert run.training.weight_decay == tuned.training.weight_decay


@pytest.mark.parametrize("optimizer", ["mars_lion", "mars_shampoo"])
def test_default_job_has_the_best_settings_of_the_sweeps(optimizer):
    arms = {arm.name: arm.arguments for arm in published.plan("embedded").arms}
    losses = {
        (arm, *rates): by_seed
        for arm, own in arms.items()
        for rates, by_seed in LOSSES["embedded"][arm].items()
        if own["optimizer"] == optimizer
    }
    arm, rate = published.best(losses)
    chosen = parse(["--optimizer", optimizer])
    assert chosen.training.learning_rate == pytest.approx(rate)
    for name, value in arms[arm].items():
        if name not in ("optimizer", "gamma", "lr_embeddings"):  # gamma is the class's
            assert float(getattr(chosen.optimizer, name)) == value


def test_llama_starts_from_the_best_rates():
    plan = {arm.name: arm.first for arm in published.plan("llama").arms}
    for arm, optimizer in (("mars_m", "mars_m"), ("mars_adamw", "mars_adamw"), ("adamw_torch", "adamw")):
        start = parse(["--config", "llama", "--optimizer", optimizer]).training.learning_rate
        assert (start,) == tuple(plan[optimizer]) == published.best(LOSSES["tasks"][f"pretrain_llama {arm}"])


def test_page_shows_the_runs_of_a_pretrained_model():
    page = (ROOT / "docs" / "finetuning.md").read_text()
    texts, modes = {"kjv": "Bible", "headers": "C++"}, {"all": "all weights", "lora": "LoRA"}
    optims = {"adamw(0.9)": "AdamW", "adamw(0.8)": "AdamW, `beta1` 0.8", "mars_adamw": "mars-adamw", "mars_m": "mars-m"}
    optims |= {"mars_adamw(8bit)": "mars-adamw, states in 8 bits", "muon": "Muon", "mars_lion": "mars-lion"}
    rows, runs = [], published.read("tune_smollm2")["runs"]
    for arm, losses in LOSSES["smollm2"].items():
        text, mode, optim = arm.split()
        (best,) = published.best(losses)
        if arm in GIVEN:  # at the best rate of float32 states
            of_float32 = published.best(LOSSES["smollm2"]["kjv all mars_adamw"])
            assert sorted(losses[best,]) == [1, 2, 3] and (best,) == of_float32
        else:
            assert sorted(losses[best,]) == [1, 2, 3, SEEDS["smollm2"]]
            assert {(best / 2,), (best * 2,)} <= losses.keys()
        key = {"text": text, "mode": mode, "optim": optim, "learning_rate": best, "steps": 60}.items()
        new = [row for row in runs if key <= row.items() and row["seed"] != SEEDS["smollm2"]]
        learned, python = (statistics.mean(row[key] for row in new) for key in ("eval_loss", "general_loss"))
        what = f"{texts[text]}, {modes[mode]}"
        rows.append(f"| {what} | {optims[optim]} | {best:g} | {learned:.3f} | {python:.3f} |")
    shown = [line for line in page.splitlines() if line.startswith(tuple(f"| {text}," for text in texts.values()))]
    assert sorted(shown) == sorted(rows)


def test_page_compares_seeds_of_a_pretrained_model():
    page = " ".join((ROOT / "docs" / "finetuning.md").read_text().split())

    def difference(what: str, optim: str, other: str) -> float:
        """Return how much higher `optim` ends than `other`, a mean over seeds; all of them agree on the sign."""
        ours, theirs = ([_loss_of_new_seed(f"{what} {each}", seed) for seed in (1, 2, 3)] for each in (optim, other))
        of_seed = [loss - other_loss for loss, other_loss in zip(ours, theirs, strict=True)]
        assert len({value > 0 for value in of_seed}) == 1
        return statistics.mean(of_seed)

    pairs = [difference(what, "mars_adamw", "adamw(0.9)") for what in ("kjv all", "kjv lora", "headers lora")]
    assert "0.001 and 0.005 lower on the Bible, 0.008 higher on C++" in page
    assert [round(value, 3) for value in pairs] == [-0.001, -0.005, 0.008]
    coded = [_loss_of_new_seed("kjv all mars_adamw(8bit)", seed) for seed in (1, 2, 3)]
    less = [one - _loss_of_new_seed("kjv all mars_adamw", seed) for seed, one in enumerate(coded, 1)]
    assert [value < 0 for value in less] == [True, False, False]
    sizes = map(abs, less)
    assert "end {:.3f} below, {:.3f} above and {:.3f} above those with float32 states".format(*sizes) in page
    assert f"`beta1` 0.8 ends {difference('kjv lora', 'mars_adamw', 'adamw(0.8)'):.3f} below mars-adamw" in page
    few, many = (published.best(LOSSES["smollm2"][arm])[0] for arm in ("kjv all adamw(0.9)", "kjv lora mars_lion"))
    matrices, lora = (difference(what, "mars_m", "adamw(0.9)") for what in ("kjv all", "headers lora"))
    assert f"ends {matrices:.2f} above AdamW with all weights**, and {lora:.2f} above with LoRA on C++" in page
    low = [LOSSES["smollm2"][f"kjv all {optim}"][2e-5,][100] for optim in ("mars_m", "adamw(0.9)")]
    assert f"Runs this short need {few / 2e-5:.0f} to {many / 4.6e-5:.0f} times the usual rates" in page
    assert f"At 2e-5 it is far behind, {low[0]:.2f} to {low[1]:.2f}" in page


def _loss_of_new_seed(arm: str, seed: int) -> float:
    losses = LOSSES["smollm2"][arm]
    return losses[published.best(losses)][seed]


def test_page_shows_the_bases():
    result = published.read("tune_finetuning")
    page = (ROOT / "docs" / "finetuning.md").read_text()
    for base in ("mars_adamw", "adamw", "muon"):
        cells = [f"{base} ({result['bases'][base]['eval_loss']:.3f})"]
        for optim in ("adamw_torch", "mars_adamw", "mars_m"):
            key = {"base": base, "mode": "full", "optim": optim}.items()
            runs = [row for row in result["runs"] if key <= row.items() and row["seed"] in (1, 2)]
            new, old = ([row[key] for row in runs] for key in ("eval_loss", "pretraining_loss"))
            deviation = f"{statistics.mean(new):.3f} ± {statistics.stdev(new):.3f}"
            cells.append(f"{deviation} ({statistics.mean(old):.3f})")
        assert f"| {' | '.join(cells)} |" in page
