"""First moments on a quadratic with known noise, where lag, noise and variances have closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mars_hf
from mars_hf.training.shadow_moments import Moment, ShadowMoments, Sums, grid

SIZE = 60_000
STEPS = 250
NOISE = 2.0  # standard deviation of an element of a half's gradient
CURVATURE, SPEED = 3.0, 0.05  # the gradient moves by their product a step, in every element


def follow(moments, speed=0.0, steps=STEPS):
    """Follow moments along x_t = t * speed with gradients CURVATURE * x_t + noise; return the sums at the last x_t."""
    generator = torch.Generator().manual_seed(0)
    shadow = ShadowMoments(moments)
    for step in range(steps):
        noises = [NOISE * torch.randn(SIZE, generator=generator) for _ in range(2)]
        here, before = (CURVATURE * speed * when for when in (step, step - 1))
        gradients = tuple([noise + here] for noise in noises)
        stale = tuple([noise + before] for noise in noises) if step else None
        shadow.update(gradients, stale)
    truth = torch.full((SIZE,), CURVATURE * speed * (steps - 1))
    return {moment: sums[0] for moment, sums in shadow.measure(([truth], [truth])).items()}


MOMENTS = grid((0.9, 0.95), (0.0, 0.025, 0.1), (True, False), (None,))
VARIANCE = NOISE**2 / 2 * SIZE  # of the whole batch's gradient


def noise_of(moment: Moment) -> float:
    """Return the variance of the first moment in units of the gradient's.

    Approx: m = (1 - gamma) e + gamma g, e being the average, with variance (1 - beta1) / (1 + beta1), and covariance
    1 - beta1 with g. Exact: the noise of c is that of g.
    """
    beta1, gamma = moment.beta1, moment.gamma if moment.is_approx else 0.0
    average = (1 - beta1) / (1 + beta1)
    return (1 - gamma) ** 2 * average + gamma**2 + 2 * gamma * (1 - gamma) * (1 - beta1)


@pytest.fixture(scope="module")
def still():
    return follow(MOMENTS)


@pytest.fixture(scope="module")
def moving():
    return follow(MOMENTS, SPEED)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_noise_and_variances_have_their_closed_forms(still, moment):
    found = still[moment]
    assert found.noise == pytest.approx(noise_of(moment) * VARIANCE, rel=0.02)
    weight = moment.weight if moment.is_approx else 0.0
    assert found.tracking["variance_ratio"] == pytest.approx((1 + weight) ** 2 + weight**2, rel=0.02)
    assert abs(found.lag) < 0.05 * found.noise  # the truth stands still; six standard deviations


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_lag_has_its_closed_form(moving, moment):
    """Of an average, beta1 / (1 - beta1) steps; either correction takes the share gamma off."""
    found = moving[moment]
    behind = (1 - moment.gamma) * moment.beta1 / (1 - moment.beta1) * CURVATURE * SPEED
    assert found.lag == pytest.approx(behind**2 * SIZE, rel=0.02)
    assert found.noise == pytest.approx(noise_of(moment) * VARIANCE, rel=0.02)
    truth = CURVATURE * SPEED * (STEPS - 1)
    tracking = found.tracking
    assert tracking["error"] == pytest.approx((behind**2 + noise_of(moment) * VARIANCE / SIZE) / truth**2, rel=0.02)
    length = math.sqrt((truth - behind) ** 2 + noise_of(moment) * VARIANCE / SIZE)
    assert tracking["cosine"] == pytest.approx((truth - behind) / length, rel=0.001)


def test_the_numbers_of_the_paper_settings(still):
    """Approx at (0.95, 0.025) has 2.40 times the variance in c, and 0.0274 of the gradient's in m; AdamW 0.0256."""
    mars, adamw = Moment(0.95, 0.025, True, None), Moment(0.95, 0.0, True, None)
    found = still
    assert found[mars].tracking["variance_ratio"] == pytest.approx(2.40, rel=0.02)
    assert found[mars].noise / VARIANCE == pytest.approx(0.0274, rel=0.02)
    assert found[adamw].noise / VARIANCE == pytest.approx(0.0256, rel=0.02)


@pytest.mark.parametrize("is_approx", [True, False])
@pytest.mark.parametrize("clip_threshold", [None, 3.0])
def test_a_moment_is_that_of_the_optimizer(is_approx, clip_threshold):
    """The mean of the halves is exp_avg of a Mars that takes their mean gradient."""
    moment = Moment(0.9, 0.05, is_approx, clip_threshold)
    param = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    settings = {"betas": (0.9, 0.99), "gamma": 0.05, "is_approx": is_approx, "clip_threshold": clip_threshold}
    mars = mars_hf.Mars([param], lr=0.01, **settings)
    generator = torch.Generator().manual_seed(3)

    def draw():
        return torch.randn(4, 5, generator=generator, dtype=torch.float64)

    shadow = ShadowMoments([moment])
    for step in range(6):
        halves, old = (draw(), draw()), (draw(), draw())
        stale = tuple([half] for half in old) if step else None
        if step and not is_approx:
            param.grad = (old[0] + old[1]) / 2
            mars.update_previous_grad()
            mars.update_last_grad()
        shadow.update(tuple([half] for half in halves), stale)
        param.grad = (halves[0] + halves[1]) / 2
        if not step:  # MARS corrects its first gradient by a last one of zero; the probe does not
            mars.param_groups[0]["gamma"] = 0.0
        mars.step()
        mars.param_groups[0]["gamma"] = 0.05
        (state,) = mars.state.values()
        found = shadow.measure(([torch.zeros(4, 5)], [torch.zeros(4, 5)]))[moment][0].moment
        debias = 1 / (1 - 0.9 ** (step + 1))
        assert found == pytest.approx(float((state["exp_avg"] * debias).square().sum()), rel=1e-9)


def test_a_clip_never_lengthens_a_moment():
    clipped, plain = Moment(0.9, 0.05, True, 1.0), Moment(0.9, 0.05, True, None)
    found = follow([clipped, plain], steps=20)
    assert found[clipped].moment <= 1.0 < found[plain].moment


def test_sums_add_up():
    one, two = Sums(1, 2, 3, 4, 5, 6, 7), Sums(10, 20, 30, 40, 50, 60, 70)
    assert one + two == Sums(11, 22, 33, 44, 55, 66, 77)
    assert math.isnan(Sums().tracking["error"])


def test_stale_gradients_are_demanded():
    shadow = ShadowMoments([Moment(0.9, 0.05, False, None)])
    shadow.update(([torch.ones(2)], [torch.ones(2)]))
    with pytest.raises(ValueError, match="stale gradients"):
        shadow.update(([torch.ones(2)], [torch.ones(2)]))
    with pytest.raises(RuntimeError, match="no step"):
        ShadowMoments([]).measure(([], []))


def test_a_setting_given_twice_counts_once():
    once, twice = (
        grid((0.9,), (0.0, 0.1), (True,), (None, 1.0)),
        grid((0.9,), (0.0, 0.1, 0.1), (True,), (None, 1.0, 1.0)),
    )
    assert once == twice
    assert follow(once, steps=3) == follow([*once, *once], steps=3)
