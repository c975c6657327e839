"""The shipped comparison of the controls: its runs are those of the preset, and the page shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pretraining import comparison, presets

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "controls_embedded.json").read_text())
RUNS = [comparison.Run(**{**run, "curve": tuple(map(tuple, run["curve"]))}) for run in RESULT["runs"]]
PRESET = presets.load("controls")


def test_every_arm_has_the_settings_and_seeds_of_the_preset():
    by_name = comparison.by_contender(RUNS)
    assert set(by_name) == set(RESULT["arms"]) >= {"adamw", "nadamw", "mars_adamw", "muon", "mars_m"}
    for name, own in by_name.items():
        assert RESULT["arms"][name] == PRESET.arms[name]
        assert sorted(run.seed for run in own) == list(PRESET.seeds)
        assert {run.learning_rate for run in own} == {PRESET.arms[name]["learning_rate"]}


def test_verdicts_follow_from_the_runs():
    pairs = PRESET.only(list(RESULT["arms"])).pairs
    assert RESULT["verdicts"] == comparison.verdicts(RUNS, PRESET.baseline, pairs)


def test_the_page_shows_the_result():
    page = (ROOT / "docs" / "does_it_help.md").read_text()
    for row in comparison.summarize(RUNS, PRESET.baseline):
        gap = row.against_baseline
        numbers = f"{row.loss:.3f} ({row.lowest:.3f} to {row.highest:.3f})"
        against = "" if row.contender == PRESET.baseline else f" {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
        assert f"| {numbers} |{against} |" in page, row.contender


@pytest.mark.parametrize(("one", "other"), PRESET.only(list(RESULT["arms"])).pairs)
def test_the_page_shows_the_pairs(one, other):
    by_name = comparison.by_contender(RUNS)
    gap = comparison.difference(by_name[one], by_name[other])
    page = (ROOT / "docs" / "does_it_help.md").read_text()
    assert f"| {one} | {other} | {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f}) |" in page
