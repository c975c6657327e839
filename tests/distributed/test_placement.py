"""Placement of pieces, in one process; the scripts of this folder have real ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mars_hf
from mars_hf.distributed import norms, shards
from mars_hf.distributed.norms import WholeSums, group_order, wire_device
from mars_hf.distributed.shards import Shards, ShardSpec

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
def test_parts_on_a_mesh(place, shape, mesh):
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
    asking = len(ranks) // 2  # it knows the parts of its group without asking
    with one_of(len(ranks), asking):
        slice_of = shards.slices_of(place(whole, make_mesh(*mesh)))
        for number, rank in enumerate(ranks[asking].group):
            expected = [shard.slice for shard in ranks[rank].spec.shards]
            assert expected in ([slice_of(number)], [])
            assert expected or not slice_of(number).shape(whole.shape).numel()


def test_groups_of_placements():
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


def test_group_over_several_dimensions():
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


def test_group_that_other_ranks_would_have_to_help_with(monkeypatch):
    """NCCL splits a communicator with all of its ranks; those of another pipeline stage do not come."""
    with one_of(8, 1):
        mesh = make_mesh(2, 2, 2)
        mesh = mesh[mesh.mesh_dim_names[1:]]
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cpu"))))
        shards._made.clear()
        with pytest.raises(RuntimeError, match=r"4 of 8 ranks.*init_process_group got a device_id.*Remove device_id"):
            shards._group_over(mesh, (0, 1))


def test_order_of_groups():
    """Otherwise two ranks would answer each other's questions in different groups."""
    orders = []
    for rank in range(8):
        with one_of(8, rank):
            mesh = make_mesh(2, 2, 2)
            groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] + [shards._group_over(mesh, (1, 2))]
            orders.append(sorted(range(4), key=lambda index, groups=groups: group_order(groups[index])))
    assert all(order == orders[0] for order in orders)


def test_fused_projections():
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


def test_part_that_torch_would_not_cut():
    with one_of(2, 0):
        odd = DTensor.from_local(torch.randn(2, 4), make_mesh(2), [Shard(0)], shape=torch.Size([6, 4]), stride=(4, 1))
        with pytest.raises(RuntimeError, match=r"part of shape \(2, 4\) on this rank"):
            Shards([{"params": [odd], "role": "matrix"}]).spec_of(odd, 0)


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


def zero12(params) -> nn.Parameter:
    """Imitate ZeRO-1/2: parameters become views of one padded buffer, and a copy of it is stepped."""
    buffer = torch.cat([param.detach().flatten() for param in params] + [torch.zeros(3)])
    flat = nn.Parameter(buffer.clone())
    start = 0
    for param in params:
        param.data = buffer[start : start + param.numel()].view_as(param)
        param._hp_mapping = SimpleNamespace(hp_fragment=flat.detach()[start : start + param.numel()])
        param._dp_group = None
        start += param.numel()
    return flat


def test_flat_partitions(alone):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, plain = mars_hf.Mars(params), mars_hf.Mars(twins)
    flat = zero12(params)
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.collect_metrics(True)
    plain.collect_metrics(True)
    for scale in (0.1, 3.0, 0.2):  # not clipped, clipped, one of each
        gradients = [scale * torch.randn(4, 3), torch.randn(2, 5)]
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        flat.grad = torch.cat([gradient.flatten() for gradient in gradients] + [torch.zeros(3)])
        optimizer.step()
        plain.step()
        torch.testing.assert_close(flat[:12].view(4, 3), twins[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(flat[12:22].view(2, 5), twins[1], rtol=1e-6, atol=1e-7)
        assert optimizer.pop_metrics() == pytest.approx(plain.pop_metrics(), rel=1e-5)


@pytest.mark.parametrize(("version", "is_refused"), [("0.17.4", True), ("0.18.3+cpu", True), ("0.18.4", False)])
def test_old_deepspeed(alone, monkeypatch, version, is_refused):
    """Its ZeRO-2 gives any optimizer wrong gradients."""
    param = nn.Parameter(torch.randn(4, 3))
    optimizer = mars_hf.Mars([param])
    flat = zero12([param])
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    if not is_refused:
        return optimizer.step()
    with pytest.raises(
        RuntimeError, match=rf"DeepSpeed {re.escape(version)} trains wrong weights.*deepspeed>=0\.18\.4"
    ):
        optimizer.step()


def test_incomplete_pieces(alone):
    param = nn.Parameter(torch.randn(4, 3))
    optimizer = mars_hf.Mars([param])
    flat = nn.Parameter(zero12([param]).detach()[:7])  # the other ranks' parts are nowhere
    param._hp_mapping.hp_fragment = flat.detach()
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(RuntimeError, match=r"gradients for 0\.5833 of parameter 0"):
        optimizer.step()


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_tensor_parallelism_without_dtensors(mark):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    optimizer = mars_hf.Mars(params)
    setattr(params[1], mark, True)
    params[1].data = params[1].data[:1]
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"\(1, 5\).*AutoTP or Megatron.*parallelize_module"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="AutoTP or Megatron"):
        mars_hf.Mars(params)
    part = nn.Parameter(params[1].detach().clone())  # in its place, as DeepSpeed's fp32 copies are, without a mark
    optimizer.param_groups[0]["params"][1] = part
    part.grad = torch.ones_like(part)
    with pytest.raises(RuntimeError, match="AutoTP or Megatron"):
        optimizer.step()
    setattr(params[1], mark, False)  # as Megatron marks what it has not divided
    optimizer.step()


def test_parameters_replaced_by_fully_shard(alone):
    mesh = init_device_mesh("cpu", (1,))
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(3)]
    optimizers = [mars_hf.create(models[0]), mars_hf.create(models[1]), mars_hf.Mars(models[2].parameters())]
    fully_shard(models[0], mesh=mesh)
    fully_shard(models[1][0], mesh=mesh)  # a part of the model
    fully_shard(models[2], mesh=mesh)
    for model in models:
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"replaced 4 parameters.*0\.weight.*Call mars_hf\.create.*after it"):
        optimizers[0].step()
    with pytest.raises(RuntimeError, match=r"replaced 2 parameters"):
        optimizers[1].step()
    with pytest.warns(UserWarning, match="nothing trains; fully_shard"):
        optimizers[2].step()
    mars_hf.create(models[0]).step()
    assert optimizers[1].state == {}
    model = nn.Linear(3, 4)
    optimizer = mars_hf.create(model)
    for is_sharded in (False, True):  # after a step
        if is_sharded:
            optimizer.zero_grad()
            fully_shard(model, mesh=mesh)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="replaced 2 parameters") if is_sharded else contextlib.nullcontext():
            optimizer.step()


def test_sharded_parameters_of_no_optimizer(alone):
    """Frozen when it was made, or taken out of it since."""
    mesh = init_device_mesh("cpu", (1,))
    made = {}
    for is_sharded_first in (False, True):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        if is_sharded_first:
            fully_shard(model, mesh=mesh)
        optimizer = mars_hf.create(model)
        if not is_sharded_first:  # as accelerate does
            before = dict(model.named_parameters())
            fully_shard(model, mesh=mesh)
            after = {id(before[name]): param for name, param in model.named_parameters()}
            for group in optimizer.param_groups:
                group["params"] = [after[id(param)] for param in group["params"]]
        else:
            model[0].requires_grad_(True)
            optimizer.param_groups[0]["params"].pop()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        made[is_sharded_first] = len(optimizer.state)
    assert made == {False: 4, True: 3}


def test_experts_over_several_groups(alone):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    optimizer = mars_hf.Mars(params)
    flat = zero12(params)
    params[1]._dp_group = dist.new_group([0])
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(RuntimeError, match="2 different process groups"):
        optimizer.step()


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0), Shard(1)]])
def test_dtensors(alone, placements, mars_type):
    """Also after a group was removed: parameters then have other places than at first."""
    params = [dtensor((6, 4), (1,) * len(placements), ("dp", "tp")[-len(placements) :], placements) for _ in range(2)]
    twins = [nn.Parameter(param.detach().full_tensor().clone()) for param in params]
    optimizer, plain = (
        mars_hf.Mars([{"params": [param]} for param in of], mars_type=mars_type) for of in (params, twins)
    )
    for step in range(4):
        if step == 2:
            del optimizer.param_groups[0], plain.param_groups[0]
        for param, twin in zip(params, twins, strict=True):
            twin.grad = torch.randn(6, 4)
            param.grad = distribute_tensor(twin.grad, param.device_mesh, placements)
        optimizer.step()
        plain.step()
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(param.detach().full_tensor(), twin.detach(), rtol=1e-6, atol=1e-7)
    assert type(optimizer.state[params[1]]["last_grad"]).__name__ == "DTensor"  # so that checkpoints can be resharded


def test_gradient_on_another_mesh(alone):
    param = dtensor((6, 4), (1,), ("shard",), [Shard(0)])
    optimizer = mars_hf.Mars([param])
    param.grad = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (1, 1)), [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match=r"is on DeviceMesh.*place the gradient like its parameter"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("placements", [[Shard(1)], [Replicate()], [Partial()]])
def test_gradient_placed_otherwise(alone, placements):
    """Tensor parallelism leaves whole gradients of embeddings, and partial sums where it divides the sequence."""
    param = dtensor((6, 4), (1,), ("tp",), [Shard(0)])
    twin = nn.Parameter(param.detach().full_tensor().clone())
    gradient = torch.randn(6, 4)
    param.grad = DTensor.from_local(gradient, param.device_mesh, placements)
    twin.grad = gradient.clone()
    for one in (param, twin):
        mars_hf.Mars([one]).step()
    torch.testing.assert_close(param.detach().full_tensor(), twin.detach(), rtol=1e-6, atol=1e-7)


def test_fsdp1(alone):
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(4, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with pytest.raises(RuntimeError, match=r"FSDP1 has flattened.*FSDP2"):
            mars_hf.create(model)


def test_wire_device(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    for backend, expected in (("nccl", torch.device("cuda")), ("gloo", cpu)):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        assert wire_device(cpu, None) == expected
        assert wire_device(cuda, None) == cuda


def test_no_references_to_parameters(alone):
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3)), dtensor((6, 4), (1,), ("a",), [Shard(0)])]
    layout = Shards([{"params": params, "role": "matrix"}])
    assert not layout.locate([{"params": params}], [True], None)
    assert all(not weakref.getweakrefs(param) for param in params)
    freed = list(map(weakref.ref, params))
    del params
    gc.collect()
    assert [reference() for reference in freed] == [None] * 3


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("when", ["before", "between"])
def test_model_moved_after_the_optimizer_is_made(swaps, when, mars_type):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    mars = mars_hf.create(model, mars_type=mars_type, optimize_1d=True)
    params = list(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        for dtype in (torch.bfloat16,) if when == "before" else (torch.float32, torch.bfloat16, torch.float32):
            model.to(dtype)
            before = [param.detach().clone() for param in params]
            model(torch.ones(5, 4, dtype=dtype)).square().sum().backward()
            mars.step()
            mars.zero_grad()
            assert all(param.dtype == dtype for param in params)
            assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert list(map(id, model.parameters())) == list(map(id, params))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mars: pickle.loads(pickle.dumps(mars))])
def test_copied_optimizer_steps_on_its_own_parameters(copied):
    mars = mars_hf.Mars([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))], optimize_1d=True)
    pairs = []
    for optimizer in (mars, copied(mars)):
        pairs.append([param for group in optimizer.param_groups for param in group["params"]])
        for param in pairs[-1]:
            param.grad = torch.arange(1.0, 1 + param.numel()).view(param.shape)
        optimizer.step()
    assert all(one is not other and torch.equal(one, other) for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize("shape", [(3,), (5,)], ids=["same shape", "other shape"])
def test_replaced_vector(shape):
    model = nn.Linear(4, 3)
    mars = mars_hf.create(model, optimize_1d=True)
    with torch.no_grad():
        model.bias = nn.Parameter(torch.ones(shape))
    mars.param_groups[1]["params"][0] = model.bias
    for _ in range(2):
        model.bias.grad, model.weight.grad = torch.ones(shape), torch.ones(3, 4)
        mars.step()
    assert (model.bias < 1).all()


def test_parameters_moved_in_their_buffer(alone):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    layout = Shards([{"params": params, "role": "matrix"}])
    flat = zero12(params)
    before = layout.spec_of(flat, 0)
    assert layout.spec_of(flat, 0) == before
    buffer = params[0].untyped_storage()
    for param, start in zip(params, (10, 0), strict=True):
        param.data = torch.empty(0).set_(buffer, start, param.shape)
    assert [(shard.param_index, shard.start) for shard in layout.spec_of(flat, 0).shards] == [(0, 10), (1, 0)]


def test_sums_travel_in_float64(alone, monkeypatch):
    sent = []
    monkeypatch.setattr(norms, "all_reduce", lambda values, group: sent.append(values.dtype) or values)
    group = dist.group.WORLD
    sums = WholeSums(3, 1, torch.device("cpu"))
    sums.join(group)
    sums.add(group, [2], torch.full((1, 1), 1e300, dtype=torch.float64))
    sums.add(group, [1], torch.ones(1, 1, dtype=torch.float32))
    sums.reduce()
    assert sent == [torch.float64]
    assert sums.of(group, [2]).item() == sums.total(0).item() == 1e300
    assert sums.of(group, [1]).item() == 1
