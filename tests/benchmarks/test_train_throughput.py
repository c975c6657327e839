"""The benchmark of training measures the recipe."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
import torch
import train_throughput
from transformers import TrainerCallback

import mars_hf

TINY = ["--size", "tiny", "--device", "cpu", "--block", "16", "--batch", "2", "--steps", "3"]


def options(**changes):
    given = {"size": "tiny", "device": "cpu", "batch": 2, "block": 16, "steps": 2, "accumulation": 1, "bf16": False}
    return argparse.Namespace(**{**given, "peak_tflops": None, **changes})


@pytest.mark.slow
def test_results(tmp_path, capsys):
    output = tmp_path / "throughput.json"
    train_throughput.main(
        [*TINY, "--rounds", "2", "--accumulation", "2", "--peak_tflops", "1", "--output", str(output)]
    )
    result = json.loads(output.read_text())["result"]
    assert result["tokens_per_step"] == 2 * 2 * 16
    assert result["peak_flops"] == 1e12
    for row in result["contenders"].values():
        assert row["tokens_per_second"] == pytest.approx(result["tokens_per_step"] / row["step_ms"] * 1e3)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * result["flops_per_token"] / 1e12)
        assert 0 < row["update_share"] < 1
    assert result["contenders"]["AdamW fused"]["time_against_adamw"] == 1.0
    assert "| Mars " in capsys.readouterr().out
    assert output.with_suffix(".png").stat().st_size > 5_000


class Norms(TrainerCallback):
    """Record the optimizer's `max_grad_norm` at the end of every step."""

    def __init__(self, found: list) -> None:
        self.found = found

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        self.found.append(getattr(optimizer.optimizer, "max_grad_norm", None))


@pytest.mark.slow
def test_trainers_step_with_what_they_are_named_after(tmp_path):
    adamw, mars = (
        train_throughput.make_trainer(name, options(), str(tmp_path))
        for name in (train_throughput.ADAMW, train_throughput.MARS)
    )
    norms = []  # MarsTrainer restores the optimizer's setting
    for trainer in (adamw, mars):
        trainer.add_callback(Norms(norms))
        trainer.train()
    inner = adamw.optimizer.optimizer
    assert isinstance(inner, torch.optim.AdamW) and all(group["fused"] for group in inner.param_groups)
    assert isinstance(mars.optimizer.optimizer, mars_hf.Mars)
    assert norms == [None, None, 1.0, 1.0]  # clipping is part of the step of Mars
    mars.meter.pop()
    mars.train()
    assert [len(marks) for marks in (mars.meter.begins, mars.meter.gradients, mars.meter.updates)] == [3, 2, 2]


def test_flops_are_those_of_the_matrix_products():
    from torch.utils.flop_counter import FlopCounterMode

    settings = options()
    # Written out: the counter does not know the fused attention of CPUs.
    size = dataclasses.replace(train_throughput.SIZES["tiny"], attn_implementation="eager")
    gpt2 = train_throughput.model.build(size, 1, 0)
    ids = torch.zeros(1, settings.block, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        gpt2(input_ids=ids, labels=ids).loss.backward()
    vectors = sum(param.numel() for param in gpt2.parameters() if param.ndim == 1)
    expected = train_throughput.flops_per_token(settings, gpt2) - 6 * vectors
    assert counter.get_total_flops() / settings.block == expected
