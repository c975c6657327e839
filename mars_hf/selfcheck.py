"""`python -m mars_hf check`: compare kernels with plain PyTorch, and two processes with one, on this machine."""

from __future__ import annotations

import functools
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
from mars_hf.arithmetic.rules import ARITHMETICS, CODES
from mars_hf.kernels import gpu


def run() -> bool:
    """Print versions and a table of all comparisons; return whether none differs."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    _print_versions(gpus)
    agrees = True
    for where, what, result in _rows(gpus):
        print(f"{where:14} {what:24} {result}", flush=True)
        if result.startswith("differs"):
            agrees = False
    return agrees


def _print_versions(gpus: list[torch.device]) -> None:
    triton = "missing" if gpu.gpu_device is None else gpu.gpu_device.triton.__version__
    print(f"mars_hf {mars_hf.__version__}, torch {torch.__version__}, triton {triton}")
    names = [torch.cuda.get_device_name(device) for device in gpus]
    print("cpu", torch.backends.cpu.get_cpu_capability(), *names, sep=", ")


def _rows(gpus: list[torch.device]) -> Iterator[tuple[str, str, str]]:
    for device in (torch.device("cpu"), *gpus):
        yield from _kernel_rows(device)
    yield from _process_rows(len(gpus))


def _kernel_rows(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each dtype and rule."""
    module = kernels.kernels_of(device)
    for dtype in sorted(module.FLOATS, key=str):
        for arithmetic in module.ARITHMETICS:
            what = f"{arithmetic} {dtype}".replace("torch.", "")
            yield f"{device} kernels", what, _kernel_result(module, device, dtype, arithmetic)


def _kernel_result(module: Any, device: torch.device, dtype: torch.dtype, arithmetic: str) -> str:
    """Compare with and without last gradients, states in float32, in the dtype of the parameters, and in 8 bits."""
    if not module.is_available(device):
        return f"not run ({kernels.NEEDS})"
    backend = kernels.Backend(module.NAME, module)
    moments = ("exp_avg", *ARITHMETICS[arithmetic].buffers)
    problems = []
    for buffers in (moments, (*moments, "last_grad")):
        for dtype_of in ({}, dict.fromkeys(buffers, dtype), CODES):  # states, float32 if not stated
            dtypes = {"params": dtype, "grads": dtype}
            dtypes |= {name: dtype_of.get(name, torch.float32) for name in buffers}
            compensation = {"compensation": CODES["compensation"] if dtype_of is CODES else dtype}
            for second_moment in ("corrected", "gradient"):
                problems.append(_problem(backend, device, dtypes, arithmetic, second_moment))
            if dtype == torch.bfloat16 and arithmetic != "momentum":
                problems.append(_problem(backend, device, dtypes | compensation, arithmetic, "corrected"))
    return f"differs: {max(problems)}" if any(problems) else "ok"


def _problem(
    backend: kernels.Backend, device: torch.device, dtypes: dict[str, torch.dtype], arithmetic: str, second_moment: str
) -> str:
    """Return what kernels compute otherwise than plain PyTorch, "" if nothing or if they do not take these dtypes."""
    assert backend.kernels is not None
    if not backend.kernels.can_take(dtypes):
        return ""
    return kernels.compare_with_plain(backend, device, tuple(dtypes.items()), arithmetic, second_moment)


def _process_rows(gpus: int) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each engine on two processes: on GPUs if there are two, else on the CPU."""
    backend = "nccl" if gpus > 1 else "gloo"
    if gpus < 2:
        yield "two processes", "nccl", "not run (needs two GPUs)"
    for engine in ("DDP", "FSDP2"):
        yield "two processes", f"{backend} {engine}", _process_result(backend, engine)


def _process_result(backend: str, engine: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(_compare, (backend, folder, engine), nprocs=2)
        except Exception as error:
            return f"differs: {' '.join(str(error).split())[-300:]}"
    return "ok"


def _compare(rank: int, backend: str, folder: str, engine: str) -> None:
    """Train as one of two processes and alone; raise AssertionError if the weights differ."""
    device = torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(minutes=1), world_size=2, rank=rank)
    if backend == "nccl":
        torch.cuda.set_device(device)
    for mars_type in ("mars-adamw", "mars-m"):
        together = _train(device, mars_type, engine, rank)
        alone = _train(device, mars_type, None, rank)
        message = functools.partial("{}: {}".format, mars_type)
        torch.testing.assert_close(together, alone, rtol=0, atol=5e-6, msg=message)
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
        inputs = batch if engine is None else batch[rank::2]
        loss = 10.0 ** (step - 1) * wrapped(inputs).square().mean()  # grows, so that the clip sets in
        loss.backward()
        mars.step()
    if engine == "FSDP2":
        return [param.full_tensor() for param in model.parameters()]
    return list(model.parameters())
