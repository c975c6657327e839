"""Placement of pieces; a process group of one stands for all (the scripts of this folder have real ones)."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import mars_hf
from mars_hf.distributed import norms, shards
from mars_hf.distributed.norms import WholeSums, wire_device
from mars_hf.distributed.shards import Shards, Slice


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


@pytest.mark.parametrize(("version", "is_refused"), [("0.17.4", True), ("0.18.3+cpu", True), ("0.18.4", False)])
def test_an_old_deepspeed_is_refused(alone, monkeypatch, version, is_refused):
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


def test_pieces_that_do_not_make_up_their_parameters_are_refused(alone):
    param = nn.Parameter(torch.randn(4, 3))
    optimizer = mars_hf.Mars([param])
    flat = nn.Parameter(zero12([param]).detach()[:7])  # the other ranks' parts are nowhere
    param._hp_mapping.hp_fragment = flat.detach()
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(RuntimeError, match=r"gradients for 0\.5833 of parameter 0"):
        optimizer.step()


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_parts_of_tensor_parallelism_without_dtensors_are_refused(mark):
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


def test_parameters_that_fully_shard_has_replaced_are_missed(alone):
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


def test_parameters_that_are_not_the_optimizers_may_be_sharded(alone):
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


def test_parameters_that_fully_shard_replaces_after_a_step_are_missed_too(alone):
    model = nn.Linear(3, 4)
    optimizer = mars_hf.create(model)
    for is_sharded in (False, True):
        if is_sharded:
            optimizer.zero_grad()
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="replaced 2 parameters") if is_sharded else contextlib.nullcontext():
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
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0), Shard(1)]])
def test_dtensors_are_updated_like_plain_tensors(alone, placements, mars_type):
    param = dtensor((6, 4), (1,) * len(placements), ("dp", "tp")[-len(placements) :], placements)
    twin = nn.Parameter(param.detach().full_tensor().clone())
    optimizer, plain = (mars_hf.Mars([one], mars_type=mars_type) for one in (param, twin))
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        param.grad, twin.grad = distribute_tensor(gradient, param.device_mesh, placements), gradient
        optimizer.step()
        plain.step()
        torch.testing.assert_close(param.detach().full_tensor(), twin.detach(), rtol=1e-6, atol=1e-7)
    assert type(optimizer.state[param]["last_grad"]).__name__ == "DTensor"  # so that checkpoints can be resharded


def test_a_gradient_on_another_mesh_is_refused(alone):
    param = dtensor((6, 4), (1,), ("shard",), [Shard(0)])
    optimizer = mars_hf.Mars([param])
    param.grad = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (1, 1)), [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match=r"is on DeviceMesh.*place the gradient like its parameter"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("placements", [[Shard(1)], [Replicate()], [Partial()]])
def test_a_gradient_may_be_placed_otherwise_than_its_parameter(alone, placements):
    """Tensor parallelism leaves whole gradients of embeddings, and partial sums where it divides the sequence."""
    param = dtensor((6, 4), (1,), ("tp",), [Shard(0)])
    twin = nn.Parameter(param.detach().full_tensor().clone())
    gradient = torch.randn(6, 4)
    param.grad = DTensor.from_local(gradient, param.device_mesh, placements)
    twin.grad = gradient.clone()
    for one in (param, twin):
        mars_hf.Mars([one]).step()
    torch.testing.assert_close(param.detach().full_tensor(), twin.detach(), rtol=1e-6, atol=1e-7)


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
    layout = Shards([{"params": params, "role": "matrix"}])
    spec = layout.spec_of(zero12(params), 0)
    assert [shard.slice for shard in spec.shards] == [Slice(None, 0, 12), Slice(None, 0, 10)]
    assert spec.group is dist.group.WORLD and spec.replicas is None
    assert layout.spec_of(dtensor((6, 4), (1,), ("shard",), [Shard(-1)]), 0) is None  # one rank holds it whole


def test_shapes_are_those_of_whole_parameters(alone):
    emptied = nn.Parameter(torch.empty(0))  # as DeepSpeed's zero.Init leaves it
    emptied.ds_shape = torch.Size([5, 2])
    params = [nn.Parameter(torch.randn(4, 3)), emptied, dtensor((6, 4), (1,), ("shard",), [Shard(0)])]
    layout = Shards([{"params": params[:1], "role": "matrix"}])
    layout.extend({"params": params[1:], "role": "matrix"})
    assert layout.shapes == [torch.Size([4, 3]), torch.Size([5, 2]), torch.Size([6, 4])]


def test_one_rank_has_no_replicas(alone):
    assert shards.replicas_in_mesh(dtensor((6, 4), (1,), ("replicate",), [Replicate()])) is None


def test_tensors_on_cpu_travel_by_cuda_where_the_ranks_are_on_gpus(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    for backend, expected in (("nccl", torch.device("cuda")), ("gloo", cpu)):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        assert wire_device(cpu, None) == expected
        assert wire_device(cuda, None) == cuda


def test_a_layout_neither_holds_parameters_nor_refers_to_them(alone):
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
def test_a_model_can_be_moved_after_the_optimizer_is_made(swaps, when, mars_type):
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
def test_a_copied_optimizer_steps_on_its_own_parameters(copied):
    mars = mars_hf.Mars([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))], optimize_1d=True)
    twin = copied(mars)
    for optimizer in (mars, twin):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.arange(1.0, 1 + param.numel()).view(param.shape)
        optimizer.step()
    for one, other in zip(mars.param_groups, twin.param_groups, strict=True):
        for param, copy_ in zip(one["params"], other["params"], strict=True):
            assert param is not copy_ and torch.equal(param, copy_)


@pytest.mark.parametrize("shape", [(3,), (5,)], ids=["same shape", "other shape"])
def test_a_vector_of_a_module_may_be_replaced(shape):
    model = nn.Linear(4, 3)
    mars = mars_hf.create(model, optimize_1d=True)
    with torch.no_grad():
        model.bias = nn.Parameter(torch.ones(shape))
    mars.param_groups[1]["params"][0] = model.bias
    for _ in range(2):
        model.bias.grad, model.weight.grad = torch.ones(shape), torch.ones(3, 4)
        mars.step()
    assert (model.bias < 1).all()


def test_a_plain_vector_may_be_replaced_by_one_of_its_shape():
    mars = mars_hf.Mars([torch.ones(4, 3, requires_grad=True), torch.ones(3, requires_grad=True)], optimize_1d=True)
    vector = torch.ones(3, requires_grad=True)
    mars.param_groups[1]["params"][0] = vector
    vector.grad = torch.ones(3)
    mars.step()
    assert (vector < 1).all()


def test_a_flat_tensor_of_unknown_origin_is_refused():
    mars = mars_hf.Mars([torch.ones(4, 3, requires_grad=True), torch.ones(3, requires_grad=True)], optimize_1d=True)
    flat = nn.Parameter(torch.ones(12))
    flat.grad = torch.ones(12)
    mars.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match=r"flat tensor of shape \(12,\) that is none of the parameters"):
        mars.step()


def test_a_placement_is_found_anew_where_parameters_have_moved_in_their_buffer(alone):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 5))]
    layout = Shards([{"params": params, "role": "matrix"}])
    flat = zero12(params)
    before = layout.spec_of(flat, 0)
    assert layout.spec_of(flat, 0) == before
    buffer = params[0].untyped_storage()
    for param, start in zip(params, (10, 0), strict=True):
        param.data = torch.empty(0).set_(buffer, start, param.shape)
    assert [(shard.param_index, shard.start) for shard in layout.spec_of(flat, 0).shards] == [(0, 10), (1, 0)]


def test_parameters_are_found_among_all_objects(alone):
    params = [nn.Parameter(torch.randn(4, 3))]
    layout = Shards([{"params": params, "role": "matrix"}])
    assert [shard.param_index for shard in layout.spec_of(zero12(params), 0).shards] == [0]


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_dtensors_step_after_another_group_was_removed(alone, mars_type):
    """The parameters then have other places than at first."""
    one, two = (dtensor((6, 4), (1,), ("a",), [Shard(0)]) for _ in range(2))
    twin = nn.Parameter(two.detach().full_tensor().clone())
    vector = torch.ones(3, requires_grad=True)
    mars = mars_hf.Mars([{"params": [vector]}, {"params": [one]}, {"params": [two]}], mars_type=mars_type)
    plain = mars_hf.Mars([twin], mars_type=mars_type)
    del mars.param_groups[:2]
    two.grad, twin.grad = distribute_tensor(torch.ones(6, 4), two.device_mesh, [Shard(0)]), torch.ones(6, 4)
    mars.step()
    plain.step()
    torch.testing.assert_close(two.detach().full_tensor(), twin.detach(), rtol=1e-6, atol=1e-7)


def test_sums_travel_in_float64_whatever_is_here(alone, monkeypatch):
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


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_gradients_of_a_part_stop_the_step(alone, fraction):
    sums = WholeSums(3, 1, torch.device("cpu"))
    sums.join(dist.group.WORLD)
    sums.add_present(dist.group.WORLD, 1, fraction)
    if fraction == 0.5:
        with pytest.raises(RuntimeError, match=r"gradients for 0\.5000 of parameter 1"):
            sums.reduce()
    else:
        sums.reduce()
        assert sums.present(dist.group.WORLD) == ({1} if fraction else set())


def test_an_error_says_whose_it_is(alone):
    sums = WholeSums(3, 1, torch.device("cpu"))
    sums.join(dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"^rank 0: a wrong state$"):
        sums.reduce(ValueError("a wrong state"))
