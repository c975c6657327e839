"""Norms of last gradients that are known from the step before: they save a pass, and never a clipping."""

from __future__ import annotations

import pytest
import torch
from helpers import Listener, needs_compiler
from torch import nn

from mars_hf import Mars, clipping
from mars_hf.kernels import compiled

pytestmark = needs_compiler

SHAPES = ((64, 128), (5, 7), (4096, 3))
# Sizes of the gradients, step by step: unclipped at first, then clipped, then for a while only the last one was large.
SIZES = (0.1, 0.12, 5.0, 4.0, 0.2, 0.1, 0.1, 0.7, 0.1)
SETTINGS = {
    "adamw": {},
    "lion": {"mars_type": "mars-lion"},
    "shampoo": {"mars_type": "mars-shampoo", "ns_dtype": "float64"},
    "mars-m, folded, take_grad": {
        "mars_type": "mars-m",
        "ns_dtype": "float64",
        "max_grad_norm": 2.0,
        "take_grad": True,
    },
    "strong correction": {"gamma": 0.2},
    "bfloat16 last_grad": {"last_grad_dtype": "bfloat16"},
    "maximize": {"maximize": True},
    "take_grad": {"take_grad": True},
    "folded": {"max_grad_norm": 2.0},
    "folded, take_grad": {"max_grad_norm": 2.0, "take_grad": True},
    "folded, maximize": {"max_grad_norm": 2.0, "maximize": True},
}


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = gradient * (SIZES[step] / gradient.norm())


def pair(**settings) -> tuple[Mars, Mars, list, list]:
    """One that uses known norms and one that never does."""
    fast, plain = make_params(), make_params()
    settings = {"lr": 0.01, "weight_decay": 0.1, **settings}
    return Mars(fast, fused=True, **settings), Mars(plain, foreach=False, **settings), fast, plain


def step_both(one: Mars, two: Mars, fast: list, plain: list, step: int) -> None:
    for params, optimizer in ((fast, one), (plain, two)):
        set_gradients(params, step)
        optimizer.step()
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.fixture
def measured(monkeypatch):
    """Of how many tensors a kernel has summed last gradients, call by call."""
    listener = Listener(compiled._library())
    monkeypatch.setattr(compiled, "_library", lambda: listener)
    original = compiled.sums

    def listen(gradients, last_grads, **settings):
        if settings.get("measured") is None:  # else it calls itself with what is measured
            listener.measured.append(len(last_grads))
        return original(gradients, last_grads, **settings)

    monkeypatch.setattr(compiled, "sums", listen)
    return listener.measured


def test_certain_is_never_wrong():
    generator = torch.Generator().manual_seed(0)
    certain = 0
    for _ in range(2000):
        g, last = torch.randn(2, 3, generator=generator, dtype=torch.float64) * torch.rand(2, 1, generator=generator)
        k = torch.rand((), generator=generator).item()
        if clipping.is_certain(g.norm(), last.norm(), k, 1.0):
            certain += 1
            assert (g + k * (g - last)).norm() <= 1
    assert 100 < certain < 1900
    norms = torch.tensor([[0.1, float("nan"), 0.1], [float("nan"), 0.1, 0.1]])
    assert clipping.is_certain(*norms, 0.5, 1.0).tolist() == [False, False, True]


@pytest.mark.parametrize("case", SETTINGS)
def test_every_step_is_the_plain_one(case, measured):
    both = pair(**SETTINGS[case])
    counts = []
    for step in range(len(SIZES)):
        measured.clear()
        step_both(*both, step)
        counts.append(sum(measured))
    assert min(counts) == 0
    assert max(counts) == len(SHAPES)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_a_step_that_needs_no_clipping_sums_no_last_gradient(measured, mars_type):
    params = make_params()
    optimizer = Mars(params, fused=True, lr=0.01, mars_type=mars_type)
    for _ in range(3):
        set_gradients(params, 0)
        optimizer.step()
    assert measured
    assert sum(measured) == 0


@pytest.mark.parametrize("folded", [False, True])
def test_a_last_gradient_that_was_changed_is_measured_again(folded, measured):
    one, two, fast, plain = both = pair(max_grad_norm=2.0 if folded else None)
    for step in range(2):
        step_both(*both, step)
    measured.clear()
    for params, optimizer in ((fast, one), (plain, two)):
        for param in params:
            optimizer.state[param]["last_grad"].mul_(1000)
    step_both(*both, 5)
    assert sum(measured) == len(SHAPES)


def test_a_loaded_last_gradient_is_measured_again(measured):
    one, two, _, _ = both = pair()
    for step in range(2):
        step_both(*both, step)
    for optimizer in (one, two):
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state["last_grad"] = state["last_grad"] * 1000
        optimizer.load_state_dict(saved)
    measured.clear()
    step_both(*both, 5)
    assert sum(measured) == len(SHAPES)
    measured.clear()
    step_both(*both, 6)
    assert sum(measured) == 0


@pytest.mark.parametrize("max_grad_norm", [None, 2.0])
def test_steps_that_are_measured_keep_the_norms(max_grad_norm, measured):
    one, two, _, _ = both = pair(max_grad_norm=max_grad_norm)
    step_both(*both, 0)
    for optimizer in (one, two):
        optimizer.collect_metrics(True)
    step_both(*both, 1)
    for optimizer in (one, two):
        optimizer.collect_metrics(False)
    measured.clear()
    step_both(*both, 5)
    assert sum(measured) == 0
