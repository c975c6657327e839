"""The metrics of a step, by their definitions; test_ranks_in_threads.py has those of parameters that ranks share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers import gpt2, logged
from test_formulas import gradients, parameters, references, scaled
from torch import Tensor, nn

import mars_hf
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


# --- what rounding loses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lost_updates_are_counted(dtype, mars_type):
    """Against weights of 2, small updates are lost; elements without a gradient do not count."""
    param = nn.Parameter(torch.full((8, 6), 2.0, dtype=dtype))
    param.data[:2] = 0
    optimizer = Mars([{"params": [param], "role": "matrix"}], lr=1e-4, mars_type=mars_type, weight_decay=0.0)
    optimizer.collect_metrics(True)
    param.grad = torch.randn(8, 6).to(dtype)
    param.grad[7] = 0
    assert len(logged(optimizer.step, "do not move")) == 1
    assert optimizer.pop_metrics()["mars/lost_update_fraction"] == pytest.approx(5 / 7)
    assert param[2:].eq(2.0).all() and param[:2].ne(0.0).all()


@pytest.mark.parametrize(
    ("dtype", "lr", "settings", "weight"),
    [
        (torch.bfloat16, 1e-4, {}, "0.051"),
        (torch.bfloat16, 1.9e-3, {}, "0.97"),
        (torch.bfloat16, 2e-3, {}, None),  # 2**-9 is 0.00195
        (torch.bfloat16, 1e-4, {"rounding": "stochastic"}, None),
        (torch.bfloat16, 1e-4, {"rounding": "kahan"}, None),
        (torch.float16, 1e-4, {"rounding": "stochastic"}, "0.41"),  # which is for bfloat16 alone
        (torch.float16, 2.5e-4, {}, None),  # 2**-12
        (torch.float32, 1e-9, {}, None),
    ],
)
@pytest.mark.parametrize("warms_up", [False, True])
def test_half_precision_is_said_at_the_first_step(dtype, lr, settings, weight, warms_up):
    """Once, with the weight from which on nothing moves; a warm-up begins with a rate of 0."""
    params = parameters(dtype, ((4, 3), (6,)))
    optimizer = Mars(params, lr=lr, lr_1d=lr, **settings)
    if warms_up:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)

    def run() -> None:
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

    said = logged(run, "do not move")
    if weight is None:
        assert not said
    else:
        name = str(dtype).removeprefix("torch.")
        (line,) = said
        assert f"2 parameters are {name}" in line and f"weights above about {weight} do not move" in line
        assert "dtype=torch.float32" in line and ("'kahan'" in line) == (dtype == torch.bfloat16)


@pytest.mark.slow
def test_rows_of_the_finetuning_page():
    """What moves of a small GPT-2 in bfloat16 in 30 steps at the rate of the page."""
    page = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\"(\w+)\"` \| (\d+) % \| (\d+) % \| (\d+) % \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == ["nearest", "stochastic", "kahan"]
    for rounding, *shares in rows:
        moved = [moved_share(rounding, mars_type) for mars_type in ("mars-adamw", "mars-m")]
        of_gains = moved[0][1]
        found = [100 * moved[0][0], 100 * moved[1][0], 100 * of_gains]
        assert found == pytest.approx([float(share) for share in shares], abs=1.0)


def moved_share(rounding: str, mars_type: str) -> tuple[float, float]:
    """Return which share of the elements of matrices, and of the gains of LayerNorms, have moved."""
    model = gpt2(n_embd=64, n_positions=32, vocab_size=256).to(torch.bfloat16)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = mars_hf.create(model, lr=2.4e-5, betas=(0.9, 0.999), rounding=rounding, mars_type=mars_type)
    for step in range(30):
        tokens = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(step))
        tokens[:, 1::2] = tokens[:, ::2]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    of_matrices, of_gains = [], []
    for name, param in model.named_parameters():
        if param.ndim > 1:
            of_matrices.append(param.ne(before[name]).flatten())
        elif re.search(r"ln_\w+\.weight", name):
            of_gains.append(param.ne(before[name]))
    return torch.cat(of_matrices).float().mean().item(), torch.cat(of_gains).float().mean().item()
