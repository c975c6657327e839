"""Run on Mars the checks that timm and pytorch_optimizer run on every optimizer they ship.

Written anew after timm's tests/test_optim.py and pytorch_optimizer's tests/test_optimizers.py, test_gradients.py and
test_general_optimizer_parameters.py, without checks of arguments that Mars does not have.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mars_info import EVERY_IMPLEMENTATION, IMPLEMENTATIONS, equal
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import mars_hf
from mars_hf import Mars

TYPES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
every_type = pytest.mark.parametrize("mars_type", TYPES)
every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)

# Rates that suit each rule on the small problems below.
RATES = {"mars-adamw": 1e-2, "mars-lion": 3e-3, "mars-shampoo": 1e-2, "mars-m": 2e-2}


# --- timm -------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[..., Mars]] = {
    "one list": lambda weight, bias, lr, **rest: Mars([weight, bias], lr=lr, **rest),
    "a rate of the bias's own": lambda weight, bias, lr, **rest: Mars(
        [{"params": [weight]}, {"params": [bias], "lr": lr}], lr=lr / 10, **rest
    ),
    "the bias alone": lambda weight, bias, lr, **rest: Mars([{"params": bias, "lr": lr}], lr=lr / 10, **rest),
    "the bias alone, with a default rate": lambda weight, bias, lr, **rest: Mars([{"params": bias, "lr": lr}], **rest),
    "names": lambda weight, bias, lr, **rest: Mars([("weight", weight), ("bias", bias)], lr=lr, **rest),
}


def least_squares(weight: Tensor, bias: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    given = torch.linspace(-1.0, 1.0, weight.shape[1])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.mv(given) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


def tensors(contiguous: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(10, 5, 2, generator=generator)[..., 0], torch.randn(10, 2, generator=generator)[..., 0]
    return (weight.contiguous(), bias.contiguous()) if contiguous else (weight, bias)


@pytest.mark.parametrize("maker", MAKERS)
@every_type
def test_basic_cases(mars_type, maker):
    assert_loss_falls(mars_type, maker, contiguous=True)


@pytest.mark.parametrize("maker", MAKERS)
@every_type
def test_basic_cases_of_strided_tensors(mars_type, maker):
    assert_loss_falls(mars_type, maker, contiguous=False)


def assert_loss_falls(mars_type: str, maker: str, *, contiguous: bool) -> None:
    weight, bias = map(nn.Parameter, tensors(contiguous))
    assert weight.is_contiguous() is bias.is_contiguous() is contiguous
    optimizer = MAKERS[maker](weight, bias, lr=RATES[mars_type], mars_type=mars_type)
    assert repr(optimizer)
    closure = least_squares(weight, bias, optimizer)
    before = closure().item()
    for _ in range(60):
        loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert closure().item() < before


@pytest.mark.parametrize("maker", MAKERS)
@every_type
def test_a_loaded_state_goes_on(mars_type, maker):
    weight, bias = map(nn.Parameter, tensors(True))
    optimizer = MAKERS[maker](weight, bias, lr=RATES[mars_type], mars_type=mars_type)
    closure = least_squares(weight, bias, optimizer)
    for _ in range(10):
        optimizer.step(closure)
    twins = [nn.Parameter(param.detach().clone()) for param in (weight, bias)]
    other = MAKERS[maker](*twins, lr=RATES[mars_type], mars_type=mars_type)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    other_closure = least_squares(*twins, other)
    for _ in range(10):
        optimizer.step(closure)
        other.step(other_closure)
        assert torch.equal(weight, twins[0])
        assert torch.equal(bias, twins[1])
    assert equal(saved, kept)  # loading and stepping leave it alone
    assert equal(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("vector", [True, False], ids=["vector", "matrix"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gamma": 0.0}, {"optimize_1d": True}, {"clip_threshold": None}, {"mars_type": "mars-lion"}],
    ids=str,
)
def test_rosenbrock(settings, vector):
    """Coordinates take turns from (1.5, 1.5) down to the valley that leads to the minimum at (1, 1)."""
    param = nn.Parameter(torch.tensor([1.5, 1.5] if vector else [[1.5, 1.5]]))
    lr = 2e-3 if settings.get("mars_type") == "mars-lion" else 1e-2
    optimizer = Mars([param], lr=lr, **settings)

    def height() -> float:
        x, y = param.detach().flatten()
        return ((1 - x) ** 2 + 100 * (y - x**2) ** 2).item()

    before = height()
    for step in range(400):
        x, y = param.detach().flatten()
        slope = torch.stack([-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)])
        slope[step % 2] = 0.0
        param.grad = slope.view_as(param)
        optimizer.step()
    assert height() < 0.01 * before


@every_implementation
@every_type
def test_every_step_on_a_small_network_lowers_the_loss(mars_type, implementation):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
    given = torch.linspace(0.1, 0.6, 6).reshape(3, 2)
    optimizer = mars_hf.create(model, lr=1e-2, mars_type=mars_type, **IMPLEMENTATIONS[implementation])
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(given).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_a_compiled_step():
    """`torch.compile` runs the step eagerly, with the same result."""
    params, plain = (
        [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))],
        [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))],
    )
    optimizer, other = Mars(params), Mars(plain)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        for param in (*params, *plain):
            param.grad = torch.full_like(param, 0.5)
        step()
        other.step()
    assert all(map(torch.equal, params, plain))
    assert all(optimizer.state[param]["step"] == 2 for param in params)


# --- schedulers -------------------------------------------------------------------------------------------------

STEPS = 24
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: LambdaLR(opt, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda opt: CosineAnnealingLR(opt, STEPS),
    "CosineAnnealingWarmRestarts": lambda opt: CosineAnnealingWarmRestarts(opt, 5),
    "PolynomialLR": lambda opt: PolynomialLR(opt, STEPS, 0.9),
    "ReduceLROnPlateau": lambda opt: ReduceLROnPlateau(opt, patience=2, factor=0.5),
    "OneCycleLR": lambda opt: OneCycleLR(opt, [2 * float(g["lr"]) for g in opt.param_groups], STEPS + 1),
    "SequentialLR": lambda opt: SequentialLR(opt, [LinearLR(opt, 0.1, total_iters=5), CosineAnnealingLR(opt, 19)], [5]),
    "ChainedScheduler": lambda opt: ChainedScheduler([LinearLR(opt, 0.1, total_iters=5), PolynomialLR(opt, STEPS)]),
}


class Written:
    """Take the same step in straight-line float64, given rate and average at every step."""

    def __init__(self, param: Tensor, betas: tuple[float, float], gamma: float) -> None:
        self.x, self.betas, self.k = param.detach().double().clone(), betas, gamma * betas[0] / (1 - betas[0])
        self.m, self.v, self.last, self.t = torch.zeros_like(self.x), torch.zeros_like(self.x), None, 0

    def step(self, gradient: Tensor, lr: float, beta1: float, *, clips: bool) -> None:
        beta2, g = self.betas[1], gradient.double()
        self.t += 1
        last = torch.zeros_like(g) if self.last is None else self.last
        c = g + self.k * (g - last)
        if clips:
            c = c / max(1.0, c.norm().item())
        self.last = g
        self.m = beta1 * self.m + (1 - beta1) * c
        self.v = beta2 * self.v + (1 - beta2) * c**2
        direction = self.m / (1 - beta1**self.t) / ((self.v / (1 - beta2**self.t)).sqrt() + 1e-8)
        self.x = self.x - lr * direction


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@every_implementation
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_act_as_the_formula_says(name, implementation, tensor_lr):
    """Rates equal those that the scheduler gives torch's SGD, and the step uses the current ones."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (nn.Parameter(torch.randn(shape, generator=generator).double()) for shape in ((6, 4), (6,)))
    lr: Any = torch.tensor(0.02, dtype=torch.float64) if tensor_lr else 0.02
    lr_1d: Any = torch.tensor(0.01, dtype=torch.float64) if tensor_lr else 0.01
    optimizer = Mars([weight, bias], lr=lr, lr_1d=lr_1d, **IMPLEMENTATIONS[implementation])
    others = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.02, 0.01)]
    sgd = torch.optim.SGD(others, momentum=0.9)
    moves_betas = name == "OneCycleLR"
    scheduler, plain = SCHEDULERS[name](optimizer), SCHEDULERS[name](sgd)
    written = [Written(weight, (0.95, 0.99), 0.025), Written(bias, (0.9, 0.95), 0.0)]
    for step in range(STEPS):
        gradients = [torch.randn(one.shape, generator=generator).double() for one in (weight, bias)]
        for index, (one, gradient) in enumerate(zip((weight, bias), gradients, strict=True)):
            rate = float(sgd.param_groups[index]["lr"])
            assert float(optimizer.param_groups[index]["lr"]) == pytest.approx(rate, rel=1e-12)
            beta1 = optimizer.param_groups[index]["betas"][0]
            if moves_betas:  # from its base_momentum to its max_momentum and back
                assert 0.85 - 1e-12 <= beta1 <= 0.95 + 1e-12
                written[0].k = (
                    0.025 * optimizer.param_groups[0]["betas"][0] / (1 - optimizer.param_groups[0]["betas"][0])
                )
            written[index].step(gradient, rate, beta1, clips=index == 0)
            one.grad = gradient.clone()
        optimizer.step()
        sgd.step()
        for one in (scheduler, plain):
            if isinstance(one, ReduceLROnPlateau):
                one.step(1.0 + step // 10)
            else:
                one.step()
        for one, other in zip((weight, bias), written, strict=True):
            torch.testing.assert_close(one.detach(), other.x, rtol=1e-6, atol=1e-7)


# --- pytorch_optimizer ------------------------------------------------------------------------------------------


def data() -> tuple[Tensor, Tensor]:
    """Two clouds of points on either side of a line."""
    generator = torch.Generator().manual_seed(42)
    labels = torch.arange(200).remainder(2).float().unsqueeze(1)
    points = torch.randn(200, 2, generator=generator) + 3 * labels - 1.5
    return points, labels


class Logistic(nn.Module):
    """Logistic regression with a hidden layer."""

    def __init__(self, hidden: int = 2) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.first, self.second = nn.Linear(2, hidden), nn.Linear(hidden, 1)

    def forward(self, given: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(given)))


RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 1e-2, "weight_decay_1d": 1e-2},
    "no gamma": {"gamma": 0.0},
    "no clipping": {"clip_threshold": None},
    "vectors too": {"optimize_1d": True},
    "amsgrad": {"amsgrad": True},
    "global norm": {"max_grad_norm": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@every_type
def test_recipes_converge(mars_type, recipe, dtype):
    points, labels = (tensor.to(dtype) for tensor in data())
    model = Logistic().to(dtype)
    optimizer = mars_hf.create(model, lr=10 * RATES[mars_type], mars_type=mars_type, **RECIPES[recipe])
    loss_of = nn.BCEWithLogitsLoss()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model(points), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5 * losses[-1]
    assert all(param.dtype == dtype for param in model.parameters())


@every_type
def test_xor(mars_type):
    points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    labels = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    model = Logistic(hidden=8)
    optimizer = mars_hf.create(model, lr=3 * RATES[mars_type], mars_type=mars_type)
    for _ in range(200):
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(model(points), labels).backward()
        optimizer.step()
    assert torch.equal((model(points) > 0).float(), labels)


@pytest.mark.parametrize("scaled", [False, True], ids=["scaler disabled", "scaler enabled"])
@every_type
def test_mixed_precision_recipe(mars_type, scaled):
    points, labels = data()
    model = Logistic()
    optimizer = mars_hf.create(model, lr=10 * RATES[mars_type], mars_type=mars_type)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.binary_cross_entropy_with_logits(model(points), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[0] > 1.5 * losses[-1]


@every_implementation
@every_type
def test_some_parameters_without_gradients(mars_type, implementation):
    params = [nn.Parameter(torch.ones(1, 1), requires_grad=index % 2 == 0) for index in range(4)]
    groups = [{"params": params[:2]}, {"params": [params[2]]}, {"params": [params[3]]}]
    optimizer = Mars(groups, mars_type=mars_type, **IMPLEMENTATIONS[implementation])
    optimizer.zero_grad()
    loss = (params[0] + params[2]).pow(2).sum()
    # With a graph, as the optimizers that differentiate twice need it.
    params[0].grad, params[2].grad = torch.autograd.grad(loss, [params[0], params[2]], create_graph=True)
    assert optimizer.step(lambda: 0.1) == 0.1
    assert params[0].item() < 1
    assert params[2].item() < 1
    assert params[1].item() == params[3].item() == 1.0
    assert {param for param, state in optimizer.state.items() if state} == {params[0], params[2]}
    for param in (params[0], params[2]):
        assert not any(value.requires_grad for value in optimizer.state[param].values())


@every_implementation
@every_type
def test_sparse_gradients_are_refused(mars_type, implementation):
    param = nn.Parameter(torch.ones(5, 2))
    param.grad = torch.eye(5, 2).to_sparse()
    optimizer = Mars([param], mars_type=mars_type, **IMPLEMENTATIONS[implementation])
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step(lambda: 0.1)
    assert torch.equal(param, torch.ones(5, 2))
    assert not any(optimizer.state.values())


@every_implementation
@every_type
def test_complex_gradients_are_refused(mars_type, implementation):
    param = nn.Parameter(torch.ones(5, 2, dtype=torch.complex64))
    param.grad = torch.ones(5, 2, dtype=torch.complex64)
    optimizer = Mars([param], mars_type=mars_type, **IMPLEMENTATIONS[implementation])
    with pytest.raises(RuntimeError, match="complex64"):
        optimizer.step(lambda: 0.1)
    assert torch.equal(param, torch.ones(5, 2, dtype=torch.complex64))


@every_implementation
@every_type
def test_a_closure_may_make_all_gradients(mars_type, implementation):
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = Mars([param], mars_type=mars_type, **IMPLEMENTATIONS[implementation])

    def closure() -> float:
        assert torch.is_grad_enabled()
        loss = param.pow(2).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 4.0
    assert (param < 1).all()


@every_implementation
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (3, 0)], ids=str)
@every_type
def test_small_and_empty_parameters(mars_type, shape, implementation):
    param, other = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(3, 2))
    optimizer = Mars([param, other], mars_type=mars_type, **IMPLEMENTATIONS[implementation])
    for gradient in (0.0, 1.0, 1.0):
        param.grad, other.grad = torch.full(shape, gradient), torch.full((3, 2), gradient)
        optimizer.step()
    assert param.shape == shape
    assert torch.isfinite(param).all()
    assert (other < 0).all()
    assert (param < 0).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", -1e-2),
        ("lr_1d", -1e-2),
        ("eps", -1e-6),
        ("weight_decay", -1e-3),
        ("betas", (-0.1, 0.1)),
        ("betas", (0.1, -0.1)),
        ("betas", (0.9,)),
        ("betas_1d", (0.9, 1.0)),
        ("gamma", -0.1),
        ("max_grad_norm", -0.1),
        ("clip_threshold", -0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("door", ["Mars", "create", "group", "add_param_group"])
@every_type
def test_values_out_of_range(mars_type, door, setting, value):
    model = nn.Linear(2, 2)
    given = {"mars_type": mars_type, setting: value}
    with pytest.raises(ValueError, match=setting):
        if door == "Mars":
            Mars(model.parameters(), **given)
        elif door == "create":
            mars_hf.create(model, **given)
        elif door == "group":
            Mars([{"params": list(model.parameters()), **given}])
        else:
            Mars([model.weight], mars_type=mars_type).add_param_group({"params": [model.bias], setting: value})


@pytest.mark.parametrize("set_to_none", [True, False])
@every_implementation
@every_type
def test_both_ways_of_zeroing_are_one(mars_type, implementation, set_to_none):
    """The optimizer owns its last gradient: zeroing p.grad does not change it."""
    results = []
    for way in (True, set_to_none):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = Mars(model.parameters(), mars_type=mars_type, gamma=0.5, **IMPLEMENTATIONS[implementation])
        for step in range(4):
            optimizer.zero_grad(set_to_none=way)
            model(torch.full((2, 3), 1.0 + step)).pow(2).sum().backward()
            optimizer.step()
        results.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *results))


@every_type
def test_the_state_is_what_the_documentation_says(mars_type):
    weight, bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    optimizer = Mars([weight, bias], mars_type=mars_type)
    for param in (weight, bias):
        param.grad = torch.ones_like(param)
    optimizer.step()
    squares = {"exp_avg_sq"} if mars_type == "mars-adamw" else set()
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "last_grad"} | squares
    assert set(optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"}
    for state in optimizer.state.values():
        assert state["step"].shape == ()
        assert state["step"].dtype == torch.float32
