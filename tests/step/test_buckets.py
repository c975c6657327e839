"""Tensors are sorted once, and again once anything looks different; a step holds nothing after it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from helpers import backend_names, mars_of, needs_compiler
from torch import nn

import mars_hf
from mars_hf import Mars

SHAPES = ((4, 3), (5, 2), (6,))


def make(**settings) -> tuple[list[nn.Parameter], Mars]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return params, mars_of(params, lr=0.01, **settings)


def gradient(param: torch.Tensor, step: int) -> torch.Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * step + param.numel()))


def step(params, mars, number: int) -> None:
    for param in params:
        param.grad = gradient(param, number)
    mars.step()


def test_bad_gradients_are_still_refused():
    params, mars = make()
    step(params, mars, 0)
    step(params, mars, 1)
    params[0].grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 3), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse_coo"):
        mars.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"take_grad": True}, {"max_grad_norm": 0.1}, pytest.param({"fused": True}, marks=needs_compiler)],
    ids=str,
)
def test_no_gradient_is_held(settings):
    params, mars = make(**settings)
    gone = []
    for number in range(4):
        step(params, mars, number)
        taken = settings.get("take_grad")
        gone.append([weakref.ref(param.grad) for param in params if param.grad is not None])
        assert not taken or all(param.grad is None for param in params[:2])
        mars.zero_grad()
    gc.collect()
    assert not any(ref() is not None for refs in gone for ref in refs)


@needs_compiler
def test_a_replaced_state_is_what_steps():
    """The second moment is replaced after steps that the order was kept for."""
    results = []
    for fused in (True, False):
        params, mars = make(fused=fused)
        for number in range(3):
            step(params, mars, number)
        for param in params:
            mars.state[param]["exp_avg_sq"] = mars.state[param]["exp_avg_sq"] * 9
            mars.state[param]["step"] = torch.tensor(7.0)
        step(params, mars, 3)
        results.append([*params, *(mars.state[param]["exp_avg_sq"] for param in params)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def strided(values: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same values in other memory."""
    if how == "sliced":
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), torch.nan)
        wide[..., ::2] = values
        return wide[..., ::2]
    if how == "expanded":
        return values.flatten()[:1].clone().expand(values.shape)
    if how == "negated":
        return torch.complex(torch.zeros_like(values), -values).conj().imag
    if how == "real":
        return torch.complex(values, values + 1).real
    if how == "misaligned":
        memory = torch.zeros(4 * values.numel() + 1, dtype=torch.uint8)
        made = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=1, count=values.numel())
        return made.view(values.shape).copy_(values)
    return values.t().contiguous().t() if values.ndim == 2 else values


@pytest.mark.parametrize("how", ["sliced", "expanded", "negated", "real", "misaligned", "transposed"])
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"fused": True}, marks=needs_compiler), {"fused": False}], ids=str
)
def test_gradients_of_any_layout(how, settings):
    results = []
    for layout in (how, "plain"):
        params, mars = make(weight_decay=0.1, **settings)
        for number in range(5):
            for param in params:
                values = gradient(param, number)
                if how == "expanded":
                    values = strided(values, how).contiguous()
                param.grad = strided(values, layout) if number in (1, 3, 4) else values
            mars.step()
        results.append([param.detach().clone() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"fused": True}, marks=needs_compiler), {"fused": False}], ids=str
)
def test_parameters_and_states_with_gaps(settings):
    """For a vector `b[::2]`, a matrix `m[:, ::2]` and a replaced moment, nothing is written between elements."""
    memory = [torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 24).view(3, 8)]
    views = [memory[0][::2].requires_grad_(), memory[1][:, ::2].requires_grad_()]
    plain = [nn.Parameter(view.detach().clone()) for view in views]
    between = [memory[0][1::2].clone(), memory[1][:, 1::2].clone()]
    steppers = [(params, Mars(params, lr=0.1, weight_decay=0.1, **settings)) for params in (views, plain)]
    for number in range(4):
        for params, mars in steppers:
            for param in params:
                param.grad = gradient(param, number)
            mars.step()
            if number == 1 and params is views:
                for param in params:
                    moment = mars.state[param]["exp_avg"]
                    mars.state[param]["exp_avg"] = strided(moment, "sliced")
    assert torch.equal(memory[0][1::2], between[0]) and torch.equal(memory[1][:, 1::2], between[1])
    for view, param in zip(views, plain, strict=True):
        torch.testing.assert_close(view, param, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stepped", [[0], [0, 1]])
@pytest.mark.parametrize("mars_type", ["mars-lion", "mars-m"])
def test_a_changed_gamma_is_refused_for_every_parameter_of_a_group(stepped, mars_type):
    """The rules keep no last gradient; a changed gamma raises also for a parameter without state."""
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    mars = Mars(params, mars_type=mars_type, clip_threshold=None, gamma=0.5)
    for index in stepped:
        params[index].grad = torch.ones(3, 2)
    mars.step()
    mars.param_groups[0]["gamma"] = 0.0
    params[2].grad = torch.ones(3, 2)
    with pytest.raises(RuntimeError, match=r"gamma=0.0 after steps with 0.5"):
        mars.step()
    assert params[2] not in mars.state
    mars.param_groups[0]["gamma"] = 0.5
    mars.step()
    assert mars.state[params[2]]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_negated_gradient_is_kept_with_its_sign(dtype):
    param = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    twin = nn.Parameter(param.detach().clone())
    exact = [Mars([one], is_approx=False, fused=False) for one in (param, twin)]
    for number in range(3):
        for one, mars in zip((param, twin), exact, strict=True):
            values = gradient(one, number).to(dtype)
            if one is param:
                parts = torch.stack([torch.zeros_like(values), -values], -1)
                values = torch.view_as_complex(parts).conj().imag
                assert values.is_neg()
            one.grad = values
            mars.update_previous_grad()
            mars.update_last_grad()
            mars.step()
    assert torch.equal(param, twin)


def test_tensors_that_share_memory_are_updated_one_after_the_other():
    memory = torch.linspace(-1, 1, 24)
    params = [nn.Parameter(memory[:16].view(4, 4)), nn.Parameter(memory[8:24].view(4, 4))]
    mars = Mars(params, lr=0.1, fused=None)
    for param in params:
        param.grad = torch.ones(4, 4)
    found = backend_names(mars)
    assert found == ["for-loop"]


REFUSED = {
    "expanded parameter": (lambda p, m: p.__setattr__("data", torch.ones(4, 1).expand(4, 3)), "parameter.*expanded"),
    "expanded state": (lambda p, m: m.state[p].update(exp_avg=torch.zeros(4, 1).expand(4, 3)), "exp_avg.*expanded"),
    "state of another shape": (lambda p, m: m.state[p].update(exp_avg_sq=torch.zeros(3, 4)), r"\(4, 3\).*\(3, 4\)"),
    "negated state": (
        lambda p, m: m.state[p].update(exp_avg=torch.zeros(4, 3, dtype=torch.complex64).conj().imag),
        "exp_avg.*negated",
    ),
    "no tensor": (lambda p, m: m.state[p].update(exp_avg=1.0), "exp_avg of 1.0"),
    "bad step": (lambda p, m: m.state[p].update(step=torch.ones(2)), r"step=shape \(2,\)"),
    "parameter of another shape": (lambda p, m: p.__setattr__("data", torch.ones(3, 4)), r"gradient of shape \(4, 3\)"),
    "freed": (lambda p, m: p.untyped_storage().resize_(0), "has been freed"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("settings", [{}, pytest.param({"fused": True}, marks=needs_compiler)], ids=str)
def test_what_cannot_be_stepped_is_refused_and_nothing_has_changed(case, settings):
    change, message = REFUSED[case]
    params, mars = make(**settings)
    for number in range(2):
        step(params, mars, number)
    for param in params:
        param.grad = gradient(param, 2)
    change(params[0], mars)
    before = (
        [param.detach().clone() for param in params[1:]],
        [mars.state[param]["step"].clone() for param in params[1:]],
    )
    with pytest.raises(RuntimeError, match=message):
        mars.step()
    after = [param.detach() for param in params[1:]], [mars.state[param]["step"] for param in params[1:]]
    assert all(torch.equal(a, b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True))


def test_a_copy_of_the_optimizer_is_on_its_own():
    params, mars = make()
    step(params, mars, 0)
    other = copy.deepcopy(mars)
    copies = [param for group in other.param_groups for param in group["params"]]
    step(params, mars, 1)
    step(copies, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))
    assert params[0] is not copies[0]
    assert mars_hf.Mars is type(other)
