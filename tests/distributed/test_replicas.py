"""Modules that replicate parameters over ranks. A process group of one stands for all and claims two ranks."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mars_hf.distributed import replicas


def wrap(size: int = 8, **settings) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(size // 2)))
    return nn.parallel.DistributedDataParallel(model, **settings)


@pytest.fixture
def two_ranks(alone, monkeypatch):
    """Simulate another rank."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])


def ids(module: nn.Module) -> set[int]:
    return set(map(id, module.parameters()))


def repeated(*modules: nn.Module) -> set[int]:
    return set(replicas.Replicas().repeated(set().union(*map(ids, modules))))


def backward(module: nn.Module) -> None:
    module(torch.ones(2, 3)).sum().backward()


def test_one_rank_repeats_nothing(alone):
    wrapped = wrap()
    assert repeated(wrapped) == set()


def test_modules_are_found_whenever_they_are_made(two_ranks):
    before = wrap()
    assert repeated(before) == ids(before)
    after = wrap()
    assert repeated(before, after) == ids(before) | ids(after)
    forgotten = ids(after)
    del after
    gc.collect()
    assert replicas.Replicas().repeated(forgotten | ids(before)).keys() == ids(before)


def test_wrappers_are_searched_for_at_most_once(two_ranks, monkeypatch):
    """Not at all where those that made themselves known have every parameter."""
    searched = []
    monkeypatch.setattr(replicas, "all_objects", lambda: searched.append(1) or gc.get_objects())
    monkeypatch.setattr(replicas, "_has_searched", False)
    replicas.Replicas().begin()
    wrapped, plain = wrap(), nn.Linear(3, 3)
    assert repeated(wrapped) == ids(wrapped) and not searched
    for _ in range(2):
        assert repeated(wrapped, plain) == ids(wrapped)
    assert searched == [1]


def test_a_wrapper_from_before_is_found_by_the_search(two_ranks, monkeypatch):
    wrapped = wrap()
    monkeypatch.setattr(replicas, "_wrappers", weakref.WeakSet())  # as if it had been made before mars_hf watched
    monkeypatch.setattr(replicas, "_has_searched", False)
    assert repeated(wrapped) == ids(wrapped)


def test_a_promised_process_group_counts_in_every_step(two_ranks):
    group, model = dist.group.WORLD, nn.Linear(3, 3)
    found = replicas.Replicas(group)
    for _ in range(2):
        assert found.averaged(ids(model)) == found.repeated(ids(model)) == dict.fromkeys(ids(model), group)


def test_a_promised_process_group_of_one_rank_shares_nothing(alone):
    model = nn.Linear(3, 3)
    assert replicas.Replicas(dist.group.WORLD).averaged(ids(model)) == {}


def test_only_a_pass_that_averages_counts_and_once(two_ranks):
    wrapped, other = wrap(), wrap()
    wanted = ids(wrapped) | ids(other)
    found = replicas.Replicas()
    assert found.averaged(wanted) == {}
    backward(wrapped)
    assert found.averaged(wanted).keys() == ids(wrapped)
    assert found.averaged(wanted) == {}
    backward(wrapped.module)
    assert found.averaged(wanted) == {}
    with wrapped.no_sync():
        backward(wrapped)
    assert found.averaged(wanted) == {}
    backward(wrapped)
    backward(other)
    second = replicas.Replicas()
    assert found.averaged(wanted).keys() == second.averaged(wanted).keys() == wanted
    assert set(map(id, found._times)) >= {id(wrapped), id(other)}


def test_a_module_in_join_or_of_few_parameters_does_not_count(two_ranks):
    wrapped, small = wrap(), wrap(6)
    found = replicas.Replicas()
    found.averaged(ids(wrapped) | ids(small))
    backward(small)
    assert found.averaged(ids(wrapped) | ids(small)) == {}
    backward(wrapped)
    wrapped._join_config = SimpleNamespace(enable=True)
    assert found.averaged(ids(wrapped) | ids(small)) == {}
    assert repeated(wrapped) == set()


def test_parameters_that_were_frozen_when_they_were_wrapped_do_not_count(two_ranks):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    model[0].requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    frozen = ids(model[0])
    assert repeated(wrapped) == ids(wrapped) - frozen
    model[0].requires_grad_(True)  # their gradients are not averaged
    assert repeated(wrapped) == set()


def test_a_static_graph_is_unclear_until_its_second_pass(two_ranks):
    wrapped = wrap(static_graph=True)
    found = replicas.Replicas()
    backward(wrapped)
    assert found.averaged(ids(wrapped)) == {} and found.unclear >= ids(wrapped)
    backward(wrapped)
    assert found.averaged(ids(wrapped)).keys() == ids(wrapped) and found.unclear.isdisjoint(ids(wrapped))


def test_a_process_group_that_is_gone_repeats_nothing(alone, monkeypatch):
    wrapped = wrap()

    def gone(group):
        raise KeyError(group)

    monkeypatch.setattr(dist, "get_process_group_ranks", gone)
    assert ids(wrapped) and repeated(wrapped) == set()


def test_nothing_counts_as_averaged_where_torch_does_not_tell(two_ranks):
    wrapped = wrap()
    backward(wrapped)
    wrapped.reducer = SimpleNamespace()
    assert replicas.Replicas().averaged(ids(wrapped)) == {}
    assert repeated(wrapped) == set()


def test_a_destroyed_process_group_is_gone(alone):
    group = dist.new_group([0])
    assert replicas.exists(group) and replicas.exists(None)
    dist.destroy_process_group(group)
    assert not replicas.exists(group)


def test_no_module_is_kept_alive(two_ranks):
    wrapped = wrap()
    found = replicas.Replicas()
    backward(wrapped)
    wanted = ids(wrapped)
    found.averaged(wanted)
    reference = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert reference() is None
    assert found.averaged(wanted) == {}
