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
def test_choice_of_a_backend(monkeypatch, settings, numel, expected):
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    assert names(Mars(two(numel), **settings)) == [expected] * 2


@needs_compiler
def test_choice_by_all_elements_of_a_step(monkeypatch):
    """Compiling pays by what all kernels of a step do, not by the largest tensor."""
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    for rows, expected in ((3, "foreach"), (4, "compiled")):
        params = [nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(rows, 8))]
        assert names(Mars(params)) == [expected]


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
        (torch.zeros(8, 8), {"rounding": "kahan"}, "compiled"),  # which compensates nothing there
        (torch.zeros(4, 6)[:, :3], {}, "for-loop"),  # gaps in memory
        (torch.zeros(6, 4).t(), {}, "compiled"),  # another order of memory
        (torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2), {}, "compiled"),
    ],
    ids=["stochastic", "kahan", "kahan of float32", "gaps", "transposed", "permuted"],
)
def test_choice_by_tensor(values, settings, expected):
    assert names(Mars([nn.Parameter(values)], fused=True, **settings)) == [expected]


MEMORY = torch.linspace(-1, 1, 24)
# Of tensors of one step, in one memory: how each is updated where kernels and whole lists are there.
OVERLAPPING = {
    "apart": ([slice(0, 8), slice(8, 16), slice(16, 24)], ["compiled"]),
    "two": ([slice(0, 12), slice(8, 20)], ["for-loop"]),
    "within": ([slice(0, 24), slice(4, 8), slice(12, 16)], ["for-loop"]),  # the last one is behind the second
    "across gaps": (
        [(slice(0, None), slice(0, 2)), slice(8, 14)],
        ["for-loop", "compiled"],
    ),  # 4 rows of 6 elements, 2 of each
    "beside gaps": ([(slice(0, 2), slice(0, 2)), slice(12, 20)], ["for-loop", "compiled"]),
}


def overlapping(case: str) -> tuple[torch.Tensor, list[nn.Parameter]]:
    memory = MEMORY.clone()
    places, _ = OVERLAPPING[case]
    parts = [memory[place].view(-1, 2) if isinstance(place, slice) else memory.view(4, 6)[place] for place in places]
    return memory, [nn.Parameter(part) for part in parts]


@needs_compiler
@pytest.mark.parametrize("case", OVERLAPPING)
def test_tensors_that_overlap_are_updated_one_by_one(case):
    """As by an optimizer of each, one after the other: kernels read and write several at a time."""
    (memory, params), (expected, twins) = overlapping(case), overlapping(case)
    settings = {"lr": 0.1, "weight_decay": 0.5}
    together, each = Mars(params, fused=True, **settings), [Mars([twin], **settings) for twin in twins]
    for step in range(3):
        assert names(together) == OVERLAPPING[case][1]
        for index, (param, twin) in enumerate(zip(params, twins, strict=True)):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + index))
            twin.grad = param.grad.clone()
        for optimizer in (together, *each):
            optimizer.step()
        torch.testing.assert_close(memory, expected, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_gradients_that_lie_in_parameters_are_copied():
    """A kernel writes the parameters, several at a time, while it reads gradients."""
    results = []
    for shared in (False, True):
        params = [nn.Parameter(MEMORY.clone().view(4, 6)) for _ in range(2)]
        optimizer = Mars(params, lr=0.1, fused=True)
        for param, other in zip(params, reversed(params), strict=True):
            param.grad = other.detach() if shared else other.detach().clone()
        assert backend_names(optimizer) == ["compiled"]
        optimizer.step()
        results.append([param.detach() for param in params])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_whole_lists_take_no_tensors_that_overlap(overlap):
    """Plain PyTorch on whole lists reads all parameters before it writes one."""
    memory = MEMORY.clone()
    params = [nn.Parameter(memory[:12].view(3, 4)), nn.Parameter(memory[8 if overlap else 12 :][:12].view(3, 4))]
    optimizer = Mars(params, fused=False)
    for _ in range(2):
        assert names(optimizer) == ["for-loop" if overlap else "foreach"]
        optimizer.step()


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
