"""Mars against the reference: every setting, rule, dtype, shape and implementation, step by step."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from helpers import equal, fused_and_plain, needs_compiler, newton_schulz_in, on_a_gpu
from reference import Reference
from torch import Tensor, nn

from mars_hf import Mars
from mars_hf import kernels as backends

TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
SHAPES = ((7, 5), (40, 30), (1, 1), (1, 9), (6,), (), (3, 2, 2, 3), (2, 4, 3), (5, 8), (0, 3))
ORDINARY = SHAPES[:-2]  # a step of these is planned by the fast path; (5, 8) is transposed, and (0, 3) has no memory
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "rates": {"lr": 0.01, "lr_1d": 0.002},
    "tensor lr": {"lr": torch.tensor(0.01, dtype=torch.float64)},
    "betas": {"betas": (0.5, 0.7), "betas_1d": (0.6, 0.8)},
    "zero betas": {"betas": (0.0, 0.0), "betas_1d": (0.0, 0.0)},
    "decay and eps": {"weight_decay": 0.3, "weight_decay_1d": 0.2, "eps": 1e-3},
    "cautious decay": {"weight_decay": 20.0, "weight_decay_1d": 30.0, "weight_decay_mode": "cautious"},
    "decoupled decay": {"weight_decay": 0.02, "weight_decay_1d": 0.1, "weight_decay_mode": "decoupled"},
    "gamma": {"gamma": 0.5},
    "gamma of 0": {"gamma": 0.0},
    "no clipping": {"clip_threshold": None},
    "tight clipping": {"clip_threshold": 0.1},
    "amsgrad": {"amsgrad": True},
    "second moment of the gradient": {"second_moment": "gradient"},
    "recursive": {"second_moment": "gradient", "clip_threshold": None, "gamma": 0.3},
    "optimize_1d": {"optimize_1d": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "global norm": {"max_grad_norm": 0.7},
    "global norm, maximize": {"max_grad_norm": 0.7, "maximize": True},
    "lion": {"mars_type": "mars-lion", "weight_decay": 0.1, "max_grad_norm": 0.7, "optimize_1d": True},
    "lion, cautious": {"mars_type": "mars-lion", "weight_decay": 20.0, "weight_decay_mode": "cautious"},
    "lion, recursive": {"mars_type": "mars-lion", "clip_threshold": None, "gamma": 0.3},
    "shampoo": {"mars_type": "mars-shampoo", "eps": 1e-2, "weight_decay": 0.1, "optimize_1d": True},
    "shampoo, recursive": {"mars_type": "mars-shampoo", "clip_threshold": None, "max_grad_norm": 0.7},
    "mars-m": {"mars_type": "mars-m", "weight_decay": 0.1, "maximize": True},
    "mars-m, cautious": {"mars_type": "mars-m", "weight_decay": 20.0, "weight_decay_mode": "cautious"},
    "mars-m, decoupled": {"mars_type": "mars-m", "weight_decay": 0.02, "weight_decay_mode": "decoupled"},
    "mars-m, rows": {"mars_type": "mars-m", "normalize_rows": 0.95},
    "shampoo, rows": {"mars_type": "mars-shampoo", "normalize_rows": 0.5, "clip_threshold": None, "gamma": 0.05},
    "mars-m, recursive": {"mars_type": "mars-m", "clip_threshold": None, "gamma": 0.3, "amsgrad": True},
}
# Settings with tests of their own: here below, test_settings.py, test_exact.py, test_directions.py, test_states.py,
# test_backends.py.
ELSEWHERE = {
    "is_approx",
    "ns_steps",
    "ns_coefficients",
    "ns_dtype",
    "rounding",
    "state_dtype",
    "fused",
    "process_group",
    "foreach",
    "capturable",
    "differentiable",
    "self",
    "params",
}
IMPLEMENTATIONS = ["for-loop", "foreach", pytest.param("fused", marks=needs_compiler)]
ON_A_GPU = [pytest.param(name, marks=on_a_gpu) for name in ("triton", "foreach on a gpu")]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
here_and_on_a_gpu = pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, *ON_A_GPU])


@pytest.fixture
def fused(implementation: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings of an implementation; plain PyTorch takes whole lists on the CPU for "foreach"."""
    choose, foreach = backends.choose_backend, implementation == "foreach"

    def chosen(*args: Any, **options: Any) -> backends.Backend:
        return dataclasses.replace(choose(*args, **options), foreach=foreach)

    if device_of(implementation) == "cpu":
        monkeypatch.setattr("mars_hf.step.lists.choose_backend", chosen)
    return {"fused": implementation in ("fused", "triton")}


def device_of(implementation: str) -> str:
    return "cpu" if implementation in ("for-loop", "foreach", "fused") else "cuda"


def parameters(dtype: torch.dtype, shapes: Any = SHAPES, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    return [nn.Parameter(x.t().contiguous().t() if x.shape == (5, 8) else x) for x in values]  # one is transposed


def gradients(params: list[nn.Parameter], step: int) -> list[Tensor]:
    """Return gradients of which some are clipped and some are not."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = 0.05 * 10 ** (step % 3)
    draws = [size * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
    return [draw.to(param.device, param.dtype) for draw, param in zip(draws, params, strict=True)]


def references(params: list[nn.Parameter], **settings: Any) -> list[Reference]:
    """Return a reference for each parameter, with Mars's defaults."""
    settings = {"lr": 3e-3, "betas": (0.95, 0.99), "mars_type": "mars-adamw", **settings}
    names = ("eps", "gamma", "clip_threshold", "second_moment", "amsgrad", "weight_decay_mode", "normalize_rows")
    shared = {name: settings[name] for name in names if name in settings}
    lr = float(settings["lr"])
    lines = []
    for param in params:
        rule = settings["mars_type"]
        if param.ndim >= 2 or settings.get("optimize_1d"):
            rule = "mars-adamw" if param.ndim < 2 and rule in TYPES[2:] else rule
            own = {"lr": lr, "betas": settings["betas"], "weight_decay": settings.get("weight_decay", 0.0)}
        else:
            own = {"lr": settings.get("lr_1d", lr if rule == "mars-m" else lr / 2), "rule": "adamw"}
            own |= {
                "betas": settings.get("betas_1d", (0.9, 0.95)),
                "weight_decay": settings.get("weight_decay_1d", 0.0),
            }
        lines.append(Reference(param, **{"rule": rule, **shared, **own}))
    return lines


def scaled(grads: list[Tensor | None], settings: dict[str, Any]) -> tuple[list[Tensor | None], float]:
    """Return gradients as a step sees them, in float64, and their global norm."""
    sign = -1.0 if settings.get("maximize") else 1.0
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
    limit = settings.get("max_grad_norm")
    factor = sign * (1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
    return [None if g is None else g.double() * factor for g in grads], norm


TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
LOW = ("default", "global norm, maximize", "recursive", "lion", "mars-m", "cautious decay", "lion, cautious")
CASES = [(name, dtype) for name in CONFIGURATIONS for dtype in TOLERANCES if dtype.itemsize > 2 or name in LOW]


@here_and_on_a_gpu
@pytest.mark.parametrize(("configuration", "dtype"), CASES, ids=str)
def test_step_is_the_formula(configuration, fused, implementation, dtype):
    """Parameters, all states and the global norm, over steps in which some parameters have no gradient."""
    settings = CONFIGURATIONS[configuration]
    params = parameters(
        dtype, ORDINARY if implementation in ("for-loop", "fused") else SHAPES, device_of(implementation)
    )
    lines = references(params, **settings)
    optimizer = Mars(params, **settings, **fused, **newton_schulz_in("float64", settings.get("mars_type")))
    half = 0.0 if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    relative = TOLERANCES[dtype]
    names = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max", "last_grad": "last", "row_avg_sq": "rows"}
    recursive = settings.get("clip_threshold", 1.0) is None and {"mars_type", "second_moment"} & settings.keys()
    for step in range(6):
        grads: list[Tensor | None] = list(gradients(params, step))
        if step in (0, 2):
            grads[1] = grads[4] = None
        given, norm = scaled(grads, settings)
        for param, line, grad, g in zip(params, lines, grads, given, strict=True):
            param.grad = None if grad is None else grad.clone()
            if dtype != torch.float64:
                line.x = param.detach().double()
            if g is not None:
                line.step(g)
        optimizer.step()
        if settings.get("max_grad_norm"):
            assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        for param, line, grad in zip(params, lines, grads, strict=True):
            state = optimizer.state.get(param, {})
            assert param.grad is grad is None or torch.equal(param.grad, grad)  # left alone
            # Lion jumps by 2 lr where rounding changes a sign; no first moment here is that small.
            torch.testing.assert_close(param.detach().double(), line.x, rtol=half + relative, atol=relative)
            for key, name in names.items():
                value = state.get(key)
                if value is None or (recursive and key == "exp_avg" and line.rule != "adamw"):
                    continue
                assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                wanted = getattr(line, name)
                largest = max(0.1, float(wanted.abs().max())) if wanted.numel() else 0.0
                torch.testing.assert_close(value.double(), wanted, rtol=0, atol=relative * largest)
            assert float(state.get("step", 0.0)) == line.t
            keeps = line.rule not in ("adamw",) and not recursive
            assert ("last_grad" in state) == (keeps and line.t > 0)


def test_every_setting_is_in_a_configuration():
    stated = {name for settings in CONFIGURATIONS.values() for name in settings}
    assert stated | ELSEWHERE == set(inspect.signature(Mars.__init__).parameters)


@pytest.mark.parametrize("configuration", [name for name in CONFIGURATIONS if name != "default"])
def test_every_configuration_is_observable(configuration):
    """Each changes the result by far more than the tolerance, so a setting that has no effect is seen."""
    results = []
    for settings in ({}, CONFIGURATIONS[configuration]):
        params = parameters(torch.float64)
        lines = references(params, **settings)
        for step in range(6):
            for line, g in zip(lines, scaled(gradients(params, step), settings)[0], strict=True):
                line.step(g * 0.1**step if "amsgrad" in settings else g)  # it acts where the second moment falls
        results.append(torch.cat([line.x.flatten() for line in lines]))
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_gamma_zero_without_clipping_is_torch_adamw():
    mine, theirs = parameters(torch.float32), parameters(torch.float32)
    shared = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": False}
    mars = Mars(mine, gamma=0.0, clip_threshold=None, lr_1d=3e-3, weight_decay_1d=0.1, **shared)
    adamw = torch.optim.AdamW(theirs, **shared)
    for step in range(50):
        for params, optimizer in ((mine, mars), (theirs, adamw)):
            for param, gradient in zip(params, gradients(params, step), strict=True):
                param.grad = gradient
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def stepped(**settings: Any) -> list[nn.Parameter]:
    """Return parameters after three steps."""
    params = parameters(torch.float32)
    optimizer = Mars(params, **settings)
    for step in range(3):
        for param, gradient in zip(params, gradients(params, step), strict=True):
            param.grad = gradient
        optimizer.step()
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
    return params


@pytest.mark.parametrize("dimensions", [0, 1, 2])
@pytest.mark.parametrize("mars_type", TYPES)
@fused_and_plain
def test_rates_in_tensors_of_one_element(fused, mars_type, dimensions):
    """They are as the number, to the bit, and stay as they are."""
    lr = torch.tensor(1e-3, dtype=torch.float64).reshape([1] * dimensions)
    settings = {"mars_type": mars_type, "fused": fused}
    assert equal(stepped(lr=lr, **settings), stepped(lr=1e-3, **settings)) and lr.item() == 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("mars_type", TYPES)
def test_the_default_dtype_changes_no_bit(mars_type, dtype):
    expected = stepped(mars_type=mars_type)
    torch.set_default_dtype(dtype)
    try:
        found = stepped(mars_type=mars_type)
    finally:
        torch.set_default_dtype(torch.float32)
    assert equal(found, expected)


def linear_with_warmup(mars: Mars) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(mars, lambda step: (0.0, 0.5, 1.0, 0.25, 0.0)[step])


def one_cycle(mars: Mars) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(mars, max_lr=0.02, total_steps=5)


@pytest.mark.parametrize("make_scheduler", [linear_with_warmup, one_cycle])
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_decoupled_decay_follows_the_schedule(mars_type, make_scheduler):
    settings = {"weight_decay": 0.1, "weight_decay_mode": "decoupled", "mars_type": mars_type}
    (param,) = parameters(torch.float64, [(7, 5)])
    (line,) = references([param], lr=0.02, **settings)
    mars = Mars([param], lr=0.02, **newton_schulz_in("float64", mars_type), **settings)
    scheduler = make_scheduler(mars)
    for step in range(4):
        (param.grad,) = gradients([param], step)
        line.lr = mars.param_groups[0]["lr"]  # of 0.02 at its peak
        line.betas = mars.param_groups[0]["betas"]
        line.step(param.grad)
        mars.step()
        scheduler.step()
        torch.testing.assert_close(param.detach(), line.x, rtol=1e-10, atol=1e-12)


def decays(mars: Mars, param: nn.Parameter, schedule: Any, steps: int) -> list[float]:
    """Return which part of a weight each step takes, under gradients that move nothing else."""
    taken = []
    for _ in range(steps):
        before = float(param.detach().mean())
        param.grad = torch.zeros_like(param)
        mars.step()
        taken.append(1 - float(param.detach().mean()) / before)
        schedule()
    return taken


def by_hand(rates: list[float]) -> Any:
    """Return a schedule that writes the next rate into the group, as a loop of one's own does."""

    def make(mars: Mars) -> Any:
        left = iter([*rates[1:], 0.0])
        mars.param_groups[0]["lr"] = rates[0]
        return lambda: mars.param_groups[0].update(lr=next(left))

    return make


def scheduled(make: Any) -> Any:
    return lambda mars: make(mars).step


def on_a_plateau(mars: Mars) -> Any:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(mars, factor=0.5, patience=0)
    return lambda: plateau.step(1.0)  # never better: the rate is halved at each step but the first


def cyclic(mars: Mars) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(mars, 2e-4, 2e-2, step_size_up=2, cycle_momentum=False)


@pytest.mark.parametrize(
    ("lr", "make", "factors"),
    [
        (1e-2, by_hand([1e-3, 1e-2, 5e-3, 0.0]), [0.1, 1.0, 0.5, 0.0]),
        (1e-3, by_hand([1e-3, 1e-2, 5e-3, 0.0]), [1.0, 1.0, 0.5, 0.0]),  # 1e-2 is unknown at first: never too much
        (0.0, by_hand([0.0, 1e-2, 5e-3]), [0.0, 1.0, 0.5]),
        (1e-2, on_a_plateau, [1.0, 1.0, 0.5, 0.25]),
        (2e-2, scheduled(cyclic), [0.01, 0.505, 1.0, 0.505]),  # 2e-4, 1.01e-2, 2e-2 of 2e-2
        (3e-3, scheduled(cyclic), [0.0002 / 0.003, 1.0, 1.0, 0.505]),
        (0.5, scheduled(one_cycle), [0.04, None, None, None]),  # max_lr, not the rate that it replaces
    ],
    ids=["by hand", "by hand, above", "by hand, from 0", "plateau", "cyclic", "cyclic, above", "one cycle"],
)
def test_decoupled_decay_by_the_peak_of_the_schedule(lr, make, factors):
    """No step takes more than is stated, whoever writes the rates and whatever they leave in the group."""
    param = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    mars = Mars([param], lr=lr, weight_decay=1e-3, weight_decay_mode="decoupled", betas=(0.0, 0.0))
    taken = decays(mars, param, make(mars), len(factors))
    for part, factor in zip(taken, factors, strict=True):
        assert factor is None or part == pytest.approx(1e-3 * factor, rel=1e-6)
        assert part <= 1e-3 * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["saved", "pickled"])
def test_the_peak_of_a_schedule_is_resumed(mode):
    """A run that goes on in the middle of a cycle decays to the bit as one that was not interrupted."""
    runs = []
    for interrupted in (False, True):
        param = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        mars = Mars([param], lr=1e-4, weight_decay=1e-3, weight_decay_mode="decoupled")
        schedule = cyclic(mars)
        for step in range(6):
            if interrupted and step == 4:  # past the first peak
                states = copy.deepcopy((mars.state_dict(), schedule.state_dict()))
                if mode == "saved":
                    mars = Mars([param], lr=1e-4, weight_decay=1e-3, weight_decay_mode="decoupled")
                    schedule = cyclic(mars)
                    mars.load_state_dict(states[0])
                else:
                    mars = pickle.loads(pickle.dumps(mars))
                    (param,) = mars.param_groups[0]["params"]
                    schedule = cyclic(mars)
                    mars.param_groups[0]["lr"] = states[0]["param_groups"][0]["lr"]
                schedule.load_state_dict(states[1])
            (param.grad,) = gradients([param], step)
            mars.step()
            schedule.step()
        runs.append(param.detach().clone())
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", ["lr", "betas", "weight_decay", "gamma", "clip_threshold", "eps", "maximize"])
def test_settings_are_read_from_each_group_at_each_step(name):
    """A change in one group of a running optimizer changes its parameters from then on, and no others."""
    changed = {"lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.5, "gamma": 0.7, "clip_threshold": 0.1}
    changed |= {"eps": 0.1, "maximize": True}
    params = parameters(torch.float64, ((7, 5), (7, 5)))
    lines = references(params)
    optimizer = Mars([{"params": [param]} for param in params], fused=False)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[1][name] = changed[name]
            if name != "maximize":
                setattr(lines[1], name, changed[name])
        for index, (param, line, g) in enumerate(zip(params, lines, gradients(params, step), strict=True)):
            param.grad = g
            line.step(-g if name == "maximize" and index == 1 and step >= 3 else g)
        optimizer.step()
        torch.testing.assert_close([p.detach() for p in params], [line.x for line in lines], rtol=1e-11, atol=1e-12)


def cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    rates = [2 * float(group["lr"]) for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, 9)


@pytest.mark.parametrize("kind", [float, lambda lr: torch.tensor(lr, dtype=torch.float64)], ids=["float", "tensor"])
@pytest.mark.parametrize("schedule", [lambda mars: torch.optim.lr_scheduler.CosineAnnealingLR(mars, 6), cycle])
def test_torch_schedulers(schedule, kind):
    """Rates are those that torch's SGD gets, in the ratio of matrices and vectors; the step uses them and the betas."""
    params = parameters(torch.float64, ((7, 5), (6,)))
    optimizer, lines = Mars(params, lr=kind(0.02), lr_1d=kind(0.01), fused=False), references(params)
    sgd = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.02, 0.01)], momentum=0.9)
    schedulers = [schedule(optimizer), schedule(sgd)]
    for step in range(6):
        grads = gradients(params, step)
        for param, line, g, group, plain in zip(
            params, lines, grads, optimizer.param_groups, sgd.param_groups, strict=True
        ):
            assert float(group["lr"]) == pytest.approx(plain["lr"], rel=1e-6)
            param.grad, line.lr, line.betas = g, float(group["lr"]), group["betas"]
            line.step(g)
        optimizer.step()
        sgd.step()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close([p.detach() for p in params], [line.x for line in lines], rtol=1e-11, atol=1e-12)


# --- extreme numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1.0], ids=["clipped", "global norm"])
@pytest.mark.parametrize(("size", "dtype"), [(1e19, torch.float32), (3e37, torch.float32), (1e100, torch.float64)])
@every_implementation
def test_gradients_whose_squares_overflow(fused, implementation, size, dtype, limit):
    """They are scaled to the norm they are clipped to, not to zero."""
    params = parameters(dtype, ((6, 5), (7,)))
    lines = references(params)
    optimizer = Mars(params, max_grad_norm=limit, **fused)
    for step in range(3):
        grads = gradients(params, step)
        if step == 1:
            grads[0][2, 3] = size
            if limit is not None:
                grads[1][3] = size
        for param, line, grad, g in zip(params, lines, grads, scaled(grads, {"max_grad_norm": limit})[0], strict=True):
            param.grad = grad
            line.step(g)
        optimizer.step()
        torch.testing.assert_close(
            [p.detach().double() for p in params], [line.x for line in lines], rtol=1e-5, atol=1e-5
        )


@every_implementation
def test_norms_above_the_range_of_float16(fused, implementation):
    param = nn.Parameter(torch.randn(40, 25).half())
    optimizer = Mars([param], lr=0.01, max_grad_norm=1.0, state_dtype="float16", **fused)
    before = param.detach().clone()
    param.grad = (100 * torch.randn(40, 25)).half()
    norm = param.grad.double().norm().item()
    optimizer.step()
    assert norm > 256 and optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-3)
    assert torch.isfinite(param).all() and (param.double() - before.double()).norm() > 1e-2


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_threshold": None}, {"clip_threshold": None, "amsgrad": True}, {"max_grad_norm": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("mars_type", TYPES)
@every_implementation
def test_nan_shows_in_the_parameter(fused, implementation, mars_type, settings):
    """Where the gradient has it, as in torch.optim.AdamW; clipped, everywhere."""
    params = parameters(torch.bfloat16, ((6, 5), (7,)))
    optimizer = Mars(params, mars_type=mars_type, **settings, **fused)
    for step in range(3):
        for param, gradient in zip(params, gradients(params, step), strict=True):
            param.grad = gradient
            if step == 1:
                param.grad[..., 2] = torch.nan
        optimizer.step()
    assert all(param[..., 2].isnan().all() for param in params)
    if "clip_threshold" not in settings:
        assert params[0].isnan().all()
    elif mars_type in TYPES[:2]:
        assert all(param.isnan().sum() == param[..., 2].numel() for param in params)
    for peak in [state["max_exp_avg_sq"] for state in optimizer.state.values() if "max_exp_avg_sq" in state]:
        assert peak[..., 2].isnan().all()


# --- autocast, closures, rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.5, "clip_threshold": 0.1}], ids=str)
@pytest.mark.parametrize("mars_type", TYPES)
@fused_and_plain
def test_autocast_and_metrics_change_no_bit(fused, mars_type, settings, rounding):
    runs = []
    for enabled in (False, True):
        dtype = torch.bfloat16 if rounding != "nearest" else torch.float32
        params = parameters(dtype, (*SHAPES, (7, 5)))  # two of one shape share a list
        settings = {**settings, **newton_schulz_in("float32", mars_type)}
        optimizer = Mars(params, mars_type=mars_type, rounding=rounding, fused=fused, **settings)
        for step in range(3):
            optimizer.collect_metrics(enabled and step != 1)
            for param, gradient in zip(params, gradients(params, step), strict=True):
                param.grad = gradient
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        runs.append(([param.detach() for param in params], optimizer.state_dict()["state"]))
    assert equal(*runs)


def test_closure_runs_with_gradients_and_autocast():
    """Autocast applies to the closure, not to the step's own arithmetic; its loss is returned as it is, as a tensor."""
    seen = []
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = Mars([param], mars_type="mars-m")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param @ param).sum()
        seen.append((param @ param).dtype)
        loss.backward()
        return loss.detach()

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert optimizer.step(closure).item() == 64.0
    assert seen == [torch.bfloat16] and (param < 1).all()


def moved_by_noise(
    groups: list[int], steps: int = 1, missing: bool = False, device: str = "cpu", **fused: Any
) -> list[Tensor]:
    """Return where stochastic rounding has moved equal tensors, which are in groups of these sizes, step by step."""
    params = [nn.Parameter(torch.ones(30, 40, dtype=torch.bfloat16, device=device)) for _ in range(sum(groups))]
    ends = [sum(groups[: index + 1]) for index in range(len(groups))]
    given = [{"params": params[end - size : end]} for size, end in zip(groups, ends, strict=True)]
    optimizer, moved = Mars(given, lr=1e-4, rounding="stochastic", **fused), []
    for _ in range(steps):
        for param in params:
            param.data.fill_(1.0)
            param.grad = torch.ones_like(param)
        if missing:
            params[0].grad = None
        optimizer.step()
        moved += [(param != 1).detach().clone() for param in params]
    return moved


@here_and_on_a_gpu
def test_noise_is_of_each_tensor_and_step(fused, implementation):
    """Equal tensors get independent noise, at each step anew; other tensors' gradients do not matter; it repeats."""
    fused["device"] = device_of(implementation)
    moved = moved_by_noise([2, 2, 1], 2, **fused)
    for index, one in enumerate(moved):
        assert 0 < one.sum() < one.numel()  # an update of less than a unit in the last place
        for other in moved[:index]:
            independent = 2 * one.float().mean() * (1 - one.float().mean())
            assert 0.2 < (one != other).float().mean() / independent < 2
    torch.manual_seed(7)  # no matter: seeds follow from indices and step counts
    assert equal(moved, moved_by_noise([2, 2, 1], 2, **fused))
    assert equal(moved[1:5], moved_by_noise([2, 2, 1], 1, missing=True, **fused)[1:])


def test_kahan_keeps_what_rounding_has_lost():
    """A bfloat16 parameter and its compensation together follow a float32 one, to the unit of the compensation."""
    start = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
    kahan, wide = Mars(params[:1], lr=1e-3, rounding="kahan"), Mars(params[1:], lr=1e-3)
    for step in range(30):
        params[0].grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        params[1].grad = params[0].grad.float()
        kahan.step()
        wide.step()
    compensation = kahan.state[params[0]]["compensation"]
    assert compensation.dtype == torch.bfloat16 and compensation.any()
    found, expected = params[0].float() + compensation.float(), params[1]
    assert ((found - expected).abs() <= 30 * 2**-16 * expected.abs().clamp(min=1e-2)).all()
    assert (
        (params[0].float() - expected).abs() > 2**-12 * expected.abs()
    ).float().mean() > 0.5  # rounded alone it is not


@pytest.mark.parametrize(("mars_type", "lr", "end"), [("mars-lion", 0.05, 97.5), ("mars-m", 2.0, None)])
@here_and_on_a_gpu
def test_small_steps_add_up(fused, implementation, mars_type, lr, end):
    """Steps of 0.05 from 100 are a tenth of a bfloat16 unit there: nearest loses all of them."""
    ends = {}
    for rounding in ("float32", "nearest", "kahan", "stochastic"):
        is_wide = rounding == "float32"
        dtype = torch.float32 if is_wide else torch.bfloat16
        param = nn.Parameter(torch.full((32, 32), 100.0, dtype=dtype, device=device_of(implementation)))
        optimizer = Mars([param], lr=lr, mars_type=mars_type, rounding="nearest" if is_wide else rounding, **fused)
        for _ in range(50):
            param.grad = torch.ones_like(param)
            optimizer.step()
        ends[rounding] = param.detach().float().mean().item()
    expected = ends["float32"]
    assert expected == pytest.approx(end, abs=1e-3) if end else expected < 98
    assert ends["nearest"] == 100.0
    assert ends["kahan"] == pytest.approx(expected, abs=0.26)  # half a unit in the last place
    assert ends["stochastic"] == pytest.approx(expected, abs=0.15)
