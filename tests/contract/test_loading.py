"""Loading a state: hooks, names, step counts, shapes, dtypes, and autograd graphs that it must not hold."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import mars_of
from mars_info import EVERY_IMPLEMENTATION, IMPLEMENTATIONS, equal, needs_compiler
from torch import Tensor, nn

import mars_hf
from mars_hf import Mars

every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)


def model_of(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(rows, cols) for rows, cols in itertools.pairwise(widths))).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = (0.1 * torch.randn(param.shape, generator=generator)).to(param.dtype)
        optimizer.step()


def trained(**settings: Any) -> tuple[nn.Sequential, Mars]:
    model = model_of(4, 3, 2)
    optimizer = Mars(model.named_parameters(), **settings)
    train(model, optimizer, 3)
    return model, optimizer


# --- hooks ------------------------------------------------------------------------------------------------------


@every_implementation
def test_states_that_a_pre_hook_returns_are_used(implementation):
    """Loading uses the returned state, not the caller's dictionary."""
    model, optimizer = trained(**IMPLEMENTATIONS[implementation])
    saved = copy.deepcopy(optimizer.state_dict())

    def doubled(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        other = copy.deepcopy(state_dict)
        for state in other["state"].values():
            for key, value in state.items():
                state[key] = value * 2
        return other

    optimizer.register_load_state_dict_pre_hook(doubled)
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert equal(saved, kept)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(value, 2 * kept["state"][number][key], rtol=0, atol=0)
    train(model, optimizer, 1)
    assert all(state["step"] == 7 for state in optimizer.state.values())


def test_a_pre_hook_may_change_what_it_is_given():
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())

    def changed(_: Any, state_dict: dict[str, Any]) -> None:
        state_dict["state"][0]["exp_avg"] = torch.full_like(state_dict["state"][0]["exp_avg"], 3.0)

    optimizer.register_load_state_dict_pre_hook(changed)
    optimizer.load_state_dict(saved)
    first = optimizer.param_groups[0]["params"][0]
    assert (optimizer.state[first]["exp_avg"] == 3.0).all()


def test_checks_come_after_pre_hooks():
    """A hook can turn another optimizer's state into a state of Mars."""
    model = model_of(4, 3)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, adamw, 3)
    optimizer = Mars(model.parameters())
    with pytest.raises(ValueError, match="role"):
        optimizer.load_state_dict(adamw.state_dict())

    def from_adamw(mars: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        own = copy.deepcopy(mars.state_dict())
        order = [number for group in own["param_groups"] for number in group["params"]]
        # Mars's groups list matrices first: weight and bias have the same numbers as in AdamW's groups.
        own["state"] = {number: copy.deepcopy(state_dict["state"][number]) for number in order}
        own["state"][0]["last_grad"] = torch.zeros_like(own["state"][0]["exp_avg"])
        return own

    optimizer.register_load_state_dict_pre_hook(from_adamw)
    optimizer.load_state_dict(adamw.state_dict())
    for param in model.parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[param][key], adamw.state[param][key], rtol=0, atol=0)
    train(model, optimizer, 1)


def test_a_bad_state_that_a_pre_hook_returns_is_refused():
    _, optimizer = trained()

    def foreign(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        other = copy.deepcopy(state_dict)
        for group in other["param_groups"]:
            del group["role"]
        return other

    optimizer.register_load_state_dict_pre_hook(foreign)
    with pytest.raises(ValueError, match="role"):
        optimizer.load_state_dict(optimizer.state_dict())


@every_implementation
def test_what_a_post_hook_writes_stays(implementation):
    model, optimizer = trained(**IMPLEMENTATIONS[implementation])
    weight = model[0].weight

    def write(mars: torch.optim.Optimizer) -> None:
        mars.state[weight]["exp_avg"] = torch.full_like(weight, 3.0)
        mars.state[weight]["step"] = torch.tensor(9.0)
        mars.state[weight]["own"] = torch.ones(2)
        mars.param_groups[0]["lr"] = 0.5
        mars.param_groups[0]["max_grad_norm"] = None
        mars.state[model[0].bias]["exp_avg_sq"].fill_(4.0)

    optimizer.register_load_state_dict_post_hook(write)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (optimizer.state[weight]["exp_avg"] == 3.0).all()
    assert optimizer.state[weight]["step"] == 9.0
    assert torch.equal(optimizer.state[weight]["own"], torch.ones(2))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (optimizer.state[model[0].bias]["exp_avg_sq"] == 4.0).all()
    train(model, optimizer, 1)
    assert optimizer.state[weight]["step"] == 10.0


def test_a_post_hook_sees_the_state_as_it_will_be():
    """The hook sees states in their own dtype, with this loop's settings."""
    model = model_of(4, 3, dtype=torch.bfloat16)
    optimizer = Mars(model.parameters(), max_grad_norm=1.0)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = Mars(model.parameters(), max_grad_norm=0.5)
    seen = []

    def look(mars: torch.optim.Optimizer) -> None:
        seen.extend(state["exp_avg"].dtype for state in mars.state.values())
        seen.extend(group["max_grad_norm"] for group in mars.param_groups)

    other.register_load_state_dict_post_hook(look)
    other.load_state_dict(saved)
    assert seen == [torch.float32, torch.float32, 0.5, 0.5]


# --- names ------------------------------------------------------------------------------------------------------


def by_names(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Follow PyTorch's recipe (torch.optim docs, "How to utilize named parameters to load optimizer state dict")."""
    adapted = copy.deepcopy(optimizer.state_dict())
    saved_groups = state_dict["param_groups"]
    for own, saved in zip(adapted["param_groups"], saved_groups, strict=True):
        own.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    numbers = {
        name: number
        for group in saved_groups
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    for group in adapted["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            saved_number = numbers.get(name)
            if saved_number in state_dict["state"]:
                adapted["state"][number] = copy.deepcopy(state_dict["state"][saved_number])
    return adapted


@pytest.mark.parametrize("made", ["Mars", "create"])
@every_implementation
def test_loading_by_names(implementation, made):
    """Parameters have another order, with a new layer without state between them."""

    class Bypassed(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.adapter = nn.Linear(3, 3)
            self.second, self.first = second, first

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def make(model: nn.Module) -> Mars:
        if made == "create":
            return mars_hf.create(model, **IMPLEMENTATIONS[implementation])
        return Mars(model.named_parameters(), **IMPLEMENTATIONS[implementation])

    model = Plain()
    optimizer = make(model)
    train(model, optimizer, 3)
    larger = Bypassed(model.first, model.second)
    other = make(larger)
    other.register_load_state_dict_pre_hook(by_names)
    other.load_state_dict(optimizer.state_dict())
    for name, param in model.named_parameters():
        assert equal(dict(optimizer.state[param]), dict(other.state[dict(larger.named_parameters())[name]]))
    assert not other.state.get(larger.adapter.weight)
    train(larger, other, 2)
    assert other.state[larger.first.weight]["step"] == 5
    assert other.state[larger.adapter.weight]["step"] == 2


def test_loading_into_renamed_parameters():
    model, optimizer = trained()
    renamed = nn.ModuleDict({"a": model[0], "b": model[1]})
    other = Mars(renamed.named_parameters())
    other.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        assert equal(dict(optimizer.state[param]), dict(other.state[param]))


# --- step counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda step: torch.tensor(step, dtype=torch.float64)])
@every_implementation
def test_a_step_count_may_be_a_number(implementation, kind):
    settings = IMPLEMENTATIONS[implementation]
    model, optimizer = trained(**settings)
    twin = copy.deepcopy(model)
    other = Mars(twin.named_parameters(), **settings)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = kind(int(state["step"]))
    other.load_state_dict(saved)
    for one, each in ((model, optimizer), (twin, other)):
        train(one, each, 2)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for state in other.state.values():
        assert isinstance(state["step"], Tensor)
        assert kind not in (int, float) or state["step"].dtype == torch.float32
        assert state["step"].shape == ()
        assert state["step"] == 5


@every_implementation
def test_a_step_count_may_be_set_to_a_number(implementation):
    """A running optimizer's step count may be set, as in `opt.state[p]["step"] = 0`."""
    model, optimizer = trained(**IMPLEMENTATIONS[implementation])
    twin = copy.deepcopy(model)
    other = Mars(twin.named_parameters(), **IMPLEMENTATIONS[implementation])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        state["step"] = 9
    for state in other.state.values():
        state["step"] = torch.tensor(9.0)
    for one, each in ((model, optimizer), (twin, other)):
        train(one, each, 2)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(float(state["step"]) == 11 for state in optimizer.state.values())


# --- shapes and dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "last_grad"])
@pytest.mark.parametrize("shape", [(5, 4), (2, 6), (4, 3), (12,), (1, 3, 4), ()], ids=str)
def test_states_of_another_shape_are_refused(key, shape):
    """The shape changes, as for a resized vocabulary, also with the same number of elements."""
    model = model_of(4, 3)
    optimizer = Mars(model.parameters())
    train(model, optimizer, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key] = torch.zeros(shape)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        optimizer.load_state_dict(saved)
    assert str(tuple(shape)) in str(refused.value)
    assert "(3, 4)" in str(refused.value)
    assert equal(before, (dict(model.state_dict()), optimizer.state_dict()))


@needs_compiler
@pytest.mark.parametrize("rows", [90, 110])
def test_a_resized_vocabulary_is_refused(rows):
    old, new = nn.Embedding(100, 8), nn.Embedding(rows, 8)
    optimizer, other = Mars(old.parameters(), fused=True), Mars(new.parameters(), fused=True)
    train(old, optimizer, 2)
    with pytest.raises((ValueError, RuntimeError), match=rf"\(100, 8\).*\({rows}, 8\)|\({rows}, 8\).*\(100, 8\)"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "last_grad"])
@every_implementation
def test_a_state_of_another_shape_that_is_put_in_its_place_is_refused(implementation, key):
    """The step raises before anything changes."""
    model = model_of(4, 3)
    optimizer = Mars(model.parameters(), **IMPLEMENTATIONS[implementation])
    train(model, optimizer, 2)
    optimizer.state[model[0].weight][key] = torch.zeros(4, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"\(4, 3\).*\(3, 4\)|\(3, 4\).*\(4, 3\)"):
        train(model, optimizer, 1)
    assert equal(dict(before), dict(model.state_dict()))


def test_a_state_of_an_unknown_kind_is_carried():
    """Foreign entries of a state load unchanged, whatever their shape and type."""
    model, optimizer = trained()
    optimizer.state[model[0].weight]["theirs"] = {"rank": 3, "factors": [torch.ones(2)]}
    saved = copy.deepcopy(optimizer.state_dict())
    other = Mars(model.named_parameters())
    other.load_state_dict(saved)
    assert equal(other.state[model[0].weight]["theirs"], {"rank": 3, "factors": [torch.ones(2)]})
    train(model, other, 1)
    assert equal(other.state[model[0].weight]["theirs"], {"rank": 3, "factors": [torch.ones(2)]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_states_keep_the_dtypes_they_were_saved_in(dtype):
    model, optimizer = trained()
    other_model = model_of(4, 3, 2, dtype=dtype)
    other = Mars(other_model.named_parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, twin in zip(model.parameters(), other_model.parameters(), strict=True):
        assert equal(dict(optimizer.state[param]), dict(other.state[twin]))
    train(other_model, other, 2)
    assert all(torch.isfinite(param).all() for param in other_model.parameters())


# --- graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("take_grad", [False, True])
@every_implementation
def test_a_state_holds_no_graph(implementation, take_grad, settings):
    """Gradients carry a graph after `backward(create_graph=True)`, as second-order methods need it."""
    model = model_of(4, 3)
    optimizer = mars_of(model.parameters(), take_grad=take_grad, **settings, **IMPLEMENTATIONS[implementation])
    twin = copy.deepcopy(model)
    plain = mars_of(twin.parameters(), take_grad=take_grad, **settings, **IMPLEMENTATIONS[implementation])
    given = torch.ones(2, 4)
    for _ in range(3):
        optimizer.zero_grad()
        params = list(model.parameters())
        for param, grad in zip(
            params, torch.autograd.grad(model(given).pow(2).sum(), params, create_graph=True), strict=True
        ):
            param.grad = grad
        optimizer.step()
        plain.zero_grad()
        twin(given).pow(2).sum().backward()
        plain.step()
        for state in optimizer.state.values():
            assert all(value.grad_fn is None and not value.requires_grad for value in state.values())
    saved = copy.deepcopy(optimizer.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    other = mars_of(model.parameters(), take_grad=take_grad, **settings, **IMPLEMENTATIONS[implementation])
    other.load_state_dict(saved)
    for one, another in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=0)
        assert equal(scaled(other.state[one]), scaled(plain.state[another]))


def scaled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with the last gradient times its scale: a tracked gradient is copied, others are moved."""
    found = dict(state)
    scale = found.pop("last_grad_scale", None)
    return found if scale is None else {**found, "last_grad": found["last_grad"] * scale}
