"""A step without gradients changes nothing; parameters without gradients get no state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import mars_of
from mars_info import EVERY_IMPLEMENTATION, IMPLEMENTATIONS, equal
from torch import nn

import mars_hf
from mars_hf import Mars

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "max_grad_norm, take_grad": {"max_grad_norm": 1.0, "take_grad": True},
    "without clipping": {"clip_threshold": None, "max_grad_norm": 1.0},
    "decay": {"weight_decay": 0.1, "weight_decay_1d": 0.1},
    "mars-lion": {"mars_type": "mars-lion", "max_grad_norm": 1.0},
    "mars-shampoo": {"mars_type": "mars-shampoo", "max_grad_norm": 1.0},
    "mars-m": {"mars_type": "mars-m", "max_grad_norm": 1.0},
    "exact": {"is_approx": False, "max_grad_norm": 1.0},
}
every_form = pytest.mark.parametrize("form", FORMS)
every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)


def make() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]


def set_gradients(params: list[nn.Parameter], value: float = 0.5) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)


def assert_nothing_happens(params: list[nn.Parameter], optimizer: Mars) -> None:
    for param in params:
        param.grad = None
    before = copy.deepcopy((params, optimizer.state_dict(), optimizer.grad_norm))
    result = optimizer.step(lambda: 7.0)
    assert result == 7.0
    now = (params, optimizer.state_dict(), optimizer.grad_norm)
    assert equal(now[:2], before[:2])
    torch.testing.assert_close(now[2], before[2], rtol=0, atol=0, equal_nan=True)
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("measured", [False, True], ids=["", "measured"])
@every_implementation
@every_form
def test_a_step_without_any_gradient_is_a_no_op(form, implementation, measured):
    params = make()
    optimizer = mars_of(params, **FORMS[form], **IMPLEMENTATIONS[implementation])
    optimizer.collect_metrics(measured)
    assert_nothing_happens(params, optimizer)
    assert not any(optimizer.state.values())
    for _ in range(2):
        set_gradients(params)
        if form == "exact":
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
        optimizer.step()
    optimizer.pop_metrics()
    assert_nothing_happens(params, optimizer)
    assert optimizer.pop_metrics() == {}
    set_gradients(params)
    if form == "exact":
        optimizer.update_previous_grad()
        optimizer.update_last_grad()
    optimizer.step()  # later steps work
    assert all(optimizer.state[param]["step"] == 3 for param in params)


@every_implementation
@pytest.mark.parametrize("form", [form for form in FORMS if form != "exact"])  # which needs stale gradients
def test_a_step_without_gradients_leaves_the_next_ones_as_they_were(form, implementation):
    """The state is as if the step had never happened."""
    settings = {**FORMS[form], **IMPLEMENTATIONS[implementation]}
    results = []
    for idle in (False, True):
        params = make()
        optimizer = mars_of(params, **settings)
        for value in (0.5, -0.2, 0.7):
            set_gradients(params, value)
            optimizer.step()
            optimizer.zero_grad()
            if idle:
                optimizer.step()
        results.append((params, optimizer.state_dict()))
    assert equal(*results)


@pytest.mark.parametrize("place", [0, 1])
@every_implementation
@every_form
def test_an_empty_group(form, implementation, place):
    params = make()
    groups: list[dict[str, Any]] = [{"params": [params[0]]}, {"params": [params[1]]}]
    groups.insert(place, {"params": []})
    optimizer = mars_of(groups, **FORMS[form], **IMPLEMENTATIONS[implementation])
    plain = make()
    other = mars_of(plain, **FORMS[form], **IMPLEMENTATIONS[implementation])
    assert_nothing_happens(params, optimizer)
    for _ in range(2):
        for ones, each in ((params, optimizer), (plain, other)):
            set_gradients(ones)
            each.update_previous_grad()
            each.update_last_grad()
            each.step()
        assert all(map(torch.equal, params, plain))
    if "max_grad_norm" in FORMS[form]:
        assert optimizer.grad_norm == other.grad_norm
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    repr(optimizer)


def test_nothing_but_an_empty_group():
    optimizer = Mars([{"params": []}], max_grad_norm=1.0)
    assert optimizer.step() is None
    assert torch.isnan(optimizer.grad_norm)


@every_implementation
@every_form
def test_frozen_parameters_get_no_state(form, implementation):
    params = make()
    frozen = [nn.Parameter(torch.ones(3, 4), requires_grad=False), nn.Parameter(torch.ones(5), requires_grad=False)]
    optimizer = mars_of([*params, *frozen], **FORMS[form], **IMPLEMENTATIONS[implementation])
    for _ in range(3):
        set_gradients(params)
        if form == "exact":
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
        optimizer.step()
    assert set(optimizer.state) == set(params)
    assert len(optimizer.state_dict()["state"]) == len(params)
    assert all(torch.equal(param, torch.ones_like(param)) for param in frozen)


def test_frozen_layers_of_a_model_are_thawed_when_they_have_gradients():
    """A parameter is frozen when the optimizer is built, as for gradual unfreezing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = Mars(model.parameters(), max_grad_norm=1.0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()

    before = model[0].weight.detach().clone()
    step()
    assert model[0].weight not in optimizer.state
    model[0].requires_grad_(True)
    step()
    assert optimizer.state[model[0].weight]["step"] == 1
    assert optimizer.state[model[1].weight]["step"] == 2
    assert not torch.equal(before, model[0].weight)


def test_reading_the_previous_parameters_makes_no_state():
    model = nn.Linear(3, 3)
    optimizer = mars_hf.create(model, is_approx=False)
    assert not optimizer.has_previous_params
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    assert len(optimizer.state) == 0
