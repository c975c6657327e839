"""The backend that each list of tensors gets, and what autograd and torch.compile see of it."""

from __future__ import annotations

import pytest
import torch
from helpers import backend_names, needs_compiler
from torch import nn

from mars_hf import Mars
from mars_hf import kernels as backends
from mars_hf.kernels import cpu as compiled

CPU = torch.device("cpu")


def names(optimizer: Mars) -> list[str]:
    """Return the names of the backends of a step's lists, in order."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    return backend_names(optimizer)


def two(numel: int = 64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel // 8, 8)), nn.Parameter(torch.zeros(7))]


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "numel", "expected"),
    [
        ({}, 56, "foreach"),
        ({}, 64, "compiled"),  # from COMPILED_FROM on
        ({"mars_type": "mars-m"}, 64, "compiled"),
        ({"fused": False}, 64, "for-loop"),
        ({"fused": False}, 56, "foreach"),
        ({"fused": True}, 56, "compiled"),
        # Without kernels, also with fused=True:
        ({"fused": True, "amsgrad": True}, 64, "for-loop"),
        ({"fused": True, "state_dtype": "float16"}, 64, "for-loop"),
    ],
    ids=str,
)
def test_choice(monkeypatch, settings, numel, expected):
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    assert names(Mars(two(numel), **settings)) == [expected] * 2


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    monkeypatch.setattr(compiled, "_library", lambda: None)
    assert names(Mars(two())) == ["for-loop", "for-loop"]
    with pytest.raises(RuntimeError, match=r"fused=True.*C\+\+ compiler.*fused=None"):
        names(Mars(two(), fused=True))


@needs_compiler
@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        (torch.zeros(8, 8, dtype=torch.bfloat16), {"rounding": "stochastic"}, "compiled"),
        (torch.zeros(8, 8, dtype=torch.bfloat16), {"rounding": "kahan"}, "foreach"),
        (torch.zeros(4, 6)[:, :3], {}, "for-loop"),  # gaps in memory
        (torch.zeros(6, 4).t(), {}, "compiled"),  # another order of memory
        (torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2), {}, "compiled"),
    ],
    ids=["stochastic", "kahan", "gaps", "transposed", "permuted"],
)
def test_choice_by_tensor(values, settings, expected):
    assert names(Mars([nn.Parameter(values)], fused=True, **settings)) == [expected]


MEMORY = torch.linspace(-1, 1, 24)


@needs_compiler
@pytest.mark.parametrize(
    "values",
    [
        [MEMORY[:16].view(4, 4), MEMORY[8:].view(4, 4)],
        [torch.frombuffer(bytearray(70), dtype=torch.float32, offset=2, count=16).view(4, 4)],
    ],
    ids=["shared", "misaligned"],
)
def test_memory_that_kernels_cannot_take(values):
    """Such tensors are updated one after the other, before and after there are states."""
    optimizer = Mars([nn.Parameter(tensor) for tensor in values], fused=True)
    for _ in range(2):
        assert names(optimizer) == ["for-loop"]
        optimizer.step()


@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"fused": False}, {"fused": True}], ids=str)
def test_compiled_training_step(settings):
    """torch.compile traces up to the optimizer's step and calls that eagerly."""
    results = []
    for compiling in (False, True):
        params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))]
        optimizer = Mars(params, lr=torch.tensor(0.02), lr_1d=0.01, **settings)

        def train(x, params=params, optimizer=optimizer):
            optimizer.zero_grad()
            (x @ params[0] + params[1]).square().sum().backward()
            optimizer.step()

        function = torch.compile(train, backend="eager") if compiling else train
        for step in range(4):
            function(torch.randn(3, 6, generator=torch.Generator().manual_seed(step)))
        results.append([param.detach() for param in params])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@needs_compiler
@pytest.mark.parametrize("settings", [{"fused": False}, {"fused": True}], ids=str)
def test_autograd_notices_a_step(settings):
    param = nn.Parameter(torch.ones(40, 30))
    optimizer = Mars([param], **settings)
    param.square().sum().backward()
    optimizer.step()
    loss = param.square().sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
