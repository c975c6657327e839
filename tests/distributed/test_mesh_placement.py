"""Which part of a parameter each rank of a mesh holds, compared with torch's own local tensors; one process.

torch's fake process group stands for the other ranks: it computes local tensors without sending any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mars_hf
from mars_hf.distributed import shards
from mars_hf.distributed.norms import group_order
from mars_hf.distributed.shards import Shards, ShardSpec


class Held(NamedTuple):
    """One rank's part of a parameter."""

    spec: ShardSpec | None
    local: Tensor
    group: list[int]
    replicas: list[int]


@contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


_numbers = itertools.count()


def make_mesh(*shape: int) -> DeviceMesh:
    """Return a mesh over (replicate, dp, tp); torch caches by name what it knows of a mesh, also of destroyed ones."""
    number = next(_numbers)
    names = tuple(f"{name}{number}" for name in ("replicate", "dp", "tp")[-len(shape) :])
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def count_to(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def from_all_ranks(shape: tuple[int, ...], mesh_shape: tuple[int, ...], place: Any) -> list[Held]:
    """Return every rank's part of a parameter that `place(whole, mesh)` puts on a mesh."""
    parts = []
    world = torch.Size(mesh_shape).numel()
    for rank in range(world):
        with one_of(world, rank):
            param = place(count_to(shape), make_mesh(*mesh_shape))
            spec = Shards([{"params": [param], "role": "matrix"}]).spec_of(param, 0)
            groups = (None, None) if spec is None else (spec.group, spec.replicas)
            ranks = [[rank] if group is None else dist.get_process_group_ranks(group) for group in groups]
            parts.append(Held(spec, param.to_local().detach().clone(), *ranks))
    return parts


def tensor_parallel(dim: int | None, fsdp_dim: int = 0) -> Any:
    """Place as parallelize_module does, along `dim` or on every rank, and then as fully_shard does."""

    def place(whole: Tensor, mesh: DeviceMesh) -> DTensor:
        module = nn.Module()
        divided = [Replicate() if dim is None else Shard(dim)]
        module.weight = nn.Parameter(
            distribute_tensor(whole, mesh[mesh.mesh_dim_names[-1]], divided, src_data_rank=None)
        )
        if mesh.ndim > 1:
            fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]], shard_placement_fn=lambda _: Shard(fsdp_dim))
        return module.weight

    return place


def distributed(*placements: Any) -> Any:
    return lambda whole, mesh: nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))


MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 4), (2, 2, 2)]
SHAPES = [(7, 6), (3, 4), (1, 9), (16, 12), (5, 3, 2), (27,)]
PLACED = [
    *((tensor_parallel(0), shape, mesh) for shape, mesh in itertools.product(SHAPES, MESHES)),
    *((tensor_parallel(1), shape, mesh) for shape, mesh in itertools.product(SHAPES[:-1], MESHES)),
    *((tensor_parallel(None), shape, mesh) for shape, mesh in itertools.product(SHAPES, MESHES) if len(mesh) > 1),
    # fully_shard cuts later dimensions evenly only.
    *((tensor_parallel(dim, 1), (7, 24), mesh) for dim, mesh in itertools.product((0, 1, None), MESHES[3:])),
    # From left to right, as distribute_tensor does.
    *((distributed(Shard(0), Shard(0)), shape, (3, 2)) for shape in SHAPES),
    *((distributed(Shard(1), Shard(-2)), shape, (2, 3)) for shape in SHAPES[:4]),
    *((distributed(Shard(0), Replicate(), Shard(1)), shape, (2, 2, 2)) for shape in SHAPES[:-1]),
]


def text(value: Any) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize(("place", "shape", "mesh"), PLACED, ids=text)
def test_each_rank_holds_what_torch_gives_it(place, shape, mesh):
    whole = count_to(shape)
    ranks = from_all_ranks(shape, mesh, place)
    for rank, held in enumerate(ranks):
        assert rank in held.group and rank in held.replicas
        assert (held.spec.shards == ()) == (held.local.numel() == 0)
        for shard in held.spec.shards:
            part = shard.slice.of(whole)
            assert torch.equal(part.reshape(shard.slice.shape(whole.shape)), held.local)
            assert (shard.numel, shard.whole) == (held.local.numel(), whole.numel())
        # Together the group's ranks hold each element once.
        parts = [shard.slice for other in held.group for shard in ranks[other].spec.shards]
        covered = torch.zeros(shape)
        for part in parts:
            part.of(covered).add_(1)
        assert (covered == 1).all()
        assert len({part.offset for part in parts}) == len(parts)
        for other in held.replicas:
            assert ranks[other].spec.shards == held.spec.shards


def test_each_placement_has_its_group():
    """Of a mesh (replicate, dp, tp)."""
    groups = {}
    for name, place in (("rows", tensor_parallel(0)), ("columns", tensor_parallel(1)), ("all", tensor_parallel(None))):
        held = from_all_ranks((8, 8), (2, 2, 2), place)[3]
        groups[name] = held.group, held.replicas
    assert groups == {"rows": ([0, 1, 2, 3], [3, 7]), "columns": ([0, 1, 2, 3], [3, 7]), "all": ([1, 3], [3, 7])}
    held = from_all_ranks((8, 8), (2, 2), tensor_parallel(None))[3]
    assert (held.group, held.replicas) == ([1, 3], [2, 3])
    held = from_all_ranks((8, 8), (2, 2), tensor_parallel(1))[3]
    assert (held.group, held.replicas) == ([0, 1, 2, 3], [3])


def test_a_group_over_several_dimensions_is_made_once():
    with one_of(8, 5):
        mesh = make_mesh(2, 2, 2)
        group = shards._group_over(mesh, (1, 2))
        assert dist.get_process_group_ranks(group) == [4, 5, 6, 7]
        assert shards._group_over(mesh[mesh.mesh_dim_names[1:]], (0, 1)) is group
        assert shards._group_over(mesh, (0, 1, 2)) is dist.group.WORLD
        assert shards._group_over(mesh, (2,)) is mesh.get_group(2)
    with one_of(8, 5):  # the old one is gone with its world
        again = shards._group_over(make_mesh(2, 2, 2), (1, 2))
        assert dist.get_process_group_ranks(again) == [4, 5, 6, 7]


def test_a_group_that_other_ranks_would_have_to_help_with_is_refused(monkeypatch):
    """NCCL splits a communicator with all of its ranks; those of another pipeline stage do not come."""
    with one_of(8, 1):
        mesh = make_mesh(2, 2, 2)
        mesh = mesh[mesh.mesh_dim_names[1:]]
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cpu"))))
        shards._made.clear()
        with pytest.raises(RuntimeError, match=r"4 of 8 ranks.*leave device_id out of init_process_group"):
            shards._group_over(mesh, (0, 1))


def test_all_ranks_take_the_groups_of_a_mesh_in_one_order():
    """Otherwise two ranks would answer each other's questions in different groups."""
    orders = []
    for rank in range(8):
        with one_of(8, rank):
            mesh = make_mesh(2, 2, 2)
            groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] + [shards._group_over(mesh, (1, 2))]
            orders.append(sorted(range(4), key=lambda index, groups=groups: group_order(groups[index])))
    assert all(order == orders[0] for order in orders)


def test_peers_hold_what_they_say():
    """Every rank of a group knows the parts of the others without asking."""
    for place, shape, mesh_shape in PLACED:
        if len(mesh_shape) < 3:
            continue
        ranks = from_all_ranks(shape, mesh_shape, place)
        with one_of(8, 3):
            param = place(count_to(shape), make_mesh(*mesh_shape))
            slice_of = shards.slices_of(param)
            for number, rank in enumerate(ranks[3].group):
                expected = [shard.slice for shard in ranks[rank].spec.shards]
                assert expected in ([slice_of(number)], [])
                assert expected or not slice_of(number).shape(param.shape).numel()


def test_fused_projections_are_blocks_of_which_each_rank_has_a_part():
    """As transformers places gate and up in one matrix."""
    whole = count_to((12, 5))
    held = []
    for rank in range(3):
        with one_of(3, rank):
            mesh = make_mesh(3)
            local = torch.cat([block.chunk(3)[rank] for block in whole.chunk(2)])
            param = nn.Parameter(DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False))
            assert param.shape == whole.shape
            (shard,) = Shards([{"params": [param], "role": "matrix"}]).spec_of(param, 0).shards
            assert torch.equal(shard.slice.of(whole).reshape(local.shape), local)
            held.append(shard.slice)
    covered = torch.zeros(12, 5)
    for part in held:
        part.of(covered).add_(1)
    assert (covered == 1).all()


def test_a_part_of_a_dtensor_that_torch_would_not_cut_is_refused():
    with one_of(2, 0):
        odd = DTensor.from_local(torch.randn(2, 4), make_mesh(2), [Shard(0)], shape=torch.Size([6, 4]), stride=(4, 1))
        with pytest.raises(RuntimeError, match=r"part of shape \(2, 4\) on this rank"):
            Shards([{"params": [odd], "role": "matrix"}]).spec_of(odd, 0)


def test_a_parameter_may_have_another_index_than_at_first():
    """As after a group was removed."""
    with one_of(2, 1):
        params = [nn.Parameter(distribute_tensor(torch.ones(6, 4), make_mesh(2), [Shard(0)])) for _ in range(2)]
        layout = Shards([{"params": params, "role": "matrix"}])
        for index in (1, 0):
            assert [shard.param_index for shard in layout.spec_of(params[1], index).shards] == [index]


@pytest.mark.parametrize(
    ("shape", "placements", "message"),
    [
        ((8, 4), [Partial(), Shard(0)], "a placement other than Shard and Replicate is not supported"),
        ((8, 4), [Shard(0), _StridedShard(0, split_factor=2)], "a strided shard of factor 2 with 1 later shards"),
        ((8, 4), [_StridedShard(0, split_factor=4), Shard(0)], "a strided shard of factor 4 with 2 later shards"),
        ((6, 4), [Replicate(), _StridedShard(0, split_factor=2)], "an uneven part of each of 2 blocks of dimension 0"),
    ],
)
def test_other_placements_are_refused(shape, placements, message):
    with one_of(4, 1):
        mesh = make_mesh(2, 2)
        local = torch.ones(2, 4)
        param = nn.Parameter(
            DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(4, 1))
        )
        mars = mars_hf.Mars([param])
        param.grad = param.detach().clone()
        with pytest.raises(RuntimeError, match=rf"placed as .* on mesh \('dp\d+', 'tp\d+'\): {message}"):
            mars.step()
        assert not mars.state
