"""Ranks that differ under DDP and FSDP2: no hang, and the right result or one message on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from launching import error_of, launch

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# Number of the five matrices that each rank orthogonalizes per step; ranks with [3, 2] share them.
DDP: dict[str, tuple[list[int], list[int]]] = {
    "alike": ([3] * 4, [2] * 4),
    "accumulated": ([3] * 3, [2] * 3),
    "promised": ([3] * 3, [2] * 3),
    "static_graph": ([5, 3, 3, 3], [5, 2, 2, 2]),  # whose first backward pass is not timed
    "alone_at_first": ([5, 5, 5], [5, 5]),
    "alone_between": ([3, 3, 5, 5, 5, 5], [2, 2, 5, 5]),
    "alone_at_last": ([3, 3, 5], [2, 2]),
    "alone_on_old_gradients": ([3, 3, 5, 5, 5], [2, 2, 5, 5]),
    "joining": ([5, 5, 5], [5, 5]),
    "late_join": ([3, 3, 5, 5, 5, 5, 5], [2, 2, 5, 5, 5, 5]),
    "missing": ([3, 3, 5, 5, 5], [2, 2, 4, 5, 5]),
    "missing_at_first": ([4, 5, 5], [5, 5, 5]),
    "missing_matrices": ([3, 5, 5, 5], [2, 0, 5, 5]),
    "missing_everything": ([3, 5, 5, 5], [2, 0, 5, 5]),
    "unsynced": ([3, 3, 5, 5, 5, 5], [2, 2, 5, 5, 5, 5]),
    "wrapped_later": ([5, 5, 5, 5], [5, 5]),
    "wrapped_again": ([3, 3, 5, 5, 5], [2, 2, 5, 5]),
    "moved": ([3, 3, 5], [2, 2, 5, 5]),
    "two_groups": ([2] * 3, [6] * 3),
    "bare": ([5, 5], [5, 5, 5]),
}
SHAMPOO = ("alike", "promised", "alone_between", "late_join", "missing")
RULES = {name: ("m", "shampoo") if name in SHAMPOO else ("m",) for name in DDP}
EMPTY = [
    *(f"empty/float64_with_{rule}" for rule in ("adamw", "lion", "shampoo", "m")),
    *("empty/mixed_with_adamw", "empty/mixed_with_m", "empty/mixed_with_adamw_folded", "empty/vectors_with_lion"),
]
FSDP2 = ("plain", "metrics", "folded")
MOVED = ("moved/before_with_m", "moved/between_with_m", "moved/before_with_adamw", "moved/between_with_adamw")
ALIVE = tuple(f"alive/{kind}" for kind in ("ddp_with_m", "apart_with_m", "fsdp2_with_m", "ddp_with_adamw"))
FOUR = ("hsdp/plain_with_m", "hsdp/missing_copy_with_m", "hsdp/missing_with_m", "hsdp/rows_with_m")
RUNS = [
    *(f"ddp/{name}_with_{rule}" for name, rules in RULES.items() for rule in rules),
    *(f"fsdp2/{name}_with_m" for name in (*FSDP2, "missing")),
    *(*EMPTY, *MOVED, *ALIVE),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return each rank's findings in a run; the first request starts all runs."""
    folders: dict[int, Any] = {}

    def get(run: str) -> list[dict[str, Any]]:
        world = 4 if run in FOUR else 2
        if world not in folders:
            folders[world] = tmp_path_factory.mktemp(f"apart{world}")
            launch("apart.py", folders[world], RUNS if world == 2 else [*FOUR], world, "--wait", "20", "--limit", "40")
        error = error_of(folders[world], run)
        assert error is None, error
        return json.loads((folders[world] / f"{run.replace('/', '-')}.json").read_text())

    return get


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rules in RULES.items() for rule in rules])
def test_each_rank_steps_as_on_its_own_gradients(outcomes, name, rule):
    ranks = outcomes(f"ddp/{name}_with_{rule}")
    assert all(rank["distance"] <= 1e-13 for rank in ranks)
    assert tuple(rank["orthogonalized"] for rank in ranks) == DDP[name]


@pytest.mark.parametrize("name", FSDP2)
def test_float64_is_float64_under_fsdp2(outcomes, name):
    ranks = outcomes(f"fsdp2/{name}_with_m")
    assert all(rank["distance"] <= 1e-13 for rank in ranks)
    assert [rank["orthogonalized"] for rank in ranks] == [[3, 3], [2, 2]]


def test_a_gradient_that_is_missing_on_one_rank_of_fsdp2_stops_all(outcomes):
    for rank in outcomes("fsdp2/missing_with_m"):
        assert "2 ranks, 2 for each copy of the model, disagree on the parameters" in rank["error"]
        assert rank["unchanged"]


def test_copies_of_a_sharded_model_that_come_apart_go_on_alone(outcomes):
    """Of two copies of two ranks, the second lacks a gradient on both ranks in the third of five steps."""
    ranks = outcomes("hsdp/missing_copy_with_m")
    assert all(rank["distance"] <= 1e-13 for rank in ranks)
    done = [sum(rank["orthogonalized"][step] for rank in ranks) for step in range(5)]
    assert done == [5, 5, 5 + 4, 10, 10]
    alike = outcomes("hsdp/plain_with_m")
    assert all(rank["distance"] <= 1e-13 for rank in alike)
    assert [sum(rank["orthogonalized"][step] for rank in alike) for step in range(2)] == [5, 5]


@pytest.mark.parametrize("run", ["hsdp/missing_with_m", "hsdp/rows_with_m"])
def test_a_gradient_that_is_missing_on_one_rank_of_a_copy_stops_all_copies(outcomes, run):
    for rank in outcomes(run):
        assert "4 ranks, 2 for each copy of the model, disagree on the parameters" in rank["error"]
        assert rank["unchanged"]


@pytest.mark.parametrize("run", EMPTY)
def test_a_rank_without_pieces_has_the_dtype_of_the_others(outcomes, run):
    bars = {"torch.float64": 1e-14, "torch.float32": 1e-6, "torch.bfloat16": 1e-2}
    for rank in outcomes(run):
        assert all(distance <= bars[dtype] for dtype, distance in rank["distances"].items())


@pytest.mark.parametrize("run", MOVED)
def test_a_sharded_model_can_be_moved_to_another_dtype(outcomes, run):
    for rank in outcomes(run):
        assert rank == {"unlike": 0, "same": True}


@pytest.mark.parametrize("run", ALIVE)
def test_what_is_kept_from_step_to_step_holds_no_tensor(outcomes, run):
    for rank in outcomes(run):
        assert rank["before"] > 0 and rank["after"] == 0
