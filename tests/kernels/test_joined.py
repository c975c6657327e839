"""Lists that are joined into one flat tensor: the bits of a call for each tensor."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from contract import BACKENDS, buffers_of, draw, problem

from mars_hf.arithmetic import formulas
from mars_hf.kernels import joined

SIZES: Any = [(5, 7), (3,), (2, 3, 5), (), (0, 4), (16, 16), (1,)]
NUMBERS: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def lists_of(**settings: Any) -> dict[str, Any]:
    lists = problem([size or (1,) for size in SIZES], "cpu", **settings)
    for tensors in lists.values():
        tensors[:] = [tensor.reshape(size) for tensor, size in zip(tensors, SIZES, strict=bool(tensors))]
        if tensors:  # one in another memory order
            tensors[0] = tensors[0].t().contiguous().t()
    return lists


def options_of(arithmetic: str, **settings: Any) -> formulas.Options:
    return formulas.Options(**{"arithmetic": arithmetic, "steps": [3.0] * len(SIZES), "k": 0.4, **NUMBERS, **settings})


def updated(backend: str, lists: dict[str, Any], options: formulas.Options) -> dict[str, Any]:
    lists = deepcopy(lists)
    BACKENDS[backend]().run_update(lists["params"], lists["gradients"], buffers_of(lists), options)
    return lists


FACTORS = torch.linspace(0.2, 1.0, len(SIZES), dtype=torch.float64)
BUFFERS = {"adamw": ("max_exp_avg_sq",), "lion": ("max_exp_avg_sq", "exp_avg_sq"), "amsgrad": ()}
BUFFERS["momentum"] = BUFFERS["lion"]


@pytest.mark.parametrize("dtypes", [{}, {"params": torch.bfloat16, "last_grad": torch.bfloat16}], ids=["32", "16"])
@pytest.mark.parametrize("scale", [None, torch.tensor(-0.7, dtype=torch.float64)], ids=["", "scaled"])
@pytest.mark.parametrize("factors", [None, FACTORS], ids=["", "clipped"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_update_to_the_bit(kind, factors, scale, dtypes):
    lists = lists_of(without=BUFFERS[kind], **dtypes)
    options = options_of(kind.replace("amsgrad", "adamw"), factors=factors, grad_scale=scale, cautious=factors is None)
    assert joined.can_update(lists["params"], buffers_of(lists), options)
    one_by_one, together = (updated(backend, lists, options) for backend in ("for-loop", "foreach"))
    for name, tensors in one_by_one.items():
        for expected, found, before in zip(tensors, together[name], lists[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert name != "exp_avg" or not found.numel() or not torch.equal(found, before)


@pytest.mark.parametrize("needed", [{}, {"products": False}, {"corrected": False}], ids=["", "corrected", "products"])
@pytest.mark.parametrize("has_last", [True, False])
def test_sums_to_the_bit(has_last, needed):
    gradients, last_grads = draw([(5, 7), (3,), (16, 16)]), draw([(5, 7), (3,), (16, 16)], seed=1) * has_last
    found = [BACKENDS[name]().run_sums(gradients, last_grads, k=0.4, **needed) for name in ("for-loop", "foreach")]
    assert torch.equal(*found)
    assert found[0][0 if needed.get("products", True) else 3].all()


def test_lists_that_are_not_joined():
    """One tensor, several counts of steps, and rounding with noise."""
    lists = lists_of(without=("max_exp_avg_sq",))
    buffers = buffers_of(lists)
    assert not joined.can_update(lists["params"][:1], buffers, options_of("adamw", steps=[3.0]))
    assert not joined.can_update(lists["params"], buffers, options_of("adamw", steps=[3.0, *range(1, len(SIZES))]))
    noisy = formulas.Rounding(kind="stochastic", seeds=range(len(SIZES)))
    assert not joined.can_update(lists["params"], buffers, options_of("adamw", rounding=noisy))
    assert not joined.can_sum(lists["gradients"][:1], [])
    assert not joined.can_sum(lists["gradients"], []) and joined.can_sum(lists["gradients"][1:], [])  # memory order
