"""Rows, table, verdicts and picture of a comparison, from runs made by hand."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from PIL import Image
from pretraining.compare import comparison, comparison_tables, figures
from pretraining.compare.comparison import Run
from scipy import stats


def run(contender: str, seed: int, losses: list[float], *, lr: float = 1e-3, speed: float = 100.0) -> Run:
    curve = tuple((10 * index, loss) for index, loss in enumerate(losses))
    return Run(contender, seed, lr, losses[-1], speed, curve)


RUNS = [
    run("mars_adamw", 1, [8.0, 5.0, 4.2, 4.0], lr=2e-3, speed=80.0),
    run("adamw", 1, [8.0, 6.0, 4.9, 4.5], speed=100.0),
    run("mars_adamw", 2, [8.0, 5.2, 4.4, 4.2], lr=2e-3, speed=60.0),
    run("adamw", 2, [8.0, 6.0, 4.8, 4.4], speed=140.0),
]


def test_rows_are_measured_against_adamw():
    mars, adamw = comparison.summarize(RUNS)
    assert (mars.contender, mars.learning_rate, mars.seeds) == ("mars_adamw", 2e-3, 2)
    assert (mars.loss, mars.lowest, mars.highest) == (pytest.approx(4.1), 4.0, 4.2)
    assert mars.against_baseline.mean == pytest.approx(4.1 - 4.45)
    # Means: 8, 5.1, 4.3, 4.1; adamw ends at 4.45.
    assert (mars.steps, mars.steps_to_baseline) == (30, 20)
    assert mars.speed == pytest.approx(70 / 120)
    assert (adamw.against_baseline.mean, adamw.steps_to_baseline, adamw.speed) == (0, 30, 1)


def test_a_contender_that_diverged_with_some_seeds_shows_the_others():
    runs = [replace(RUNS[0], eval_loss=math.nan, curve=()), *RUNS[1:]]
    mars, _ = comparison_tables.table(comparison.summarize(runs)).splitlines()[2:]
    assert "| 1 of 2 diverged (others 4.200-4.200) |" in " ".join(mars.split())


def test_p_values_are_scipys_and_holms_by_hand():
    one, other = [4.0, 4.1, 4.25], [4.4, 4.45, 4.5]
    (found,) = comparison.compared([*of("mars_adamw", one), *of("adamw", other)])
    assert found.gap.p == pytest.approx(stats.ttest_rel(one, other).pvalue)
    assert comparison.holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.04, 0.09, 0.09, math.nan], nan_ok=True)
    assert comparison.holm([0.02, 0.9, 0.8]) == pytest.approx([0.06, 1.0, 1.0])  # in order, and 1 at most
    assert comparison.holm([]) == []


def test_differences_say_what_survives_a_correction():
    runs = [*of("adamw", [4.4, 4.5, 4.6]), *of("muon", [4.0, 4.1, 4.2001]), *of("mars_m", [4.3, 4.41, 4.57])]
    runs += [*of("lion", [4.39, 4.53, 4.58]), *of("nadamw", [math.nan, 4.1, 4.2])]
    header, _, *lines = comparison_tables.differences_table(comparison.compared(runs)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *lines)]
    assert cells[0][3:] == ["shown", "would show"]
    assert [(line[0], line[3]) for line in cells[1:]] == [
        *(("muon", "yes"), ("mars_m", "no"), ("lion", "no"), ("nadamw", "")),
    ]
    assert cells[4][2] == "diverged" and cells[1][2].startswith("-0.400 (-0.400 to -0.400)")
    gap = comparison.difference(of("a", [4.0, 4.1, 4.2]), of("b", [4.1, 4.21, 4.3]))
    assert comparison.Compared("a", "b", gap, 0.06).shown == "not by Holm"


def test_pairs_without_a_common_seed_have_no_verdict():
    runs = [run("adamw", 1, [4.4]), run("adamw", 2, [4.5]), run("muon", 1, [4.0]), run("mars_m", 2, [4.1])]
    judged = [line.split(":")[0] for line in comparison.verdicts(runs, "adamw", [("mars_m", "muon")])]
    assert judged == ["muon", "mars_m"]


def test_the_first_is_the_baseline_without_adamw():
    runs = [run("mars_lion", 1, [8.0, 5.0]), run("mars_adamw", 1, [8.0, 4.0])]
    lion, mars = comparison.summarize(runs)
    assert (lion.against_baseline.mean, mars.against_baseline.mean) == (0, -1)
    assert "against mars_lion" in comparison_tables.table([lion, mars])


def test_steps_are_those_that_all_seeds_have_evaluated():
    taken_up = Run("adamw", 2, 1e-3, 4.0, 100.0, ((0, 8.0), (7, 5.5), (10, 5.0)))  # evaluated again where it resumed
    assert comparison.mean_curve([run("adamw", 1, [8.0, 4.0]), taken_up]) == [(0, 8.0), (10, 4.5)]


def test_table():
    header, rule, mars, adamw = comparison_tables.table(comparison.summarize(RUNS)).splitlines()
    cells = [cell.strip() for cell in mars.strip("|").split("|")]
    assert cells == [
        "mars_adamw",
        "0.002",
        "4.100 (4.000-4.200)",
        "-0.350 (-2.256 to +1.556)",
        "20 of 30 (67%)",
        "0.58x",
    ]
    cells = [cell.strip() for cell in adamw.strip("|").split("|")]
    assert cells == ["adamw", "0.001", "4.450 (4.400-4.500)", "-", "30 of 30 (100%)", "-"]
    assert len({len(line) for line in (header, rule, mars, adamw)}) == 1


def test_a_loss_that_is_never_reached():
    rows = comparison.summarize([run("adamw", 1, [8.0, 4.0]), run("mars_lion", 1, [8.0, 4.1])])
    assert rows[1].steps_to_baseline is None
    assert "| not reached in 10 |" in " ".join(comparison_tables.table(rows).splitlines()[-1].split())


def test_nothing_reaches_the_loss_of_a_baseline_that_diverged():
    rows = comparison.summarize([run("adamw", 1, [8.0, math.nan]), run("mars_lion", 1, [8.0, 4.1])])
    assert "reached" not in comparison_tables.table(rows)


def of(name: str, losses: list[float]) -> list[Run]:
    return [run(name, seed, [8.0, loss]) for seed, loss in enumerate(losses)]


def test_a_difference_is_paired_by_seed():
    """Gaps of -0.1, -0.2, -0.3: a mean of -0.2, a standard error of 0.1 / sqrt(3), and t(0.975, 2) = 4.302653."""
    base, own = of("adamw", [4.0, 5.0, 6.0]), of("mars_adamw", [3.9, 4.8, 5.7])
    found = comparison.difference(list(reversed(own)), base)
    error = 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(-0.2)
    assert (found.low, found.high) == (pytest.approx(-0.2 - 4.302653 * error), pytest.approx(-0.2 + 4.302653 * error))
    assert found.seeds == 3 and not found.is_shown
    assert comparison.difference(own[:2], base).seeds == 2
    with pytest.raises(ValueError, match="no seed in common"):
        comparison.difference(own[:1], base[1:])


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_detectable_difference_is_shown_four_times_in_five(seeds):
    """Of 200,000 comparisons with that true difference; differences of seeds have a standard deviation of 1."""
    found = comparison.difference(of("a", list(range(seeds))), of("b", [0.0] * seeds))  # any spread
    spread = statistics.stdev(range(seeds))
    true = found.detectable / spread
    gaps = torch.randn(200_000, seeds, generator=torch.Generator().manual_seed(0)) + true
    limit = (found.high - found.mean) / (spread / math.sqrt(seeds))  # Student's t
    ratio = gaps.mean(1) / (gaps.std(1) / math.sqrt(seeds))
    assert float((ratio.abs() > limit).float().mean()) == pytest.approx(0.8, abs=0.005)


def test_one_seed_shows_nothing():
    found = comparison.difference(of("mars_adamw", [1.0]), of("adamw", [9.0]))
    assert found.mean == -8 and not found.is_shown
    nothing = {"low": None, "high": None, "detectable": None, "p": None}
    assert found.as_json() == {"mean": -8.0, "seeds": 1, **nothing}


@pytest.mark.parametrize(
    ("mars", "adamw", "expected"),
    [
        (
            [4.0, 4.1, 4.21],
            [4.4, 4.5, 4.6],
            "mars_adamw: ahead of adamw by 0.397 nats per token (95% interval -0.411 to",
        ),
        ([4.6, 4.7, 4.81], [4.4, 4.5, 4.6], "mars_adamw: behind adamw by 0.203 nats per token (95% interval +0.189 to"),
        # The spread of the seeds is large and cancels in pairs; here it does not.
        ([4.2, 4.3], [4.3, 4.6], "mars_adamw: no difference from adamw shown; -0.200 (95% interval -1.471 to +1.071"),
        ([4.0], [4.4], "mars_adamw: no difference from adamw shown; -0.400 (one seed, no interval)"),
        ([math.nan, 4.0], [4.4, 4.5], "mars_adamw: nothing to compare, mars_adamw diverged with 1 of 2 seeds"),
        ([4.0, 4.1], [math.inf, 4.5], "mars_adamw: nothing to compare, adamw diverged with 1 of 2 seeds"),
    ],
)
def test_verdicts(mars, adamw, expected):
    (verdict,) = comparison.verdicts([*of("mars_adamw", mars), *of("adamw", adamw)])
    assert verdict.startswith(expected)


def test_pairs_have_verdicts_of_their_own():
    runs = [*of("adamw", [4.4, 4.5]), *of("muon", [4.0, 4.1]), *of("mars_m", [4.0, 4.1])]
    assert [line.split(" (")[0] for line in comparison.verdicts(runs, "adamw", [("mars_m", "muon")])] == [
        "muon: ahead of adamw by 0.400 nats per token",
        "mars_m: ahead of adamw by 0.400 nats per token",
        "mars_m: no difference from muon shown; +0.000",
    ]


def test_sensitivity_is_what_wrong_rates_cost():
    """Losses 5, 4, and one that diverged and counts as no training, 8: 17 / 3 - 4."""
    assert comparison.sensitivity({1e-3: 5.0, 2e-3: 4.0, 4e-3: math.nan}, 8.0) == pytest.approx(17 / 3 - 4)
    assert comparison.sensitivity({1e-3: 5.0, 2e-3: 4.0, 4e-3: 11.0}, 8.0) == pytest.approx(17 / 3 - 4)


@pytest.mark.parametrize("end", [4.0, math.nan])
def test_picture(tmp_path, end):
    figures.comparison([*RUNS, run("mars_lion", 1, [8.0, 6.0, 5.0, end])], tmp_path / "comparison.png")
    with Image.open(tmp_path / "comparison.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(maxcolors=1 << 20)}
        assert picture.size[0] > 800
    assert {(31, 119, 180), (64, 64, 64)} <= colors  # the lines of mars_adamw and adamw


def test_a_picture_without_curves_has_the_bars_alone(tmp_path):
    once = [replace(run, curve=run.curve[-1:]) for run in RUNS]
    figures.comparison(RUNS, tmp_path / "curves.png")
    figures.comparison(once, tmp_path / "bars.png")
    with Image.open(tmp_path / "curves.png") as both, Image.open(tmp_path / "bars.png") as bars:
        assert bars.size[0] < 0.7 * both.size[0] and bars.size[1] == both.size[1]


def test_picture_of_a_setting(tmp_path):
    lines = {"adamw": [(1e-3, [5.0, 5.1]), (4e-3, [4.6, 4.7])], "mars_adamw": [(1e-3, [5.0]), (4e-3, [math.nan])]}
    figures.along_axis(lines, tmp_path / "axis.png", "learning_rate")
    with Image.open(tmp_path / "axis.png") as picture:
        assert picture.size[0] > 800


def test_betas_are_spaced_by_the_length_of_their_averages(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure))
    figures.along_axis({"adamw": [(beta, [4.0]) for beta in (0.6, 0.8, 0.9, 0.95)]}, tmp_path / "axis.png", "beta1")
    (figure,) = drawn
    axes = figure.axes[0]
    places = [axes.transData.transform((beta, 4.0))[0] for beta in (0.6, 0.8, 0.9, 0.95)]
    first, *others = [high - low for low, high in itertools.pairwise(places)]
    assert others == pytest.approx([first] * 2)
    figures.plt.close(figure)


def test_runs_survive_json():
    whole = run("mars_m", 1, [8.0, 6.0])
    assert comparison.Run.from_json(json.loads(json.dumps(whole.as_json()))) == whole
    diverged = comparison.Run("mars_lion", 2, 0.1, math.nan, math.nan, ())
    again = comparison.Run.from_json(json.loads(json.dumps(diverged.as_json())))
    assert (again.contender, again.seed, again.curve) == ("mars_lion", 2, ()) and math.isnan(again.eval_loss)


def test_json_has_no_number_that_is_not_finite():
    text = json.dumps(run("mars_lion", 1, [math.inf, math.nan, 4.0]).as_json(), allow_nan=False)
    assert [math.isnan(loss) for _, loss in comparison.Run.from_json(json.loads(text)).curve] == [True, True, False]


def test_names_are_shown_as_they_are(tmp_path, monkeypatch):
    """Matplotlib takes $ for mathematics, and leaves names with _ ahead out of legends."""
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure))
    figures.along_axis({"_a": [(1.0, [4.0])], "$x$": [(1.0, [5.0])]}, tmp_path / "axis.png", "gamma")
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["\u200b_a", r"\$x\$"]
    figures.plt.close(figure)


def test_grid_of_a_setting():
    lines = {"adamw": [(4e-3, [4.6, 4.7]), (1e-3, [5.0, 5.1])], "mars_m": [(4e-3, [math.nan]), (2e-2, [4.5])]}
    assert comparison_tables.grid(lines, "learning_rate").splitlines() == [
        "| learning_rate | 0.001 |    0.004 |  0.02 |",
        "| ------------- | ----: | -------: | ----: |",
        "| adamw         | 5.050 |    4.650 |       |",
        "| mars_m        |       | diverged | 4.500 |",
    ]


def test_the_picture_shows_the_end_of_the_curves():
    low, high = figures._window([[(0, 8.0), (10, 7.0), (50, 5.0), (100, 4.0)], [(0, 8.0), (50, math.nan)]])
    assert (low, high) == (pytest.approx(3.95), pytest.approx(5.05))
