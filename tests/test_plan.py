"""Batches are made once, and made anew as soon as anything they were made from has changed."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import needs_compiler
from torch import nn

import mars_hf
from mars_hf import Mars, optimizer

SHAPES = ((4, 3), (5, 2), (6,))


@pytest.fixture
def gathered(monkeypatch) -> list[int]:
    """One entry for every time that batches are made."""
    calls: list[int] = []
    gather = optimizer.gather

    def counted(*args):
        calls.append(1)
        return gather(*args)

    monkeypatch.setattr(optimizer, "gather", counted)
    return calls


def make(**settings) -> tuple[list[nn.Parameter], Mars]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return params, Mars(params, lr=0.01, **settings)


def gradient(param: torch.Tensor, step: int) -> torch.Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * step + param.numel()))


def step(params, mars, number: int) -> None:
    for param in params:
        param.grad = gradient(param, number)
    mars.step()


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"fused": True}, marks=needs_compiler), {"take_grad": True}, {"max_grad_norm": 0.1}],
    ids=str,
)
def test_batches_are_made_once(gathered, settings):
    params, mars = make(**settings)
    for number in range(6):
        step(params, mars, number)
    assert len(gathered) == 1


def missing(params, mars):
    params[1].grad = None


def frozen_state(params, mars):
    mars.load_state_dict(copy.deepcopy(mars.state_dict()))


def moved(params, mars):
    params[0].data = params[0].data.clone()


def transposed_gradient(params, mars):
    params[0].grad = params[0].grad.t().contiguous().t()


def new_group(params, mars):
    params.append(nn.Parameter(torch.ones(2, 2)))
    params[-1].grad = torch.ones(2, 2)
    mars.add_param_group({"params": params[-1:]})


def another_setting(params, mars):
    for group in mars.param_groups:
        group["amsgrad"] = True


def cleared_state(params, mars):
    mars.state.clear()


def replaced_last_gradient(params, mars):
    state = mars.state[params[0]]
    state["last_grad"] = state["last_grad"] * 2


def replaced_parameter(params, mars):
    params[0] = nn.Parameter(params[0].detach().clone())
    params[0].grad = torch.ones_like(params[0])
    mars.param_groups[0]["params"][0] = params[0]


CHANGES = [
    *(missing, frozen_state, moved, transposed_gradient, new_group, another_setting, cleared_state),
    *(replaced_parameter, replaced_last_gradient),
]


@pytest.mark.parametrize("take_grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(gathered, monkeypatch, change, take_grad):
    results = []
    for planned in (True, False):
        with monkeypatch.context() as patch:
            if not planned:
                patch.setattr(optimizer.Plan, "covers", staticmethod(lambda batches: False))
            params, mars = make(take_grad=take_grad)
            for number in range(6):
                for param in params:
                    param.grad = gradient(param, number)
                if number == 3:
                    gathered.clear()
                    change(params, mars)
                mars.step()
                if number == 3 and not (take_grad and change is replaced_last_gradient):  # which is read every time
                    assert gathered
            results.append([param.detach().clone() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
def test_learning_rate_and_betas_need_no_new_batches(gathered):
    params, mars = make(fused=True)
    plain, other = make(fused=True)
    for number in range(4):
        for group in (*mars.param_groups, *other.param_groups):
            group.update(lr=0.1 / (1 + number), betas=(0.8 + 0.01 * number, 0.9), gamma=0.1 * number)
        step(params, mars, number)
        other._plan = None
        step(plain, other, number)
    assert len(gathered) == 1 + 4
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


def test_bad_gradients_are_still_refused():
    params, mars = make()
    step(params, mars, 0)
    step(params, mars, 1)
    params[0].grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 3), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse_coo"):
        mars.step()


def test_exact_and_sharded_steps_are_not_planned(gathered):
    params, mars = make(is_approx=False)
    step(params, mars, 0)
    for param in params:
        param.grad = gradient(param, 1)
    mars.update_previous_grad()
    mars.update_last_grad()
    step(params, mars, 1)
    assert len(gathered) == 2
    assert mars._plan is None


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
