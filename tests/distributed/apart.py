"""Run ranks that differ: one steps alone, has run out of batches, or lacks a gradient.

    torchrun --nproc_per_node 2 apart.py OUTPUT KIND/NAME ...

`ddp/NAME`: what a rank does with a model that DistributedDataParallel wraps. `fsdp2/NAME`: the same with shards.
`empty/NAME`: a rank that holds nothing. `moved/NAME`: models that change dtype. `alive/NAME`: tensors that stay alive.

Each writes OUTPUT/<run>.json: each rank's findings, such as how far its weights are from the straight-line reference
on its own gradients, and how many matrices it has orthogonalized in each step.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from worker import main

import mars_hf
from mars_hf.step import orthogonalized as matrices
from mars_hf.step.directions import directions

sys.path.append(str(Path(__file__).parents[1]))
from reference import Reference

SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clip_threshold": 0.5}
VECTORS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "rule": "adamw"}
SIZES = [6, 9, 4, 1, 7, 6]
LONG = [6, 5, 4, 3, 2, 3, 4, 5, 6]


def build(sizes: list[int] = SIZES) -> nn.Sequential:
    """Return a model of ten parameters in float64, the same on every rank."""
    torch.manual_seed(3)
    layers = [nn.Linear(*pair, dtype=torch.float64) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


class Run:
    """Run a model and its optimizer beside a straight-line reference of every parameter."""

    def __init__(
        self, model: nn.Module, mars_type: str, wrap: Callable[[nn.Module], nn.Module], **settings: Any
    ) -> None:
        """Wrap the model and make its optimizer, in the order that users do it in."""
        self.model = model
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.wrapped = wrap(model)
        settings = {**SETTINGS, "lr_1d": VECTORS["lr"], "betas_1d": VECTORS["betas"], **settings}
        self.mars = mars_hf.Mars(list(model.parameters()), mars_type=mars_type, **settings)
        self.lines = {
            name: Reference(x, rule=mars_type, **SETTINGS) if x.ndim > 1 else Reference(x, **VECTORS)
            for name, x in whole.items()
        }
        self.orthogonalized: list[int] = []
        self.distance = 0.0
        self._batch = 0

    def backward(self, module: nn.Module) -> None:
        """Compute gradients of this rank's own batch."""
        self.mars.zero_grad()
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + self._batch)
        self._batch += 1
        module(torch.randn(8, SIZES[0], dtype=torch.float64, generator=generator)).square().sum().backward()

    def step(self, known: dict[str, Tensor] | None = None) -> None:
        """Step both and record how far they are apart.

        Args:
            known: whole gradients by name, for those whose pieces are not all on the ranks that take part.
        """
        gradients = {} if known is None else {**known}
        for name, param in self.model.named_parameters():
            if param.grad is not None and name not in gradients:
                gradients[name] = whole(param.grad).clone()
        done: list[int] = []

        def noted(momenta: dict[int, Tensor], *args: Any, **kwargs: Any) -> dict[int, Tensor]:
            done.extend(momenta)
            return directions(momenta, *args, **kwargs)

        with mock.patch.object(matrices, "directions", noted):
            self.mars.step()
        self.orthogonalized.append(len(done))
        for name, gradient in gradients.items():
            self.lines[name].step(gradient)
        for name, param in self.model.named_parameters():
            self.distance = max(self.distance, (whole(param.detach()) - self.lines[name].x).abs().max().item())

    def adopt(self) -> None:
        """Continue from the model's weights, after DistributedDataParallel has synchronized them."""
        for name, param in self.model.named_parameters():
            self.lines[name].x = param.detach().clone()

    def together(self, steps: int = 2) -> None:
        """Take steps on all ranks, on averaged gradients."""
        for _ in range(steps):
            self.backward(self.wrapped)
            self.step()

    def alone(self, steps: int = 1) -> None:
        """Take steps on the first rank only, on the bare module."""
        for _ in range(steps if dist.get_rank() == 0 else 0):
            self.backward(self.model)
            self.step()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- DistributedDataParallel -----------------------------------------------------------------------------------------


def alone_at_first(run: Run) -> None:
    run.alone()
    run.together()


def alone_between(run: Run) -> None:
    run.together()
    run.alone(2)
    run.together()


def alone_at_last(run: Run) -> None:
    run.together()
    run.alone()


def alone_on_old_gradients(run: Run) -> None:
    run.together()
    if dist.get_rank() == 0:
        run.step()
    run.together()


def late_join(run: Run) -> None:
    run.together()
    with run.wrapped.join():
        run.together(3 - dist.get_rank())
    run.adopt()
    run.together()


def joining(run: Run) -> None:
    with run.wrapped.join():
        run.together(3 - dist.get_rank())


def missing(run: Run) -> None:
    run.together()
    run.backward(run.wrapped)
    if dist.get_rank() == 1:
        run.model[1].weight.grad = None
    run.step()
    run.together()


def missing_at_first(run: Run) -> None:
    run.backward(run.wrapped)
    if dist.get_rank() == 0:
        run.model[2].weight.grad = None
    run.step()
    run.together()


def missing_matrices(run: Run) -> None:
    run.together(1)
    run.backward(run.wrapped)
    if dist.get_rank() == 1:
        for layer in run.model:
            layer.weight.grad = None
    run.step()
    run.together()


def missing_everything(run: Run) -> None:
    """A step without any gradient does nothing, and still answers the other ranks."""
    run.together(1)
    run.backward(run.wrapped)
    if dist.get_rank() == 1:
        run.mars.zero_grad()
    run.step()
    run.together()


def unsynced(run: Run) -> None:
    run.together()
    with run.wrapped.no_sync():
        run.together(2)
    run.together()


def wrapped_later(run: Run) -> None:
    """The first rank searches for wrappers before one exists."""
    run.alone(2)
    run.wrapped = DistributedDataParallel(run.model)
    run.adopt()
    run.together()


def wrapped_again(run: Run) -> None:
    run.together()
    run.wrapped = None
    gc.collect()
    run.alone()
    run.wrapped = DistributedDataParallel(run.model, process_group=dist.new_group([0, 1]))
    run.adopt()
    run.together()


def moved(run: Run) -> None:
    """The same parameters move into a wrapper of one rank: their earlier wrapper does not count."""
    run.together()
    groups = [dist.new_group([rank]) for rank in range(2)]
    run.wrapped = None
    gc.collect()
    run.wrapped = DistributedDataParallel(run.model, process_group=groups[dist.get_rank()])
    run.together(1 + dist.get_rank())


def two_groups(run: Run) -> None:
    """The halves of a model have their own wrappers, over different process groups."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    layers = [run.model[:4], run.model[4:]]
    halves = [DistributedDataParallel(half, process_group=g) for half, g in zip(layers, groups, strict=True)]
    run.wrapped = nn.Sequential(*halves)
    run.together(3)


def alike(run: Run) -> None:
    run.together(4)


def static_graph(run: Run) -> None:
    run.wrapped = None
    gc.collect()
    run.wrapped = DistributedDataParallel(run.model, static_graph=True)
    run.together(4)


def accumulated(run: Run) -> None:
    """Each step has two backward passes, as in Trainer: the first is not averaged."""
    for _ in range(3):
        with run.wrapped.no_sync():
            run.backward(run.wrapped)
        with mock.patch.object(run.mars, "zero_grad"):
            run.backward(run.wrapped)
        run.step()


def bare(run: Run) -> None:
    """Nothing is wrapped, and ranks take different numbers of steps."""
    run.wrapped = run.model
    gc.collect()
    run.together(2 + dist.get_rank())


def promised(run: Run) -> None:
    """Nothing is wrapped: the loop averages gradients itself, and says so with `process_group`."""
    for _ in range(3):
        run.backward(run.model)
        for param in run.model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        run.step()


WITHOUT_WRAPPER = ("promised", "wrapped_later", "bare", "static_graph", "two_groups")
DDP: dict[str, Callable[[Run], None]] = {
    function.__name__: function
    for function in (
        *(promised, alone_at_first, alone_between, alone_at_last, alone_on_old_gradients, late_join, joining, missing),
        *(
            missing_at_first,
            missing_matrices,
            missing_everything,
            unsynced,
            wrapped_later,
            wrapped_again,
            moved,
            alike,
            static_graph,
        ),
        two_groups,
        *(accumulated, bare),
    )
}


def run_ddp(name: str) -> dict[str, Any]:
    name, _, mars_type = name.partition("_with_")
    wrap = (lambda model: model) if name in WITHOUT_WRAPPER else DistributedDataParallel
    settings = {"process_group": dist.group.WORLD} if name == "promised" else {}
    run = Run(build(LONG if name == "two_groups" else SIZES), f"mars-{mars_type}", wrap, **settings)
    DDP[name](run)
    return {"distance": run.distance, "orthogonalized": run.orthogonalized}


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def run_fsdp2(name: str) -> dict[str, Any]:
    """One rank holds nothing of the layer with one output."""
    return run_sharded(name, init_device_mesh("cpu", (dist.get_world_size(),)), {"missing": [1]})


def run_hsdp(name: str) -> dict[str, Any]:
    """Two copies of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return run_sharded(name, mesh, {"missing": [1], "missing_copy": [2, 3], "rows": [0, 2]})


def run_sharded(name: str, mesh: DeviceMesh, missing: dict[str, list[int]]) -> dict[str, Any]:
    """In some steps, some ranks lack the gradient of a matrix."""
    name, _, mars_type = name.partition("_with_")
    model = build()
    run = Run(model, f"mars-{mars_type}", lambda model: fully_shard(model, mesh=mesh))
    if name == "metrics":
        run.mars.collect_metrics(True)
    if name == "folded":
        run.mars.max_grad_norm = 1e6  # which changes nothing but how norms are taken
    run.together()
    if name in missing:
        run.backward(run.wrapped)
        gradient = whole(model[1].weight.grad)  # collective
        if dist.get_rank() in missing[name]:
            model[1].weight.grad = None
        before = [param.to_local().clone() for param in model.parameters()]
        if name == "missing_copy":
            run.step({"1.weight": gradient} if model[1].weight.grad is not None else {})
            run.together()
        else:
            with expected_error() as errors:
                run.mars.step()
            unchanged = all(torch.equal(x, p.to_local()) for x, p in zip(before, model.parameters(), strict=True))
            return {"distance": run.distance, "error": errors[0], "unchanged": unchanged}
    return {"distance": run.distance, "orthogonalized": run.orthogonalized, "metrics": run.mars.pop_metrics()}


@contextlib.contextmanager
def expected_error() -> Iterator[list[str | None]]:
    """Return the message of the RuntimeError raised within."""
    found: list[str | None] = [None]
    try:
        yield found
    except RuntimeError as error:
        found[0] = str(error)


# --- DTensors of several dtypes with nothing on one rank --- ---------------------------------------------------------

SHAPES: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "float64": [((1, 6), torch.float64)],
    "mixed": [((4, 6), torch.float32), ((1, 6), torch.float64), ((1, 4), torch.bfloat16)],
    "vectors": [((4, 6), torch.float32), ((1,), torch.float64)],
}


def run_empty(name: str) -> dict[str, Any]:
    """The first dimension is cut, so one rank holds nothing."""
    name, _, rule = name.partition("_with_")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    wholes = [torch.randn(shape).to(dtype) for shape, dtype in SHAPES[name]]
    params = [nn.Parameter(distribute_tensor(x.clone(), mesh, [Shard(0)])) for x in wholes]
    settings: dict[str, Any] = {**SETTINGS, "optimize_1d": name == "vectors", "ns_dtype": "float64"}
    mars_type = rule.removesuffix("_folded")
    if rule.endswith("_folded"):
        settings["max_grad_norm"] = 1e6
    mars = mars_hf.Mars(params, mars_type=f"mars-{mars_type}", **settings)
    lines = [Reference(x, rule=f"mars-{mars_type}", **SETTINGS) for x in wholes]
    for _ in range(3):
        for param, line in zip(params, lines, strict=True):
            gradient = torch.randn(param.shape).to(param.dtype)
            param.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            line.step(gradient)
        mars.step()
    return {
        "distances": {
            str(param.dtype): (whole(param.detach()).double() - line.x).abs().max().item()
            for param, line in zip(params, lines, strict=True)
        }
    }


# --- models that are moved, and what is alive after a step -----------------------------------------------------------


def run_moved(name: str) -> dict[str, Any]:
    """`model.to(dtype)` runs before the first step and between steps, on a model sharded by fully_shard."""
    when, _, mars_type = name.partition("_with_")
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    mars = mars_hf.Mars(list(model.parameters()), mars_type=f"mars-{mars_type}", **SETTINGS)
    identities = [id(param) for param in model.parameters()]
    steps = [torch.float64, torch.float32, torch.bfloat16, torch.float32] if when == "between" else [torch.bfloat16] * 2
    unlike = []
    for dtype in steps:
        model.to(dtype)
        if when == "before":
            model(torch.randn(8, SIZES[0], dtype=dtype)).square().sum().backward()
        for param in model.parameters() if when == "between" else ():  # FSDP2's own buffers keep the first dtype
            param.grad = torch.ones_like(param)
        before = [param.to_local().clone() for param in model.parameters()]
        mars.step()
        mars.zero_grad()
        for param, old in zip(model.parameters(), before, strict=True):
            here = param.to_local()
            unlike += [here.numel() > 0 and torch.equal(here, old), here.dtype != dtype, not here.isfinite().all()]
    return {"unlike": sum(map(bool, unlike)), "same": identities == [id(param) for param in model.parameters()]}


def run_alive(name: str) -> dict[str, Any]:
    """Find tensors that outlive the model, its gradients and the optimizer's state, after steps of each kind."""
    kind, _, mars_type = name.partition("_with_")
    run = Run(build(), f"mars-{mars_type}", (lambda model: model) if kind == "fsdp2" else DistributedDataParallel)
    if kind == "fsdp2":
        run = Run(
            build(),
            f"mars-{mars_type}",
            lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
        )
    if kind == "apart":
        run.together()
        run.alone()
    run.together()
    mars, params = run.mars, list(run.model.parameters())
    tensors = [*params, *(p.grad for p in params), *(x for p in params for x in mars.state[p].values())]
    tensors += [t.to_local() for t in tensors if isinstance(t, DTensor)]
    # By their memory: a weak reference to a tensor sees only one of several Python objects. One to a storage also keeps
    # its address from being used again, which would look like the same storage.
    storages = [t.untyped_storage() for t in tensors if torch.is_tensor(t) and not isinstance(t, DTensor)]
    sizes = {StorageWeakRef(storage): storage.nbytes() for storage in storages}
    layout, keeper = mars._locator, mars._matrices
    before = live_bytes(sizes)
    mars.state.clear()
    mars.param_groups.clear()
    run.model = run.wrapped = run.mars = mars = params = tensors = storages = None  # type: ignore[assignment]
    deadline = time.monotonic() + 10
    gc.collect()
    while live_bytes(sizes) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread of the backend lets go of a collective's tensors a moment after its end
    after = live_bytes(sizes)
    assert layout is not None and keeper is not None
    return {"before": before, "after": after}


def live_bytes(sizes: dict[StorageWeakRef, int]) -> int:
    """Return the bytes of those storages that something in this process still uses."""
    return sum(size for storage, size in sizes.items() if not storage.expired())


KINDS = {
    "ddp": run_ddp,
    "fsdp2": run_fsdp2,
    "hsdp": run_hsdp,
    "empty": run_empty,
    "moved": run_moved,
    "alive": run_alive,
}


def run(spec: str, file: Path) -> None:
    """Run one check."""
    kind, name = spec.split("/")
    found = KINDS[kind](name)
    gc.collect()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        Path(f"{file}.json").write_text(json.dumps(everywhere))


if __name__ == "__main__":
    main(run)
