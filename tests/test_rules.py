"""The formulas on lists: both paths give one result, and inputs that must not change do not."""

from __future__ import annotations

import pytest
import torch

from mars_hf import rules

SHAPES = ((3, 4), (1,), (0, 2), (17, 5))


def tensors(seed: int, positive: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [t.abs() for t in made] if positive else made


def test_correct():
    g, last = tensors(1), tensors(2)
    copies = [t.clone() for t in (*g, *last)]
    loop, batch = (rules.correct(g, last, gamma=0.025, beta1=0.95, foreach=foreach) for foreach in (False, True))
    for a, b, x, y in zip(loop, batch, g, last, strict=True):
        torch.testing.assert_close(a.double(), x.double() + 0.475 * (x.double() - y.double()), rtol=1e-5, atol=1e-6)
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip((*g, *last), copies, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("clip_threshold", [0.1, 1.0, 1e6])
def test_clip(clip_threshold, foreach):
    c = tensors(1)
    norms = rules.norms(c, foreach=foreach)
    assert [norm.item() for norm in norms] == pytest.approx([x.double().norm().item() for x in c])
    expected = [x.double() / max(1.0, x.double().norm().item() / clip_threshold) for x in c]
    rules.clip(c, norms, clip_threshold=clip_threshold, foreach=foreach)
    for x, y in zip(c, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_paths_agree_to_the_bit(amsgrad):
    results = []
    for foreach in (False, True):
        x, g, m, v, peak = tensors(1), tensors(2), tensors(3), tensors(4, True), tensors(5, True)
        rules.adamw(
            *(x, g, g, m, v, peak if amsgrad else [], [1.0, 2.0, 3.0, 4.0]),
            **{"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "foreach": foreach},
        )
        results.append([*x, *m, *v, *peak])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_lion_paths_agree_to_the_bit():
    results = []
    for foreach in (False, True):
        x, c, m = tensors(1), tensors(2), tensors(3)
        rules.lion(x, c, m, lr=0.1, beta1=0.9, weight_decay=0.1, foreach=foreach)
        results.append([*x, *m])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
