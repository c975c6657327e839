"""The formulas on lists match float64 written out, both paths agree, and inputs do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mars_hf import rules

SHAPES = ((3, 4), (1,), (0, 2), (17, 5))
K = 0.475


def tensors(seed: int, positive: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [(t.abs() if positive else t).to(dtype) for t in made]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums(dtype, scales, foreach):
    g, last = tensors(1, dtype=dtype), tensors(2)
    copies = [t.clone() for t in (*g, *last)]
    scale = torch.tensor(-0.3) if scales else None
    last_scales = torch.tensor([0.5, 2.0, 1.0, 3.0]) if scales else None
    found = rules.sums(g, last, scale=scale, last_scales=last_scales, k=K, foreach=foreach)
    assert found.shape == (4, len(SHAPES))
    assert found.dtype == torch.float64
    for column, a, b, own in zip(found.T, g, last, last_scales if scales else [1.0] * 4, strict=True):
        a, b = a.double() * (scale.double() if scales else 1.0), b.double() * own
        c = a + K * (a - b)
        expected = torch.stack([(a * a).sum(), (a * b).sum(), (b * b).sum(), (c * c).sum()])
        torch.testing.assert_close(column.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip((*g, *last), copies, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_sums_without_a_last_gradient(foreach):
    g = tensors(1)
    found = rules.sums(g, [], foreach=foreach)
    expected = torch.stack([t.double().square().sum() for t in g])
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[3], found[0])
    assert not found[1:3].any()


@pytest.mark.parametrize("foreach", [False, True])
def test_squares_beyond_float32(foreach):
    g, last = torch.tensor([1e19, 3e20, 0.0]), torch.tensor([2e19, 1e20, 1e30])
    found = rules.sums([g], [last], k=0.4, foreach=foreach)[:, 0]
    g, last = g.double(), last.double()
    c = g + 0.4 * (g - last)
    expected = torch.stack([(g * g).sum(), (g * last).sum(), (last * last).sum(), (c * c).sum()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [False, True])
def test_lion_shows_a_nan_in_the_parameter(foreach):
    params, gradients = [torch.ones(4)], [torch.tensor([1.0, torch.nan, 0.0, torch.inf])]
    settings = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.0}
    rules.update(params, gradients, [torch.zeros(4)], [], [], [], rule="lion", steps=[1.0], **settings, foreach=foreach)
    torch.testing.assert_close(params[0], torch.tensor([0.5, torch.nan, 1.0, 0.5]), equal_nan=True)


def test_a_gradient_may_be_the_parameter_itself():
    settings = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "k": K}
    results = []
    for aliased in (False, True):
        x = torch.tensor([1.0, -2.0])
        states = [torch.zeros(2) for _ in range(3)]
        g = x if aliased else x.clone()
        rules.update([x], [g], [states[0]], [states[1]], [], [states[2]], rule="adamw", steps=[1.0], **settings)
        results.append([x, *states])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(768, 3072), (768 * 3072,)])
def test_sums_of_many_elements_are_accurate(shape):
    g, last = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = rules.sums([g], [last], k=K)[:, 0].double()
    g, last = g.double(), last.double()
    c = g + K * (g - last)
    expected = torch.stack([(g * g).sum(), (g * last).sum(), (last * last).sum(), (c * c).sum()])
    assert ((found - expected).abs() <= 1e-6 * (g * g).sum()).all()


@pytest.mark.parametrize("foreach", [False, True])
def test_only_the_sums_that_are_asked_for(foreach):
    g, last = tensors(1), tensors(2)
    whole = rules.sums(g, last, k=K, foreach=foreach)
    products = rules.sums(g, last, k=K, corrected=False, foreach=foreach)
    corrected = rules.sums(g, last, k=K, products=False, foreach=foreach)
    assert torch.equal(products[:3], whole[:3])
    assert torch.equal(corrected[3], whole[3])


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "amsgrad": {"amsgrad": True},
    "gradient": {"second_moment": "gradient"},
    "lion": {"rule": "lion"},
    "momentum": {"rule": "momentum"},
    "momentum nesterov": {"rule": "momentum", "nesterov": 0.3, "last": False},
    "nesterov": {"nesterov": 0.3, "last": False},
    "lion nesterov": {"rule": "lion", "nesterov": 0.3, "last": False},
    "plain": {"last": False},
    "scaled": {"scale": torch.tensor(0.4), "last_scales": torch.tensor([0.5, 2.0, 1.0, 3.0])},
    "clipped": {"factors": torch.tensor([0.5, 1.0, 1.0, 0.01])},
    "not kept": {"keep_last": False},
}


def run(foreach: bool, dtype: torch.dtype, case: dict[str, Any]) -> list[list[Tensor]]:
    settings = {
        "rule": "adamw",
        "k": K,
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        **case,
    }
    last = tensors(6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    lists = [
        tensors(1, dtype=dtype),
        tensors(2, dtype=dtype),
        tensors(3, dtype=last[0].dtype),
        tensors(4, True, dtype=last[0].dtype) if settings["rule"] == "adamw" else [],
        tensors(5, True, dtype=last[0].dtype) if settings.pop("amsgrad", False) else [],
        last if settings.pop("last", True) else [],
    ]
    rules.update(*lists, steps=[1.0, 2.0, 3.0, 4.0], foreach=foreach, **settings)
    return lists


@pytest.mark.parametrize("case", CASES)
def test_both_paths_agree_to_the_bit(case):
    for one, other in zip(run(False, torch.float32, CASES[case]), run(True, torch.float32, CASES[case]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_update_is_the_formula(case, dtype, foreach):
    found = run(foreach, dtype, CASES[case])
    settings = CASES[case]
    started = (
        tensors(1, dtype=dtype),
        tensors(2, dtype=dtype),
        tensors(3),
        tensors(4, True),
        tensors(5, True),
        tensors(6),
    )
    for index, (x, g, e, v, peak, last) in enumerate(zip(*started, strict=True)):
        x, g, e, v, peak, last = (t.double() for t in (x, g, e, v, peak, last))
        g = g * settings.get("scale", torch.tensor(1.0)).double()
        c = g
        if settings.get("last", True):
            own = settings["last_scales"][index].double() if "last_scales" in settings else 1.0
            c = g + K * (g - own * last)
            kept = last if settings.get("keep_last") is False else g
            torch.testing.assert_close(found[5][index].double(), kept, rtol=1e-6, atol=1e-7)
        c = c * settings["factors"][index].double() if "factors" in settings else c
        e = 0.9 * e + 0.1 * c
        m = e + settings.get("nesterov", 0.0) * (c - e)
        if settings.get("rule") in ("lion", "momentum"):
            direction = m.sign()
        else:
            s = g if settings.get("second_moment") == "gradient" else c
            v = 0.95 * v + 0.05 * s * s
            peak = torch.maximum(peak, v)
            t = index + 1
            root = (peak if settings.get("amsgrad") else v).sqrt() / (1 - 0.95**t) ** 0.5
            direction = m / (1 - 0.9**t) / (root + 1e-8)
            torch.testing.assert_close(found[3][index].double(), v, rtol=1e-5, atol=1e-6)
        expected = m if settings.get("rule") == "momentum" else x * (1 - 0.1 * 0.1) - 0.1 * direction
        torch.testing.assert_close(found[2][index].double(), e, rtol=1e-5, atol=1e-6)
        bar = {"rtol": 8e-3, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found[0][index].double(), expected, **bar)
    assert all(torch.equal(a, b) for a, b in zip(found[1], tensors(2, dtype=dtype), strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_apply(dtype, foreach):
    x, directions = tensors(1, dtype=dtype), tensors(2)
    copies = [t.clone() for t in directions]
    rules.apply(x, directions, lr=0.1, weight_decay=0.3, foreach=foreach)
    for found, before, direction in zip(x, tensors(1, dtype=dtype), copies, strict=True):
        expected = before.double() * (1 - 0.1 * 0.3) - 0.1 * direction.double()
        bar = {"rtol": 4e-3, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-7}  # rounded once
        torch.testing.assert_close(found.double(), expected, **bar)
    assert all(torch.equal(a, b) for a, b in zip(directions, copies, strict=True))


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule='sgd' is unknown; accepted: adamw, lion, momentum"):
        run(False, torch.float32, {"rule": "sgd"})
