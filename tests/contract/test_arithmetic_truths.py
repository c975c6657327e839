"""Overflowing sums, NaN that must show, logging that must not interfere, outdated norms and scales."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import mars_of
from mars_info import EVERY_IMPLEMENTATION, IMPLEMENTATIONS, equal, needs_compiler
from reference import Reference
from torch import Tensor, nn

from mars_hf import Mars

TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
every_type = pytest.mark.parametrize("mars_type", TYPES)
every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)
LR, LR_1D = 0.01, 0.005


def references(params: list[nn.Parameter], **settings: Any) -> list[Reference]:
    """Compute a step in straight-line float64: the given rule for matrices, AdamW for vectors."""
    rule = settings.pop("rule", "mars-adamw")
    return [
        Reference(param, rule=rule, lr=LR, betas=(0.95, 0.99), **settings)
        if param.ndim > 1
        else Reference(param, rule="adamw", lr=LR_1D, betas=(0.9, 0.95))
        for param in params
    ]


def assert_close(params: list[nn.Parameter], lines: list[Reference], tolerance: float = 1e-5) -> None:
    for param, line in zip(params, lines, strict=True):
        torch.testing.assert_close(param.detach().double(), line.x, rtol=tolerance, atol=tolerance)


def normal(shape: Any, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- norms that squares in float32 and float16 cannot hold ------------------------------------------------------


@pytest.mark.parametrize("take_grad", [False, True])
@pytest.mark.parametrize("where", ["matrix", "vector", "everywhere"])
@pytest.mark.parametrize("size", [1e19, 3e37])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
@every_implementation
def test_one_large_gradient_is_clipped_to_the_global_norm(implementation, mars_type, size, where, take_grad):
    """The step matches clip_grad_norm_ in float64 and a step after it."""
    params = [nn.Parameter(normal((6, 5), 1)), nn.Parameter(normal((7,), 2))]
    settings = {"mars_type": mars_type, "take_grad": take_grad, **IMPLEMENTATIONS[implementation]}
    optimizer = mars_of(params, lr=LR, max_grad_norm=1.0, **settings)
    lines = references(params, rule=mars_type)
    for step in range(3):
        gradients = [normal(param.shape, 10 * step + param.ndim) for param in params]
        if step == 1:
            for gradient, place in zip(gradients, ("matrix", "vector"), strict=True):
                if where in (place, "everywhere"):
                    gradient[..., 0] = size
        norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
        factor = min(1.0, 1.0 / (norm.item() + 1e-6))
        for param, line, gradient in zip(params, lines, gradients, strict=True):
            param.grad = gradient.clone()
            line.step(gradient.double() * factor)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-5, atol=0)
        assert_close(params, lines)


@pytest.mark.parametrize("size", [1e19, 1e25, 3e37])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
@every_implementation
def test_one_large_gradient_is_clipped_on_its_own(implementation, mars_type, size):
    """Clipping scales to the threshold, not to zero."""
    params = [nn.Parameter(normal((6, 5), 1))]
    optimizer = Mars(params, lr=LR, mars_type=mars_type, **IMPLEMENTATIONS[implementation])
    lines = references(params, rule=mars_type)
    for step in range(3):
        gradient = 0.1 * normal((6, 5), 10 * step)
        if step == 1:
            gradient[2, 3] = size
        params[0].grad = gradient.clone()
        lines[0].step(gradient)
        optimizer.step()
        if mars_type == "mars-adamw":
            assert_close(params, lines)
        assert torch.isfinite(params[0]).all()
        # Lion's sign is undetermined if the first moment is a difference of two numbers that cancel.
        torch.testing.assert_close(
            optimizer.state[params[0]]["exp_avg"].double(), lines[0].m, rtol=1e-4, atol=1e-6 * lines[0].m.abs().max()
        )


@every_implementation
def test_large_gradients_in_float64(implementation):
    """The norm overflows float32."""
    params = [nn.Parameter(normal((6, 5), 1, torch.float64)), nn.Parameter(normal((7,), 2, torch.float64))]
    optimizer = Mars(params, lr=LR, max_grad_norm=1.0, **IMPLEMENTATIONS[implementation])
    lines = references(params)
    for param, line in zip(params, lines, strict=True):
        param.grad = torch.full_like(param, 1e100)
        line.step(torch.full_like(param, 1 / math.sqrt(37)))
    optimizer.step()
    assert optimizer.grad_norm.item() in (pytest.approx(1e100 * math.sqrt(37)), math.inf)  # as float64, or as float32
    assert_close(params, lines, 1e-6)


@pytest.mark.parametrize("shape", [(1000,), (40, 25)], ids=str)
@every_implementation
def test_norms_above_256_in_float16(implementation, shape):
    """Squares of float16 numbers overflow float16, whose largest number is 65504."""
    params = [nn.Parameter(normal(shape, 1, torch.float16))]
    optimizer = Mars(params, lr=LR, max_grad_norm=1.0, state_dtype="float16", **IMPLEMENTATIONS[implementation])
    gradient = 100 * normal(shape, 2, torch.float16)
    norm = gradient.double().norm()
    assert norm > 256
    for _ in range(3):
        params[0].grad = gradient.clone()
        before = params[0].detach().clone()
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-3)
        assert torch.isfinite(params[0]).all()
        assert (params[0].double() - before.double()).norm() > 0.1 * LR_1D


@pytest.mark.parametrize("shape", [(1000,), (40, 25)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_implementation
def test_low_precision_rounds_the_result_and_not_the_scaled_gradient(implementation, dtype, shape):
    """Gradients are scaled to the global norm in float32: a state is off by at most half a unit in its last place."""
    param = nn.Parameter(normal(shape, 1, dtype))
    settings = {"max_grad_norm": 0.7, "clip_threshold": None, "betas_1d": (0.95, 0.99)}
    optimizer = Mars([param], state_dtype=dtype, **settings, **IMPLEMENTATIONS[implementation])
    gradient = normal(shape, 2, dtype)
    param.grad = gradient.clone()
    optimizer.step()
    g = gradient.double() * (0.7 / (gradient.double().norm() + 1e-6))
    c = g if len(shape) == 1 else g * (1 + 0.025 * 0.95 / 0.05)
    info = torch.finfo(dtype)
    for key, expected in (("exp_avg", 0.05 * c), ("exp_avg_sq", 0.01 * c**2)):
        found = optimizer.state[param][key]
        assert found.dtype == dtype
        half = info.eps / 2
        torch.testing.assert_close(found.double(), expected, rtol=half + 1e-5, atol=info.smallest_normal * half)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
@every_implementation
def test_matrices_in_float16_are_clipped_on_their_own(implementation, mars_type):
    params = [nn.Parameter(normal((40, 25), 1, torch.float16))]
    optimizer = Mars(params, lr=LR, mars_type=mars_type, state_dtype="float16", **IMPLEMENTATIONS[implementation])
    gradient = 100 * normal((40, 25), 2, torch.float16)
    params[0].grad = gradient.clone()
    optimizer.step()
    expected = 0.05 * gradient.double() / gradient.double().norm()  # 1 - beta1, of c_1 clipped to 1
    torch.testing.assert_close(
        optimizer.state[params[0]]["exp_avg"].double(), expected, rtol=5e-3, atol=expected.abs().max().item() * 1e-2
    )


# --- NaN --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_threshold": None}, {"max_grad_norm": 1.0}, {"optimize_1d": True}, {"weight_decay": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_type
@every_implementation
def test_nan_shows_in_the_parameter(implementation, mars_type, dtype, settings):
    """NaN appears where the gradient has it, as in torch.optim.AdamW; the sign of NaN is not 0."""
    params = [nn.Parameter(normal((6, 5), 1, dtype)), nn.Parameter(normal((7,), 2, dtype))]
    optimizer = Mars(params, mars_type=mars_type, **settings, **IMPLEMENTATIONS[implementation])
    for step in range(3):
        for param in params:
            param.grad = normal(param.shape, step, dtype)
            if step == 1:
                param.grad[..., 2] = float("nan")
        optimizer.step()
    for param in params:
        assert torch.isnan(param[..., 2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_implementation
def test_without_clipping_lion_keeps_nan_to_its_element(implementation, dtype):
    param = nn.Parameter(normal((6, 5), 1, dtype))
    optimizer = Mars([param], mars_type="mars-lion", clip_threshold=None, **IMPLEMENTATIONS[implementation])
    param.grad = normal((6, 5), 2, dtype)
    param.grad[2, 3] = float("nan")
    optimizer.step()
    expected = torch.zeros(6, 5, dtype=torch.bool)
    expected[2, 3] = True
    assert torch.equal(torch.isnan(param), expected)


@every_implementation
def test_lion_at_zero(implementation):
    """sign(0) = 0: the guard for NaN leaves it alone."""
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = Mars([param], lr=0.5, mars_type="mars-lion", clip_threshold=None, **IMPLEMENTATIONS[implementation])
    param.grad = torch.tensor([0.0, -0.0, 1e30, -1e-30]).repeat(4, 1)
    optimizer.step()
    assert torch.equal(param, torch.tensor([1.0, 1.0, 0.5, 1.5]).repeat(4, 1))


# --- logging and noise ------------------------------------------------------------------------------------------


def trained(measured: Callable[[int], bool], dtype: torch.dtype, **settings: Any) -> tuple[list[Tensor], Mars]:
    shapes = ((12, 10), (12, 10), (9,), (8, 12))
    params = [nn.Parameter(normal(shape, index, dtype)) for index, shape in enumerate(shapes)]
    optimizer = Mars(params, lr=LR, **settings)
    for step in range(3):
        optimizer.collect_metrics(measured(step))
        for index, param in enumerate(params):
            param.grad = normal(param.shape, 100 * step + index, dtype)
        optimizer.step()
    return [param.detach() for param in params], optimizer


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, "nearest"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "kahan")],
    ids=str,
)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@every_type
@every_implementation
def test_logging_changes_no_bit(implementation, mars_type, max_grad_norm, dtype, rounding):
    settings = {"mars_type": mars_type, "max_grad_norm": max_grad_norm, "rounding": rounding}
    settings |= IMPLEMENTATIONS[implementation]
    plain, one = trained(lambda step: False, dtype, **settings)
    logged, other = trained(lambda step: step != 1, dtype, **settings)
    assert all(map(torch.equal, plain, logged))
    assert equal(one.state_dict(), other.state_dict())


@every_implementation
def test_noise_is_every_tensors_own(implementation):
    """Tensors of one shape and equal values get different noise, in one group or in several."""
    params = [nn.Parameter(torch.ones(30, 40, dtype=torch.bfloat16)) for _ in range(6)]
    groups = [{"params": params[:2]}, {"params": params[2:4]}, {"params": params[4:5]}, {"params": params[5:]}]
    optimizer = Mars(groups, lr=1e-4, rounding="stochastic", **IMPLEMENTATIONS[implementation])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = [(param != 1).detach() for param in params]
    for index, one in enumerate(moved):
        assert 0 < one.sum() < one.numel()  # an update of less than a unit in the last place
        for other in moved[:index]:
            assert 0.2 < (one != other).float().mean() / (2 * one.float().mean() * (1 - one.float().mean())) < 2


@every_implementation
def test_noise_is_every_steps_own(implementation):
    param = nn.Parameter(torch.ones(30, 40, dtype=torch.bfloat16))
    optimizer = Mars([param], lr=1e-4, rounding="stochastic", **IMPLEMENTATIONS[implementation])
    moved = []
    for _ in range(3):
        param.data.fill_(1.0)
        param.grad = torch.ones_like(param)
        optimizer.step()
        moved.append((param != 1).detach().clone())
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (moved[one] != moved[other]).any()


@every_implementation
def test_noise_of_a_tensor_does_not_depend_on_other_gradients(implementation):
    """Each tensor and step has its own noise: a layer without a gradient does not shift the others'."""
    results = []
    for missing in (False, True):
        params = [nn.Parameter(torch.ones(30, 40, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = Mars(params, lr=1e-4, rounding="stochastic", **IMPLEMENTATIONS[implementation])
        for param in params:
            param.grad = torch.ones_like(param)
        if missing:
            params[0].grad = None
        optimizer.step()
        results.append([param.detach() for param in params[1:]])
    assert all(map(torch.equal, *results))


# --- autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"max_grad_norm": 1.0}, {"ns_dtype": "float32"}, {"ns_dtype": "float64"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_type
@every_implementation
def test_a_step_inside_autocast_is_one_outside(implementation, mars_type, dtype, settings):
    results = []
    for autocast in (False, True):
        params = [nn.Parameter(normal((16, 12), 1, dtype)), nn.Parameter(normal((7,), 2, dtype))]
        optimizer = Mars(params, mars_type=mars_type, **settings, **IMPLEMENTATIONS[implementation])
        for step in range(2):
            for param in params:
                param.grad = normal(param.shape, step, dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                optimizer.step()
        results.append([param.detach() for param in params])
    assert all(map(torch.equal, *results))


def test_a_closure_inside_autocast_is_autocast():
    """Autocast applies to the closure, not to the step's own arithmetic."""
    seen = []
    param = nn.Parameter(normal((4, 4), 1))
    optimizer = Mars([param], mars_type="mars-m")

    def closure() -> float:
        product = param @ param
        seen.append(product.dtype)
        product.float().sum().backward()
        return 0.0

    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step(closure)
    assert seen == [torch.bfloat16]


# --- norms of last gradients that are no longer those of the step before ----------------------------------------


def small_steps(optimizer: Mars, param: nn.Parameter, line: Reference, seeds: range) -> None:
    """Take steps with gradients so small that only a large last gradient causes clipping."""
    for seed in seeds:
        gradient = 1e-3 * normal(param.shape, seed)
        param.grad = gradient.clone()
        line.step(gradient)
        optimizer.step()


def fill(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    optimizer.state[param]["last_grad"].data.fill_(3.0)
    line.last = torch.full_like(line.last, 3.0)


def fill_by_storage(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    last = optimizer.state[param]["last_grad"]
    torch.from_numpy(last.numpy()).fill_(3.0)  # as another library writes to it
    line.last = torch.full_like(line.last, 3.0)


def swap(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    optimizer.state[param]["last_grad"].data = torch.full_like(param, 3.0)
    line.last = torch.full_like(line.last, 3.0)


def load_with_step_zeroed(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["last_grad"].fill_(3.0)
    saved["state"][0]["step"] = torch.zeros(())
    optimizer.load_state_dict(saved)
    line.last, line.t = torch.full_like(line.last, 3.0), 0


def zero_the_step(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    optimizer.state[param]["step"].zero_()
    optimizer.state[param]["last_grad"] = torch.full_like(param, 3.0)
    line.last, line.t = torch.full_like(line.last, 3.0), 0


def raise_gamma(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    optimizer.param_groups[0]["gamma"] = line.gamma = 200.0


def lower_the_threshold(optimizer: Mars, param: nn.Parameter, line: Reference) -> None:
    optimizer.param_groups[0]["clip_threshold"] = line.clip_threshold = 1e-4


@pytest.mark.parametrize("settings", [{}, {"take_grad": True}, {"max_grad_norm": 1e6}], ids=str)
@pytest.mark.parametrize(
    "change",
    [fill, fill_by_storage, swap, load_with_step_zeroed, zero_the_step, raise_gamma, lower_the_threshold],
    ids=lambda change: change.__name__,
)
@every_implementation
def test_what_makes_a_small_gradient_clipped(implementation, change, settings):
    param = nn.Parameter(normal((6, 5), 1))
    optimizer = mars_of([param], lr=LR, gamma=0.5, **settings, **IMPLEMENTATIONS[implementation])
    line = Reference(param, rule="mars-adamw", lr=LR, betas=(0.95, 0.99), gamma=0.5)
    small_steps(optimizer, param, line, range(3))
    change(optimizer, param, line)
    small_steps(optimizer, param, line, range(3, 5))
    torch.testing.assert_close(param.detach().double(), line.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"].double(), line.m, rtol=1e-4, atol=1e-7)


@needs_compiler
@pytest.mark.parametrize("change", [fill, load_with_step_zeroed], ids=lambda change: change.__name__)
def test_what_makes_a_small_gradient_clipped_in_a_large_matrix(change):
    param = nn.Parameter(normal((1001, 1000), 1))
    optimizer = Mars([param], lr=LR, gamma=0.5)
    line = Reference(param, rule="mars-adamw", lr=LR, betas=(0.95, 0.99), gamma=0.5)
    for seeds in (range(2), range(2, 3)):
        for seed in seeds:
            gradient = 1e-6 * normal(param.shape, seed)
            param.grad = gradient.clone()
            line.step(gradient)
            optimizer.step()
        if seeds.start == 0:
            change(optimizer, param, line)
    torch.testing.assert_close(param.detach().double(), line.x, rtol=1e-4, atol=1e-4)


# --- the recursive form, whose first moment follows from averages of the gradients ------------------------------


def set_gamma(optimizer: Mars, line: Reference) -> None:
    optimizer.param_groups[0]["gamma"] = line.gamma = 0.5


def set_gamma_to_zero(optimizer: Mars, line: Reference) -> None:
    optimizer.param_groups[0]["gamma"] = line.gamma = 0.0


def set_threshold(optimizer: Mars, line: Reference) -> None:
    optimizer.param_groups[0]["clip_threshold"] = line.clip_threshold = 0.5


def set_betas(optimizer: Mars, line: Reference) -> None:
    """OneCycleLR does this at every step."""
    optimizer.param_groups[0]["betas"] = line.betas = (0.8, 0.9)


def set_second_moment(optimizer: Mars, line: Reference) -> None:
    optimizer.param_groups[0]["second_moment"] = line.second_moment = "corrected"


@pytest.mark.parametrize(
    ("settings", "change", "setting"),
    [
        ({"second_moment": "gradient"}, set_gamma, "gamma"),
        ({"second_moment": "gradient"}, set_gamma_to_zero, "gamma"),
        ({"second_moment": "gradient"}, set_threshold, "clip_threshold"),
        ({"second_moment": "gradient"}, set_betas, "betas"),
        ({"second_moment": "gradient"}, set_second_moment, "second_moment"),
        ({"mars_type": "mars-lion"}, set_gamma, "gamma"),
        ({"mars_type": "mars-lion"}, set_threshold, "clip_threshold"),
        ({"mars_type": "mars-lion"}, set_betas, "betas"),
        ({"mars_type": "mars-m"}, set_gamma, "gamma"),
        ({"mars_type": "mars-m"}, set_threshold, "clip_threshold"),
        ({"mars_type": "mars-m"}, set_betas, "betas"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
@every_implementation
def test_settings_changed_in_the_recursive_form(implementation, settings, change, setting):
    """The step matches the plain form, or refuses with the setting's name before anything changes."""
    param = nn.Parameter(normal((6, 5), 1, torch.float64))
    optimizer = Mars([param], lr=LR, gamma=0.1, clip_threshold=None, **settings, **IMPLEMENTATIONS[implementation])
    line = Reference(
        param,
        **{"rule": settings.get("mars_type", "mars-adamw"), "lr": LR, "betas": (0.95, 0.99), "gamma": 0.1},
        clip_threshold=None,
        second_moment=settings.get("second_moment", "corrected"),
    )

    def step(seed: int) -> None:
        gradient = normal(param.shape, seed, torch.float64)
        param.grad = gradient.clone()
        optimizer.step()
        line.step(gradient)
        torch.testing.assert_close(param.detach(), line.x, rtol=1e-5, atol=1e-5)

    for seed in range(3):
        step(seed)
    assert "last_grad" not in optimizer.state[param]
    change(optimizer, line)
    before = copy.deepcopy((param, optimizer.state_dict()))
    try:
        step(3)
    except (RuntimeError, ValueError) as refused:
        # The change comes first: nothing has been loaded.
        assert setting in str(refused).partition("loaded")[0]
        assert equal(before, (param, optimizer.state_dict()))
    else:
        step(4)


# --- a scale that is no longer that of the last gradient --------------------------------------------------------


@every_implementation
def test_a_scale_does_not_outlive_a_switch_to_the_exact_form(implementation):
    """`last_grad_scale` belongs to a gradient moved unscaled, not to a stale gradient."""
    param = nn.Parameter(normal((6, 5), 1))
    optimizer = mars_of([param], lr=LR, take_grad=True, max_grad_norm=0.5, **IMPLEMENTATIONS[implementation])
    line = Reference(param, rule="mars-adamw", lr=LR, betas=(0.95, 0.99))

    def clipped(gradient: Tensor) -> Tensor:
        return gradient.double() * min(1.0, 0.5 / (gradient.double().norm().item() + 1e-6))

    for seed in range(3):
        gradient = 3 * normal(param.shape, seed)
        param.grad = gradient.clone()
        line.step(clipped(gradient))
        optimizer.step()
    optimizer.param_groups[0]["is_approx"] = False
    for seed in range(3, 6):
        stale, gradient = 0.1 * normal(param.shape, 50 + seed), 3 * normal(param.shape, seed)
        param.grad = stale.clone()
        optimizer.update_previous_grad()
        optimizer.update_last_grad()
        param.grad = gradient.clone()
        line.step(clipped(gradient), stale=stale)
        optimizer.step()
        torch.testing.assert_close(param.detach().double(), line.x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("switch", ["max_grad_norm", "take_grad", "both"])
@every_implementation
def test_a_scale_does_not_outlive_the_settings_it_comes_from(implementation, switch):
    param = nn.Parameter(normal((6, 5), 1))
    optimizer = mars_of([param], lr=LR, take_grad=True, max_grad_norm=0.5, **IMPLEMENTATIONS[implementation])
    line = Reference(param, rule="mars-adamw", lr=LR, betas=(0.95, 0.99))
    for seed in range(6):
        if seed == 3 and switch in ("max_grad_norm", "both"):
            optimizer.max_grad_norm = None
        if seed == 3 and switch in ("take_grad", "both"):
            optimizer.take_grad = False
        gradient = 3 * normal(param.shape, seed)
        param.grad = gradient.clone()
        norm = optimizer.max_grad_norm
        factor = 1.0 if norm is None else min(1.0, norm / (gradient.double().norm().item() + 1e-6))
        line.step(gradient.double() * factor)
        optimizer.step()
        torch.testing.assert_close(param.detach().double(), line.x, rtol=1e-5, atol=1e-6)
