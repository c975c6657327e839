"""Loading a state: hooks, names, step counts, shapes, dtypes, other optimizers; conversion and swaps of parameters."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers import equal, needs_compiler
from reference import Reference
from torch import Tensor, nn

import mars_hf
from mars_hf import Mars

every_implementation = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_compiler)])


def model_of(*widths: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(rows, cols) for rows, cols in itertools.pairwise(widths))).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        for index, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + index)
            param.grad = (0.1 * torch.randn(param.shape, generator=generator)).to(param.dtype)
        optimizer.step()


def trained(**settings: Any) -> tuple[nn.Sequential, Mars]:
    model = model_of(4, 3, 2)
    optimizer = Mars(model.named_parameters(), **settings)
    train(model, optimizer, 3)
    return model, optimizer


# --- hooks and names --------------------------------------------------------------------------------------------------


def test_pre_hook_replaces_the_state():
    """The returned state is loaded, and checked; the caller's dictionary stays."""
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)

    def doubled(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        other = copy.deepcopy(state_dict)
        for state in other["state"].values():
            state.update({key: value * 2 for key, value in state.items()})
        return other

    handle = optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.load_state_dict(saved)
    assert equal(saved, kept)
    assert equal(optimizer.state_dict()["state"], doubled(None, kept)["state"])
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given["param_groups"][0].pop("role") and None)
    with pytest.raises(ValueError, match="role"):
        optimizer.load_state_dict(kept)
    assert optimizer.param_groups[0]["role"] == "matrix"


def test_pre_hook_converts_another_optimizer():
    model = model_of(4, 3)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, adamw, 3)
    optimizer = Mars(model.parameters())
    with pytest.raises(ValueError, match="another optimizer than Mars saved it"):
        optimizer.load_state_dict(adamw.state_dict())

    def from_adamw(mars: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        own = copy.deepcopy(mars.state_dict())
        own["state"] = copy.deepcopy(state_dict["state"])  # weight and bias have the same numbers
        own["state"][0]["last_grad"] = torch.zeros_like(own["state"][0]["exp_avg"])
        return own

    optimizer.register_load_state_dict_pre_hook(from_adamw)
    optimizer.load_state_dict(adamw.state_dict())
    for param in model.parameters():
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in adamw.state[param].items())


def test_post_hook_sees_and_changes_the_state():
    """It sees states in their own dtypes with this loop's norm, and what it writes stays."""
    model = model_of(4, 3, dtype=torch.bfloat16)
    optimizer, other = (Mars(model.parameters(), max_grad_norm=norm) for norm in (1.0, 0.5))
    train(model, optimizer, 2)
    weight, seen = model[0].weight, []

    def write(mars: torch.optim.Optimizer) -> None:
        seen.extend([mars.state[weight]["exp_avg"].dtype, mars.param_groups[0]["max_grad_norm"]])
        mars.state[weight]["exp_avg"] = torch.full((3, 4), 3.0)
        mars.state[weight]["own"] = torch.ones(2)
        mars.param_groups[0]["lr"] = 0.5

    other.register_load_state_dict_post_hook(write)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.float32, 0.5]
    assert (other.state[weight]["exp_avg"] == 3.0).all() and torch.equal(other.state[weight]["own"], torch.ones(2))
    assert other.param_groups[0]["lr"] == 0.5


def test_loading_by_names():
    """PyTorch's recipe (torch.optim docs): parameters have another order, and a new layer has no state."""

    def by_names(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        adapted = copy.deepcopy(optimizer.state_dict())
        numbers = {n: i for g in saved["param_groups"] for n, i in zip(g["param_names"], g["params"], strict=True)}
        for group in adapted["param_groups"]:
            for name, number in zip(group["param_names"], group["params"], strict=True):
                if numbers.get(name) in saved["state"]:
                    adapted["state"][number] = copy.deepcopy(saved["state"][numbers[name]])
        return adapted

    small = nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(3, 2)})
    large = nn.ModuleDict({"adapter": nn.Linear(3, 3), "second": small["second"], "first": small["first"]})
    optimizer, other = mars_hf.create(small), mars_hf.create(large)
    train(small, optimizer, 3)
    other.register_load_state_dict_pre_hook(by_names)
    other.load_state_dict(optimizer.state_dict())
    assert all(equal(dict(optimizer.state[param]), dict(other.state[param])) for param in small.parameters())
    assert not other.state.get(large["adapter"].weight)
    train(large, other, 2)
    assert [other.state[large[name].weight]["step"] for name in ("first", "adapter")] == [5, 2]


def test_keys_of_others_are_carried():
    """Foreign entries of a state and of groups load unchanged, whatever their shape and type."""
    model, optimizer = trained()
    foreign = {"rank": 3, "factors": [torch.ones(2)]}
    optimizer.state[model[0].weight]["theirs"] = foreign
    optimizer.param_groups[0]["lr_scale"] = 0.5
    other = Mars(model.named_parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, other, 1)
    assert equal(other.state[model[0].weight]["theirs"], foreign)
    assert other.param_groups[0]["lr_scale"] == 0.5


def test_saved_settings_win():
    """All but the norm of the running loop."""
    model, optimizer = trained(gamma=0.5, clip_threshold=None, max_grad_norm=1.0)
    twin = copy.deepcopy(model)
    other = Mars(twin.named_parameters(), max_grad_norm=2.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    group = other.param_groups[0]
    assert (group["gamma"], group["clip_threshold"], group["max_grad_norm"]) == (0.5, None, 2.0)


# --- counts, shapes, dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda step: torch.tensor(step, dtype=torch.float64)])
@pytest.mark.parametrize("where", ["loaded", "set"])
@every_implementation
def test_step_counts_of_any_kind(fused, kind, where):
    model, optimizer = trained(fused=fused)
    twin, other = copy.deepcopy((model, optimizer))
    states = copy.deepcopy(other.state_dict()) if where == "loaded" else {"state": other.state}
    for state in states["state"].values():
        state["step"] = kind(3)
    if where == "loaded":
        other.load_state_dict(states)
    for one, each in ((model, optimizer), (twin, other)):
        train(one, each, 2, start=3)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for state in other.state.values():
        assert isinstance(state["step"], Tensor) and state["step"].shape == () and state["step"] == 5


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "last_grad"])
@pytest.mark.parametrize("shape", [(5, 4), (2, 6), (4, 3), (12,), (1, 3, 4), ()], ids=str)
def test_loading_another_shape_changes_nothing(key, shape):
    """As for a resized vocabulary, also with the same number of elements."""
    _, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][0][key] = torch.zeros(shape)
    saved["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError) as refused:
        optimizer.load_state_dict(saved)
    assert str(tuple(shape)) in str(refused.value) and "(3, 4)" in str(refused.value)
    assert equal(before, optimizer.state_dict())


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (0.95, 1.5)), ("lr", float("nan")), ("gamma", "much"), ("eps", -1e-8), ("rounding", "up"), ("lr", None)],
)
def test_loading_wrong_settings_changes_nothing(name, value):
    _, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=f"^param group 0 of this state cannot be used: .*{name}"):
        optimizer.load_state_dict(saved)
    assert equal(before, optimizer.state_dict())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"is_approx": False}, "is_approx=True and is False here"),
        ({"mars_type": "mars-m"}, "mars_type='mars-adamw' and is 'mars-m'"),
        ({"layout": {"parts": [1, 2]}}, r"layout=None and is \{'transposed': False, 'parts': \(1, 2\)"),
        ({"role": "vector"}, "role='matrix' and is 'vector'"),
        ({"pattern": "a.*"}, r"pattern 'b\.\*' of param_rules and has 'a\.\*' here"),
    ],
    ids=str,
)
def test_loading_into_other_groups_is_refused(other, message):
    model, optimizer = trained()
    params = [{"params": [layer.weight for layer in model], **other}, {"params": [layer.bias for layer in model]}]
    optimizer.param_groups[0]["pattern"] = "b.*"
    with pytest.raises(ValueError, match=message):
        Mars(params).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_states_keep_their_dtypes(dtype):
    """Those they were saved in, not the parameters'; they are copies."""
    model, optimizer = trained()
    other_model = model_of(4, 3, 2, dtype=dtype)
    other = Mars(other_model.named_parameters())
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    kept = copy.deepcopy(saved)
    for param, twin in zip(model.parameters(), other_model.parameters(), strict=True):
        assert equal(dict(optimizer.state[param]), dict(other.state[twin]))
    train(other_model, other, 2)
    assert equal(saved["state"], kept["state"])
    assert all(torch.isfinite(param).all() for param in other_model.parameters())


def test_orthogonalized_states_survive_a_file(tmp_path):
    def optimizer_of(model: nn.Module) -> Mars:
        return mars_hf.create(model, mars_type="mars-m", ns_coefficients=[(3.0, -3.2, 1.2)] * 5, lr=0.01)

    model = model_of(4, 3, 2)
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twin = copy.deepcopy(model)
    loaded = optimizer_of(twin)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for one, each in ((model, optimizer), (twin, loaded)):
        train(one, each, 3, start=3)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


# --- parameters that are converted, swapped, replaced ---------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("swaps", [False, True], ids=["data", "swapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@every_implementation
def test_converted_model(fused, dtype, swaps, steps_before):
    """`model.to(dtype)` keeps the parameter objects; the optimizer steps them in their new dtype."""
    model = model_of(4, 3)
    optimizer = Mars(model.parameters(), lr=0.01, fused=fused)
    lines = [
        Reference(model[0].weight, rule="mars-adamw", lr=0.01, betas=(0.95, 0.99)),
        Reference(model[0].bias, rule="adamw", lr=0.005, betas=(0.9, 0.95)),
    ]
    for step in range(6):
        if step == steps_before:
            optimizer.zero_grad()
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            try:
                model.to(dtype)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        for line, param in zip(lines, model.parameters(), strict=True):
            line.x = param.detach().double().clone()
        train(model, optimizer, 1, start=step)
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(model[0].weight.dtype, 1e-5)
        for line, param in zip(lines, model.parameters(), strict=True):
            line.step(param.grad)
            torch.testing.assert_close(param.detach().double(), line.x, rtol=tolerance, atol=tolerance)
    assert all(param.dtype == dtype for param in model.parameters())


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}, {"mars_type": "mars-m"}], ids=str)
def test_nothing_hinders_a_swap(settings):
    """torch refuses to swap a tensor with weak references; the optimizer keeps none, and steps the new content."""
    model = model_of(4, 3)
    optimizer = mars_hf.create(model, **settings)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    optimizer.state.clear()
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.full((2, 5), 2.0)))
    model[0].weight.grad = torch.ones(2, 5)
    optimizer.step()
    assert (model[0].weight != 2.0).all()


@pytest.mark.parametrize("index", [0, 1], ids=["matrix", "vector"])
@every_implementation
def test_replaced_parameters(fused, index):
    """A parameter of another shape, as after resizing an embedding, starts with a new state."""
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    optimizer = Mars(params, lr=0.1, max_grad_norm=100.0, fused=fused)
    new = nn.Parameter(torch.ones((6, 4) if index == 0 else (9,)))
    fresh = nn.Parameter(torch.ones_like(new))
    twin = Mars([fresh], lr=0.1, fused=fused)
    for step in range(6):
        if step == 3:
            optimizer.state.pop(params[index])
            optimizer.param_groups[index]["params"][0] = params[index] = new
        for param in (*params, fresh):
            param.grad = torch.full_like(param, 2.0)
        optimizer.step()
        if step >= 3:
            twin.step()
    assert optimizer.state[new]["step"] == 3
    torch.testing.assert_close(new, fresh, rtol=1e-5, atol=1e-6)
