"""`python -m mars_hf check`: compare kernels with plain PyTorch, and two processes with one, on this machine."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import fully_shard

import mars_hf
from mars_hf import kernels
from mars_hf.kernels import gpu
from mars_hf.rules import ARITHMETICS


def run() -> bool:
    """Print versions and a table of all comparisons; return whether none differs."""
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    triton = "missing" if gpu.gpu_device is None else gpu.gpu_device.triton.__version__
    print(f"mars_hf {mars_hf.__version__}, torch {torch.__version__}, triton {triton}")
    print("cpu", torch.backends.cpu.get_cpu_capability(), *map(torch.cuda.get_device_name, devices[1:]), sep=", ")
    agrees = True
    for row in itertools.chain(*map(_kernel_rows, devices), _process_rows(len(devices) - 1)):
        print("{:14} {:24} {}".format(*row), flush=True)
        agrees = agrees and not row[2].startswith("differs")
    return agrees


def _kernel_rows(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each dtype and rule: with and without last gradients, states in float32 and in that dtype."""
    module = kernels.kernels_of(device)
    backend = kernels.Backend(module.NAME, module)
    for dtype, arithmetic in itertools.product(sorted(module.DTYPES, key=str), module.ARITHMETICS):
        moments = ("exp_avg", "exp_avg_sq") if ARITHMETICS[arithmetic].has_second_moment else ("exp_avg",)
        problems = []
        if module.is_available(device):
            choices = itertools.product((moments, (*moments, "last_grad")), {torch.float32, dtype})
            for buffers, state_dtype in choices:
                dtypes = [("params", dtype), ("grads", dtype), *((name, state_dtype) for name in buffers)]
                for second_moment in ("corrected", "gradient"):
                    problems.append(kernels.check(backend, device, tuple(dtypes), arithmetic, second_moment))
        result = f"differs: {max(problems)}" if any(problems) else "ok" if problems else f"not run ({kernels.NEEDS})"
        yield f"{device} kernels", f"{arithmetic} {dtype}".replace("torch.", ""), result


def _process_rows(gpus: int) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each engine on two processes: on GPUs if there are two, else on the CPU."""
    backend = "nccl" if gpus > 1 else "gloo"
    if gpus < 2:
        yield "two processes", "nccl", "not run (needs two GPUs)"
    for engine in ("DDP", "FSDP2"):
        result = "ok"
        with tempfile.TemporaryDirectory() as folder:
            try:
                multiprocessing.spawn(_compare, (backend, folder, engine), nprocs=2)
            except Exception as error:
                result = f"differs: {' '.join(str(error).split())[-300:]}"
        yield "two processes", f"{backend} {engine}", result


def _compare(rank: int, backend: str, folder: str, engine: str) -> None:
    """Train as one of two processes and alone; raise AssertionError if the weights differ."""
    device = torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(minutes=1), world_size=2, rank=rank)
    if backend == "nccl":
        torch.cuda.set_device(device)
    for mars_type in ("mars-adamw", "mars-m"):
        weights = (_train(device, mars_type, each, rank) for each in (engine, None))
        torch.testing.assert_close(*weights, rtol=0, atol=5e-6, msg=f"{mars_type}: {{}}".format)
    dist.destroy_process_group()


def _train(device: torch.device, mars_type: str, engine: str | None, rank: int) -> list[Tensor]:
    """Return the weights of a tiny model after four steps; an engine gives each of two ranks half of a batch."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(12, 23), nn.Tanh(), nn.Linear(23, 7)).to(device)
    batches = torch.randn(4, 8, 12, device=device)
    if engine == "FSDP2":
        fully_shard(model, mesh=dist.init_device_mesh(device.type, (2,)))
    group = dist.group.WORLD if engine == "DDP" else None
    mars = mars_hf.create(model, mars_type=mars_type, lr=0.03, ns_dtype="float32", process_group=group)
    wrapped = nn.parallel.DistributedDataParallel(model) if engine == "DDP" else model
    for step, batch in enumerate(batches):
        mars.zero_grad()
        # Losses grow, so that the clip sets in.
        (10.0 ** (step - 1) * wrapped(batch if engine is None else batch[rank::2]).square().mean()).backward()
        mars.step()
    return [param.full_tensor() if engine == "FSDP2" else param for param in model.parameters()]
