"""Exact MARS (`is_approx=False`) in the optimizer: hand-written loops, states and errors."""

from __future__ import annotations

import copy

import pytest
import torch
from reference import Reference
from torch import nn

import mars_hf
from mars_hf import Mars

SHAPES = ((6, 5), (4, 4), (5,))
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "gamma": 0.3, "clip_threshold": 0.5}


def make_params(shapes=SHAPES, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


class Problem:
    """A loss whose gradient depends on parameters and batch; batches never repeat."""

    def __init__(self, shapes=SHAPES, dtype: torch.dtype = torch.float64) -> None:
        self.shapes, self.dtype = shapes, dtype

    def backward(self, params: list[torch.Tensor], step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for param, shape in zip(params, self.shapes, strict=True):
            target = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            (param - target).pow(4).sum().mul(0.1).backward()


def zero(params: list[torch.Tensor]) -> None:
    for param in params:
        param.grad = None


def behind(params, optimizer, problem, steps: range) -> None:
    """Compute the stale gradient at the step itself, at the previous step's parameters."""
    for step in steps:
        if optimizer.has_previous_params:
            with optimizer.previous_params():
                problem.backward(params, step)
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            zero(params)
        problem.backward(params, step)
        optimizer.step()
        zero(params)


def ahead(params, optimizer, problem, steps: range) -> None:
    """Compute the next step's stale gradient before this step, as the official trainer does."""
    for step in steps:
        problem.backward(params, step + 1)
        optimizer.update_previous_grad()
        zero(params)
        problem.backward(params, step)
        optimizer.step()
        zero(params)
        optimizer.update_last_grad()


def straight_line(steps: int, problem: Problem, mars_type: str, maximize: bool = False) -> list[torch.Tensor]:
    x = [param.detach().clone() for param in make_params(problem.shapes)]
    rules = [
        Reference(
            tensor,
            **(SETTINGS if tensor.ndim > 1 else {"lr": 5e-3, "betas": (0.9, 0.95), "eps": 1e-6}),
            rule=mars_type if tensor.ndim > 1 else "adamw",
        )
        for tensor in x
    ]

    def gradients(at: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in at]
        problem.backward(leaves, step)
        return [-leaf.grad if maximize else leaf.grad for leaf in leaves]

    previous = None
    for step in range(steps):
        now = gradients(x, step)
        stale = [torch.zeros_like(tensor) for tensor in x] if previous is None else gradients(previous, step)
        previous = x
        x = [rule.step(g, s) for rule, g, s in zip(rules, now, stale, strict=True)]
    return x


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
@pytest.mark.parametrize("loop", [behind, ahead])
def test_exact_steps(loop, mars_type, foreach, maximize):
    problem = Problem()
    params = make_params()
    optimizer = Mars(
        params, **SETTINGS, mars_type=mars_type, lr_1d=5e-3, is_approx=False, fused=False, maximize=maximize
    )
    loop(params, optimizer, problem, range(8))
    for param, expected in zip(params, straight_line(8, problem, mars_type, maximize), strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_previous_params(dtype):
    params = make_params(dtype=dtype)
    params[1].data = params[1].data.t()  # not contiguous
    before = [param.detach().clone() for param in params]
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    problem = Problem(dtype=dtype)
    problem.backward(params, 0)
    pointers = [param.data_ptr() for param in params]
    optimizer.step()
    after = [param.detach().clone() for param in params]
    with pytest.raises(KeyError), optimizer.previous_params():
        assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
        raise KeyError
    assert all(torch.equal(param, new) for param, new in zip(params, after, strict=True))
    assert pointers == [param.data_ptr() for param in params]
    with optimizer.previous_params():
        assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))


def test_parameters_without_gradients():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    problem = Problem()
    behind(params, optimizer, problem, range(2))
    with optimizer.previous_params():
        problem.backward(params, 2)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    zero(params)
    problem.backward(params, 2)
    params[0].grad = None
    optimizer.step()
    still = params[0].detach().clone()
    with optimizer.previous_params():
        assert torch.equal(params[0], still)
        assert not torch.equal(params[1], still[:4, :4])
    assert "last_grad" not in optimizer.state[params[0]]  # that of another batch is not kept


def test_gradients_are_copied():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    Problem().backward(params, 0)
    optimizer.update_previous_grad()
    params[0].grad.zero_()
    assert optimizer.state[params[0]]["previous_grad"].any()


def test_buffers():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    behind(params, optimizer, Problem(), range(3))
    for param in params:
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq", "previous_param"}
    optimizer.update_previous_grad()  # no gradients: nothing
    Problem().backward(params, 3)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq", "previous_param", "last_grad"}
    assert "last_grad" not in optimizer.state[params[2]]


@pytest.mark.parametrize("loop", [behind, ahead])
def test_state_dict_roundtrip(loop, tmp_path):
    problem = Problem()
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    loop(params, optimizer, problem, range(4))
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    loop(params, optimizer, problem, range(4, 8))

    saved = torch.load(tmp_path / "state.pt", weights_only=False)
    resumed = saved["params"]
    other = Mars(resumed, **SETTINGS, is_approx=False)
    other.load_state_dict(saved["optimizer"])
    loop(resumed, other, problem, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_state_of_the_other_form():
    params = make_params()
    exact, approx = Mars(params, is_approx=False), Mars(params)
    with pytest.raises(ValueError, match=r"is_approx=False and is True here"):
        approx.load_state_dict(exact.state_dict())
    with pytest.raises(ValueError, match=r"is_approx=True and is False here"):
        exact.load_state_dict(approx.state_dict())


def test_step_without_stale_gradients():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    problem = Problem()
    problem.backward(params, 0)
    optimizer.step()  # the first one has none
    before = copy.deepcopy([param.detach() for param in params])
    with pytest.raises(RuntimeError, match=r"no stale gradient.*MarsTrainer.*update_previous_grad"):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no stale gradient"):  # each is good for one step
        optimizer.step()


def test_last_gradients_of_approximate_steps_are_no_stale_ones():
    params = make_params()
    optimizer = Mars(params, **SETTINGS)
    Problem().backward(params, 0)
    optimizer.step()
    for group in optimizer.param_groups:
        group["is_approx"] = False
    with pytest.raises(RuntimeError, match="no stale gradient"):
        optimizer.step()


def test_no_previous_params():
    optimizer = Mars(make_params(), is_approx=False)
    assert not optimizer.has_previous_params
    with pytest.raises(RuntimeError, match="no previous parameters"), optimizer.previous_params():
        pass


def test_one_exact_group():
    params = make_params()
    optimizer = mars_hf.create([{"params": [params[0]], "is_approx": False}, {"params": params[1:]}], **SETTINGS)
    behind(params, optimizer, Problem(), range(3))
    assert "last_grad" not in optimizer.state[params[0]]
    assert "last_grad" in optimizer.state[params[1]]
    assert "previous_param" in optimizer.state[params[1]]  # the stale gradient of one depends on all
