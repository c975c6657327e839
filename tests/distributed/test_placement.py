"""Placement of pieces, in one process; the scripts of this folder have real ranks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import logged
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mars_hf
from mars_hf.distributed import norms, shards
from mars_hf.distributed.norms import GroupSums, group_order, wire_device
from mars_hf.distributed.shards import Shards
from mars_hf.distributed.tensors import ShardSpec

# --- which part of a parameter each rank of a mesh holds, compared with torch's own local tensors -------------------
#
# torch's fake process group stands for the other ranks: it computes local tensors without sending any.


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


@pytest.mark.parametrize(
    ("shape", "placement", "expected"),
    [
        ((128, 256), Shard(0), torch.Size([64, 4])),
        ((101, 128), Shard(0), torch.Size([51, 2])),
        ((64, 256), Shard(1), torch.Size([64, 2])),
        ((64, 192), Shard(1), None),  # 96 columns a rank: within a block
        ((64, 32, 3, 3), Shard(0), torch.Size([32, 5])),
        ((64, 32, 3, 3), Shard(1), None),  # rows over three dimensions
        ((128, 256), Replicate(), torch.Size([128, 4])),
    ],
    ids=str,
)
def test_scales_of_8_bit_states(shape, placement, expected):
    """They are placed like their parameter; where ranks would cut blocks, states are in float32."""
    with one_of(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [placement]))
        mars = mars_hf.Mars([param], lr=1e-3, state_dtype="8bit", clip_threshold=None)
        param.grad = torch.ones_like(param)
        mars.step()
        state = mars.state[param]
        assert state["exp_avg"].dtype == (torch.float32 if expected is None else torch.int8)
        if expected is not None:
            scales = state["exp_avg_scale"]
            assert scales.to_local().shape == expected and scales.placements == param.placements
            whole = math.ceil(param.shape[1:].numel() / 64)
            assert scales.shape == (shape[0], whole)


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


def fused(whole: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Place as transformers places gate and up in one matrix."""
    rank, world = mesh.get_local_rank(), mesh.size()
    part = torch.cat([block.chunk(world)[rank] for block in whole.chunk(2)])
    return nn.Parameter(DTensor.from_local(part, mesh, [_StridedShard(0, split_factor=2)], run_check=False))


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
    (fused, (12, 5), (3,)),
]


def text(value: Any) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize(("place", "shape", "mesh"), PLACED, ids=text)
def test_parts_on_a_mesh(place, shape, mesh):
    whole = count_to(shape)
    ranks = from_all_ranks(shape, mesh, place)
    for rank, held in enumerate(ranks):
        assert rank in held.group and rank in held.replicas
        assert (held.spec.shards == ()) == (held.local.numel() == 0)
        for shard in held.spec.shards:
            part = shard.slice.of(whole)
            assert torch.equal(part.reshape(shard.slice.shape(whole.shape)), held.local)
            assert (shard.numel, shard.whole_numel) == (held.local.numel(), whole.numel())
        # Together the group's ranks hold each element once.
        parts = [shard.slice for other in held.group for shard in ranks[other].spec.shards]
        covered = torch.zeros(shape)
        for part in parts:
            part.of(covered).add_(1)
        assert (covered == 1).all()
        assert len({part.offset for part in parts}) == len(parts)
        for other in held.replicas:
            assert ranks[other].spec.shards == held.spec.shards
    asking = len(ranks) // 2  # it knows the parts of its group without asking
    with one_of(len(ranks), asking):
        slice_of = shards.slices_of(place(whole, make_mesh(*mesh)))
        for number, rank in enumerate(ranks[asking].group):
            expected = [shard.slice for shard in ranks[rank].spec.shards]
            assert expected in ([slice_of(number)], [])
            assert expected or not slice_of(number).shape(whole.shape).numel()


@pytest.mark.parametrize(
    ("dim", "mesh", "group", "replicas"),
    [
        (0, (2, 2, 2), [0, 1, 2, 3], [3, 7]),
        (1, (2, 2, 2), [0, 1, 2, 3], [3, 7]),
        (None, (2, 2, 2), [1, 3], [3, 7]),
        (None, (2, 2), [1, 3], [2, 3]),
        (1, (2, 2), [0, 1, 2, 3], [3]),
    ],
)
def test_groups_of_placements(dim, mesh, group, replicas):
    """Of a mesh (replicate, dp, tp)."""
    held = from_all_ranks((8, 8), mesh, tensor_parallel(dim))[3]
    assert (held.group, held.replicas) == (group, replicas)


def test_work_is_shared_over_the_longest_dimension_of_replicas():
    placed = distributed(Replicate(), Replicate(), Shard(0))
    for held in from_all_ranks((8, 8), (2, 3, 2), placed):
        assert len(held.replicas) == 3 and len(held.group) == 2
    for held in from_all_ranks((8, 8), (3, 2, 2), placed):
        assert len(held.replicas) == 3


def test_sums_are_reduced_in_one_order_of_groups(monkeypatch):
    """Whatever parameter a rank meets first; two ranks would wait for each other in different groups."""
    orders = []
    monkeypatch.setattr(norms, "all_reduce", lambda values, group: orders[-1].append(group) or values)
    monkeypatch.setattr(norms, "_difference", lambda settings, group: None)  # the other ranks of a fake group have none
    with one_of(4, 0):
        mesh = make_mesh(2, 2)
        placed = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]]
        for order in itertools.permutations(placed):
            params = [distributed(*placements)(count_to((4, 4)), mesh) for placements in order]
            for param in params:
                param.grad = param.detach().clone()
            orders.append([])
            with pytest.raises(RuntimeError, match="bring gradients for"):  # they bring none
                mars_hf.Mars(params).step()
    assert len(orders) == 6 and len(orders[0]) > 2 and all(order == orders[0] for order in orders)


def test_group_over_several_dimensions():
    orders = []
    for rank in range(8):
        with one_of(8, rank):
            mesh = make_mesh(2, 2, 2)
            group = shards._group_over(mesh, (1, 2))  # the last rank's is gone with its world
            assert dist.get_process_group_ranks(group) == [rank // 4 * 4 + other for other in range(4)]
            assert shards._group_over(mesh[mesh.mesh_dim_names[1:]], (0, 1)) is group
            assert shards._group_over(mesh, (0, 1, 2)) is dist.group.WORLD
            assert shards._group_over(mesh, (2,)) is mesh.get_group(2)
            groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] + [group]
            orders.append(sorted(range(4), key=lambda index, groups=groups: group_order(groups[index])))
    # Otherwise two ranks would answer each other's questions in different groups.
    assert all(order == orders[0] for order in orders)


def test_group_that_other_ranks_would_have_to_help_with(monkeypatch):
    """NCCL splits a communicator with all of its ranks; those of another pipeline stage do not come."""
    with one_of(8, 1):
        mesh = make_mesh(2, 2, 2)
        mesh = mesh[mesh.mesh_dim_names[1:]]
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cpu"))))
        shards._made_groups.clear()
        with pytest.raises(RuntimeError, match=r"4 of 8 ranks.*init_process_group got a device_id.*Remove device_id"):
            shards._group_over(mesh, (0, 1))


def test_parameter_with_another_index():
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
        ((6, 4), [Shard(0), Replicate()], r"a part of shape \(2, 4\) on this rank"),  # torch would cut (3, 4)
        ((6, 4), [Replicate(), _StridedShard(0, split_factor=2)], "an uneven part of each of 2 blocks of dimension 0"),
    ],
)
def test_other_placements(shape, placements, message):
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


# --- a process group of one (after the tests above, which need that there is none) ------------------------------------


def dtensor(shape, mesh_shape, names, placements) -> nn.Parameter:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    return nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements))


@pytest.fixture
def partitioned(alone) -> tuple[list[nn.Parameter], mars_hf.Mars, nn.Parameter]:
    """Imitate ZeRO-1/2: parameters become views of one padded buffer, and a copy of it is stepped."""
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    mars = mars_hf.Mars(params)
    buffer = torch.cat([param.detach().flatten() for param in params] + [torch.zeros(3)])
    flat = nn.Parameter(buffer.clone())
    for param, start in zip(params, (0, 12), strict=True):
        stretch = slice(start, start + param.numel())
        param.data = buffer[stretch].view_as(param)
        param._hp_mapping, param._dp_group = SimpleNamespace(hp_fragment=flat.detach()[stretch]), None
    mars.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    return params, mars, flat


@pytest.mark.parametrize(("version", "is_refused"), [("0.17.4", True), ("0.18.3+cpu", True), ("0.18.4", False)])
def test_old_deepspeed(partitioned, monkeypatch, version, is_refused):
    """Its ZeRO-2 gives any optimizer wrong gradients."""
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    message = rf"DeepSpeed {re.escape(version)} trains wrong weights.*deepspeed>=0\.18\.4"
    with pytest.raises(RuntimeError, match=message) if is_refused else contextlib.nullcontext():
        partitioned[1].step()


def test_incomplete_pieces(partitioned):
    _, mars, flat = partitioned
    flat.data = flat.data[:7]  # the other ranks' parts are nowhere
    flat.grad = torch.ones(7)
    with pytest.raises(RuntimeError, match=r"gradients for 0\.5833 of parameter 0"):
        mars.step()


def test_experts_over_several_groups(partitioned):
    params, mars, _ = partitioned
    params[1]._dp_group = dist.new_group([0])
    with pytest.raises(RuntimeError, match="2 different process groups"):
        mars.step()


def test_parameters_moved_in_their_buffer(partitioned):
    params, mars, flat = partitioned
    buffer = params[0].untyped_storage()
    for starts in ((0, 12), (10, 0)):
        for param, start in zip(params, starts, strict=True):
            param.data = torch.empty(0).set_(buffer, start, param.shape)
        spec = mars._ranks.shards.spec_of(flat, 0)
        assert [(shard.param_index, shard.start) for shard in spec.shards] == list(enumerate(starts))
        assert mars._ranks.shards.spec_of(flat, 0) == spec


def test_padding_of_zero3_is_no_part_of_a_parameter(alone):
    """A rank's partition is as long as that of the others; what a parameter does not fill may hold anything."""
    param, twin = (nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    mars, plain = mars_hf.Mars([param]), mars_hf.Mars([twin])
    flat = nn.Parameter(torch.ones(20))
    engine = SimpleNamespace(
        grad_position={0: (0, 0, 20)}, get_param_id=lambda param: 0, fp32_partitioned_groups_flat=[flat]
    )
    param.ds_shape, param.ds_numel, param.ds_process_group = param.shape, param.numel(), alone
    param._z3_optimizer, param.data = engine, torch.empty(0)
    mars.param_groups[0]["params"] = [flat]
    for step in range(2):
        flat.grad = torch.cat([torch.linspace(1, 2 + step, 12), torch.full((8,), 100.0)])
        twin.grad = flat.grad[:12].view(4, 3).clone()
        mars.step()
        plain.step()
    torch.testing.assert_close(flat[:12].detach(), twin.detach().flatten(), rtol=1e-6, atol=0)
    assert torch.equal(flat[12:], torch.ones(8))


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_tensor_parallelism_without_dtensors(mark):
    param = nn.Parameter(torch.randn(1, 5))
    setattr(param, mark, True)
    with pytest.raises(RuntimeError, match=r"\(1, 5\).*AutoTP or Megatron.*parallelize_module"):
        mars_hf.Mars([param])
    setattr(param, mark, False)  # as Megatron marks what it has not divided
    mars_hf.Mars([param])


@pytest.mark.parametrize(
    ("part", "has_stepped", "count"), [(None, False, 4), (None, True, 4), (0, False, 2)], ids=["model", "late", "part"]
)
def test_parameters_replaced_by_fully_shard(alone, part, has_stepped, count):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    mars = mars_hf.create(model, lr=3e-3)
    if has_stepped:
        model(torch.ones(2, 3)).sum().backward()
        mars.step()
        mars.zero_grad()
    fully_shard(model if part is None else model[part], mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=rf"replaced {count} parameters.*0\.weight.*Call mars_hf\.create.*after it"):
        mars.step()
    assert has_stepped or not mars.state


def test_parameters_gathered_by_fully_shard(alone):
    """After a forward pass the root's are not sharded: `create` is refused at the first step, and the remedy works."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 3))
    mars = mars_hf.create(model, lr=3e-3)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"4 parameters of the model, 0\.weight.*Call model\.reshard\(\) before"):
        mars.step()
    model(torch.ones(2, 3))
    model.reshard()
    mars = mars_hf.create(model, lr=3e-3)
    model(torch.ones(2, 3)).sum().backward()
    before = model[0].weight.full_tensor().clone()
    mars.step()
    assert not torch.equal(model[0].weight.full_tensor(), before)


def test_parameters_replaced_in_an_optimizer_without_model(alone):
    model = nn.Linear(3, 4)
    mars = mars_hf.Mars(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 3)).sum().backward()
    assert len(logged(mars.step, "nothing trains. fully_shard")) == 1


@pytest.mark.parametrize("is_sharded_first", [False, True])
def test_sharded_parameters_of_no_optimizer(alone, is_sharded_first):
    """Frozen when it was made, or taken out of it since."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if is_sharded_first:
        mars = mars_hf.create(fully_shard(model, mesh=mesh), lr=3e-3)
        mars.param_groups[0]["params"].pop()
    else:  # as accelerate does
        model[0].requires_grad_(False)
        mars, before = mars_hf.create(model, lr=3e-3), list(model.parameters())
        after = dict(zip(before, fully_shard(model, mesh=mesh).parameters(), strict=True))
        for group in mars.param_groups:
            group["params"] = [after[param] for param in group["params"]]
    model(torch.ones(2, 3)).sum().backward()
    mars.step()
    assert len(mars.state) == (3 if is_sharded_first else 2)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0), Shard(1)]])
def test_dtensor_placements(alone, placements, mars_type):
    """Also after a group was removed: parameters then have other places than at first."""
    params = [dtensor((6, 4), (1,) * len(placements), ("dp", "tp")[-len(placements) :], placements) for _ in range(2)]
    twins = [nn.Parameter(param.detach().full_tensor().clone()) for param in params]
    optimizer, plain = (mars_hf.Mars([{"params": [p]} for p in of], mars_type=mars_type) for of in (params, twins))
    for step in range(4):
        if step == 2:
            del optimizer.param_groups[0], plain.param_groups[0]
        for param, twin in zip(params, twins, strict=True):
            twin.grad = torch.randn(6, 4)
            param.grad = distribute_tensor(twin.grad, param.device_mesh, placements)
        optimizer.step()
        plain.step()
        wholes = [param.detach().full_tensor() for param in params]
        torch.testing.assert_close(wholes, [twin.detach() for twin in twins], rtol=1e-6, atol=1e-7)
    assert type(optimizer.state[params[1]]["last_grad"]).__name__ == "DTensor"  # so that checkpoints can be resharded


def test_gradient_on_another_mesh(alone):
    param = dtensor((6, 4), (1,), ("shard",), [Shard(0)])
    optimizer = mars_hf.Mars([param])
    param.grad = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (1, 1)), [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match=r"is on DeviceMesh.*place the gradient like its parameter"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused(alone, use_orig_params):
    model = FullyShardedDataParallel(nn.Linear(4, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"FSDP1 has flattened.*use FSDP2"):
        mars_hf.create(model, lr=3e-3)


def test_wire_device(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    for backend, expected in (("nccl", torch.device("cuda")), ("gloo", cpu)):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        assert wire_device(cpu, None) == expected
        assert wire_device(cuda, None) == cuda


def test_no_references_to_parameters(alone):
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3)), dtensor((6, 4), (1,), ("a",), [Shard(0)])]
    layout = Shards([{"params": params, "role": "matrix"}])
    assert layout.locate([{"params": params}], [True], None) == ({}, None)
    freed = list(map(weakref.ref, params))
    del params
    gc.collect()
    assert [reference() for reference in freed] == [None] * 3


@pytest.mark.parametrize("shape", [(3,), (5,)], ids=["same shape", "other shape"])
def test_replaced_vector(shape):
    model = nn.Linear(4, 3)
    mars = mars_hf.create(model, optimize_1d=True, lr=3e-3)
    model.bias = mars.param_groups[1]["params"][0] = nn.Parameter(torch.ones(shape))
    for _ in range(2):
        model.bias.grad, model.weight.grad = torch.ones(shape), torch.ones(3, 4)
        mars.step()
    assert (model.bias < 1).all()


def test_sums_travel_in_float64(alone, monkeypatch):
    sent = []
    monkeypatch.setattr(norms, "all_reduce", lambda values, group: sent.append(values.dtype) or values)
    group = dist.group.WORLD
    sums = GroupSums(3, 1, torch.device("cpu"))
    sums.register(group)
    sums.add(group, [2], torch.full((1, 1), 1e300, dtype=torch.float64))
    sums.add(group, [1], torch.ones(1, 1, dtype=torch.float32))
    sums.reduce()
    assert sent == [torch.float64]
    assert sums.select(group, [2]).item() == sums.sum_of_row(0).item() == 1e300
    assert sums.select(group, [1]).item() == 1
