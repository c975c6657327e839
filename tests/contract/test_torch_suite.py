"""Run PyTorch's own generic optimizer checks, its `TestOptimRenewed`, on Mars.

Each test has the name that PyTorch gives the check, and runs it on every configuration of `mars_info`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mars_info import (
    CONFIGURATIONS,
    EVERY_IMPLEMENTATION,
    IMPLEMENTATIONS,
    MARS,
    PAIRS,
    OptimizerErrorEnum,
    equal,
    needs_compiler,
    settings_of,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mars_hf import Mars

every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)
every_implementation = pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)
every_pair = pytest.mark.parametrize(("configuration", "implementation"), PAIRS)
# One of each kind, for checks that take long or do not depend on the configuration.
some_configurations = pytest.mark.parametrize(
    "configuration",
    ["default", "tensor lr", "small max_grad_norm", "recursive", "mars-lion", "mars-shampoo", "mars-m"],
)

# PyTorch's checks that do not run here, with reasons.
NOT_RUN = {
    "test_rosenbrock_sparse": "sparse gradients are refused: test_errors",
    "test_complex": "complex gradients are refused: test_errors",
    "test_complex_2d": "complex gradients are refused: test_errors",
    "test_forloop_goes_right_direction_multigpu": "needs two GPUs",
    "test_foreach_large_tensor": "needs a GPU of 72 GB",
    "test_fused_large_tensor": "needs 64 GB of memory",
    "test_fused_does_not_step_if_foundinf": (
        "Mars does not take the scaler's found_inf itself (_step_supports_amp_scaling), so the scaler skips the step"
    ),
    "test_state_dict_with_cuda_params": "needs a GPU",
    "test_cpu_load_state_dict": "needs a GPU",
    "test_fused_cpu_matches_cuda": "needs a GPU",
    "test_foreach_matches_forloop": "no setting of Mars; both kinds of lists: test_golden.py, test_contract.py",
    "test_defaults_changed_to_foreach": "looks for torch's private functions; what None stands for: test_backends.py",
    "test_second_order_optims_return_consistent_types": "Mars is of first order: it calls a closure once",
}

# Every check of PyTorch's class, as of 2.13.
GENERIC = (
    *("test_optim_infos_do_not_specify_global_cliquey_kwargs", "test_errors", "test_forloop_goes_right_direction"),
    *("test_forloop_goes_right_direction_multigpu", "test_param_group_with_lrscheduler_goes_right_direction"),
    *("test_tensor_lr", "test_rosenbrock_sparse", "test_complex", "test_complex_2d", "test_foreach_matches_forloop"),
    *("test_mixed_device_dtype", "test_set_default_dtype_works_with_foreach", "test_foreach_large_tensor"),
    *("test_peak_memory_foreach", "test_fused_matches_forloop", "test_fused_error_on_params_on_meta"),
    *("test_fused_large_tensor", "test_fused_does_not_step_if_foundinf", "test_cpu_load_state_dict"),
    *("test_param_groups_weight_decay", "test_param_groups_lr", "test_step_is_noop_when_params_have_no_grad"),
    *("test_step_is_noop_for_zero_grads", "test_optimizer_can_be_printed", "test_state_dict_deterministic"),
    *("test_can_load_older_state_dict", "test_can_load_from_to_named_state_dict"),
    *("test_save_load_equality_with_weights_only", "test_load_nontensor_step", "test_state_dict_with_cuda_params"),
    *("test_state_dict_pre_hook", "test_state_dict_post_hook", "test_state_dict_pre_post_hook"),
    *("test_load_state_dict_pre_hook_and_prepend", "test_load_state_dict_post_hook"),
    *("test_load_state_dict_pre_post_hook", "test_step_post_hook", "test_step_pre_hook", "test_step_all_hooks"),
    *("test_deepcopy_copies_all_public_attrs", "test_second_order_optims_return_consistent_types"),
    *("test_fused_cpu_matches_cuda", "test_defaults_changed_to_foreach", "test_non_empty_state"),
)


def test_every_generic_check_is_run_or_listed():
    run = {name for name in vars(sys.modules[__name__]) if name in GENERIC}
    assert run | set(NOT_RUN) == set(GENERIC)
    assert not run & set(NOT_RUN)


def test_there_are_as_many_configurations_as_the_authors_of_the_issue_ran():
    assert len(CONFIGURATIONS) >= 36


def test_every_setting_of_mars_is_in_some_configuration():
    import inspect

    settings = set(inspect.signature(Mars.__init__).parameters) - {"self", "params", "process_group"}
    given = {key for name in CONFIGURATIONS for key in settings_of(name)} | {"fused"}
    elsewhere = {"is_approx": "exact steps need stale gradients: test_exact.py"}
    assert settings - given == set(elsewhere)


# --- what the checks work on ------------------------------------------------------------------------------------


class Problem:
    """Return a least-squares problem in a matrix and a vector, both contiguous or neither."""

    def __init__(self, *, contiguous: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(10, 5, 2, generator=generator).to(dtype)[..., 0]
        bias = torch.randn(10, 2, generator=generator).to(dtype)[..., 0]
        self.input = torch.randn(5, generator=generator).to(dtype)
        # A Parameter of a strided view keeps its strides.
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
        for param in self.params:
            param.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def copy(self) -> Problem:
        """Return copies of the tensors."""
        twin = copy.copy(self)
        twin.weight = nn.Parameter(self.weight.detach().clone(memory_format=torch.preserve_format))
        twin.bias = nn.Parameter(self.bias.detach().clone(memory_format=torch.preserve_format))
        return twin


def assert_right_direction(problem: Problem, before: float, settings: dict[str, Any]) -> None:
    after = problem.loss().item()
    assert after > before if settings.get("maximize") else after < before


def train(problem: Problem, optimizer: Mars, steps: int, schedulers: list[Any] = ()) -> None:  # type: ignore[assignment]
    for _ in range(steps):
        loss = problem.backward()
        optimizer.step()
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss.item())
            else:
                scheduler.step()


# --- the update -------------------------------------------------------------------------------------------------


def test_optim_infos_do_not_specify_global_cliquey_kwargs():
    for given in MARS.optim_inputs_func(device="cpu"):
        assert not {"foreach", "fused", "differentiable"} & set(given.kwargs)


@pytest.mark.filterwarnings("default:optimizer contains")
@pytest.mark.parametrize(
    "refused",
    MARS.optim_error_inputs_func("cpu", torch.float32),
    ids=lambda refused: refused.optimizer_error_input.desc,
)
def test_errors(refused):
    given = refused.optimizer_error_input
    expected = pytest.warns if issubclass(refused.error_type, Warning) else pytest.raises
    if refused.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with expected(refused.error_type, match=refused.error_regex):
            MARS.optim_cls(given.params, **given.kwargs)
    else:
        optimizer = MARS.optim_cls(given.params, **given.kwargs)
        with expected(refused.error_type, match=refused.error_regex):
            optimizer.step()


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@every_configuration
def test_forloop_goes_right_direction(configuration, contiguous):
    for schedulers in (None, MARS.scheduler_inputs[1]):
        settings = settings_of(configuration, "for-loop")
        problem = Problem(contiguous=contiguous)
        assert problem.weight.is_contiguous() is contiguous
        optimizer = Mars(problem.params, **settings)
        before = problem.loss().item()
        train(problem, optimizer, 10, [made(optimizer) for made in schedulers or ()])
        assert_right_direction(problem, before, settings)


@every_pair
def test_strided_parameters_step_as_contiguous_ones(configuration, implementation):
    """PyTorch runs the check above on the for-loop only, which is least sensitive to strides."""
    strided, contiguous = Problem(contiguous=False), Problem()
    train(strided, Mars(strided.params, **settings_of(configuration, implementation)), 5)
    train(contiguous, Mars(contiguous.params, **settings_of(configuration, "for-loop")), 5)
    orthogonal = settings_of(configuration).get("mars_type") in ("mars-shampoo", "mars-m")
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if orthogonal else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(strided.params, contiguous.params, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@every_implementation
def test_param_group_with_lrscheduler_goes_right_direction(implementation):
    for schedulers in MARS.scheduler_inputs:
        problem = Problem()
        groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}]
        optimizer = Mars(groups, **IMPLEMENTATIONS[implementation])
        before = problem.loss().item()
        train(problem, optimizer, 20, [made(optimizer) for made in schedulers])
        assert_right_direction(problem, before, {})


@every_pair
def test_tensor_lr(configuration, implementation):
    assert_rate_may_be_a_tensor(configuration, implementation, 0)


@pytest.mark.parametrize("dimensions", [1, 2])
@every_implementation
@some_configurations
def test_tensor_lr_of_more_dimensions(configuration, implementation, dimensions):
    assert_rate_may_be_a_tensor(configuration, implementation, dimensions)


def assert_rate_may_be_a_tensor(configuration: str, implementation: str, dimensions: int) -> None:
    number, tensor = Problem(), Problem()
    settings = settings_of(configuration, implementation)
    one = Mars(number.params, **{**settings, "lr": 1e-3})
    lr = torch.tensor(1e-3, dtype=torch.float64).reshape([1] * dimensions)
    other = Mars(tensor.params, **{**settings, "lr": lr})
    for _ in range(3):
        number.backward()
        one.step()
        tensor.backward()
        other.step()
    for a, b in zip(number.params, tensor.params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert lr.item() == 1e-3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())


def seven_steps(
    configuration: str, implementation: str, dtype: torch.dtype, model: nn.Sequential | None = None
) -> tuple[list[Tensor], Mars]:
    """Gradients are missing, come and go; a 0-d parameter has the same gradient throughout."""
    model = (network() if model is None else model).to(dtype)
    given = torch.linspace(0.1, 0.6, 6, dtype=dtype).reshape(3, 2)
    scalar = torch.full((), 0.5, dtype=dtype, requires_grad=True)
    empty = torch.empty((0, 3), dtype=dtype, requires_grad=True)
    params = [*model.parameters(), scalar, empty]
    optimizer = Mars(params, **settings_of(configuration, implementation))
    for step in range(7):
        optimizer.zero_grad()
        model[2].requires_grad_(not 3 <= step < 5)
        scalar.grad, empty.grad = torch.full_like(scalar, 0.1), torch.zeros_like(empty)
        if step != 2:
            model(given).sum().backward()
        optimizer.step()
    return params, optimizer


@functools.cache
def seven_plain_steps(configuration: str, dtype: torch.dtype) -> tuple[list[Tensor], Mars]:
    return seven_steps(configuration, "for-loop", dtype)


def assert_same_run(configuration: str, implementation: str, dtype: torch.dtype, **tolerance: float) -> None:
    ours, one = seven_steps(configuration, implementation, dtype)
    plain, other = seven_plain_steps(configuration, dtype)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
        assert one.state[a].keys() == other.state[b].keys()
        for key, value in one.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            limits = tolerance if value.dtype == torch.float64 else {"rtol": 2e-2, "atol": 1e-3}
            torch.testing.assert_close(value, other.state[b][key], **limits)


def is_orthogonal(configuration: str) -> bool:
    return settings_of(configuration).get("mars_type") in ("mars-shampoo", "mars-m")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)  # and float16 below
@every_configuration
def test_fused_matches_forloop(configuration, dtype):
    if dtype == torch.float64:
        tolerance = {"rtol": 1e-7, "atol": 1e-7}
    elif configuration == "stochastic rounding" and dtype == torch.bfloat16:
        tolerance = {"rtol": 5e-2, "atol": 1e-2}  # each has its own noise
    elif is_orthogonal(configuration) or dtype != torch.float32:
        tolerance = {"rtol": 2e-2, "atol": 1e-3}
    else:
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    assert_same_run(configuration, "fused", dtype, **tolerance)


@functools.cache
def mixed_steps(configuration: str, implementation: str) -> tuple[list[Tensor], Mars]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16) * 2
    params = [torch.rand(2, 3, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]
    gradients = [torch.rand(2, 3, generator=generator).to(dtype) for dtype in dtypes]
    optimizer = Mars(params, **settings_of(configuration, implementation))
    for _ in range(7):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    return params, optimizer


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("implementation", ["fused"])
@every_configuration
def test_mixed_device_dtype(configuration, implementation):
    """One list of all dtypes; the other devices of PyTorch's check are GPUs."""
    tolerance = {
        torch.float64: {"rtol": 1e-6, "atol": 1e-6},
        torch.float32: {"rtol": 1e-4, "atol": 1e-5},
        torch.float16: {"rtol": 5e-3, "atol": 5e-3},
        torch.bfloat16: {"rtol": 8e-2, "atol": 8e-2},
    }
    (ours, one), (plain, other) = mixed_steps(configuration, implementation), mixed_steps(configuration, "for-loop")
    for a, b in zip(ours, plain, strict=True):
        limits = {"rtol": 5e-2, "atol": 5e-2} if is_orthogonal(configuration) else tolerance[a.dtype]
        torch.testing.assert_close(a, b, **limits)
        assert one.state[a].keys() == other.state[b].keys()
        for key in one.state[a]:
            torch.testing.assert_close(one.state[a][key], other.state[b][key], **limits)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("configuration", "implementation"),
    [
        pytest.param(name, "fused", marks=needs_compiler) if index % 2 else (name, "for-loop")
        for index, name in enumerate(CONFIGURATIONS)
    ],
)
def test_set_default_dtype_works_with_foreach(configuration, implementation):
    ordinary, _ = seven_steps(configuration, implementation, torch.float64)
    for dtype in (torch.float64, torch.float16):
        model = network()
        with default_dtype(dtype):
            params, optimizer = seven_steps(configuration, implementation, torch.float64, model)
        for a, b in zip(params, ordinary, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
            if "step" in optimizer.state[a]:
                assert optimizer.state[a]["step"].dtype == torch.float32


def peak_of(function: Callable[[], Any]) -> int:
    """Return the peak bytes of PyTorch's allocator during a call."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_the_peak_counts_what_is_held_at_once():
    a = torch.ones(1000)

    def function():
        for _ in range(3):
            del_ = a + a
            del del_
        return a + a, a + a

    assert 8000 <= peak_of(function) <= 8100


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [pytest.param("fused", marks=needs_compiler), "for-loop"])
@pytest.mark.parametrize(
    ("configuration", "ns_dtype"),
    [("default", None), ("max_grad_norm", None), ("mars-m", "bfloat16"), ("mars-m", "float32")],
)
def test_peak_memory_foreach(configuration, ns_dtype, implementation):
    """A step holds at most a few copies of one parameter, none in kernels."""
    count, shape = 10, (64, 64)
    params = [nn.Parameter(torch.randn(shape)) for _ in range(count)]
    optimizer = Mars(params, **settings_of(configuration, implementation) | {"ns_dtype": ns_dtype})

    def backward() -> None:
        for param in params:
            param.grad = torch.ones_like(param)

    for _ in range(2):
        backward()
        optimizer.step()
    backward()
    one = params[0].numel() * 4
    limit = {"for-loop": 8 * one, "fused": one // 2}[implementation]
    if is_orthogonal(configuration):  # Newton-Schulz works on all matrices of one shape, and on their products
        per_element = {"bfloat16": 13, "float32": 17}[ns_dtype]
        limit = per_element * count * params[0].numel()
    assert peak_of(optimizer.step) <= limit


@contextlib.contextmanager
def swapped_params() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@needs_compiler
def test_fused_error_on_params_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1))
    optimizer = Mars(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match=r"fused=True.*meta"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert not any(optimizer.state.values())
    with swapped_params():  # so that the optimizer holds the model's parameters
        model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            param.grad = torch.ones_like(param)
    optimizer.step()
    for param in model.parameters():
        assert torch.isfinite(param).all()
        assert (param < 0).all()


# --- groups -----------------------------------------------------------------------------------------------------


@every_pair
def test_param_groups_weight_decay(configuration, implementation):
    settings = settings_of(configuration, implementation)
    problem = Problem()
    optimizer = Mars(
        [
            {"params": [problem.weight], **settings},
            {"params": [problem.bias], **settings_of(configuration, implementation), "weight_decay": 0.0},
        ]
    )
    before = problem.loss().item()
    train(problem, optimizer, 3)
    assert_right_direction(problem, before, settings)


@every_pair
def test_param_groups_lr(configuration, implementation):
    settings = settings_of(configuration, implementation)
    settings.setdefault("lr", 1e-3)
    problem = Problem()
    irrelevant = nn.Parameter(torch.randn(2))
    irrelevant_matrix = nn.Parameter(torch.randn(2, 2))
    clones = [irrelevant.detach().clone(), irrelevant_matrix.detach().clone()]
    shared = {key: settings[key] for key in ("max_grad_norm",) if key in settings}  # one for all groups
    optimizer = Mars(
        [{"params": problem.params, **settings}, {"params": [irrelevant, irrelevant_matrix]}], lr=1e-28, **shared
    )
    before = problem.loss().item()
    for _ in range(3):
        problem.backward()
        for param in (irrelevant, irrelevant_matrix):
            param.grad = torch.rand_like(param)
        optimizer.step()
    assert_right_direction(problem, before, settings)
    assert torch.equal(irrelevant, clones[0])
    assert torch.equal(irrelevant_matrix, clones[1])


@every_pair
def test_step_is_noop_when_params_have_no_grad(configuration, implementation):
    params = [torch.randn(2, 3), torch.randn(2)]
    before = [param.clone() for param in params]
    optimizer = Mars(params, **settings_of(configuration, implementation))
    result = optimizer.step(lambda: torch.ones(1))
    assert torch.equal(result, torch.ones(1))
    assert all(map(torch.equal, params, before))
    assert not any(optimizer.state.values())


# Decay shrinks parameters even without gradients.
@pytest.mark.parametrize(
    ("configuration", "implementation"),
    [pair for pair in PAIRS if not settings_of(pair.values[0]).get("weight_decay")],
)
def test_step_is_noop_for_zero_grads(configuration, implementation):
    settings = settings_of(configuration, implementation)
    params = [torch.randn(5, 3, requires_grad=True), torch.randn(5, requires_grad=True)]
    before = [param.detach().clone() for param in params]
    optimizer = Mars(params, **settings)
    for _ in range(3):
        for param in params:
            param.grad = torch.zeros_like(param)
        assert optimizer.step(lambda: 1.0) == 1.0
        assert all(map(torch.equal, params, before))


@every_configuration
def test_optimizer_can_be_printed(configuration):
    for implementation in IMPLEMENTATIONS:
        optimizer = Mars(Problem().params, **settings_of(configuration, implementation))
        printed = repr(optimizer)
        assert type(optimizer).__name__ in printed
        assert all(group["role"] in printed for group in optimizer.param_groups)


# --- state dicts ------------------------------------------------------------------------------------------------


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


@every_pair
def test_state_dict_deterministic(configuration, implementation):
    assert_goes_on(configuration, implementation, (False, False))


@pytest.mark.parametrize("names", [(True, False), (False, True), (True, True)], ids=str)
@some_configurations
def test_state_dict_deterministic_with_names(configuration, names):
    assert_goes_on(configuration, "auto", names)


def assert_goes_on(configuration: str, implementation: str, names: tuple[bool, bool]) -> None:
    problem = Problem()
    optimizer = Mars(problem.named if names[0] else problem.params, **settings_of(configuration, implementation))
    train(problem, optimizer, 3)
    twin = problem.copy()
    other = Mars(twin.named if names[1] else twin.params, **settings_of(configuration, implementation))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        train(problem, optimizer, 1)
        train(twin, other, 1)
        assert all(map(torch.equal, problem.params, twin.params))
    assert equal(without_names(optimizer.state_dict()), without_names(other.state_dict()))
    # A parameter that occurs twice has one number.
    other.param_groups.extend(other.param_groups)
    last = [without_names(one.state_dict())["param_groups"][-1] for one in (optimizer, other)]
    assert equal(*last)


@every_configuration
def test_can_load_older_state_dict(configuration):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))
    given = torch.rand(1, 4, 6, 6)
    optimizer = Mars(model.parameters(), **settings_of(configuration))

    def step() -> None:
        optimizer.zero_grad()
        model(given).pow(2).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    older = copy.deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for flag in MARS.not_og_supported_flags:
            group.pop(flag, None)
    optimizer.load_state_dict(older)
    step()
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize("names", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@some_configurations
def test_can_load_from_to_named_state_dict(configuration, names):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))
    given = torch.rand(1, 4, 6, 6)

    def make(named: bool) -> Mars:
        return Mars(model.named_parameters() if named else model.parameters(), **settings_of(configuration))

    def step(optimizer: Mars) -> None:
        optimizer.zero_grad()
        model(given).pow(2).sum().backward()
        optimizer.step()

    first = make(names[0])
    for _ in range(2):
        step(first)
    second = make(names[1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(second)
    if any(names):
        saved = second.state_dict()["param_groups"]
        assert [name for group in saved for name in group["param_names"]] == [
            *("0.weight", "0.bias", "1.weight", "1.bias"),
        ]


@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
@every_configuration
def test_save_load_equality_with_weights_only(configuration, named):
    problem = Problem()
    optimizer = Mars(problem.named if named else problem.params, **settings_of(configuration))
    train(problem, optimizer, 3)
    saved = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    for weights_only in (False, True):
        file.seek(0)
        assert equal(torch.load(file, weights_only=weights_only), saved)


@every_pair
def test_load_nontensor_step(configuration, implementation):
    """The next step continues from the loaded step count."""
    problem = Problem()
    optimizer = Mars(problem.params, **settings_of(configuration, implementation))
    train(problem, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    twin = problem.copy()
    other = Mars(twin.params, **settings_of(configuration, implementation))
    other.load_state_dict(saved)
    for one, two in ((problem, optimizer), (twin, other)):
        train(one, two, 2)
    assert all(map(torch.equal, problem.params, twin.params))


# --- hooks ------------------------------------------------------------------------------------------------------


def mark_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state["test"] = 1


def unmark(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    marked = state_dict["state"].pop("test", None) is not None
    return {**state_dict, "marked": marked}


@every_configuration
def test_state_dict_pre_hook(configuration):
    optimizer = Mars(Problem().params, **settings_of(configuration))
    optimizer.register_state_dict_pre_hook(mark_state)
    assert optimizer.state_dict()["state"]["test"] == 1


@every_configuration
def test_state_dict_post_hook(configuration):
    optimizer = Mars(Problem().params, **settings_of(configuration))
    optimizer.register_state_dict_post_hook(unmark)
    assert optimizer.state_dict()["marked"] is False


@every_configuration
def test_state_dict_pre_post_hook(configuration):
    optimizer = Mars(Problem().params, **settings_of(configuration))
    optimizer.register_state_dict_pre_hook(mark_state)
    optimizer.register_state_dict_post_hook(unmark)
    saved = optimizer.state_dict()
    assert saved["marked"] is True
    assert "test" not in saved["state"]


def write_into(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.002


def replace(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    other = copy.deepcopy(state_dict)
    other["param_groups"][0]["lr"] = 0.003
    return other


def note(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state["seen lr"] = optimizer.param_groups[0]["lr"]


@every_configuration
def test_load_state_dict_pre_hook_and_prepend(configuration):
    optimizer = Mars(Problem().params, **settings_of(configuration))
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(write_into)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle = optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.003
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002


@every_configuration
def test_load_state_dict_post_hook(configuration):
    optimizer = Mars(Problem().params, **settings_of(configuration))
    optimizer.register_load_state_dict_post_hook(note)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["seen lr"] == optimizer.param_groups[0]["lr"]


@every_configuration
def test_load_state_dict_pre_post_hook(configuration):
    optimizer = Mars(Problem().params, **settings_of(configuration))
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(note)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["seen lr"] == 0.003


@every_configuration
def test_step_post_hook(configuration):
    calls = []
    problem = Problem()
    optimizer = Mars(problem.params, **settings_of(configuration))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append(problem.weight.detach().clone()))
    problem.backward()
    before = problem.weight.detach().clone()
    optimizer.step()
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert len(calls) == 2
    assert not torch.equal(before, calls[0])


@every_configuration
def test_step_pre_hook(configuration):
    """A pre-hook runs before everything, so the step uses gradients that it sets."""
    problem, twin = Problem(), Problem()
    optimizer, plain = (Mars(one.params, **settings_of(configuration)) for one in (problem, twin))

    def backward(*_: Any) -> None:
        problem.backward()

    handle = optimizer.register_step_pre_hook(backward)
    optimizer.step()
    optimizer.step()
    train(twin, plain, 2)
    assert all(map(torch.equal, problem.params, twin.params))
    handle.remove()
    for param in problem.params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(not param.grad.any() for param in problem.params if param.grad is not None)


def test_step_all_hooks():
    calls: list[str] = []

    def said(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(what)

    problem = Problem()
    problem.backward()
    optimizer, sgd = Mars(problem.params), torch.optim.SGD(problem.params)
    handles = [
        register_optimizer_step_pre_hook(said("global pre")),
        register_optimizer_step_post_hook(said("global post")),
        optimizer.register_step_pre_hook(said("pre")),
        optimizer.register_step_post_hook(said("post")),
        sgd.register_step_pre_hook(said("pre")),
        sgd.register_step_post_hook(said("post")),
    ]
    one = ["global pre", "pre", "post", "global post"]
    try:
        optimizer.step()
        assert calls == one
        sgd.step()
        optimizer.step()
        assert calls == 3 * one
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert calls == 3 * one


# --- copies and state -------------------------------------------------------------------------------------------


def public(obj: object) -> set[str]:
    return {name for name in vars(obj) if not name.startswith("_")}


@every_pair
def test_deepcopy_copies_all_public_attrs(configuration, implementation):
    assert_copy_goes_on(configuration, implementation, copy.deepcopy)


@every_configuration
def test_a_pickle_goes_on(configuration):
    assert_copy_goes_on(configuration, "auto", lambda given: pickle.loads(pickle.dumps(given)))


def assert_copy_goes_on(configuration: str, implementation: str, copied: Callable[[Any], Any]) -> None:
    """Check that a copy steps like the original, on its own parameters."""
    problem = Problem()
    optimizer = Mars(problem.params, **settings_of(configuration, implementation))
    train(problem, optimizer, 3)
    problem.backward()
    # Copied with the problem, so that the copy's parameters are known.
    twin, other = copied((problem.params, optimizer))
    assert public(optimizer) == public(other)
    assert [group["params"][0] is param for group, param in zip(other.param_groups, twin, strict=True)] == [True, True]
    for one, copied_param in zip(problem.params, twin, strict=True):
        copied_param.grad = one.grad.clone()
    optimizer.step()
    other.step()
    assert all(map(torch.equal, problem.params, twin))
    assert equal(optimizer.state_dict(), other.state_dict())


@every_pair
def test_non_empty_state(configuration, implementation):
    problem = Problem()
    optimizer = Mars(problem.params, **settings_of(configuration, implementation))
    train(problem, optimizer, 1)
    assert set(optimizer.state) == set(problem.params)
    assert all(len(state) > 1 for state in optimizer.state.values())
