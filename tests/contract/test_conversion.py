"""Parameters converted or swapped after the optimizer is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mars_info import EVERY_IMPLEMENTATION, IMPLEMENTATIONS
from reference import Reference
from torch import nn

import mars_hf
from mars_hf import Mars

every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)


@contextlib.contextmanager
def swapping(enabled: bool) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(enabled)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def gradient(param: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + param.ndim)
    return 0.2 * torch.randn(param.shape, generator=generator)


def train(model: nn.Module, optimizer: Mars, lines: dict[str, Reference], steps: range) -> None:
    for step in steps:
        for name, param in model.named_parameters():
            param.grad = gradient(param, step).to(param.dtype)
            lines[name].x = param.detach().double()  # from the rounded values
            lines[name].step(param.grad)
        optimizer.step()
        for name, param in model.named_parameters():
            tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(param.dtype, 1e-5)
            torch.testing.assert_close(param.detach().double(), lines[name].x, rtol=tolerance, atol=tolerance)


def lines_of(model: nn.Module) -> dict[str, Reference]:
    return {
        name: Reference(param, rule="mars-adamw", lr=0.01, betas=(0.95, 0.99))
        if param.ndim > 1
        else Reference(param, rule="adamw", lr=0.005, betas=(0.9, 0.95))
        for name, param in model.named_parameters()
    }


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("swap", [False, True], ids=["data", "swapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@every_implementation
def test_a_model_may_be_converted(implementation, dtype, swap, steps_before):
    """`model.to(dtype)` keeps the parameter objects; the optimizer steps them in their new dtype."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Mars(model.parameters(), lr=0.01, **IMPLEMENTATIONS[implementation])
    lines = lines_of(model)
    train(model, optimizer, lines, range(steps_before))
    optimizer.zero_grad()
    known = [id(param) for param in model.parameters()]
    with swapping(swap):
        model.to(dtype)
    assert [id(param) for param in model.parameters()] == known
    train(model, optimizer, lines, range(steps_before, steps_before + 3))
    assert all(param.dtype == dtype for param in model.parameters())


@pytest.mark.parametrize("made", ["Mars", "create"])
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}, {"mars_type": "mars-m"}], ids=str)
def test_nothing_of_the_optimizer_hinders_a_swap(settings: dict[str, Any], made):
    """torch refuses to swap a tensor with weak references."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = mars_hf.create(model, **settings) if made == "create" else Mars(model.parameters(), **settings)
    for step in range(3):
        for param in model.parameters():
            param.grad = gradient(param, step)
        optimizer.step()
    optimizer.zero_grad()
    with swapping(True):
        model.to(torch.float64)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert all((param != old).all() for param, old in zip(model.parameters(), before, strict=True))


@every_implementation
def test_the_content_of_parameters_may_be_swapped(implementation):
    """`torch.utils.swap_tensors` swaps values of another shape even before there is a state."""
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = Mars([param], lr=0.01, **IMPLEMENTATIONS[implementation])
    torch.utils.swap_tensors(param, nn.Parameter(torch.full((2, 5), 2.0)))
    line = Reference(param, rule="mars-adamw", lr=0.01, betas=(0.95, 0.99))
    for step in range(3):
        param.grad = gradient(param, step)
        optimizer.step()
        line.step(param.grad)
    torch.testing.assert_close(param.detach().double(), line.x, rtol=1e-5, atol=1e-6)


@every_implementation
def test_loading_weights_by_assignment_is_noticed_by_nobody_else(implementation):
    """`load_state_dict(assign=True)` makes new parameters; the optimizer's old ones get no gradient and stay."""
    model = nn.Linear(4, 3)
    optimizer = Mars(model.parameters(), **IMPLEMENTATIONS[implementation])
    for step in range(2):
        for param in model.parameters():
            param.grad = gradient(param, step)
        optimizer.step()
    optimizer.zero_grad()
    old = [param for group in optimizer.param_groups for param in group["params"]]
    values = [param.detach().clone() for param in old]
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(map(torch.equal, old, values))
    assert all(torch.equal(param, torch.ones_like(param)) for param in model.parameters())
