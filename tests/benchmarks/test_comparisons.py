"""The plans, and the shipped comparisons: runs of the plans, whose numbers the pages show."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import finetune
import numpy as np
import published
import pytest
import yaml
from pretraining.run import arguments
from published import Difference, FinishedRun
from transformers import TrainingArguments

from mars_hf.compare.comparison import Comparison
from mars_hf.compare.differences import holm
from mars_hf.compare.order import Order
from mars_hf.compare.plan import Plan, words

ROOT = published.ROOT
PAGES = ["../README.md", "does_it_help.md", "controls.md", "other_settings.md"]
LINES = [line.strip() for page in PAGES for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()]
OPEN = 0.03
# Name of the file in benchmarks/results to the plan that trains it, its baseline and its least number of seeds.
SHIPPED = {
    "controls_embedded": ("controls", "adamw", 5),
    "controls_headers": ("controls", "adamw", 5),
    "gamma_embedded": ("gamma", "gamma 0", 3),
    "betas_embedded": ("betas", "adamw 0.9", 3),
    "batch_embedded": ("batch", "adamw 2048", 2),
    "time_embedded": ("controls", "adamw", 3),
    "lr_embedded": ("lr", "adamw 0.002", 1),
    "parts_embedded": ("parts", "mars_m", 5),
}


def first_settings(plan: Plan, arm: str, factor: float = 1.0) -> dict[str, Any]:
    """Return what the recipe reads for an arm at its first rates, or at these times a power of two."""
    comparison = Comparison(plan, Order("recipes/pretrain_gpt2.py"), Path("out"))
    (own,) = [each for each in plan.arms if each.name == arm]
    run = comparison.run(own, (round(math.log2(factor)),) * len(plan.rates), plan.seeds[0])
    rate = ["--learning_rate", f"{run.order.arm['learning_rate']:g}"]
    values, _ = arguments.read([*run.order.arguments, *words(plan.set), *rate])
    return json.loads(json.dumps(vars(values), default=str))


def pairs_of(name: str) -> dict[tuple[str, str], str]:
    """Return the cells of the plan's pairs on the pages, with what is shown, also by Holm's correction."""
    plan, baseline, _ = SHIPPED[name]
    pairs = published.plan(plan).pairs
    gaps = published.differences(published.runs(name), baseline, pairs)
    first = {arm.name: arm.first for arm in published.plan(plan).arms}
    cells = {}
    for gap in gaps:
        have_own = bool(published.plan(plan).search_seeds) or first[gap.contender] != first[gap.against]
        cells[gap.contender, gap.against] = f"{gap.interval}, {shown(gap, have_own_rates=have_own)}"
    return {pair: cells[pair] for pair in cells if pair in pairs}


def shown(gap: Difference, *, have_own_rates: bool = True) -> str:
    """Return the last word of a difference; one below `OPEN` may be of rates that one seed has chosen by luck."""
    if gap.low <= 0 <= gap.high:
        return "no"
    if have_own_rates and abs(gap.mean) < OPEN:
        return "open"
    return "yes" if gap.holm < 0.05 else "alone"


# --- the plans -------------------------------------------------------------------------------------------------------

# Of larger models, how much of the rates of the controls they have; results of the other plans hold theirs.
SHARES = {"gpu": 1 / 2, "gpu-98m": 1 / 4}
FINETUNED = ("finetuning", "smollm2", "smollm2-long")
PLANS = sorted(path.stem for path in published.PLANS.glob("*.yaml"))


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_runs_of_their_script(name):
    plan, text = published.plan(name), (published.PLANS / f"{name}.yaml").read_text(encoding="utf-8")
    plan.check()
    assert plan.about and f"--plan benchmarks/plans/{name}.yaml" in text
    if name in FINETUNED:
        known = {field.name for kind in (finetune.Arguments, TrainingArguments) for field in dataclasses.fields(kind)}
        assert {*plan.set, *plan.arguments, *(key for arm in plan.arms for key in arm.set)} <= known
        return
    read = {arm.name: first_settings(plan, arm.name) for arm in plan.arms}
    assert len({json.dumps(own, sort_keys=True) for own in read.values()}) == len(read) > 2
    for arm in plan.arms:
        assert read[arm.name]["learning_rate"] == arm.first[0], arm
        given = {key: value for key, value in arm.arguments.items() if key in ("optimizer", "beta1", "gamma")}
        assert given.items() <= read[arm.name].items(), arm
        if name in SHARES:
            of_control = first_settings(published.plan("controls"), arm.name)
            names = ("learning_rate", "lr_embeddings", *(["lr_1d"] if of_control["lr_1d"] else []))
            expected = {key: SHARES[name] * of_control[key] for key in names}
            assert {key: read[arm.name][key] for key in names} == pytest.approx(expected), arm


def test_runs_with_the_seeds_of_the_comparison_have_further_settings(tmp_path):
    comparison = Comparison(published.plan("controls"), Order("recipes/pretrain_gpt2.py"), tmp_path)
    of_search, of_seed = (comparison.run(comparison.plan.baseline, (0, 0), seed).order.arguments for seed in (100, 1))
    at = of_search.index("--max_eval_blocks") + 1
    assert (of_search[at], of_seed[at]) == ("100000", "512") and "0.064" in of_search


# --- what is published -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_runs_of_the_plan(name):
    """With all seeds; data and machine are stated. Another implementation of the statistics wrote the files."""
    result, runs, (of_plan, baseline, least) = published.read(name), published.runs(name), SHIPPED[name]
    plan, arms, seeds = published.plan(of_plan), result["arms"], {run.seed for run in runs}
    expected = {(arm, seed, own["learning_rate"]) for arm, own in arms.items() for seed in seeds}
    assert {(run.contender, run.seed, run.learning_rate) for run in runs} == expected and len(runs) == len(expected)
    assert len(seeds) >= least
    for arm, own in arms.items():
        in_plan = arm.partition(" ")[0] if name == "lr_embedded" else arm
        (first,) = [each.first[0] for each in plan.arms if each.name == in_plan]
        read = first_settings(plan, in_plan, own["learning_rate"] / first)
        assert {key: read[key] for key in own} == pytest.approx(own), arm
    (data,) = result["data"]
    assert data["dataset"] and len(data["train tokens"]) == 64
    assert {"cpu", "torch", "transformers"} <= set(result["machine"])
    gaps = {gap.contender: gap for gap in published.differences(runs, baseline)}
    for row, saved in zip(published.summarize(runs, baseline), result["rows"], strict=True):
        against = saved.pop("against_baseline")
        assert row._asdict() == pytest.approx(saved)
        if row.contender in gaps and least > 1:
            numbers = {key: getattr(gaps[row.contender], key) for key in ("mean", "low", "high", "p")}
            assert numbers == pytest.approx({key: against[key] for key in numbers}, rel=1e-6), row


# Comparisons by `python -m mars_hf compare` on the page about fine-tuning: the text of each.
FINETUNED_LONGER = {"smollm2_long_kjv": "Bible", "smollm2_long_headers": "C++"}
ARMS = {"adamw 0.9": "AdamW", "adamw 0.8": "AdamW, `beta1` 0.8", "mars_adamw": "mars-adamw", "mars_m": "mars-m"}


@pytest.mark.parametrize("name", FINETUNED_LONGER)
def test_page_shows_the_longer_fine_tuning(name):
    """The runs are those of the plan, at the best rates of its search, and the page has what follows from them."""
    found, plan, result = published.findings(name), published.plan("smollm2-long"), published.read(name)
    assert [arm.name for arm in plan.arms] == list(found.search) == list(ARMS)
    assert {(run.arm, run.seed) for run in found.runs} == {(arm, seed) for arm in ARMS for seed in plan.seeds}
    assert result["search_seeds"] == plan.search_seeds and not found.doubts()
    gaps = {gap.arm: gap for gap in found.gaps}
    page = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8").splitlines()
    for arm, by_rate in found.search.items():
        tried = {rate: statistics.mean(values) for rate, values in by_rate.items() if len(values) == 2}
        best = min(tried, key=tried.get)
        assert {best / 2, best * 2} <= by_rate.keys()
        runs = found.arms[arm]
        assert {run.rate for run in runs} == {best}
        assert all(tuple(run.curve[-1]) == (200, run.value) for run in runs)
        loss = statistics.mean(run.value for run in runs)
        cells = [FINETUNED_LONGER[name], ARMS[arm], f"{best:g}", f"{loss:.3f}"]
        gap = gaps.get(arm)
        cells.append("" if gap is None else f"{gap.mean:+.3f} ± {gap.half:.3f}, {'yes' if gap.is_shown else 'no'}")
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in page


def test_page_tells_what_the_longer_fine_tuning_shows():
    page = " ".join((ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8").split())
    bible, cpp = map(published.findings, FINETUNED_LONGER)
    would_show = [max(gap.would_show for gap in found.gaps if gap.arm != "adamw 0.8") for found in (bible, cpp)]
    ruined = [sorted(bible.search["adamw 0.8"][0.0128]), sorted(cpp.search["adamw 0.9"][0.0128])]
    rates = {run.rate / 2e-4 for found in (bible, cpp) for run in found.runs}
    lines = [
        "Three seeds would have shown {:.3f} between AdamW and the rules of MARS on the Bible, and {:.3f} on C++.",
        "0.8 end at {:.2f} and {:.2f} there, and on C++ those of AdamW with 0.9 at {:.2f} and {:.2f}.",
        "still {:g} to {:g} times the usual 2e-4",
    ]
    numbers = [would_show, [*ruined[0], *ruined[1]], [min(rates), max(rates)]]
    assert all(line.format(*values) in page for line, values in zip(lines, numbers, strict=True))
    assert not any(gap.is_shown for found in (bible, cpp) for gap in found.gaps)


@pytest.mark.parametrize("name", SHIPPED)
def test_pages_show_every_arm(name):
    """Arms along an axis as the grid of their losses, others with their differences to the baseline."""
    runs, baseline = published.runs(name), SHIPPED[name][1]
    if name in published.AXES:
        assert published.grid_table(name) in "\n".join(LINES)
        return
    gaps = {gap.contender: gap for gap in published.differences(runs, baseline)}
    for row in published.summarize(runs, baseline):
        loss, gap = f"{row.loss:.3f}", gaps.get(row.contender)
        cells = [f"{loss}, {gap.interval} |", f"{loss} | {gap.interval} |"] if gap else [f"{loss} |"]
        lines = [line for line in LINES if line.startswith(f"| {row.contender} |")]
        assert any(cell in line for cell in cells for line in lines), (row, lines)


def results_of(search: str) -> list[dict[str, Any]]:
    return published.read(f"tune_{search}")["runs"]


def further_runs(search: str) -> dict[str, list[FinishedRun]]:
    """Those with further seeds, by arm, beside the arms of the controls with the same seeds and text."""
    controls = published.runs("controls_headers" if search == "betas_headers" else "controls_embedded")
    return published.by_contender([*controls, *published.further_runs(search)])


# Search to its questions: an arm, and what it is compared with.
QUESTIONS = {
    "betas_headers": [
        ("adamw 0.7", "adamw"),
        ("nadamw 0.8", "adamw 0.7"),
        ("mars_adamw 0.7", "adamw 0.7"),
        ("mars_adamw, gamma 1 - beta1 0.8", "adamw 0.7"),
        ("muon", "adamw 0.7"),
        ("mars_m", "adamw 0.7"),
    ],
    "additions": [
        ("mars_m cautious", "mars_m"),
        ("mars_m rows", "mars_m"),
        ("mars_muon rows", "mars_muon"),
        ("mars_adamw cautious", "mars_adamw"),
    ],
    "decay": [
        ("adamw, no decay", "adamw"),
        ("nadamw, no decay", "nadamw"),
        ("mars_adamw, no decay", "mars_adamw"),
        ("muon, no decay", "muon"),
        ("mars_m, no decay", "mars_m"),
        ("muon, decay of adamw", "muon"),
        ("mars_m, decay of adamw", "mars_m"),
        ("muon, no decay", "adamw, no decay"),
        ("mars_m, no decay", "adamw, no decay"),
    ],
}


def answers(search: str) -> list[str]:
    """The rows of the page, with Holm's correction for all of them."""
    arms, questions = further_runs(search), QUESTIONS[search]
    assert {len(arms[arm]) for pair in questions for arm in pair} == {5}
    gaps = [published.difference(arms[arm], arms[against]) for arm, against in questions]
    corrected = holm([gap.p for gap in gaps])
    gaps = [gap._replace(holm=p) for gap, p in zip(gaps, corrected, strict=True)]
    have_own = search != "decay"  # that plan keeps the rates of the controls
    return [
        f"| {gap.contender} | {gap.against} | {gap.interval}, {shown(gap, have_own_rates=have_own)} |" for gap in gaps
    ]


@pytest.mark.parametrize("search", QUESTIONS)
def test_page_answers_the_questions(search):
    assert [row for row in answers(search) if row not in LINES] == []


def test_page_shows_how_far_decay_shrinks():
    """Over a warmup, and a cosine to a share of the rate."""
    job = yaml.safe_load((ROOT / "recipes" / "configs" / "embedded.yaml").read_text())
    mean = (1 + job["lr_scheduler_kwargs"]["min_lr_rate"]) / 2
    steps = job["warmup_steps"] / 2 + mean * (job["max_steps"] - job["warmup_steps"])
    arms = [control(name) for name in ("adamw", "mars_m", "muon")]
    kept = [math.exp(-arm["learning_rate"] * arm["weight_decay"] * steps) for arm in arms]
    shares = [round(100 * (1 - share)) for share in kept]
    assert "by {} % with AdamW, {} % with MARS-M and {} % with Muon".format(*shares) in " ".join(LINES)


def control(arm: str) -> dict[str, Any]:
    """The flags of an arm of the controls."""
    return published.settings(published.plan("controls"), arm)


ADDED = {"additions": {"weight_decay_mode", "normalize_rows"}, "decay": {"weight_decay", "weight_decay_1d"}}


@pytest.mark.parametrize("name", ADDED)
def test_additions_and_decay_are_all_that_differs_from_the_controls(name):
    plan = published.plan(name)
    plain = {arm: control(arm) for arm in ("adamw", "nadamw", "muon", "mars_m", "mars_adamw")}
    plain["mars_muon"] = {**plain["muon"], "optimizer": "mars_muon"}
    evaluated = {"max_eval_blocks", "eval_steps"}
    for arm in plan.arms:
        of_control, own = plain[arm.name.replace(",", "").split()[0]], published.settings(plan, arm.name)
        differing = {key for key in {*own, *of_control} - evaluated if own.get(key) != of_control.get(key)}
        assert differing <= ADDED[name] | ({"learning_rate"} if arm.name == "mars_muon rows" else set()), arm
        rates = {run.learning_rate for run in further_runs(name).get(arm.name, [])}
        assert rates <= {own["learning_rate"]}, arm
    if name == "additions":
        (rows,) = [row for row in answers("additions") if row.startswith("| mars_muon rows ")]
        change = rows.split("| -")[1].split(",")[0]
        assert f"muon ends {change} lower with it" in (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")


def test_decay_of_adamw_shrinks_as_adamws():
    of_adamw = control("adamw")
    shrinkage = of_adamw["learning_rate"] * of_adamw["weight_decay"]
    for arm in ("muon", "mars_m"):
        own = published.settings(published.plan("decay"), f"{arm}, decay of adamw")
        assert own["weight_decay"] * own["learning_rate"] == pytest.approx(shrinkage)
        assert own["weight_decay_1d"] == control(arm)["weight_decay_1d"]
        without = published.settings(published.plan("decay"), f"{arm}, no decay")
        assert without["weight_decay"] == without["weight_decay_1d"] == 0.0


def test_pages_show_pairs_of_controls():
    first, second = (pairs_of(f"controls_{name}") for name in ("embedded", "headers"))
    rows = [f"| {arm} | {against} | {cell} | {second[arm, against]} |" for (arm, against), cell in first.items()]
    assert len(rows) == 13 and [row for row in rows if row not in LINES] == []
    known = {f"| {' | '.join(pair)} | {cell} |" for name in SHIPPED for pair, cell in pairs_of(name).items()}
    known |= {row for search in QUESTIONS for row in answers(search)}
    lines = (ROOT / "docs" / "other_settings.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.endswith((", yes |", ", no |", ", alone |", ", open |"))]
    assert len(rows) > 20 and [row for row in rows if row not in known] == []
    # The second corpus is another one: none of its tokens were seen by the search for rates.
    (one,), (other,) = (published.read(f"controls_{name}")["data"] for name in ("embedded", "headers"))
    assert one["dataset"] != other["dataset"] and one["train tokens"] != other["train tokens"]


def test_page_shows_what_luck_of_one_seed_may_be():
    """Two runs differ by chance by more than any search's best rates lead the next ones, and by less than `OPEN`."""
    arms = published.by_contender(published.runs("controls_embedded"))
    losses = np.array([[run.eval_loss for run in sorted(own, key=lambda run: run.seed)] for own in arms.values()])
    residuals = losses - losses.mean(axis=1, keepdims=True) - losses.mean(axis=0) + losses.mean()
    free = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    scatter = math.sqrt(float((residuals**2).sum()) / free)
    by_chance = 2 * math.sqrt(2) * scatter
    searched = (sorted(seeds[100] for seeds in own.values()) for own in published.searched("controls").values())
    leads = [values[1] - values[0] for values in searched]
    assert len(leads) == 10 and max(leads) < by_chance < OPEN
    text = " ".join(LINES)
    assert f"runs scatter by {scatter:.3f}, so two runs can differ by {by_chance:.3f} by chance" in text


def runs_at_the_best_beta1() -> list[FinishedRun]:
    """Those of the search, beside arms of the controls."""
    arms = further_runs("betas")
    searched = {row["arm"] for row in results_of("betas")}
    return [run for arm in ("adamw", "nadamw", "muon", "mars_m", *searched) for run in arms.get(arm, [])]


def test_page_shows_arms_at_their_best_beta1():
    runs = runs_at_the_best_beta1()
    by_arm = published.by_contender(runs)
    gaps = {gap.contender: gap for gap in published.differences(runs, "adamw 0.8")}
    rows = {row.contender: row for row in published.summarize(runs, "adamw 0.8")}
    for arm, row in rows.items():
        steps = row.steps_to_baseline or "not reached"
        difference = f", {gaps[arm].interval}, {shown(gaps[arm])}" if arm in gaps else ""
        assert row.seeds == 5 and f"| {arm} | {row.loss:.3f}{difference} | {steps} |" in LINES
    assert shown(gaps["mars_adamw 0.8"]) == "no"
    nesterov = "mars_adamw, gamma 1 - beta1 0.8"
    lead = f"it ends {-gaps[nesterov].mean:.3f} below that AdamW on the first text only, level with NAdamW"
    level = [published.difference(by_arm[nesterov], by_arm[arm]) for arm in ("nadamw", "nadamw 0.8")]
    assert lead in " ".join(LINES) and all(gap.low < 0 < gap.high for gap in level)
    low, high = sorted(round(100 * rows[arm].steps_to_baseline / 500) for arm in ("muon", "mars_m"))
    assert f"reach its loss in {low} to {high} % of the steps" in " ".join(LINES)


BEST_BETA1 = {
    "betas": ["adamw 0.8", "nadamw 0.9", "mars_adamw 0.8", "mars_adamw, gamma 1 - beta1 0.8"],
    "betas_headers": ["adamw 0.6", "nadamw 0.8", "mars_adamw 0.7", "mars_adamw, gamma 1 - beta1 0.8"],
}


@pytest.mark.parametrize("search", BEST_BETA1)
def test_search_found_the_best_beta1(search):
    """With the seed of the search. On the first text the controls have 0.9."""
    lowest: dict[str, float] = {}
    for row in [*results_of(search), *(results_of("controls") if search == "betas" else [])]:
        if row["seed"] == 100:
            arm = row["arm"] if " 0." in row["arm"] else f"{row['arm']} 0.9"
            lowest[arm] = min(lowest.get(arm, math.inf), row["eval_loss"])
    for arm in BEST_BETA1[search]:
        optimizer = arm.rpartition(" ")[0]
        assert arm == min((one for one in lowest if one.rpartition(" ")[0] == optimizer), key=lowest.__getitem__)


def test_interval_is_paired_by_seed():
    """Gaps of -0.1, -0.2, -0.3: a mean of -0.2, a standard error of 0.1 / sqrt(3), and t(0.975, 2) = 4.302653."""
    base, mars = (
        [FinishedRun(arm, seed, 1e-3, loss, 1.0) for seed, loss in enumerate(losses)]
        for arm, losses in (("adamw", [4.0, 5.0, 6.0]), ("mars_adamw", [3.9, 4.8, 5.7]))
    )
    gap, half = published.difference(mars[::-1], base), 4.302653 * 0.1 / math.sqrt(3)
    # p is that of t = 3.4641 with 2 degrees of freedom
    assert (gap.mean, gap.low, gap.high, gap.p) == pytest.approx((-0.2, -0.2 - half, -0.2 + half, 0.0741799))
    (gap,) = published.differences([*base, *mars], "adamw")
    assert gap.holm == gap.p and gap.interval == "-0.200 ± 0.248"


def mean_losses(arms: dict[str, list[FinishedRun]]) -> dict[str, float]:
    return {arm: statistics.fmean(run.eval_loss for run in runs) for arm, runs in arms.items()}


def test_page_shows_losses_of_the_second_text():
    means = mean_losses(further_runs("betas_headers"))
    for beta1, of_controls in (("0.6", {}), ("0.7", {}), ("0.8", {}), ("0.9", means)):
        rules = (arm.rpartition(" ")[0] for arm in BEST_BETA1["betas_headers"])
        losses = [means.get(f"{rule} {beta1}", of_controls.get(rule)) for rule in rules]
        assert f"| {beta1} |" + "".join(f" {loss:.3f} |" if loss else " |" for loss in losses) in LINES


def test_short_answer_is_of_both_texts():
    """AdamW has its best beta1 in each, Muon and MARS-M the rates of the first."""
    leads, behind = [], []
    for losses in map(mean_losses, (published.by_contender(runs_at_the_best_beta1()), further_runs("betas_headers"))):
        of_adamw = min(loss for arm, loss in losses.items() if arm.startswith("adamw"))
        leads += [of_adamw - losses[arm] for arm in ("muon", "mars_m")]
        behind += [losses["nadamw 0.8"] - min(loss for arm, loss in losses.items() if "adamw" in arm)]
    text = " ".join(LINES)
    lead = f"end {min(leads):.2f} to {max(leads):.2f} nats per token below"
    assert f"{lead} AdamW at its best `beta1`" in text and f"MARS-M and Muon {lead} a tuned AdamW" in text
    assert f"within {max(behind):.3f} of the best elementwise rule on both texts" in text
    assert all(row.endswith(", no |") for row in answers("betas_headers") if row.startswith("| mars_adamw"))
