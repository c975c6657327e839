"""States, groups, hooks and gradients may be edited between steps in any way that torch.optim allows.

A run makes random edits to an optimizer and to a mirror that knows what each edit means. The next step must do
what the float64 formulas compute from the mirror, or raise one documented line and change nothing. Runs are
numbered: a failure prints its number and last edits, and `run` repeats it.
"""

from __future__ import annotations

import collections
import copy
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from guarded import READABLE, WRITABLE, place
from helpers import mars_of, needs_compiler
from straight_step import MOMENTS, Entry, Mirror, expect, is_recursive, takes_mars
from test_layout_fuzz import BACKENDS, DTYPES, RULES, TRITON, draw_settings, draw_values, named, not_interpreted
from torch import Tensor, nn

import mars_hf
from mars_hf import kernels as backends

SHAPES = ((4, 3), (3, 4), (4, 3), (5,), (5,), (), (2, 3, 4), (1, 7), (9, 2), (3, 2, 1, 2))
SIZES = {"exp_avg": 0.1, "exp_avg_sq": 0.05, "max_exp_avg_sq": 0.05, "last_grad": 0.3, "compensation": 1e-4}


class Subject:
    """An optimizer and its mirror; an edit changes both."""

    def __init__(self, random: Random, settings: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
        self.random = random
        self.dtype = random.choice((torch.float32, torch.float32, *DTYPES))
        self.params = [self.new_param(shape) for shape in shapes]
        self.optimizer = mars_of(self.params, **settings)
        self.mirror = Mirror.of(self.optimizer)
        self.edits: list[str] = []
        self.refusals: list[tuple[str, Callable[[], None]]] = []  # edits that a step may refuse, and what undoes them
        self.saved: list[tuple[dict[str, Any], dict[str, Any]]] = []  # loaded states, which must not change later
        self.metrics = False
        self.hooks: list[Any] = []  # to be removed after the next step
        self.in_hooks: list[Callable[[], None]] = []  # what they will have changed, for the mirror

    # --- what edits need ----------------------------------------------------------------------------------------------

    def new_param(self, shape: tuple[int, ...]) -> nn.Parameter:
        layout = self.random.choice(("contiguous", *WRITABLE))
        param = nn.Parameter(place(draw_values(self.random, shape), self.dtype, layout, self.random).tensor)
        param.grad_dtype = None  # any
        return param

    def groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Pairs of a group and its mirror."""
        return list(zip(self.optimizer.param_groups, self.mirror.groups, strict=True))

    def set(self, key: str, value: Any, groups: list[tuple[dict[str, Any], dict[str, Any]]] | None = None) -> None:
        for group, mirrored in groups or self.groups():
            group[key] = mirrored[key] = value

    def stated(self) -> list[Tensor]:
        """Parameters with a state."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if self.optimizer.state.get(p)]

    def draw_state(self) -> tuple[Tensor, str]:
        """A parameter and a state of it that is a whole tensor."""
        return self.random.choice([(p, key) for p in self.stated() for key in self.optimizer.state[p] if key in SIZES])

    def draw_value(self, param: Tensor, key: str) -> Tensor:
        values = draw_values(self.random, tuple(param.shape), SIZES[key])
        return values.abs() if key in MOMENTS[1:] else values

    def note(self, param: Tensor, key: str, value: Tensor) -> None:
        """Tell the mirror about a new state."""
        entry = self.mirror.entries[param]
        scale = self.optimizer.state[param].get("last_grad_scale") if key == "last_grad" else None
        entry.kept[key] = value.detach().double().clone() * (1.0 if scale is None else scale.double())
        entry.dtypes[key] = value.dtype

    def adopt(self) -> None:
        """Accept the optimizer's contents as correct; remember the step of parameters without last gradient."""
        before = {param: entry.before for param, entry in self.mirror.entries.items()}
        self.mirror = Mirror.of(self.optimizer)
        for param, entry in self.mirror.entries.items():
            entry.before = before.get(param)

    def group_of(self, param: Tensor) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))

    def may_refuse(self, undo: Callable[[], None]) -> None:
        self.refusals.append((self.edits[-1], undo))

    # --- the step -----------------------------------------------------------------------------------------------------

    def set_gradients(self, *, all_of_them: bool = False) -> None:
        made: dict[tuple[int, ...], Tensor] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                draw = self.random.random()
                if not all_of_them and (draw < 0.15 or not param.requires_grad):
                    param.grad = None
                elif draw < 0.25 and tuple(param.shape) in made and made[tuple(param.shape)].dtype == param.dtype:
                    param.grad = made[tuple(param.shape)]
                else:
                    layout = self.random.choice(("contiguous", "contiguous", *READABLE))
                    values = draw_values(self.random, tuple(param.shape), self.random.choice((0.01, 0.3, 3.0)))
                    param.grad = place(values, param.dtype, layout, self.random).tensor
                    if layout != "zero tensor":
                        made[tuple(param.shape)] = param.grad
                        if self.random.random() < 0.1:
                            param.grad.requires_grad_()

    def supply(self) -> None:
        """Supply stale gradients if needed."""
        if self.optimizer.is_exact:
            self.set_gradients(all_of_them=True)
            self.optimizer.update_previous_grad()
            self.optimizer.update_last_grad()
            for group in self.optimizer.param_groups:
                for param in group["params"] if takes_mars(group) and not group["is_approx"] else ():
                    entry = self.mirror.entries[param]
                    entry.kept.pop("last_grad", None)
                    entry.dtypes.pop("last_grad", None)
                    if param.grad is not None:
                        dtype = self.optimizer.state[param]["last_grad"].dtype
                        stale = param.grad.detach().to(dtype)
                        entry.kept["last_grad"] = (-stale if group["maximize"] else stale).double()
                        entry.dtypes["last_grad"] = dtype

    def step(self, *, bfloat16: float) -> None:
        """Take a step and compare with the mirror; if an edit is refused and may be, undo it and step again."""
        self.mirror.assert_same(Mirror.of(self.optimizer))
        self.supply()
        self.set_gradients(all_of_them=bool(self.refusals))  # what is to be refused must be looked at
        for change in self.in_hooks:
            change()
        try:
            self._step(bfloat16)
        except (RuntimeError, ValueError) as error:
            if not self.refusals or not is_documented(error):
                raise
            self.mirror.assert_same(Mirror.of(self.optimizer))
            for _, undo in reversed(self.refusals):
                undo()
            self.supply()
            self.set_gradients()
            self._step(bfloat16)
        for hook in self.hooks:
            hook.remove()
        self.refusals, self.hooks, self.in_hooks = [], [], []
        self.remember()
        self.adopt()
        for state, copied in self.saved:
            assert_equal_states(state, copied)
        self.saved = self.saved[-2:]

    def _step(self, bfloat16: float) -> None:
        expected = expect(self.mirror)
        self.optimizer.step()
        expected.check(self.optimizer, bfloat16=bfloat16)

    def remember(self) -> None:
        limit = self.mirror.groups[0]["max_grad_norm"]
        gradients = expect_gradients(self.mirror, limit)
        for group in self.mirror.groups:
            for param in group["params"]:
                entry = self.mirror.entries[param]
                if not is_recursive(group, entry.kept):
                    entry.before = None
                elif param in gradients:
                    entry.before = float(group["gamma"]), gradients[param] * (-1.0 if group["maximize"] else 1.0)


def expect_gradients(mirror: Mirror, limit: float | None) -> dict[Tensor, Tensor]:
    """Return the gradients of the step, scaled to the global norm."""
    params = [param for group in mirror.groups for param in group["params"] if param.grad is not None]
    gradients = {param: param.grad.detach().double() for param in params}
    if limit is None or not gradients:
        return gradients
    norm = sum((gradient**2).sum() for gradient in gradients.values()) ** 0.5
    return {param: gradient * min(1.0, limit / (float(norm) + 1e-6)) for param, gradient in gradients.items()}


def is_documented(error: Exception) -> bool:
    """Return whether an error is one line raised by mars_hf itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = mars_hf.__path__[0] in last.filename and (last.line or "").startswith("raise")
    return own and "\n" not in str(error)


def assert_equal_states(state: dict[str, Any], copied: dict[str, Any]) -> None:
    for index, own in copied["state"].items():
        for key, value in own.items():
            torch.testing.assert_close(state["state"][index][key], value, rtol=0, atol=0, equal_nan=True)


# --- edits ----------------------------------------------------------------------------------------------------------

Edit = Callable[[Subject], None]
EDITS: dict[str, Edit] = {}


def edit(function: Edit) -> Edit:
    EDITS[function.__name__] = function
    return function


@edit
def replace_state(s: Subject) -> None:
    """Assign a state with another dtype or strides."""
    param, key = s.draw_state()
    old = s.optimizer.state[param][key]
    dtype = s.random.choice((old.dtype, *DTYPES)) if key != "compensation" else old.dtype
    new = place(s.draw_value(param, key), dtype, s.random.choice(WRITABLE), s.random).tensor
    s.optimizer.state[param][key] = new
    s.note(param, key, new)


@edit
def swap_data_of_state(s: Subject) -> None:
    """Replace `.data`, the idiom of offloading."""
    param, key = s.draw_state()
    state = s.optimizer.state[param][key]
    state.data = place(s.draw_value(param, key), state.dtype, s.random.choice(WRITABLE), s.random).tensor
    s.note(param, key, state)


@edit
def set_memory_of_state(s: Subject) -> None:
    param, key = s.draw_state()
    state = s.optimizer.state[param][key]
    state.set_(place(s.draw_value(param, key), state.dtype, s.random.choice(WRITABLE), s.random).tensor)
    s.note(param, key, state)


@edit
def fill_state(s: Subject) -> None:
    """Write past autograd, which then counts no version."""
    param, key = s.draw_state()
    state = s.optimizer.state[param][key]
    s.random.choice((lambda data: data.fill_(SIZES[key]), lambda data: data.mul_(7.0), lambda data: data.zero_()))(
        state.data
    )
    s.note(param, key, state)


@edit
def state_of_values_that_share_memory(s: Subject) -> None:
    """Make memory that cannot be stepped in place: the step must be right or refuse."""
    param, key = s.draw_state()
    state = s.optimizer.state[param]
    old = state[key]
    state[key] = torch.full((), SIZES[key], dtype=old.dtype).expand(old.shape)
    s.note(param, key, state[key])

    def undo() -> None:
        state[key] = old
        s.note(param, key, old)

    s.may_refuse(undo)


@edit
def change_step(s: Subject) -> None:
    """Set a step count to 0 or another value: in place, by assignment or as a number."""
    param = s.random.choice(s.stated())
    state, count = s.optimizer.state[param], s.random.choice((0, 0, 3, 1000))
    how = s.random.randrange(3)
    if how == 0:
        state["step"].fill_(count)
    else:
        state["step"] = torch.tensor(float(count)) if how == 1 else count
    s.mirror.entries[param].kept["step"] = torch.tensor(float(count), dtype=torch.float64)
    if how == 2:
        s.mirror.entries[param].dtypes.pop("step", None)

        def undo() -> None:
            state["step"] = torch.tensor(float(count))
            s.mirror.entries[param].dtypes["step"] = torch.float32

        s.may_refuse(undo)


@edit
def delete_key(s: Subject) -> None:
    """Drop states: they restart, but a last gradient cannot."""
    param, key = s.draw_state()
    state, entry, group = s.optimizer.state[param], s.mirror.entries[param], s.group_of(param)
    if key == "last_grad" and not is_recursive(group, set(state) - {"last_grad"}):
        old, kept, dtype = state.pop(key), entry.kept.pop(key), entry.dtypes.pop(key)
        scale = state.pop("last_grad_scale", None)

        def undo() -> None:
            state[key], entry.kept[key], entry.dtypes[key] = old, kept, dtype
            if scale is not None:
                state["last_grad_scale"] = scale

        s.may_refuse(undo)
        return
    key = s.random.choice((key, "step"))
    if key == "last_grad":
        state.pop("last_grad_scale", None)
    for held in (state, entry.kept, entry.dtypes):
        held.pop(key, None)
    entry.before = None


@edit
def delete_whole_state(s: Subject) -> None:
    param = s.random.choice(s.stated())
    how = s.random.randrange(3)
    if how == 0:
        del s.optimizer.state[param]
    elif how == 1:
        s.optimizer.state[param] = {}
    else:
        s.optimizer.state[param].clear()
    entry = s.mirror.entries[param]
    s.mirror.entries[param] = Entry(entry.x, entry.dtype)


@edit
def replace_state_dicts(s: Subject) -> None:
    """Replace all states by copies."""
    if s.random.random() < 0.5:
        s.optimizer.state = collections.defaultdict(dict, {p: dict(own) for p, own in s.optimizer.state.items()})
    else:
        for param in s.stated():
            s.optimizer.state[param] = {key: value.clone() if isinstance(value, Tensor) else value
                                        for key, value in s.optimizer.state[param].items()}  # fmt: skip


@edit
def replace_groups(s: Subject) -> None:
    s.optimizer.param_groups = [dict(group) for group in s.optimizer.param_groups]
    if s.random.random() < 0.5:
        for group in s.optimizer.param_groups:
            group["params"] = list(group["params"])


@edit
def reorder_parameters(s: Subject) -> None:
    group, mirrored = s.random.choice(s.groups())
    group["params"].reverse()
    mirrored["params"].reverse()


@edit
def change_setting(s: Subject) -> None:
    key, values = s.random.choice(
        (
            ("lr", (0.02, 0.05, 0.0, torch.tensor(0.01))),
            ("betas", ((0.9, 0.99), [0.5, 0.9], (0.0, 0.5))),
            ("weight_decay", (0.0, 0.1, 0.5)),
            ("eps", (1e-8, 1e-3)),
            ("maximize", (True, False)),
        )
    )
    s.set(key, s.random.choice(values), s.random.choice((None, [s.random.choice(s.groups())])))


@edit
def change_correction(s: Subject) -> None:
    """Change gamma or clip_threshold: without last gradients the remaining state may not suffice."""
    key, values = s.random.choice((("gamma", (0.025, 0.5, 0.0)), ("clip_threshold", (1.0, 0.05, 100.0, None))))
    before = [group[key] for group, _ in s.groups()]
    s.set(key, s.random.choice(values))

    def undo() -> None:
        for pair, value in zip(s.groups(), before, strict=True):
            s.set(key, value, [pair])

    kept = [s.mirror.entries[param].kept for group in s.optimizer.param_groups for param in group["params"]]
    if any("exp_avg" in own and "last_grad" not in own for own in kept):
        s.may_refuse(undo)


@edit
def change_global_norm(s: Subject) -> None:
    value = s.random.choice((None, 0.5, 0.5, 1000.0))
    s.optimizer.max_grad_norm = value
    for group in s.mirror.groups:
        group["max_grad_norm"] = value


@edit
def change_take_grad(s: Subject) -> None:
    s.optimizer.take_grad = s.random.random() < 0.7


@edit
def freeze(s: Subject) -> None:
    param = s.random.choice(s.params)
    param.requires_grad_(not param.requires_grad)


@edit
def change_metrics(s: Subject) -> None:
    if s.metrics:
        found = s.optimizer.pop_metrics()
        assert all(value == value for value in found.values()), found
    s.metrics = s.random.random() < 0.7
    s.optimizer.collect_metrics(s.metrics)


@edit
def edit_parameter(s: Subject) -> None:
    """Change a parameter's values, in place or in other memory; then maybe its gradient too."""
    param = s.random.choice(s.params)
    values = draw_values(s.random, tuple(param.shape))
    how = s.random.randrange(3)
    if how == 0:
        param.data.copy_(values)
    elif how == 1:
        param.data = place(values, param.dtype, s.random.choice(WRITABLE), s.random).tensor
    else:
        with torch.no_grad():
            param.set_(place(values, param.dtype, s.random.choice(WRITABLE), s.random).tensor)
    if param in s.mirror.entries:
        s.mirror.entries[param].x = param.detach().double().clone()


@edit
def change_dtype_of_parameter(s: Subject) -> None:
    """Convert parameters as model.to(dtype) does."""
    param = s.random.choice(s.params)
    param.grad = None
    param.data = param.data.to(s.random.choice(DTYPES))
    if param in s.mirror.entries:
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
    if len(s.params) > 8:
        return
    made = [s.new_param(s.random.choice(SHAPES)) for _ in range(s.random.randint(1, 2))]
    limit = s.optimizer.param_groups[0]["max_grad_norm"]
    s.params += made
    s.optimizer.add_param_group({"params": made, "lr": 0.03})
    for group in s.optimizer.param_groups[len(s.mirror.groups) :]:
        s.mirror.groups.append({**group, "params": list(group["params"]), "max_grad_norm": limit})
        for param in group["params"]:
            s.mirror.entries[param] = Entry(param.detach().double().clone(), param.dtype)


def _load(s: Subject, saved: dict[str, Any]) -> None:
    """Load a state; the mirror adopts it, except for settings of the current loop."""
    s.saved.append((saved, copy.deepcopy(saved)))
    s.optimizer.load_state_dict(saved)
    numbers = [index for group in saved["param_groups"] for index in group["params"]]
    params = [param for group in s.mirror.groups for param in group["params"]]
    for index, param in zip(numbers, params, strict=True):
        entry = s.mirror.entries[param]
        state = {**saved["state"].get(index, {})}
        scale = state.pop("last_grad_scale", None)
        before = entry.before
        s.mirror.entries[param] = entry = Entry(entry.x, entry.dtype)
        for key, value in state.items():
            entry.kept[key] = torch.as_tensor(value).double().clone()
            if key == "last_grad" and scale is not None:
                entry.kept[key] *= scale
            entry.dtypes[key] = torch.as_tensor(value).dtype if key != "step" else torch.float32
        entry.before = before if "exp_avg" in entry.kept else None


@edit
def load_a_copy(s: Subject) -> None:
    _load(s, copy.deepcopy(s.optimizer.state_dict()))


@edit
def load_an_edited_copy(s: Subject) -> None:
    """Load other values, dtypes and strides, and step counts as numbers."""
    saved = copy.deepcopy(s.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if key in SIZES and s.random.random() < 0.3:
                dtype = value.dtype if key == "compensation" else s.random.choice(DTYPES)
                state[key] = place(value.double() * 0.5, dtype, s.random.choice(WRITABLE), s.random).tensor
            if key == "step" and s.random.random() < 0.3:
                state[key] = int(value)
    _load(s, saved)


@edit
def load_hooks(s: Subject) -> None:
    """Load with hooks: a pre-hook's return value is loaded, and a post-hook's writes stay."""
    if not s.stated():
        return
    edited = copy.deepcopy(s.optimizer.state_dict())
    for state in edited["state"].values():
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"] * 0.5
    handles = [s.optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: edited)]
    written: list[tuple[Tensor, Tensor]] = []

    def post_hook(optimizer: Any) -> None:
        param, state = s.random.choice([(p, own) for p, own in optimizer.state.items() if "exp_avg" in own])
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.125)
        written.append((param, state["exp_avg"]))

    stated = any("exp_avg" in state for state in edited["state"].values())
    if stated:
        handles.append(s.optimizer.register_load_state_dict_post_hook(post_hook))
    given = s.optimizer.state_dict()
    given = {"state": {}, "param_groups": given["param_groups"]}
    try:
        s.saved.append((edited, copy.deepcopy(edited)))
        s.optimizer.load_state_dict(given)
    finally:
        for handle in handles:
            handle.remove()
    for param in s.stated():
        entry = s.mirror.entries[param]
        if "exp_avg" in entry.kept:
            entry.kept["exp_avg"] = (entry.kept["exp_avg"].to(entry.dtypes["exp_avg"]) * 0.5).double()
    for param, tensor in written:
        s.note(param, "exp_avg", tensor)


@edit
def step_hook(s: Subject) -> None:
    """Make an edit from within step()."""
    param, key = s.draw_state()
    new = place(s.draw_value(param, key), s.optimizer.state[param][key].dtype, "rows", s.random).tensor

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.state[param][key] = new

    s.hooks.append(s.optimizer.register_step_pre_hook(hook))
    s.in_hooks.append(lambda: s.note(param, key, new))


@edit
def change_exactness(s: Subject) -> None:
    """Switch to or from exact steps, which use stale gradients; a first moment may then lack its last gradient."""
    if any(group["clip_threshold"] is None for group in s.optimizer.param_groups):
        return  # the form without last gradients keeps another average
    now = s.optimizer.is_exact
    s.set("is_approx", now)
    if now:  # exact no more
        s.may_refuse(lambda: s.set("is_approx", False))


@edit
def refused_state(s: Subject) -> None:
    """A state that cannot be stepped raises, and nothing changes."""
    param, key = s.draw_state()
    state, entry = s.optimizer.state[param], s.mirror.entries[param]
    old = state[key]
    wrong = s.random.choice(
        (
            lambda: torch.zeros(*old.shape, 2),  # as many rows
            lambda: torch.zeros((old.numel() + 7,)),
            lambda: torch.zeros((1, *old.shape)),  # as many elements
            lambda: torch.zeros(old.shape, dtype=torch.int64),
            lambda: torch.zeros(old.shape, dtype=torch.complex64),
            lambda: torch.zeros(old.shape, device="meta"),
            lambda: torch.zeros(old.shape).to_sparse() if old.ndim else torch.zeros((3,)),
        )
    )()
    state[key] = wrong
    param.grad = torch.ones_like(param)
    with pytest.raises((RuntimeError, ValueError)) as raised:
        s.optimizer.step()
    assert is_documented(raised.value), f"{type(raised.value).__name__} of torch: {raised.value}"
    state[key] = old
    assert entry is s.mirror.entries[param]
    s.mirror.assert_same(Mirror.of(s.optimizer))


@edit
def refused_load(s: Subject) -> None:
    """Loading a state of another shape raises with both shapes, and nothing changes."""
    saved = copy.deepcopy(s.optimizer.state_dict())
    index, key = s.random.choice(
        [(index, key) for index, own in saved["state"].items() for key in own if key in SIZES] or [(None, None)]
    )
    if index is None:
        return
    old = saved["state"][index][key]
    new = s.random.choice((torch.zeros(old.numel() + 3), torch.zeros(1, *old.shape), torch.zeros(*old.shape, 2)))
    saved["state"][index][key] = new
    with pytest.raises((RuntimeError, ValueError)) as raised:
        s.optimizer.load_state_dict(saved)
    assert is_documented(raised.value), f"{type(raised.value).__name__} of torch: {raised.value}"
    assert all(str(tuple(tensor.shape)) in str(raised.value) for tensor in (old, new)), str(raised.value)
    s.mirror.assert_same(Mirror.of(s.optimizer))


@edit
def refused_gradient(s: Subject) -> None:
    """A gradient that Mars cannot use raises, and nothing changes."""
    param = s.random.choice(s.params)
    made = [torch.zeros(param.shape, device="meta", dtype=param.dtype)]
    if param.ndim:
        made.append(torch.ones_like(param).to_sparse())
    try:
        param.grad = s.random.choice(made)
    except RuntimeError:  # torch rejects it
        return
    with pytest.raises((RuntimeError, ValueError)) as raised:
        s.optimizer.step()
    assert is_documented(raised.value), f"{type(raised.value).__name__} of torch: {raised.value}"
    param.grad = None
    s.mirror.assert_same(Mirror.of(s.optimizer))


NEED_A_STATE = {
    *("replace_state", "swap_data_of_state", "set_memory_of_state", "fill_state", "change_step", "delete_key"),
    *("state_of_values_that_share_memory", "delete_whole_state", "refused_state", "refused_load", "step_hook"),
}


# --- runs -----------------------------------------------------------------------------------------------------------


def run(backend: str, seed: int, edits: int, *, shapes: list[tuple[int, ...]] | None = None) -> None:
    """Make edits to one optimizer, with a step after every one to three of them."""
    random = Random(f"edits {seed}")
    rule = random.choice(list(RULES))
    settings = {**draw_settings(random, rule), **({} if backend == "triton" else BACKENDS[backend])}
    if shapes is None:
        shapes = [random.choice(SHAPES) for _ in range(random.randint(2, 5))]
    s = Subject(random, settings, shapes)
    bfloat16 = 1.0 if backend == "triton" else 0.5
    made = 0
    while made < edits:
        now = []
        for _ in range(random.randint(1, 3)):
            name = random.choice(list(EDITS))
            usable = name not in NEED_A_STATE or any(
                key in SIZES for param in s.stated() for key in s.optimizer.state[param]
            )
            # Undoing a refused edit must not interfere with other edits.
            if not usable or (s.refusals and now):
                continue
            now.append(name)
            s.edits = [*s.edits[-8:], name]
            with named(f"run({backend!r}, {seed}, {edits}), edits ... {', '.join(s.edits)} ({rule}; {settings})"):
                EDITS[name](s)
            made += 1
            if s.hooks:  # their targets must still exist in the step
                break
        s.edits.append("step")
        with named(f"run({backend!r}, {seed}, {edits}), edits ... {', '.join(s.edits)} ({rule}; {settings})"):
            s.step(bfloat16=bfloat16)


@not_interpreted
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_compiler if name == "compiled" else ()) for name in BACKENDS]
)
def test_1500_edits(backend, part, monkeypatch):
    if backend == "auto":  # kernels, as for large parameters, if they run
        monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    for seed in range(5 * part, 5 * part + 5):
        run(backend, seed, 15)


@pytest.mark.soak
@not_interpreted
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_edits(backend, part):
    for seed in range(1000 + 5 * part, 1005 + 5 * part):
        run(backend, seed, 40)


@pytest.mark.soak
@not_interpreted
@needs_compiler
@pytest.mark.parametrize("seed", range(3))
def test_edits_of_large_parameters(seed):
    """Parameters have a million elements, where fused=None chooses the compiled kernels."""
    run("auto", 5000 + seed, 25, shapes=[(1000, 1001), (4, 3), (5,), (4097,)])


@pytest.mark.skipif(not TRITON, reason="test_triton_interpreted of test_layout_fuzz.py runs it")
@pytest.mark.parametrize("seed", range(10))
def test_triton_edits(seed, monkeypatch):
    from mars_hf.kernels import gpu as triton

    monkeypatch.setattr(backends, "kernels_of", lambda device: triton)
    monkeypatch.setattr(backends, "COMPILED_FROM", 0)
    run("triton", seed, 15)
