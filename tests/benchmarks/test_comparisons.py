"""The shipped comparisons: runs of the presets, with numbers that follow from the runs and that the pages show."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pretraining.compare import comparison, page, presets
from tune import SEARCHES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["../README.md", "does_it_help.md", "controls.md", "other_settings.md"]
LINES = [line for page in PAGES for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()]
SHOWN = {"yes": "yes", "no": "no", "not by Holm": "alone"}
# Name of the file in benchmarks/results to its preset and least number of seeds.
SHIPPED = {
    "controls_embedded": ("controls", 5),
    "controls_headers": ("controls", 5),
    "gamma_embedded": ("gamma", 3),
    "betas_embedded": ("betas", 3),
    "batch_embedded": ("batch", 2),
    "time_embedded": ("time", 3),
    "lr_embedded": ("lr", 1),
    "parts_embedded": ("parts", 5),
}


class Shipped(NamedTuple):
    """A comparison as its file has it, and the preset that it ran."""

    result: dict[str, Any]
    runs: list[comparison.FinishedRun]
    preset: presets.Preset

    @property
    def pairs(self) -> dict[tuple[str, str], str]:
        """The cells of the preset's pairs on the pages, with what is shown, also by Holm's correction."""
        gaps = comparison.differences(self.runs, self.preset.baseline, self.preset.pairs)
        cells = {(gap.contender, gap.against): f"{interval(gap)}, {SHOWN[gap.shown]}" for gap in gaps}
        return {pair: cells[pair] for pair in cells if pair in self.preset.pairs}


def load(name: str) -> Shipped:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    runs = [comparison.FinishedRun(**{**run, "curve": tuple(map(tuple, run["curve"]))}) for run in result["runs"]]
    return Shipped(result, runs, presets.load(SHIPPED[name][0]).only(list(result["arms"])))


def interval(gap: comparison.Difference) -> str:
    return f"{gap.mean:+.3f} ± {(gap.high - gap.low) / 2:.3f}"


@pytest.mark.parametrize("name", SHIPPED)
def test_runs_of_the_preset(name):
    """With all seeds; data and machine are stated. Another implementation of the statistics wrote the files."""
    (result, runs, preset), (_, least) = load(name), SHIPPED[name]
    seeds = {run.seed for run in runs}
    expected = {(arm, seed, own["learning_rate"]) for arm, own in preset.arms.items() for seed in seeds}
    assert {(run.contender, run.seed, run.learning_rate) for run in runs} == expected and len(runs) == len(expected)
    assert result["arms"] == preset.arms and len(seeds) >= least
    (data,) = result["data"]
    assert data["dataset"] and len(data["train tokens"]) == 64
    assert {"cpu", "torch", "transformers"} <= set(result["machine"])
    gaps = {gap.contender: gap for gap in comparison.differences(runs, preset.baseline)}
    for row, saved in zip(comparison.summarize(runs, preset.baseline), result["rows"], strict=True):
        against = saved.pop("against_baseline")
        assert row._asdict() == pytest.approx(saved)
        if row.contender in gaps and least > 1:
            numbers = {key: getattr(gaps[row.contender], key) for key in ("mean", "low", "high", "p")}
            assert numbers == pytest.approx({key: against[key] for key in numbers}, rel=1e-6), row


@pytest.mark.parametrize("name", SHIPPED)
def test_pages_show_every_arm(name):
    """Arms along an axis as the grid of their losses, others with their differences to the baseline."""
    _, runs, preset = load(name)
    if preset.axis is not None:
        assert page.grid_table(page.lines_of(runs, preset), preset.axis) in "\n".join(LINES)
        return
    gaps = {gap.contender: gap for gap in comparison.differences(runs, preset.baseline)}
    for row in comparison.summarize(runs, preset.baseline):
        loss, gap = f"{row.loss:.3f}", gaps.get(row.contender)
        cells = [f"{loss}, {interval(gap)} |", f"{loss} | {interval(gap)} |"] if gap else [f"{loss} |"]
        lines = [line for line in LINES if line.startswith(f"| {row.contender} |")]
        assert any(cell in line for cell in cells for line in lines), (row, lines)


def results_of(search: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"tune_{search}.json").read_text())["runs"]


def further_runs(search: str) -> dict[str, list[comparison.FinishedRun]]:
    """Those with further seeds, by arm, beside the arms of the controls with the same seeds and text."""
    runs = list(load("controls_headers" if search == "betas_headers" else "controls_embedded").runs)
    for row in results_of(search):
        if "curve" in row:
            own = row["arm"], row["seed"], row["learning_rate"], row["eval_loss"], math.nan
            runs.append(comparison.FinishedRun(*own, tuple(map(tuple, row["curve"]))))
    return comparison.by_contender(runs)


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
    gaps = [comparison.difference(arms[arm], arms[against]) for arm, against in questions]
    corrected = comparison.holm([gap.p for gap in gaps])
    shown = [SHOWN[gap._replace(holm=p).shown] for gap, p in zip(gaps, corrected, strict=True)]
    return [
        f"| {gap.contender} | {gap.against} | {interval(gap)}, {word} |" for gap, word in zip(gaps, shown, strict=True)
    ]


@pytest.mark.parametrize("search", QUESTIONS)
def test_page_answers_the_questions(search):
    assert [row for row in answers(search) if row not in LINES] == []


def test_page_shows_how_far_decay_shrinks():
    """Over a warmup, and a cosine to a share of the rate."""
    job = yaml.safe_load((ROOT / "recipes" / "configs" / "embedded.yaml").read_text())
    mean = (1 + job["lr_scheduler_kwargs"]["min_lr_rate"]) / 2
    steps = job["warmup_steps"] / 2 + mean * (job["max_steps"] - job["warmup_steps"])
    arms = [presets.load("controls").arms[name] for name in ("adamw", "mars_m", "muon")]
    kept = [math.exp(-arm["learning_rate"] * arm["weight_decay"] * steps) for arm in arms]
    shares = [round(100 * (1 - share)) for share in kept]
    assert "by {} % with AdamW, {} % with MARS-M and {} % with Muon".format(*shares) in " ".join(LINES)


def test_additions_are_all_that_differs_from_the_controls():
    controls = presets.load("controls").arms
    plain = {**controls, "mars_muon": {**controls["muon"], "optimizer": "mars_muon"}}
    for arm, spec in SEARCHES["additions"]["arms"].items():
        control = plain[arm.split()[0]]
        settings = {**spec["settings"], "weight_decay": SEARCHES["additions"]["common"]["weight_decay"]}
        added = {settings.pop("weight_decay_mode", "standard"), settings.pop("normalize_rows", None)}
        assert settings == {key: control[key] for key in control.keys() - {"learning_rate"}}, arm
        assert added == {"cautious" if "cautious" in arm else "standard", 0.95 if "rows" in arm else None}, arm
        best = 0.008 if arm == "mars_muon rows" else control["learning_rate"]
        assert {run.learning_rate for run in further_runs("additions")[arm]} == {best}, arm
    (rows,) = [row for row in answers("additions") if row.startswith("| mars_muon rows ")]
    change = rows.split("| -")[1].split(",")[0]
    assert f"lowers muon's loss by {change}." in (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")


def test_decay_is_all_that_differs_from_the_controls():
    for arm, spec in SEARCHES["decay"]["arms"].items():
        control = presets.load("controls").arms[arm.partition(",")[0]]
        settings, decays = spec["settings"], {"weight_decay", "weight_decay_1d"}
        same = control.keys() - decays - {"learning_rate"}
        assert {key: settings[key] for key in settings.keys() - decays} == {key: control[key] for key in same}, arm
        assert set(map(tuple, spec["grid"].values())) == {(control["learning_rate"],)}, arm
        if arm.endswith("no decay"):
            assert {settings.get(key, 0.0) for key in decays} == {0.0}, arm
        else:
            of_adamw = presets.load("controls").arms["adamw"]
            shrinkage = of_adamw["learning_rate"] * of_adamw["weight_decay"]
            assert settings["weight_decay"] * control["learning_rate"] == pytest.approx(shrinkage)
            assert settings["weight_decay_1d"] == control["weight_decay_1d"]


def test_pages_show_pairs_of_controls():
    first, second = (load(f"controls_{name}") for name in ("embedded", "headers"))
    rows = [
        f"| {arm} | {against} | {cell} | {second.pairs[arm, against]} |" for (arm, against), cell in first.pairs.items()
    ]
    assert len(rows) == 13 and [row for row in rows if row not in LINES] == []
    known = {f"| {' | '.join(pair)} | {cell} |" for name in SHIPPED for pair, cell in load(name).pairs.items()}
    known |= {row for search in QUESTIONS for row in answers(search)}
    lines = (ROOT / "docs" / "other_settings.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.endswith((", yes |", ", no |", ", alone |"))]
    assert len(rows) > 20 and [row for row in rows if row not in known] == []
    # The second corpus is another one: none of its tokens were seen by the search for rates.
    (one,), (other,) = first.result["data"], second.result["data"]
    assert one["dataset"] != other["dataset"] and one["train tokens"] != other["train tokens"]


def runs_at_the_best_beta1() -> list[comparison.FinishedRun]:
    """Those of the search, beside arms of the controls."""
    arms = further_runs("betas")
    searched = {row["arm"] for row in results_of("betas")}
    return [run for arm in ("adamw", "nadamw", "muon", "mars_m", *searched) for run in arms.get(arm, [])]


def test_page_shows_arms_at_their_best_beta1():
    runs = runs_at_the_best_beta1()
    by_arm = comparison.by_contender(runs)
    gaps = {gap.contender: gap for gap in comparison.differences(runs, "adamw 0.8")}
    rows = {row.contender: row for row in comparison.summarize(runs, "adamw 0.8")}
    for arm, row in rows.items():
        steps = row.steps_to_baseline or "not reached"
        difference = f", {interval(gaps[arm])}, {SHOWN[gaps[arm].shown]}" if arm in gaps else ""
        assert row.seeds == 5 and f"| {arm} | {row.loss:.3f}{difference} | {steps} |" in LINES
    assert gaps["mars_adamw 0.8"].shown == "no"
    nesterov = "mars_adamw, gamma 1 - beta1 0.8"
    lead = f"Nesterov momentum, it ends {-gaps[nesterov].mean:.3f} lower on the first text only, level with NAdamW"
    level = [comparison.difference(by_arm[nesterov], by_arm[arm]) for arm in ("nadamw", "nadamw 0.8")]
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


def mean_losses(arms: dict[str, list[comparison.FinishedRun]]) -> dict[str, float]:
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
    for losses in map(mean_losses, (comparison.by_contender(runs_at_the_best_beta1()), further_runs("betas_headers"))):
        of_adamw = min(loss for arm, loss in losses.items() if arm.startswith("adamw"))
        leads += [of_adamw - losses[arm] for arm in ("muon", "mars_m")]
        behind += [losses["nadamw 0.8"] - min(loss for arm, loss in losses.items() if "adamw" in arm)]
    text = " ".join(LINES)
    assert f"end {min(leads):.2f} to {max(leads):.2f} nats per token below AdamW at its best `beta1`" in text
    assert f"MARS-M and Muon end {min(leads):.2f} nats per token below" in text
    assert f"within {max(behind):.3f} of the best elementwise rule on both texts" in text
    assert all(row.endswith(", no |") for row in answers("betas_headers") if row.startswith("| mars_adamw"))
