"""The metrics of a step, by their definitions; test_ranks_in_threads.py has those of parameters that ranks share."""

from __future__ import annotations

import pytest
import torch
from test_formulas import gradients, parameters, references, scaled
from torch import Tensor, nn

from mars_hf import Mars
from mars_hf.step import update
from mars_hf.step.metrics import StepMetrics


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("clip_threshold", [3.0, None])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
def test_metrics_of_a_step(mars_type, clip_threshold, limit, foreach):
    """By their definitions, over the matrices; the vector takes AdamW. Gradients are those after global clipping."""
    params = parameters(torch.float64, ((4, 3), (2, 5), (6,)))
    settings = {"lr": 0.01, "weight_decay": 0.1, "gamma": 0.5, "clip_threshold": clip_threshold, "mars_type": mars_type}
    optimizer, lines = Mars(params, max_grad_norm=limit, fused=False, **settings), references(params, **settings)
    assert optimizer.pop_metrics() == {}  # off by default
    optimizer.collect_metrics(True)
    for sizes in ((1.2, 0.01, 1.0), (0.01, 9.0, 1.0), (9.0, 9.0, 1.0), (0.0, 0.0, 0.0)):
        grads = [size * g for size, g in zip(sizes, gradients(params, 3), strict=True)]
        before = [param.detach().clone() for param in params[:2]]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        metrics = optimizer.pop_metrics()
        g, last = scaled(grads, {"max_grad_norm": limit})[0][:2], flat([line.last for line in lines[:2]])
        c = [line.corrected(tensor) for line, tensor in zip(lines, g, strict=False)]
        for line, tensor in zip(lines, g, strict=False):
            line.step(tensor)
        change = flat([param.detach() - old for param, old in zip(params, before, strict=False)])
        expected = {
            "mars/clip_fraction": sum(clip_threshold is not None and tensor.norm() > clip_threshold for tensor in c)
            / 2,
            "mars/update_rms": change.square().mean().sqrt(),
        }
        if mars_type == "mars-adamw" or clip_threshold is not None:  # otherwise it keeps no last gradient
            norm = flat(g).norm()
            expected["mars/corrected_norm_ratio"] = flat(c).norm() / norm if norm > 0 else 0.0
            if last.any():  # not in the first step
                expected["mars/grad_cosine"] = nn.functional.cosine_similarity(flat(g), last, dim=0)
        assert metrics == {name: pytest.approx(float(value), abs=1e-6) for name, value in expected.items()}
    assert optimizer.pop_metrics() == {}


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_copies_for_metrics_are_bounded(mars_type, monkeypatch):
    """In parts that hold one parameter or several; they change neither a bit of the step nor what is measured."""
    runs = []
    for most, parts in ((100, [5]), (24, [2, 1, 2]), (1, [1] * 5)):
        monkeypatch.setattr(update, "MEASURED_ELEMENTS", most)
        params = parameters(torch.float32, ((4, 3), (3, 4), (5, 4), (2, 3), (3, 3)))
        optimizer = Mars(params, mars_type=mars_type, lr=0.1, fused=False)
        optimizer.collect_metrics(True)
        for param, grad in zip(params, gradients(params, 1), strict=True):
            param.grad = grad
        assert [len(part) for part in update._parts_of(params)] == parts
        optimizer.step()
        runs.append(([param.detach() for param in params], optimizer.pop_metrics()["mars/update_rms"]))
    for moved, measured in runs[1:]:
        assert all(map(torch.equal, moved, runs[0][0])) and measured == pytest.approx(runs[0][1], rel=1e-12)


def test_shares_of_clipped_parameters():
    """Of one clipped parameter this rank has half, of another one all, and half of a third."""
    metrics = StepMetrics()
    squares, shares = torch.tensor([4.0, 0.0, 0.0], dtype=torch.float64), [0.5, 1.0, 0.5]
    metrics.add(torch.zeros(4, 3, dtype=torch.float64), squares, shares, 1.0, has_last=False)
    assert metrics.read()["mars/clip_fraction"] == 0.25


def test_metrics_are_of_the_steps_since_they_were_read():
    """Switching them on or off drops what nobody has read, and AdamW alone has none."""
    params = parameters(torch.float32, ((4, 3), (6,)))
    optimizer = Mars(params)

    def step(size: float) -> None:
        for param in params:
            param.grad = size * torch.ones_like(param)
        optimizer.step()

    optimizer.collect_metrics(True)
    step(10.0), step(1e-3)
    assert optimizer.pop_metrics()["mars/clip_fraction"] == 1.0  # the second c is long because of the last gradient
    step(1e-3)
    assert optimizer.pop_metrics()["mars/clip_fraction"] == 0.0
    step(10.0)
    optimizer.collect_metrics(True)
    step(10.0)
    assert optimizer.pop_metrics()["mars/grad_cosine"] == pytest.approx(1.0)
    optimizer.collect_metrics(False)
    step(10.0)
    assert optimizer.pop_metrics() == {}
    vectors = Mars(parameters(torch.float32, ((6,),)))
    vectors.collect_metrics(True)
    vectors.param_groups[0]["params"][0].grad = torch.ones(6)
    vectors.step()
    assert vectors.pop_metrics() == {}
