"""`state_dtype="8bit"`: each step computes the formulas from what is stored, and stores the result within a code."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from helpers import equal, newton_schulz_in
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import mars_hf
from mars_hf import Mars
from mars_hf.arithmetic.eight_bits import Coded, join_weight
from mars_hf.arithmetic.formulas import CODES, SCALES
from mars_hf.arithmetic.reference import newton_schulz
from mars_hf.groups.settings import parse_optim_args
from mars_hf.step import coded
from mars_hf.step.states import UnfitStateError

KEYS = ("exp_avg", "exp_avg_sq", "last_grad")
RULES = ("mars-adamw", "mars-lion", "mars-m")
# Of whole blocks, which kernels take; not; a convolution; not contiguous.
LAYOUTS = {
    "blocks": lambda: torch.randn(80, 128),
    "rows that end in a block": lambda: torch.randn(70, 100),
    "convolution": lambda: torch.randn(64, 16, 3, 3),
    "transposed": lambda: torch.randn(128, 80).T,
}


@pytest.fixture(autouse=True)
def forget_what_was_said():
    coded._say_converted.cache_clear()
    yield
    coded._say_converted.cache_clear()


def decoded(state: dict[str, Any], key: str) -> Tensor:
    """Return a buffer in float64."""
    scales = state.get(f"{key}_scale")
    return (state[key] if scales is None else Coded(state[key], scales).decode()).double()


def stepped(param: nn.Parameter, gradient: Tensor, mars: Mars) -> nn.Parameter:
    param.grad = gradient
    mars.step()
    return param


SETTINGS = {
    "default": {},
    "clipped": {"clip_threshold": 0.1},
    "scaled": {"max_grad_norm": 0.5},
    "without last gradients": {"clip_threshold": None, "second_moment": "gradient"},
    "gradient": {"second_moment": "gradient", "weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},
    "cautious": {"weight_decay": 5.0, "weight_decay_mode": "cautious"},
    "maximize": {"maximize": True},
}
OF_SECOND_MOMENTS = ("gradient", "amsgrad")
CASES = [(rule, name) for rule in RULES for name in SETTINGS if rule == "mars-adamw" or name not in OF_SECOND_MOMENTS]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rule", "settings"), CASES)
def test_formulas_in_8_bits(rule, settings, layout, fused):
    """In float64, step by step from the decoded state of the step before."""
    torch.manual_seed(1)
    options = {**SETTINGS[settings], **newton_schulz_in("float32", rule)}
    if rule != "mars-adamw":
        options.pop("second_moment", None)
    param = nn.Parameter(LAYOUTS[layout]())
    kernels = fused and layout in ("blocks", "convolution") and settings != "amsgrad"
    mars = Mars([param], lr=0.01, mars_type=rule, state_dtype="8bit", fused=kernels or None, **options)
    group = mars.param_groups[0]
    beta1, beta2 = group["betas"]
    gamma = group["gamma"]
    k = gamma * beta1 / (1 - beta1)
    zeros = torch.zeros_like(param).double()
    for step in range(1, 6):
        gradient = torch.randn_like(param) * 3.0 ** (step - 3)
        state = copy.deepcopy(mars.state[param]) if step > 1 else {}
        old = {key: decoded(state, key) if key in state else zeros for key in KEYS}
        x = param.detach().double()
        stepped(param, gradient, mars)
        new = mars.state[param]
        g = gradient.double() * (-1 if options.get("maximize") else 1)
        if "max_grad_norm" in options:
            g = g * min(1, options["max_grad_norm"] / (g.norm() + 1e-6))
        has_last = "last_grad" in new
        c = g + k * (g - old["last_grad"]) if has_last else g
        if group["clip_threshold"] is not None:
            c = c / max(1, c.norm() / group["clip_threshold"])
        e = beta1 * old["exp_avg"] + (1 - beta1) * c
        m = e if has_last else (1 - gamma) * e + gamma * g
        expected = {"exp_avg": e, "last_grad": g}
        if rule == "mars-adamw":
            squared = g if group["second_moment"] == "gradient" else c
            v = beta2 * old["exp_avg_sq"] + (1 - beta2) * squared**2
            expected["exp_avg_sq"] = v
            peak = v
            if options.get("amsgrad"):
                peak = torch.maximum(v, state["max_exp_avg_sq"].double() if state else zeros)
            direction = m / (1 - beta1**step) / ((peak / (1 - beta2**step)).sqrt() + group["eps"])
        elif rule == "mars-lion":
            direction = m.sign()
        else:
            matrix = m.flatten(1)
            direction = 0.2 * max(matrix.shape) ** 0.5 * newton_schulz(matrix, 1e-7).view_as(m)
        decays = direction * x >= 0 if "weight_decay_mode" in options else torch.ones_like(x)
        wanted = x * (1 - 0.01 * group["weight_decay"] * decays) - 0.01 * direction
        torch.testing.assert_close(param.double(), wanted, rtol=1e-4, atol=2e-5)
        for key in KEYS:
            if key in new:
                check_stored(new, key, expected[key])


def check_stored(state: dict[str, Any], key: str, expected: Tensor) -> None:
    """Compare with what a state should hold, to which a code is next."""
    assert state[key].dtype == CODES[key] and state[key].shape == expected.shape
    found, scales = decoded(state, key), state[f"{key}_scale"].double()
    if key == "exp_avg_sq":
        found, expected, scales = found.sqrt(), expected.sqrt(), scales.sqrt()
    torch.testing.assert_close(scales.max(), expected.abs().max(), rtol=1e-5, atol=0)
    assert ((found - expected).abs() <= expected.abs() / 15 + scales.max() / 3900).all()


# --- forms and sizes --------------------------------------------------------------------------------------------------


def small_gpt2(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 512}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).to(dtype).eval()  # no dropout


def train(model: nn.Module, mars: Mars, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        mars.step()
        mars.zero_grad()


def bytes_of(mars: Mars, role: str) -> float:
    """Return the bytes of state a parameter of a role, without step counts."""
    params = [param for group in mars.param_groups if group["role"] == role for param in group["params"]]
    numel = sum(param.numel() for param in params)
    tensors = [value for param in params for key, value in mars.state[param].items() if key != "step"]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / numel


@pytest.mark.parametrize(
    ("settings", "matrix", "adamw"),
    [
        ({}, 3.1875, None),
        ({"mars_type": "mars-lion"}, 2.125, None),
        ({"mars_type": "muon"}, 1.0625, 2.125),
        ({"mars_type": "mars-m", "clip_threshold": None}, 1.0625, 2.125),
        ({"mars_type": "mars-m"}, 2.125, 2.125),
    ],
    ids=str,
)
def test_bytes_of_states(settings, matrix, adamw):
    model = small_gpt2()
    mars = mars_hf.create(model, lr=1e-3, state_dtype="8bit", **settings)
    train(model, mars)
    assert bytes_of(mars, "matrix") == pytest.approx(matrix)
    if adamw is not None:
        assert bytes_of(mars, "adamw") == pytest.approx(adamw)
    assert bytes_of(mars, "vector") == 8  # float32


def test_small_tensors_and_vectors_keep_float32():
    params = [nn.Parameter(torch.randn(shape)) for shape in ((63, 65), (5000,), (3000, 3), (64, 64))]
    mars = Mars(params, lr=1e-3, state_dtype="8bit")
    for param in params:
        stepped(param, torch.randn_like(param), mars)
    dtypes = [mars.state[param]["exp_avg"].dtype for param in params]
    assert dtypes == [torch.float32, torch.float32, torch.float32, torch.int8]


def test_param_rules_and_float64():
    model = small_gpt2(torch.float64)
    rules = [("*.wte.weight", {"state_dtype": "float32"}), ("*.c_fc.weight", {"state_dtype": "bfloat16"})]
    mars = mars_hf.create(model, lr=1e-3, state_dtype="8bit", param_rules=rules)
    train(model, mars)
    blocks = model.transformer.h[0]
    dtypes = {
        name: mars.state[param]["exp_avg"].dtype
        for name, param in (
            ("wte", model.transformer.wte.weight),
            ("c_fc", blocks.mlp.c_fc.weight),
            ("c_attn", blocks.attn.c_attn.weight),
            ("ln", blocks.ln_1.weight),
        )
    }
    assert dtypes == {"wte": torch.float32, "c_fc": torch.bfloat16, "c_attn": torch.int8, "ln": torch.float32}


def test_compensation_of_24_bits():
    """Updates below half a place of bfloat16 add up, in a byte beside each parameter."""
    param = nn.Parameter(torch.full((64, 128), 2.0, dtype=torch.bfloat16))
    mars = Mars([param], lr=1e-4, mars_type="mars-lion", state_dtype="8bit", rounding="kahan")
    for _ in range(20):
        stepped(param, torch.ones_like(param), mars)
    state = mars.state[param]
    assert state["compensation"].dtype == torch.int8 and param.eq(2.0).all()
    torch.testing.assert_close(
        join_weight(param, state["compensation"]), torch.full((64, 128), 2 - 20e-4), rtol=0, atol=5e-4
    )
    for _ in range(80):
        stepped(param, torch.ones_like(param), mars)
    assert param.lt(2.0).all()


# --- resume and conversion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*RULES, "muon"])
def test_a_resumed_run_goes_on_as_it_was(rule, tmp_path):
    settings = {"lr": 1e-3, "mars_type": rule, "state_dtype": "8bit"}
    model = small_gpt2()
    mars = mars_hf.create(model, **settings)
    train(model, mars)
    torch.save([model.state_dict(), mars.state_dict()], tmp_path / "saved.pt")
    train(model, mars, first=2)
    other = small_gpt2()
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(weights)
    again = mars_hf.create(other, **settings)
    again.load_state_dict(state)
    train(other, again, first=2)
    assert equal(model.state_dict(), other.state_dict()) and equal(mars.state_dict(), again.state_dict())


@pytest.mark.parametrize("rounding", ["nearest", "kahan"])
@pytest.mark.parametrize("to", ["8bit", None])
def test_loaded_states_are_converted(to, rounding, caplog):
    before, after = (None, "8bit") if to else ("8bit", None)
    model = small_gpt2(torch.bfloat16)
    mars = mars_hf.create(model, lr=1e-3, state_dtype=before, rounding=rounding)
    train(model, mars)
    other = copy.deepcopy(model)
    converted = mars_hf.create(other, lr=1e-3, state_dtype=after, rounding=rounding)
    converted.load_state_dict(mars.state_dict())
    assert converted.param_groups[0]["state_dtype"] == to
    with caplog.at_level(logging.WARNING):
        train(other, converted, steps=1, first=2)
    line = f"MARS converts loaded states {'to' if to else 'from'} 8 bits, as state_dtype says."
    assert [message for message in caplog.messages if "loaded states" in message] == [line]
    weight, twin = (each.transformer.h[0].mlp.c_fc.weight for each in (model, other))
    state = converted.state[twin]
    assert state["exp_avg"].dtype == (torch.int8 if to else torch.float32)
    assert ("exp_avg_scale" in state) == (to is not None)
    train(model, mars, steps=1, first=2)
    one, two = decoded(mars.state[weight], "exp_avg"), decoded(state, "exp_avg")
    assert (one - two).norm() < 0.05 * one.norm() > 0


def test_the_name():
    assert parse_optim_args("state_dtype=8bit") == {"state_dtype": "8bit"}
    with pytest.raises(ValueError, match=r"state_dtype='4bit' is not valid; did you mean '8bit'\?; accepted: '8bit', "):
        mars_hf.create(nn.Linear(2, 2), lr=1e-3, state_dtype="4bit")


# --- what else a step does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_same_step(value, fused):
    params = [nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
    for param, state_dtype in zip(params, ("8bit", None), strict=True):
        mars = Mars([param], lr=1e-3, state_dtype=state_dtype, fused=fused, clip_threshold=None)
        stepped(param, torch.ones_like(param), mars)
        gradient = torch.ones_like(param)
        gradient[5, 5] = value
        stepped(param, gradient, mars)
    assert torch.equal(params[0].isfinite(), params[1].isfinite()) and not params[0].isfinite().all()


def test_exact_form():
    """Stale gradients, there during a step only, are in float32; moments are in 8 bits."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
    optimizers = [
        Mars([param], lr=1e-3, is_approx=False, state_dtype=dtype)
        for param, dtype in zip(params, ("8bit", None), strict=True)
    ]
    for step in range(3):
        gradient, stale = torch.randn(2, 64, 128)
        for param, mars in zip(params, optimizers, strict=True):
            if step:
                param.grad = stale.clone()
                mars.update_previous_grad()
                mars.update_last_grad()
                assert mars.state[param]["last_grad"].dtype == torch.float32
            stepped(param, gradient.clone(), mars)
    state = optimizers[0].state[params[0]]
    assert state["exp_avg"].dtype == torch.int8 and "last_grad" not in state
    torch.testing.assert_close(*params, rtol=0, atol=3e-4)


def test_release_and_skipped_steps():
    runs = []
    for releases in (False, True):
        model = small_gpt2()
        model.transformer.wpe.weight.requires_grad_(False)
        mars = mars_hf.create(model, lr=1e-3, state_dtype="8bit", release_gradients=releases)
        train(model, mars, steps=3)
        before = copy.deepcopy(mars.state_dict())
        mars.step()  # without gradients
        assert equal(before, mars.state_dict())
        runs.append((model.state_dict(), mars.state_dict()))
    assert equal(*runs)


@pytest.mark.parametrize("fused", [True, False])
def test_small_second_moments_stay(fused):
    """Beside one that is a million times larger; a step divides by them."""
    param = nn.Parameter(torch.zeros(64, 64))
    mars = Mars([param], lr=1e-3, clip_threshold=None, state_dtype="8bit", fused=fused)
    gradient = torch.full((64, 64), 1e-6)
    gradient[:, 0] = 1.0
    for _ in range(30):
        stepped(param, gradient.clone(), mars)
        assert mars.state[param]["exp_avg_sq"].ne(0).all()


@pytest.mark.parametrize("numel", [4096, 4097, 4500, 8191])
def test_flat_tensors(numel):
    """Kernels and plain PyTorch agree, also where the last block is not full."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(numel)) for _ in range(2)]
    gradients = torch.randn(4, numel)
    optimizers = []
    for param, fused in zip(params, (True, False), strict=True):
        groups = [{"params": [param], "role": "adamw"}]
        optimizers.append(Mars(groups, lr=1e-3, state_dtype="8bit", fused=fused))
        for gradient in gradients:
            stepped(param, gradient.clone(), optimizers[-1])
    torch.testing.assert_close(*params, rtol=0, atol=2e-4)
    one, two = (mars.state[param] for mars, param in zip(optimizers, params, strict=True))
    for key in ("exp_avg", "exp_avg_sq"):
        assert (one[key].int() - two[key].int()).abs().max() <= 1 and (one[key] != two[key]).float().mean() < 0.01
        torch.testing.assert_close(one[SCALES[key]], two[SCALES[key]], rtol=1e-5, atol=0)


def test_units_at_rest():
    """A stack's expert without gradient keeps its weights, as with float32 states."""
    param = nn.Parameter(torch.ones(4, 32, 64))
    mars = Mars([param], lr=1e-2, mars_type="mars-lion", state_dtype="8bit", fused=True)
    stepped(param, torch.ones_like(param), mars)
    before = param.detach().clone()
    gradient = torch.ones_like(param)
    gradient[2] = 0
    stepped(param, gradient, mars)
    moved = (param != before).flatten(1).any(1)
    assert moved.tolist() == [True, True, False, True]


def test_clipping_by_remembered_norms():
    """What is stored may be larger than the gradient: no bound may miss a gradient that must be clipped."""
    for threshold in torch.linspace(0.9, 1.1, 9).tolist():
        torch.manual_seed(0)
        params = [nn.Parameter(torch.zeros(64, 128)) for _ in range(2)]
        gradients = [g / g.norm() for g in torch.randn(6, 64, 128)]
        for param, fused in zip(params, (True, False), strict=True):
            mars = Mars([param], lr=1e-3, gamma=1.0, clip_threshold=20 * threshold, state_dtype="8bit", fused=fused)
            for gradient in gradients:
                stepped(param, gradient.clone(), mars)
        torch.testing.assert_close(*params, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "damage"),
    [
        ("exp_avg_scale", lambda scales: scales[:-1]),
        ("exp_avg_scale", lambda scales: scales.double()),
        ("exp_avg_scale", lambda scales: scales.to("meta")),
        ("exp_avg", lambda codes: codes.to(torch.uint8)),
        ("last_grad", lambda codes: codes[:-1]),
    ],
)
def test_states_that_do_not_fit(key, damage):
    param = nn.Parameter(torch.ones(64, 128))
    mars = Mars([param], lr=1e-3, state_dtype="8bit")
    stepped(param, torch.ones_like(param), mars)
    mars.state[param][key] = damage(mars.state[param][key])
    before = param.detach().clone()
    with pytest.raises(UnfitStateError, match=r"8-bit|8 bits"):
        stepped(param, torch.ones_like(param), mars)
    assert torch.equal(param, before)


# --- codes and scales that are not of one tensor ----------------------------------------------------------------------


def of_8_bits(rule: str = "mars-adamw") -> tuple[nn.Parameter, Mars]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(64, 192))
    mars = Mars([param], lr=1e-3, mars_type=rule, state_dtype="8bit")
    for _ in range(3):
        stepped(param, torch.randn_like(param), mars)
    return param, mars


def cut(state: dict[str, Any], columns: slice) -> dict[str, Any]:
    """Return a state whose tensors of the parameter's shape have some of its columns."""
    return {key: value[:, columns].clone() if key in KEYS else value for key, value in state.items()}


def as_dtype(state: dict[str, Any], dtype: torch.dtype, *, codes: bool) -> dict[str, Any]:
    def is_cast(value: Tensor) -> bool:
        return value.ndim > 0 and (codes or value.is_floating_point())

    return {key: value.to(dtype) if is_cast(value) else value for key, value in state.items()}


def scaled(state: dict[str, Any], key: str, value: float) -> dict[str, Any]:
    scales = state[key].clone()
    scales[3, 1] = value
    return {**state, key: scales}


SURGERY = {
    "columns of blocks": (lambda state: cut(state, slice(64, 192)), r"has exp_avg in 8 bits with scales of"),
    "columns within blocks": (lambda state: cut(state, slice(30, 192)), r"scales of other codes"),
    "every second column": (lambda state: cut(state, slice(0, 192, 2)), r"has exp_avg in 8 bits with scales of"),
    "all in bfloat16": (lambda state: as_dtype(state, torch.bfloat16, codes=True), r"of torch.bfloat16.* as if they"),
    "all in float32": (lambda state: as_dtype(state, torch.float32, codes=True), r"of torch.float32.* as if they"),
    "scales in bfloat16": (lambda state: as_dtype(state, torch.bfloat16, codes=False), r"8 bits with .*scales"),
    "scales in float64": (lambda state: as_dtype(state, torch.float64, codes=False), r"8 bits with .*scales"),
    "no scales": (lambda state: {key: state[key] for key in ("step", *KEYS)}, r"(8 bits with .*scales|as if they)"),
    "rolled codes": (lambda state: {**state, "last_grad": state["last_grad"].roll(7, 1)}, r"last_grad .*other codes"),
    **{
        f"a scale of {value}": (lambda state, value=value: scaled(state, "exp_avg_sq_scale", value), r"not finite")
        for value in (-1.0, math.nan, math.inf)
    },
}


@pytest.mark.parametrize("where", ["loaded", "live"])
@pytest.mark.parametrize("surgery", SURGERY)
def test_surgery_on_codes(surgery, where):
    """Whoever changes codes without their scales is stopped, when it is loaded or in the next step."""
    change, line = SURGERY[surgery]
    param, mars = of_8_bits()
    state = change(mars.state[param])
    smaller = nn.Parameter(param.detach()[:, : state["exp_avg"].shape[1]].clone())
    other = Mars([smaller], lr=1e-3, state_dtype="8bit")
    before = smaller.detach().clone()
    smaller.grad = torch.randn_like(smaller)
    if where == "live" and surgery == "no scales":
        pytest.skip("a state without scales is made anew")
    with pytest.raises(UnfitStateError, match=f"^the (saved )?state of a parameter of shape .*{line}") as error:
        if where == "loaded":
            saved = mars.state_dict()
            other.load_state_dict({**saved, "state": {0: state}})
        else:
            other.state[smaller] = state
            other.step()
    assert "\n" not in str(error.value) and torch.equal(smaller, before)


def test_surgery_on_whole_blocks_is_taken():
    """Rows, and columns by blocks, together with their scales."""
    param, mars = of_8_bits()
    state = cut(mars.state[param], slice(64, 192))
    state |= {key: state[key][:, 1:].clone() for key in SCALES.values()}
    smaller = nn.Parameter(param.detach()[:, 64:].clone())
    other = Mars([smaller], lr=1e-3, state_dtype="8bit")
    other.state[smaller] = state
    expected = decoded(mars.state[param], "exp_avg")[:, 64:]
    assert torch.equal(decoded(state, "exp_avg"), expected)
    stepped(smaller, torch.zeros_like(smaller), other)


def test_a_tensor_cut_below_the_smallest_takes_float32():
    param, mars = of_8_bits()
    state = {key: value if key == "step" else value[:20].clone() for key, value in mars.state[param].items()}
    smaller = nn.Parameter(param.detach()[:20].clone())
    other = Mars([smaller], lr=1e-3, state_dtype="8bit")
    other.state[smaller] = state
    expected = decoded(state, "last_grad")
    smaller.grad = torch.zeros_like(smaller)
    assert expected.any()
    other.step()
    assert other.state[smaller]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_stored_fits(fused):
    """What refuses the codes of others takes all of ours, of any size."""
    param = nn.Parameter(torch.zeros(64, 128))
    mars = Mars([param], lr=1e-3, clip_threshold=None, state_dtype="8bit", fused=fused)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        sizes = 10.0 ** torch.randint(-30, 17, (64, 1), generator=generator)
        stepped(param, torch.randn(64, 128, generator=generator) * sizes, mars)
        state = mars.state[param]
        assert all(Coded(state[key], state[SCALES[key]]).fits() for key in KEYS)
        assert Mars([nn.Parameter(torch.zeros(64, 128))], state_dtype="8bit").load_state_dict(mars.state_dict()) is None


def test_states_are_looked_at_once(monkeypatch):
    """What a step has left is not read again in the next one."""
    looked = []
    monkeypatch.setattr(Coded, "fits", lambda self: looked.append(self) or True)
    param, mars = of_8_bits()
    assert len(looked) == 3
    mars.state[param]["exp_avg"] = mars.state[param]["exp_avg"].clone()
    stepped(param, torch.randn_like(param), mars)
    assert len(looked) == 4


# --- Kahan's compensation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["8bit", None])
def test_converted_compensation(to):
    """Neither the weights nor what they stand for move, also where their sum is next to another bfloat16."""
    torch.manual_seed(0)
    values = torch.randn(64, 1024) * torch.exp(3 * torch.randn(64, 1024))
    weight = values.bfloat16()
    places = torch.arange(-128, 129) / 256  # of the last place: a half one is where sums round to the neighbour
    place = torch.exp2(torch.floor(torch.log2(weight.abs().float())) - 7)
    lost = (places[torch.randint(0, 257, weight.shape)] * place).bfloat16()
    is_power = weight.abs() == place * 128  # of 2: places below it are half as large
    lost = torch.where(is_power, 0, lost)
    param = nn.Parameter(weight.clone())
    form = None if to else "8bit"
    mars = Mars([param], lr=0.0, rounding="kahan", state_dtype=form)
    stepped(param, torch.zeros_like(param), mars)
    state = mars.state[param]
    if to:
        state["compensation"].copy_(lost)
    else:
        state["compensation"].copy_(torch.randint(-128, 128, weight.shape))
    held = held_by(param, state)
    assert (held != weight.float()).float().mean() > 0.9
    converted = Mars([nn.Parameter(weight.clone())], lr=0.0, rounding="kahan", state_dtype=to)
    converted.load_state_dict(mars.state_dict())
    other = converted.param_groups[0]["params"][0]
    stepped(other, torch.zeros_like(param), converted)
    new = converted.state[other]
    assert new["compensation"].dtype == (torch.int8 if to else torch.bfloat16)
    assert torch.equal(other, weight)
    error = (held_by(other, new) - held).abs() / place
    assert error.max() <= (1 / 256 if to else 1 / 512)


def held_by(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Return what a weight and its compensation stand for."""
    lost = state["compensation"]
    return join_weight(param.detach(), lost) if lost.dtype == torch.int8 else param.detach().float() + lost.float()


def test_transposed_weights_do_not_go_to_kernels():
    """Their memory is not in rows, whose blocks have the scales."""
    torch.manual_seed(0)
    start = torch.randn(128, 80)
    params = [nn.Parameter(start.T.clone(memory_format=torch.preserve_format)) for _ in range(2)]
    optimizers = [
        Mars([param], lr=1e-2, state_dtype="8bit", fused=fused)
        for param, fused in zip(params, (True, False), strict=True)
    ]
    assert not params[0].is_contiguous()
    for _ in range(3):
        gradient = torch.randn(80, 128)
        for param, mars in zip(params, optimizers, strict=True):
            stepped(param, gradient.clone(), mars)
    torch.testing.assert_close(*params, rtol=0, atol=1e-5)
    one, two = (mars.state[param] for mars, param in zip(optimizers, params, strict=True))
    torch.testing.assert_close(one["exp_avg_scale"], two["exp_avg_scale"])


def test_scales_of_an_earlier_batch_go_with_its_gradients():
    """Of a parameter that has no gradient in the first exact step, too."""
    params = [nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
    mars = Mars(params, lr=1e-3, state_dtype="8bit")
    for param in params:
        param.grad = torch.ones_like(param)
    mars.step()
    mars.param_groups[0]["is_approx"] = False
    params[1].grad = None
    mars.update_previous_grad()
    mars.update_last_grad()
    assert "last_grad" in mars.state[params[0]]
    assert not {"last_grad", "last_grad_scale"} & mars.state[params[1]].keys()
    mars.step()
    for param in params:
        assert not {"last_grad", "last_grad_scale"} & mars.state[param].keys()
