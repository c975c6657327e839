"""The benchmark of training measures the recipe."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
import torch
import train_cost
from interleave import Clock
from train_cost import ADAMW, EXACT, MARS, Block
from transformers import TrainerCallback

import mars_hf

TINY = ["--size", "tiny", "--device", "cpu", "--block", "16", "--batch", "2", "--steps", "3"]


def options(**changes):
    settings = {"size": "tiny", "device": "cpu", "batch": 2, "block": 16, "steps": 3, "accumulation": 1, "bf16": False}
    return argparse.Namespace(**{**settings, "peak_tflops": None, **changes})


@pytest.mark.slow
def test_results(tmp_path, capsys):
    output = tmp_path / "cost.json"
    train_cost.main([*TINY, "--rounds", "2", "--accumulation", "2", "--peak_tflops", "1", "--output", str(output)])
    result = json.loads(output.read_text())["result"]
    assert result["tokens_per_step"] == 2 * 2 * 16 and result["peak_flops"] == 1e12
    rows = result["contenders"]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(result["tokens_per_step"] / row["step_ms"] * 1e3)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * result["flops_per_token"] / 1e12)
        assert 0 < row["update_share"] < 1
    assert rows[ADAMW]["against"][ADAMW] == rows[MARS]["against"][MARS] == 1.0
    kept = {name: row["bytes"] for name, row in rows.items()}
    for counted in kept.values():
        assert counted["param"] == counted["grad"] == counted["exp_avg"] == counted["exp_avg_sq"]
        assert 0.8 < counted["param"] / (4 * result["parameters"]) <= 1  # biases of the paper's config are frozen
    assert "last_grad" not in kept[ADAMW] and 0 < kept[MARS]["last_grad"] == kept[EXACT]["last_grad"] < 4 * 1e6
    assert kept[EXACT]["previous_param"] == kept[EXACT]["param"] and "previous_param" not in kept[MARS]
    printed = capsys.readouterr().out
    assert "| Mars exact " in printed and "two passes and one update would take" in printed


class Norms(TrainerCallback):
    """Record the optimizer's `max_grad_norm` at the end of every step."""

    def __init__(self, norms: list) -> None:
        self.norms = norms

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        self.norms.append(getattr(optimizer.optimizer, "max_grad_norm", None))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "passes"), [(ADAMW, 6), (MARS, 6), (EXACT, 11)])
def test_contenders_go_on_where_their_block_ended(tmp_path, monkeypatch, name, passes):
    """All of exact MARS's six steps but the first take two passes, and the meter sees them begin."""
    trainer = train_cost.make_trainer(name, options(), str(tmp_path))
    seen, begun, norms = [], [], []
    compute_loss, begin = trainer.compute_loss, trainer.meter.on_step_begin
    monkeypatch.setattr(
        trainer, "compute_loss", lambda *a, **k: seen.append(trainer.in_stale_pass) or compute_loss(*a, **k)
    )
    monkeypatch.setattr(trainer.meter, "on_step_begin", lambda *a, **k: begun.append(len(seen)) or begin(*a, **k))
    trainer.add_callback(Norms(norms))  # MarsTrainer restores the optimizer's setting
    trainer.train()
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    if name == ADAMW:
        assert isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)
    else:
        assert isinstance(optimizer, mars_hf.Mars)
    assert norms == [1.0 if name == MARS else None] * 6  # clipping is part of the step of Mars, unless it is exact
    assert len(seen) == passes and seen.count(True) == passes - 6
    assert begun == ([0, 1, 3, 5, 7, 9] if name == EXACT else [0, 1, 2, 3, 4, 5])
    assert [len(marks) for marks in (trainer.meter.begins, trainer.meter.gradients, trainer.meter.updates)] == [8, 6, 6]


def test_meter_takes_medians_of_steps_and_updates():
    meter = train_cost.Meter(Clock(torch.device("cpu")))
    meter.begins, meter.gradients, meter.updates = [0.0, 2.0, 5.0, 9.0], [1.0, 4.0, 7.0], [1.5, 4.75, 7.25]
    assert meter.pop() == Block(step=3.0, update=0.5)
    assert not meter.begins and not meter.gradients and not meter.updates


def test_ratios_are_taken_within_rounds():
    def blocks(step, update):  # the second round is ten times slower
        return [Block(step, update), Block(10 * step, 10 * update), Block(step, update)]

    measured = {ADAMW: blocks(0.4, 0.1), MARS: blocks(0.5, 0.1), EXACT: blocks(0.8, 0.1)}
    rows = train_cost.summarize(measured, tokens=100, seconds_per_token=0.001)
    assert rows[EXACT]["against"] == pytest.approx({ADAMW: 2.0, MARS: 1.6, EXACT: 1.0})
    assert (rows[EXACT]["step_ms"], rows[EXACT]["update_ms"]) == pytest.approx((800, 100))
    assert (rows[ADAMW]["tokens_per_second"], rows[ADAMW]["mfu"]) == pytest.approx((250, 0.25))
    assert train_cost.exact_bound(measured[MARS]) == pytest.approx(0.9 / 0.5)


def test_flops_are_those_of_the_matrix_products():
    from torch.utils.flop_counter import FlopCounterMode

    settings = options()
    # Written out: the counter does not know the fused attention of CPUs.
    size = dataclasses.replace(train_cost.SIZES["tiny"], attn_implementation="eager")
    gpt2 = train_cost.model.build(size, 1, 0)
    ids = torch.zeros(1, settings.block, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        gpt2(input_ids=ids, labels=ids).loss.backward()
    vectors = sum(param.numel() for param in gpt2.parameters() if param.ndim == 1)
    expected = train_cost.flops_per_token(settings, gpt2) - 6 * vectors
    assert counter.get_total_flops() / settings.block == expected
