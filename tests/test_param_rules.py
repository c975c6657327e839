"""Settings by patterns of names: which parameters a rule reaches, what it changes, and what it refuses."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers import arguments, gpt2, trainer
from torch import nn

import mars_hf
from mars_hf import Mars, saved_settings
from mars_hf.settings import (
    KEYS_1D,
    RULE_KEYS,
    check,
    read,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(6, 4)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def named(optimizer: Mars) -> list[tuple[str, str, list[str]]]:
    return [(group.get("pattern", ""), group["role"], group["param_names"]) for group in optimizer.param_groups]


def setting(optimizer: Mars, key: str) -> dict:
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


def train(model: nn.Module, optimizer: Mars, steps: int = 3) -> None:
    for step in range(steps):
        for index, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def differences(one: nn.Module, other: nn.Module, atol: float = 0.0) -> list[str]:
    others = dict(other.named_parameters())
    return [name for name, param in one.named_parameters() if (param - others[name]).abs().max() > atol]


# --- which rule a parameter has --------------------------------------------------------------------------------------


def test_first_match_wins():
    rules = [("a.*", {"lr": 1e-2}), ("*.bias", {"lr_1d": 5e-3}), ("*.weight", {"gamma": 0.1})]
    optimizer = mars_hf.create(small(), lr=1e-3, param_rules=rules[:2])
    assert named(optimizer) == [
        ("", "matrix", ["wte.weight", "b.weight"]),
        ("", "vector", ["norm.weight"]),
        ("a.*", "matrix", ["a.weight"]),
        ("a.*", "vector", ["a.bias"]),
        ("*.bias", "vector", ["b.bias", "norm.bias"]),
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 5e-4, 1e-2, 5e-3, 5e-3]
    every = mars_hf.create(small(), lr=1e-3, param_rules=rules)
    assert [pattern for pattern, _, _ in named(every)] == ["a.*", "a.*", "*.bias", "*.weight", "*.weight"]
    assert setting(every, "gamma") == {
        **dict.fromkeys(["wte.weight", "b.weight", "norm.weight"], 0.1),
        **dict.fromkeys(["a.weight", "a.bias", "b.bias", "norm.bias"], 0.025),
    }


def test_forms_of_rules():
    expected = setting(mars_hf.create(small(), param_rules=[("a.*", {"lr": 1e-2})]), "lr")
    for rules in ([["a.*", {"lr": 1e-2}]], [{"pattern": "a.*", "lr": 1e-2}], iter([("a.*", {"lr": 1e-2})])):
        optimizer = mars_hf.create(small(), param_rules=rules)
        assert setting(optimizer, "lr") == expected
        assert optimizer.created_with["param_rules"] == [("a.*", {"lr": 1e-2})]


def test_patterns():
    for pattern in ("A.*", "weight", "wte"):
        with pytest.raises(ValueError, match="matches no parameter"):
            mars_hf.create(small(), param_rules=[(pattern, {"lr": 1.0})])


def tied() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"wte": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["wte"].weight
    return model


@pytest.mark.parametrize(
    ("rules", "lr"),
    [
        ([("wte.*", {"lr": 1e-2})], 1e-2),
        ([("head.*", {"lr": 1e-3})], 1e-3),
        ([("head.*", {"lr": 1e-3}), ("x.*", {})], 1e-3),
    ],
)
def test_tied_parameters(rules, lr):
    model = tied()
    if len(rules) > 1:
        model["x"] = nn.Linear(2, 2)
    assert setting(mars_hf.create(model, param_rules=rules), "lr")["wte.weight"] == lr


# --- what a rule sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULE_KEYS)
def test_every_setting(name):
    others = {
        **{"role": "adamw", "betas": (0.5, 0.6), "betas_1d": (0.5, 0.6), "layout": {"parts": (2, 2)}},
        **{"lr": 0.5, "eps": 1e-6, "weight_decay": 0.25, "gamma": 0.5, "mars_type": "mars-shampoo", "is_approx": False},
        **{"clip_threshold": None, "amsgrad": True, "optimize_1d": True, "lr_1d": 0.125, "weight_decay_1d": 0.25},
        **{"second_moment": "gradient", "ns_steps": 3, "ns_coefficients": "polar-express"},
        **{"ns_dtype": "float32", "state_dtype": "bfloat16"},
        **{"rounding": "kahan", "maximize": True, "fused": False},
    }
    mars_type = "mars-adamw" if name == "role" else "mars-m"
    rule = {name: others[name]} | ({"ns_steps": 5} if name == "ns_coefficients" else {})
    pattern = "*.bias" if name in KEYS_1D else "a.weight"
    optimizer = mars_hf.create(small(), mars_type=mars_type, param_rules=[(pattern, rule)])
    key = name.removesuffix("_1d") if name in KEYS_1D else name
    expected = matrix_layout(parts=(2, 2)) if name == "layout" else others[name]
    for group in optimizer.param_groups:
        assert (group[key] == expected) == ("pattern" in group)


def matrix_layout(**fields) -> dict:
    return {"transposed": False, "parts": None, "batched": False, **fields}


def test_rules_win_over_options():
    settings = {"weight_decay": 0.1, "lr": 1e-3, "lr_embeddings": 0.5}
    rules = [("wte.*", {"lr": 2e-3, "weight_decay": 0.2})]
    optimizer = mars_hf.create(small(), param_rules=rules, **settings)
    assert (setting(optimizer, "lr")["wte.weight"], setting(optimizer, "weight_decay")["wte.weight"]) == (2e-3, 0.2)
    assert setting(optimizer, "weight_decay")["a.weight"] == 0.1
    kept = mars_hf.create(small(), param_rules=[("wte.*", {"gamma": 0.1})], **settings)
    assert (setting(kept, "lr")["wte.weight"], setting(kept, "weight_decay")["wte.weight"]) == (0.5, 0.1)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("role", ["matrix", "vector", "adamw"])
@pytest.mark.parametrize("optimize_1d", [False, True])
def test_lr_embeddings(mars_type, role, optimize_1d):
    settings = {"mars_type": mars_type, "optimize_1d": optimize_1d, "lr_embeddings": 0.5}
    optimizer = mars_hf.create(small(), param_rules=[("wte.*", {"role": role})], **settings)
    assert setting(optimizer, "lr")["wte.weight"] == 0.5
    stated = mars_hf.create(small(), param_rules=[("wte.*", {"role": role, "lr": 0.1, "lr_1d": 0.1})], **settings)
    assert setting(stated, "lr")["wte.weight"] == 0.1


# --- roles -----------------------------------------------------------------------------------------------------------


def test_settings_of_roles():
    settings = {"lr": 1e-3, "lr_1d": 2e-3, "weight_decay": 0.1, "weight_decay_1d": 0.2, "betas_1d": (0.7, 0.8)}
    rules = [("a.weight", {"role": "vector"}), ("b.weight", {"role": "adamw"})]
    optimizer = mars_hf.create(small(), param_rules=rules, **settings)
    for group in optimizer.param_groups:
        if "pattern" in group:
            assert (group["lr"], group["weight_decay"], group["betas"]) == (2e-3, 0.2, (0.7, 0.8))
    assert [entry[1] for entry in named(optimizer)] == ["matrix", "vector", "vector", "adamw"]


def test_roles():
    model = small()
    rules = [("wte.*", {"role": "matrix"}), ("a.weight", {"role": "adamw"}), ("b.weight", {"role": "vector"})]
    optimizer = mars_hf.create(model, mars_type="mars-m", lr=1e-2, param_rules=rules)
    text = str(optimizer)
    assert "role 'adamw' in param_rules: a.weight" in text and "role 'vector' in param_rules: b.weight" in text
    assert [line.split()[-1] for line in text.splitlines()[3:6]] == ["wte.*", "a.weight", "b.weight"]
    before = copy.deepcopy(model)
    train(model, optimizer, steps=1)
    change = before.wte.weight - model.wte.weight
    singular = torch.linalg.svdvals(change.detach()) / (1e-2 * 0.2 * 6**0.5)
    assert 0.6 < singular.min() and singular.max() < 1.3
    torch.testing.assert_close((before.a.weight - model.a.weight).abs(), torch.full((4, 4), 1e-2), rtol=1e-4, atol=0)


def test_mars_type():
    model = gpt2()
    optimizer = mars_hf.create(model, param_rules=[("transformer.h.0.*", {"mars_type": "mars-m"})])
    types = setting(optimizer, "mars_type")
    assert {types[name] for name in types if ".h.0." in name} == {"mars-m"}
    assert {types[name] for name in types if ".h.0." not in name} == {"mars-adamw"}
    layouts = setting(optimizer, "layout")
    assert layouts["transformer.h.0.attn.c_attn.weight"] == matrix_layout(transposed=True, parts=(8, 8, 8))
    assert layouts["transformer.h.1.attn.c_attn.weight"] is None
    assert all("left_out" not in group for group in optimizer.param_groups)
    back = mars_hf.create(
        model, mars_type="mars-m", param_rules=[("transformer.w?e.weight", {"mars_type": "mars-lion"})]
    )
    assert {setting(back, "role")[f"transformer.{name}.weight"] for name in ("wte", "wpe")} == {"matrix"}
    assert all("left_out" not in group for group in back.param_groups)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
def test_role_that_does_not_fit(mars_type):
    with pytest.raises(ValueError, match=r"param_rules 'a\.\*': role='matrix' for 'a.bias' of shape \(4,\)"):
        mars_hf.create(small(), mars_type=mars_type, param_rules=[("a.*", {"role": "matrix"})])


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("*.attn.*", {"lr": 1.0})], r"'\*\.attn\.\*' matches no parameter; .* named like '"),
        ([("b.wieght", {"lr": 1.0})], r"'b\.wieght' matches no parameter; .* named like 'b\.weight', "),
        ([("norm.*", {"lr": 1.0})], r"'norm\.\*' matches frozen parameters only, such as 'norm\.weight'"),
        ([("*.weight", {}), ("a.weight", {})], r"'a\.weight' decides nothing: '\*\.weight' before"),
        ([("a.*", {}), ("b.*", {}), ("[ab].*", {})], r"'\[ab\]\.\*' decides nothing: 'a\.\*', 'b\.\*' before"),
        ([("a.*", {}), ("a.*", {"lr": 1.0})], r"'a\.\*' is there twice"),
        ([("a.*", {"lr": -1.0})], r"param_rules 'a\.\*': lr=-1\.0 is not valid"),
        ([("a.*", {"role": "tensor"})], r"param_rules 'a\.\*': role='tensor' is not valid; accepted: 'matrix'"),
        ([("a.*", {"max_grad_norm": 1.0})], r"param_rules 'a\.\*': unknown 'max_grad_norm'"),
        ([("a.*", {"layout": {"rows": 3}})], "rows"),
        ({"a.*": {"lr": 1.0}}, "is no list of rules"),
        ("a.*", "is no list of rules"),
        (3, "is no list of rules"),
        ([("a.*", 1.0)], r"param_rules\[0\]=\('a\.\*', 1\.0\) is no rule"),
        ([{"lr": 1.0}], r"param_rules\[0\]=\{'lr': 1\.0\} is no rule"),
        ([("", {})], r"param_rules\[0\]: pattern='' is not a shell pattern"),
        ([(None, {})], r"param_rules\[0\]: pattern=None is not a shell pattern"),
    ],
)
def test_wrong_rules(rules, message):
    model = small()
    model.norm.requires_grad_(False)
    with pytest.raises((ValueError, TypeError), match=message):
        mars_hf.create(model, param_rules=rules)


# --- strings and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.*;lr:1", r"param_rules='a\.\*;lr:1' cannot be read .*accepted: a \.json or \.yaml file, or a list in JSON"),
        ("[{}]", r"param_rules\[0\]=\{\} is no rule"),
        ("nowhere.yaml", r"param_rules='nowhere\.yaml' cannot be read .*No such file"),
    ],
)
def test_wrong_optim_args(tmp_path, text, message):
    mars_hf.register()
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, optim="mars_adamw", optim_args=f"param_rules={text}")


YAML = """
- pattern: "a.*"
  lr: 1e-3
  betas: [0.8, 0.9]
- {pattern: "*.bias", role: vector, clip_threshold: none}
"""
IN_FILE = [("a.*", {"lr": 1e-3, "betas": (0.8, 0.9)}), ("*.bias", {"role": "vector", "clip_threshold": None})]


@pytest.mark.parametrize("name", ["rules.yaml", "rules.yml", "rules.json"])
def test_files(tmp_path, name):
    json_text = json.dumps([{"pattern": pattern, **settings} for pattern, settings in IN_FILE])
    (tmp_path / name).write_text(json_text if name.endswith("json") else YAML)
    for text in (str(tmp_path / name), json_text):
        assert check({"param_rules": read("param_rules", text)}) == {"param_rules": IN_FILE}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read"),
        ("a: 1", "is no list of rules"),
        ("", "None is no list of rules"),
        ("- {lr: 1}", r"param_rules\[0\]="),
        ("- {pattern: x, gama: 1}", "unknown 'gama'"),
        ("- {pattern: x, lr: much}", "lr='much' is not valid"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        check({"param_rules": read("param_rules", str(tmp_path / "rules.yaml"))})
    assert "\n" not in str(raised.value)


# --- Trainer ---------------------------------------------------------------------------------------------------------

RULES = [("*.mlp.*", {"lr": 2e-3, "gamma": 0.1}), ("*.bias", {"lr_1d": 1e-4})]


@pytest.mark.parametrize("way", ["factory", "iterator", "name", "groups"])
def test_ways_into_trainer(tmp_path, way):
    mars_hf.register()
    model = gpt2()
    expected = mars_hf.create(model, lr=1e-3, param_rules=RULES)
    if way == "name":
        (tmp_path / "rules.json").write_text(json.dumps(RULES))
        text = f"param_rules={tmp_path / 'rules.json'}"
        run = trainer(arguments(tmp_path, optim="mars_adamw", optim_args=text, learning_rate=1e-3), model)
    elif way == "groups":
        made, settings = mars_hf.factory(arguments(tmp_path, learning_rate=1e-3), param_rules=RULES)
        groups = [{"params": [param]} for param in model.parameters()]
        found = made(groups, model=model, **settings)
        assert {group.get("pattern") for group in found.param_groups} == {None, "*.mlp.*", "*.bias"}
        rates = {id(param): group["lr"] for group in found.param_groups for param in group["params"]}
        assert rates == {id(param): group["lr"] for group in expected.param_groups for param in group["params"]}
        return
    else:
        given = iter(RULES) if way == "iterator" else RULES
        args = arguments(tmp_path, learning_rate=1e-3)
        run = trainer(args, model, optimizer_cls_and_kwargs=mars_hf.factory(args, param_rules=given))
    run.create_optimizer()
    assert named(run.optimizer) == named(expected)
    assert setting(run.optimizer, "lr") == setting(expected, "lr")
    assert run.optimizer.created_with["param_rules"] == RULES


def test_loaded_state():
    with_rules = mars_hf.create(small(), param_rules=[("*", {"gamma": 0.1})])
    without = mars_hf.create(small())
    without.load_state_dict(with_rules.state_dict())
    assert all("pattern" not in group for group in without.param_groups)
    assert {group["gamma"] for group in without.param_groups} == {0.1}


def test_card_and_mars_json(tmp_path):
    model = gpt2()
    made = trainer(arguments(tmp_path), model, optimizers=(mars_hf.create(model, lr=1e-3, param_rules=RULES), None))
    made.train()
    assert "| matrix `*.mlp.*` | mars-adamw | 0.002 |" in (tmp_path / "README.md").read_text()
    saved = json.loads((tmp_path / "mars.json").read_text())
    assert saved["create"]["param_rules"] == [[pattern, settings] for pattern, settings in RULES]
    patterns = [None, None, "*.mlp.*", "*.mlp.*", "*.bias"]
    assert [group.get("pattern") for group in saved["groups"]] == patterns
    like = mars_hf.create(gpt2(), like=tmp_path)
    assert setting(like, "lr") == setting(mars_hf.create(gpt2(), lr=1e-3, param_rules=RULES), "lr")
    assert all("pattern" not in group for group in mars_hf.create(gpt2(), like=tmp_path, param_rules=[]).param_groups)


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ("a.*", "is no list of rules"),
        ([["a.*", {"gama": 1}]], "unknown 'gama'"),
        ([["a.*", {"lr": "fast"}]], "lr='fast' is not valid"),
        ([["a.*"]], "is no rule"),
    ],
)
def test_rules_of_mars_json(tmp_path, rules, line):
    saved_settings.write(tmp_path, "0.1.0", mars_hf.create(small()).created_with, [])
    content = json.loads((tmp_path / "mars.json").read_text())
    content["create"]["param_rules"] = rules
    (tmp_path / "mars.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=line) as raised:
        mars_hf.create(small(), like=tmp_path)
    assert str(raised.value).startswith(f"like='{tmp_path}': its mars.json")
