"""What ranks do together in one step: the exchange of matrices, and errors that all of them raise."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import multi_threaded_pg
from transformers import TrainerControl, TrainerState

from mars_hf import Mars, NonFiniteCallback, NonFiniteError
from mars_hf.arithmetic import directions as directions_module
from mars_hf.distributed.tensors import local

SHAPES = [(7, 5), (2, 18), (18, 3), (3, 4, 5), (1, 9), (33, 2), (13, 6)]


def run_ranks(world: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what a function returns on each rank, a thread on torch's own process group, or what it raises there."""
    torch.set_num_threads(1)
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()
    results: list[Any] = [None] * world

    def one(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    multi_threaded_pg._uninstall_threaded_pg()
    return results


def whole(index: int, seed: int = 0) -> Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(100 * seed + index))


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    **{f"rows over {ranks}": ((ranks,), [Shard(0)]) for ranks in (2, 4)},  # of short dimensions some hold nothing
    "columns": ((4,), [Shard(1)]),
    **{f"boxes over {ranks}": ((2, ranks // 2), [Shard(0), Shard(1)]) for ranks in (4, 6)},
    "stripes": ((2,), [_StridedShard(1, split_factor=2)]),
    **{f"rows of {replicas} replicas": ((replicas, 2), [Replicate(), Shard(0)]) for replicas in (2, 3)},
    "replicas": ((4,), [Replicate()]),
    "process group": ((3,), []),
    "gradients by columns": ((2,), [Shard(0)]),
    "whole gradients": ((2,), [Shard(0)]),  # tensor parallelism leaves those of embeddings
}
OF_GRADIENTS: dict[str, list[Any]] = {"gradients by columns": [Shard(1)], "whole gradients": [Replicate()]}


def place(tensor: Tensor, mesh: DeviceMesh, placements: list[Any]) -> Tensor:
    """Return a rank's tensor: whole, or a DTensor; stripes are those of transformers' fused projections."""
    if not placements:
        return tensor
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    if tensor.shape[1] % 4:
        return distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None)
    part = torch.cat([block.chunk(2, 1)[mesh.get_local_rank()] for block in tensor.chunk(2, 1)], 1)
    return DTensor.from_local(part, mesh, placements, run_check=False)


@pytest.mark.parametrize(
    ("mars_type", "ns_dtype", "normalize_rows"),
    [
        ("mars-m", "float32", None),
        ("mars-m", "float32", 0.5),
        ("mars-shampoo", "float32", None),
        pytest.param("mars-m", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param("mars-m", "bfloat16", 0.5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_matrices(layout, mars_type, ns_dtype, normalize_rows):
    """Every rank gets its part of every direction, each made once, and weights and rows are those of one rank."""
    shape, placements = LAYOUTS[layout]

    def run(mesh: DeviceMesh, placements: list[Any], process_group: Any) -> tuple[list[Tensor], dict[int, Any]]:
        params = [nn.Parameter(place(whole(index), mesh, placements)) for index in range(len(SHAPES))]
        settings: dict[str, Any] = {"mars_type": mars_type, "ns_dtype": ns_dtype, "clip_threshold": None, "lr": 1.0}
        settings["normalize_rows"] = normalize_rows
        mars = Mars(params, **settings, process_group=process_group)
        for step in range(3):
            for index, param in enumerate(params):  # experts come and go, one never comes
                gradient = place(whole(index, step + 1), mesh, placements and OF_GRADIENTS.get(layout, placements))
                param.grad = None if index in (step, 5) else gradient
            mars.step()
        rows = {index: mars.state.get(param, {}).get("row_avg_sq") for index, param in enumerate(params)}
        return [param.detach() for param in params], rows

    def compare(rank: int) -> float:
        mesh = init_device_mesh("cpu", shape)
        weights, rows = run(mesh, placements, None if placements else dist.group.WORLD)
        pairs = zip(weights, [place(tensor, mesh, placements) for tensor in expected], strict=True)
        held = [index for index, param in enumerate(weights) if normalize_rows and local(param).numel() and index != 5]
        pairs = [*pairs, *[(rows[index], expected_rows[index]) for index in held]]
        return max((local(a) - local(b)).abs().amax().item() for a, b in pairs if local(a).numel())

    def rounded(momenta: list[Tensor], settings: Any, dtype: torch.dtype, rows: list[Tensor]) -> list[Tensor]:
        """Directions travel in the dtype that made them."""
        return directions_module.compute_directions(momenta, settings, getattr(torch, ns_dtype), rows)

    with mock.patch("mars_hf.step.ranks.compute_directions", rounded):
        ((expected, expected_rows),) = run_ranks(1, lambda rank: run(init_device_mesh("cpu", (1,)), [], None))
    assert {index for index, row in expected_rows.items() if row is None} == ({5} if normalize_rows else {*range(7)})
    made: list[torch.Size] = []

    def noted(momenta: list[Tensor], *args: Any) -> list[Tensor]:
        made.extend(momentum.shape for momentum in momenta)
        return directions_module.compute_directions(momenta, *args)

    with mock.patch("mars_hf.step.ranks.compute_directions", noted):
        results = run_ranks(torch.Size(shape).numel(), compare)
    assert max(results) == 0
    steps = [SHAPES[index] for step in range(3) for index in range(len(SHAPES)) if index not in (step, 5)]
    assert sorted(made) == sorted(steps)


@pytest.mark.parametrize(
    ("mars_type", "settings"),
    [
        ("mars-m", {"ns_dtype": "float32", "clip_threshold": None}),
        ("mars-shampoo", {"ns_dtype": "float32", "clip_threshold": 1e9}),
        ("mars-lion", {"clip_threshold": 1e9}),
        ("mars-lion", {"clip_threshold": None, "max_grad_norm": 1e9}),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_agree_on_what_rests(layout, mars_type, settings):
    """Whole gradients decide: ranks with zeros alone move with the others, and experts rest wherever parts are."""
    shape, placements = LAYOUTS[layout]

    def gradient_of(index: int, step: int) -> Tensor:
        gradient = 1e-2 * whole(index, step + 1)
        if step and index == 0:
            return torch.zeros_like(gradient)
        if step and index == 2:
            gradient[1:] = 0  # some ranks have nothing else
        if step and index == 3:
            gradient[step] = 0
        return gradient

    def run(mesh: DeviceMesh, placements: list[Any], process_group: Any) -> list[Tensor]:
        params = [nn.Parameter(place(whole(index), mesh, placements)) for index in range(len(SHAPES))]
        mars = Mars(params, lr=1.0, mars_type=mars_type, process_group=process_group, **settings)
        for step in range(3):
            for index, param in enumerate(params):
                placed = placements and OF_GRADIENTS.get(layout, placements)
                param.grad = place(gradient_of(index, step), mesh, placed)
            mars.step()
        return [param.detach() for param in params]

    def compare(rank: int) -> float:
        mesh = init_device_mesh("cpu", shape)
        weights = run(mesh, placements, None if placements else dist.group.WORLD)
        pairs = zip(weights, [place(tensor, mesh, placements) for tensor in expected], strict=True)
        return max((local(a) - local(b)).abs().amax().item() for a, b in pairs if local(a).numel())

    (expected,) = run_ranks(1, lambda rank: run(init_device_mesh("cpu", (1,)), [], None))
    assert max(run_ranks(torch.Size(shape).numel(), compare)) < (1e-5 if mars_type == "mars-lion" else 1e-3)


@pytest.mark.parametrize("clip_threshold", [None, 1e9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_signs_rest_where_gradients_are_zero(layout, clip_threshold):
    """Rows without a token, idle experts and shards of zeros alike, whatever a step adds up over the ranks."""
    shape, placements = LAYOUTS[layout]
    gradients = [whole(index, 1) for index in range(len(SHAPES))]
    for gradient in gradients:
        gradient[1::2] = 0  # some ranks have nothing else

    def run(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", shape)
        params = [nn.Parameter(place(whole(index), mesh, placements)) for index in range(len(SHAPES))]
        process_group = None if placements else dist.group.WORLD
        settings: dict[str, Any] = {"mars_type": "mars-lion", "clip_threshold": clip_threshold}
        mars = Mars(params, lr=0.5, process_group=process_group, **settings)
        for step in range(3):
            mars.collect_metrics(step == 1)  # whose sums decide nothing either
            for index, param in enumerate(params):
                placed = placements and OF_GRADIENTS.get(layout, placements)
                param.grad = place(whole(index, 1) if step == 0 else gradients[index], mesh, placed)
            mars.step()
        wanted = [whole(index) - 0.5 * whole(index, 1).sign() for index in range(len(SHAPES))]
        wanted = [weights - gradient.sign() for weights, gradient in zip(wanted, gradients, strict=True)]
        pairs = zip(params, [place(tensor, mesh, placements) for tensor in wanted], strict=True)
        return [(local(found.detach()) - local(expected)).abs().sum() for found, expected in pairs]

    for errors in run_ranks(torch.Size(shape).numel(), run):
        assert max(errors) < 1e-4


def sharded(tensor: Tensor, mesh: DeviceMesh, placements: list[Any]) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor, mesh, placements, src_data_rank=None))


def set_gradient(param: Any, tensor: Tensor) -> None:
    """Give a parameter its part of a whole gradient."""
    if isinstance(param, DTensor):
        param.grad = distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)
    else:
        param.grad = tensor.clone()


def test_parameters_of_one_shape_over_different_process_groups():
    """Each is clipped by the norm over its own ranks: they share no list, whose sums go to one group."""
    settings = {"lr": 0.1, "clip_threshold": 0.5}
    shape = (8, 4)
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    twins = [nn.Parameter(tensor.clone()) for tensor in wholes[:2]]
    expected = Mars(twins, **settings)

    def run(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2))
        placements = [[Shard(0), Replicate()], [Replicate(), Shard(0)]]
        params = [sharded(tensor, mesh, placed) for tensor, placed in zip(wholes, placements, strict=False)]
        mars = Mars(params, **settings)
        for step in range(2):
            for index, param in enumerate(params):
                set_gradient(param, 10**index * wholes[2 + 2 * step + index])
            mars.step()
        return max((param.full_tensor() - twin).abs().max().item() for param, twin in zip(params, twins, strict=True))

    for step in range(2):
        for index, twin in enumerate(twins):
            twin.grad = 10**index * wholes[2 + 2 * step + index]
        expected.step()
    assert max(run_ranks(4, run)) < 1e-6


def test_noise_of_shards_differs():
    """Each rank rounds its part of a parameter by noise of its own: equal parts with equal gradients part ways."""

    def run(rank: int) -> Tensor:
        param = sharded(torch.ones(60, 40, dtype=torch.bfloat16), init_device_mesh("cpu", (2,)), [Shard(0)])
        mars = Mars([param], lr=1e-3, rounding="stochastic")
        set_gradient(param, torch.ones(60, 40, dtype=torch.bfloat16))
        mars.step()
        return (local(param.detach()) != 1).float()

    one, other = run_ranks(2, run)
    independent = 2 * one.mean() * (1 - one.mean())
    assert 0.05 < one.mean() < 0.95 and 0.8 < (one != other).float().mean() / independent < 1.25


def test_metrics_count_each_parameter_once():
    """One divided over the ranks, another one whole on each; and once when they are read."""
    shapes, sizes = ((6, 4), (3, 4), (8, 2)), (10.0, 0.01, 0.01)
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed, shape in enumerate(shapes)]

    def run(params: list[Any]) -> list[dict[str, float]]:
        mars, rows = Mars(params), []
        for step in range(3):
            mars.collect_metrics(True)
            for param, whole, size in zip(params, wholes, sizes, strict=True):
                set_gradient(param, size * (whole + step))
            mars.step()
            rows.append(mars.pop_metrics())
        return rows

    def on_rank(rank: int) -> list[dict[str, float]]:
        mesh = init_device_mesh("cpu", (2,))
        return run([sharded(wholes[0], mesh, [Shard(0)]), nn.Parameter(wholes[1].clone()), nn.Parameter(wholes[2] + 0)])

    expected = run([nn.Parameter(whole.clone()) for whole in wholes])
    assert expected[2]["mars/clip_fraction"] == pytest.approx(1 / 3)
    for rows in run_ranks(2, on_rank):
        assert rows == [pytest.approx(row, rel=1e-5) for row in expected]


WRONG = {
    "gradient": lambda param, state: setattr(param, "grad", None),
    "state": lambda param, state: state.update(exp_avg=torch.zeros(3)),
    "step": lambda param, state: state.update(step="two"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("kind", "mars_type"),
    [
        *itertools.product(["sharded", "hybrid"], ["mars-adamw", "mars-m"]),
        ("replicated", "mars-m"),  # ranks that share nothing do not wait for each other
    ],
)
def test_error_of_one_rank_stops_all(kind, wrong, mars_type):
    def run(rank: int) -> tuple[int, str] | None:
        params, group = [nn.Parameter(whole(index)) for index in (0, 2, 6)], dist.group.WORLD
        if kind != "replicated":
            mesh, group = init_device_mesh("cpu", (4,) if kind == "sharded" else (2, 2)), None
            placed = [Shard(0)] if kind == "sharded" else [Replicate(), Shard(0)]
            params = [nn.Parameter(distribute_tensor(param.detach(), mesh, placed)) for param in params]
        mars = Mars(params, mars_type=mars_type, process_group=group)
        for step in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            before = [param.detach().clone() for param in params]
            if step and rank == 1:
                WRONG[wrong](params[1], mars.state[params[1]])
            try:
                mars.step()
            except RuntimeError as error:
                local = [getattr(tensor, "to_local", tensor.clone)() for tensor in (*before, *params)]
                assert all(torch.equal(a, b) for a, b in zip(local[:3], local[3:], strict=True))
                return step, str(error)
        return None

    results = run_ranks(4, run)
    assert all(result == results[0] for result in results), results
    step, message = results[0]
    assert step == 1
    assert ("rank 1: " in message) or "bring gradients for" in message


def test_a_bad_loss_of_one_rank_stops_all(tmp_path, caplog):
    """NonFiniteCallback takes the largest flag over ranks, so that no rank waits for one that has stopped."""
    args, state, control = arguments(tmp_path), TrainerState(is_world_process_zero=True), TrainerControl()

    def run(rank: int) -> list[str]:
        callback, ends = NonFiniteCallback(patience=2), []
        for losses in ((1.0, 1.0), (1.0, float("nan")), (1.0, 1.0), (float("inf"), 1.0), (1.0, float("nan"))):
            callback.watch("loss", losses[rank])
            try:
                callback.on_optimizer_step(args, state, control)
                ends.append("")
            except NonFiniteError as error:
                ends.append(str(error).split(";")[0])
        return ends

    stopped = "2 steps in a row with a non-finite loss or gradient"
    assert run_ranks(2, run) == [["", "", "", "", stopped]] * 2
