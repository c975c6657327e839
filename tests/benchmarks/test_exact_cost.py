"""The benchmark of exact MARS measures what it says, at a tiny size."""

from __future__ import annotations

import json

import exact_cost
import pytest
import torch
from exact_cost import ADAMW, APPROX, EXACT, SIZES

import mars_hf
from mars_hf.training.guard import innermost


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    class Progress:
        blocks = 0

        def update(self) -> None:
            self.blocks += 1

    progress = Progress()
    result = exact_cost.take_turns(SIZES["tiny"], 2, 3, str(tmp_path_factory.mktemp("runs")), progress)
    assert progress.blocks == 9  # the first round is a warm-up
    return result


@pytest.mark.slow
def test_every_round_is_measured(measured):
    for contender in measured.values():
        assert len(contender["rounds"]) == 2
        assert all(block["gradients"] > 0 and block["update"] > 0 for block in contender["rounds"])


@pytest.mark.slow
def test_bytes(measured, tmp_path):
    kept = {name: contender["bytes"] for name, contender in measured.items()}
    model = exact_cost.make_trainer(ADAMW, SIZES["tiny"], 1, str(tmp_path))[0].model
    params = sum(param.nbytes for param in model.parameters())
    matrices = sum(param.nbytes for param in model.parameters() if param.ndim == 2)
    for counted in kept.values():
        assert counted["param"] == counted["grad"] == counted["exp_avg"] == counted["exp_avg_sq"] == params
    assert "last_grad" not in kept[ADAMW]
    assert kept[APPROX]["last_grad"] == kept[EXACT]["last_grad"] == matrices
    assert kept[EXACT]["previous_param"] == params and "previous_param" not in kept[APPROX]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "passes"), [(ADAMW, 6), (APPROX, 6), (EXACT, 11)])
def test_the_contenders_go_on_where_their_block_ended(tmp_path, monkeypatch, name, passes):
    """All of exact MARS's six steps but the first take two passes, and the meter sees them begin."""
    trainer, meter = exact_cost.make_trainer(name, SIZES["tiny"], 3, str(tmp_path))
    seen = []
    compute_loss = trainer.compute_loss
    monkeypatch.setattr(
        trainer, "compute_loss", lambda *a, **k: seen.append(trainer.in_stale_pass) or compute_loss(*a, **k)
    )
    began = []
    monkeypatch.setattr(meter, "on_step_begin", lambda *a, **k: began.append(len(seen)))
    trainer.train()
    trainer.train()
    optimizer = innermost(trainer.optimizer)
    assert isinstance(optimizer, torch.optim.AdamW if name == ADAMW else mars_hf.Mars)
    assert len(seen) == passes and seen.count(True) == passes - 6
    assert began == ([0, 1, 3, 5, 7, 9] if name == EXACT else [0, 1, 2, 3, 4, 5])


def test_ratios_are_taken_within_rounds():
    def rounds(*blocks):
        return {"rounds": [dict(zip(("gradients", "update"), block, strict=True)) for block in blocks]}

    # The second round is ten times slower.
    measured = {
        ADAMW: rounds((0.3, 0.1), (3.0, 1.0), (0.3, 0.1)),
        APPROX: rounds((0.4, 0.1), (4.0, 1.0), (0.4, 0.1)),
        EXACT: rounds((0.7, 0.1), (7.0, 1.0), (0.7, 0.1)),
    }
    result = exact_cost.summarize(measured)
    exact = result["contenders"][EXACT]
    assert exact["against_adamw"] == pytest.approx(2.0) and exact["against_approx"] == pytest.approx(1.6)
    assert (exact["step_ms"], exact["gradients_ms"], exact["update_ms"]) == pytest.approx((800, 700, 100))
    assert result["bound"] == pytest.approx(0.9 / 0.5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command(tmp_path, capsys):
    output = tmp_path / "exact_cost.json"
    exact_cost.main(["--sizes", "tiny", "--rounds", "1", "--steps", "2", "--output", str(output)])
    written = json.loads(output.read_text())
    assert written["machine"]["threads"] == torch.get_num_threads()
    assert written["sizes"]["tiny"]["parameters"] * 4 == written["sizes"]["tiny"]["contenders"][EXACT]["bytes"]["param"]
    assert all(row["peak"]["resident"] > 2**20 for row in written["sizes"]["tiny"]["contenders"].values())
    printed = capsys.readouterr().out
    assert printed.count("| tiny, 0.0M |") == 3 and "two passes and one update" in printed
