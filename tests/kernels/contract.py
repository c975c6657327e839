"""The contract of `formulas.sums` and `formulas.update` in straight-line float64, and what implements it.

Under TRITON_INTERPRET=1, which Triton reads once per process, that is the Triton kernels alone, on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers import needs_compiler
from torch import Tensor

from mars_hf.arithmetic.formulas import Options
from mars_hf.kernels import Backend, cpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = {
    "for-loop": lambda: Backend("for-loop"),
    "foreach": lambda: Backend("foreach", foreach=True),
    "compiled": lambda: Backend("compiled", cpu),
    "triton": lambda: Backend("triton", triton(), True),
}
PLAIN = [] if INTERPRETED else [("for-loop", "cpu"), ("foreach", "cpu")]
KERNELS = [("triton", "cpu")] if INTERPRETED else [pytest.param("compiled", "cpu", marks=needs_compiler)]
if torch.cuda.is_available():
    KERNELS.append(pytest.param("triton", "cuda", marks=pytest.mark.gpu))
every_implementation = pytest.mark.parametrize(("backend", "device"), [*PLAIN, *KERNELS])
every_kernel = pytest.mark.parametrize(("backend", "device"), KERNELS)

# Relative errors of rounding to nearest. Triton's interpreter truncates to bfloat16.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
NAMES = ("params", "gradients", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad")
STEP = {"k": 0.475, "blend": 0.0, "beta1": 0.95, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def triton() -> Any:
    from mars_hf.kernels import gpu

    return gpu


def draw(sizes: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype).to(device) for size in sizes]


def problem(sizes: Any, device: str, *, without: Any = ("max_exp_avg_sq",), **dtypes: torch.dtype) -> dict[str, Any]:
    """Return the lists of an update by name; float32 by default. Every seventh gradient is zero."""
    lists = {
        name: [] if name in without else draw(sizes, dtypes.get(name, torch.float32), device, seed)
        for seed, name in enumerate(NAMES, start=1)
    }
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        lists[name] = [tensor.abs() for tensor in lists[name]]
    for gradient in lists["gradients"]:
        gradient[::7] = 0
    return lists


def buffers_of(lists: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {name: lists[name] for name in NAMES[2:] if lists[name]}


def corrected(gradients: Any, last_grads: Any, i: int, scale: Any, k: float) -> list[Tensor]:
    """Return g, last and c of tensor i, in float64."""
    g = gradients[i].double() * (1.0 if scale is None else scale.double())
    if not last_grads:
        return [g, torch.zeros_like(g), g]
    last = last_grads[i].double()
    return [g, last, g + k * (g - last)]


def expected_sums(gradients: Any, last_grads: Any, *, grad_scale: Any = None, k: float = 0.0) -> Tensor:
    columns = []
    for i in range(len(gradients)):
        g, last, c = corrected(gradients, last_grads, i, grad_scale, k)
        columns.append(torch.stack([(a * b).sum() for a, b in ((g, g), (g, last), (last, last), (c, c))]))
    return torch.stack(columns, 1)


def check_sums(backend: str, gradients: list[Tensor], last_grads: list[Tensor], **settings: Any) -> Tensor:
    """Take sums, with errors below 1e-6 of those of absolute values."""
    found = BACKENDS[backend]().run_sums(gradients, last_grads, **settings)
    error = (found - expected_sums(gradients, last_grads, **settings)).abs()
    positive = {key: abs(value) for key, value in settings.items() if value is not None}
    bound = 1e-6 * expected_sums([g.abs() for g in gradients], [-last.abs() for last in last_grads], **positive).abs()
    assert found.shape == (4, len(gradients)) and found.dtype == torch.float64
    assert (error <= bound).all(), error / bound
    return found


def expected_update(
    lists: dict[str, list[Tensor]], *, arithmetic: str, steps: list[float], lr: float, k: float, blend: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, grad_scale: Any = None,
    factors: Any = None, second_moment: str = "corrected", cautious: bool = False,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Apply the contract of `formulas.update` line by line, on copies."""
    wide = {name: [tensor.double().clone() for tensor in tensors] for name, tensors in lists.items()}
    for i, (x, e) in enumerate(zip(wide["params"], wide["exp_avg"], strict=True)):
        g, _, c = corrected(wide["gradients"], wide["last_grad"], i, grad_scale, k)
        if wide["last_grad"]:
            wide["last_grad"][i].copy_(g)
        c = c if factors is None else c * factors[i].double()
        e.copy_(e + (1 - beta1) * (c - e))
        m = e + blend * (c - e) if blend else e
        if arithmetic == "momentum":
            x.copy_(m)
            continue
        direction = torch.where(m.isnan(), m, m.sign() * g.ne(0))
        if arithmetic == "adamw":
            v, s = wide["exp_avg_sq"][i], g if second_moment == "gradient" else c
            v.copy_(beta2 * v + (1 - beta2) * s * s)
            if wide["max_exp_avg_sq"]:
                v = wide["max_exp_avg_sq"][i].copy_(torch.maximum(wide["max_exp_avg_sq"][i], v))
            direction = m / (1 - beta1 ** steps[i]) / ((v / (1 - beta2 ** steps[i])).sqrt() + eps)
        decays = torch.where(direction * x >= 0, 1.0, 0.0) if cautious else 1.0
        x.copy_(x * (1 - lr * weight_decay * decays) - lr * direction)
    return wide


def assert_close(lists: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], tolerance: float = 1e-6) -> None:
    for name, tensors in expected.items():
        for found, wanted in zip(lists[name], tensors, strict=True):
            bound = tolerance * wanted.abs().max() if wanted.numel() else 0.0
            error = (found.double() - wanted).abs() - wanted.abs() * ROUNDING.get(found.dtype, 0.0)
            assert (error <= bound).all(), (name, tuple(found.shape), error.max() / bound)


def run_update(backend: str, lists: dict[str, list[Tensor]], **settings: Any) -> dict[str, Any]:
    """Update; return all settings."""
    steps = [float(t) for t in range(1, len(lists["params"]) + 1)]
    settings = {**STEP, "arithmetic": "adamw", "steps": steps, "lr": 1e-2, **settings}
    BACKENDS[backend]().run_update(lists["params"], lists["gradients"], buffers_of(lists), Options(**settings))
    return settings


def check_update(backend: str, lists: dict[str, list[Tensor]], *, tolerance: float = 1e-6, **settings: Any) -> None:
    """Update, and compare every tensor; gradients must not change."""
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}
    settings = run_update(backend, lists, **settings)
    assert_close(lists, expected_update(before, **settings), tolerance)
    assert all(map(torch.equal, lists["gradients"], before["gradients"]))
