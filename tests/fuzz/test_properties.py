"""Properties of a step that hold for any settings, shapes, dtypes and memory layouts, searched with hypothesis.

Examples are derived from the tests' names, so every run tries the same ones; `-m soak` tries many more.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from helpers import needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mars_hf import Mars

BACKENDS = {"for-loop": {"fused": False}, "fused": {"fused": True}}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}

every_backend = pytest.mark.parametrize("backend", ["for-loop", pytest.param("fused", marks=needs_compiler)])


def searched(examples: int) -> Any:
    """Return hypothesis's settings for so many examples."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


QUICK, MANY = searched(30), searched(1500)


# --- examples --------------------------------------------------------------------------------------------------------


@st.composite
def rules(draw: Any) -> dict[str, Any]:
    """Return settings that every backend takes."""
    mars_type = draw(st.sampled_from(("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")))
    chosen = {
        "mars_type": mars_type,
        "lr": 0.02,
        "gamma": draw(st.sampled_from((0.0, 0.025, 0.3))),
        "betas": draw(st.sampled_from(((0.95, 0.99), (0.5, 0.9)))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "clip_threshold": draw(st.sampled_from((None, 0.5, 100.0))),
    }
    if mars_type in ("mars-shampoo", "mars-m"):
        chosen["ns_dtype"] = "float64"
    elif mars_type == "mars-adamw":
        chosen["amsgrad"] = draw(st.booleans())
    return chosen


@st.composite
def problems(draw: Any, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor]:
    """Return values of parameters of one dtype, some of them strided."""
    dtype = draw(st.sampled_from(dtypes))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        value = torch.randn(shape, generator=seed, dtype=torch.float64).to(dtype)
        values.append(laid_out(value, draw(st.sampled_from(("plain", "transposed", "spaced")))))
    return values


def laid_out(value: Tensor, layout: str) -> Tensor:
    """Return an equal tensor in another memory layout."""
    if layout == "transposed" and value.ndim > 1:
        return value.mT.contiguous().mT
    if layout == "spaced" and value.ndim:
        wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
        wide[..., ::2] = value
        return wide[..., ::2]
    return value


def parameters(values: list[Tensor]) -> list[nn.Parameter]:
    """Return parameters with memory of their own and the strides of the values."""
    return [nn.Parameter(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v)) for v in values]


def train(params: list[nn.Parameter], optimizer: Mars, steps: range) -> None:
    """Take steps with gradients that depend on the parameter's place in the list and the step alone."""
    for step in steps:
        for place, param in enumerate(params):
            seed = torch.Generator().manual_seed(1000 * step + place)
            grad = torch.randn(param.shape, generator=seed, dtype=torch.float64).to(param.dtype)
            param.grad = None if (step + place) % 5 == 4 else grad  # some steps go without
        optimizer.step()


def assert_close(one: list[nn.Parameter], other: list[nn.Parameter], units: float) -> None:
    """Compare within so many units in the last place of the dtype, relative to the tensor's largest element."""
    for a, b in zip(one, other, strict=True):
        if a.numel():
            bar = units * EPS[a.dtype] * max(float(a.detach().abs().max()), 0.05)
            assert float((a.detach().double() - b.detach().double()).abs().max()) <= bar


# --- properties ------------------------------------------------------------------------------------------------------


def order_and_grouping(backend: str, values: list[Tensor], rule: dict[str, Any], order: list[int], cut: int) -> None:
    plain, mixed = parameters(values), parameters(values)
    one = Mars(plain, **rule, **BACKENDS[backend])
    shuffled = [mixed[place] for place in order]
    groups = [{"params": part} for part in (shuffled[:cut], shuffled[cut:]) if part]
    other = Mars(groups, **rule, **BACKENDS[backend])
    train(plain, one, range(4))
    train(mixed, other, range(4))
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a, b)
        for name, state in one.state.get(a, {}).items():
            assert not torch.is_tensor(state) or torch.equal(state, other.state[b][name]), name


def saving(backend: str, values: list[Tensor], rule: dict[str, Any], at: int) -> None:
    whole, halves = parameters(values), parameters(values)
    train(whole, Mars(whole, **rule, **BACKENDS[backend]), range(6))
    first = Mars(halves, **rule, **BACKENDS[backend])
    train(halves, first, range(at))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second = Mars(halves, **rule, **BACKENDS[backend])
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(halves, second, range(at, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def backends_agree(values: list[Tensor], rule: dict[str, Any], backend: str) -> None:
    one, other = parameters(values), parameters(values)
    train(one, Mars(one, **rule, **BACKENDS["for-loop"]), range(1))
    train(other, Mars(other, **rule, **BACKENDS[backend]), range(1))
    # One step: afterwards lion's signs and Newton-Schulz may magnify a difference in the last place without limit.
    assert_close(one, other, 64)


def clipping(backend: str, values: list[Tensor], rule: dict[str, Any], limit: float, scale: float) -> None:
    """After the first step, from zero: first moment (1 - beta1) c, last gradient g."""
    rule = {**rule, "mars_type": "mars-adamw", "amsgrad": False, "weight_decay": 0.0}
    rule.pop("ns_dtype", None)
    params = parameters(values)
    optimizer = Mars(params, **rule, max_grad_norm=limit, betas_1d=rule["betas"], optimize_1d=True, **BACKENDS[backend])
    grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * scale for i, p in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    before = [param.grad.double() for param in params]
    total = torch.stack([grad.norm() for grad in before]).norm()
    optimizer.step()
    beta1 = rule["betas"][0]
    k = rule["gamma"] * beta1 / (1 - beta1)
    largest = min(float(total), limit)
    for param, grad in zip(params, before, strict=True):
        slack = 1 + 8 * EPS[param.dtype]
        tiny = 1e-6 * (1 + scale)
        taken = optimizer.state[param]["last_grad"].double() * optimizer.state[param].get("last_grad_scale", 1.0)
        assert float(taken.norm()) <= min(float(grad.norm()), largest) * slack + tiny
        corrected = optimizer.state[param]["exp_avg"].double() / (1 - beta1)
        threshold = rule["clip_threshold"]
        limit_c = (1 + k) * min(float(grad.norm()), largest)
        assert float(corrected.norm()) <= min(limit_c, threshold or limit_c) * slack + tiny


permutations = st.permutations(range(6))


@pytest.mark.slow
@every_backend
@QUICK
@given(values=problems(), rule=rules(), order=permutations, cut=st.integers(0, 6))
def test_order_and_grouping_of_parameters_change_no_bit(backend, values, rule, order, cut):
    order_and_grouping(backend, values, rule, [place for place in order if place < len(values)], cut)


@pytest.mark.slow
@every_backend
@QUICK
@given(values=problems(), rule=rules(), at=st.integers(0, 6))
def test_saving_and_loading_at_any_step_changes_no_bit(backend, values, rule, at):
    saving(backend, values, rule, at)


@pytest.mark.parametrize("backend", [pytest.param("fused", marks=needs_compiler)])
@QUICK
@given(values=problems(), rule=rules())
def test_backends_agree(backend, values, rule):
    backends_agree(values, rule, backend)


@every_backend
@QUICK
@given(
    values=problems((torch.float64, torch.float32)),
    rule=rules(),
    limit=st.sampled_from((1e-3, 0.7, 1e3)),
    scale=st.sampled_from((1e-4, 1.0, 1e4)),
)
def test_a_clip_never_increases_a_norm(backend, values, rule, limit, scale):
    clipping(backend, values, rule, limit, scale)


@pytest.mark.soak
@every_backend
@MANY
@given(values=problems(), rule=rules(), order=permutations, cut=st.integers(0, 6), at=st.integers(0, 6))
def test_many_more(backend, values, rule, order, cut, at):
    order_and_grouping(backend, values, rule, [place for place in order if place < len(values)], cut)
    saving(backend, values, rule, at)
    backends_agree(values, rule, backend)
