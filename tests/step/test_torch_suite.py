"""PyTorch's own generic checks of optimizers (`TestOptimRenewed` of its test_optim.py), by their names, on Mars.

Left out: what needs GPUs or 64 GB, sparse and complex gradients (refused: test_gradients.py), `foreach`, which is no
setting of Mars, and second-order optimizers. What torch compares between implementations: test_formulas.py.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import equal, needs_compiler
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mars_hf import Mars

# Functions, because schedulers write into a rate that is a tensor.
CONFIGURATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "tensor lr": lambda: {"lr": torch.tensor(0.001, dtype=torch.float32), "lr_1d": 0.002},
    "amsgrad, maximize": lambda: {"amsgrad": True, "maximize": True, "optimize_1d": True},
    "zero betas, decay": lambda: {"betas": (0.0, 0.0), "betas_1d": (0.0, 0.0), "weight_decay": 0.1},
    "small norms": lambda: {"max_grad_norm": 0.01, "clip_threshold": 0.01},
    "recursive": lambda: {"second_moment": "gradient", "clip_threshold": None},
    "bfloat16 states, kahan": lambda: {"state_dtype": torch.bfloat16, "rounding": "kahan"},
    "mars-lion": lambda: {"mars_type": "mars-lion", "max_grad_norm": 1.0},
    "mars-shampoo": lambda: {"mars_type": "mars-shampoo", "clip_threshold": None},
    "mars-m": lambda: {"mars_type": "mars-m", "ns_coefficients": "polar-express"},
}
IMPLEMENTATIONS = [{"fused": False}, pytest.param({"fused": True}, marks=needs_compiler)]
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)
every_implementation = pytest.mark.parametrize("fused", IMPLEMENTATIONS, ids=["for-loop", "fused"])


class Problem:
    """A least-squares problem in a matrix and a vector, both contiguous or neither."""

    def __init__(self, *, contiguous: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        weight, bias = (torch.randn(*shape, 2, generator=generator)[..., 0] for shape in ((10, 5), (10,)))
        self.input = torch.randn(5, generator=generator)
        self.weight = nn.Parameter(weight.contiguous() if contiguous else weight)
        self.bias = nn.Parameter(bias.contiguous() if contiguous else bias)

    @property
    def params(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.weight), ("bias", self.bias)]

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def backward(self) -> Tensor:
        self.weight.grad = self.bias.grad = None
        loss = self.loss()
        loss.backward()
        return loss.detach()


def train(problem: Problem, optimizer: Mars, steps: int = 3, schedulers: Any = ()) -> None:
    for _ in range(steps):
        loss = problem.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


def trained(configuration: str, named: bool = False, **settings: Any) -> tuple[Problem, Mars]:
    problem = Problem()
    params = problem.named if named else problem.params
    optimizer = Mars(params, **CONFIGURATIONS[configuration](), **settings)
    train(problem, optimizer)
    return problem, optimizer


def assert_alike(one: tuple[Problem, Mars], other: tuple[Problem, Mars]) -> None:
    """Step both on, to equal parameters and states."""
    for problem, optimizer in (one, other):
        train(problem, optimizer)
    assert all(map(torch.equal, one[0].params, other[0].params))
    assert equal(one[1].state_dict()["state"], other[1].state_dict()["state"])


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
@every_implementation
@every_configuration
def test_forloop_goes_right_direction(configuration, fused, scheduled, contiguous):
    settings = CONFIGURATIONS[configuration]()
    problem = Problem(contiguous=contiguous)
    optimizer = Mars(problem.params, **settings, **fused)
    linear = [lr_scheduler.LinearLR(optimizer, 0.4, total_iters=4), lr_scheduler.ReduceLROnPlateau(optimizer)]
    before = problem.loss().item()
    train(problem, optimizer, 10, linear if scheduled else ())
    assert (problem.loss().item() > before) is bool(settings.get("maximize"))


@pytest.mark.parametrize("dimensions", [0, 1, 2])
@every_implementation
@every_configuration
def test_tensor_lr(configuration, fused, dimensions):
    settings = {**CONFIGURATIONS[configuration](), **fused}
    lr = torch.tensor(1e-3, dtype=torch.float64).reshape([1] * dimensions)
    runs = []
    for rate in (1e-3, lr):
        problem = Problem()
        train(problem, Mars(problem.params, **{**settings, "lr": rate}))
        runs.append(problem.params)
    assert all(map(torch.equal, *runs))
    assert lr.item() == 1e-3


@every_configuration
def test_set_default_dtype_works(configuration):
    runs = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        problem, optimizer = Problem(), None
        torch.set_default_dtype(dtype)
        try:
            optimizer = Mars(problem.params, **CONFIGURATIONS[configuration]())
            train(problem, optimizer)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values())
        runs.append(problem.params)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def peak_of(function: Callable[[], Any]) -> int:
    """Return the peak bytes of PyTorch's allocator during a call, compiled code included."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_grad_norm": 1.0}, *({"mars_type": "mars-m", "ns_dtype": dtype} for dtype in ("bfloat16", "float32"))],
    ids=str,
)
def test_peak_memory(settings, fused):
    """A step holds a few copies of one parameter; kernels none; Newton-Schulz what the class documents."""
    params = [nn.Parameter(torch.randn(320, 320)) for _ in range(10)]  # too many elements for whole lists
    optimizer = Mars(params, **settings, **fused)
    for _ in range(3):  # the last one is measured
        for param in params:
            param.grad = torch.ones_like(param)
        peak = peak_of(optimizer.step)
    one = params[0].numel() * 4
    limit = one // 2 if fused["fused"] else 8 * one
    if "ns_dtype" in settings:
        limit = {"bfloat16": 13, "float32": 17}[settings["ns_dtype"]] * 10 * params[0].numel()
    assert 0 < peak <= limit


@needs_compiler
def test_fused_error_on_params_on_meta():
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    optimizer = Mars(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match=r"fused=True.*meta"):
        optimizer.step()
    assert not any(optimizer.state.values())


# --- groups ----------------------------------------------------------------------------------------------------------


@every_implementation
@every_configuration
def test_param_groups_lr(configuration, fused):
    """A group at a rate near 0 does not move; the other one does, each by its own settings."""
    settings = CONFIGURATIONS[configuration]() | {"lr": 1e-3, "weight_decay": 0.0}
    problem, others = Problem(), [nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2, 2))]
    before = [param.detach().clone() for param in (*others, *problem.params)]
    rest = {key: value for key, value in settings.items() if key not in ("lr", "lr_1d")}
    optimizer = Mars(
        [{"params": problem.params, "lr": 1e-3}, {"params": others, "lr_1d": 1e-28}], 1e-28, **rest, **fused
    )
    for _ in range(3):
        problem.backward()
        for param in others:
            param.grad = torch.rand_like(param)
        optimizer.step()
    assert all(map(torch.equal, others, before))
    assert not any(map(torch.equal, problem.params, before[2:]))


@every_implementation
@every_configuration
def test_step_is_noop_for_zero_grads(configuration, fused):
    settings = CONFIGURATIONS[configuration]() | {"weight_decay": 0.0}  # decay shrinks without gradients
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5))]
    before = [param.detach().clone() for param in params]
    optimizer = Mars(params, **settings, **fused)
    for _ in range(3):
        for param in params:
            param.grad = torch.zeros_like(param)
        assert optimizer.step(lambda: 1.0) == 1.0
        assert all(map(torch.equal, params, before))


@every_configuration
def test_optimizer_can_be_printed(configuration):
    optimizer = Mars(Problem().params, **CONFIGURATIONS[configuration]())
    assert all(group["role"] in repr(optimizer) for group in optimizer.param_groups)
    assert repr(optimizer).startswith("Mars")


# --- state dicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@every_implementation
@every_configuration
def test_state_dict_deterministic(configuration, fused, names):
    """A loaded state steps on to the bit; so does one whose step counts are numbers (test_load_nontensor_step)."""
    run = trained(configuration, names[0], **fused)
    saved = copy.deepcopy(run[1].state_dict())
    if names == (True, True):
        for state in saved["state"].values():
            state["step"] = state["step"].item()
    kept = copy.deepcopy(saved)
    twin = trained(configuration, names[1], **fused)
    twin[1].load_state_dict(saved)
    assert_alike(run, twin)
    assert equal(saved, kept)  # neither loading nor steps change it


@every_configuration
def test_save_load_equality_with_weights_only(configuration):
    saved = trained(configuration, named=True)[1].state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), saved)


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_state_dict_hooks():
    _, optimizer = trained("default")
    optimizer.register_state_dict_pre_hook(lambda mars: mars.state.update(test=1))
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.register_state_dict_post_hook(lambda mars, saved: {**saved, "marked": saved["state"].pop("test")})
    saved = optimizer.state_dict()
    assert saved["marked"] == 1 and "test" not in saved["state"]


def test_load_state_dict_hooks():
    _, optimizer = trained("default")
    saved, seen = optimizer.state_dict(), []

    def with_rate(lr: float) -> Callable[..., Any]:
        def replaced(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            given = copy.deepcopy(given)
            given["param_groups"][0]["lr"] = lr
            return given

        return replaced

    optimizer.register_load_state_dict_pre_hook(with_rate(0.002))
    optimizer.register_load_state_dict_post_hook(lambda mars: seen.append(mars.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    handle = optimizer.register_load_state_dict_pre_hook(with_rate(0.003))
    optimizer.load_state_dict(saved)
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(with_rate(0.003), prepend=True)
    optimizer.load_state_dict(saved)
    assert seen == [0.002, 0.003, 0.002]


@every_configuration
def test_step_hooks(configuration):
    """A pre-hook runs before everything, so the step uses gradients that it sets."""
    run, twin = trained(configuration), trained(configuration)
    seen: list[float] = []
    handles = [
        run[1].register_step_pre_hook(lambda *_: run[0].backward() and None),
        run[1].register_step_post_hook(lambda mars, *_: seen.extend(state["step"] for state in mars.state.values())),
    ]
    run[1].step()
    train(*twin, 1)
    assert seen == [4.0, 4.0]
    for handle in handles:
        handle.remove()
    assert_alike(run, twin)


def test_step_all_hooks():
    calls: list[str] = []

    def said(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(what)

    _, optimizer = trained("default")
    handles = [
        register_optimizer_step_pre_hook(said("global pre")),
        register_optimizer_step_post_hook(said("global post")),
        optimizer.register_step_pre_hook(said("pre")),
        optimizer.register_step_post_hook(said("post")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert calls == ["global pre", "pre", "post", "global post"]


# --- copies and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))], ids=["copy", "pickle"])
@every_implementation
@every_configuration
def test_deepcopy_copies_all_public_attrs(configuration, fused, copied):
    run = trained(configuration, **fused)
    twin = copied(run)
    public = [{name for name in vars(optimizer) if not name.startswith("_")} for _, optimizer in (run, twin)]
    assert public[0] == public[1]
    known = [param for group in twin[1].param_groups for param in group["params"]]
    assert all(a is b for a, b in zip(known, twin[0].params, strict=True)) and known[0] is not run[0].weight
    assert_alike(run, twin)
    twin[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@every_implementation
@every_configuration
def test_non_empty_state(configuration, fused):
    problem, optimizer = trained(configuration, **fused)
    assert set(optimizer.state) == set(problem.params)
    assert all(len(state) > 1 for state in optimizer.state.values())
