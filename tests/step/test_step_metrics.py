"""The four metrics against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mars_hf import Mars


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("clip_threshold", [3.0, None])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
def test_metrics_of_a_step(mars_type, clip_threshold, foreach):
    shapes = ((4, 3), (2, 5), (6,))
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    settings = {"lr": 0.01, "weight_decay": 0.1, "gamma": 0.5}
    optimizer = Mars(params, mars_type=mars_type, clip_threshold=clip_threshold, fused=False, **settings)
    optimizer.collect_metrics(True)
    last = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for scales in ((0.06, 0.01), (0.01, 9.0), (9.0, 9.0)):
        g = [torch.randn(shape, dtype=torch.float64) * scale for shape, scale in zip(shapes, (*scales, 1), strict=True)]
        before = [param.detach().clone() for param in params]
        for param, gradient in zip(params, g, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        c = [a + 0.5 * 0.95 / 0.05 * (a - b) for a, b in zip(g, last, strict=True)]
        mars = slice(0, 2)  # the vector takes AdamW
        clipped = [] if clip_threshold is None else [x for x in c[mars] if x.norm() > clip_threshold]
        update = flat([param.detach() - old for param, old in zip(params[mars], before[mars], strict=True)])
        cosine = torch.nn.functional.cosine_similarity(flat(g[mars]), flat(last[mars]), dim=0).item()
        metrics = optimizer.pop_metrics()
        assert metrics["mars/clip_fraction"] == len(clipped) / 2
        if mars_type == "mars-lion" and clip_threshold is None:  # which keeps no last gradient
            assert set(metrics) == {"mars/clip_fraction", "mars/update_rms"}
        else:
            ratio = (flat(c[mars]).norm() / flat(g[mars]).norm()).item()
            assert metrics["mars/corrected_norm_ratio"] == pytest.approx(ratio)
            assert metrics.get("mars/grad_cosine") == (
                pytest.approx(cosine, abs=1e-6) if any(map(torch.any, last)) else None
            )
        assert metrics["mars/update_rms"] == pytest.approx(update.square().mean().sqrt().item())
        last = g


def test_measuring_changes_no_step_and_is_off_by_default():
    results = []
    for measure in (False, True):
        param = nn.Parameter(torch.ones(3, 2))
        optimizer = Mars([param])
        optimizer.collect_metrics(measure)
        for step in range(3):
            param.grad = torch.full((3, 2), 1.0 + step)
            optimizer.step()
        results.append(param.detach().clone())
        assert bool(optimizer.pop_metrics()) is measure
        assert optimizer.pop_metrics() == {}
    assert torch.equal(*results)


def test_no_metrics_without_a_parameter_under_the_mars_rule():
    param = nn.Parameter(torch.ones(3))
    optimizer = Mars([param])
    optimizer.collect_metrics(True)
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.pop_metrics() == {}


def test_zero_gradients_give_zeros_not_nan():
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = Mars([param])
    optimizer.collect_metrics(True)
    param.grad = torch.zeros(3, 2)
    optimizer.step()
    assert set(optimizer.pop_metrics().values()) == {0.0}
