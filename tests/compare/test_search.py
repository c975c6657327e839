"""The search of rates: what it asks for next, and where it ends."""

import math

import pytest

from mars_hf.compare import search

SEEDS = (42, 43, 44)


def follow(loss, seeds=(42,), count=1, known=None):
    """Return the results of a search in which `loss` gives the metric of a place with a seed."""
    results = known or {}
    while missing := search.wanted(results, seeds, count):
        place, seed = missing[0]
        assert seed not in results.get(place, {})
        results.setdefault(place, {})[seed] = loss(place, seed)
        assert sum(map(len, results.values())) < 99
    return results


@pytest.mark.parametrize("middle", [-7, -1, 0, 3])
def test_best_rate_lies_between_worse_ones(middle):
    results = follow(lambda place, _: (place[0] - middle) ** 2)
    assert search.best(results, (42,)) == (middle,) and {(middle - 1,), (middle + 1,)} <= results.keys()
    assert len(results) == abs(middle) + 3 - (middle > 0)


def test_order_of_one_job():
    """Doubled before halved, as the searches of the published results were."""
    assert list(follow(lambda place, _: abs(place[0] - 1.2))) == [(0,), (1,), (2,)]
    assert list(follow(lambda place, _: abs(place[0] + 1))) == [(0,), (1,), (-1,), (-2,)]


def test_diverged_is_worse_than_any():
    results = follow(lambda place, _: math.nan if place[0] > -2 else place[0] ** 2)
    assert search.best(results, (42,)) == (-2,) and list(results)[:3] == [(0,), (-1,), (-2,)]
    assert search.edge(results, (-2,)) == "a neighbouring rate diverged"
    assert search.edge(follow(lambda place, _: place[0] ** 2), (0,)) == ""
    assert search.edge(results, (3,), grid=(-3, 0, 3)) == "at an end of the grid"


def test_search_has_ends():
    results = follow(lambda place, _: math.nan)
    assert search.best(results, (42,)) is None and len(results) == search.FARTHEST + 1
    results = follow(lambda place, _: -place[0], SEEDS)
    assert search.best(results, SEEDS) == (10,) and "at the end of the search" in search.edge(results, (10,))
    assert search.best({}, SEEDS) is None and search.wanted({}, SEEDS) == [((0,), 42)]


def test_ties_stay_near_the_first_rate():
    results = follow(lambda place, _: 0.0, SEEDS)
    assert search.best(results, SEEDS) == (0,) and set(results) == {(-1,), (0,), (1,)}


def test_further_seeds_choose_among_the_best_three():
    """One seed finds 1 best by luck; the means of three are best at 2, whose other neighbour gets all seeds, too."""
    luck = {(1, 42): -2.0}

    def loss(place, seed):
        return (place[0] - 2) ** 2 + luck.get((place[0], seed), 0.0)

    assert search.best(follow(loss), (42,)) == (1,)
    results = follow(loss, SEEDS)
    assert search.best(results, SEEDS) == (2,)
    assert {place: len(by_seed) for place, by_seed in results.items()} == {(0,): 3, (1,): 3, (2,): 3, (3,): 3}


def test_best_three_need_not_be_neighbours():
    losses = {-1: 3.0, 0: 2.0, 1: 2.1, 2: 1.9, 3: 1.8, 4: 5.0}
    known = {(place,): {42: value} for place, value in losses.items()}
    asked = search.wanted(known, SEEDS)
    assert set(asked) == {((place,), seed) for place in (3, 2, 0) for seed in (43, 44)} and asked[0] == ((3,), 43)


def test_rate_that_diverges_with_any_seed_is_out():
    """With a seed of the comparison, too: then the next best rate is taken, for every arm alike."""
    results = follow(lambda place, _: abs(place[0]), SEEDS)
    assert search.best(results, SEEDS) == (0,)
    results[(0,)][1] = math.nan
    assert search.best(results, SEEDS) in [(1,), (-1,)]
    asked = search.wanted(results, SEEDS)
    assert asked and {place for place, _ in asked} <= {(-2,), (2,)}


def places(center):
    return lambda place, _: math.dist(place, center)


@pytest.mark.parametrize("center", [(1.4, 3.2), (4.2, 2.1), (-0.8, 6.3), (2.0, 3.0)])
def test_search_of_two_rates(center):
    """It tries every place around the best one: both rates may be better doubled together than alone."""
    results = follow(places(center), count=2)
    best = round(center[0]), round(center[1])
    around = {(best[0] + one, best[1] + other) for one in (-1, 0, 1) for other in (-1, 0, 1)}
    assert search.best(results, (42,)) == best and around <= results.keys() and len(results) < 30
