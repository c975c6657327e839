"""A step is right for every layout, size and dtype of its tensors, and after every edit that torch.optim allows.

An example draws a rule, settings and parameters, then edits the optimizer between steps. Each step must do what the
float64 formulas compute from the state that it finds, or raise one documented line and change nothing; NaN around every
element exposes stray accesses. hypothesis shortens a failing list of edits.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from helpers import equal, needs_compiler
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from judges import MOMENTS, READABLE, WRITABLE, Guarded, Mirror, expect, place
from torch import Tensor, nn

import mars_hf
from mars_hf import Mars
from mars_hf import kernels as backends

TRITON = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS: dict[str, dict[str, Any]] = {"for-loop": {"fused": False}, "compiled": {"fused": True}, "auto": {}}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDE = {"ns_dtype": "float64"}
RECURSIVE = {"clip_threshold": None, "second_moment": "gradient"}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "amsgrad": {"amsgrad": True},
    "second moment of the gradient": {"second_moment": "gradient"},
    "lion": {"mars_type": "mars-lion"},
    "shampoo": {"mars_type": "mars-shampoo", **WIDE},
    "mars-m": {"mars_type": "mars-m", **WIDE},
    "recursive adamw": RECURSIVE,
    "recursive lion": {"mars_type": "mars-lion", "clip_threshold": None},
    "recursive mars-m": {"mars_type": "mars-m", **WIDE, "clip_threshold": None},
}
SHAPES = ((4, 3), (3, 4), (4, 3), (5,), (5,), (), (2, 3, 4), (1, 7), (9, 2), (3, 2, 1, 2), (33,), (1, 1))
EDGES = ((4095,), (4097,), (8193,), (1, 4097), (64, 65), (3, 37, 37), (1025, 4))  # of the kernels' blocks and rows
SIZES = {"exp_avg": 0.1, "exp_avg_sq": 0.05, "max_exp_avg_sq": 0.05, "last_grad": 0.3, "compensation": 1e-4}


def draw_settings(random: Random, rule: str) -> dict[str, Any]:
    """Return the settings of a rule, with random ones that suit any rule."""
    drawn = {
        "lr": 0.02,
        "weight_decay": random.choice((0.0, 0.1)),
        "weight_decay_1d": random.choice((0.0, 0.2)),
        "weight_decay_mode": random.choice(("standard", "cautious", "decoupled")),
        "betas": random.choice(((0.95, 0.99), (0.5, 0.9))),
        "gamma": random.choice((0.025, 0.025, 0.5, 0.0)),
        "clip_threshold": random.choice((1.0, 0.05, 100.0, None)),
        "max_grad_norm": random.choice((None, None, 0.5, 1000.0)),
        "maximize": random.random() < 0.2,
        "optimize_1d": random.random() < 0.3,
        "rounding": random.choice(("nearest", "nearest", "stochastic", "kahan")),
        "state_dtype": random.choice((None, None, None, *DTYPES)),
    }
    return {**drawn, **RULES[rule]}


def draw_values(random: Random, shape: Any, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * size


class Subject:
    """An optimizer to edit and to step."""

    def __init__(self, random: Random, chosen: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
        self.random = random
        self.dtype = random.choice((torch.float32, torch.float32, *DTYPES))
        self.guards: list[tuple[str, Guarded]] = []
        self.optimizer = Mars([self.new_param(shape) for shape in shapes], **chosen)
        self.undo: Callable[[], None] | None = None  # of an edit that a step may refuse

    # --- what edits need ----------------------------------------------------------------------------------------------

    def place(self, name: str, values: Tensor, dtype: torch.dtype, layouts: Any = WRITABLE) -> Tensor:
        """Put values into guarded memory of a random layout."""
        guarded = place(values, dtype, self.random.choice(layouts), self.random)
        self.guards.append((name, guarded))
        return guarded.tensor

    def new_param(self, shape: tuple[int, ...]) -> nn.Parameter:
        layouts = ("contiguous", *WRITABLE)
        param = nn.Parameter(self.place("parameter", draw_values(self.random, shape), self.dtype, layouts))
        param.grad_dtype = None  # any
        return param

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.groups for param in group["params"]]

    def states(self) -> list[tuple[nn.Parameter, str]]:
        """Parameters and the names of their states that are whole tensors."""
        return [(param, key) for param in self.params for key in self.optimizer.state.get(param, ()) if key in SIZES]

    # --- the step -----------------------------------------------------------------------------------------------------

    def set_gradients(self, *, all_of_them: bool = False) -> None:
        shared: dict[tuple[int, ...], Tensor] = {}
        for param in self.params:
            draw, shape = self.random.random(), tuple(param.shape)
            if not all_of_them and draw < 0.15:
                param.grad = None
            elif draw < 0.25 and shape in shared and shared[shape].dtype == param.dtype:
                param.grad = shared[shape]
            else:
                dtype = param.dtype if draw < 0.85 else self.random.choice(DTYPES)
                values = draw_values(self.random, shape, self.random.choice((0.01, 0.3, 3.0)))
                param.grad = self.place("gradient", values, dtype, ("contiguous", "contiguous", *READABLE))
                shared[shape] = param.grad
                if draw < 0.35:
                    param.grad.requires_grad_()

    def step(self, *, bfloat16: float) -> None:
        """Take a step and judge it; if an edit is refused and may be, undo it and step again."""
        if self.optimizer.is_exact:
            self.set_gradients(all_of_them=True)
            self.optimizer.update_previous_grad()
            self.optimizer.update_last_grad()
        self.set_gradients(all_of_them=self.undo is not None)  # refusals depend on every gradient being there
        before = Mirror.of(self.optimizer)
        try:
            self.judge(bfloat16)
        except (RuntimeError, ValueError) as error:
            if self.undo is None or not is_documented(error):
                raise
            before.assert_same(Mirror.of(self.optimizer))
            self.undo()
            self.undo = None
            self.step(bfloat16=bfloat16)
        self.undo = None

    def judge(self, bfloat16: float) -> None:
        before = {param: (param.grad, param.grad.detach().clone()) for param in self.params if param.grad is not None}
        expected = expect(Mirror.of(self.optimizer))
        self.optimizer.step()
        expected.check(self.optimizer, bfloat16=bfloat16)
        for param, (grad, values) in before.items():
            assert param.grad is grad
            assert torch.equal(grad.detach(), values), "a gradient has changed"
        for name, guarded in self.guards:
            guarded.check(name)


def is_documented(error: Exception) -> bool:
    """Return whether an error is one line raised by mars_hf itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = mars_hf.__path__[0] in last.filename and (last.line or "").startswith("raise")
    return is_ours and "\n" not in str(error)


# --- edits ------------------------------------------------------------------------------------------------------------


def replace_state(s: Subject) -> None:
    """Assign a state with another dtype or strides, replace its `.data`, or write into it past autograd."""
    param, key = s.random.choice(s.states())
    state, how = s.optimizer.state[param][key], s.random.randrange(3)
    values = draw_values(s.random, param.shape, SIZES[key])
    values = values.abs() if key in MOMENTS[1:] else values
    if how == 0:
        dtype = s.random.choice((state.dtype, *DTYPES)) if key != "compensation" else state.dtype
        s.optimizer.state[param][key] = s.place(key, values, dtype)
    elif how == 1:
        state.data = s.place(key, values, state.dtype)
    elif key != "last_grad":  # whose norm is remembered
        state.data.mul_(s.random.choice((0.0, 7.0)))


def change_step(s: Subject) -> None:
    """Set a step count to 0 or another value: in place, by assignment or as a number."""
    param, _ = s.random.choice(s.states())
    state, count = s.optimizer.state[param], float(s.random.choice((0, 0, 3, 1000)))
    how = s.random.randrange(3) if isinstance(state.get("step"), Tensor) else 1
    if how == 0:
        state["step"].fill_(count)
    else:
        state["step"] = torch.tensor(count) if how == 1 else count


def delete_state(s: Subject) -> None:
    """Drop a state or a part of it, which restarts; a last gradient cannot."""
    param, key = s.random.choice(s.states())
    if s.random.random() < 0.3:
        s.optimizer.state.pop(param)
    else:
        s.optimizer.state[param].pop("step" if key == "last_grad" else key, None)


def change_setting(s: Subject) -> None:
    choices = {
        "lr": (0.02, 0.05, 0.0, torch.tensor(0.01)),
        "betas": ((0.9, 0.99), [0.5, 0.9], (0.0, 0.5)),
        "weight_decay": (0.0, 0.1, 0.5),
        "eps": (1e-8, 1e-3),
        "maximize": (True, False),
    }
    key = s.random.choice(list(choices))
    value = s.random.choice(choices[key])
    for group in s.random.choice((s.groups, [s.random.choice(s.groups)])):
        group[key] = value


def change_form(s: Subject) -> None:
    """Change gamma, clipping or exactness: without last gradients the remaining state may not suffice."""
    choices = {"gamma": (0.025, 0.5, 0.0), "clip_threshold": (1.0, 0.05, 100.0, None)}
    if all(group["clip_threshold"] is not None for group in s.groups):
        choices["is_approx"] = (s.optimizer.is_exact,)  # the other form
    key = s.random.choice(list(choices))
    before, value = [group[key] for group in s.groups], s.random.choice(choices[key])
    for group in s.groups:
        group[key] = value

    def undo() -> None:
        for group, old in zip(s.groups, before, strict=True):
            group[key] = old

    stated = [state for state in s.optimizer.state.values() if "exp_avg" in state and "last_grad" not in state]
    s.undo = undo if stated else None


def change_loop(s: Subject) -> None:
    """Change what whoever runs the loop sets: the global norm, and what is measured."""
    s.optimizer.max_grad_norm = s.random.choice((None, 0.5, 0.5, 1000.0))
    assert all(value == value for value in s.optimizer.pop_metrics().values())
    s.optimizer.collect_metrics(s.random.random() < 0.7)


def edit_parameter(s: Subject) -> None:
    """Change a parameter's values, in place or in other memory, or its dtype, as model.to(dtype) does."""
    param, how = s.random.choice(s.params), s.random.randrange(4)
    param.grad, values = None, draw_values(s.random, param.shape)
    if how == 0:
        param.data.copy_(values)
    elif how == 1:
        param.data = s.place("parameter", values, param.dtype)
    elif how == 2:
        with torch.no_grad():
            param.set_(s.place("parameter", values, param.dtype))
    else:
        param.data = param.data.to(s.random.choice(DTYPES))


def replace_parameter(s: Subject) -> None:
    """Replace a parameter in its group by a new one with as many dimensions."""
    old = s.random.choice(s.params)
    new = s.new_param(tuple(old.shape) if s.random.random() < 0.5 else tuple(size + 1 for size in old.shape))
    for group in s.groups:
        group["params"] = [new if param is old else param for param in group["params"]]
    s.optimizer.state.pop(old, None)


def add_group(s: Subject) -> None:
    """Add parameters, which share the others' global norm."""
    params = [s.new_param(s.random.choice(SHAPES)) for _ in range(s.random.randint(1, 2))]
    s.optimizer.add_param_group({"params": params, "lr": 0.03})
    assert len({group["max_grad_norm"] for group in s.groups}) == 1


def load(s: Subject) -> None:
    """Load a state with other values, dtypes and strides, and step counts as numbers."""
    saved = copy.deepcopy(s.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if key in SIZES and s.random.random() < 0.3:
                dtype = value.dtype if key == "compensation" else s.random.choice(DTYPES)
                state[key] = place(value.double() * 0.5, dtype, s.random.choice(WRITABLE), s.random).tensor
            if key == "step" and s.random.random() < 0.3:
                state[key] = int(value)
    s.optimizer.load_state_dict(saved)
    assert equal(saved["state"], s.optimizer.state_dict()["state"])


CHANGES_OF_STATES = [replace_state, change_step, delete_state]
EDITS = [*CHANGES_OF_STATES, change_setting, change_form, change_loop, edit_parameter, replace_parameter]
EDITS += [add_group, load]


# --- examples ---------------------------------------------------------------------------------------------------------


def run(backend: str, seed: int, rule: str, edits: list[list[Callable[[Subject], None]]]) -> None:
    """Make edits to one optimizer, with a step after each list of them."""
    random = Random(seed)
    chosen = {**draw_settings(random, rule), **BACKENDS.get(backend, {})}
    shapes = [random.choice(SHAPES) for _ in range(random.randint(2, 5))]
    if random.random() < 0.1:
        shapes[0] = random.choice(EDGES)
    s = Subject(random, chosen, shapes)
    for some in [[], *edits]:
        for edit in some:
            # Undoing a refused edit must not interfere with other edits.
            if s.undo is None and (edit not in CHANGES_OF_STATES or s.states()):
                edit(s)
        s.step(bfloat16=1.0 if backend == "triton" else 0.5)


def searched(examples: int) -> Any:
    """Derive examples from the test's name, so that every run tries the same ones."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    options = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": checks}
    if TRITON:
        options["phases"] = [Phase.generate]  # shortening takes minutes in its interpreter
    edits = st.lists(st.lists(st.sampled_from(EDITS), max_size=3), min_size=2, max_size=6)
    drawn = {"seed": st.integers(0, 2**32 - 1), "rule": st.sampled_from(list(RULES)), "edits": edits}
    return lambda test: settings(max_examples=examples, **options)(given(**drawn)(test))


@pytest.fixture
def kernels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fused=None take kernels, as for large parameters; Triton's under its interpreter."""
    monkeypatch.setattr(backends, "COMPILED_FROM", 0 if backend == "triton" else 64)
    if backend == "triton":
        from mars_hf.kernels import gpu

        monkeypatch.setattr(backends, "kernels_of", lambda device: gpu)
        monkeypatch.setattr(backends, "compare_with_plain", lambda *args: "")  # a second each in the interpreter


NAMES = ["triton"] if TRITON else ["for-loop", *(pytest.param(x, marks=needs_compiler) for x in ("compiled", "auto"))]
every_backend = pytest.mark.parametrize("backend", NAMES)


@every_backend
@pytest.mark.usefixtures("kernels")
@searched(25 if TRITON else 10)  # there are 100 below, but not in the interpreter
def test_edits_and_layouts(backend, seed, rule, edits):
    run(backend, seed, rule, edits)


@pytest.mark.slow
@every_backend
@pytest.mark.usefixtures("kernels")
@searched(100)
def test_random_edits_of_groups(backend, seed, rule, edits):
    run(backend, seed, rule, edits)


@pytest.mark.soak
@every_backend
@pytest.mark.usefixtures("kernels")
@searched(4000)
def test_many_more(backend, seed, rule, edits):
    run(backend, seed, rule, edits)


@pytest.mark.skipif(TRITON, reason="compares plain PyTorch")
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(list(RULES)), order=st.permutations(range(6)))
def test_order_and_grouping_change_no_bit(seed, rule, order):
    random = Random(seed)
    chosen, dtype = draw_settings(random, rule), random.choice(DTYPES)
    chosen |= {"rounding": "nearest", "max_grad_norm": None}  # noise is by index, norms by order
    values = [draw_values(random, random.choice(SHAPES)).to(dtype) for _ in order]
    cut, runs = random.randint(1, 5), []
    for parts in ([range(6)], [order[:cut], order[cut:]]):
        params = [nn.Parameter(value.clone()) for value in values]
        optimizer = Mars([{"params": [params[i] for i in part]} for part in parts], **chosen, fused=False)
        for step in range(4):
            for index, param in enumerate(params):
                grad = draw_values(Random(f"{seed} {step} {index}"), param.shape).to(dtype)
                param.grad = None if (step + index) % 5 == 4 else grad
            optimizer.step()
        runs.append([(param.detach(), dict(optimizer.state.get(param, {}))) for param in params])
    assert equal(*runs)


# --- the judges -------------------------------------------------------------------------------------------------------


def test_a_stray_write_is_seen():
    guarded = place(torch.ones(3, 4, dtype=torch.float64), torch.float32, "every other", Random(0))
    guarded.check("x")
    guarded.tensor.as_strided((12,), (1,), guarded.tensor.storage_offset())[1] = 1.0
    with pytest.raises(AssertionError, match=r"x \(every other\): \d bytes beside the tensor"):
        guarded.check("x")


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "last_grad", "x"])
def test_a_wrong_element_is_seen(name):
    """The bounds are far below the change of any element in a step."""
    param = nn.Parameter(draw_values(Random(1), (8, 8)).float())
    optimizer = Mars([param], lr=0.02, fused=False)
    for step in range(3):
        param.grad = draw_values(Random(2 + step), (8, 8), 0.3).float()
        expected = expect(Mirror.of(optimizer))
        optimizer.step()
    expected.check(optimizer)
    changed = param.data if name == "x" else optimizer.state[param][name]
    changed[3, 3] += 0.001 * (0.02 if name == "x" else changed[3, 3])
    with pytest.raises(AssertionError, match="1 of 64 elements are wrong; the worst, element 27"):
        expected.check(optimizer)
