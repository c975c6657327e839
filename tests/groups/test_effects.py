"""Settings that nobody would read are refused at every door, and decays that would ruin weights are refused or said."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import arguments, gpt2, mars_trainer, trainer
from torch import nn

import mars_hf
from mars_hf.groups.effects import may_read
from mars_hf.groups.settings import DEFAULTS, GROUP_KEYS, MARS_TYPES, SETTINGS, check_values
from mars_hf.groups.summary import one_line_summary

# Of rules that orthogonalize: a value of each that is not its default.
OF_NEWTON_SCHULZ = {
    "ns_steps": 3,
    "ns_coefficients": "polar-express",
    "normalize_rows": 0.9,
    "split_fused": "none",
}


def small() -> nn.Module:
    """Return an embedding, a matrix and three vectors."""
    parts = {"wte": nn.Embedding(8, 4), "a": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    return nn.ModuleDict(parts)


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


def vector() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " | ".join(record.getMessage() for record in caplog.records)


# --- settings that do nothing -----------------------------------------------------------------------------------------


def doors(rule: str, name: str, value: Any, folder: Any) -> dict[str, Any]:
    """Return every way to give a setting to a rule."""
    text = f"{name}={value}"
    optim = rule.replace("-", "_")
    stated = {"mars_type": rule, name: value}
    ways = {
        "create": lambda: mars_hf.create(small(), lr=1e-3, **stated),
        "factory": lambda: mars_hf.factory(arguments(folder), **stated),
        "optim_args": lambda: arguments(folder, optim=optim, optim_args=text),
        "mars_kwargs": lambda: mars_trainer(arguments(folder, optim=optim), gpt2(), mars_kwargs={name: value}),
    }
    if name in GROUP_KEYS:
        rules = [("a.weight", {name: value})]
        ways |= {
            "Mars": lambda: mars_hf.Mars([matrix(), vector()], **stated),
            "plain parameters": lambda: mars_hf.create([matrix()], lr=1e-3, **stated),
            "group": lambda: mars_hf.Mars([{"params": [matrix()], name: value}], mars_type=rule),
            "later group": lambda: mars_hf.Mars([vector()], mars_type=rule).add_param_group(
                {"params": [matrix()], name: value}
            ),
            "param_rules": lambda: mars_hf.create(small(), lr=1e-3, mars_type=rule, param_rules=rules),
            "param_rules of factory": lambda: mars_hf.factory(arguments(folder), mars_type=rule, param_rules=rules),
        }
    return ways


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("name", OF_NEWTON_SCHULZ)
def test_settings_of_newton_schulz_at_every_door(name, rule, tmp_path):
    mars_hf.register()
    value = OF_NEWTON_SCHULZ[name]
    for door, give in doors(rule, name, value, tmp_path).items():
        with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} would be ignored") as refused:
            give()
        line = str(refused.value)
        assert "'mars-shampoo', 'mars-m'" in line and "\n" not in line, door


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion"])
def test_defaults_are_no_statement(rule):
    """Configurations and mars.json state everything."""
    mars_hf.create(small(), **{**DEFAULTS, "mars_type": rule, "split_fused": "auto"})
    mars_hf.Mars([{"params": [matrix()], "ns_steps": 5, "normalize_rows": None, "layout": None}], mars_type=rule)


# By setting and value, which rules read it, for matrices alone and for a model that has vectors and an embedding.
READ = {
    ("amsgrad", True): ({"mars-adamw"}, set(MARS_TYPES)),
    ("second_moment", "gradient"): ({"mars-adamw"}, {"mars-adamw"}),
    ("gamma", 0.3): (set(MARS_TYPES), set(MARS_TYPES)),
    ("clip_threshold", None): (set(MARS_TYPES), set(MARS_TYPES)),
    ("is_approx", False): (set(MARS_TYPES), set(MARS_TYPES)),
    ("optimize_1d", True): (set(MARS_TYPES), set(MARS_TYPES)),  # another model may have vectors
    ("eps", 1e-6): (set(MARS_TYPES), set(MARS_TYPES)),  # stated for all rules
    ("betas", (0.9, 0.999)): (set(MARS_TYPES), set(MARS_TYPES)),
    ("lr_1d", 1e-4): (set(MARS_TYPES), set(MARS_TYPES)),
    ("normalize_rows", 0.9): ({"mars-shampoo", "mars-m"}, {"mars-shampoo", "mars-m"}),
}


@pytest.mark.parametrize("rule", MARS_TYPES)
@pytest.mark.parametrize(("name", "value"), READ)
def test_which_rule_reads_what(name, value, rule, caplog):
    of_matrices, of_model = READ[name, value]
    for make, readers in (
        (lambda **given: mars_hf.Mars([matrix()], **given), of_matrices),
        (lambda **given: mars_hf.create(small(), lr=1e-3, **given), of_model),
    ):
        if rule in readers:
            make(mars_type=rule, **{name: value})
        else:
            with pytest.raises(ValueError, match=f"{name}=.* would be ignored"):
                make(mars_type=rule, **{name: value})
    assert "would be ignored" not in caplog.text


@pytest.mark.parametrize("rule", MARS_TYPES)
def test_a_dtype_of_newton_schulz_for_all_rules(rule, caplog):
    mars_hf.create(small(), lr=1e-3, mars_type=rule, ns_dtype="float32")
    assert ("ns_dtype='float32' would be ignored" in caplog.text) == (rule in ("mars-adamw", "mars-lion"))


@pytest.mark.parametrize("name", ["ns_steps", "second_moment", "amsgrad", "gamma"])
@pytest.mark.parametrize("rule", MARS_TYPES)
def test_settings_that_are_read_change_the_step(name, rule):
    """What the table says, held to weights: where no rule reads a setting, no bit differs, and else some do."""
    value = {"ns_steps": 3, "second_moment": "gradient", "amsgrad": True, "gamma": 0.3}[name]
    after = []
    for given in ({}, {name: value}):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(4, 4))
        group = {"params": [("a", param)], "role": "matrix"}
        mars = mars_hf.Mars([group], lr=0.1, mars_type=rule, fused=False)
        mars.param_groups[0].update(given)  # past the doors
        for size in (3.0, 1.0, 0.01):
            param.grad = torch.randn_like(param) * size
            mars.step()
        after.append(param.detach().clone())
    reads = SETTINGS[name].readers.include(mars.param_groups[0])
    assert torch.equal(*after) != reads


def test_vectors_read_what_their_rule_does(caplog):
    mars_hf.create(small(), lr=1e-3, mars_type="mars-m", optimize_1d=True, second_moment="gradient")
    mars_hf.Mars([matrix(), vector()], mars_type="mars-shampoo", optimize_1d=True, second_moment="gradient")
    with pytest.raises(ValueError, match="amsgrad=True would be ignored"):
        mars_hf.Mars([matrix(), vector()], mars_type="mars-lion", optimize_1d=True, amsgrad=True)
    assert "would be ignored" not in caplog.text


@pytest.mark.parametrize("given", [{"lr_1d": 1e-4}, {"betas_1d": (0.8, 0.9)}, {"weight_decay_1d": 0.1}], ids=str)
def test_rates_of_vectors_under_optimize_1d(given, caplog):
    """They are stated for all rules, so a line says it; under mars-m embeddings read them."""
    mars_hf.create(small(), lr=1e-3, mars_type="mars-m", optimize_1d=True, **given)
    assert not caplog.records
    mars_hf.create(small(), lr=1e-3, optimize_1d=True, **given)
    assert f"{next(iter(given))}=" in said(caplog) and "leaves nothing to AdamW" in said(caplog)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [vector()], "gamma": 0.3}, "gamma=0.3 .*vectors under AdamW, and that corrects no gradient"),
        ({"params": [matrix()], "role": "adamw", "clip_threshold": 0.5}, "clip_threshold=0.5 .* corrects no gradient"),
        ({"params": [matrix()], "optimize_1d": True}, "optimize_1d=True .* is no vector. It is for vectors"),
        ({"params": [matrix()], "mars_type": "mars-lion", "amsgrad": True}, "amsgrad=True .* has no second moment"),
        ({"params": [matrix()], "lr_embeddings": 1e-3}, r"lr_embeddings=0\.001 is an argument of mars_hf\.create"),
        ({"params": [matrix()], "split_fused": "none"}, "split_fused='none' is an argument"),
        ({"params": [matrix()], "param_rules": []}, r"param_rules=\[\] is an argument"),
        ({"params": [matrix()], "adamw_rates": True}, "adamw_rates=True is an argument"),
        ({"params": [matrix()], "release_gradients": True}, "release_gradients=True is an argument"),
        ({"params": [matrix()], "like": "run"}, "like='run' is an argument"),
        ({"params": [matrix()], "foreach": True}, "foreach=True is for torch's own optimizers"),
    ],
    ids=str,
)
def test_settings_of_groups(group, message):
    for make in (mars_hf.Mars, lambda groups: mars_hf.create(groups, lr=1e-3)):
        with pytest.raises(ValueError, match=message):
            make([dict(group)])
    mars = mars_hf.Mars([matrix()])
    with pytest.raises(ValueError, match=message):
        mars.add_param_group({**group, "params": [torch.empty_like(param) for param in group["params"]]})
    assert len(mars.param_groups) == 1


def test_a_value_stated_for_all_groups():
    """Trainers split the groups of their users into matrices and vectors."""
    mars_hf.Mars([{"params": [matrix(), vector()], "gamma": 0.3}])
    mars_hf.Mars([{"params": [matrix()], "gamma": 0.3}, {"params": [vector()], "gamma": 0.3}])
    mars_hf.create(small(), lr=1e-3, param_rules=[("a.*", {"gamma": 0.3})])
    with pytest.raises(ValueError, match=r"param_rules '\*\.bias': gamma=0\.3 would be ignored"):
        mars_hf.create(small(), lr=1e-3, param_rules=[("*.bias", {"gamma": 0.3})])


def test_an_override_of_another_rule(tmp_path):
    rules = [("a.*", {"mars_type": "mars-m"})]
    made = mars_hf.create(small(), lr=1e-3, ns_steps=3, split_fused="none", param_rules=rules)
    assert {group["ns_steps"] for group in made.param_groups} == {3}
    mars_hf.factory(arguments(tmp_path), ns_steps=3, param_rules=rules)


def test_another_rule_than_that_of_like(tmp_path):
    """What only the saved run's rule reads is not taken up; what is stated is refused all the same."""
    from mars_hf.groups import saved_settings

    first = mars_hf.create(small(), lr=1e-3, mars_type="mars-m", ns_steps=3, split_fused="none", gamma=0.1)
    saved_settings.write(tmp_path, "0", first.created_with, [])
    group = mars_hf.create(small(), like=tmp_path, mars_type="mars-lion").param_groups[0]
    assert (group["ns_steps"], group["gamma"]) == (5, 0.1)
    make, _ = mars_hf.factory(arguments(tmp_path), like=tmp_path, mars_type="mars-lion")
    assert make(small()).param_groups[0]["ns_steps"] == 5
    with pytest.raises(ValueError, match="ns_steps=2 would be ignored"):
        mars_hf.create(small(), like=tmp_path, mars_type="mars-lion", ns_steps=2)


@pytest.mark.parametrize("rule", MARS_TYPES)
def test_settings_offered_by_recipes(rule):
    assert may_read(rule, "gamma") and may_read(rule, "amsgrad") and may_read(rule, "lr_1d")
    assert may_read(rule, "ns_dtype") == may_read(rule, "split_fused") == (rule in ("mars-m", "mars-shampoo"))


@pytest.mark.parametrize("name", ["max_grad_norm", "is_approx"])
def test_released_gradients_where_all_are_needed(name):
    value = {"max_grad_norm": 1.0, "is_approx": False}[name]
    with pytest.raises(ValueError, match=f"release_gradients=True and {name}={value} contradict each other"):
        mars_hf.create(small(), lr=1e-3, release_gradients=True, **{name: value})
    if name == "is_approx":
        with pytest.raises(ValueError, match="release_gradients=True and is_approx=False"):
            mars_hf.create(small(), lr=1e-3, release_gradients=True, param_rules=[("a.*", {name: value})])


def test_a_name_that_is_no_dtype():
    for value in ("torch.8bit", "torch.torch.float32"):
        with pytest.raises(ValueError, match=f"state_dtype='{value}' is not valid"):
            check_values({"state_dtype": value})
    param = matrix()
    mars = mars_hf.Mars([param], state_dtype="torch.bfloat16")
    param.grad = torch.ones_like(param)
    mars.step()
    assert mars.state[param]["exp_avg"].dtype == torch.bfloat16


# --- decays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [{"weight_decay": 2.5}, {"weight_decay": 1.0}, {"weight_decay_1d": 1.0}],
    ids=str,
)
def test_decoupled_decay_of_a_whole_weight(given, tmp_path):
    """2.5 took a norm to 3e9 in 50 steps."""
    ((name, value),) = given.items()
    message = rf"{name}={value:g} is not valid with weight_decay_mode='decoupled'"
    mode = {"weight_decay_mode": "decoupled"}
    mars_hf.register()
    ways = [
        lambda: mars_hf.Mars([matrix(), vector()], **mode, **given),
        lambda: mars_hf.create(small(), lr=1e-3, **mode, **given),
        lambda: mars_hf.factory(arguments(tmp_path), **mode, **given),
        lambda: mars_hf.create(small(), lr=1e-3, param_rules=[("a.*", {**mode, **given})]),
    ]
    if name == "weight_decay":
        ways += [
            lambda: mars_hf.Mars([{"params": [matrix()], **given}], **mode),
            lambda: mars_hf.Mars([{"params": [matrix()], **mode}], **given),
            lambda: arguments(tmp_path, optim="mars_m", optim_args="weight_decay_mode=decoupled", **given),
        ]
    for give in ways:
        with pytest.raises(ValueError, match=message):
            give()


def test_edited_decay_of_a_whole_weight():
    param = matrix()
    mars = mars_hf.Mars([param], weight_decay=1.5)
    mars.param_groups[0]["weight_decay_mode"] = "decoupled"
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"weight_decay=1\.5 is not valid"):
        mars.step()
    assert torch.equal(param.detach(), torch.ones(4, 4))


def test_decays_that_only_adamw_has(caplog):
    mars_hf.Mars([matrix()], lr=3e-3, weight_decay=1e-3, weight_decay_mode="decoupled")
    assert not caplog.records
    mars = mars_hf.Mars([matrix()], lr=3e-3, weight_decay=0.1, weight_decay_mode="decoupled")
    # ln 2 / -ln 0.9 = 6.58; 0.1 * 0.003
    assert "halves weights every 6.58 steps" in said(caplog) and "is weight_decay=0.0003 here" in said(caplog)
    caplog.clear()
    mars.add_param_group({"params": [matrix()], "weight_decay": 0.2})
    assert "weight_decay=0.2" in said(caplog)


def test_adamws_decay_becomes_a_decoupled_one(caplog):
    """AdamW's decay times its rate, also where it is 1 or more."""
    given = {"weight_decay_mode": "decoupled", "adamw_rates": True}
    made = mars_hf.create(small(), lr=1e-4, weight_decay=1.0, **given)
    assert made.param_groups[0]["weight_decay"] == pytest.approx(1e-4) and not caplog.records


def test_a_mode_without_a_decay_is_said(caplog):
    mars_hf.create(small(), lr=1e-3, weight_decay_mode="cautious")
    assert "weight_decay_mode='cautious' does nothing: weight_decay is 0 in all groups" in said(caplog)
    caplog.clear()
    mars_hf.create(small(), lr=1e-3, weight_decay_mode="cautious", weight_decay_1d=0.1)
    assert not caplog.records


@pytest.mark.parametrize("mode", ["standard", "cautious", "decoupled"])
def test_first_line_of_a_mode(mode, tmp_path, caplog):
    model = gpt2()
    mars = mars_hf.create(model, lr=1e-3, weight_decay=1e-3, weight_decay_mode=mode)
    line = one_line_summary(mars.param_groups, model)
    assert (f"weight_decay=0.001 {mode}" in line) == (mode != "standard") and len(line) <= 160
    trainer(arguments(tmp_path, max_steps=1), model, optimizers=(mars, None)).train()
    assert line in said(caplog)
