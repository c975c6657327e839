"""Dtypes and bytes of states, and how bfloat16 parameters are rounded."""

from __future__ import annotations

import pytest
import torch
from helpers import equal, mars_of, needs_compiler
from torch import nn

from mars_hf import Mars

SHAPES = ((40, 30), (17, 9), (6,))
every_implementation = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_compiler)])


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(params: list[nn.Parameter], optimizer: Mars, steps: int = 30) -> list[nn.Parameter]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
        optimizer.step()
    return params


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
@every_implementation
def test_bytes_of_state(settings, expected, fused):
    """Per element of the matrices."""
    params = parameters()
    optimizer = mars_of(params, fused=fused, **settings)
    run(params, optimizer, 2)
    states = [state for param in params[:2] for key, state in optimizer.state[param].items() if key != "step"]
    assert sum(state.nbytes for state in states) / (1200 + 153) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("rounding", ["nearest", "kahan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_implementation
def test_low_precision_is_rounded_once(dtype, rounding, fused):
    """A step equals one on float32 copies, from the same states, rounded at its end."""
    params = parameters(dtype)
    optimizer = Mars(params, lr=0.05, rounding=rounding, fused=fused)
    run(params, optimizer, 3)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    if rounding == "kahan" and dtype == torch.bfloat16:
        for param, x in zip(params, wide, strict=True):
            x.data += optimizer.state[param]["compensation"].float()
    has_kernels = dtype == torch.bfloat16 and rounding == "nearest"
    twin = Mars(wide, lr=0.05, fused=fused and has_kernels)
    for param, x in zip(params, wide, strict=True):
        twin.state[x] = {key: value.clone() for key, value in optimizer.state[param].items() if key != "compensation"}
    for params_of, each in ((params, optimizer), (wide, twin)):
        run(params_of, each, 1)
    for param, x in zip(params, wide, strict=True):
        assert torch.equal(param.detach(), x.detach().to(dtype))
        kept = {key: value for key, value in optimizer.state[param].items() if key != "compensation"}
        assert equal(kept, dict(twin.state[x]))
        if rounding == "kahan" and dtype == torch.bfloat16:
            assert torch.equal(optimizer.state[param]["compensation"], (x - param.float()).bfloat16())


@every_implementation
def test_lower_precision_states_stay_close(fused):
    weights = []
    for settings in ({}, {"state_dtype": "bfloat16"}):
        params = parameters()
        run(params, Mars(params, lr=1e-3, fused=fused, **settings))
        weights.append(torch.cat([param.detach().flatten() for param in params[:2]]))
    moved = (weights[0] - torch.cat([param.detach().flatten() for param in parameters()[:2]])).norm()
    assert 0 < (weights[1] - weights[0]).norm() < 0.2 * moved


@pytest.mark.parametrize(("mars_type", "start", "end"), [("mars-lion", 100.0, 95.0), ("mars-m", 100.0, None)])
@every_implementation
def test_small_steps_add_up(fused, mars_type, start, end):
    """Steps of 0.05 from 100 are a tenth of a bfloat16 unit there: nearest loses all of them."""
    ends = {}
    for rounding, dtype in (
        ("nearest", torch.float32),
        *((r, torch.bfloat16) for r in ("nearest", "kahan", "stochastic")),
    ):
        param = nn.Parameter(torch.full((32, 32), start, dtype=dtype))
        lr = 0.05 if mars_type == "mars-lion" else 1.0
        optimizer = Mars([param], lr=lr, mars_type=mars_type, rounding=rounding, fused=fused)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        ends[rounding, dtype] = param.detach().float().mean().item()
    expected = ends.pop(("nearest", torch.float32))
    assert expected == pytest.approx(95.0, abs=1e-3) if end else expected < 98
    assert ends["nearest", torch.bfloat16] == start
    assert ends["kahan", torch.bfloat16] == pytest.approx(expected, abs=0.26)  # half a unit in the last place
    assert ends["stochastic", torch.bfloat16] == pytest.approx(expected, abs=0.15)


def test_kahan_follows_float32():
    wide, narrow = parameters(), parameters(torch.bfloat16)
    for a, b in zip(wide, narrow, strict=True):
        a.data.copy_(b.float())
    run(wide, Mars(wide, lr=1e-4), 50)
    optimizer = Mars(narrow, lr=1e-4, rounding="kahan")
    run(narrow, optimizer, 50)
    for a, b in zip(wide, narrow, strict=True):
        whole = b.detach().float() + optimizer.state[b]["compensation"].float()
        assert (whole - a).abs().max() <= 2**-14 * a.abs().max()


@pytest.mark.parametrize(
    "rule", [{"mars_type": "mars-lion"}, {"mars_type": "mars-m"}, {"second_moment": "gradient"}], ids=str
)
def test_gamma_may_not_change_without_last_gradients(rule):
    """Of any parameter of a group that keeps none, also of one without a state; a threshold neither."""
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    mars = Mars(params, clip_threshold=None, gamma=0.5, **rule)
    params[0].grad = torch.ones(3, 2)
    mars.step()
    params[1].grad = torch.ones(3, 2)
    for key, value, message in (("gamma", 0.0, "gamma=0.0 after steps with 0.5"), ("clip_threshold", 0.5, "=0.5 and")):
        before = mars.param_groups[0][key]
        mars.param_groups[0][key] = value
        with pytest.raises(RuntimeError, match=message):
            mars.step()
        assert params[1] not in mars.state and mars.state[params[0]]["step"] == 1
        mars.param_groups[0][key] = before
    mars.step()
    assert mars.state[params[1]]["step"] == 1


def test_turning_clipping_off_keeps_the_form_of_the_state():
    runs = []
    for threshold in (None, 1e9):
        params = parameters()
        optimizer = Mars(params, mars_type="mars-lion", clip_threshold=1e9, fused=False)
        run(params, optimizer, 3)
        for group in optimizer.param_groups:
            group["clip_threshold"] = threshold
        runs.append(run(params, optimizer, 3))
    assert all(map(torch.equal, *runs))
