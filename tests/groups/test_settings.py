"""The table of settings: signatures and groups follow it, every door checks its values, `optim_args` reads them."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import mars_hf
from mars_hf import Mars
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.groups import plain_yaml
from mars_hf.groups.settings import (
    DEFAULTS,
    GROUP_KEYS,
    KEYS_1D,
    MODEL_DEFAULTS,
    OVERRIDE_KEYS,
    PAIR_KEYS,
    SETTINGS,
    CreateSettings,
    FactorySettings,
    UnknownHyperparameterError,
    check_values,
    parse_optim_args,
    read,
    text_of_optim_args,
)

OF_TORCH = {"foreach": None, "capturable": False, "differentiable": False}
NAN, INF, LONG = float("nan"), float("inf"), 10**400
NUMBERS = (NAN, INF, LONG, -LONG, "1", b"1", True, None, object(), [1.0], 1j)
# Values that each setting refuses.
WRONG = {
    **dict.fromkeys(("eps", "weight_decay", "gamma"), (*NUMBERS, -1e-8, torch.tensor(0.1))),
    "lr": (*NUMBERS, -1e-8, torch.ones(2), torch.tensor(-1.0), torch.tensor(NAN)),
    **dict.fromkeys(
        ("lr_1d", "lr_embeddings", "weight_decay_1d"), (*(value for value in NUMBERS if value is not None), -1e-8)
    ),
    "normalize_rows": (*(value for value in NUMBERS if value is not None), 1.0, -0.1),
    **dict.fromkeys(("clip_threshold", "max_grad_norm"), (*(v for v in NUMBERS if v is not None), 0, -1.0)),
    **dict.fromkeys(("betas", "betas_1d"), ((1.0, 0.9), (0.9, -0.1), (0.9, NAN), (0.9, LONG), (0.9,), 0.9, "99", None)),
    **dict.fromkeys(
        ("is_approx", "amsgrad", "optimize_1d", "maximize", "adamw_rates", "release_gradients"),
        (None, 0, 1, "yes", np.bool_(True)),
    ),
    "fused": (0, 1, "auto"),
    "mars_type": ("mars-sgd", "mars_m", ["mars-m"], None, 1),
    **dict.fromkeys(("second_moment", "rounding", "weight_decay_mode"), ("raw", ["kahan"], None, torch.ones(2))),
    "ns_steps": (0, -1, 101, LONG, 5.0, True, "5", None),
    "ns_coefficients": (
        "cubic",
        (1.0, 2.0),
        [(1.0, 2.0, NAN)] * 5,
        (LONG, 1.0, 1.0),
        (1e300, 1.0, 1.0),
        [(1.0, 2.0, "3")],
        [],
        None,
        {"a": 1},
    ),
    "ns_dtype": ("float16", torch.int8, 32),
    "state_dtype": ("int8", torch.complex64, 32),
    "layout": (
        {"transpose": True},
        {"transposed": 1},
        {"transposed": None},
        {"batched": 1},
        {"parts": 2},
        {"parts": ()},
        {"parts": (0, 2)},
    ),
    "split_fused": ("all", 3, None, {"a": ["b"]}, {"a": [0]}, {"a": [True]}, {"a": 3}),
    "param_rules": ("a;lr:1", {"a": 1}, [("a",)], [("a", {"lr": -1})], [("a", {"lr": 1}), ("a", {"lr": 2})]),
}
# Another accepted value of each setting, as a string of `optim_args`.
TEXTS = {
    **{"lr": "5e-1", "eps": "1e-6", "weight_decay": "0.25", "gamma": "1", "mars_type": "mars-lion", "amsgrad": "true"},
    **{"is_approx": "False", "clip_threshold": "none", "optimize_1d": "true", "lr_1d": "0.125", "ns_steps": "3"},
    **{
        "weight_decay_1d": "0.25",
        "weight_decay_mode": "cautious",
        "second_moment": "gradient",
        "ns_coefficients": "polar-express",
    },
    **{"ns_dtype": "float32", "max_grad_norm": "0.5", "state_dtype": "bfloat16", "rounding": "kahan"},
    **{"maximize": "true", "normalize_rows": "0.9", "fused": "false", "split_fused": "none", "lr_embeddings": "0.5"},
    **{
        "param_rules": '[{"pattern":"a.*"}]',
        "beta1": "0.5",
        "beta2_1d": ".5",
        "adamw_rates": "true",
        "release_gradients": "true",
    },
}


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


def test_table_of_settings():
    """Signatures and groups follow it, and the examples here are complete."""
    parameters = inspect.signature(Mars).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in ("params", "process_group", *OF_TORCH)}
    assert defaults == dict(DEFAULTS)
    assert list(SETTINGS) == [*DEFAULTS, *MODEL_DEFAULTS, "adamw_rates", "release_gradients"]
    group = Mars(matrix()).param_groups[0]
    assert group.keys() == {"params", "role", *GROUP_KEYS}
    assert not {*KEYS_1D, *MODEL_DEFAULTS} & group.keys()
    assert WRONG.keys() == {*SETTINGS, "layout"}
    assert TEXTS.keys() == SETTINGS.keys() - {"betas", "betas_1d"} | {"beta1", "beta2_1d"}


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["create", "Mars", "group", "rule"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name, door):
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"(?s){name}") as refused:
            if (door == "create" and name in SETTINGS) or name in SETTINGS.keys() - DEFAULTS.keys():
                mars_hf.create(nn.Linear(2, 2), **{name: value})
            elif door == "Mars" and name in DEFAULTS:
                Mars(matrix(), **{name: value})
            elif door == "group":
                Mars([{"params": matrix(), name: value}])
            elif name in OVERRIDE_KEYS and not isinstance(value, str):  # strings of overrides are read
                mars_hf.create(nn.Linear(2, 2), param_rules=[("*", {name: value})], lr=3e-3)
            else:
                check_values({name: value})
        line = str(refused.value)
        assert line.isprintable() and len(line) < 600
        assert "accepted: " in line or "param_rules" in line


@pytest.mark.parametrize("settings", [{"ns_coefficients": [(3.0, -4.0, 2.0)] * 4}, {"ns_steps": 4}], ids=str)
def test_ns_coefficients_schedules(settings):
    settings = {"ns_coefficients": "polar-express", **settings}
    for of_mars, of_group in ((settings, {}), ({}, settings)):
        with pytest.raises(ValueError, match=r"schedule of [45] steps and ns_steps=[54]; give as many triples"):
            Mars([{"params": matrix(), **of_group}], mars_type="mars-m", **of_mars)


def test_long_values():
    with pytest.raises(ValueError) as refused:
        Mars(matrix(), mars_type="a\x1b[31m\n\u2028" + 10_000 * "x")
    line = str(refused.value)
    assert line.startswith(r"mars_type='a\x1b[31m\n\u2028xxx") and line.isprintable() and len(line) < 400


def test_plain_types():
    checked = check_values(
        {"lr": np.float64(0.5), "betas": [np.float32(0.5), 1 / 3], "fused": None, "layout": MatrixLayout()}
    )
    assert [type(value) for value in checked.values()] == [float, tuple, type(None), dict]
    assert [type(beta) for beta in checked["betas"]] == [float, float]
    lr = torch.tensor([0.1])
    assert check_values({"lr": lr})["lr"] is lr
    assert check_values({"somebody's": lr}) == {"somebody's": lr}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("adam_beta1", "betas"),
        ("max_norm", "max_grad_norm"),
        ("epsilon", "eps"),
        ("gama", "gamma"),
        ("lr1d", "lr_1d"),
        ("Mars-Type", "mars_type"),
    ],
)
def test_misspelt_names(name, meant):
    message = f"did you mean '{meant}'.*accepted: lr, betas"
    with pytest.raises(UnknownHyperparameterError, match=message):
        mars_hf.create(matrix(), **{name: 1})
    with pytest.raises(UnknownHyperparameterError, match=message):
        Mars([{"params": matrix(), name: 1}])


@pytest.mark.parametrize("make", [Mars, mars_hf.create])
def test_keywords_of_torch(make):
    assert make(matrix(), lr=3e-3, **OF_TORCH).defaults == make(matrix(), lr=3e-3).defaults
    for name, default in OF_TORCH.items():
        with pytest.raises(
            ValueError, match=f"{name}=True is for torch's own optimizers; leave it out, or give {default}"
        ):
            make(matrix(), lr=3e-3, **{name: True})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mars_hf.create(matrix(), 6e-4, lr=3e-3),
            r"create takes settings by name: write lr=0\.0006 for a learning rate",
        ),
        (
            lambda: mars_hf.create("gpt2", lr=3e-3),
            "create takes a model, or its parameters, not str 'gpt2'; from_pretrained",
        ),
        (lambda: mars_hf.create(None, lr=3e-3), "not NoneType None"),
        (lambda: mars_hf.create({"a": 1}, lr=3e-3), "not dict"),
        (
            lambda: mars_hf.create(nn.Linear(2, 2), nn.Linear(2, 2), lr=3e-3),
            r"several as a list: write create\(\[a, b\], \.\.\.\)",
        ),
        (lambda: Mars(nn.Linear(2, 2)), "Mars takes parameters, not the module Linear; give it to mars_hf.create"),
        (
            lambda: mars_hf.create(matrix(), beta1=0.8, lr=3e-3),
            r"unknown 'beta1'; give betas=\(0\.8, 0\.99\); accepted",
        ),
        (lambda: mars_hf.create(matrix(), beta2_1d=0.5, lr=3e-3), r"unknown 'beta2_1d'; give betas_1d=\(0\.9, 0\.5\)"),
        (
            lambda: mars_hf.create(matrix(), mars_type="Muon", lr=3e-3),
            "mars_type='Muon' is not valid; did you mean 'muon'",
        ),
    ],
)
def test_what_is_no_model_and_no_setting(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(("text", "number"), [("1e-3", "0.001"), (" 2 ", "2.0")])
def test_numbers_that_are_text(text, number):
    with pytest.raises(ValueError, match=rf"lr='{text}' is not valid; it is text: write {number} \(YAML reads 1e-3"):
        mars_hf.create(matrix(), lr=text)
    with pytest.raises(ValueError, match=r"gamma='much' is not valid; accepted: a finite number >= 0"):
        mars_hf.create(matrix(), gamma="much", lr=3e-3)


# --- optim_args -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_optim_args(name):
    value = parse_optim_args(f"{name}={TEXTS[name]}")[name]
    default = DEFAULTS[PAIR_KEYS[name][0]] if name in PAIR_KEYS else SETTINGS[name].default
    assert check_values({name: value})[name] not in (default, TEXTS[name] if TEXTS[name][0].isdigit() else default)


def test_several_optim_args():
    text = "gamma=5e-2, clip_threshold=None,mars_type=mars-m,like=me/model-2,fused=TRUE"
    expected = {"gamma": 0.05, "clip_threshold": None, "mars_type": "mars-m", "like": "me/model-2", "fused": True}
    assert parse_optim_args(text) == expected
    assert parse_optim_args(None) == parse_optim_args("") == {}


def test_optim_args_keep_the_spaces_of_paths(tmp_path):
    folder = tmp_path / "rules of mine"
    folder.mkdir()
    (folder / "a b.yaml").write_text("- {pattern: '* x', lr: 0.5}", encoding="utf-8")
    text = f" like = my runs/a model , gamma = 5e-2,param_rules={folder}/a b.yaml"
    rule = ("* x", {"lr": 0.5})
    assert parse_optim_args(text) == {"like": "my runs/a model", "gamma": 0.05, "param_rules": [rule]}


def test_optim_args_of_a_mapping():
    """As YAML has it, where 5e-2 is text."""
    given = {"gamma": "5e-2", "clip_threshold": None, "betas": [0.9, 0.95], "amsgrad": True, "like": "a b"}
    expected = {"gamma": 0.05, "clip_threshold": None, "amsgrad": True, "like": "a b", "beta1": 0.9, "beta2": 0.95}
    assert parse_optim_args(text_of_optim_args(given)) == expected
    with pytest.raises(
        ValueError, match=r"optim_args: param_rules=\[\] is no number, word or path; give it in mars_kwargs"
    ):
        text_of_optim_args({"param_rules": []})
    with pytest.raises(ValueError, match=r"betas=0\.9 is not valid; accepted: two numbers"):
        text_of_optim_args({"betas": 0.9})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma", "'gamma' is not name=value"),
        ("gamma=0.1=2", "'gamma=0.1=2' is not name=value"),
        ("gamma=", "'gamma=' is not name=value"),
        ("gamma=0.1,", "'' is not name=value"),
        ("gamma=0.1,gamma=0.2", "'gamma=0.2' is given twice"),
        ("gama=1", "unknown 'gama'; did you mean 'gamma'"),
        ("betas=0.9", r"'betas=0\.9' is half of a pair, for commas end values here; write beta1=0\.9,beta2=0\.95"),
        ("betas=(0.9,0.95)", r"'betas=\(0\.9' is half of a pair"),
        ("layout=none", "unknown 'layout'"),
        ("param_rules=a;lr:1", "param_rules='a;lr:1' cannot be read"),
        ("param_rules=[{}]", r"param_rules\[0\]=\{\} is not an override"),
        ("gamma=much", "gamma='much' is not valid; accepted: a finite number >= 0"),
        ("gamma=" + 6000 * "9", "gamma='999.*accepted"),
        ("gamma=1e999", "gamma=inf is not valid"),
        ("gamma=" + 3000 * "(", "accepted"),
        ("amsgrad=maybe", "accepted: True, False"),
        ("ns_steps=2.5", "an integer from 1 to 100"),
        ("mars_type=mars_m", "did you mean 'mars-m'"),
        ("rounding=Nearest", "did you mean 'nearest'"),
        ("ns_coefficients=quintik", "did you mean 'quintic'"),
    ],
)
def test_wrong_optim_args(text, message):
    with pytest.raises(ValueError, match=message):
        check_values(parse_optim_args(text))


def test_types_for_editors_name_every_setting():
    assert list(CreateSettings.__annotations__) == list(SETTINGS)
    assert {*FactorySettings.__annotations__} == {*SETTINGS, *PAIR_KEYS, "like"}


def test_create_requires_a_rate():
    model, rate = nn.Linear(2, 2), {"lr": 1e-3}
    for params in (model, model.parameters(), [{"params": model.weight, **rate}, {"params": model.bias}]):
        with pytest.raises(ValueError, match="create needs a learning rate, which depends on the rule and its betas"):
            mars_hf.create(params)
    with pytest.raises(ValueError, match="give lr, or AdamW's as lr=2e-5, adamw_rates=True"):
        mars_hf.create(model, lr_1d=1e-3, lr_embeddings=1e-3, param_rules=[("*", rate)])
    groups = ({"params": param, **rate} for param in model.parameters())
    assert {group["lr"] for group in mars_hf.create(groups).param_groups} == {1e-3, 5e-4}
    assert Mars(model.parameters()).defaults["lr"] == 3e-3  # the official code's


# --- keys that come twice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rules.yaml", "rules.json"])
@pytest.mark.parametrize(
    "content",
    [
        '[{"pattern": "a.*", "lr": 1e-3, "lr": 2e-3}]',
        '[["a.*", {"lr": 1e-3, "lr": 2e-3}]]',
        '[["a.*", {"lr": 1e-3, "lr": 1e-3}]]',
    ],
)
def test_a_key_twice_in_param_rules(content, name, tmp_path):
    """The last one won in silence."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="found lr twice; write it once"):
        parse_optim_args(f"param_rules={tmp_path / name}")
    with pytest.raises(ValueError, match="found lr twice; write it once"):
        read("param_rules", content)


def test_a_key_twice_in_yaml():
    with pytest.raises(ValueError, match=r"found lr twice; write it once.*line 3"):
        plain_yaml.read("a: 1\nlr: 1e-3\nlr: 2e-3\n")
    with pytest.raises(ValueError, match="found b twice"):
        plain_yaml.read("a: {b: 1, c: [{b: 1}], b: 2}")
    assert plain_yaml.read("[{lr: 1}, {lr: 2}]") == [{"lr": 1}, {"lr": 2}]
    assert plain_yaml.read("{<<: {lr: 1, eps: 2}, lr: 3}") == {"lr": 3, "eps": 2}
