"""The measurement of update sizes on the default job."""

from __future__ import annotations

import json

import pytest
import torch
import update_rms

import mars_hf


def test_updates_are_measured_without_rate_and_decay():
    """Signs have a root mean square of 1 whatever the decay is; an embedding is told by its name."""
    names = ("a.wte.weight", "b.weight", "b.bias")
    params = [torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64)) for _ in names[:2]]
    params.append(torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)))
    settings = {"mars_type": "mars-lion", "weight_decay": 0.5, "optimize_1d": True}
    optimizer = mars_hf.Mars(list(zip(names, params, strict=True)), lr=0.01, **settings)
    meter = update_rms.Meter(after=1)
    for step in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + step)
        meter.begin(optimizer)
        optimizer.step()
        meter.end(optimizer)
        if step == 0:
            assert meter.rms() == {}
    assert meter.rms() == pytest.approx({"embeddings": 1.0, "matrices": 1.0, "vectors": 1.0})


def test_the_shipped_runs_are_those_of_the_script():
    shipped = json.loads(update_rms.RESULTS.read_text())["runs"]
    assert [(row["optimizer"], row["arguments"]) for row in shipped] == [
        (optimizer, [*update_rms.COMMON, *settings]) for optimizer, settings in update_rms.RUNS
    ]
