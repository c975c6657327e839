"""Work on whole matrices shared among ranks: results equal those of one process bit-for-bit; no work is done twice.

One launch runs all checks with the same number of processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from launching import error_of, launch, needs_deepspeed

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SLOTS = [0, 1, 3, 4, 6, 7, 9]  # of exchange.py
BYTES = {"bf16": 2, "fp32": 4}

_SHARDED = ("rows", "columns", "stretches", "partitions", "lastrank")
_ZERO = ("zero1", "zero2", "zero3", "zero2_round_robin")
CUT = {
    2: [*(f"{name}_{dtype}" for name in (*_SHARDED, "blocks", "replicas") for dtype in BYTES)],
    4: [
        *(f"{name}_bf16" for name in (*_SHARDED, "boxes", "replicas")),
        *(f"hybrid{name}_{dtype}" for name in ("rows", "columns", "stretches") for dtype in BYTES),
    ],
}
ENGINES = {
    ("torch", 2): ["ddp", "fsdp2", "fsdp2_columns", "dtensors"],
    ("torch", 4): ["ddp", "fsdp2", "hsdp", "dtensors"],
    ("deepspeed", 2): [*_ZERO, "zero2_offload", "zero3_offload"],
    ("deepspeed", 4): [*_ZERO],
}
MISSING, TWICE = r"of parameter 0, of shape \(7, 5\): not each", r"of parameter 3, of shape \(18, 3\): not each"
DISAGREE = "4 ranks, 2 for each copy of the model, disagree"
WRONG = {
    2: {
        "rows_lost": MISSING,
        "rows_twice": TWICE,
        "rows_costs": "2 ranks, 2 for each copy of the model, disagree",
        "replicas_lost": "2 ranks, 1 for each copy of the model, disagree",
    },
    4: dict.fromkeys(["hybrid_lost", "hybrid_twice", "hybrid_costs"], DISAGREE),
}


def checks(kind: str, world: int) -> list[str]:
    """Return all checks of one launch."""
    engines = [f"engine/{name}" for name in ENGINES[kind, world]]
    if kind == "deepspeed":
        return engines
    cut, wrong = [f"cut/{name}" for name in CUT[world]], [f"wrong/{name}" for name in WRONG[world]]
    return cut + wrong + engines + (["replicas/ddp"] if world == 2 else [])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], list[dict[str, Any]]]:
    """Return each rank's findings in a check; the first request runs the whole launch."""
    folders: dict[tuple[str, int], Any] = {}

    def get(kind: str, world: int, check: str) -> list[dict[str, Any]]:
        if kind == "deepspeed":
            needs_deepspeed()
        if (kind, world) not in folders:
            folder = folders[kind, world] = tmp_path_factory.mktemp(f"exchange_{kind}{world}")
            launch("exchange.py", folder, checks(kind, world), world)
        error = error_of(folders[kind, world], check)
        assert error is None, error
        return json.loads((folders[kind, world] / f"{check.replace('/', '-')}.json").read_text())

    return get


ALL_CUT = pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in CUT.items() for name in names])


@ALL_CUT
def test_results_are_those_of_one_process(outcomes, world, name):
    ranks = outcomes("torch", world, f"cut/{name}")
    assert len(ranks) == world
    assert all(rank["same"] and rank["untouched"] for rank in ranks)


@ALL_CUT
def test_each_parameter_is_worked_on_once(outcomes, world, name):
    ranks = outcomes("torch", world, f"cut/{name}")
    assert sorted(slot for rank in ranks for slot in rank["seen"]) == SLOTS
    assert all(rank["calls"] == (1 if rank["seen"] else 0) for rank in ranks)
    owners = ranks[0]["owners"]
    assert all(rank["owners"] == owners for rank in ranks) and max(owners) == world - 1


@ALL_CUT
def test_bytes_that_travel_are_those_announced(outcomes, world, name):
    ranks = outcomes("torch", world, f"cut/{name}")
    layout, dtype = name.split("_")
    gathers = layout == "replicas" or layout.startswith("hybrid")
    for rank in ranks:
        volume, sent = rank["volume"], rank["sent"]
        both_ways = [volume["to_owners"], volume["from_owners"]]
        exchanged = [size for kind, size in sent if "alltoall" in kind]
        assert exchanged == both_ways or (exchanged == [] and both_ways == [0, 0])
        assert [size for kind, size in sent if "allgather" in kind] == ([volume["replicas"]] if gathers else [])
        assert len(sent) == sum("alltoall" in kind or "allgather" in kind for kind, _ in sent)
        assert volume["to_owners"] <= BYTES[dtype] * rank["elements"]
    # Bytes sent equal bytes received.
    assert sum(rank["volume"]["to_owners"] for rank in ranks) == sum(rank["volume"]["from_owners"] for rank in ranks)
    assert sum(sum(rank["volume"].values()) for rank in ranks) > 0


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in WRONG.items() for name in names])
def test_ranks_that_disagree_all_stop(outcomes, world, name):
    for rank in outcomes("torch", world, f"wrong/{name}"):
        assert re.search(WRONG[world][name], rank["error"])


@pytest.mark.parametrize(
    ("kind", "world", "name"), [(*launched, name) for launched, names in ENGINES.items() for name in names]
)
def test_parameters_come_together_as_they_are_in_the_model(outcomes, kind, world, name):
    ranks = outcomes(kind, world, f"engine/{name}")
    seen: dict[str, list[bool]] = {}
    for rank in ranks:
        for key, equal in rank["wholes"].items():
            seen.setdefault(key, []).extend(equal)
    assert sorted(seen) == ranks[0]["names"] and len(seen) > 20
    assert all(all(equal) for equal in seen.values())
    if name != "dtensors":  # a mesh with two dimensions of replicas repeats it along one
        assert all(len(equal) == 1 for equal in seen.values())
    assert sum(bool(rank["wholes"]) for rank in ranks) == world


def test_replicas_are_the_ranks_of_a_ddp_module_and_nothing_else(outcomes):
    first, second = outcomes("torch", 2, "replicas/ddp")
    for found in (first, second):
        assert all(found["ddp"]) and len(found["ddp"]) > 20
        assert found["ddp_and_other"] == [*found["ddp"], False, False]
        assert found["ignored_bias"] == [True, False]
        assert found["two_groups"] and all(found["two_groups"])  # each by its own group
        for name in ("unwrapped", "ddp_of_one_rank", "join", "local_sgd", "freed"):
            assert found[name] and not any(found[name])
    assert first["rank_0_only"] == [False, False] and "rank_0_only" not in second
