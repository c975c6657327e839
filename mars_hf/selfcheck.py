"""`python -m mars_hf check`: compare kernels with plain PyTorch on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import mars_hf
from mars_hf import kernels
from mars_hf.arithmetic.formulas import ARITHMETICS, CODES
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
    """Yield a row for each device, dtype and rule."""
    for device in (torch.device("cpu"), *gpus):
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
    is_compensated = dtype == torch.bfloat16 and arithmetic != "momentum"
    problems = []
    for buffers in (moments, (*moments, "last_grad")):
        for dtype_of in ({}, dict.fromkeys(buffers, dtype), CODES):  # states, float32 if not stated
            dtypes = {"params": dtype, "grads": dtype}
            dtypes |= {name: dtype_of.get(name, torch.float32) for name in buffers}
            for second_moment in ("corrected", "gradient"):
                problems.append(_problem(backend, device, dtypes, arithmetic, second_moment))
            if is_compensated:
                dtypes["compensation"] = CODES["compensation"] if dtype_of is CODES else dtype
                problems.append(_problem(backend, device, dtypes, arithmetic, "corrected"))
    differences = [problem for problem in problems if problem]
    return f"differs: {differences[0]}" if differences else "ok"


def _problem(
    backend: kernels.Backend, device: torch.device, dtypes: dict[str, torch.dtype], arithmetic: str, second_moment: str
) -> str:
    """Return what kernels compute otherwise than plain PyTorch, "" if nothing or if they do not take these dtypes."""
    assert backend.kernels is not None
    if not backend.kernels.can_take(dtypes):
        return ""
    return kernels.compare_with_plain(backend, device, tuple(dtypes.items()), arithmetic, second_moment)
