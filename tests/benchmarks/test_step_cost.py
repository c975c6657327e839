"""The benchmark of the optimizers' steps measures what it says."""

from __future__ import annotations

import json
import math

import interleave
import pytest
import step_cost
import torch

CPU = torch.device("cpu")
OURS = "AdamW|^Mars$|take_grad|without|grad_norm|shampoo|mars-m"


@pytest.fixture(autouse=True)
def small_copy(monkeypatch):
    monkeypatch.setattr(step_cost, "COPY_BYTES", {"cpu": 2**16})


def player(name, work):
    contender = step_cost.contenders()[name]
    return step_cost.Player(contender, contender.make(work.named), work, interleave.Clock(CPU))


def test_results(tmp_path, capsys):
    output = tmp_path / "step_cost.json"
    wanted = ["--size", "tiny", "--contenders", OURS]
    step_cost.main([*wanted, "--device", "cpu", "--rounds", "2", "--output", str(output)])
    written = json.loads(output.read_text())
    result = written["sizes"]["tiny"]
    rows = result["contenders"]
    assert not result["failed"] and not result["pairwise"]
    assert {"Muon, AdamW for the rest", "mars-shampoo", "mars-m", "mars-m, split c_attn"} < set(rows)
    assert rows["AdamW fused"]["against_adamw"] == 1.0
    assert rows["AdamW fused + clip_grad_norm_"]["against_clipped_adamw"] == 1.0
    assert all(math.isfinite(value) for row in rows.values() for value in row.values() if isinstance(value, float))
    assert {name for name, row in rows.items() if row.get("clips")} == {
        "AdamW fused + clip_grad_norm_",
        "Mars + clip_grad_norm_",
        "Mars max_grad_norm",
        "Mars max_grad_norm, take_grad",
    }
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in rows if name != step_cost.COPY)
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_pairwise_measures_the_same_contenders(tmp_path):
    output = tmp_path / "pairs.json"
    wanted = ["--size", "tiny", "--pairwise", "--contenders", "^Mars$|lion"]
    step_cost.main([*wanted, "--device", "cpu", "--rounds", "1", "--output", str(output)])
    result = json.loads(output.read_text())["sizes"]["tiny"]
    assert result["pairwise"]
    assert {"copy", "AdamW fused", "AdamW fused + clip_grad_norm_", "Mars", "mars-lion"} <= set(result["contenders"])


def test_bytes_of_state():
    work = step_cost.Workload("tiny", CPU)
    matrices = sum(param.numel() for param in work.params if param.ndim > 1)
    counted = {}
    for name in ("AdamW fused", "Mars", "Mars without last_grad", "mars-m"):
        one = player(name, work)
        one()
        counted[name] = one.state_bytes() - 4 * len(work.params)  # step counts
    assert counted == {
        "AdamW fused": 8 * work.numel,
        "Mars": 8 * work.numel + 4 * matrices,
        "Mars without last_grad": 8 * work.numel,
        "mars-m": 8 * work.numel,  # first moment and last gradient
    }


def test_contenders_that_orthogonalize_take_the_same_matrices():
    work = step_cost.Workload("tiny", CPU)
    (muon, _), width = player("Muon, AdamW for the rest", work).optimizers, step_cost.SIZES["tiny"].n_embd
    matrices = {id(param) for param in muon.param_groups[0]["params"]}
    assert len(matrices) == 4
    for name in ("mars-shampoo", "mars-m", "mars-m, split c_attn"):
        (mars,) = player(name, work).optimizers
        groups = [group for group in mars.param_groups if group["role"] == "matrix"]
        assert {id(param) for group in groups for param in group["params"]} == matrices
        split = [group for group in groups if group["layout"]["parts"] is not None]
        assert [group["layout"]["parts"] for group in split] == [(width,) * 3] * ("split" in name)
        assert all(param.shape == (width, 3 * width) for group in split for param in group["params"])
        assert sum(len(group["params"]) for group in mars.param_groups) == len(work.params)


def test_contenders_leave_the_shared_gradients_as_they_were():
    work = step_cost.Workload("tiny", CPU, gradient_norm=3.0)
    before = [[gradient.clone() for gradient in gradients] for gradients in work._gradients[True]]
    norm = torch.cat([gradient.flatten() for gradient in before[0]]).norm()
    assert norm > step_cost.MAX_NORM  # or clipping would do nothing
    for name in step_cost.contenders():
        if name.startswith(("AdamW", "Mars", "mars")):
            one = player(name, work)
            for _ in range(3):
                one()
    torch.testing.assert_close(work._gradients[True], before, rtol=1e-5, atol=0)
    torch.testing.assert_close(work._gradients[False], before, rtol=0, atol=0)


def test_last_gradient_is_that_of_the_turn_before():
    work = step_cost.Workload("tiny", CPU)
    one = player("Mars take_grad", work)
    one()
    one()
    matrix = next(param for param in work.params if param.ndim > 1)
    last = one.optimizers[0].state[matrix]["last_grad"]
    work.present(1)
    assert last.data_ptr() == matrix.grad.data_ptr()
    work.present(2)
    assert last.data_ptr() != matrix.grad.data_ptr()


def test_peak_memory_counts_what_is_held_at_once():
    def call():
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        third = torch.empty(500)
        return second, third

    assert step_cost.peak_memory(call, CPU) == 4 * 4000


def test_a_contender_that_cannot_run_is_named_and_the_others_go_on(monkeypatch):
    def broken(named):
        raise ImportError("nothing here")

    both = ["AdamW fused", "AdamW fused + clip_grad_norm_"]
    known = step_cost.contenders()
    monkeypatch.setattr(step_cost, "contenders", lambda: {**known, "broken": step_cost.Contender(broken, 28)})
    rows, failed = step_cost.measure(step_cost.Workload("tiny", CPU), [*both, "broken"], CPU, 1)
    assert failed == {"broken": "ImportError: nothing here"}
    assert set(rows) == {"copy", *both}


def test_sessions_follow_memory():
    names = list(step_cost.contenders())
    baselines = {"AdamW fused", "AdamW fused + clip_grad_norm_"}
    assert step_cost.sessions(names, 1000, 10**9, None) == [names]
    assert step_cost.sessions(names, 1000, 10**4, None) == []
    pairs = step_cost.sessions(names, 1000, 60_000, None)
    assert len(pairs) == len(names) - 2 and all(len(pair) == 3 and baselines < set(pair) for pair in pairs)
    assert step_cost.sessions(["Mars"], 1000, 10**9, True) == [[*step_cost.sessions([], 1000, 10**9, True)[0], "Mars"]]


@pytest.mark.parametrize("size", ["default", "28m", "small", "medium", "large", "xl"])
def test_sizes_are_those_of_gpt2(size):
    with torch.device("meta"):
        numel = step_cost.gpt2.build(step_cost.SIZES[size], 1, 0).num_parameters()
    # OpenAI's models have 50257 tokens; ours pad to 50304.
    published = {
        "default": 1.334e6,
        "28m": 27.8e6,
        "small": 124.4e6,
        "medium": 354.8e6,
        "large": 774.0e6,
        "xl": 1557.6e6,
    }
    assert numel == pytest.approx(published[size], rel=2e-3)
