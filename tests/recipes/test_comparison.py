"""Statistics, tables and pictures of a comparison, from runs made by hand."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from PIL import Image
from pretraining.compare import comparison, figures, page
from pretraining.compare.comparison import Run
from pretraining.compare.presets import Preset


def run(arm: str, seed: int, losses: list[float], *, lr: float = 1e-3, speed: float = 100.0) -> Run:
    curve = tuple((10 * index, loss) for index, loss in enumerate(losses))
    return Run(arm, seed, lr, losses[-1], speed, curve)


def of(arm: str, losses: list[float]) -> list[Run]:
    return [run(arm, seed, [8.0, loss]) for seed, loss in enumerate(losses)]


RUNS = [
    run("mars_adamw", 1, [8.0, 5.0, 4.2, 4.0], lr=2e-3, speed=80.0),
    run("adamw", 1, [8.0, 6.0, 4.9, 4.5], speed=100.0),
    run("mars_adamw", 2, [8.0, 5.2, 4.4, 4.2], lr=2e-3, speed=60.0),
    run("adamw", 2, [8.0, 6.0, 4.8, 4.4], speed=140.0),
]
ARMS = {"mars_adamw": {"optimizer": "mars_adamw"}, "adamw": {"optimizer": "adamw"}}


def write(folder, runs, arms=ARMS, **settings) -> tuple[str, dict]:
    """Write a page; return it with single spaces, and its numbers."""
    page.write(folder, Preset(arms), runs, **settings)
    text = (folder / "comparison.md").read_text()
    return "\n".join(" ".join(line.split()) for line in text.splitlines()), json.loads(
        (folder / "comparison.json").read_text()
    )


def test_rows():
    mars, adamw = comparison.summarize(RUNS, "adamw")
    assert (mars.contender, mars.learning_rate, mars.seeds, mars.diverged) == ("mars_adamw", 2e-3, 2, 0)
    assert (mars.loss, mars.lowest, mars.highest) == (pytest.approx(4.1), 4.0, 4.2)
    assert (mars.steps, mars.steps_to_baseline) == (30, 20)  # means 8, 5.1, 4.3, 4.1; adamw ends at 4.45
    assert mars.speed == pytest.approx(70 / 120)
    assert (adamw.steps_to_baseline, adamw.speed) == (30, 1)


def test_page(tmp_path):
    text, numbers = write(tmp_path, RUNS, arguments=["--max_steps", "30"])
    assert "| mars_adamw | 0.002 | 4.100 (4.000-4.200) | -0.350 (-2.256 to +1.556) | 20 of 30 (67%) | 0.58x |" in text
    assert "| adamw | 0.001 | 4.450 (4.400-4.500) | - | 30 of 30 (100%) | - |" in text
    assert "| mars_adamw | adamw | -0.350 (-2.256 to +1.556) | no | 2.450 |" in text
    assert "Seeds 1, 2; settings: --max_steps 30." in text and numbers["machine"]["cpu"] in text
    assert [Run.from_json(fields) for fields in numbers["runs"]] == RUNS
    with Image.open(tmp_path / "comparison.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(maxcolors=1 << 20)}
    assert (120, 173, 210) in colors  # the bar of mars_adamw: its blue at 0.6 over white


def test_diverged_runs(tmp_path):
    diverged = [replace(one, eval_loss=math.nan, tokens_per_second=math.nan, curve=()) for one in RUNS]
    text, numbers = write(tmp_path, [diverged[0], *RUNS[1:]])
    assert "| 1 of 2 diverged (others 4.200-4.200) |" in text and "| mars_adamw | adamw | diverged |" in text
    assert numbers["runs"][0]["eval_loss"] is None and numbers["rows"][0]["loss"] is None
    again = Run.from_json(numbers["runs"][0])
    assert math.isnan(again.eval_loss) and again.curve == ()
    text, _ = write(tmp_path, [RUNS[0], diverged[1], RUNS[2], diverged[3]])  # the baseline
    assert "| 2 of 2 diverged |" in text and "nan" not in text


def test_unfinished_comparison(tmp_path):
    """Seeds that the baseline lacks wait."""
    text, numbers = write(tmp_path, [*RUNS[:2], RUNS[2]], missing=1)
    assert "3 of 4 runs so far." in text and "-0.500 (one seed)" in text
    assert len(numbers["runs"]) == 3 and numbers["rows"][0]["seeds"] == 1
    assert numbers["differences"][0]["low"] is None and numbers["differences"][0]["shown"] == "no"


def test_interval_is_paired_by_seed():
    """Gaps of -0.1, -0.2, -0.3: a mean of -0.2, a standard error of 0.1 / sqrt(3), and t(0.975, 2) = 4.302653."""
    base, mars = of("adamw", [4.0, 5.0, 6.0]), of("mars_adamw", [3.9, 4.8, 5.7])
    gap = comparison.difference(list(reversed(mars)), base)
    error = 0.1 / math.sqrt(3)
    assert gap.mean == pytest.approx(-0.2)
    assert (gap.low, gap.high) == (pytest.approx(-0.2 - 4.302653 * error), pytest.approx(-0.2 + 4.302653 * error))
    assert gap.p == pytest.approx(0.0741799)  # of t = 3.4641 with 2 degrees of freedom
    assert comparison.difference(mars[:2], base).mean == pytest.approx(-0.15)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_detectable_difference_is_shown_four_times_in_five(seeds):
    """Of 200,000 comparisons with that true difference; differences of seeds have a standard deviation of 1."""
    gap = comparison.difference(of("a", list(range(seeds))), of("b", [0.0] * seeds))  # any spread
    spread = statistics.stdev(range(seeds))
    gaps = torch.randn(200_000, seeds, generator=torch.Generator().manual_seed(0)) + gap.detectable / spread
    limit = (gap.high - gap.mean) / (spread / math.sqrt(seeds))  # Student's t
    ratio = gaps.mean(1) / (gaps.std(1) / math.sqrt(seeds))
    assert float((ratio.abs() > limit).float().mean()) == pytest.approx(0.8, abs=0.005)


def test_holm():
    assert comparison.holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.04, 0.09, 0.09, math.nan], nan_ok=True)
    assert comparison.holm([0.02, 0.9, 0.8]) == pytest.approx([0.06, 1.0, 1.0])  # in order, and 1 at most
    assert comparison.holm([]) == []


def test_differences():
    runs = [*of("adamw", [4.4, 4.5, 4.6]), *of("muon", [4.0, 4.1, 4.2001]), *of("mars_m", [4.3, 4.41, 4.57])]
    runs += [*of("lion", [4.39, 4.53, 4.58]), run("late", 9, [4.0])]
    gaps = comparison.differences(runs, "adamw", [("mars_m", "muon"), ("late", "muon")])
    assert [(gap.contender, gap.against) for gap in gaps] == [  # late shares no seed
        *(("muon", "adamw"), ("mars_m", "adamw"), ("lion", "adamw"), ("mars_m", "muon"))
    ]
    assert [gap.shown for gap in gaps] == ["yes", "no", "no", "yes"]
    assert gaps[0].holm == pytest.approx(4 * gaps[0].p)
    assert gaps[0]._replace(holm=0.06).shown == "not by Holm"


def test_curve_has_the_steps_of_all_seeds():
    resumed = Run("adamw", 2, 1e-3, 4.0, 100.0, ((0, 8.0), (7, 5.5), (10, 5.0)))  # evaluated again where it resumed
    assert comparison.mean_curve([run("adamw", 1, [8.0, 4.0]), resumed]) == [(0, 8.0), (10, 4.5)]


def test_sensitivity():
    """Losses 5, 4, and one that diverged or rose and counts as no training, 8: 17 / 3 - 4."""
    assert comparison.sensitivity({1e-3: 5.0, 2e-3: 4.0, 4e-3: math.nan}, 8.0) == pytest.approx(17 / 3 - 4)
    assert comparison.sensitivity({1e-3: 5.0, 2e-3: 4.0, 4e-3: 11.0}, 8.0) == pytest.approx(17 / 3 - 4)


def test_loss_that_is_never_reached(tmp_path):
    text, _ = write(tmp_path, [run("adamw", 1, [8.0, 4.0]), run("mars_adamw", 1, [8.0, 4.1])])
    assert "| not reached in 10 |" in text


def test_grid_table():
    lines = {"adamw": [(4e-3, [4.6, 4.7]), (1e-3, [5.0, 5.1])], "mars_m": [(4e-3, [math.nan]), (2e-2, [4.5])]}
    assert page.grid_table(lines, "learning_rate").splitlines() == [
        "| learning_rate | 0.001 |    0.004 |  0.02 |",
        "| ------------- | ----: | -------: | ----: |",
        "| adamw         | 5.050 |    4.650 |       |",
        "| mars_m        |       | diverged | 4.500 |",
    ]


def test_betas_are_spaced_by_the_length_of_their_averages(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.along_axis({"adamw": [(beta, [4.0]) for beta in (0.6, 0.8, 0.9, 0.95)]}, "beta1", tmp_path / "axis.png")
    axes = drawn[0].axes[0]
    places = [axes.transData.transform((beta, 4.0))[0] for beta in (0.6, 0.8, 0.9, 0.95)]
    first, *others = [high - low for low, high in itertools.pairwise(places)]
    assert others == pytest.approx([first] * 2)
    figures.plt.close(drawn[0])
