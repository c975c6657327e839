"""How often do equal arms look different? The command's own search and verdict on simulated runs set its defaults.

Losses are a parabola over the logarithm of the rate, with noise of seeds. In the published searches a rate off by a
factor of two costs 0.4 to 10 standard deviations of that noise (tests/benchmarks); here it costs 0.5 to 4.5.
"""

import math

import numpy as np
import pytest

from mars_hf.compare import differences, search
from mars_hf.compare.differences import FinishedRun
from mars_hf.compare.plan import SEARCH_SEEDS, Plan

NOISE = 0.01
FINAL = Plan([]).seeds


def final_runs(rng, name, search_seeds, curve, offset, of_seed, noise):
    """Search an arm's rate, and run new seeds at the best."""

    def run(place, seed):
        return curve * (place[0] - offset) ** 2 + of_seed[seed] + noise * rng.standard_normal()

    results = {}
    while missing := search.wanted(results, search_seeds):
        for place, seed in missing:
            results.setdefault(place, {})[seed] = run(place, seed)
    best = search.best(results, search_seeds)
    return [FinishedRun(name, 2.0 ** best[0], seed, run(best, seed)) for seed in FINAL]


def share_shown(arms, search_seeds=SEARCH_SEEDS, curve=0.02, count=1000, hurts=0.0, loudest=1.0, seed=0):
    """Return in which share of comparisons any arm differs from the first; `hurts`: the last is worse at every rate."""
    rng, shown = np.random.default_rng(seed), 0
    for _ in range(count):
        offset = rng.uniform(-0.5, 0.5)  # of the best rate from the nearest that is searched
        of_seed = {each: NOISE * rng.standard_normal() for each in (*search_seeds, *FINAL)}
        members = []
        for arm in range(arms):
            noise = NOISE * (loudest if arm == arms - 1 else 1.0)
            members += final_runs(rng, str(arm), search_seeds, curve, offset, of_seed, noise)
        if hurts:
            members = [one if one.arm != str(arms - 1) else worse(one, hurts) for one in members]
        shown += any(gap.is_shown for gap in differences.differences(members, "0"))
    return shown / count


def worse(run, by):
    return FinishedRun(run.arm, run.rate, run.seed, run.value + by)


@pytest.mark.slow
@pytest.mark.parametrize(("arms", "curve"), [(2, 0.005), (2, 0.02), (3, 0.045), (4, 0.01), (5, 0.02)])
def test_equal_arms_are_shown_to_differ_in_one_of_twenty(arms, curve):
    """At most 5 %; a thousand comparisons tell that to 0.7 %."""
    assert share_shown(arms, curve=curve) <= 0.05 + 0.007


@pytest.mark.slow
def test_loud_arm_is_no_discovery():
    """One arm scatters three times as much as the others, with which it shares their spread unless that shows."""
    assert share_shown(4, curve=0.03, loudest=3.0) <= 0.05 + 0.007


@pytest.mark.slow
def test_one_search_seed_chooses_by_luck():
    """What the defaults are for: with one seed, equal arms seem different more often."""
    assert share_shown(5, search_seeds=(42,), curve=0.01) > 1.5 * share_shown(5, curve=0.01)


def test_planted_difference_is_shown():
    """An arm that is worse at every rate, by six standard deviations of the noise, is found in nine of ten."""
    assert share_shown(3, count=40, hurts=6 * NOISE) > 0.9
    assert share_shown(2, count=20, hurts=math.inf) == 0  # all its runs diverge: that is no difference
