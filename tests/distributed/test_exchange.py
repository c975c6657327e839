"""Work on whole parameters by one process; other files of this folder have several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mars_hf.distributed.exchange import Exchange, agree, digest
from mars_hf.distributed.routes import Region

SHAPES = {0: torch.Size([4, 3]), 2: torch.Size([2, 3, 5]), 5: torch.Size([1, 7])}
COSTS = dict.fromkeys(SHAPES, 1.0)


def make(regions, *, shards=None, replicas=None, dtype=torch.float32) -> Exchange:
    return Exchange(SHAPES, COSTS, regions, shards=shards, replicas=replicas, device=torch.device("cpu"), dtype=dtype)


def everything() -> dict[int, Region]:
    return {slot: Region.everything(shape) for slot, shape in SHAPES.items()}


def flat() -> dict[int, Region]:
    return {slot: Region(None, 0, shape.numel()) for slot, shape in SHAPES.items()}


def reverse(wholes):
    """Return a result that needs the whole and has other strides."""
    return {slot: whole.flip(-1).mT.contiguous().mT for slot, whole in wholes.items()}


@pytest.mark.parametrize("regions", [everything, flat])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_work_gets_the_whole_rounded_and_results_come_back_as_pieces(regions, dtype):
    wholes = {slot: torch.randn(shape) for slot, shape in SHAPES.items()}
    pieces = {slot: region.of(wholes[slot]) for slot, region in regions().items()}
    exchange = make(regions(), dtype=dtype)
    found = exchange.run(pieces, reverse)
    assert found.keys() == SHAPES.keys()
    for slot, whole in wholes.items():
        expected = whole.to(dtype).flip(-1).view(pieces[slot].shape)
        assert found[slot].dtype == dtype
        assert torch.equal(found[slot], expected)
    assert exchange.volume == {"to_owners": 0, "from_owners": 0, "replicas": 0}


def test_results_of_a_higher_precision_are_rounded_as_for_others():
    exchange = make(everything(), dtype=torch.bfloat16)
    third = torch.full((4, 3), 1 / 3, dtype=torch.float64)
    pieces = {slot: torch.ones(shape) for slot, shape in SHAPES.items()}
    found = exchange.run(pieces, lambda wholes: {**wholes, 0: third})
    assert torch.equal(found[0], third.bfloat16())


@pytest.mark.parametrize("way", ["shards", "replicas"])
def test_a_group_of_one_rank_is_no_group(alone, way):
    exchange = make(everything(), **{way: alone})
    pieces = {slot: torch.randn(shape) for slot, shape in SHAPES.items()}
    found = exchange.run(pieces, lambda wholes: {slot: 2 * whole for slot, whole in wholes.items()})
    assert all(torch.equal(found[slot], 2 * piece) for slot, piece in pieces.items())


def test_a_tensor_in_another_memory_order_is_worked_on_in_its_shape():
    pieces = {slot: torch.randn(shape) for slot, shape in SHAPES.items()}
    pieces[0] = torch.randn(3, 4).mT
    found = make(everything()).run(pieces, lambda wholes: wholes)
    assert torch.equal(found[0], pieces[0])


def test_ranks_agree_on_what_looks_the_same_and_see_each_flag(alone, monkeypatch):
    cpu = torch.device("cpu")
    assert agree([(0, "a")], alone, cpu, True, False) == (True, (True, False))

    def with_another(values):
        """Simulate another rank with these values and the second flag."""

        def all_reduce(sent, op, group):
            assert op == dist.ReduceOp.MAX and sent.dtype == torch.int64
            number = int(digest(values)[:15], 16)
            sent.copy_(torch.maximum(sent, torch.tensor([number, -number, 0, 1])))

        monkeypatch.setattr(dist, "all_reduce", all_reduce)

    with_another([(0, "a")])
    assert agree([(0, "a")], alone, cpu, True, False) == (True, (True, True))
    for other in ([(0, "b")], [(1, "a")], []):
        with_another(other)
        assert agree([(0, "a")], alone, cpu, False, False) == (False, (False, True))


def test_nothing_to_do_is_no_call_of_work():
    def work(wholes):
        raise AssertionError("called")

    assert make({}).run({}, work) == {}
    empty = Region(0, 4, 0)
    found = make({0: empty}, dtype=torch.bfloat16).run({0: torch.empty(0, 3)}, work)
    assert found[0].shape == (0, 3) and found[0].dtype == torch.bfloat16


def test_a_part_that_is_nowhere_is_refused():
    with pytest.raises(RuntimeError, match=r"dimension 0 \[0, 3\) of parameter 0"):
        make({**everything(), 0: Region(0, 0, 3)})
