"""Loading a state: hooks, shapes, dtypes, other optimizers; parameters converted and swapped; changes of its form."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from typing import Any

import pytest
import torch
from helpers import equal, fused_and_plain, gpt2, logged
from reference import Reference
from torch import nn

import mars_hf
from mars_hf import Mars
from mars_hf.kernels import cpu


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


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_pre_hook_converts_another_optimizer():
    model = model_of(4, 3)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, adamw, 3)
    optimizer = Mars(model.parameters())
    with pytest.raises(ValueError, match="another optimizer saved it"):
        optimizer.load_state_dict(adamw.state_dict())

    def from_adamw(mars: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        converted = copy.deepcopy(mars.state_dict())
        converted["state"] = copy.deepcopy(state_dict["state"])  # weight and bias have the same numbers
        converted["state"][0]["last_grad"] = torch.zeros_like(converted["state"][0]["exp_avg"])
        return converted

    saved = copy.deepcopy(adamw.state_dict())
    handle = optimizer.register_load_state_dict_pre_hook(from_adamw)
    optimizer.load_state_dict(adamw.state_dict())
    assert equal(adamw.state_dict(), saved)
    for param in model.parameters():
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in adamw.state[param].items())
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given["param_groups"][0].pop("role") and None)
    with pytest.raises(ValueError, match="role"):  # the result of a hook is checked
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0]["role"] == "matrix"


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


SHAPES = [(5, 4), (4, 3), (1, 3, 4)]  # as of a resized vocabulary, also with the same number of elements
VALUES = [("betas", (0.95, 1.5)), ("lr", float("nan")), ("lr", None), ("gamma", "much"), ("eps", -1e-8)]
WRONG = [
    ("state", key, torch.zeros(shape), r"\(3, 4\).*" + re.escape(str(shape)))
    for key in ("exp_avg", "exp_avg_sq", "last_grad")
    for shape in SHAPES
]
WRONG += [("param_groups", *pair, f"^param group 0 of this state cannot be used: .*{pair[0]}") for pair in VALUES]


@pytest.mark.parametrize(("where", "key", "value", "message"), WRONG)
def test_loading_what_is_wrong_changes_nothing(where, key, value, message):
    _, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["weight_decay"] = 7.0
    saved[where][0][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert equal(before, optimizer.state_dict())


def test_resized_embeddings_are_named():
    """What a Trainer can do about it is a new run."""
    model = gpt2()
    optimizer = mars_hf.create(model, lr=0.01)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    model.resize_token_embeddings(80)
    message = (
        r"the saved state of transformer\.wte\.weight of shape \(80, 8\).* resized since.* start a new run from its w"
    )
    with pytest.raises(ValueError, match=message):
        mars_hf.create(model, lr=0.01).load_state_dict(saved)


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


class Two(nn.Module):
    """Two layers of one shape, in either order."""

    def __init__(self, names: str = "ab", frozen: str = "") -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4).requires_grad_(name != frozen))


def saved_state(model: nn.Module) -> dict[str, Any]:
    optimizer = mars_hf.create(model, lr=0.01)
    train(nn.ParameterList(param for group in optimizer.param_groups for param in group["params"]), optimizer, 1)
    return copy.deepcopy(optimizer.state_dict())


def test_states_of_another_parameter_of_the_same_shape_are_refused():
    with pytest.raises(ValueError, match=r"^param group 0 was saved with a\.weight in the place of b\.weight, "):
        mars_hf.create(Two("ba"), lr=0.01).load_state_dict(saved_state(Two("ab")))


def test_states_of_parameters_that_are_unknown_here_are_said():
    """Adapters of other layers, or other layers frozen; it may also be a new name, which is then the saved one."""
    optimizer, again = (mars_hf.create(Two(frozen="a"), lr=0.01) for _ in range(2))
    lines = logged(lambda: optimizer.load_state_dict(saved_state(Two(frozen="b"))))
    assert len(lines) == 1 and lines[0].startswith("2 parameters take the states of other names, b.weight that of a.w")
    assert logged(lambda: again.load_state_dict(optimizer.state_dict())) == []


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.ModuleList([model]), lambda model: model])
def test_wrappers_around_a_model_are_no_other_names(wrap):
    saved = saved_state(Two())
    assert logged(lambda: mars_hf.create(wrap(Two()), lr=0.01).load_state_dict(saved)) == []


@pytest.mark.parametrize(
    ("frozen", "settings", "now"),
    [("b", {}, "[1, 1]"), ("", {"param_rules": [("a.weight", {"lr": 1.0})]}, "[1, 2, 1]")],
)
def test_another_number_of_parameters_is_not_called_resized(frozen, settings, now):
    message = f"^this state is of param groups with [2, 2] parameters, and the optimizer's have {now}: other layers "
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        mars_hf.create(Two(frozen=frozen), lr=0.01, **settings).load_state_dict(saved_state(Two()))


@pytest.mark.parametrize("of_machine", [None, False])
def test_load_state_dict_keeps_fused_of_this_machine(of_machine, monkeypatch):
    """A checkpoint of fused=True goes on where no kernels run: they are no setting of the run."""
    model = model_of(4, 3)
    saved = Mars(model.parameters(), fused=None)
    train(model, saved, 1)
    state_dict = saved.state_dict()
    for group in state_dict["param_groups"]:
        group["fused"] = True
    optimizer = Mars(model.parameters(), fused=of_machine)
    optimizer.load_state_dict(state_dict)
    assert [group["fused"] for group in optimizer.param_groups] == [of_machine] * 2
    monkeypatch.setattr(cpu, "is_available", lambda device: False)
    train(model, optimizer, 1)


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


def test_dtype_of_new_buffers():
    """A state in bfloat16, of whatever origin, does not become half float32."""
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.update({key: value.bfloat16() for key, value in state.items() if key != "step"})
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    train(model, optimizer, 1)
    dtypes = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    assert all("max_exp_avg_sq" in state for state in optimizer.state.values()) and dtypes == {torch.bfloat16}


@pytest.mark.parametrize("loaded", [False, True], ids=["set", "loaded"])
def test_step_of_shape_1_becomes_a_number(loaded):
    """As other optimizers keep it; every later step then takes the usual path."""
    model, optimizer = trained()
    states = copy.deepcopy(optimizer.state_dict()) if loaded else optimizer.state_dict()
    for state in states["state"].values():
        state["step"] = torch.full((1,), 3.0)
    if loaded:
        optimizer.load_state_dict(states)
    twin_model, twin = trained()
    for one, other in ((model, optimizer), (twin_model, twin)):
        train(one, other, 2, start=3)
    steps = [state["step"] for state in optimizer.state.values()]
    assert all(step.shape == () and step == 5 for step in steps)
    assert equal(list(model.parameters()), list(twin_model.parameters()))


@pytest.mark.parametrize("named", [(False, False), (True, False), (False, True)], ids=str)
@fused_and_plain
def test_states_with_and_without_names(named, fused):
    """Either is loaded into either; neither loading nor steps change what was saved."""
    runs = []
    for has_names in named:
        model = model_of(4, 3, 2)
        optimizer = Mars(model.named_parameters() if has_names else model.parameters(), fused=fused)
        train(model, optimizer, 3)
        runs.append((model, optimizer))
    (model, optimizer), (twin_model, twin) = runs
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    twin.load_state_dict(saved)
    for run in runs:
        train(*run, 2, start=3)
    assert equal(list(model.parameters()), list(twin_model.parameters()))
    assert equal(optimizer.state_dict()["state"], twin.state_dict()["state"]) and equal(saved, kept)


RESUMED = [
    {},
    {"mars_type": "mars-m"},
    {"mars_type": "mars-m", "normalize_rows": 0.9},
    {"mars_type": "mars-lion", "clip_threshold": None},
    {"amsgrad": True},
    {"rounding": "kahan"},
    {"rounding": "stochastic"},
    {"max_grad_norm": 0.1},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", RESUMED, ids=str)
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_state_dict_and_pickle_go_on_to_the_bit(way, settings, dtype):
    """Where training stopped, also with a group that is added afterwards."""
    ends = []
    for stops in (False, True):
        model = model_of(4, 3, 2, dtype=dtype)
        optimizer = Mars(model.named_parameters(), lr=0.01, **settings)
        train(model, optimizer, 3)
        if stops and way == "pickle":
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
        elif stops:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = Mars(model.named_parameters(), lr=0.01, **settings)
            optimizer.load_state_dict(saved)
        model.append(nn.Linear(2, 5).to(dtype))
        with torch.no_grad():
            for param in model[-1].parameters():
                param.fill_(0.5)
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        train(model, optimizer, 3, start=3)
        ends.append([list(model.parameters()), optimizer.state_dict()["state"], optimizer.max_grad_norm])
    assert equal(*ends)


def test_rows_of_another_shape_change_nothing():
    model, optimizer = trained(mars_type="mars-m", normalize_rows=0.9)
    state = optimizer.state[model[1].weight]
    assert state["row_avg_sq"].shape == (2,)
    state["row_avg_sq"] = torch.zeros(3)
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()])
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) has row_avg_sq of shape \(3,\).* needs shape \(2,\)"):
        train(model, optimizer, 1)
    optimizer.zero_grad()
    assert equal(before, [list(model.parameters()), optimizer.state_dict()])


def test_rows_of_converted_parameters():
    """They are in float32, as wide as other new states of bfloat16 parameters, and in float64 for float64 ones."""
    model, optimizer = trained(mars_type="mars-m", normalize_rows=0.9, state_dtype="bfloat16")
    assert optimizer.state[model[0].weight]["row_avg_sq"].dtype == torch.float32
    before = optimizer.state[model[0].weight]["row_avg_sq"].clone()
    model.double()
    train(model, optimizer, 1, start=3)
    after = optimizer.state[model[0].weight]["row_avg_sq"]
    assert after.dtype == torch.float64 and (after >= 0.9 * before).all() and (after < 0.9 * before + 0.1).all()


# --- parameters that are converted, swapped, replaced ---------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("swaps", [False, True], ids=["data", "swapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@fused_and_plain
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
    optimizer = mars_hf.create(model, **{"lr": 3e-3, **settings})
    train(model, optimizer, 3)
    optimizer.zero_grad()
    optimizer.state.clear()
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.full((2, 5), 2.0)))
    model[0].weight.grad = torch.ones(2, 5)
    optimizer.step()
    assert (model[0].weight != 2.0).all()


# --- the form without last gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [{"mars_type": "mars-lion"}, {"mars_type": "mars-m"}, {"second_moment": "gradient"}], ids=str
)
def test_gamma_may_not_change_without_last_gradients(rule):
    """Of any parameter of a group that keeps none, also of one without a state; a threshold neither."""
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    mars = Mars(params, clip_threshold=None, gamma=0.5, **rule)
    params[0].grad = torch.ones(3, 2)
    mars.step()
    params[1].grad = torch.ones(3, 2)
    for key, value, message in (("gamma", 0.0, "gamma=0.0 after steps with 0.5"), ("clip_threshold", 0.5, "=0.5 and")):
        before = mars.param_groups[0][key]
        mars.param_groups[0][key] = value
        with pytest.raises(RuntimeError, match=message):
            mars.step()
        assert params[1] not in mars.state and mars.state[params[0]]["step"] == 1
        mars.param_groups[0][key] = before
    mars.step()
    assert mars.state[params[1]]["step"] == 1


@pytest.mark.parametrize("settings", [{}, {"clip_threshold": None, "mars_type": "mars-lion"}], ids=str)
def test_gamma_may_change_for_what_takes_adamw(settings):
    """Vectors and embeddings have no last gradients either, and no gamma."""
    model, optimizer = trained(**settings)
    for group in optimizer.param_groups:
        if group["role"] == "vector":
            assert "gamma_of_average" not in group
            group["gamma"] = 0.7
    train(model, optimizer, 1, start=3)
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}


def test_turning_clipping_off_keeps_the_form_of_the_state():
    runs = []
    for threshold in (None, 1e9):
        model, optimizer = trained(mars_type="mars-lion", clip_threshold=1e9)
        for group in optimizer.param_groups:
            group["clip_threshold"] = threshold
        train(model, optimizer, 3, start=3)
        runs.append(list(model.parameters()))
    assert equal(*runs)


# --- what a loaded state lacks ----------------------------------------------------------------------------------------


NEWER = ("weight_decay_mode", "normalize_rows", "ns_coefficients", "rounding", "state_dtype", "optimize_1d")


def of_an_earlier_version(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups as they were before some settings were there."""
    return [{key: value for key, value in group.items() if key not in NEWER} for group in groups]


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_state_of_an_earlier_version(how, mars_type):
    """Settings that it lacks take their defaults, not those of the optimizer that loads, and the run goes on."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    mars = mars_hf.create(model, lr=1e-2, mars_type=mars_type)
    gradients = [[torch.randn_like(param) for param in model.parameters()] for _ in range(3)]

    def step(model: nn.Module, mars: Mars, index: int) -> None:
        for param, gradient in zip(model.parameters(), gradients[index], strict=True):
            param.grad = gradient.clone()
        mars.step()

    step(model, mars, 0)
    other = copy.deepcopy(model)
    if how == "state_dict":
        saved = mars.state_dict()
        saved["param_groups"] = of_an_earlier_version(saved["param_groups"])
        again = mars_hf.create(other, lr=1e-2, mars_type=mars_type, weight_decay_mode="cautious")
        again.load_state_dict(saved)
    else:
        old = copy.deepcopy(mars)
        old.param_groups = of_an_earlier_version(old.param_groups)
        old.defaults = {key: value for key, value in old.defaults.items() if key not in NEWER}
        again = pickle.loads(pickle.dumps(old)) if how == "pickle" else copy.deepcopy(old)
        params = [param for group in again.param_groups for param in group["params"]]
        other.weight, other.bias = params
    for index in (1, 2):
        step(model, mars, index)
        step(other, again, index)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert again.param_groups[0]["weight_decay_mode"] == "standard"
    again.add_param_group({"params": [nn.Parameter(torch.ones(2))], "role": "vector"})
    assert again.param_groups[-1].keys() >= set(NEWER) and "rule" in repr(again)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda group: {"params": []}, "^param group 0 of this state is empty: it has neither parameters nor settings"),
        (lambda group: {"params": [0], "lr": 1.0}, "^param group 0 of this state has no 'role', so another optimizer"),
        (lambda group: {key: group[key] for key in group if key != "lr"}, "^param group 0 of this state has no 'lr'"),
    ],
)
def test_groups_that_cannot_be_loaded(change, line):
    params = [nn.Parameter(torch.ones(4, 4))]
    mars = Mars(params, lr=1e-2)
    params[0].grad = torch.ones(4, 4)
    mars.step()
    saved = mars.state_dict()
    saved["param_groups"][0] = change(saved["param_groups"][0])
    with pytest.raises(ValueError, match=line):
        Mars([nn.Parameter(torch.ones(4, 4))], lr=1e-2).load_state_dict(saved)


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_states_on_another_device(state_dtype):
    """A model that has moved is not called resized, and nothing is said of ZeRO."""
    param = nn.Parameter(torch.ones(64, 64))
    mars = Mars([param], lr=1e-2, state_dtype=state_dtype)
    param.grad = torch.ones(64, 64)
    mars.step()
    mars.state[param] = {key: value if key == "step" else value.to("meta") for key, value in mars.state[param].items()}
    with pytest.raises(RuntimeError, match=r"on meta, another device: .*state\[key\]\.to\(param\.device\)") as error:
        mars.step()
    assert "resized" not in str(error.value) and "ZeRO" not in str(error.value)
