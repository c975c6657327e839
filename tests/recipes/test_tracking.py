"""First moments where lag, noise and variances have closed forms, the passes of a run, the command and its result."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import measure_tracking
import pytest
import torch
import tracking
from helpers import gpt2, refused
from test_pretrain_gpt2 import TINY, equal_weights, run
from torch import nn
from tracking import Moment, ShadowMoments, TrackingProbe, grid
from transformers import TrainerControl, TrainerState, default_data_collator

import mars_hf

SIZE, STEPS = 16_000, 120  # of more elements PyTorch starts threads
NOISE = 2.0  # standard deviation of an element of a half's gradient
SPEED = 0.15  # of every element of the gradient, a step
VARIANCE = NOISE**2 / 2  # of an element of the whole batch's gradient
WHOLE = {"all": [0]}
MOMENTS = grid((0.9, 0.95), (0.0, 0.025, 0.1), ())


def follow(moments, speed=0.0, steps=STEPS):
    """Follow moments of gradients t * speed + noise; return the measurements at the last step by moment."""
    generator = torch.Generator().manual_seed(0)
    shadow = ShadowMoments(moments, [SIZE])
    for step in range(steps):
        noise = NOISE * torch.randn(2, SIZE, generator=generator)
        shadow.update(noise + speed * step, noise + speed * (step - 1) if step else None, samples=4)
    truth = torch.full((2, SIZE), speed * (steps - 1))
    return tracking.medians({"step": steps, **row} for row in shadow.measure(truth, WHOLE))


def noise_of(moment: Moment) -> float:
    """Return the variance of the first moment in units of the gradient's.

    Approx: m = (1 - gamma) e + gamma g, e being the average, with variance (1 - beta1) / (1 + beta1), and covariance
    1 - beta1 with g. Exact: the noise of c is that of g.
    """
    beta1, gamma = moment.beta1, moment.gamma if moment.form == "approx" else 0.0
    average = (1 - beta1) / (1 + beta1)
    return (1 - gamma) ** 2 * average + gamma**2 + 2 * gamma * (1 - gamma) * (1 - beta1)


@pytest.fixture(scope="module")
def moving():
    return follow(MOMENTS, SPEED)


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_closed_forms(moving, moment):
    """Lag of an average is beta1 / (1 - beta1) steps; either correction takes the share gamma off."""
    truth = SPEED * (STEPS - 1)
    behind = (1 - moment.gamma) * moment.beta1 / (1 - moment.beta1) * SPEED
    noise = noise_of(moment) * VARIANCE
    weight = moment.weight if moment.form == "approx" else 0.0
    measured = dict(moving[moment])
    cosine = (truth - behind) / math.hypot(truth - behind, noise**0.5)
    assert measured.pop("cosine") == pytest.approx(cosine, rel=0.001)
    assert measured == pytest.approx(
        {
            "error": (behind**2 + noise) / truth**2,
            "lag": behind**2 / truth**2,
            "noise": noise / truth**2,
            "variance_ratio": (1 + weight) ** 2 + weight**2,
            "noise_scale": 4 * VARIANCE / truth**2,
        },
        rel=0.04,
    )


@pytest.mark.parametrize("form", ["approx", "exact"])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_moments_are_those_of_the_optimizer(form, clip):
    """The mean of the halves is exp_avg of a Mars that takes their mean gradient."""
    moment = Moment(0.9, 0.05, form, clip)
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((4, 5), (2, 3))]
    settings = {"betas": (0.9, 0.99), "gamma": 0.05, "is_approx": form == "approx", "clip_threshold": clip}
    mars, shadow = mars_hf.Mars(params, lr=0.01, **settings), ShadowMoments([moment], [20, 6])

    def give(gradients):
        for param, gradient in zip(params, gradients.mean(0).split([20, 6]), strict=True):
            param.grad = gradient.view(param.shape).clone()

    for step in range(6):
        gradients, stale = torch.randn(2, 2, 26, dtype=torch.float64)
        if step and form == "exact":
            give(stale)
            mars.update_previous_grad()
            mars.update_last_grad()
        shadow.update(gradients, stale if step else None, samples=4)
        give(gradients)
        # MARS corrects its first gradient by a last one of zero; the probe does not.
        mars.param_groups[0]["gamma"] = 0.05 if step else 0.0
        mars.step()
        averages = torch.cat([mars.state[param]["exp_avg"].flatten() for param in params])
        torch.testing.assert_close(shadow.value(moment).mean(0), averages / (1 - 0.9 ** (step + 1)))


def test_grid_and_halves():
    assert [str(moment) for moment in grid((0.9,), (0.0, 0.1, 0.1), (0.0, 1.0, 1.0))] == [
        "beta1 0.9 gamma 0",
        "beta1 0.9 gamma 0.1 approx",
        "beta1 0.9 gamma 0.1 exact",
        "beta1 0.9 gamma 0 clip 1",
        "beta1 0.9 gamma 0.1 approx clip 1",
        "beta1 0.9 gamma 0.1 exact clip 1",
    ]
    for sizes, halves in (
        ((4,), [[[0, 1]], [[2, 3]]]),
        ((2, 4), [[[0, 1], [10]], [[11, 12], [13]]]),
        ((3,), [[[0]], [[1]]]),  # the last of an odd number is left out
        ((1,), [[], []]),
    ):
        batches = [{"labels": 10 * index + torch.arange(size)} for index, size in enumerate(sizes)]
        assert [[part["labels"].tolist() for part in half] for half in tracking.split(batches, 2)] == halves


def trainer_of(model: nn.Module, size: int = 4) -> SimpleNamespace:
    """Return what the probe uses of a Trainer."""
    ids = torch.randint(0, 11, (16, 5), generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(device=torch.device("cpu"), per_device_train_batch_size=size),
        train_dataset=[{"labels": row} for row in ids],
        data_collator=default_data_collator,
        compute_loss_context_manager=contextlib.nullcontext,
        compute_loss=lambda model, batch: model(input_ids=batch["labels"], **batch).loss,
    )


def step(probe: TrackingProbe, trainer: SimpleNamespace, number: int, *batches: list) -> None:
    trainer.step_batches = list(map(default_data_collator, batches))
    probe.on_step_begin(trainer.args, TrainerState(global_step=number - 1), TrainerControl())


def test_passes_draw_the_same_masks_and_no_random_numbers():
    """Where no weight moves, the exact correction vanishes in spite of dropout, and the approximate one does not."""
    trainer = trainer_of(gpt2(resid_pdrop=0.1, attn_pdrop=0.1))
    probe = TrackingProbe(trainer, grid((0.9,), (0.1,), ()), every=3, batches=2)
    for number in range(1, 4):
        random_state = torch.get_rng_state()
        step(probe, trainer, number, trainer.train_dataset[4 * number :][:4])
        assert torch.equal(torch.get_rng_state(), random_state)
        torch.rand(number)
    assert all(param.grad is None for param in trainer.model.parameters())
    ratios = {row["form"]: row["variance_ratio"] for row in probe.rows if row["scope"] == "all"}
    assert ratios["exact"] == pytest.approx(1, rel=1e-4) and ratios["approx"] > 2
    roles = ("all", "matrix", "vector", "embedding")
    assert {(row["step"], row["scope"]) for row in probe.rows} == {(3, role) for role in roles}


def gradient(trainer: SimpleNamespace, model: nn.Module, samples: list) -> torch.Tensor:
    loss = trainer.compute_loss(model, default_data_collator(samples))
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])


def test_stale_gradients_of_tracking():
    """Micro-batches of a half weigh by their samples: the third one has one."""
    trainer, moment = trainer_of(gpt2(), size=2), Moment(0.5, 1.0, "exact", None)  # k = 1
    model, data, probe = trainer.model, trainer.train_dataset, TrackingProbe(trainer, [moment], every=9, batches=2)
    first, previous = gradient(trainer, model, data[:6]), copy.deepcopy(model)
    step(probe, trainer, 1, data[:3], data[3:6])
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    corrected = 2 * gradient(trainer, model, data[4:8]) - gradient(trainer, previous, data[4:8])
    step(probe, trainer, 2, data[4:8])
    torch.testing.assert_close(probe._moments.value(moment).mean(0), (first / 4 + corrected / 2) / 0.75)
    step(probe, trainer, 3, data[:1])  # a single sample has no halves
    assert probe._moments.steps == 2


def row(step: int, gamma: float, error: float) -> dict:
    numbers = dict.fromkeys(("error", "lag", "noise", "cosine", "variance_ratio", "noise_scale"), error)
    return {"step": step, "scope": "all", "beta1": 0.9, "gamma": gamma, "form": "approx", "clip": None, **numbers}


def test_tracking_conclusion():
    """Steps that drown in noise are left out; moments without clipping are compared at the beta1 of the run."""
    best = "would have tracked the gradient best here: error"
    rows = [row(step, 0.0, error) for step, error in enumerate((1.0, math.nan, 2.0, 0.5))]
    rows += [row(step, 0.1, math.nan) for step in range(4)]
    assert tracking.medians(rows)[Moment(0.9, 0.0, "approx", None)]["error"] == 1.0
    assert tracking.conclusion(rows, 0.9) == f"beta1 0.9 gamma 0 {best} 1"
    assert tracking.conclusion(rows[4:], 0.9).startswith("the gradient drowned in its noise: measure with more")
    assert "At 4 of the measured steps the gradient drowned in its noise." in tracking.table(rows[4:])
    rows = [row(1, 0.0, 0.9), row(1, 0.05, 0.7), row(1, 0.1, 0.8), {**row(1, 0.1, 0.1), "beta1": 0.99}]
    rows.append({**row(1, 0.1, 0.01), "clip": 1.0})
    assert tracking.conclusion(rows, 0.9) == f"beta1 0.9 gamma 0.05 approx {best} 0.7 (beta1 0.9 gamma 0 0.9)"
    assert tracking.conclusion(rows, 0.5).startswith(f"beta1 0.99 gamma 0.1 approx {best} 0.1")


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "beta1"), [("mars_adamw", "0.9"), ("muon", "0.95")])
def test_run_is_measured_and_not_changed(tokens, tmp_path, capsys, optimizer, beta1):
    output, argv = tmp_path / "measured", ["--optimizer", optimizer]
    grid = ["--every", "4", "--batches", "4", "--betas", "0.9", "0.95", "--gammas", "0", "0.05", "--clips", "0"]
    measured = [*grid, *TINY, "--data_dir", str(tokens), *argv, "--output_dir", str(output)]
    measure_tracking.main(measured)
    result = json.loads((output / "tracking.json").read_text())
    assert result["conclusion"].startswith(f"beta1 {beta1} gamma ")
    assert result["conclusion"] in capsys.readouterr().out
    assert {row["step"] for row in result["rows"]} == {4, 8}
    page = (output / "tracking.md").read_text()
    assert result["conclusion"] in page and "| beta1 0.95 gamma 0.05 exact |" in page and "## embedding" in page

    run(tmp_path / "plain", tokens, *argv)
    assert equal_weights(output, tmp_path / "plain")


@pytest.mark.parametrize(
    ("argv", "processes", "line"),
    [
        ("--batches 3", "1", "--every 50 --batches 3 --betas [0.9, 0.95, 0.99]: give 1 or more, an even number, and"),
        ("--betas 1.5", "1", "--every 50 --batches 64 --betas [1.5]: give 1 or more, an even number, and numbers"),
        ("--max_steps 4", "1", "--every 50: the run has 4 steps; give that or fewer"),
        ("--resume_from_checkpoint true", "1", "resume_from_checkpoint: checkpoints hold no averages"),
        ("", "2", "2 processes: a measurement runs in one; start one"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, argv, processes, line):
    monkeypatch.setenv("WORLD_SIZE", processes)
    with refused(re.escape(line)):
        measure_tracking.main([*argv.split(), "--output_dir", str(tmp_path / "run")])


# --- the shipped result ----------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def test_page_shows_the_result():
    """The whole grid is measured; moments without clipping are on the page, of the outer beta1."""
    result = json.loads((ROOT / "benchmarks" / "results" / "tracking_embedded.json").read_text())
    page = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8").replace("\\\n ", "")
    rows = [
        {name: math.nan if value is None and name != "clip" else value for name, value in row.items()}
        for row in result["rows"]
    ]
    settings, _ = measure_tracking.parse([])
    measured = tracking.medians(rows)
    assert set(measured) == set(tracking.grid(settings.betas, settings.gammas, settings.clips)) and len(measured) == 54
    assert len({row["step"] for row in rows}) == 10 and tracking.conclusion(rows, 0.9) == result["conclusion"]
    lines = [f"--{flag}" for flag in result["arguments"].removeprefix("--").split(" --")]
    left_out = (" clip ", " 0.0125", " gamma 0.05", "beta1 0.95")
    table = [line for line in tracking.table(rows).splitlines() if line.startswith("| beta1")]
    # Without the last column, Var(c) / Var(g).
    lines += [line[: line.rindex("|", 0, -1) + 1] for line in table if not any(word in line for word in left_out)]
    assert len(lines) >= 12 and [line for line in lines if line not in page] == []
