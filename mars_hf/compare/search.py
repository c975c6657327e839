"""Search the learning rates of an arm: factors of two with one seed, then more seeds for the best three.

One seed chooses by luck where rates are closer than its noise, and no interval afterwards knows of that. Everything
here is a function of the results so far, so that an interrupted search goes on by itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

Place = tuple[int, ...]  # rates as powers of two of the first ones
Results = Mapping[Place, Mapping[int, float]]  # place -> seed -> metric, lower is better; NaN for a run that diverged

FARTHEST = 10  # factors of two from the first rate
FINALISTS = 3


def wanted(results: Results, seeds: Sequence[int], count: int = 1) -> list[tuple[Place, int]]:
    """Return what to run next, places and seeds, the most useful first; [] at the end of the search.

    Args:
        results: what is known. A place where any run diverged, with whatever seed, is worse than all others.
        seeds: of the search; the first brackets the best place, the others choose among the best three.
        count: number of rates that are searched.
    """
    by_first = {place: _value(by_seed, seeds[:1]) for place, by_seed in results.items() if seeds[0] in by_seed}
    unknown = _around_best(by_first, count)
    if unknown:
        return [(place, seeds[0]) for place in unknown]
    finite = [place for place, value in by_first.items() if math.isfinite(value)]
    finalists = sorted(finite, key=lambda place: by_first[place])[:FINALISTS]
    missing_runs = missing(results, finalists, seeds)
    middle = best(results, seeds)
    if missing_runs or middle is None:
        return missing_runs
    # The best mean may be at an edge of what these seeds have tried.
    around = [place for place in _neighbours(middle, count) if not _diverged(results.get(place, {}))]
    return missing(results, around, seeds)


def best(results: Results, seeds: Sequence[int]) -> Place | None:
    """Return the place with the lowest mean over all seeds of the search; None if all diverged, or none is known."""
    known = [place for place, by_seed in results.items() if set(seeds) <= by_seed.keys()]
    return _lowest({place: _value(results[place], seeds) for place in known})


def edge(results: Results, middle: Place, grid: Sequence[int] = ()) -> str:
    """Return why the place has no worse finite neighbours on both sides, for the page; "" if it has."""
    if grid and middle[0] in (min(grid), max(grid)):
        return "at an end of the grid"
    if max(map(abs, middle)) >= FARTHEST:
        return f"at the end of the search, {FARTHEST} factors of two from its start"
    if any(_diverged(results.get(place, {})) for place in _neighbours(middle, len(middle))):
        return "a neighbouring rate diverged"
    return ""


def _around_best(values: Mapping[Place, float], count: int) -> list[Place]:
    """Return the unknown neighbours of the best place; the place below all others if all diverged."""
    if not values:
        return [(0,) * count]
    middle = _lowest(values)
    if middle is None:
        lower = tuple(power - 1 for power in min(values))
        return [lower] if min(lower) >= -FARTHEST else []
    return [place for place in _neighbours(middle, count) if place not in values]


def _lowest(values: Mapping[Place, float]) -> Place | None:
    """Return the place with the lowest value, of equal ones the nearest to the first; None if all diverged."""
    finite = {place: value for place, value in values.items() if math.isfinite(value)}
    return min(finite, key=lambda place: (finite[place], sum(map(abs, place))), default=None)


def _neighbours(middle: Place, count: int) -> list[Place]:
    """Return the places around one: one of its rates doubled or halved, then several."""
    steps = [step for step in itertools.product((1, -1, 0), repeat=count) if any(step)]
    places = [tuple(map(sum, zip(middle, step, strict=True))) for step in sorted(steps, key=lambda one: -one.count(0))]
    return [place for place in places if max(map(abs, place)) <= FARTHEST]


def missing(results: Results, places: Sequence[Place], seeds: Sequence[int]) -> list[tuple[Place, int]]:
    """Return the runs of places with seeds that are not there."""
    return [(place, seed) for place in places for seed in seeds if seed not in results.get(place, {})]


def _diverged(by_seed: Mapping[int, float]) -> bool:
    return not all(math.isfinite(value) for value in by_seed.values())


def _value(by_seed: Mapping[int, float], seeds: Sequence[int]) -> float:
    """Return the mean of a place over seeds; NaN if any of its runs diverged, also with seeds of the comparison."""
    return math.nan if _diverged(by_seed) else statistics.fmean(by_seed[seed] for seed in seeds)
