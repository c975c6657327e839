"""The shipped comparisons: runs of the presets, with numbers that follow from the runs and that the page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pretraining.compare import comparison, page, presets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "does_it_help.md").read_text(encoding="utf-8")
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
    runs: list[comparison.Run]
    preset: presets.Preset
    seeds: int


@pytest.fixture(params=SHIPPED)
def shipped(request) -> Shipped:
    name, seeds = SHIPPED[request.param]
    result = json.loads((ROOT / "benchmarks" / "results" / f"{request.param}.json").read_text())
    runs = [comparison.Run.from_json(run) for run in result["runs"]]
    return Shipped(result, runs, presets.load(name).only(list(result["arms"])), seeds)


def test_every_arm_has_the_settings_of_the_preset_and_all_seeds(shipped):
    arms = comparison.by_contender(shipped.runs)
    assert set(arms) == set(shipped.result["arms"]) == set(shipped.preset.arms)
    seeds = {run.seed for run in shipped.runs}
    assert len(seeds) >= shipped.seeds
    for name, runs in arms.items():
        assert shipped.result["arms"][name] == shipped.preset.arms[name]
        assert {run.seed for run in runs} == seeds and len(runs) == len(seeds)
        assert {run.learning_rate for run in runs} == {shipped.preset.arms[name]["learning_rate"]}


def test_data_and_machine_are_stated(shipped):
    (data,) = shipped.result["data"]
    assert data["dataset"] and len(data["train tokens"]) == 64
    assert {"cpu", "torch", "transformers"} <= set(shipped.result["machine"])


def test_numbers_follow_from_the_runs(shipped):
    """The files were written by another implementation of the statistics."""
    preset = shipped.preset
    gaps = {gap.contender: gap for gap in comparison.differences(shipped.runs, preset.baseline)}
    for row, saved in zip(comparison.summarize(shipped.runs, preset.baseline), shipped.result["rows"], strict=True):
        against = saved.pop("against_baseline")
        assert row._asdict() == pytest.approx(saved)
        if gap := gaps.get(row.contender):
            saved_gap = {name: against[name] for name in ("mean", "low", "high", "p", "detectable")}
            if shipped.seeds > 1:
                assert {name: getattr(gap, name) for name in saved_gap} == pytest.approx(saved_gap, rel=1e-6), gap


def test_page_shows_every_arm(shipped):
    """Arms along an axis as the grid of their losses, others with their differences to the baseline."""
    preset, runs = shipped.preset, shipped.runs
    gaps = {gap.contender: gap for gap in comparison.differences(runs, preset.baseline)}
    if preset.axis is not None:
        expected = [page.grid_table(page.lines_of(runs, preset), preset.axis)]
    else:
        expected = [_row(row, gaps.get(row.contender)) for row in comparison.summarize(runs, preset.baseline)]
    assert [text for text in expected if text not in PAGE] == []


def _row(row: comparison.Row, gap: comparison.Difference | None) -> str:
    against = f" {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})" if gap else ""
    return f"| {row.loss:.3f} ({row.lowest:.3f} to {row.highest:.3f}) |{against} |"


def test_page_shows_the_pairs(shipped):
    """With what is shown, also by Holm's correction, and what these seeds would show."""
    rows = [
        f"| {gap.contender} | {gap.against} | {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f}) "
        f"| {gap.shown} | {gap.detectable:.3f} |"
        for gap in comparison.differences(shipped.runs, shipped.preset.baseline, shipped.preset.pairs)
        if (gap.contender, gap.against) in shipped.preset.pairs
    ]
    assert len(rows) == len(shipped.preset.pairs)
    assert [row for row in rows if row not in PAGE] == []


def test_second_corpus_is_another_one():
    """None of its tokens were seen by the search for rates."""
    first, second = (
        json.loads((ROOT / "benchmarks" / "results" / f"controls_{name}.json").read_text())["data"][0]
        for name in ("embedded", "headers")
    )
    assert first["dataset"] != second["dataset"] and first["train tokens"] != second["train tokens"]
