"""Where pieces of parameters belong; a process group of one stands for all (tests/distributed has real ones)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mars_hf
from mars_hf import sharding
from mars_hf.regions import Region


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dtensor(shape, mesh_shape, names, placements) -> nn.Parameter:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    return nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements))


def zero12(params) -> nn.Parameter:
    """What ZeRO-1/2 makes of parameters: views of one buffer with padding at its end, and a copy of that to step on."""
    buffer = torch.cat([param.detach().flatten() for param in params] + [torch.zeros(3)])
    flat = nn.Parameter(buffer.clone())
    start = 0
    for param in params:
        param.data = buffer[start : start + param.numel()].view_as(param)
        param._hp_mapping = SimpleNamespace(hp_fragment=flat.detach()[start : start + param.numel()])
        param._dp_group = None
        start += param.numel()
    return flat


def test_flat_partitions_get_the_update_of_their_parameters(alone):
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


def test_pieces_that_do_not_make_up_their_parameters_are_refused(alone):
    param = nn.Parameter(torch.randn(4, 3))
    optimizer = mars_hf.Mars([param])
    flat = nn.Parameter(zero12([param]).detach()[:7])  # the other ranks' parts are nowhere
    param._hp_mapping.hp_fragment = flat.detach()
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(RuntimeError, match=r"are 0\.5833 of it, not 1"):
        optimizer.step()


def test_experts_over_several_groups_are_refused(alone):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    optimizer = mars_hf.Mars(params)
    flat = zero12(params)
    params[1]._dp_group = dist.new_group([0])
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(RuntimeError, match="2 different process groups"):
        optimizer.step()


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_dtensors_are_updated_like_plain_tensors(alone, placements, mars_type):
    param = dtensor((6, 4), (1,), ("shard",), placements)
    twin = nn.Parameter(param.detach().full_tensor().clone())
    optimizer, plain = (mars_hf.Mars([own], mars_type=mars_type) for own in (param, twin))
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        param.grad, twin.grad = distribute_tensor(gradient, param.device_mesh, placements), gradient
        optimizer.step()
        plain.step()
        torch.testing.assert_close(param.detach().full_tensor(), twin.detach(), rtol=1e-6, atol=1e-7)
    assert type(optimizer.state[param]["last_grad"]).__name__ == "DTensor"  # so that checkpoints can be resharded


@pytest.mark.parametrize(
    ("mesh", "names", "placements", "message"),
    [
        ((1,), ("tp",), [Shard(0)], "tensor parallelism is not supported"),
        ((1, 1), ("a", "b"), [Shard(0), Shard(1)], "more than one sharded mesh dimension"),
    ],
)
def test_other_dtensors_are_refused(alone, mesh, names, placements, message):
    param = dtensor((6, 4), mesh, names, placements)
    optimizer = mars_hf.Mars([param])
    param.grad = param.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_a_gradient_that_is_not_laid_out_like_its_parameter_is_refused(alone):
    param = dtensor((6, 4), (1,), ("shard",), [Shard(0)])
    optimizer = mars_hf.Mars([param])
    param.grad = distribute_tensor(torch.ones(6, 4), param.device_mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="placed as"):
        optimizer.step()


def test_fsdp1_is_refused(alone):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(4, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with pytest.raises(RuntimeError, match=r"FSDP1 has flattened.*FSDP2"):
            mars_hf.create(model)


def test_pieces_know_their_place_in_the_parameter(alone):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    layout = sharding.Layout([{"params": params, "role": "matrix"}])
    placement = layout.locate(zero12(params), 0)
    assert [piece.region for piece in placement.pieces] == [Region(None, 0, 12), Region(None, 0, 10)]
    assert placement.group is dist.group.WORLD and placement.replicas is None
    param = dtensor((6, 4), (1,), ("shard",), [Shard(-1)])
    (piece,) = layout.locate(param, 0).pieces
    assert piece.region == Region(1, 0, 4)


def test_shapes_are_those_of_whole_parameters(alone):
    emptied = nn.Parameter(torch.empty(0))  # as DeepSpeed's zero.Init leaves it
    emptied.ds_shape = torch.Size([5, 2])
    params = [nn.Parameter(torch.randn(4, 3)), emptied, dtensor((6, 4), (1,), ("shard",), [Shard(0)])]
    layout = sharding.Layout([{"params": params[:1], "role": "matrix"}])
    layout.extend({"params": params[1:], "role": "matrix"})
    assert layout.shapes == [torch.Size([4, 3]), torch.Size([5, 2]), torch.Size([6, 4])]


def test_one_rank_has_no_replicas(alone):
    model = nn.Linear(3, 2)
    wrapped = nn.parallel.DistributedDataParallel(model)
    params = [*wrapped.parameters(), dtensor((6, 4), (1,), ("replicate",), [Replicate()])]
    assert sharding.replicas_of(params) == [None, None, None]


def test_tensors_on_cpu_travel_by_cuda_where_the_ranks_are_on_gpus(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    for backend, expected in (("nccl", torch.device("cuda")), ("gloo", cpu)):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        assert sharding.wire_device(cpu, None) == expected
        assert sharding.wire_device(cuda, None) == cuda


def test_layout_forgets_freed_parameters():
    param = nn.Parameter(torch.ones(2, 2))
    layout = sharding.Layout([{"params": [param], "role": "matrix"}])
    assert layout.locate(param, 0) is None
    del param
    assert layout._origins[0]() is None
