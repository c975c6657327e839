"""What the matrices keep from one step to the next; tests/distributed has several ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mars_hf
from mars_hf.step.orthogonalized import MAX_EXCHANGES


def held_by(keeper: Any) -> list[Tensor]:
    """Return tensors reachable from an object through containers and objects of mars_hf."""
    found, seen, left = [], set(), [keeper]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if issubclass(type(item), Tensor):
            found.append(item)
        elif type(item).__module__.startswith("mars_hf") or isinstance(item, (dict, list, tuple, set, frozenset)):
            left += gc.get_referents(item)
    return found


def test_the_search_finds_what_is_held():
    class Keeper:
        __module__ = "mars_hf.test"

    keeper = Keeper()
    keeper.kept = {"a": [(torch.ones(1),)]}
    assert len(held_by(keeper)) == 1


def params_of(kind: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    wholes = [torch.randn(6, 4), torch.randn(3, 5), torch.randn(7)]
    if kind == "plain":
        return list(map(nn.Parameter, wholes))
    mesh, placement = init_device_mesh("cpu", (1,)), Shard(0) if kind == "sharded" else Replicate()
    return [nn.Parameter(distribute_tensor(whole, mesh, [placement])) for whole in wholes]


@pytest.mark.parametrize("mars_type", ["mars-m", "mars-adamw"])
@pytest.mark.parametrize("kind", ["plain", "sharded", "replicated"])
def test_no_tensor_is_held_between_steps(alone, kind, mars_type):
    params = params_of(kind)
    mars = mars_hf.Mars(params, mars_type=mars_type, optimize_1d=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        mars.step()
        assert held_by(mars._matrices) == [] and held_by(mars._locator) == []


@pytest.mark.parametrize("mars_type", ["mars-m", "mars-shampoo"])
def test_a_step_that_fails_holds_nothing(alone, mars_type, monkeypatch):
    params = params_of("plain")
    mars = mars_hf.Mars(params, mars_type=mars_type)
    for param in params:
        param.grad = torch.ones_like(param)
    with monkeypatch.context() as broken:
        broken.setattr("mars_hf.step.orthogonalized.directions", lambda *args, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mars.step()
    gc.collect()
    assert held_by(mars._matrices) == []


def test_exchanges_are_bounded(alone, monkeypatch):
    """Every set of gradients has its own exchange; simulates two ranks, the other one empty."""
    from mars_hf.step import orthogonalized as matrices

    made = []
    monkeypatch.setattr(matrices, "_is_alone", lambda param, placement: False)
    exchange = matrices.Matrices._exchange
    monkeypatch.setattr(matrices.Matrices, "_exchange", lambda self, *args: made.append(1) or exchange(self, *args))
    mesh = init_device_mesh("cpu", (1,))
    params = [nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])) for _ in range(6)]
    mars = mars_hf.Mars(params, mars_type="mars-m")

    def step(pattern: int) -> None:
        for index, param in enumerate(params):
            param.grad = torch.ones_like(param) if pattern >> index & 1 else None
        mars.step()

    for pattern in range(1, 40):
        step(pattern)
    assert len(made) == 39
    assert len(mars._matrices._exchanges) == MAX_EXCHANGES
    step(39)
    assert len(made) == 39
    step(1)
    assert len(made) == 40
