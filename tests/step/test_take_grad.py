"""`take_grad` moves gradients into the state if that is safe, and copies them otherwise."""

from __future__ import annotations

import pytest
import torch
from helpers import mars_of
from torch import nn

SHAPES = ((6, 5), (4, 4), (5,))


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient(shape: torch.Size, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + sum(shape))).to(dtype)


def run(take_grad: bool, give, steps: int = 5, dtype: torch.dtype = torch.float32, **settings):
    """Return weights after steps in which `give(param, step)` sets the gradient."""
    params = make_params(dtype)
    optimizer = mars_of(params, lr=0.01, take_grad=take_grad, fused=False, **settings)
    for step in range(steps):
        for param in params:
            give(param, step)
        optimizer.step()
    return params, optimizer


def fresh(param, step):
    param.grad = gradient(param.shape, step, param.dtype)


def test_an_ordinary_gradient_is_moved():
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = mars_of([param], take_grad=True)
    for step in range(3):
        fresh(param, step)
        given = param.grad
        optimizer.step()
        assert optimizer.state[param]["last_grad"] is given  # no copy
        assert param.grad is None


def test_vectors_keep_theirs():
    params, _ = run(True, fresh, 1)
    assert [param.grad is None for param in params] == [True, True, False]


def set_to_none_in_turn(param, step):
    if step % 2 or param.grad is None:
        param.grad = gradient(param.shape, step)
    else:
        param.grad.zero_().add_(gradient(param.shape, step))


def view_of_a_buffer(param, step):
    if not hasattr(param, "buffer"):
        param.buffer = torch.zeros(param.numel() + 3)  # like DDP's buckets, reused at every step
    param.buffer[1 : param.numel() + 1] = gradient(param.shape, step).flatten()
    param.grad = param.buffer[1 : param.numel() + 1].view_as(param)


def view_of_all_of_a_buffer(param, step):
    if not hasattr(param, "buffer"):
        param.buffer = torch.zeros(param.numel())
    param.buffer.copy_(gradient(param.shape, step).flatten())
    param.grad = param.buffer.view_as(param)


def detached_view(param, step):
    view_of_a_buffer(param, step)
    param.grad = param.grad.detach()  # a view that autograd does not mark as one


def transposed(param, step):
    param.grad = gradient(param.shape, step).t().contiguous().t()


def sometimes_missing(param, step):
    param.grad = gradient(param.shape, step) if (step + param.numel()) % 3 else None


def through_autograd(param, step):
    (param * gradient(param.shape, step)).sum().backward()


GIVEN = [
    *(fresh, set_to_none_in_turn, view_of_a_buffer, view_of_all_of_a_buffer, detached_view),
    *(transposed, sometimes_missing, through_autograd),
]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("give", GIVEN)
def test_it_changes_no_result(give, max_grad_norm):
    def zeroed(param, step):
        if give is through_autograd:  # which adds to what is there
            param.grad = None
        give(param, step)

    def taking(param, step):
        (give if param.ndim > 1 else zeroed)(param, step)

    taken, _ = run(True, taking, max_grad_norm=max_grad_norm)
    copied, _ = run(False, zeroed, max_grad_norm=max_grad_norm)
    for a, b in zip(taken[:2], copied[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [{"state_dtype": "bfloat16"}, {"state_dtype": "float64"}], ids=str)
def test_another_dtype_is_copied(settings):
    params, optimizer = run(True, fresh, 2, **settings)
    assert params[0].grad is not None
    assert optimizer.state[params[0]]["last_grad"].dtype != torch.float32


def test_low_precision_parameters_with_float32_states_are_copied():
    params, optimizer = run(True, fresh, 2, dtype=torch.bfloat16)
    assert params[0].grad is not None
    assert optimizer.state[params[0]]["last_grad"].dtype == torch.float32


def test_hooks_see_every_gradient():
    param = nn.Parameter(torch.ones(3, 4))
    seen = []
    param.register_hook(lambda grad: seen.append(grad.clone()))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    optimizer = mars_of([param], take_grad=True)
    for step in range(3):
        (param * gradient(param.shape, step)).sum().backward()
        optimizer.step()
    expected = [gradient(param.shape, step) for step in range(3) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_exact_mode_moves_nothing():
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = mars_of([param], take_grad=True, is_approx=False)
    fresh(param, 0)
    optimizer.step()
    assert param.grad is not None


def test_it_can_be_turned_on_and_off():
    results = []
    for flags in ((False,) * 6, (True, True, False, False, True, False)):
        params = make_params()
        optimizer = mars_of(params, lr=0.01, max_grad_norm=1.0)
        for step, flag in enumerate(flags):
            optimizer.take_grad = flag
            for param in params:
                fresh(param, step)
            optimizer.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
