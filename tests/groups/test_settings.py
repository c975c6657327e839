"""Signatures, groups, strings and the recipe follow the one table of settings."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import mars_hf
from mars_hf import Mars
from mars_hf.groups.settings import (
    DEFAULTS,
    GROUP_KEYS,
    KEYS_1D,
    MODEL_DEFAULTS,
    SETTINGS,
    STRUCTURAL_KEYS,
    check,
    plain,
    read,
)

# Another accepted value of each setting, as a string of `optim_args`; None if a string cannot hold it.
OTHERS = {
    **{"lr": "0.5", "betas": None, "eps": "1e-6", "weight_decay": "0.25", "gamma": "0.5", "mars_type": "mars-lion"},
    **{"is_approx": "false", "clip_threshold": "none", "amsgrad": "true", "optimize_1d": "true", "lr_1d": "0.125"},
    **{"betas_1d": None, "weight_decay_1d": "0.25", "second_moment": "gradient", "ns_steps": "3"},
    **{"ns_coefficients": "polar-express", "ns_dtype": "float32", "max_grad_norm": "0.5"},
    **{"state_dtype": "bfloat16", "rounding": "kahan"},
    **{"maximize": "true", "fused": "false"},
    **{"split_fused": "none", "lr_embeddings": "0.5"},
    "param_rules": '[["a.*", {"lr": 0.5}], ["*.b", {"role": "vector"}]]',
}


def arguments_of(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    assert found.pop("process_group") is None  # of the process, not of a group
    assert found.pop("like", None) is None  # where settings come from
    return found


def test_signatures_have_the_defaults_of_the_table():
    assert arguments_of(Mars) == dict(DEFAULTS)
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in arguments_of(mars_hf.create).items()} == dict(
        MODEL_DEFAULTS
    )
    assert list(SETTINGS) == [*DEFAULTS, *MODEL_DEFAULTS]


def test_a_group_holds_the_settings_of_groups():
    group = Mars([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    assert set(GROUP_KEYS) <= group.keys()
    assert not set(KEYS_1D) & group.keys()
    assert not set(MODEL_DEFAULTS) & group.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_defaults_are_accepted_and_other_kinds_are_not(name):
    check({name: SETTINGS[name].default})
    if name in DEFAULTS:
        with pytest.raises(ValueError, match=f"^{name}="):
            check({name: object()})


@pytest.mark.parametrize("name", SETTINGS)
def test_strings_are_read(name):
    text = OTHERS[name]
    if text is None:
        assert SETTINGS[name].kind.type is None
        return
    value = read(name, text)
    check({name: value})
    assert value != SETTINGS[name].default


@pytest.mark.parametrize("name", sorted(set(GROUP_KEYS) - {"betas", "layout"}))
def test_a_change_sorts_the_buckets_again_unless_the_setting_is_live(name):
    """A change of any setting that is not live sorts the buckets again; other tests cover live settings."""
    param = nn.Parameter(torch.ones(3, 3))
    optimizer = Mars([param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    kept = optimizer._order
    assert kept is not None
    optimizer.param_groups[0][name] = read(name, OTHERS[name])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (optimizer._order is kept) == SETTINGS[name].is_live
    assert (name in STRUCTURAL_KEYS) != SETTINGS[name].is_live


def test_plain_makes_python_numbers():
    numpy = pytest.importorskip("numpy")
    given = {"lr": numpy.float64(0.5), "betas": [numpy.float32(0.5), 0.5], "fused": None}
    found = plain(copy.deepcopy(given))
    assert [type(found["lr"]), type(found["betas"]), type(found["betas"][0])] == [float, tuple, float]
