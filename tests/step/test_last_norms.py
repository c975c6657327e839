"""Compiled kernels remember norms of last gradients; steps equal those that take every norm anew, to the bit."""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import equal, fused_and_plain, needs_compiler
from torch import nn

from mars_hf import Mars
from mars_hf.arithmetic.eight_bits import Coded
from mars_hf.kernels import Backend
from mars_hf.step.last_norms import LastNorms

SHAPES = ((30, 20), (8, 5), (16, 9))
SIZES = (0.001, 0.01, 3.0)  # of gradients: only the last is clipped


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(10 * step + index)
        # Small in step 2: then c is long because of the last gradient.
        param.grad = SIZES[index] * (0.001 if step == 2 else 1) * torch.randn(param.shape, generator=generator)


def make(**settings: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    return params, Mars(params, lr=0.01, **settings)


FORMS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 100.0},
    {"max_grad_norm": 5.0},
    {"maximize": True},
    *({"mars_type": rule, "max_grad_norm": 100.0} for rule in ("mars-lion", "mars-m")),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose last number grows by the elements of last gradients that norms of c are taken from."""
    read = [0]
    run_sums, run_update = Backend.run_sums, Backend.run_update

    def watched_sums(backend: Backend, gradients: Any, last_grads: Any, **settings: Any) -> Any:
        read[-1] += sum(last.numel() for last in last_grads if last.shape in SHAPES)  # not of the kernels' first check
        return run_sums(backend, gradients, last_grads, **settings)

    def watched_update(backend: Backend, params: Any, grads: Any, buffers: Any, options: Any) -> Any:
        squares = run_update(backend, params, grads, buffers, options)
        for position, bound in enumerate(options.clip_bounds):
            read[-1] += 0 if squares[position] <= bound else params[position].numel()  # by the kernels themselves
        return squares

    monkeypatch.setattr(Backend, "run_sums", watched_sums)
    monkeypatch.setattr(Backend, "run_update", watched_update)
    return read


@fused_and_plain
@every_form
def test_last_gradients_are_read_where_they_may_clip(form, fused, monkeypatch):
    read = count_reads(monkeypatch)
    read.clear()
    runs = []
    for remembers in (True, False):
        params, mars = make(fused=fused, **form)
        for step in range(4):
            read.append(0)
            mars._last_norms = mars._last_norms if remembers else None
            set_gradients(params, step)
            mars.step()
        runs.append(([param.detach() for param in params], mars.state_dict()))
    assert equal(*runs)
    assert read == [784, *[16 * 9 if fused else 784] * 3, *[784] * 4]


def interrupt(mars: Any, param: nn.Parameter) -> None:
    """Interrupt a step behind its updates, which have left another last gradient."""
    param.grad = torch.ones_like(param)
    with (
        mock.patch("mars_hf.optimizer.norms_taken", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        mars.step()
    param.grad = torch.zeros_like(param)


CHANGES = {
    "interrupted": interrupt,
    "in place": lambda mars, param: mars.state[param]["last_grad"].mul_(1000),
    "another tensor": lambda mars, param: mars.state[param].update(last_grad=mars.state[param]["last_grad"] * 1000),
    "other memory": lambda mars, param: mars.state[param]["last_grad"].set_(mars.state[param]["last_grad"] * 1000),
    "other data": lambda mars, param: setattr(  # which has no version of its own, but another address
        mars.state[param]["last_grad"], "data", mars.state[param]["last_grad"] * 1000
    ),
    "loaded": lambda mars, param: (mars.state[param]["last_grad"].mul_(1000), mars.load_state_dict(mars.state_dict())),
    "no step": lambda mars, param: setattr(param, "grad", None),  # then the norm is of the step before the last
}


@needs_compiler
@every_form
@pytest.mark.parametrize("change", CHANGES)
def test_changed_last_gradients(change, form):
    """As large as to be clipped; a norm from before would say that nothing is."""
    ends = []
    for remembers in (True, False):
        params, mars = make(fused=True, **form)
        for step in range(4):
            set_gradients(params, step)
            if step == 2:
                CHANGES[change](mars, params[0])
            mars._last_norms = mars._last_norms if remembers else None
            mars.step()
        ends.append([param.detach() for param in params])
    assert equal(*ends)


@fused_and_plain
def test_last_gradients_that_their_state_has_rounded_up(fused):
    """c is longer by that than remembered norms say, and just above the threshold."""
    value = 1 + 0.6 * 2**-7  # a bfloat16 state keeps 1 + 2**-7
    k, norm = 19.0, value * (SHAPES[0][0] * SHAPES[0][1]) ** 0.5
    threshold = 1.001 * ((1 + k) * 0.01 * norm + k * norm)
    ends = []
    for remembers in (True, False):
        params, mars = make(gamma=1.0, fused=fused, state_dtype="bfloat16", clip_threshold=threshold)
        for size in (-1.0, 0.01):
            params[0].grad = torch.full_like(params[0], size * value)
            mars._last_norms = mars._last_norms if remembers else None
            mars.step()
        ends.append([params[0].detach(), mars.state[params[0]]["exp_avg"]])
    assert equal(*ends)


@needs_compiler
def test_last_norms_with_max_grad_norm(monkeypatch):
    """So scaled, c is far below the threshold, and no step but the first reads last gradients to know it."""
    params, mars = make(fused=True, max_grad_norm=0.01)
    read = count_reads(monkeypatch)
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, 500.0) / param.numel() ** 0.5
        mars.step()
        read.append(0)
    assert read == [784, 0, 0, 0]


@fused_and_plain
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("form", [{}, {"max_grad_norm": 5.0}], ids=str)
def test_inference_mode_and_largest_threshold(form, mode, fused):
    """Tensors made in inference mode have no version; the square of the largest number overflows."""
    ends = []
    for step_mode, threshold in ((contextlib.nullcontext, 1e30), (mode, sys.float_info.max)):
        params, mars = make(fused=fused, clip_threshold=threshold, **form)
        for step in range(3):
            set_gradients(params, step)
            with step_mode():
                mars.step()
        ends.append([param.detach() for param in params])
    assert equal(*ends)


def test_last_gradients_that_8_bits_have_rounded_up():
    """The bound holds for what is stored, which is up to a sixteenth longer than the gradient was."""
    tried = torch.linspace(0.5, 0.99, 500).unsqueeze(1).expand(500, 64).clone()
    tried[:, 0] = 1.0  # the scale
    growth, best = (stored(tried).decode() / tried).max(0)  # each element of a block has a threshold of its own
    last = tried[best, torch.arange(64)].where((growth > 1.03) | (growth == growth[0]), 0.0).repeat(64, 1)
    codes = stored(last)
    assert codes.decode().norm() > 1.03 * last.norm()
    for k in (0.5, 19.0):
        threshold = 1.5 * k * float(last.norm())
        norms = LastNorms()
        norms.remember([codes.codes], last.norm().square().double().view(1))
        (bound,) = norms.clip_bounds([codes.codes], threshold, k)
        longest = (1 + k) * bound**0.5 + k * float(codes.decode().norm())
        assert 0.9 * threshold < longest <= threshold


def stored(values: torch.Tensor) -> Coded:
    codes = Coded(torch.zeros(values.shape, dtype=torch.int8), torch.zeros(len(values), 1))
    codes.encode(values, 1)
    return codes
