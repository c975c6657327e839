"""All live tensor bytes, in steps and between them, are weights, states and gradients, nothing else."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import mars_of
from mars_info import needs_compiler
from torch import Tensor, nn

import mars_hf
from mars_hf import Mars

SMALL = ((40, 30), (30, 40), (50,), (6, 5, 4), (7,))
LARGE = ((1001, 1000), (9,))  # above a million elements the compiled backend is the default


@pytest.fixture(autouse=True, scope="module")
def set_apart() -> Iterator[None]:
    """Ignore objects that exist before these tests, which also makes the search quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Return the bytes of all storages that some tensor refers to, each once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type == "cpu" and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def test_every_byte_is_counted_once():
    before = live_bytes()
    kept = torch.ones(1000)
    views = [kept[1:], kept.view(10, 100), kept.detach()]
    assert live_bytes() - before == 4000
    hidden: dict[str, Any] = {"inside": [(torch.ones(10).double(),)]}
    assert live_bytes() - before == 4080
    del kept, hidden
    assert live_bytes() - before == 4000
    del views
    assert live_bytes() == before


class Form:
    """Settings of Mars, and the bytes they keep per element of matrices and vectors, weights included."""

    def __init__(self, matrix: float, vector: float = 12, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.matrix, self.vector, self.dtype, self.settings = matrix, vector, dtype, settings
        self.takes = settings.get("take_grad", False)

    def kept(self, shapes: Any) -> float:
        sizes = [(torch.Size(shape).numel(), len(shape) > 1) for shape in shapes]
        return sum(size * (self.matrix if matrix else self.vector) for size, matrix in sizes)


# Weight 4, first moment 4, second moment 4, last gradient 4.
FORMS = {
    "mars-adamw": Form(16),
    "take_grad": Form(16, take_grad=True),
    "max_grad_norm": Form(16, max_grad_norm=0.1),
    "take_grad, max_grad_norm": Form(16, take_grad=True, max_grad_norm=0.1),
    "for-loop": Form(16, fused=False),
    "fused": Form(16, fused=True),
    "fused, take_grad, max_grad_norm": Form(16, fused=True, take_grad=True, max_grad_norm=0.1),
    "amsgrad": Form(20, 16, amsgrad=True),
    "maximize": Form(16, maximize=True),
    "optimize_1d": Form(16, 16, optimize_1d=True),
    "recursive": Form(12, second_moment="gradient", clip_threshold=None),
    "mars-lion": Form(12, mars_type="mars-lion"),
    "mars-lion, take_grad": Form(12, mars_type="mars-lion", take_grad=True),
    "mars-lion, recursive": Form(8, mars_type="mars-lion", clip_threshold=None),
    "mars-shampoo": Form(12, mars_type="mars-shampoo"),
    "mars-m": Form(12, mars_type="mars-m", take_grad=True, max_grad_norm=0.1),
    "mars-m, recursive": Form(8, mars_type="mars-m", clip_threshold=None),
    "states in bfloat16": Form(10, 8, state_dtype="bfloat16"),
    "bfloat16": Form(14, 10, dtype=torch.bfloat16),
    "bfloat16, kahan": Form(16, 12, dtype=torch.bfloat16, rounding="kahan"),
    "bfloat16, stochastic": Form(14, 10, dtype=torch.bfloat16, rounding="stochastic"),
}


def model_of(shapes: Any, dtype: torch.dtype) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.full(shape, 0.01, dtype=dtype)) for shape in shapes)


def backward(params: nn.ParameterList, step: int) -> None:
    """Compute gradients by autograd, as for a model."""
    loss = sum((param * (1.0 + step)).float().square().sum() for param in params)
    assert isinstance(loss, Tensor)
    loss.backward()


def overhead(params: nn.ParameterList) -> int:
    """Return the bytes allowed for step counts, scales, norms, and PyTorch's own caches."""
    return 64 * len(params) + 512


@needs_compiler
@pytest.mark.parametrize(
    ("form", "measured"),
    [*((form, False) for form in FORMS), ("mars-adamw", True), ("take_grad, max_grad_norm", True), ("mars-m", True)],
)
def test_what_is_held_between_steps(form, measured):
    """mars-adamw holds 4.0 times the weights throughout the run."""
    held = []
    before = live_bytes()
    params = model_of(SMALL, FORMS[form].dtype)
    optimizer = mars_of(params, **FORMS[form].settings)
    optimizer.collect_metrics(measured)
    for step in range(50):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        if step in (0, 1, 2, 48):
            optimizer.pop_metrics()
            optimizer.zero_grad()
            held.append(live_bytes() - before)
    kept = FORMS[form].kept(SMALL)
    assert all(kept <= found <= kept + overhead(params) for found in held), (held, kept)


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_after_a_step(form):
    """A step also holds the gradients that are not moved into the state."""
    before = live_bytes()
    params = model_of(SMALL, FORMS[form].dtype)
    optimizer = mars_of(params, **FORMS[form].settings)
    kept = FORMS[form].kept(SMALL)
    for step in range(4):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        with_grad = kept + sum(param.grad.nbytes for param in params if param.grad is not None)
        found = live_bytes() - before
        assert with_grad <= found <= with_grad + overhead(params)
    moved = FORMS[form].takes and "last_grad" in optimizer.state[params[0]]
    assert (params[0].grad is None) == moved


@needs_compiler
@pytest.mark.parametrize("zeroed", ["set to None", "in place"])
@pytest.mark.parametrize(
    "form",
    ["mars-adamw", "take_grad", "max_grad_norm", "take_grad, max_grad_norm", "mars-lion", "recursive", "bfloat16"],
)
def test_what_is_held_of_a_large_model(form, zeroed):
    before = live_bytes()
    params = model_of(LARGE, FORMS[form].dtype)
    optimizer = mars_of(params, **FORMS[form].settings)
    kept = FORMS[form].kept(LARGE)
    for step in range(4):
        backward(params, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=zeroed == "set to None")
        gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
        found = live_bytes() - before
        assert kept + gradients <= found <= kept + gradients + overhead(params)
    assert found <= 4.01 * sum(param.nbytes for param in params) + gradients or FORMS[form].dtype == torch.bfloat16


def accumulated(params: nn.ParameterList, optimizer: Mars, step: int) -> None:
    for micro in range(3):
        backward(params, step + micro)
    optimizer.step()
    optimizer.zero_grad()


def clipped_outside(params: nn.ParameterList, optimizer: Mars, step: int) -> None:
    backward(params, step)
    nn.utils.clip_grad_norm_(params, 0.1)
    optimizer.step()
    optimizer.zero_grad()


def by_closure(params: nn.ParameterList, optimizer: Mars, step: int) -> None:
    optimizer.step(lambda: backward(params, step))  # type: ignore[arg-type, return-value]
    optimizer.zero_grad()


def with_a_gap(params: nn.ParameterList, optimizer: Mars, step: int) -> None:
    backward(params, step)
    if step % 3 == 2:
        params[0].grad = None
    optimizer.step()
    optimizer.zero_grad()


def saved_and_loaded(params: nn.ParameterList, optimizer: Mars, step: int) -> None:
    backward(params, step)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def with_offload(params: nn.ParameterList, optimizer: Mars, step: int) -> None:
    backward(params, step)
    optimizer.step()
    optimizer.zero_grad()
    for param in params:
        for tensor in (param, *optimizer.state[param].values()):
            tensor.data = tensor.data.clone()


@needs_compiler
@pytest.mark.parametrize("take_grad", [False, True])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(
    "loop",
    [accumulated, clipped_outside, by_closure, with_a_gap, saved_and_loaded, with_offload],
    ids=lambda loop: loop.__name__,
)
def test_what_is_held_in_other_loops(loop: Callable[..., None], fused, take_grad):
    before = live_bytes()
    params = model_of(SMALL, torch.float32)
    optimizer = mars_of(params, fused=fused, take_grad=take_grad, max_grad_norm=0.1)
    kept = FORMS["mars-adamw"].kept(SMALL)
    for step in range(10):
        loop(params, optimizer, step)
        found = live_bytes() - before
        assert kept <= found <= kept + overhead(params)


@needs_compiler
@pytest.mark.parametrize("fused", [None, True])
def test_what_is_held_by_the_exact_form(fused):
    """Exact mode keeps x_{t-1} of all parameters and no last gradient between steps."""
    before = live_bytes()
    params = model_of(SMALL, torch.float32)
    optimizer = Mars(params, fused=fused, is_approx=False)
    kept = Form(16, 16).kept(SMALL)
    for step in range(10):
        if optimizer.has_previous_params:
            with optimizer.previous_params():
                backward(params, step)
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        optimizer.zero_grad()
        found = live_bytes() - before
        assert kept <= found <= kept + overhead(params)


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_held_when_the_optimizer_is_gone(form):
    before = live_bytes()
    params = model_of(SMALL, FORMS[form].dtype)
    optimizer = mars_of(params, **FORMS[form].settings)
    for step in range(3):
        backward(params, step)
        optimizer.step()
    del optimizer
    weights = sum(param.nbytes + (0 if param.grad is None else param.grad.nbytes) for param in params)
    assert live_bytes() - before == weights
    del params
    assert live_bytes() == before


def test_the_optimizer_holds_no_parameters_that_are_taken_from_its_groups():
    """accelerate swaps parameters this way, so that the unsharded model can be freed."""
    model = nn.Linear(50, 40)
    before = live_bytes()
    optimizer = mars_hf.create(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    weights = sum(param.nbytes for param in model.parameters())
    del model, param
    assert live_bytes() <= before - weights + 512


@needs_compiler
@pytest.mark.parametrize("fused", [None, True])
def test_a_parameter_that_is_replaced_is_freed(fused):
    params = model_of(SMALL, torch.float32)
    optimizer = Mars(params, fused=fused)
    for step in range(3):
        backward(params, step)
        optimizer.step()
    optimizer.zero_grad()
    held = live_bytes()
    optimizer.state.pop(params[0])
    params[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.full(SMALL[0], 0.01))
    for step in range(3):
        backward(params, step)
        optimizer.step()
    optimizer.zero_grad()
    assert live_bytes() <= held + 64
