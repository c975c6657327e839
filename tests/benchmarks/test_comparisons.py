"""The shipped comparisons: runs of the presets, with numbers that follow from the runs and that the pages show."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pretraining.compare import comparison, page, presets

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
    runs: list[comparison.Run]
    preset: presets.Preset
    seeds: int


@pytest.fixture(params=SHIPPED)
def shipped(request) -> Shipped:
    name, seeds = SHIPPED[request.param]
    result = json.loads((ROOT / "benchmarks" / "results" / f"{request.param}.json").read_text())
    return Shipped(result, _load(request.param), presets.load(name).only(list(result["arms"])), seeds)


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
            saved_gap = {name: against[name] for name in ("mean", "low", "high", "p")}
            if shipped.seeds > 1:
                assert {name: getattr(gap, name) for name in saved_gap} == pytest.approx(saved_gap, rel=1e-6), gap


def test_pages_show_every_arm(shipped):
    """Arms along an axis as the grid of their losses, others with their differences to the baseline."""
    preset, runs = shipped.preset, shipped.runs
    if preset.axis is not None:
        grid = page.grid_table(page.lines_of(runs, preset), preset.axis)
        assert grid in "\n".join(LINES)
        return
    gaps = {gap.contender: gap for gap in comparison.differences(runs, preset.baseline)}
    for row in comparison.summarize(runs, preset.baseline):
        loss, gap = f"{row.loss:.3f}", gaps.get(row.contender)
        cells = [f"{loss}, {_interval(gap)} |", f"{loss} | {_interval(gap)} |"] if gap else [f"{loss} |"]
        lines = [line for line in LINES if line.startswith(f"| {row.contender} |")]
        assert any(cell in line for cell in cells for line in lines), (row, lines)


def test_controls_show_every_pair():
    """With what is shown, also by Holm's correction."""
    first, second = (_pairs(name) for name in ("controls_embedded", "controls_headers"))
    assert len(first) == 13
    rows = [f"| {arm} | {against} | {first[arm, against]} | {second[arm, against]} |" for arm, against in first]
    assert [row for row in rows if row not in LINES] == []


def test_other_pairs_are_those_of_the_runs():
    known = {f"| {' | '.join(pair)} | {cell} |" for name in SHIPPED for pair, cell in _pairs(name).items()}
    lines = (ROOT / "docs" / "other_settings.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.endswith((", yes |", ", no |", ", alone |"))]
    assert len(rows) > 20 and [row for row in rows if row not in known] == []


def test_readme_has_the_losses_of_the_picture():
    runs = [comparison.by_contender(_load(name)) for name in ("controls_embedded", "controls_headers")]
    names = {"adamw": "AdamW", "nadamw": "NAdamW", "mars_adamw": "MARS-AdamW", "muon": "Muon", "mars_m": "MARS-M"}
    for arm, name in names.items():
        losses = [statistics.fmean(run.eval_loss for run in text[arm]) for text in runs]
        assert f"| {name} | {losses[0]:.3f} | {losses[1]:.3f} |" in LINES


def _load(name: str) -> list[comparison.Run]:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return [comparison.Run(**{**run, "curve": tuple(map(tuple, run["curve"]))}) for run in result["runs"]]


def _pairs(name: str) -> dict[tuple[str, str], str]:
    runs, preset = _load(name), presets.load(SHIPPED[name][0])
    gaps = comparison.differences(runs, preset.baseline, preset.pairs)
    return {
        (gap.contender, gap.against): f"{_interval(gap)}, {SHOWN[gap.shown]}"
        for gap in gaps
        if (gap.contender, gap.against) in preset.pairs
    }


def _interval(gap: comparison.Difference) -> str:
    return f"{gap.mean:+.3f} ± {(gap.high - gap.low) / 2:.3f}"


def test_second_corpus_is_another_one():
    """None of its tokens were seen by the search for rates."""
    first, second = (
        json.loads((ROOT / "benchmarks" / "results" / f"controls_{name}.json").read_text())["data"][0]
        for name in ("embedded", "headers")
    )
    assert first["dataset"] != second["dataset"] and first["train tokens"] != second["train tokens"]
