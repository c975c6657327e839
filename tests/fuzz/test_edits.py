"""A step is right for every layout, size and dtype of its tensors, and after every edit that torch.optim allows.

An example draws a rule, settings and parameters; then it edits the optimizer and a mirror that knows what each edit
means. Each step must do what the float64 formulas compute from the mirror, or raise one documented line and change
nothing; NaN around every element exposes stray accesses. hypothesis shortens a failing list of edits.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from guarded import READABLE, WRITABLE, Guarded, place
from helpers import equal, mars_of, needs_compiler
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from straight_step import MOMENTS, Entry, Mirror, expect, is_recursive, takes_mars
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
    "recursive lion": {"mars_type": "mars-lion", **RECURSIVE},
    "recursive mars-m": {"mars_type": "mars-m", **WIDE, **RECURSIVE},
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
        "betas": random.choice(((0.95, 0.99), (0.5, 0.9))),
        "gamma": random.choice((0.025, 0.025, 0.5, 0.0)),
        "clip_threshold": random.choice((1.0, 0.05, 100.0, None)),
        "max_grad_norm": random.choice((None, None, 0.5, 1000.0)),
        "take_grad": random.random() < 0.3,
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
    """An optimizer and its mirror; an edit changes both."""

    def __init__(self, random: Random, chosen: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
        self.random = random
        self.dtype = random.choice((torch.float32, torch.float32, *DTYPES))
        self.guards: list[tuple[str, Guarded]] = []
        self.params = [self.new_param(shape) for shape in shapes]
        self.optimizer = mars_of(self.params, **chosen)
        self.mirror = Mirror.of(self.optimizer)
        self.refusals: list[Callable[[], None]] = []  # what undoes edits that a step may refuse
        self.saved: list[tuple[dict[str, Any], dict[str, Any]]] = []  # loaded states, which must not change later

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

    def groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Pairs of a group and its mirror."""
        return list(zip(self.optimizer.param_groups, self.mirror.groups, strict=True))

    def set(self, key: str, value: Any, groups: list[tuple[dict[str, Any], dict[str, Any]]] | None = None) -> None:
        for group, mirrored in groups or self.groups():
            group[key] = mirrored[key] = value

    def states(self) -> list[tuple[Tensor, str]]:
        """Parameters and the names of their states that are whole tensors."""
        stated = [
            (p, self.optimizer.state.get(p, {})) for group in self.optimizer.param_groups for p in group["params"]
        ]
        return [(param, key) for param, state in stated for key in state if key in SIZES]

    def draw_value(self, param: Tensor, key: str) -> Tensor:
        values = draw_values(self.random, param.shape, SIZES[key])
        return values.abs() if key in MOMENTS[1:] else values

    def note(self, param: Tensor, key: str, value: Tensor) -> None:
        """Tell the mirror about a new state."""
        entry = self.mirror.entries[param]
        scale = self.optimizer.state[param].get("last_grad_scale") if key == "last_grad" else None
        entry.kept[key] = value.detach().double().clone() * (1.0 if scale is None else scale.double())
        entry.dtypes[key] = value.dtype

    def group_of(self, param: Tensor) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))

    # --- the step -----------------------------------------------------------------------------------------------------

    def set_gradients(self, *, all_of_them: bool = False) -> None:
        shared: dict[tuple[int, ...], Tensor] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                draw, shape = self.random.random(), tuple(param.shape)
                if not all_of_them and draw < 0.15:
                    param.grad = None
                elif draw < 0.25 and shape in shared and shared[shape].dtype == param.dtype:
                    param.grad = shared[shape]
                else:
                    dtype = param.dtype if draw < 0.85 else self.random.choice(DTYPES)
                    values = draw_values(self.random, shape, self.random.choice((0.01, 0.3, 3.0)))
                    param.grad = self.place("gradient", values, dtype, ("contiguous", "contiguous", *READABLE))
                    if self.guards[-1][1].layout != "zero tensor":
                        shared[shape] = param.grad
                        if draw < 0.35:
                            param.grad.requires_grad_()

    def supply(self) -> None:
        """Supply stale gradients if needed."""
        if not self.optimizer.is_exact:
            return
        self.set_gradients(all_of_them=True)
        self.optimizer.update_previous_grad()
        self.optimizer.update_last_grad()
        for group in self.optimizer.param_groups:
            for param in group["params"] if takes_mars(group) and not group["is_approx"] else ():
                entry, dtype = self.mirror.entries[param], self.optimizer.state[param]["last_grad"].dtype
                stale = param.grad.detach().to(dtype)
                entry.kept["last_grad"] = (-stale if group["maximize"] else stale).double()
                entry.dtypes["last_grad"] = dtype

    def step(self, *, bfloat16: float) -> None:
        """Take a step and compare with the mirror; if an edit is refused and may be, undo it and step again."""
        self.mirror.assert_same(Mirror.of(self.optimizer))
        self.supply()
        self.set_gradients(all_of_them=bool(self.refusals))  # what is to be refused must be looked at
        try:
            self._step(bfloat16)
        except (RuntimeError, ValueError) as error:
            if not self.refusals or not is_documented(error):
                raise
            self.mirror.assert_same(Mirror.of(self.optimizer))
            for undo in reversed(self.refusals):
                undo()
            self.supply()
            self.set_gradients()
            self._step(bfloat16)
        self.refusals = []
        self.mirror = Mirror.of(self.optimizer)
        for name, guarded in self.guards:
            guarded.check(name)
        for state, copied in self.saved:
            assert equal(state["state"], copied["state"])

    def _step(self, bfloat16: float) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        before = {param: (param.grad, param.grad.detach().clone()) for param in params if param.grad is not None}
        expected = expect(self.mirror)
        self.optimizer.step()
        expected.check(self.optimizer, bfloat16=bfloat16)
        for param, (grad, values) in before.items():
            assert param.grad is grad or (param.grad is None and self.optimizer.take_grad)
            assert torch.equal(grad.detach(), values), "a gradient has changed"


def is_documented(error: Exception) -> bool:
    """Return whether an error is one line raised by mars_hf itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = mars_hf.__path__[0] in last.filename and (last.line or "").startswith("raise")
    return own and "\n" not in str(error)


# --- edits ------------------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[Subject], None]] = {}


def edit(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    EDITS[function.__name__] = function
    return function


@edit
def replace_state(s: Subject) -> None:
    """Assign a state with another dtype or strides, replace its `.data`, or write into it past autograd."""
    param, key = s.random.choice(s.states())
    state, how = s.optimizer.state[param][key], s.random.randrange(3)
    if how == 0:
        dtype = s.random.choice((state.dtype, *DTYPES)) if key != "compensation" else state.dtype
        state = s.optimizer.state[param][key] = s.place(key, s.draw_value(param, key), dtype)
    elif how == 1:
        state.data = s.place(key, s.draw_value(param, key), state.dtype)
    else:
        state.data.mul_(s.random.choice((0.0, 7.0)))
    s.note(param, key, state)


@edit
def expand_state(s: Subject) -> None:
    """Elements that share memory cannot be stepped in place: the step must be right or refuse."""
    param, key = s.random.choice(s.states())
    state = s.optimizer.state[param]
    old = state[key]
    state[key] = torch.full((), SIZES[key], dtype=old.dtype).expand(old.shape)
    s.note(param, key, state[key])

    def undo() -> None:
        state[key] = old
        s.note(param, key, old)

    s.refusals.append(undo)


@edit
def change_step(s: Subject) -> None:
    """Set a step count to 0 or another value: in place, by assignment or as a number."""
    param, _ = s.random.choice(s.states())
    state, count = s.optimizer.state[param], float(s.random.choice((0, 0, 3, 1000)))
    how = s.random.randrange(3) if isinstance(state.get("step"), Tensor) else 1
    if how == 0:
        state["step"].fill_(count)
    else:
        state["step"] = torch.tensor(count) if how == 1 else count
    s.mirror.entries[param].kept["step"] = torch.tensor(count, dtype=torch.float64)


@edit
def delete_state(s: Subject) -> None:
    """Drop states: they restart, but a last gradient cannot."""
    param, key = s.random.choice(s.states())
    state, entry, group = s.optimizer.state[param], s.mirror.entries[param], s.group_of(param)
    if s.random.random() < 0.3:
        s.optimizer.state.pop(param)
        s.mirror.entries[param] = Entry(entry.x, entry.dtype)
        return
    key = s.random.choice((key, "step"))
    if key == "last_grad":
        scale = state.pop("last_grad_scale", None)
        if not is_recursive(group, set(state) - {"last_grad"}):
            old, kept, dtype = state[key], entry.kept[key], entry.dtypes[key]

            def undo() -> None:
                state[key], entry.kept[key], entry.dtypes[key] = old, kept, dtype
                state.update({} if scale is None else {"last_grad_scale": scale})

            s.refusals.append(undo)
    for held in (state, entry.kept, entry.dtypes):
        held.pop(key, None)


@edit
def reorder_parameters(s: Subject) -> None:
    s.optimizer.param_groups = [dict(group) for group in s.optimizer.param_groups]
    group, mirrored = s.random.choice(s.groups())
    group["params"].reverse()
    mirrored["params"].reverse()


@edit
def change_setting(s: Subject) -> None:
    choices = {
        "lr": (0.02, 0.05, 0.0, torch.tensor(0.01)),
        "betas": ((0.9, 0.99), [0.5, 0.9], (0.0, 0.5)),
        "weight_decay": (0.0, 0.1, 0.5),
        "eps": (1e-8, 1e-3),
        "maximize": (True, False),
    }
    key = s.random.choice(list(choices))
    s.set(key, s.random.choice(choices[key]), s.random.choice((None, [s.random.choice(s.groups())])))


@edit
def change_correction(s: Subject) -> None:
    """Change gamma or clip_threshold: without last gradients the remaining state may not suffice."""
    key, values = s.random.choice((("gamma", (0.025, 0.5, 0.0)), ("clip_threshold", (1.0, 0.05, 100.0, None))))
    before = [group[key] for group, _ in s.groups()]
    s.set(key, s.random.choice(values))

    def undo() -> None:
        for pair, value in zip(s.groups(), before, strict=True):
            s.set(key, value, [pair])

    if any("exp_avg" in entry.kept and "last_grad" not in entry.kept for entry in s.mirror.entries.values()):
        s.refusals.append(undo)


@edit
def change_loop(s: Subject) -> None:
    """Change what whoever runs the loop sets: the global norm, whether gradients are moved, what is measured."""
    s.set("max_grad_norm", s.random.choice((None, 0.5, 0.5, 1000.0)))
    s.optimizer.take_grad = s.random.random() < 0.7
    assert all(value == value for value in s.optimizer.pop_metrics().values())
    s.optimizer.collect_metrics(s.random.random() < 0.7)


@edit
def edit_parameter(s: Subject) -> None:
    """Change a parameter's values, in place or in other memory, or its dtype, as model.to(dtype) does."""
    param, how = s.random.choice(s.params), s.random.randrange(4)
    param.grad = None
    if how == 0:
        param.data.copy_(draw_values(s.random, param.shape))
    elif how == 1:
        param.data = s.place("parameter", draw_values(s.random, param.shape), param.dtype)
    elif how == 2:
        with torch.no_grad():
            param.set_(s.place("parameter", draw_values(s.random, param.shape), param.dtype))
    else:
        param.data = param.data.to(s.random.choice(DTYPES))
    entry = s.mirror.entries[param]
    entry.x, entry.dtype = param.detach().double().clone(), param.dtype


@edit
def replace_parameter(s: Subject) -> None:
    """Replace a parameter in its group by a new one with as many dimensions."""
    index = s.random.randrange(len(s.params))
    old = s.params[index]
    shape = tuple(old.shape) if s.random.random() < 0.5 else tuple(size + 1 for size in old.shape)
    new = s.params[index] = s.new_param(shape)
    for group, mirrored in s.groups():
        for own in (group["params"], mirrored["params"]):
            own[:] = [new if param is old else param for param in own]
    s.optimizer.state.pop(old, None)
    del s.mirror.entries[old]
    s.mirror.entries[new] = Entry(new.detach().double().clone(), new.dtype)


@edit
def add_group(s: Subject) -> None:
    """Add parameters, which share the others' global norm."""
    made = [s.new_param(s.random.choice(SHAPES)) for _ in range(s.random.randint(1, 2))]
    s.params += made
    s.optimizer.add_param_group({"params": made, "lr": 0.03})
    for group in s.optimizer.param_groups[len(s.mirror.groups) :]:
        assert group["max_grad_norm"] == s.optimizer.param_groups[0]["max_grad_norm"]
        s.mirror.groups.append({**group, "params": list(group["params"])})
        for param in group["params"]:
            s.mirror.entries[param] = Entry(param.detach().double().clone(), param.dtype)


@edit
def load(s: Subject) -> None:
    """Load a state with other values, dtypes and strides, and step counts as numbers; the mirror adopts it."""
    saved = copy.deepcopy(s.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if key in SIZES and s.random.random() < 0.3:
                dtype = value.dtype if key == "compensation" else s.random.choice(DTYPES)
                state[key] = place(value.double() * 0.5, dtype, s.random.choice(WRITABLE), s.random).tensor
            if key == "step" and s.random.random() < 0.3:
                state[key] = int(value)
    s.saved = [*s.saved[-1:], (saved, copy.deepcopy(saved))]
    s.optimizer.load_state_dict(saved)
    numbers = [index for group in saved["param_groups"] for index in group["params"]]
    params = [param for group in s.mirror.groups for param in group["params"]]
    for index, param in zip(numbers, params, strict=True):
        entry, state = s.mirror.entries[param], {**saved["state"].get(index, {})}
        scale = state.pop("last_grad_scale", 1.0)
        s.mirror.entries[param] = entry = Entry(entry.x, entry.dtype)
        for key, value in state.items():
            entry.kept[key] = torch.as_tensor(value).double().clone() * (scale if key == "last_grad" else 1.0)
            entry.dtypes[key] = torch.as_tensor(value).dtype if key != "step" else torch.float32


@edit
def change_exactness(s: Subject) -> None:
    """Switch to or from exact steps, which use stale gradients; a first moment may then lack its last gradient."""
    if any(group["clip_threshold"] is None for group in s.optimizer.param_groups):
        return  # the form without last gradients keeps another average
    now = s.optimizer.is_exact
    s.set("is_approx", now)
    if now:  # exact no more
        s.refusals.append(lambda: s.set("is_approx", False))


def refused(s: Subject, call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call()
    assert is_documented(raised.value), f"{type(raised.value).__name__} of torch: {raised.value}"
    assert all(part in str(raised.value) for part in parts), str(raised.value)


@edit
def refused_state(s: Subject) -> None:
    """A state that cannot be stepped raises, on loading and in a step, and nothing changes."""
    param, key = s.random.choice(s.states())
    state = s.optimizer.state[param]
    old = state[key]
    wrong = s.random.choice(
        (
            lambda: torch.zeros(*old.shape, 2),  # as many rows
            lambda: torch.zeros(old.numel() + 7),
            lambda: torch.zeros(1, *old.shape),  # as many elements
            lambda: torch.zeros(old.shape, dtype=torch.int64),
            lambda: torch.zeros(old.shape, dtype=torch.complex64),
            lambda: torch.zeros(old.shape, device="meta"),
        )
    )()
    state[key] = wrong
    saved = copy.deepcopy(s.optimizer.state_dict())
    param.grad = torch.ones_like(param)
    refused(s, s.optimizer.step)
    state[key] = old
    if wrong.shape != old.shape:
        refused(s, lambda: s.optimizer.load_state_dict(saved), str(tuple(wrong.shape)), str(tuple(old.shape)))
    s.mirror.assert_same(Mirror.of(s.optimizer))


@edit
def refused_gradient(s: Subject) -> None:
    """A gradient that Mars cannot use raises, and nothing changes."""
    param = s.random.choice(s.params)
    made = [torch.zeros(param.shape, device="meta", dtype=param.dtype)]
    if param.ndim and param.numel():
        made.append(torch.ones_like(param).to_sparse())
    try:
        param.grad = s.random.choice(made)
    except RuntimeError:  # torch rejects it
        return
    refused(s, s.optimizer.step)
    param.grad = None
    s.mirror.assert_same(Mirror.of(s.optimizer))


NEED_A_STATE = ("replace_state", "expand_state", "change_step", "delete_state", "refused_state")


# --- examples ---------------------------------------------------------------------------------------------------------


def run(backend: str, seed: int, rule: str, edits: list[list[str]]) -> None:
    """Make edits to one optimizer, with a step after each list of them."""
    random = Random(seed)
    chosen = {**draw_settings(random, rule), **BACKENDS.get(backend, {})}
    shapes = [random.choice(SHAPES) for _ in range(random.randint(2, 5))]
    if random.random() < 0.1:
        shapes[0] = random.choice(EDGES)
    s = Subject(random, chosen, shapes)
    for names in [[], *edits]:
        for name in names:
            # Undoing a refused edit must not interfere with other edits.
            if not s.refusals and (name not in NEED_A_STATE or s.states()):
                EDITS[name](s)
        s.step(bfloat16=1.0 if backend == "triton" else 0.5)


def searched(examples: int) -> Any:
    """Derive examples from the test's name, so that every run tries the same ones."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    how = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": checks}
    if TRITON:
        how["phases"] = [Phase.generate]  # shortening takes minutes in its interpreter
    names = st.lists(st.sampled_from(list(EDITS)), max_size=3)
    drawn = {"seed": st.integers(0, 2**32 - 1), "rule": st.sampled_from(list(RULES))}
    searching = settings(max_examples=examples, **how)
    return lambda test: searching(given(**drawn, edits=st.lists(names, min_size=2, max_size=6))(test))


@pytest.fixture
def kernels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fused=None take kernels, as for large parameters; Triton's under its interpreter."""
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    if backend == "triton":
        from mars_hf.kernels import gpu

        monkeypatch.setattr(backends, "COMPILED_FROM", 0)
        monkeypatch.setattr(backends, "kernels_of", lambda device: gpu)


NAMES = ["triton"] if TRITON else ["for-loop", *(pytest.param(x, marks=needs_compiler) for x in ("compiled", "auto"))]
every_backend = pytest.mark.parametrize("backend", NAMES)


@every_backend
@pytest.mark.usefixtures("kernels")
@searched(25)
def test_edits_and_layouts(backend, seed, rule, edits):
    run(backend, seed, rule, edits)


@pytest.mark.slow
@every_backend
@pytest.mark.usefixtures("kernels")
@searched(250)
def test_more(backend, seed, rule, edits):
    run(backend, seed, rule, edits)


@pytest.mark.soak
@every_backend
@pytest.mark.usefixtures("kernels")
@searched(4000)
def test_many_more(backend, seed, rule, edits):
    run(backend, seed, rule, edits)


@pytest.mark.skipif(TRITON, reason="compares plain rules and compiled kernels")
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(list(RULES)), order=st.permutations(range(6)))
def test_order_and_grouping_change_no_bit(seed, rule, order):
    random = Random(seed)
    chosen, dtype = draw_settings(random, rule), random.choice(DTYPES)
    chosen |= {"rounding": "nearest", "max_grad_norm": None, "take_grad": False}  # noise is by index, norms by order
    values = [draw_values(random, random.choice(SHAPES)).to(dtype) for _ in order]
    cut, runs = random.randint(0, 6), []
    for places, ends in ((range(6), (6,)), (order, (cut, 6))):
        params = [nn.Parameter(value.clone()) for value in values]
        shuffled = [params[place] for place in places]
        parts = [shuffled[:cut], shuffled[cut:]] if len(ends) > 1 else [shuffled]
        optimizer = mars_of([{"params": part} for part in parts if part], **chosen, fused=False)
        for step in range(4):
            for index, param in enumerate(params):
                grad = draw_values(Random(f"{seed} {step} {index}"), param.shape).to(dtype)
                param.grad = None if (step + index) % 5 == 4 else grad
            optimizer.step()
        runs.append([(param.detach(), dict(optimizer.state.get(param, {}))) for param in params])
    assert equal(*runs)


@pytest.mark.slow
@pytest.mark.skipif(TRITON, reason="runs this file in the interpreter")
def test_triton_interpreted():
    pytest.importorskip("triton", minversion="3.7", reason="older interpreters, 3.6 for one, fail with NumPy 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "edits_and_layouts", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert finished.returncode == 0 and " passed" in finished.stdout, (
        finished.stdout[-20_000:] + finished.stderr[-2000:]
    )


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
    changed[3, 3] += 0.01 * (0.02 if name == "x" else changed[3, 3])
    with pytest.raises(AssertionError, match="1 of 64 elements are wrong; the worst, element 27"):
        expected.check(optimizer)
