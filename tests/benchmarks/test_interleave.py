"""Turns, ratios and tables."""

from __future__ import annotations

import interleave
import pytest
import torch


def test_every_round_begins_with_another_contender_and_some_sit_out():
    order = []
    contenders = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    measured = interleave.take_turns(contenders, 4, every={"b": 3})
    assert "".join(order) == "abc" + "ca" + "ca" + "abc"
    assert measured == {"a": [1, 5, 7, 8], "b": [2, None, None, 9], "c": [3, 4, 6, 10]}


def test_ratio_is_taken_within_rounds():
    # The second round is three times slower: the ratio of medians would be 1.
    assert interleave.ratio([2.0, 6.0, None], [1.0, 3.0, 2.0]) == 2.0
    assert interleave.ratio([2.0, 2.0, 2.0], [1.0, 1.0, 4.0]) == 2.0
    assert interleave.quartiles([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (2.0, 4.0)
    assert interleave.quartiles([3.0, None], [2.0, 1.0]) == (1.5, 1.5)
    assert interleave.median([5.0, None, 1.0]) == 3.0


def test_cpu_clock_times_what_it_is_given(monkeypatch):
    now = iter([1.0, 2.0, 5.0, 7.0])
    monkeypatch.setattr(interleave.time, "perf_counter", lambda: next(now))
    assert interleave.Clock(torch.device("cpu")).time(lambda: None) == interleave.Timing(seconds=3.0, host=6.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AMD EPYC 7B13", "amd_epyc_7b13"), ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel_r_xeon_r_cpu_2_20ghz")],
)
def test_slug(name, expected):
    assert interleave.slug(name) == expected
