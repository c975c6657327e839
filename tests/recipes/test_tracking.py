"""First moments where lag, noise and variances have closed forms, and the passes that give them their gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import gpt2
from pretraining.compare import tracking
from pretraining.compare.tracking import Moment, ShadowMoments, TrackingProbe, grid
from torch import nn
from transformers import TrainerControl, TrainerState, default_data_collator

import mars_hf

SIZE, STEPS = 16_000, 120  # of more elements PyTorch starts threads
NOISE = 2.0  # standard deviation of an element of a half's gradient
SPEED = 0.15  # of every element of the gradient, a step
VARIANCE = NOISE**2 / 2  # of an element of the whole batch's gradient
WHOLE = {"all": [0]}
MOMENTS = grid((0.9, 0.95), (0.0, 0.025, 0.1), ("approx", "exact"), (None,))


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
    measured = moving[moment]
    truth = SPEED * (STEPS - 1)
    behind = (1 - moment.gamma) * moment.beta1 / (1 - moment.beta1) * SPEED
    noise = noise_of(moment) * VARIANCE
    assert measured["noise"] == pytest.approx(noise / truth**2, rel=0.04)
    assert measured["lag"] == pytest.approx(behind**2 / truth**2, rel=0.04)
    assert measured["error"] == pytest.approx((behind**2 + noise) / truth**2, rel=0.04)
    assert measured["cosine"] == pytest.approx((truth - behind) / math.hypot(truth - behind, noise**0.5), rel=0.001)
    weight = moment.weight if moment.form == "approx" else 0.0
    assert measured["variance_ratio"] == pytest.approx((1 + weight) ** 2 + weight**2, rel=0.04)
    assert measured["noise_scale"] == pytest.approx(4 * VARIANCE / truth**2, rel=0.04)


def test_clipped_moments():
    """In many dimensions the norm of a corrected gradient is a constant, and clipping scales by it."""
    clipped, plain = Moment(0.9, 0.05, "approx", 50.0), Moment(0.9, 0.05, "approx", None)
    generator = torch.Generator().manual_seed(0)
    shadow = ShadowMoments([clipped, plain], [SIZE])
    for _ in range(60):
        shadow.update(1 + NOISE * torch.randn(2, SIZE, generator=generator), None, samples=4)
    measured = dict(zip(shadow.moments, shadow.measure(torch.ones(2, SIZE), WHOLE), strict=True))
    weight = clipped.weight
    factor = 50 / math.sqrt(SIZE * (1 + ((1 + weight) ** 2 + weight**2) * VARIANCE))
    assert measured[clipped]["lag"] == pytest.approx((1 - factor) ** 2, rel=0.02)
    assert measured[clipped]["noise"] == pytest.approx(noise_of(plain) * VARIANCE * factor**2, rel=0.04)
    assert measured[plain]["noise"] == pytest.approx(noise_of(plain) * VARIANCE, rel=0.04)
    loose = Moment(0.9, 0.05, "approx", 1e9)
    unclipped = follow([loose, plain], speed=SPEED, steps=5)
    assert unclipped[loose] == pytest.approx(unclipped[plain])  # clipping never lengthens


@pytest.mark.parametrize("form", ["approx", "exact"])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_moments_are_those_of_the_optimizer(form, clip):
    """The mean of the halves is exp_avg of a Mars that takes their mean gradient."""
    moment = Moment(0.9, 0.05, form, clip)
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((4, 5), (2, 3))]
    settings = {"betas": (0.9, 0.99), "gamma": 0.05, "is_approx": form == "approx", "clip_threshold": clip}
    mars = mars_hf.Mars(params, lr=0.01, **settings)
    generator = torch.Generator().manual_seed(3)

    def give(gradients):
        for param, gradient in zip(params, gradients.mean(0).split([20, 6]), strict=True):
            param.grad = gradient.view(param.shape).clone()

    shadow = ShadowMoments([moment], [20, 6])
    for step in range(6):
        gradients, stale = torch.randn(2, 2, 26, generator=generator, dtype=torch.float64)
        if step and form == "exact":
            give(stale)
            mars.update_previous_grad()
            mars.update_last_grad()
        shadow.update(gradients, stale if step else None, samples=4)
        give(gradients)
        if not step:  # MARS corrects its first gradient by a last one of zero; the probe does not
            mars.param_groups[0]["gamma"] = 0.0
        mars.step()
        mars.param_groups[0]["gamma"] = 0.05
        averages = torch.cat([mars.state[param]["exp_avg"].flatten() for param in params])
        torch.testing.assert_close(shadow.value(moment).mean(0), averages / (1 - 0.9 ** (step + 1)))


def test_grid_has_each_moment_once():
    moments = grid((0.9,), (0.0, 0.1, 0.1), ("exact", "approx"), (None, 1.0, 1.0))
    assert [str(moment) for moment in moments] == [
        *("beta1 0.9 gamma 0", "beta1 0.9 gamma 0.1 exact", "beta1 0.9 gamma 0.1 approx"),
        *("beta1 0.9 gamma 0 clip 1", "beta1 0.9 gamma 0.1 exact clip 1", "beta1 0.9 gamma 0.1 approx clip 1"),
    ]


def batches(*sizes):
    return [{"labels": 10.0 * index + torch.arange(float(size))} for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "halves", "samples"),
    [
        ((4,), ([[0, 1]], [[2, 3]]), 4),
        ((2, 4), ([[0], [10, 11]], [[1], [12, 13]]), 16 / 3),
        ((3,), ([[0]], [[1, 2]]), 8 / 3),
        ((1, 1), ([[0]], [[10]]), 2),
        ((1, 1, 1), ([[0], [20]], [[10]]), 8 / 3),
        ((2, 1), ([[0, 1]], [[10]]), 8 / 3),
    ],
)
def test_split(sizes, halves, samples):
    parts = tracking.split(batches(*sizes))
    assert [[part["labels"].tolist() for part in half] for half in parts] == [list(half) for half in halves]
    # Of samples with variance 1, the mean of the halves has variance 1 / samples.
    weights = [1 / (2 * len(half) * len(part)) for half in halves for part in half for _ in part]
    assert sum(weight**2 for weight in weights) == pytest.approx(1 / samples)
    assert tracking.samples_of(parts) == pytest.approx(samples)


def trainer_of(model: nn.Module, size: int = 4) -> SimpleNamespace:
    """Return what the probe uses of a Trainer."""
    samples = [{"labels": torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(i))} for i in range(16)]
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(device=torch.device("cpu"), per_device_train_batch_size=size),
        train_dataset=samples,
        data_collator=default_data_collator,
        compute_loss_context_manager=contextlib.nullcontext,
        compute_loss=lambda model, batch: model(input_ids=batch["labels"], **batch).loss,
        step_batches=[default_data_collator(samples[:size])],
    )


def step(probe: TrackingProbe, trainer: SimpleNamespace, number: int) -> None:
    probe.on_step_begin(trainer.args, TrainerState(global_step=number - 1), TrainerControl())


def test_passes_change_nothing_and_draw_the_same_masks():
    """Where no weight moves, the exact correction vanishes in spite of dropout, and the approximate one does not."""
    model = gpt2(resid_pdrop=0.1, attn_pdrop=0.1)
    trainer = trainer_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    probe = TrackingProbe(trainer, grid((0.9,), (0.1,), ("approx", "exact"), (None,)), every=3, batches=2)
    for number in range(1, 4):
        torch.set_rng_state(random_state)
        torch.rand(number)
        expected = torch.get_rng_state()
        trainer.step_batches = [default_data_collator(trainer.train_dataset[4 * number :][:4])]
        step(probe, trainer, number)
        assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    ratios = {row["form"]: row["variance_ratio"] for row in probe.rows if row["scope"] == "all"}
    assert ratios["exact"] == pytest.approx(1, rel=1e-4) and ratios["approx"] > 2
    assert {row["step"] for row in probe.rows} == {3}
    assert {row["scope"] for row in probe.rows} == {"all", "matrix", "vector", "embedding", "layer 0", "layer 1"}


def test_stale_gradients_are_those_of_the_same_batch_at_the_previous_parameters():
    model = gpt2()
    trainer = trainer_of(model)
    moment = Moment(0.5, 1.0, "exact", None)  # k = 1
    probe = TrackingProbe(trainer, [moment], every=9, batches=2)

    def gradient(model):
        loss = trainer.compute_loss(model, trainer.step_batches[0])
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])

    first, previous = gradient(model), copy.deepcopy(model)
    step(probe, trainer, 1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    trainer.step_batches = [default_data_collator(trainer.train_dataset[4:8])]
    step(probe, trainer, 2)
    corrected = 2 * gradient(model) - gradient(previous)
    torch.testing.assert_close(probe._moments.value(moment).mean(0), (first / 4 + corrected / 2) / 0.75)


@pytest.mark.parametrize(("sizes", "measured"), [((1,), 0), ((1, 1), 1), ((3,), 1)])
def test_steps_of_few_samples(sizes, measured):
    """A single sample has no halves, and its step is left out."""
    trainer = trainer_of(gpt2(), size=2)
    trainer.step_batches = [default_data_collator(trainer.train_dataset[:size]) for size in sizes]
    probe = TrackingProbe(trainer, grid((0.9,), (0.0,), ("approx",), (None,)), every=1, batches=2)
    step(probe, trainer, 1)
    assert len({row["step"] for row in probe.rows}) == measured


@pytest.mark.parametrize(
    ("group", "beta1"), [({"betas": (0.8, 0.95)}, 0.8), ({"momentum": 0.5}, 0.5), ({"lr": 0.1}, None)]
)
def test_beta1_is_that_of_matrices(group, beta1):
    trainer = trainer_of(gpt2())
    trainer.optimizer = SimpleNamespace(
        param_groups=[{"role": "vector", "betas": (0.7, 0.9)}, {"role": "matrix", **group}]
    )
    assert TrackingProbe(trainer, [], every=1, batches=2).beta1 == beta1


def row(step: int, gamma: float, error: float) -> dict:
    numbers = dict.fromkeys(("error", "lag", "noise", "cosine", "variance_ratio", "noise_scale"), error)
    return {"step": step, "scope": "all", "beta1": 0.9, "gamma": gamma, "form": "approx", "clip": None, **numbers}


def test_steps_whose_gradient_drowns_in_noise_are_left_out():
    rows = [row(step, 0.0, error) for step, error in enumerate((1.0, math.nan, 2.0, 0.5))]
    rows += [row(step, 0.1, math.nan) for step in range(4)]
    assert tracking.medians(rows)[Moment(0.9, 0.0, "approx", None)]["error"] == 1.0
    assert tracking.conclusion(rows) == "beta1 0.9 gamma 0 would have tracked the gradient best here: error 1"
    assert tracking.conclusion(rows[4:]).startswith("the gradient drowned in its noise: measure with more")
    assert "At 4 of the measured steps the gradient drowned in its noise." in tracking.table(rows[4:])


def test_conclusion_compares_moments_at_the_beta1_of_the_run():
    rows = [row(1, 0.0, 0.9), row(1, 0.05, 0.7), row(1, 0.1, 0.8), {**row(1, 0.1, 0.1), "beta1": 0.99}]
    best = "would have tracked the gradient best here: error"
    compared = f"beta1 0.9 gamma 0.05 approx {best} 0.7 (beta1 0.9 gamma 0 0.9)"
    assert tracking.conclusion(rows, 0.9) == compared
    for beta1 in (None, 0.5):
        assert tracking.conclusion(rows, beta1).startswith(f"beta1 0.99 gamma 0.1 approx {best} 0.1")
