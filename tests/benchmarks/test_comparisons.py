"""The shipped comparisons: runs of the presets, with numbers that follow from the runs and that the pages show."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest
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
    "betas_headers": ("betas", 5),
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


def test_page_shows_the_additions():
    """Losses and differences from the runs; the rate of each arm is best among its neighbours in the search."""
    results = ROOT / "benchmarks" / "results"
    shipped = json.loads((results / "additions_embedded.json").read_text())
    runs = [comparison.FinishedRun(**{**run, "curve": tuple(map(tuple, run["curve"]))}) for run in shipped["runs"]]
    preset = presets.load("additions")
    assert shipped["arms"] == preset.arms and len(runs) == 3 * len(preset.arms)
    gaps = {gap.contender: gap for gap in comparison.differences(runs, preset.baseline)}
    for row in comparison.summarize(runs, preset.baseline):
        gap = gaps.get(row.contender)
        assert f"| {row.contender} | {row.loss:.3f} | {'' if gap is None else f'{interval(gap)} '}|" in LINES
    searched = json.loads((results / "tune_additions.json").read_text())["runs"]
    for arm in gaps:
        losses = {run["learning_rate"]: run["eval_loss"] for run in searched if run["arm"] == arm}
        best = min(losses, key=losses.__getitem__)
        settings = SEARCHES["additions"]["arms"][arm]["settings"]
        assert {**settings, "learning_rate": best} == preset.arms[arm]
        assert {best / 2, 2 * best} <= losses.keys()


def test_pages_show_pairs_of_controls():
    first, second = (load(f"controls_{name}") for name in ("embedded", "headers"))
    rows = [
        f"| {arm} | {against} | {cell} | {second.pairs[arm, against]} |" for (arm, against), cell in first.pairs.items()
    ]
    assert len(rows) == 13 and [row for row in rows if row not in LINES] == []
    known = {f"| {' | '.join(pair)} | {cell} |" for name in SHIPPED for pair, cell in load(name).pairs.items()}
    lines = (ROOT / "docs" / "other_settings.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.endswith((", yes |", ", no |", ", alone |"))]
    assert len(rows) > 20 and [row for row in rows if row not in known] == []
    # The second corpus is another one: none of its tokens were seen by the search for rates.
    (one,), (other,) = first.result["data"], second.result["data"]
    assert one["dataset"] != other["dataset"] and one["train tokens"] != other["train tokens"]


def test_readme_has_the_loss_of_adamw_tuned_further():
    runs = comparison.by_contender(load("betas_embedded").runs)["adamw 0.8"]
    loss = statistics.fmean(run.eval_loss for run in runs)
    assert f"(`beta1` 0.8) ends at {loss:.3f} on Python" in " ".join(LINES)
    assert load("betas_embedded").pairs["mars_adamw 0.8", "adamw 0.8"].endswith(", no")
