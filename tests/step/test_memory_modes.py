"""States kept, their dtypes and bytes; modes that keep less still match MARS."""

from __future__ import annotations

import pytest
import torch
from helpers import mars_of, needs_compiler
from torch import nn

from mars_hf import Mars

SHAPES = ((40, 30), (17, 9), (6,))
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES[:2])


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(params: list[nn.Parameter], optimizer: Mars, steps: int = 30) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def bytes_of(optimizer: Mars, params: list[nn.Parameter]) -> float:
    """Return the bytes of state per element of the matrices."""
    states = [state for param in params[:2] for key, state in optimizer.state[param].items() if key != "step"]
    return sum(tensor.numel() * tensor.element_size() for tensor in states) / ELEMENTS


# --- without a last gradient ------------------------------------------------------------------------------------


class Plain:
    """Return m_t from the corrected gradients, in float64."""

    def __init__(self, x, *, gamma, lr, betas, lion, weight_decay=0.1):
        self.x, self.lr, self.betas, self.lion, self.decay = x.double().clone(), lr, betas, lion, weight_decay
        self.k = gamma * betas[0] / (1 - betas[0])
        self.m = self.v = self.last = torch.zeros_like(self.x)
        self.t = 0

    def step(self, g):
        g, (b1, b2) = g.double(), self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * (g + self.k * (g - self.last))
        self.v = b2 * self.v + (1 - b2) * g * g
        self.last = g
        root = (self.v / (1 - b2**self.t)).sqrt() + 1e-8
        direction = self.m.sign() if self.lion else self.m / (1 - b1**self.t) / root
        self.x = self.x - self.lr * (direction + self.decay * self.x)


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("gamma", [0.0, 0.025, 1.0])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
def test_the_recursion_is_the_plain_form(mars_type, gamma, fused):
    params = [nn.Parameter(param.detach().double()) for param in make_params()]
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "gamma": gamma}
    plain = [Plain(param.detach(), lion=mars_type == "mars-lion", **settings) for param in params[:2]]
    optimizer = Mars(
        params, **settings, weight_decay=0.1, mars_type=mars_type, clip_threshold=None, second_moment="gradient",
        fused=fused,
    )  # fmt: skip
    for step in range(30):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + index)
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        for rule, param in zip(plain, params[:2], strict=True):
            rule.step(param.grad)
        optimizer.step()
    for rule, param in zip(plain, params[:2], strict=True):
        torch.testing.assert_close(param.detach(), rule.x, rtol=1e-6, atol=1e-9)
        assert "last_grad" not in optimizer.state[param]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 12),
        ({"state_dtype": torch.bfloat16}, 6),
        ({"state_dtype": "bfloat16"}, 6),
        ({"second_moment": "gradient"}, 12),  # the norm that is clipped needs the last gradient
        ({"second_moment": "gradient", "clip_threshold": None}, 8),  # AdamW's
        ({"clip_threshold": None}, 12),
        ({"mars_type": "mars-lion"}, 8),
        ({"mars_type": "mars-lion", "clip_threshold": None}, 4),  # Lion's
        ({"mars_type": "mars-shampoo"}, 8),
        ({"mars_type": "mars-m", "clip_threshold": None, "amsgrad": True}, 4),  # Muon's
        ({"amsgrad": True}, 16),
        ({"take_grad": True}, 12),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_compiler), False])
def test_bytes_of_state(settings, expected, fused):
    params = make_params()
    optimizer = mars_of(params, fused=fused, **settings)
    run(params, optimizer, 2)
    assert bytes_of(optimizer, params) == pytest.approx(expected, abs=0.02)  # last_grad_scale is a number a parameter


def test_a_state_with_a_last_gradient_goes_on_with_it():
    """Turning clipping off in mid-run never changes the form of the state."""
    results = []
    for threshold in (None, 1e9):
        params = make_params()
        optimizer = Mars(params, mars_type="mars-lion", clip_threshold=1e9, fused=False)
        run(params, optimizer, 3)
        for group in optimizer.param_groups:
            group["clip_threshold"] = threshold
        run(params, optimizer, 3)
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- lower precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_compiler), False])
def test_lower_precision_states_stay_close(fused):
    weights = []
    for settings in ({}, {"state_dtype": "bfloat16"}):
        params = make_params()
        run(params, Mars(params, lr=1e-3, fused=fused, **settings))
        weights.append(torch.cat([param.detach().flatten() for param in params[:2]]))
    moved = (weights[0] - torch.cat([param.detach().flatten() for param in make_params()[:2]])).norm()
    assert 0 < (weights[1] - weights[0]).norm() < 0.2 * moved


def test_dtypes_survive_saving(tmp_path):
    settings = {"state_dtype": "float32"}
    params = make_params(torch.bfloat16)
    optimizer = Mars(params, rounding="kahan", **settings)
    run(params, optimizer, 2)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = Mars(make_params(torch.bfloat16), rounding="kahan", **settings)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert {key: (value.dtype, value.shape) for key, value in a.items()} == {
            key: (value.dtype, value.shape) for key, value in b.items()
        }
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert a["compensation"].dtype == torch.bfloat16


# --- rounding of bfloat16 parameters ------------------------------------------------------------------------------


def descend(rounding: str, fused: bool, steps: int = 400) -> float:
    """Steps from 100 towards 0 are 0.05, a fifth of half a bfloat16 unit there (0.25)."""
    param = nn.Parameter(torch.full((64, 4), 100.0, dtype=torch.bfloat16))
    optimizer = Mars([param], lr=0.05, mars_type="mars-lion", rounding=rounding, fused=fused)
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return param.detach().float().mean().item()


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_compiler), False])
def test_small_steps_add_up(fused):
    assert descend("nearest", fused) == 100.0  # every step is lost
    assert descend("kahan", fused) == pytest.approx(80.0, abs=0.3)
    assert descend("stochastic", fused) == pytest.approx(80.0, abs=0.5)  # 256 elements: +-0.08 is one deviation


def test_kahan_follows_float32():
    wide, narrow = make_params(), make_params(torch.bfloat16)
    for a, b in zip(wide, narrow, strict=True):
        a.data.copy_(b.float())
    for params in (wide, narrow):
        optimizer = Mars(params, lr=1e-4, rounding="kahan")
        for step in range(50):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(param.dtype)
            optimizer.step()
    for a, b in zip(wide, narrow, strict=True):
        whole = b.detach().float() + optimizer.state[b]["compensation"].float()
        assert (whole - a).abs().max() <= 2**-14 * a.abs().max()


def test_stochastic_rounding_repeats():
    """The seed follows from the step number, so replicas and resumed runs round alike."""
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        params = make_params(torch.bfloat16)
        run(params, Mars(params, lr=1e-3, rounding="stochastic"), 5)
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- temporary memory -------------------------------------------------------------------------------------------


def largest_allocation(function) -> int:
    """Return the bytes of the largest block that PyTorch allocates during a call, compiled code included."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def test_the_measure_sees_allocations():
    a = torch.ones(300, 300)
    assert largest_allocation(lambda: a + a) == 300 * 300 * 4


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.float32, {"max_grad_norm": 1.0}),
        (torch.float32, {"take_grad": True}),
        (torch.bfloat16, {"rounding": "stochastic"}),
    ],
    ids=str,
)
def test_the_compiled_step_makes_no_copy_of_a_parameter(dtype, settings):
    params = [nn.Parameter(torch.randn(300, 300).to(dtype)), nn.Parameter(torch.randn(5).to(dtype))]
    optimizer = mars_of(params, fused=True, **settings)

    def backward():
        for param in params:
            param.grad = torch.ones_like(param)

    for _ in range(2):  # states are made
        backward()
        optimizer.step()
    backward()
    assert largest_allocation(optimizer.step) < 300 * 300
