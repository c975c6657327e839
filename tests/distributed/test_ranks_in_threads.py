"""What ranks do together in one step: the exchange of matrices, and errors that all of them raise."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import multi_threaded_pg

from mars_hf import Mars
from mars_hf.distributed.shards import Slice
from mars_hf.orthogonalize import Exchange, Matrix, ProcessGroups

SHAPES = [(7, 5), (2, 18), (18, 3), (3, 4, 5), (1, 9), (33, 2), (13, 6)]
CPU = torch.device("cpu")


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


def result_of(tensor: Tensor) -> Tensor:
    """Compute from all of a matrix a result with its shape and dtype but other strides."""
    wide = tensor.double()
    return (wide.mT @ wide @ wide.mT / wide.square().sum()).mT.to(tensor.dtype)


def along(dim: int, ranks: int) -> Callable[[int, int], Slice | None]:
    """Cut as FSDP2 does; of short dimensions some ranks hold nothing."""

    def slice_of(index: int, rank: int) -> Slice:
        full = -(-SHAPES[index][dim] // ranks)
        start = min(rank * full, SHAPES[index][dim])
        return Slice(dim, start, min(full, SHAPES[index][dim] - start))

    return slice_of


def boxes(ranks: int) -> Callable[[int, int], Slice | None]:
    """Cut rows in two, and columns among the others."""
    row, column = along(0, 2), along(1, ranks // 2)
    return lambda index, rank: row(index, rank % 2)._replace(inner=column(index, rank // 2))


def stripes(ranks: int) -> Callable[[int, int], Slice | None]:
    """Cut columns, and those of (3, 4, 5) as transformers cuts fused projections."""
    column = along(1, ranks)
    return lambda index, rank: Slice(1, rank, 1, stripes=4 // ranks) if index == 3 else column(index, rank)


def stretches(ranks: int) -> Callable[[int, int], Slice | None]:
    """Cut as ZeRO-1/2 does: equal parts of one flat buffer."""
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    part = -(-sum(numels) // ranks)

    def slice_of(index: int, rank: int) -> Slice | None:
        first = sum(numels[:index])
        start, end = max(first, rank * part), min(first + numels[index], (rank + 1) * part)
        return Slice(None, start - first, end - start) if start < end else None

    return slice_of


LAYOUTS = {"rows": lambda n: along(0, n), "columns": lambda n: along(1, n), "boxes": boxes, "stripes": stripes}
LAYOUTS |= {"stretches": stretches}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [
        *((layout, ranks, 1) for layout in LAYOUTS for ranks in (2, 4)),
        *((layout, 2, replicas) for layout in ("rows", "stretches") for replicas in (2, 3)),
        *((None, 1, replicas) for replicas in (2, 4)),
    ],
)
def test_every_rank_gets_its_part_of_every_result(layout, ranks, replicas, dtype):
    slice_of = (lambda index, rank: Slice(0, 0, SHAPES[index][0])) if layout is None else LAYOUTS[layout](ranks)
    present = [0, 1, 3, 4, 6]  # some matrices have no gradient in this step

    def run(number: int) -> tuple[bool, list[int]]:
        replica, rank = divmod(number, ranks)
        group = [dist.new_group(list(range(r * ranks, (r + 1) * ranks))) for r in range(replicas)][replica]
        copies = [dist.new_group(list(range(r, ranks * replicas, ranks))) for r in range(ranks)][rank]
        groups = ProcessGroups(group if ranks > 1 else None, copies if replicas > 1 else None, CPU, dtype)
        matrices = [
            Matrix(index, torch.Size(shape), float(index + 1), lambda rank, index=index: slice_of(index, rank))
            for index, shape in enumerate(SHAPES)
        ]
        exchange = Exchange(groups, matrices)
        shards = {}
        for index in present:
            part = slice_of(index, rank)
            if part is not None and (values := part.of(whole(index))).numel():
                shards[index] = values.reshape(part.shape(torch.Size(SHAPES[index]))).to(dtype)
        worked_on, directions = [], {}
        for matrices_of_round in exchange.rounds:
            moving = [(matrix, owner) for matrix, owner in matrices_of_round if matrix.param_index in present]

            def work(owned: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
                worked_on.extend(matrix.param_index for matrix in owned)
                return [result_of(tensor) for tensor in wholes]

            of_round = {matrix.param_index for matrix, _ in moving} & shards.keys()
            directions |= exchange.run(moving, {index: shards[index] for index in of_round}, work)
        same = directions.keys() == shards.keys()
        for index, values in directions.items():
            expected = slice_of(index, rank).of(result_of(whole(index).to(dtype)).contiguous())
            same = same and torch.equal(values, expected.reshape(values.shape)) and values.shape == shards[index].shape
        return same, worked_on

    results = run_ranks(ranks * replicas, run)
    assert all(same for same, _ in results)
    assert sorted(index for _, worked_on in results for index in worked_on) == present  # each once


@pytest.mark.parametrize("mars_type", ["mars-m", "mars-shampoo"])
def test_a_process_group_shares_the_work_and_changes_nothing(mars_type):
    def run(rank: int, shares: bool = True) -> list[Tensor]:
        params = [nn.Parameter(whole(index)) for index in range(len(SHAPES))]
        group = dist.group.WORLD if shares else None
        mars = Mars(params, mars_type=mars_type, ns_dtype="float32", process_group=group)
        for step in range(4):
            for index, param in enumerate(params):
                param.grad = whole(index, step + 1) if index != step else None  # experts come and go
            mars.step()
        return [param.detach() for param in params]

    (expected,) = run_ranks(1, lambda rank: run(rank, shares=False))
    for weights in run_ranks(3, run):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


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
def test_an_error_of_one_rank_stops_all_with_one_message(kind, wrong, mars_type):
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
