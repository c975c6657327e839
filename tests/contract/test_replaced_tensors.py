"""The next step uses states, parameters and groups that were replaced between steps.

Each case runs a few steps, so that the optimizer caches what it can, replaces something in the optimizer
and in the straight-line reference, and continues.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import mars_of
from mars_info import needs_compiler
from reference import Reference
from torch import Tensor, nn

SMALL = ((7, 5), (6,), (4, 3))
LARGE = ((1025, 1000), (6,), (4, 3))  # above a million elements the compiled backend is the default
LR, LR_1D = 0.01, 0.005
BETAS, BETAS_1D = (0.9, 0.95), (0.8, 0.9)
GAMMA = 0.5

# The reference's name for each state.
NAMES = {"exp_avg": "m", "exp_avg_sq": "v", "last_grad": "last", "max_exp_avg_sq": "v_max"}


class Run:
    """Run Mars beside a straight-line float64 reference that learns of every replacement."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], **settings: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(self.random(shape)) for shape in shapes]
        self.settings = settings
        self.mars = mars_of(self.params, lr=LR, lr_1d=LR_1D, betas=BETAS, betas_1d=BETAS_1D, gamma=GAMMA, **settings)
        self.lines = [self.line_of(param) for param in self.params]
        self.unwritten: list[tuple[Tensor, Tensor]] = []

    def random(self, shape: Any, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def line_of(self, param: Tensor) -> Reference:
        amsgrad = self.settings.get("amsgrad", False)
        if param.ndim < 2:
            return Reference(param, rule="adamw", lr=LR_1D, betas=BETAS_1D, amsgrad=amsgrad)
        rule = self.settings.get("mars_type", "mars-adamw")
        return Reference(param, rule=rule, lr=LR, betas=BETAS, gamma=GAMMA, amsgrad=amsgrad)

    def gradients(self) -> list[Tensor]:
        # Norms near the threshold of 1, so that clipping matters.
        return [self.random(param.shape, 2 / param.numel() ** 0.5) for param in self.params]

    def steps(self, count: int) -> None:
        for left in reversed(range(count)):
            gradients = self.gradients()
            for param, gradient in zip(self.params, gradients, strict=True):
                param.grad = gradient.clone()
            self.mars.step()
            self.follow(gradients, compared=left == 0)

    def follow(self, gradients: list[Tensor], *, compared: bool = True) -> None:
        for param, line, gradient in zip(self.params, self.lines, gradients, strict=True):
            line.step(gradient)
            if not compared:
                continue
            torch.testing.assert_close(param.detach().double(), line.x, rtol=1e-4, atol=2e-5)
            for key, value in self.mars.state[param].items():
                if key in NAMES and "last_grad_scale" not in self.mars.state[param]:
                    torch.testing.assert_close(value.double(), getattr(line, NAMES[key]), rtol=1e-4, atol=2e-5)
        for old, kept in self.unwritten:
            assert torch.equal(old, kept)

    def leave_alone(self, *tensors: Tensor) -> None:
        """Register replaced tensors: no later step may write to them."""
        self.unwritten += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def replace(self, key: str, value_of: Callable[[Tensor], Tensor]) -> None:
        for param, line in zip(self.params, self.lines, strict=True):
            state = self.mars.state[param]
            if key in state:
                self.leave_alone(state[key])
                state[key] = value_of(state[key])
                setattr(line, NAMES[key], state[key].double())


def exp_avg(run: Run) -> None:
    run.replace("exp_avg", lambda old: run.random(old.shape, 0.1))


def exp_avg_sq(run: Run) -> None:
    run.replace("exp_avg_sq", lambda old: run.random(old.shape).square())


def max_exp_avg_sq(run: Run) -> None:
    run.replace("max_exp_avg_sq", lambda old: run.random(old.shape).square())


def last_grad(run: Run) -> None:
    run.replace("last_grad", lambda old: run.random(old.shape, 0.1))


def large_last_grad(run: Run) -> None:
    """Replace last gradients, so that a small gradient has a corrected gradient large enough to clip."""
    run.replace("last_grad", lambda old: torch.full_like(old, 3.0))


def transposed_state(run: Run) -> None:
    """Replace states by the same numbers in another memory order."""
    for key in ("exp_avg", "exp_avg_sq", "last_grad"):
        run.replace(key, lambda old: old.t().contiguous().t() if old.ndim == 2 else old.clone())


def strided_state(run: Run) -> None:
    """Replace states by the same numbers with memory gaps between them."""
    for key in ("exp_avg", "exp_avg_sq", "last_grad"):
        run.replace(key, lambda old: torch.stack([old, old], -1)[..., 0])


def step_count(run: Run) -> None:
    for param, line in zip(run.params, run.lines, strict=True):
        run.leave_alone(run.mars.state[param]["step"])
        run.mars.state[param]["step"] = torch.tensor(40.0)
        line.t = 40


def one_step_count(run: Run) -> None:
    run.mars.state[run.params[0]]["step"] = torch.tensor(40.0)
    run.lines[0].t = 40


def step_count_of_zero(run: Run) -> None:
    """Reset step counts alone: the other states stay, and the last gradient does not become zero."""
    for param, line in zip(run.params, run.lines, strict=True):
        run.mars.state[param]["step"] = torch.tensor(0.0)
        if "last_grad" in run.mars.state[param]:
            run.mars.state[param]["last_grad"].fill_(3.0)
            line.last = torch.full_like(line.last, 3.0)
        line.t = 0


def step_count_zeroed_in_place(run: Run) -> None:
    for param, line in zip(run.params, run.lines, strict=True):
        run.mars.state[param]["step"].zero_()
        if "last_grad" in run.mars.state[param]:
            run.mars.state[param]["last_grad"].data.fill_(3.0)
            line.last = torch.full_like(line.last, 3.0)
        line.t = 0


def dicts_of_states(run: Run) -> None:
    for param in run.params:
        run.mars.state[param] = copy.deepcopy(run.mars.state[param])


def no_states(run: Run) -> None:
    run.mars.state = defaultdict(dict)
    run.lines = [run.line_of(param) for param in run.params]


def cleared_states(run: Run) -> None:
    run.mars.state.clear()
    run.lines = [run.line_of(param) for param in run.params]


def state_of_one_deleted(run: Run) -> None:
    del run.mars.state[run.params[0]]
    run.lines[0] = run.line_of(run.params[0])


def states_in_place(run: Run) -> None:
    for param, line in zip(run.params, run.lines, strict=True):
        for key, value in run.mars.state[param].items():
            if key in NAMES:
                value.data.fill_(3.0)
                setattr(line, NAMES[key], torch.full_like(line.x, 3.0))


def data_of_states(run: Run) -> None:
    """Replace the data of states, as an offload to another device and back does."""
    for param, line in zip(run.params, run.lines, strict=True):
        for key, value in run.mars.state[param].items():
            if key in NAMES:
                old = value.data
                run.leave_alone(old)
                value.data = run.random(old.shape, 0.1).square()
                setattr(line, NAMES[key], value.double())


def data_of_parameters(run: Run) -> None:
    for param, line in zip(run.params, run.lines, strict=True):
        run.leave_alone(param.data)
        param.data = run.random(param.shape)
        line.x = param.detach().double()


def data_of_parameters_in_another_order(run: Run) -> None:
    for param in run.params:
        run.leave_alone(param.data)
        param.data = param.data.t().contiguous().t() if param.ndim == 2 else torch.stack([param.data] * 2, -1)[:, 0]


def offload(run: Run) -> None:
    """Free the memory of parameters and states for others, and bring them back elsewhere."""
    for param in run.params:
        for tensor in (param, *(value for key, value in run.mars.state[param].items() if key in NAMES)):
            old = tensor.data
            kept = old.clone()
            tensor.data = torch.empty(0)
            old.fill_(float("nan"))
            tensor.data = kept


def data_of_gradients(run: Run) -> None:
    gradients = run.gradients()
    for param, gradient in zip(run.params, gradients, strict=True):
        param.grad = torch.full_like(param, float("nan"))
        param.grad.data = gradient.clone()
    run.mars.step()
    run.follow(gradients)


def groups(run: Run) -> None:
    run.mars.param_groups = [dict(group) for group in run.mars.param_groups]
    run.mars.param_groups[0]["lr"] = run.lines[0].lr = run.lines[2].lr = 0.03
    run.mars.param_groups[0]["betas"] = run.lines[0].betas = run.lines[2].betas = (0.5, 0.7)
    run.mars.param_groups[1]["lr"] = run.lines[1].lr = 0.02


def groups_in_place(run: Run) -> None:
    run.mars.param_groups[:] = [dict(group) for group in run.mars.param_groups]
    run.mars.param_groups[0]["gamma"] = run.lines[0].gamma = run.lines[2].gamma = 0.1
    run.mars.param_groups[0]["eps"] = run.lines[0].eps = run.lines[2].eps = 1e-2


def lists_of_parameters(run: Run) -> None:
    for group in run.mars.param_groups:
        group["params"] = list(group["params"])


def order_of_parameters(run: Run) -> None:
    run.mars.param_groups[0]["params"].reverse()
    run.mars.param_groups.reverse()


def new_matrix(run: Run) -> None:
    replace_parameter(run, 0, 0, 0)


def new_vector(run: Run) -> None:
    replace_parameter(run, 1, 1, 0)


def replace_parameter(run: Run, index: int, group: int, place: int) -> None:
    old = run.params[index]
    new = nn.Parameter(run.random(old.shape))
    run.mars.param_groups[group]["params"][place] = new
    run.leave_alone(old)
    run.params[index], run.lines[index] = new, run.line_of(new)


def loaded(run: Run) -> None:
    run.mars.load_state_dict(copy.deepcopy(run.mars.state_dict()))


def loaded_with_other_numbers(run: Run) -> None:
    saved = copy.deepcopy(run.mars.state_dict())
    places = {id(param): index for index, param in enumerate(run.params)}
    for number, param in enumerate(param for group in run.mars.param_groups for param in group["params"]):
        index = places[id(param)]
        for key, name in NAMES.items():
            if key in saved["state"][number]:
                saved["state"][number][key].fill_(3.0)
                setattr(run.lines[index], name, torch.full_like(run.lines[index].x, 3.0))
        saved["state"][number]["step"] = torch.tensor(0.0)
        run.lines[index].t = 0
    run.mars.load_state_dict(saved)


CASES = (
    *(exp_avg, exp_avg_sq, last_grad, large_last_grad, transposed_state, strided_state),
    *(
        step_count,
        one_step_count,
        step_count_of_zero,
        step_count_zeroed_in_place,
        dicts_of_states,
        no_states,
        cleared_states,
    ),
    *(state_of_one_deleted, states_in_place, data_of_states, data_of_parameters),
    *(data_of_parameters_in_another_order, offload, data_of_gradients, groups, groups_in_place),
    *(lists_of_parameters, order_of_parameters, new_matrix, new_vector, loaded, loaded_with_other_numbers),
)
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "fused": {"fused": True},
    "take_grad": {"take_grad": True},
    "take_grad, fused": {"take_grad": True, "fused": True},
    "mars-lion": {"mars_type": "mars-lion"},
    "mars-lion, fused": {"mars_type": "mars-lion", "fused": True},
    "measured": {"fused": True},
}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@every_case
def test_what_is_replaced_is_used(case, form):
    run = Run(SMALL, **FORMS[form])
    run.mars.collect_metrics(form == "measured")
    run.steps(3)
    case(run)
    run.steps(1)
    run.steps(2)


LARGE_CASES = [
    *((case, False) for case in (exp_avg_sq, strided_state, step_count, data_of_states, data_of_parameters, groups)),
    *((case, False) for case in (data_of_parameters_in_another_order, new_matrix, state_of_one_deleted)),
    *((case, True) for case in (large_last_grad, data_of_states, offload, loaded_with_other_numbers)),
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("case", "take_grad"),
    LARGE_CASES,
    ids=[f"{case.__name__}{'-take_grad' if takes else ''}" for case, takes in LARGE_CASES],
)
def test_what_is_replaced_is_used_where_compiled_kernels_act(case, take_grad):
    run = Run(LARGE, take_grad=take_grad)
    run.steps(2)
    case(run)
    run.steps(2)


@needs_compiler
@pytest.mark.parametrize("form", ["auto", "fused"])
def test_running_maxima_are_used(form):
    run = Run(SMALL, amsgrad=True, **FORMS[form])
    run.steps(3)
    max_exp_avg_sq(run)
    run.steps(3)


@needs_compiler
@pytest.mark.parametrize("implementation", [{}, {"fused": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_offload_at_every_step(implementation, every):
    """Between steps every tensor of the optimizer moves."""
    run = Run(SMALL, **implementation)
    for number in range(8):
        run.steps(1)
        if number % every == 0:
            offload(run)


def test_the_comparison_sees_a_state_that_is_not_used():
    run = Run(SMALL)
    run.steps(3)
    run.lines[0].v *= 2
    with pytest.raises(AssertionError):
        run.steps(1)
