"""Share work on whole matrices among ranks, with pieces cut by hand or by an engine.

    torchrun --nproc_per_node 2 exchange.py OUTPUT KIND/NAME ...

`cut/LAYOUT_DTYPE`: parameters of odd shapes, cut as LAYOUT says. `engine/NAME`: those of a model, as an engine gives
them to `Mars.step`. `wrong/NAME`: ranks that disagree. `replicas/ddp`: which ranks replicate which parameters.

Each writes OUTPUT/<run>.json: each rank's findings.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from train import DEEPSPEED, deepspeed_config, shard
from worker import import_deepspeed, main
from workload import ACCUMULATION, CASES, Tokens, build_model

import mars_hf
from mars_hf.distributed import dtensors, replicas
from mars_hf.distributed.exchange import Exchange
from mars_hf.distributed.placement import cut
from mars_hf.distributed.routes import Region

# By slot; slots may have gaps. Some shapes have fewer rows or columns than ranks.
SHAPES = {
    slot: torch.Size(shape)
    for slot, shape in {0: (7, 5), 1: (2, 18), 3: (18, 3), 4: (3, 4, 5), 6: (1, 9), 7: (33, 2), 9: (13, 6)}.items()
}
COSTS = {slot: float(shape.numel() * min(shape)) for slot, shape in SHAPES.items()}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU = torch.device("cpu")


class CountBytes(TorchDispatchMode):
    """Count the bytes that this rank sends to others, by kind of collective."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            output, given = args[0], args[1]
            # An all-gather sends as much as it receives; no rank sends itself anything by all-to-all.
            own = given.nbytes if "allgather" in func.__name__ else 0
            self.sent.append((func.__name__.split(".")[0], output.nbytes - own if own else given.nbytes))
        return func(*args, **(kwargs or {}))


def whole_parameter(slot: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(slot))


def make_result(whole: Tensor) -> Tensor:
    """Compute from all of a matrix a result with its shape and dtype but other strides."""
    wide = whole.double()
    product = wide.mT @ wide @ wide.mT / wide.square().sum()
    return product.mT.to(whole.dtype)


def gathered(value: Any) -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


# --- cut by hand ---------------------------------------------------------------------------------------------------


def along(dim: int, rank: int, ranks: int) -> dict[int, Region]:
    """Cut as FSDP2 does; of short dimensions some ranks hold nothing, or an empty region."""
    regions = {}
    for slot, shape in SHAPES.items():
        full = -(-shape[dim] // ranks)
        start = min(rank * full, shape[dim])
        length = min(full, shape[dim] - start)
        if length or slot % 2:
            regions[slot] = Region(dim, start, length)
    return regions


def boxes(rank: int, ranks: int) -> dict[int, Region]:
    """Cut as FSDP2 over tensor parallelism does: rows in two, columns among the others."""
    columns, rows = along(1, rank // 2, ranks // 2), along(0, rank % 2, 2)
    return {slot: rows[slot]._replace(inner=columns[slot]) for slot in rows.keys() & columns.keys()}


def blocks(rank: int, ranks: int) -> dict[int, Region]:
    """Cut columns, and those of slot 4 as transformers cuts fused projections."""
    return {**along(1, rank, ranks), 4: Region(1, rank, 1, stripes=SHAPES[4][1] // ranks)}


def stretches(rank: int, ranks: int) -> dict[int, Region]:
    """Cut as ZeRO-1/2 does: equal parts of one flat buffer."""
    part = -(-sum(shape.numel() for shape in SHAPES.values()) // ranks)
    regions, first = {}, 0
    for slot, shape in SHAPES.items():
        start, end = max(first, rank * part), min(first + shape.numel(), (rank + 1) * part)
        if start < end:
            regions[slot] = Region(None, start - first, end - start)
        first += shape.numel()
    return regions


def partitions(rank: int, ranks: int) -> dict[int, Region]:
    """Cut as ZeRO-3 does: an equal part of each flattened parameter."""
    regions = {}
    for slot, shape in SHAPES.items():
        part = -(-shape.numel() // ranks)
        regions[slot] = Region(None, rank * part, max(0, min(part, shape.numel() - rank * part)))
    return regions


def all_on_last(rank: int, ranks: int) -> dict[int, Region]:
    return everything() if rank == ranks - 1 else {}


def everything() -> dict[int, Region]:
    return {slot: Region.everything(shape) for slot, shape in SHAPES.items()}


LAYOUTS: dict[str, Callable[[int, int], dict[int, Region]]] = {
    "rows": lambda *place: along(0, *place),
    "columns": lambda *place: along(1, *place),
    "boxes": boxes,
    "blocks": blocks,
    "stretches": stretches,
    "partitions": partitions,
    "lastrank": all_on_last,
    "replicas": lambda *_: everything(),
    "hybridrows": lambda *place: along(0, *place),
    "hybridcolumns": lambda *place: along(1, *place),
    "hybridstretches": stretches,
}


def groups_of(layout: str) -> dict[str, Any]:
    if layout == "replicas":
        return {"shards": None, "replicas": dist.group.WORLD}
    if layout.startswith("hybrid"):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return {"shards": mesh.get_group("shard"), "replicas": mesh.get_group("replicate")}
    return {"shards": dist.group.WORLD, "replicas": None}


def exchange_cut(name: str) -> dict[str, Any]:
    layout, dtype_name = name.split("_")
    dtype, groups = DTYPES[dtype_name], groups_of(layout)
    shards = groups["shards"]
    place = (0, 1) if shards is None else (dist.get_rank(shards), dist.get_world_size(shards))
    regions = LAYOUTS[layout](*place)
    exchange = Exchange(SHAPES, COSTS, regions, **groups, device=CPU, dtype=dtype)
    pieces = {slot: part(region, whole_parameter(slot, SHAPES[slot])) for slot, region in regions.items()}
    before = {slot: piece.clone() for slot, piece in pieces.items()}
    seen: list[list[int]] = []

    def work(wholes: dict[int, Tensor]) -> dict[int, Tensor]:
        seen.append(list(wholes))
        return {slot: make_result(whole) for slot, whole in wholes.items()}

    with CountBytes() as count:
        found = exchange.run(pieces, work)
    expected = {}
    for slot, region in regions.items():
        result = make_result(whole_parameter(slot, SHAPES[slot]).to(dtype))
        expected[slot] = part(region, result.contiguous())
    return {
        "same": found.keys() == expected.keys() and all(same(found[slot], x) for slot, x in expected.items()),
        "untouched": all(same(pieces[slot], x) for slot, x in before.items()),
        "calls": len(seen),
        "seen": [slot for call in seen for slot in call],
        "volume": exchange.volume,
        "sent": count.sent,
        "owners": list(exchange.owners.values()),
        "elements": sum(piece.numel() for piece in pieces.values()),
    }


def part(region: Region, whole: Tensor) -> Tensor:
    """Return a part of a parameter as a rank holds it."""
    return region.of(whole).reshape(region.local_shape(whole.shape))


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# --- cut by engines ------------------------------------------------------------------------------------------------


def exchange_engine(name: str) -> dict[str, Any]:
    """Return the parameters that came together as they are in the model."""
    if name == "dtensors":
        return exchange_dtensors()
    case = CASES["adamw"]
    model = build_model(case)
    expected = {key: param.detach().clone() for key, param in model.named_parameters()}
    wholes: dict[str, list[bool]] = {}
    if name in DEEPSPEED:
        import_deepspeed().init_distributed("gloo")
    else:
        prepare_torch(name, model)
    mars = mars_hf.create(model, optimize_1d=True)  # so that vectors are located too
    names = [key for group in mars.param_groups for key in names_of(model, group["params"])]
    if name in DEEPSPEED:
        step_in_deepspeed(name, model, mars, lambda: look(mars, names, expected, wholes))
    else:
        look(mars, names, expected, wholes)
    return {"names": sorted(expected), "wholes": wholes}


def names_of(model: nn.Module, params: list[Tensor]) -> list[str]:
    names = {param: key for key, param in model.named_parameters()}
    return [names[param] for param in params]


def prepare_torch(name: str, model: nn.Module) -> None:
    world = dist.get_world_size()
    if name == "fsdp2":
        shard(model, (world,))
    elif name == "fsdp2_columns":
        mesh = init_device_mesh("cpu", (world,))
        shard_along = {param: Shard(1 if param.ndim > 1 else 0) for param in model.parameters()}
        torch.distributed.fsdp.fully_shard(model, mesh=mesh, shard_placement_fn=shard_along.__getitem__)
    elif name == "hsdp":
        shard(model, (2, world // 2))
    elif name == "ddp":
        model.wrapped = [DistributedDataParallel(model)]  # in a list, or it would be registered as a submodule


def step_in_deepspeed(name: str, model: nn.Module, mars: mars_hf.Mars, look_at: Callable[[], None]) -> None:
    import deepspeed

    step = mars.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        look_at()
        return step(*args, **kwargs)

    mars.step = watched  # type: ignore[method-assign]
    rank, world = dist.get_rank(), dist.get_world_size()
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=mars, config=deepspeed_config(name, world))
    for micro in range(ACCUMULATION):
        ids = Tokens().micro_batch(0, micro, rank, world)
        wrapped.backward(wrapped(ids, ids)["loss"])
        wrapped.step()
    wrapped.destroy()


def look(mars: mars_hf.Mars, names: list[str], expected: dict[str, Tensor], wholes: dict[str, list[bool]]) -> None:
    """Put together the tensors in the optimizer's groups, and record whether they match."""
    layout = mars._locator
    assert layout is not None
    params = [param for group in mars.param_groups for param in group["params"]]
    placements = [layout.locate(param, slot) for slot, param in enumerate(params)]
    regions, pieces = {}, {}
    for slot, (tensor, placement) in enumerate(zip(params, placements, strict=True)):
        here = dtensors.local(tensor.detach())
        if placement is None:
            regions[slot], pieces[slot] = Region.everything(tensor.shape), here
            continue
        parts = cut(here, placement) if placement.pieces else []
        for piece, part in zip(placement.pieces, parts, strict=True):
            regions[piece.slot], pieces[piece.slot] = piece.region, part
    (groups,) = {
        (None, others) if placement is None else (placement.group, placement.replicas)
        for placement, others in zip(placements, replicas_of(params), strict=True)
    }
    shapes = dict(enumerate(layout.shapes))
    costs = {slot: float(shape.numel()) for slot, shape in shapes.items()}
    exchange = Exchange(shapes, costs, regions, shards=groups[0], replicas=groups[1], device=CPU, dtype=torch.float32)

    def work(found: dict[int, Tensor]) -> dict[int, Tensor]:
        for slot, whole in found.items():
            wholes.setdefault(names[slot], []).append(torch.equal(whole, expected[names[slot]]))
        return found

    back = exchange.run(pieces, work)
    assert all(torch.equal(back[slot], piece) for slot, piece in pieces.items())


def exchange_dtensors() -> dict[str, Any]:
    """Shards are uneven, in all placements; replicated twice over a mesh of three dimensions."""
    world = dist.get_world_size()
    one = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    two = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh("cpu", (world // 2, 2, 1), mesh_dim_names=("a", "b", "c"))
    wholes: dict[str, list[bool]] = {}
    for mesh, placements in (
        (one, [Shard(0)]),
        (one, [Shard(1)]),
        (one, [Shard(-1)]),
        (one, [Replicate()]),
        (two, [Shard(0), Shard(1)]),
        (two, [Shard(1), Shard(0)]),
        (two, [Shard(0), Shard(0)]),
        (two, [Shard(1), Replicate()]),
        (three, [Replicate(), Replicate(), Shard(0)]),
        (three, [Replicate(), Shard(1), Replicate()]),
    ):
        tensors = {f"{slot}{placements}": whole_parameter(slot, shape) for slot, shape in SHAPES.items()}
        params = [nn.Parameter(distribute_tensor(tensor, mesh, placements)) for tensor in tensors.values()]
        assert all(isinstance(param, DTensor) for param in params)
        look(mars_hf.Mars(params), list(tensors), tensors, wholes)
    return {"names": sorted({name for found in gathered(list(wholes)) for name in found}), "wholes": wholes}


# --- what ranks disagree on ----------------------------------------------------------------------------------------


def exchange_wrong(name: str) -> dict[str, Any]:
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    layout = "hybridrows" if name.startswith("hybrid") else name.split("_")[0]
    groups = groups_of(layout)
    shards = groups["shards"]
    place = (0, 1) if shards is None else (dist.get_rank(shards), dist.get_world_size(shards))
    regions, costs = LAYOUTS[layout](*place), COSTS
    if name.endswith("lost") and last:
        del regions[0]
    if name.endswith("twice") and rank == 0:
        regions[3] = Region(0, 0, SHAPES[3][0])
    if name.endswith("costs") and last:
        costs = {**COSTS, 0: 1.0}
    try:
        Exchange(SHAPES, costs, regions, **groups, device=CPU, dtype=torch.float32)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": None}


# --- who is known to repeat what -----------------------------------------------------------------------------------


def find_replicas(_: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, other = build_model(CASES["adamw"]), nn.Linear(3, 2)
    found = {"unwrapped": known(model.parameters())}
    wrapped = DistributedDataParallel(model)
    found["ddp"] = known(model.parameters())
    found["ddp_and_other"] = known([*model.parameters(), *other.parameters()])
    if rank == 0:  # the others are not asked
        critic = nn.Linear(2, 1)
        found["rank_0_only"] = known(critic.parameters())
    one_each = [dist.new_group([index]) for index in range(world)]
    alone = DistributedDataParallel(other, process_group=one_each[rank])
    found["ddp_of_one_rank"] = known(other.parameters())
    same_ranks = dist.new_group(list(range(world)))
    elsewhere = nn.Linear(3, 2)
    second = DistributedDataParallel(elsewhere, process_group=same_ranks)
    found["two_groups"] = known([*model.parameters(), *elsewhere.parameters()])
    partly = nn.Sequential(nn.Linear(3, 2))  # torch fails to ignore parameters outside a submodule
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(partly, ["0.bias"])
    third = DistributedDataParallel(partly)
    found["ignored_bias"] = known(partly.parameters())
    drifting = DistributedDataParallel(nn.Linear(3, 2))
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=one_each[rank], start_localSGD_iter=1)
    drifting.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    found["local_sgd"] = known(drifting.module.parameters())
    joining = DistributedDataParallel(nn.Linear(3, 2))
    with joining.join():
        found["join"] = known(joining.module.parameters())
    del wrapped, alone, second, third
    gc.collect()
    found["freed"] = known(model.parameters())
    return found


def replicas_of(params: list[Tensor]) -> list[Any]:
    """The process group on whose ranks each whole parameter is repeated."""
    wrapped = replicas.Replicas().repeated({id(param) for param in params})
    return [
        dtensors.replicas_in_mesh(param) if dtensors.is_dtensor(param) else wrapped.get(id(param)) for param in params
    ]


def known(params: Any) -> list[bool]:
    return [group is not None for group in replicas_of(list(params))]


KINDS = {"cut": exchange_cut, "engine": exchange_engine, "wrong": exchange_wrong, "replicas": find_replicas}


def run(spec: str, file: Path) -> None:
    """Run one check."""
    kind, name = spec.split("/")
    everywhere = gathered(KINDS[kind](name))
    if dist.get_rank() == 0:
        Path(f"{file}.json").write_text(json.dumps(everywhere))


if __name__ == "__main__":
    main(run)
