"""Parameters that a model gets after `create(model)` do not train in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import gpt2, logged
from torch import nn
from torch.nn.utils import parametrizations

import mars_hf


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def train(model: nn.Module, mars: mars_hf.Mars, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        mars.step()
        mars.zero_grad()


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def untie(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def add_block(model: nn.Module) -> None:
    model.append(nn.Linear(2, 2))


def add_parametrization(model: nn.Module) -> None:
    parametrizations.weight_norm(model[0])


CHANGES: list[Callable[[nn.Module], None]] = [assign, untie, add_block, add_parametrization]


@pytest.mark.parametrize("change", CHANGES)
def test_exchanged_and_new_parameters_stop_the_first_step(change):
    model = small()
    mars = mars_hf.create(model, lr=1e-2)
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"this optimizer lacks, .*create\(model, \.\.\.\)"):
        train(model, mars)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_of_the_meta_device_that_is_filled_later():
    with torch.device("meta"):
        model = small()
    mars = mars_hf.create(model, lr=1e-2)
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    with pytest.raises(RuntimeError, match=r"6 trainable parameters that this optimizer lacks.*by to_empty"):
        train(model, mars)


@pytest.mark.parametrize("change", [assign, untie, add_parametrization])
def test_parameters_exchanged_in_mid_run(change):
    """Also where the old ones still have the gradients of the step before, as after `model.zero_grad()`."""
    model = small()
    mars = mars_hf.create(model, lr=1e-2)
    train(model, mars, 2)
    model(torch.ones(2, 3)).sum().backward()
    change(model)
    with pytest.raises(RuntimeError, match="this optimizer lacks"):
        train(model, mars)


@pytest.mark.parametrize("change", [*CHANGES, lambda model: model.__setitem__(0, nn.Linear(3, 4))])
@pytest.mark.parametrize("steps", [1, 3, 30])
def test_changes_of_a_run_are_found_within_eight_steps(change, steps):
    model = small()
    mars = mars_hf.create(model, lr=1e-2)
    train(model, mars, steps)
    change(model)
    with pytest.raises(RuntimeError, match="this optimizer lacks"):
        train(model, mars, 8)


def test_parts_without_gradients_may_be_there():
    """An average of the weights or a teacher, which nobody trains, as long as it gets no gradients."""
    model = small()
    mars = mars_hf.create(model, lr=1e-2)
    average = copy.deepcopy(model)
    model.add_module("average", average)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    assert logged(lambda: train(model, mars, 20)) == []
    average.forward = None
    model.forward = lambda x: model[2](model[1](average[0](x)))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"lacks, average\.0\.weight among them"):
        train(model, mars, 8)


def test_layers_unfrozen_before_they_are_used():
    model = small()
    model[0].requires_grad_(False)
    mars = mars_hf.create(model, lr=1e-2)
    first = model[0]
    model.forward = lambda x: model[2](model[1](first(x).detach()))  # type: ignore[method-assign]
    first.requires_grad_(True)
    assert logged(lambda: train(model, mars, 20)) == []
    del model.forward
    assert len(logged(lambda: train(model, mars, 20), "2 parameters of the model have gradients")) == 1


def test_an_untied_head():
    model = gpt2()
    mars = mars_hf.create(model, lr=1e-3)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    with pytest.raises(RuntimeError, match=r"1 trainable parameters .* lm_head\.weight among them"):
        mars.step()


def test_groups_added_for_new_parameters():
    model = small()
    mars = mars_hf.create(model, lr=1e-2)
    train(model, mars)
    add_block(model)
    mars.add_param_group({"params": list(model[3].parameters())})
    before = model[3].weight.detach().clone()
    assert logged(lambda: train(model, mars, 2)) == []
    assert not torch.equal(model[3].weight, before)


def test_layers_unfrozen_without_a_group_are_said_once():
    model = small()
    model[0].requires_grad_(False)
    mars = mars_hf.create(model, lr=1e-2)
    assert logged(lambda: train(model, mars, 2)) == []
    model[0].requires_grad_(True)
    (said,) = logged(lambda: train(model, mars, 3))
    assert "2 parameters of the model have gradients and are not in this optimizer, 0.weight among them" in said


def test_what_trains_as_it_was_meant_to_says_nothing():
    """Layers that are frozen for a while or taken away, and a model that is gone."""
    models = [small()]
    mars = mars_hf.create(models[0], lr=1e-2)
    models[0][0].requires_grad_(False)
    assert logged(lambda: train(models[0], mars, 2)) == []
    models[0][0].requires_grad_(True)
    del models[0][1]
    assert logged(lambda: train(models[0], mars, 2)) == []
    params = list(models.pop().parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    assert logged(mars.step) == []


def test_a_model_moved_to_another_dtype_trains():
    model = small()
    mars = mars_hf.create(model, lr=1e-2)
    model.double()
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    before = model[0].weight.detach().clone()
    mars.step()
    assert not torch.equal(model[0].weight, before)
