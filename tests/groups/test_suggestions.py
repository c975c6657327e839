"""What is suggested, held to what the real optimizers do: update sizes, half-lives, decay."""

from __future__ import annotations

import math

import pytest
import torch

import mars_hf
from mars_hf.groups.settings import MARS_TYPES, ORTHOGONAL_TYPES
from mars_hf.groups.suggestions import AdamW, half_life, suggest, update_rms

ADAMW = AdamW(3e-4)
WIDTH = 32
# Newton-Schulz leaves singular values of a root mean square of 0.85 to 0.95, by shape, and 0.9 is assumed.
TOLERANCES = {"mars-adamw": 0.03, "mars-lion": 0.03, "mars-shampoo": 0.08, "mars-m": 0.08}
# The matrices of a transformer's block.
SHAPES = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]


def updates(optimizer: torch.optim.Optimizer) -> float:
    """Return the RMS of late updates, lr included, from gradients that are independent from step to step.

    They are small, so that the clip of MARS does not act. Orthogonalized updates have their size from the first step.
    """
    steps, warmup, std = (8, 2, 1e-4) if optimizer.defaults.get("mars_type") in ORTHOGONAL_TYPES else (100, 70, 1e-4)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    squares = elements = 0.0
    for step in range(steps):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.randn_like(param) * std
        optimizer.step()
        if step >= warmup:
            squares += sum(float((a.detach() - b).square().sum()) for a, b in zip(params, before, strict=True))
            elements += sum(param.numel() for param in params)
    return math.sqrt(squares / elements)


def matrices() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def mars(rule: str, adamw: AdamW = ADAMW) -> mars_hf.Mars:
    settings = suggest(rule, adamw, width=WIDTH).settings
    return mars_hf.Mars(matrices(), **{**settings, "eps": 1e-12, "weight_decay": 0.0})


def torch_adamw(adamw: AdamW) -> torch.optim.AdamW:
    return torch.optim.AdamW(matrices(), lr=adamw.lr, betas=adamw.betas, eps=1e-12, weight_decay=0.0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.95, 0.99)])
@pytest.mark.parametrize("rule", MARS_TYPES)
def test_updates_are_as_large_as_those_of_adamw(rule, betas):
    adamw = AdamW(3e-4, betas)
    theirs = updates(torch_adamw(adamw))
    ours = updates(mars(rule, adamw))
    assert ours == pytest.approx(theirs, rel=TOLERANCES[rule])


@pytest.mark.parametrize("gamma", [0.0, 0.025, 0.1])
@pytest.mark.parametrize("rule", MARS_TYPES)
def test_the_size_of_an_update_is_the_predicted_one(rule, gamma):
    beta1 = 0.95
    optimizer = mars_hf.Mars(matrices(), 1e-3, (beta1, 0.99), eps=1e-12, gamma=gamma, mars_type=rule)
    measured = updates(optimizer) / 1e-3
    predicted = update_rms(rule, beta1=beta1, gamma=gamma, width=WIDTH)
    assert measured == pytest.approx(predicted, rel=TOLERANCES[rule])


@pytest.mark.parametrize("rule", MARS_TYPES)
@pytest.mark.parametrize("ratio", [pytest.param(0.25, marks=pytest.mark.slow), 4.0])
def test_another_batch_moves_weights_as_far_for_the_same_tokens(rule, ratio):
    """Compare the random walks over as many tokens as 200 steps at AdamW's batch have."""

    def walk(batch_ratio: float) -> float:
        settings = suggest(rule, ADAMW, batch_ratio=batch_ratio, width=WIDTH).settings
        param = torch.nn.Parameter(torch.zeros(48, 48))
        extra = {"eps": 1e-12, "weight_decay": 0.0, "ns_dtype": "float32"}
        optimizer = mars_hf.Mars([param], **{**settings, **extra})
        for _ in range(int(200 / batch_ratio)):
            param.grad = torch.randn_like(param) * 1e-4
            optimizer.step()
        return float(param.detach().square().mean().sqrt())

    assert walk(ratio) == pytest.approx(walk(1.0), rel=0.15)


@pytest.mark.parametrize("rule", MARS_TYPES)
def test_half_lives_are_those_of_adamw_in_tokens(rule):
    for ratio in (0.125, 1.0, 2.0, 8.0):
        settings = suggest(rule, ADAMW, batch_ratio=ratio, width=WIDTH).settings
        first, second = (half_life(beta) * ratio for beta in settings["betas"])
        assert first == pytest.approx(6.5788 * (2 if rule in ORTHOGONAL_TYPES else 1), rel=1e-4)  # 0.9 ** 6.5788 = 0.5
        assert second == pytest.approx(13.5134, rel=1e-4)  # 0.95 ** 13.5134 = 0.5
        assert half_life(settings["betas_1d"][0]) * ratio == pytest.approx(6.5788, rel=1e-4)


def test_the_same_batch_keeps_the_betas():
    settings = suggest("mars-adamw", ADAMW).settings
    assert settings["betas"] == settings["betas_1d"] == (0.9, 0.95)
    assert settings["gamma"] == 0.025
    assert suggest("mars-m", ADAMW).settings["betas"][0] == pytest.approx(0.95, abs=2e-3)  # the published one


@pytest.mark.parametrize("rule", MARS_TYPES)
def test_weights_decay_as_fast_as_under_adamw_in_tokens(rule):
    """Compare weights without gradients after the tokens of 20 steps of AdamW, at several batches."""

    def decayed(make, steps: int, **settings) -> float:
        param = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        optimizer = make([param], **settings)
        for _ in range(steps):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        return 1 - float(param.detach().mean())

    theirs = decayed(torch.optim.AdamW, 20, lr=ADAMW.lr, weight_decay=ADAMW.weight_decay)
    for ratio in (0.5, 1.0, 10.0):
        settings = suggest(rule, ADAMW, batch_ratio=ratio, width=WIDTH).settings
        assert decayed(mars_hf.Mars, int(20 / ratio), **settings) == pytest.approx(theirs, rel=1e-3)


def test_the_correction_keeps_its_strength():
    """k = gamma beta1 / (1 - beta1) over beta1, at a quarter and four times the batch."""
    shares = []
    for ratio in (0.25, 1.0, 4.0):
        settings = suggest("mars-adamw", ADAMW, batch_ratio=ratio).settings
        shares.append(settings["gamma"] / (1 - settings["betas"][0]))
    assert shares == pytest.approx([0.25] * 3)


def test_mars_m_does_not_depend_on_the_width_and_mars_shampoo_on_its_root():
    assert suggest("mars-m", ADAMW, width=64).settings["lr"] == pytest.approx(suggest("mars-m", ADAMW).settings["lr"])
    small, large = (suggest("mars-shampoo", ADAMW, width=width).settings["lr"] for width in (256, 1024))
    assert large == pytest.approx(2 * small)


def test_settings_are_those_of_create():
    """Rates by role: vectors, and what mars-m leaves out, train at AdamW's."""
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    for rule in MARS_TYPES:
        found = suggest(rule, ADAMW, width=4)
        rates = {}
        for group in mars_hf.create(model, **found.settings).param_groups:
            for name in group["param_names"]:
                rates[name] = group["lr"]
        assert rates["0.weight"] == found.lr_embeddings
        assert rates["1.weight"] == found.settings["lr"]
        assert rates["1.bias"] == rates["2.weight"] == ADAMW.lr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "mars"}, "mars_type='mars' is unknown"),
        ({"rule": "mars-shampoo"}, "give its width"),
        ({"rule": "mars-shampoo", "width": 0}, "width=0 is out of range"),
        ({"rule": "mars-m", "batch_ratio": 0.0}, "batch_ratio=0.0 is out of range"),
        ({"rule": "mars-m", "batch_ratio": math.inf}, "batch_ratio=inf is out of range"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(ValueError, match=message):
        suggest(adamw=ADAMW, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 of AdamW leaves nothing to match"),
        ({"lr": -1.0}, "lr=-1.0 is out of range"),
        ({"lr": 1e-3, "betas": (0.9, 1.0)}, r"betas\[1\]=1.0 is out of range"),
        ({"lr": 1e-3, "weight_decay": math.nan}, "weight_decay=nan is out of range"),
    ],
)
def test_mistakes_of_adamw(given, message):
    with pytest.raises(ValueError, match=message):
        AdamW(**given)


@pytest.mark.parametrize("rule", ["adamw", "mars", "mars-muon"])
def test_an_unknown_rule_is_refused(rule):
    with pytest.raises(ValueError, match=f"mars_type='{rule}' .*accepted: 'mars-adamw'"):
        update_rms(rule, beta1=0.95, gamma=0.025, width=8)
