"""The shipped comparisons: their runs are those of the presets, and the page shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pretraining.compare import comparison, comparison_page, comparison_tables, presets

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
    by_name = comparison.by_contender(shipped.runs)
    assert set(by_name) == set(shipped.result["arms"]) == set(shipped.preset.arms)
    seeds = {run.seed for run in shipped.runs}
    assert len(seeds) >= shipped.seeds
    for name, own in by_name.items():
        assert shipped.result["arms"][name] == shipped.preset.arms[name]
        assert {run.seed for run in own} == seeds and len(own) == len(seeds)
        assert {run.learning_rate for run in own} == {shipped.preset.arms[name]["learning_rate"]}


def test_data_and_machine_are_stated(shipped):
    (data,) = shipped.result["data"]
    assert data["dataset"] and len(data["train tokens"]) == 64
    assert {"cpu", "torch", "transformers"} <= set(shipped.result["machine"])


def test_verdicts_follow_from_the_runs(shipped):
    found = comparison.verdicts(shipped.runs, shipped.preset.baseline, shipped.preset.pairs)
    assert shipped.result["verdicts"] == found


def test_the_page_shows_every_arm(shipped):
    """Arms along an axis as the grid of their losses, others with their differences to the baseline."""
    preset, runs = shipped.preset, shipped.runs
    if preset.axis is not None:
        expected = [comparison_tables.grid(comparison_page.lines_of(runs, preset), preset.axis)]
    else:
        expected = [_row(row, preset.baseline) for row in comparison.summarize(runs, preset.baseline)]
    assert [text for text in expected if text not in PAGE] == []


def _row(row: comparison.Row, baseline: str | None) -> str:
    gap = row.against_baseline
    against = "" if row.contender == baseline else f" {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
    return f"| {row.loss:.3f} ({row.lowest:.3f} to {row.highest:.3f}) |{against} |"


def test_the_page_shows_the_pairs(shipped):
    """With what is shown, also by Holm's correction, and what these seeds would show."""
    differences = comparison.compared(shipped.runs, shipped.preset.baseline, shipped.preset.pairs)
    rows = [
        f"| {one.contender} | {one.against} | {one.gap.mean:+.3f} ({one.gap.low:+.3f} to {one.gap.high:+.3f}) "
        f"| {one.shown} | {one.gap.detectable:.3f} |"
        for one in differences
        if (one.contender, one.against) in shipped.preset.pairs
    ]
    assert len(rows) == len(shipped.preset.pairs)
    assert [row for row in rows if row not in PAGE] == []


def test_the_second_corpus_is_another_one():
    """None of its tokens were seen by the search for rates."""
    first, second = (
        json.loads((ROOT / "benchmarks" / "results" / f"controls_{name}.json").read_text())["data"][0]
        for name in ("embedded", "headers")
    )
    assert first["dataset"] != second["dataset"] and first["train tokens"] != second["train tokens"]
