"""Statistics, against scipy's own tests, arithmetic by hand and published runs; and what a verdict says of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mars_hf.compare import differences, page, picture
from mars_hf.compare.differences import FinishedRun
from mars_hf.compare.metric import Metric
from mars_hf.compare.verdict import Findings

LOSS = Metric("eval_loss")
WIDER = 1.2  # for the choice of rates, which no seed's spread knows


def runs(arm, values, first_seed=1, **more):
    return [FinishedRun(arm, 0.01, seed, value, **more) for seed, value in enumerate(values, first_seed)]


def findings(members, metric=LOSS, *, was_searched=True):
    searched = {"a": {0.01: [1.0]}} if was_searched else {}
    return Findings("title", metric, members[0].arm, members, searched, {})


def words(members, metric=LOSS, *, was_searched=True):
    found = findings(members, metric, was_searched=was_searched)
    (gap,) = found.gaps
    return found.verdict(gap)


def test_two_arms_are_the_paired_t_test():
    one, other = [3.0, 2.0, 2.6, 3.1], [2.7, 1.9, 2.2, 2.9]
    (gap,) = differences.differences([*runs("a", one), *runs("b", other)], "a")
    test = stats.ttest_rel(other, one)
    low, high = test.confidence_interval(0.95)
    assert gap.mean == pytest.approx((low + high) / 2) and gap.seeds == 4
    assert gap.half == pytest.approx(WIDER * (high - low) / 2) and gap.would_show == pytest.approx(gap.half)
    assert gap.p == gap.holm == pytest.approx(2 * stats.t.sf(abs(test.statistic) / WIDER, 3))
    assert gap.is_shown and test.pvalue < gap.p < 0.05


def test_arms_share_their_spread():
    """By a linear model of arms and seeds; with two seeds, one pair alone would have one degree of freedom."""
    values = np.array([[3.0, 2.0], [2.71, 1.69], [3.22, 2.24], [2.9, 1.95]])
    names = "abcd"
    members = [run for name, own in zip(names, values, strict=True) for run in runs(name, own)]
    design = np.array([[float(arm == at) for at in range(4)] + [float(seed)] for arm in range(4) for seed in range(2)])
    _, squares, rank, _ = np.linalg.lstsq(design, values.ravel(), rcond=None)
    error = math.sqrt(squares[0] / (8 - rank) * 2 / 2) * WIDER
    gaps = differences.differences(members, "a")
    assert [gap.half for gap in gaps] == pytest.approx([stats.t.ppf(0.975, 3) * error] * 3)
    assert gaps[0].would_show == pytest.approx(stats.t.ppf(1 - 0.025 / 3, 3) * error)
    assert gaps[0].mean == pytest.approx(-0.3) and gaps[0].half < 0.15
    alone = differences.differences(members[:4], "a")[0]
    assert alone.half > 1.8 * gaps[0].half


def test_arm_that_scatters_more_keeps_its_own_spread():
    rng = np.random.default_rng(0)
    quiet = [run for name in "abcd" for run in runs(name, rng.normal(2, 0.01, 5))]
    loud = runs("loud", 2 + np.array([0.5, -0.5, 0.4, -0.4, 0.02]))
    gaps = {gap.arm: gap for gap in differences.differences([*quiet, *loud], "a")}
    assert gaps["loud"].half > 0.5 and gaps["b"].half < 0.5


def test_published_runs_keep_their_differences():
    """Of the controls, seed by seed; a pair of arms alone has the interval that the page shows, and the factor."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "controls_embedded.json"
    result = json.loads(path.read_text())
    members = [FinishedRun(one["contender"], 0.0, one["seed"], one["eval_loss"]) for one in result["runs"]]
    by_arm = differences.by_arm(members)
    assert len(by_arm) == 10
    for row in result["rows"]:
        if row["contender"] != "adamw":
            (gap,) = differences.differences([*by_arm["adamw"], *by_arm[row["contender"]]], "adamw")
            theirs = row["against_baseline"]
            assert (gap.mean, gap.half) == pytest.approx((theirs["mean"], WIDER * (theirs["high"] - theirs["low"]) / 2))


def test_holm_by_hand():
    assert differences.holm([0.01, math.nan, 0.04]) == pytest.approx([0.03, math.nan, 0.08], nan_ok=True)
    assert differences.holm([0.04, 0.03, 0.02]) == pytest.approx([0.06] * 3) and differences.holm([]) == []
    assert differences.holm([0.6, 0.7]) == [1.0, 1.0]


def test_pairs_besides_the_baseline():
    members = [*runs("a", [1.0, 2.0]), *runs("b", [1.1, 2.0]), *runs("c", [0.9, 1.7])]
    gaps = differences.differences(members, "a", [("c", "b"), ("b", "a")])
    assert [(gap.arm, gap.against) for gap in gaps] == [("b", "a"), ("c", "a"), ("c", "b")]
    assert gaps[2].mean == pytest.approx(-0.25)
    assert differences.differences([*runs("a", [1.0]), *runs("b", [1.0], first_seed=2)], "a") == []


def test_better_and_worse_in_words():
    curve = ((10, 4.0), (20, 3.0), (30, 2.0))
    base = runs("adamw", [2.5, 2.6, 2.7], seconds_per_step=1.0, curve=curve)
    ours = runs("muon", [2.0, 2.11, 2.19], seconds_per_step=2.0, curve=((10, 3.0), (20, 2.2), (30, 2.0)))
    text = words([*base, *ours])
    assert (
        text.startswith("**muon helps**: it ends 0.500 ± ")
        and "below adamw (eval_loss, 3 seeds, paired, 95 %, Holm)" in text
    )
    # 2.6, the baseline's mean, lies half between 3.0 at step 10 and 2.2 at 20.
    assert text.endswith("shown; it reaches adamw's end in 50% of the steps, 100% of the seconds.")
    without = [run._replace(seconds_per_step=math.nan) for run in [*base, *ours]]
    assert words(without).endswith("in 50% of the steps.")
    assert words([*ours, *base]).startswith("**adamw HURTS**: it ends 0.500 ±") and "above muon" in words(
        [*ours, *base]
    )
    accuracy = Metric("eval_accuracy", greater_is_better=True)
    assert words([*ours, *base], accuracy).startswith("**adamw helps**")


def test_no_difference_and_no_verdict_in_words():
    base = runs("a", [1.0, 2.0, 3.0])
    text = words([*base, *runs("b", [1.1, 1.8, 3.1])])
    assert text.startswith("**b: no difference shown**: it ends ") and "; these seeds would have shown 0." in text
    assert "runs diverged: 1 of b" in words([*base, *runs("b", [0.9, math.nan, 2.9])])
    assert "because one seed shows no spread. It ends 0.5 below a" in words([base[0], *runs("b", [0.5])])
    assert "nobody searched the rates" in words([*base, *runs("b", [0.5, 1.5, 2.5])], was_searched=False)
    coarse = [FinishedRun("b", 0.1, seed, 0.5, weights=str(seed)) for seed in (1, 2, 3)]
    assert "all runs of b ended alike, the metric is too coarse" in words([*base, *coarse])
    same = runs("b", [0.5] * 3, weights="x", batch="y")
    assert "all runs of b ended alike, the seeds changed nothing" in words([*base, *same])


def test_doubts_about_the_pairs():
    base = [FinishedRun("a", 0.1, seed, seed + 0.1, weights=f"w{seed}", batch="y") for seed in (1, 2)]
    other = [
        FinishedRun("b", 0.1, 1, 1.0, weights="w1", batch="y"),
        FinishedRun("b", 0.1, 2, 2.0, weights="z", batch="y"),
    ]
    found = " ".join(findings([*base, *other]).doubts())
    assert "Not paired: runs of seed 2 began with different weights" in found
    assert "All seeds began with the same first batch" in found
    unknown = [FinishedRun("b", 0.1, seed, 1.0 + seed) for seed in (1, 2)]  # diverged at once
    assert findings([*base[:1], *unknown]).doubts() == []


def test_curves_reach_a_value():
    curve = [(0, 4.0), (10, 3.0), (20, 1.0)]
    assert [differences.steps_to(goal, curve) for goal in (5.0, 3.5, 2.0, 0.5)] == [0, 5, 15, None]
    assert differences.steps_to(0.6, [(10, 0.4), (20, 0.8)], sign=-1) == 15
    ours = [
        FinishedRun("a", 0.1, 1, 1.0, curve=((10, 2.0), (20, 1.0))),
        FinishedRun("a", 0.1, 2, 1.0, curve=((20, 3.0),)),
    ]
    assert differences.mean_curve(ours) == [(20, 2.0)]


def test_sizes_have_the_digits_of_their_intervals():
    base = runs("a", [1.0, 2.0, 3.0])
    assert "it ends 0.02 ± 0." in words([*base, *runs("b", [1.1, 1.95, 2.88])])
    assert "it ends 0.10017 ± 0.00086 below" in words([*base, *runs("b", [0.9, 1.8995, 2.9])])


@pytest.mark.parametrize("sign", [1, -1], ids=["loss", "score"])
def test_picture_of_a_search_shows_what_is_close(sign):
    """A rate far too high would flatten all others: its line leaves the picture. Without results there is no pane."""
    metric = Metric("eval_score", greater_is_better=sign < 0)
    close = {0.001: [2.82 * sign], 0.002: [2.80 * sign], 0.004: [2.81 * sign]}
    found = Findings("title", metric, "a", [], {"a": {**close, 0.008: [9.0 * sign]}, "b": close}, {})
    (axes,) = picture.figure_of(found).axes
    low, high = sorted(axes.get_ylim())
    assert low < min(2.80 * sign, 2.82 * sign) and high > max(2.80 * sign, 2.82 * sign) and high - low < 0.1
    (axes,) = picture.figure_of(Findings("title", metric, "a", [], {"a": close}, {})).axes
    low, high = sorted(axes.get_ylim())
    assert low < min(close.values())[0] and high > max(close.values())[0]  # nothing is far worse


def test_best_rates_are_called_so_after_a_search():
    members = [*runs("a", [1.0, 2.0]), *runs("b", [1.1, 2.0])]
    assert "| best rate |" in page.results_table(findings(members))
    assert "| rate |" in page.results_table(findings(members, was_searched=False))


def test_page_of_the_documentation_has_the_numbers_of_its_runs():
    """The example of docs/compare.md: its verdicts follow from the runs, and its rates are theirs."""
    root = Path(__file__).resolve().parents[2]
    result = json.loads((root / "benchmarks" / "results" / "compare_minimal.json").read_text())
    members = [FinishedRun(**run)._replace(seconds_per_step=math.nan) for run in result["runs"]]
    found = findings(members)
    texts = list(map(found.verdict, found.gaps))
    page = " ".join((root / "docs" / "compare.md").read_text().replace(">", "").split())
    assert texts == result["verdicts"] and all(text in page for text in texts)
    rates = [f"{run['rate']:.2g}" for run in result["runs"] if run["seed"] == 1]
    assert "the best rates are {}, {} and {}".format(*rates) in page
