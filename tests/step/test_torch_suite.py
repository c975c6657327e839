"""PyTorch's own generic checks of optimizers (`TestOptimRenewed` of its test_optim.py), by their names, on Mars.

Left out: what needs GPUs or 64 GB, sparse and complex gradients (refused: test_gradients.py), `foreach`, which is no
setting of Mars, second-order optimizers, and hooks of steps and state dicts, which are torch's. What torch compares
between implementations, and groups with rates of their own: test_formulas.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import equal, fused_and_plain
from torch import Tensor, nn

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
    "mars-m": lambda: {"mars_type": "mars-m", "ns_coefficients": [(3.0, -3.2, 1.2)] * 5},
}
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)


class Problem:
    """A least-squares problem in a matrix and a vector, both contiguous or neither."""

    def __init__(self, *, contiguous: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        weight, bias = (torch.randn(*shape, 2, generator=generator)[..., 0] for shape in ((10, 5), (10,)))
        self.input = torch.randn(5, generator=generator)
        self.weight = nn.Parameter(weight.contiguous() if contiguous else weight)
        self.bias = nn.Parameter(bias.contiguous() if contiguous else bias)
        self.params = [self.weight, self.bias]

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def backward(self) -> None:
        self.weight.grad = self.bias.grad = None
        self.loss().backward()


def train(problem: Problem, optimizer: Mars, steps: int = 3) -> None:
    for _ in range(steps):
        problem.backward()
        optimizer.step()


def trained(configuration: str, named: bool = False, **settings: Any) -> tuple[Problem, Mars]:
    problem = Problem()
    params = [("weight", problem.weight), ("bias", problem.bias)]
    optimizer = Mars(params if named else problem.params, **CONFIGURATIONS[configuration](), **settings)
    train(problem, optimizer)
    return problem, optimizer


def assert_alike(*runs: tuple[Problem, Mars]) -> None:
    """Step both on, to equal parameters and states."""
    for run in runs:
        train(*run)
    assert equal(*((problem.params, optimizer.state_dict()["state"]) for problem, optimizer in runs))


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@fused_and_plain
@every_configuration
def test_forloop_goes_right_direction(configuration, fused, contiguous):
    settings = CONFIGURATIONS[configuration]()
    problem = Problem(contiguous=contiguous)
    optimizer = Mars(problem.params, **settings, fused=fused)
    before = problem.loss().item()
    train(problem, optimizer, 10)
    assert (problem.loss().item() > before) is bool(settings.get("maximize"))


@pytest.mark.parametrize("dimensions", [0, 1, 2])
@fused_and_plain
@every_configuration
def test_tensor_lr(configuration, fused, dimensions):
    settings = {**CONFIGURATIONS[configuration](), "fused": fused}
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


@fused_and_plain
@every_configuration
def test_step_is_noop_for_zero_grads(configuration, fused):
    settings = CONFIGURATIONS[configuration]() | {"weight_decay": 0.0}  # decay shrinks without gradients
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5))]
    before = [param.detach().clone() for param in params]
    optimizer = Mars(params, **settings, fused=fused)
    for _ in range(3):
        for param in params:
            param.grad = torch.zeros_like(param)
        assert optimizer.step(lambda: 1.0) == 1.0
        assert all(map(torch.equal, params, before))


# --- state dicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@fused_and_plain
@every_configuration
def test_state_dict_deterministic(configuration, fused, names):
    """A loaded state steps on to the bit; so does one whose step counts are numbers (test_load_nontensor_step)."""
    run = trained(configuration, names[0], fused=fused)
    saved = copy.deepcopy(run[1].state_dict())
    if names == (True, True):
        for state in saved["state"].values():
            state["step"] = state["step"].item()
    kept = copy.deepcopy(saved)
    twin = trained(configuration, names[1], fused=fused)
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


# --- copies and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))], ids=["copy", "pickle"])
@fused_and_plain
@every_configuration
def test_deepcopy_copies_all_public_attrs(configuration, fused, copied):
    run = trained(configuration, fused=fused)
    twin = copied(run)
    public = [{name for name in vars(optimizer) if not name.startswith("_")} for _, optimizer in (run, twin)]
    assert public[0] == public[1]
    known = [param for group in twin[1].param_groups for param in group["params"]]
    assert all(a is b for a, b in zip(known, twin[0].params, strict=True)) and known[0] is not run[0].weight
    assert_alike(run, twin)
    twin[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
