"""Roles, learning rates, decay and rules by name, of plain parameters and of models."""

from __future__ import annotations

import gc
import itertools
import json

import pytest
import torch
from helpers import arguments, gpt2, trainer
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

import mars_hf
from mars_hf import Mars
from mars_hf.arithmetic.update_rules import update_rule
from mars_hf.groups import saved_settings
from mars_hf.groups.heads import embeddings_and_heads
from mars_hf.groups.param_groups import split_by_model
from mars_hf.groups.settings import KEYS_1D, OVERRIDE_KEYS, check_values, read
from mars_hf.groups.summary import trained_groups

RULES = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"]


def small() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"wte": nn.Embedding(6, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    )


def by_name(optimizer: Mars, key: str) -> dict:
    return {name: group.get(key) for group in optimizer.param_groups for name in group["param_names"]}


def names(optimizer: Mars, role: str) -> list[str]:
    return [name for name, value in by_name(optimizer, "role").items() if value == role]


def params(*shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def layout(**fields) -> dict:
    return {"transposed": False, "parts": None, "batched": False, **fields}


# --- plain parameters -------------------------------------------------------------------------------------------------


def test_order_of_groups():
    a, b, c, d, e = params((2,), (2, 2), (), (2, 2, 1), (3, 1))
    optimizer = Mars([{"params": iter([a, b, c, d])}, {"params": e}, {"params": [a.detach().clone()]}])
    assert [group["role"] for group in optimizer.param_groups] == ["matrix", "vector", "matrix", "vector"]
    members = [[id(param) for param in group["params"]] for group in optimizer.param_groups[:3]]
    assert members == [[id(b), id(d)], [id(a), id(c)], [id(e)]]


BETAS, BETAS_1D, OTHERS = (0.95, 0.99), (0.9, 0.95), (0.7, 0.8)


@pytest.mark.parametrize(
    ("groups", "settings", "expected"),
    [
        ([{}], {"lr_1d": 1e-3, "betas_1d": OTHERS},
         {"lr": [6e-3, 1e-3], "betas": [BETAS, OTHERS], "weight_decay": [0.1, 0.0]}),
        ([{}], {"lr_1d": 1e-3, "optimize_1d": True},
         {"lr": [6e-3, 6e-3], "betas": [BETAS] * 2, "weight_decay": [0.1, 0.1], "rule": ["mars-adamw"] * 2}),
        ([{}, {"lr": 1e-4}], {}, {"lr": [6e-3, 3e-3, 1e-4, 5e-5]}),
        ([{}, {"lr": 1e-4}], {"mars_type": "mars-m"}, {"lr": [6e-3, 6e-3, 1e-4, 1e-4]}),
        ([{"lr": 1e-3}, {"lr_1d": 7e-4}], {"lr": 4e-3, "lr_1d": 1e-3}, {"lr": [1e-3, 2.5e-4, 4e-3, 7e-4]}),
        ([{"lr": 0.0}, {"lr_1d": 0.0}], {}, {"lr": [0.0, 0.0, 6e-3, 0.0]}),
        ([{"lr": 0.0}, {"lr_1d": 0.0}], {"lr_1d": 1e-3}, {"lr": [0.0, 0.0, 6e-3, 0.0]}),
        ([{"weight_decay": 0.0}, {"weight_decay": 0.2}, {"weight_decay_1d": 0.3}], {"weight_decay_1d": 0.4},
         {"weight_decay": [0.0, 0.0, 0.2, 0.2, 0.1, 0.3]}),
        ([{"betas": OTHERS}, {"betas_1d": OTHERS}], {}, {"betas": [OTHERS, OTHERS, BETAS, OTHERS]}),
        ([{"role": "adamw"}, {}], {"lr_1d": 1e-4, "betas_1d": OTHERS, "weight_decay_1d": 0.2},
         {"lr": [1e-4, 6e-3, 1e-4], "betas": [OTHERS, BETAS, OTHERS], "weight_decay": [0.2, 0.1, 0.2],
          "rule": ["adamw", "mars-adamw", "adamw"]}),
        ([{"role": "adamw"}, {"role": "adamw", "weight_decay": 0.3}, {}], {"weight_decay": 0.2},
         {"weight_decay": [0.2, 0.3, 0.2, 0.0]}),
        ([{"role": "adamw"}, {}], {"weight_decay_1d": 0.0}, {"weight_decay": [0.0, 0.1, 0.0]}),
        ([{"role": "adamw"}, {}], {"lr_1d": 1e-4, "optimize_1d": True},
         {"lr": [1e-4, 6e-3, 6e-3], "betas": [BETAS_1D, BETAS, BETAS], "rule": ["adamw", "mars-adamw", "mars-adamw"]}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_roles(groups, settings, expected):
    groups = [{"params": params((2, 2), (2,)), **group} for group in groups]
    made = Mars(groups, **{"lr": 6e-3, "weight_decay": 0.1, **settings}).param_groups
    for key, values in expected.items():
        assert [update_rule(group).name if key == "rule" else group[key] for group in made] == values, key


def test_partitioned_parameters():
    partitioned = nn.Parameter(torch.empty(0))
    partitioned.ds_shape = torch.Size((4, 8))  # as deepspeed.zero.Init leaves it
    assert [group["role"] for group in Mars([partitioned]).param_groups] == ["matrix"]


# --- models -----------------------------------------------------------------------------------------------------------


def test_decay_is_that_of_trainer():
    model = gpt2()
    optimizer = mars_hf.create(model, weight_decay=0.1, lr=3e-3)
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    trainers = set(get_parameter_names(model, [nn.LayerNorm], patterns)) & {n for n, _ in model.named_parameters()}
    assert {name for name, decay in by_name(optimizer, "weight_decay").items() if decay > 0} == trainers
    assert set(names(optimizer, "matrix")) == {n for n, p in model.named_parameters() if p.ndim == 2}
    assert set(names(optimizer, "vector")) == {n for n, p in model.named_parameters() if p.ndim == 1}


def test_tied_weights():
    model = gpt2()
    optimizer = mars_hf.create(model, lr=3e-3)
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert len(ids) == len(set(ids)) == len(list(model.parameters()))
    assert names(optimizer, "matrix")[0] == "transformer.wte.weight"
    for pattern in ("transformer.wte.*", "lm_head.*"):
        tied = mars_hf.create(model, param_rules=[(pattern, {"lr": 1e-2})], lr=3e-3)
        assert [name for name, lr in by_name(tied, "lr").items() if lr == 1e-2] == ["transformer.wte.weight"]
    assert "lm_head.weight" in names(mars_hf.create(gpt2(tie_word_embeddings=False), lr=3e-3), "matrix")


def test_frozen_parameters():
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    assert "transformer.wte.weight" not in names(mars_hf.create(model, lr=3e-3), "matrix")
    with pytest.raises(ValueError, match="no trainable parameter"):
        mars_hf.create(model.requires_grad_(False), lr=3e-3)


def test_norms_and_biases():
    model = nn.Sequential(nn.LayerNorm((3, 4)), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.Linear(4, 4), nn.Module())
    model[-1].bias = nn.Parameter(torch.ones(4, 4))
    assert names(mars_hf.create(model, lr=3e-3), "matrix") == ["2.weight", "3.weight"]


class Odd(nn.ModuleDict):
    """Projections, and parameters that are not one."""

    def __init__(self):
        super().__init__({"table": nn.Embedding(7, 4), "layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        self["grouped"] = nn.ModuleList([nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 3, groups=4)])
        self.update({"norm": nn.LayerNorm((3, 4)), "gate": nn.Linear(4, 1), "score": nn.Linear(4, 3)})
        self.latents, self.r_w_bias = params((3, 4), (2, 4))


REASONS = {
    "table.weight": "embedding",
    "grouped.0.weight": "depthwise or grouped convolution",
    "grouped.1.weight": "depthwise or grouped convolution",
    "norm.weight": "bias or norm",
    "norm.bias": "bias or norm",
    "latents": "Odd is not known to multiply activations with it",
    "r_w_bias": "bias or norm",
    "gate.weight": "a single row or column",
    "score.weight": "head",
}


def test_reasons_of_names_left_out():
    def left_out(**settings) -> dict[str, str]:
        groups = mars_hf.create(Odd(), **{"lr": 3e-3, **settings}).param_groups
        assert all(set(group["left_out"]) <= set(group["param_names"]) for group in groups if "left_out" in group)
        return {name: reason for group in groups for name, reason in group.get("left_out", {}).items()}

    assert left_out(mars_type="mars-m") == left_out(mars_type="mars-shampoo") == REASONS
    assert left_out() == left_out(mars_type="mars-lion") == {}
    excluded = {**REASONS, "layers.1.weight": "role 'adamw' in param_rules"}
    assert left_out(mars_type="mars-m", param_rules=[("layers.1.weight", {"role": "adamw"})]) == excluded
    vouched = {name: reason for name, reason in REASONS.items() if name != "latents"}
    assert left_out(mars_type="mars-m", split_fused={"latents": (1, 2)}) == vouched


# --- embeddings and heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mars_type", RULES)
def test_lr_embeddings(mars_type):
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
    optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-3, lr_1d=2e-3, lr_embeddings=0.5)
    vectors = dict.fromkeys(["fc.bias", "lm_head.bias"], 2e-3)
    assert by_name(optimizer, "lr") == {"wte.weight": 0.5, "lm_head.weight": 0.5, "fc.weight": 1e-3, **vectors}


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("role", ["matrix", "vector", "adamw"])
@pytest.mark.parametrize("optimize_1d", [False, True])
def test_rules_win_over_lr_embeddings(mars_type, role, optimize_1d):
    for stated, lr in (({}, 0.5), ({"lr": 0.1, "lr_1d": 0.1}, 0.1)):
        rules = [("wte.*", {"role": role, **stated})]
        settings = {"mars_type": mars_type, "optimize_1d": optimize_1d, "lr_embeddings": 0.5, "param_rules": rules}
        assert by_name(mars_hf.create(small(), **{"lr": 3e-3, **settings}), "lr")["wte.weight"] == lr


@pytest.mark.parametrize(
    ("model", "message"),
    [(nn.Linear(3, 3), "Linear trains no embedding or head"), (params((3, 3)), "plain parameters")],
)
def test_lr_embeddings_without_embeddings(model, message):
    with pytest.raises(ValueError, match=rf"lr_embeddings=0\.5: {message}"):
        mars_hf.create(model, lr_embeddings=0.5, lr=3e-3)


def classifier(getter) -> nn.Module:
    """Return a model with a getter of its head, as timm has it."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "to_labels": nn.Linear(4, 3)})
    model.get_classifier = getter(model)
    return model


SCORE, part = nn.Linear(4, 3), lambda **children: nn.ModuleDict(children)


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (part(score=nn.Linear(4, 3), body=nn.Linear(4, 4)), {"score.weight"}),
        (part(classifier=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))), {"classifier.2.weight"}),
        (part(fc=nn.Linear(4, 3)), {"fc.weight"}),
        (part(block=part(fc=nn.Linear(4, 3))), set()),
        (part(class_embed=nn.ModuleList([nn.Linear(4, 3)] * 2)), {"class_embed.0.weight"}),
        (part(bbox_predictor=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])),
         {"bbox_predictor.0.weight", "bbox_predictor.1.weight"}),
        (part(head=nn.MultiheadAttention(4, 2)), set()),
        (part(header=nn.Linear(4, 4), overhead=nn.Linear(4, 4), heading_proj=nn.Linear(4, 4)), set()),
        (part(body=nn.Linear(4, 4), head_distill=nn.Linear(4, 3)), {"head_distill.weight"}),
        (part(body=nn.Linear(4, 4), pred_linear=nn.Linear(4, 3)), {"pred_linear.weight"}),
        (part(cls_classifier=nn.Linear(4, 3), body=nn.Linear(4, 4)), {"cls_classifier.weight"}),
        (part(body=SCORE, score=SCORE), {"body.weight"}),
        (classifier(lambda model: lambda: model["to_labels"]), {"to_labels.weight"}),
        (classifier(lambda model: lambda name: None), set()),  # of something else
    ],
)  # fmt: skip
def test_heads_of_models(model, heads):
    tables = embeddings_and_heads(model)
    assert {name for name, p in model.named_parameters() if tables.get(p) == "head" and p.ndim > 1} == heads


class LightningModule(nn.Module):
    """Holds a model, as that of PyTorch Lightning does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        LightningModule,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.ModuleList([model, LightningModule(nn.DataParallel(named_fc()))]),
    ],
)
def test_heads_in_wrappers(wrap):
    """An `fc` ends the model, whatever wraps it; a head by another name is one anywhere."""
    model = wrap(named_fc())
    tables = embeddings_and_heads(model)
    for name, param in model.named_parameters():
        assert (tables.get(param) == "head") == (".fc." in name)


@pytest.mark.parametrize("several", [False, True])
def test_heads_by_their_vocabulary(several):
    """A layer that repeats has no head, though its MLP may be as wide as the vocabulary."""
    model = gpt2(vocab_size=32)  # 4 n_embd
    model.further = nn.Linear(8, 32)
    model.transposed = nn.Linear(32, 8)
    model.other = nn.Linear(8, 31)
    tables = embeddings_and_heads(nn.ModuleList([model]) if several else model)
    heads = {name for name, param in model.named_parameters() if tables.get(param) == "head"}
    assert heads == {"further.weight", "further.bias", "transposed.weight", "transposed.bias"}


@pytest.mark.parametrize("ids", [{"mask_token_id": 32}, {"bad_words_ids": [31, 32]}], ids=str)
def test_numbers_of_tokens_are_no_sizes(ids):
    """A token may have the number that is the size of the vocabulary, and the head is one all the same."""
    model = gpt2(vocab_size=32)
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.further = nn.Linear(8, 32)
    assert embeddings_and_heads(model).get(model.further.weight) == "head"


def test_bags_of_embeddings():
    model = part(bag=nn.EmbeddingBag(8, 4), body=nn.Linear(4, 4))
    assert embeddings_and_heads(model) == {model["bag"].weight: "embedding"}
    assert by_name(mars_hf.create(model, lr=1e-3, lr_embeddings=0.5), "lr")["bag.weight"] == 0.5


# --- several models ---------------------------------------------------------------------------------------------------


def named_fc() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(4, 4), "fc": nn.Linear(4, 3)})


@pytest.mark.parametrize("collect", [list, tuple, nn.ModuleList])
def test_several_models(tmp_path, collect):
    """Each parameter has the settings of its own model's optimizer, also where it is added later, and with like=."""
    settings = {"mars_type": "mars-m", "lr_embeddings": 1e-4}
    models = [gpt2(), small(), named_fc()]
    expected = {}
    for model in models:
        alone = mars_hf.create(model, **{"lr": 3e-3, **settings})
        for group in alone.param_groups:
            kept = {key: value for key, value in group.items() if key not in ("params", "param_names", "left_out")}
            expected |= dict.fromkeys(group["params"], kept)
    models[1].requires_grad_(False)
    together = mars_hf.create(collect(models), **{"lr": 3e-3, **settings})
    gc.collect()  # nobody has kept the collection
    models[1].requires_grad_(True)
    together.add_param_group({"params": models[1].parameters()})
    found = {param: {key: group.get(key) for key in expected[param]} for group in together.param_groups
             for param in group["params"]}  # fmt: skip
    assert found == expected
    saved_settings.write(
        tmp_path, "0", together.created_with, trained_groups(together.param_groups, nn.ModuleList(models))
    )
    again = mars_hf.create(collect(models), like=tmp_path)
    assert {p: group["lr"] for group in again.param_groups for p in group["params"]} == {
        param: kept["lr"] for param, kept in expected.items()
    }


def test_models_among_parameters_are_refused():
    for mixed in ([small(), *params((2, 2))], {"a": small()}):
        with pytest.raises(
            TypeError,
            match=r"create takes a (model, or its parameters|module, or a list of modules)|iterable of Tensors",
        ):
            mars_hf.create(mixed, lr=3e-3)


@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo", "muon"])
@pytest.mark.parametrize("make", [mars_hf.create, Mars])
def test_plain_parameters_have_no_roles(make, rule, caplog):
    """Embeddings and heads are orthogonalized like all else, which is said once, and not where roles are stated."""
    one, other = small(), gpt2()
    if make is Mars and rule == "muon":
        return
    both = [*one.parameters(), *other.parameters()]
    optimizer = make(itertools.chain(one.parameters(), other.parameters()), lr=3e-3, mars_type=rule)
    (message,) = caplog.messages
    count = sum(param.ndim > 1 for param in both)
    assert f"every matrix of plain parameters ({count}), embeddings and heads included, because" in message
    assert message.startswith(optimizer.param_groups[0]["mars_type"]) and "create([a, b])" in message
    caplog.clear()
    make([*one.named_parameters(), *other.named_parameters()], lr=3e-3, mars_type=rule)
    assert "embeddings and heads included, because" in caplog.text
    caplog.clear()
    matrices = [param for param in both if param.ndim > 1]
    added = make([{"params": matrices, "role": "matrix"}, {"params": params((3,))}], lr=3e-3, mars_type=rule)
    make(both, lr=3e-3)
    make(params((3,)), lr=3e-3, mars_type=rule)
    assert not caplog.messages
    added.add_param_group({"params": params((2, 3), (3,))})
    assert "every matrix of plain parameters (1)" in caplog.text


# --- param_rules ------------------------------------------------------------------------------------------------------


def test_first_match_wins():
    rules = [("a.*", {"lr": 1e-2}), ("*.bias", {"lr_1d": 5e-3}), ("*.weight", {"gamma": 0.1})]
    model = small()
    optimizer = mars_hf.create(model, lr=1e-3, param_rules=rules[:2])
    patterns = [None, None, "a.*", "a.*", "*.bias"]
    assert [group.get("pattern") for group in trained_groups(optimizer.param_groups, model)] == patterns
    assert [(group["role"], group["lr"], group["param_names"]) for group in optimizer.param_groups] == [
        ("matrix", 1e-3, ["wte.weight", "b.weight"]),
        ("vector", 5e-4, ["norm.weight"]),
        ("matrix", 1e-2, ["a.weight"]),
        ("vector", 5e-3, ["a.bias"]),
        ("vector", 5e-3, ["b.bias", "norm.bias"]),
    ]
    gammas = by_name(mars_hf.create(small(), param_rules=rules, lr=3e-3), "gamma")
    assert {name for name, gamma in gammas.items() if gamma == 0.1} == {"wte.weight", "b.weight", "norm.weight"}


@pytest.mark.parametrize("name", OVERRIDE_KEYS)
def test_every_setting(name):
    values = {
        **{"role": "adamw", "betas": (0.5, 0.6), "betas_1d": (0.5, 0.6), "layout": layout(parts=(2, 2))},
        **{"lr": 0.5, "eps": 1e-6, "weight_decay": 0.25, "gamma": 0.5, "mars_type": "mars-shampoo", "is_approx": False},
        **{"clip_threshold": None, "amsgrad": True, "optimize_1d": True, "lr_1d": 0.125, "weight_decay_1d": 0.25},
        **{
            "weight_decay_mode": "cautious",
            "second_moment": "gradient",
            "normalize_rows": 0.9,
            "ns_steps": 3,
            "ns_coefficients": "polar-express",
        },
        **{"ns_dtype": "float32", "state_dtype": "bfloat16", "rounding": "kahan", "maximize": True, "fused": False},
    }
    mars_type = "mars-adamw" if name in ("role", "eps", "amsgrad", "second_moment") else "mars-m"
    rule = {name: values[name]} | ({"ns_steps": 5} if name == "ns_coefficients" else {})
    pattern = "*.bias" if name in (*KEYS_1D, "optimize_1d") else "a.weight"
    optimizer = mars_hf.create(small(), mars_type=mars_type, param_rules=[(pattern, rule)], lr=3e-3)
    key = name.removesuffix("_1d") if name in KEYS_1D else name
    assert all((group[key] == values[name]) == ("pattern" in group) for group in optimizer.param_groups)


def test_rules_win_over_arguments():
    settings = {"lr": 1e-3, "lr_1d": 2e-3, "weight_decay": 0.1, "weight_decay_1d": 0.2, "betas_1d": OTHERS}
    rules = [("a.weight", {"role": "vector"}), ("b.weight", {"role": "adamw"}), ("wte.*", {"weight_decay": 0.3})]
    optimizer = mars_hf.create(small(), param_rules=rules, **{"lr": 3e-3, **settings})
    made = [(group["role"], group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    assert made[1:] == [
        ("vector", 2e-3, 0.2, OTHERS),
        ("adamw", 2e-3, 0.2, OTHERS),
        ("matrix", 1e-3, 0.3, BETAS),
    ]


def test_rules_of_stated_roles():
    stated = {"table.weight": "matrix", "*.0.weight": "adamw", "*.1.weight": "vector"}
    rules = [(pattern, {"role": role}) for pattern, role in stated.items()]
    optimizer = mars_hf.create(Odd(), mars_type="mars-m", lr=1e-2, lr_1d=1e-3, param_rules=rules)
    assert [line.split()[-1] for line in str(optimizer).splitlines()[4:7]] == list(stated)
    made = {
        group["pattern"]: (update_rule(group).name, group["lr"])
        for group in optimizer.param_groups
        if "pattern" in group
    }
    assert made == {"table.weight": ("mars-m", 1e-2), "*.0.weight": ("adamw", 1e-3), "*.1.weight": ("adamw", 1e-3)}


def test_update_rule():
    optimizer = mars_hf.create(gpt2(), param_rules=[("transformer.h.0.*", {"mars_type": "mars-m"})], lr=3e-3)
    types, layouts = by_name(optimizer, "mars_type"), by_name(optimizer, "layout")
    assert {name for name in types if types[name] == "mars-m"} == {name for name in types if ".h.0." in name}
    assert layouts["transformer.h.0.attn.c_attn.weight"] == layout(transposed=True, parts=(8, 8, 8))
    assert layouts["transformer.h.1.attn.c_attn.weight"] is None
    rules = [("transformer.w?e.weight", {"mars_type": "mars-lion"})]
    back = mars_hf.create(gpt2(), mars_type="mars-m", param_rules=rules, lr=3e-3)
    assert {by_name(back, "role")[f"transformer.{name}.weight"] for name in ("wte", "wpe")} == {"matrix"}
    assert all("left_out" not in group for made in (optimizer, back) for group in made.param_groups)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("*.attn.*", {"lr": 1.0})], r"'\*\.attn\.\*' decides nothing: .* no remaining trainable .* named like '"),
        ([("b.wieght", {"lr": 1.0})], r"'b\.wieght' decides nothing: .* named like 'b\.weight', "),
        ([("A.*", {"lr": 1.0})], "decides nothing"),
        ([("wte", {"lr": 1.0})], "decides nothing"),
        ([("norm.*", {"lr": 1.0})], r"'norm\.\*' decides nothing"),
        ([("*.weight", {}), ("a.weight", {})], r"'a\.weight' decides nothing: .* patterns leave are .* like 'a\.bias'"),
        ([("a.*", {}), ("b.*", {}), ("[ab].*", {})], r"'\[ab\]\.\*' decides nothing: .* like 'wte\.weight'"),
        ([("a.*", {}), ("a.*", {"lr": 1.0})], r"'a\.\*' is duplicated"),
        ([("a.*", {"role": "matrix"})], r"param_rules 'a\.\*': role='matrix' for 'a.bias' of shape \(4,\)"),
        ([("a.*", {"role": "tensor"})], r"param_rules 'a\.\*': role='tensor' is not valid; accepted: 'matrix'"),
        ([("a.*", {"max_grad_norm": 1.0})], r"param_rules 'a\.\*': unknown 'max_grad_norm'"),
        ([("a.*", {"lr": "much"})], r"^param_rules 'a\.\*': lr='much' is not valid"),
        ({"a.*": {"lr": 1.0}}, "is not a list of overrides"),
        (3, "is not a list of overrides"),
        ([("a.*", 1.0)], r"param_rules\[0\]=\('a\.\*', 1\.0\) is not an override"),
        ([{"lr": 1.0}], r"param_rules\[0\]=\{'lr': 1\.0\} is not an override"),
        ([("", {})], r"param_rules\[0\]: pattern='' is not a shell pattern"),
        ([(None, {})], r"param_rules\[0\]: pattern=None is not a shell pattern"),
    ],
)  # fmt: skip
def test_wrong_rules(rules, message):
    model = small()
    model.norm.requires_grad_(False)
    with pytest.raises((ValueError, TypeError), match=message):
        mars_hf.create(model, param_rules=rules, lr=3e-3)


YAML = """
- pattern: "a.*"
  lr: 1e-3
  betas: [0.8, 0.9]
- {pattern: "*.bias", role: vector, clip_threshold: none}
"""
IN_FILE = [("a.*", {"lr": 1e-3, "betas": (0.8, 0.9)}), ("*.bias", {"role": "vector", "clip_threshold": None})]


def test_param_rules_files(tmp_path):
    text = json.dumps([{"pattern": pattern, **settings} for pattern, settings in IN_FILE])
    contents = {"rules.yaml": YAML, "rules.yml": YAML, "rules.json": text}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    for value in (text, *(str(tmp_path / name) for name in contents)):
        assert check_values({"param_rules": read("param_rules", value)}) == {"param_rules": IN_FILE}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read"),
        ("a: 1", "is not a list of overrides"),
        ("", "None is not a list of overrides"),
        ("- {lr: 1}", r"param_rules\[0\]="),
        ("- {pattern: x, gama: 1}", "unknown 'gama'"),
        ("- {pattern: x, lr: much}", "lr='much' is not valid"),
        (None, r"rules\.yaml' cannot be read .*No such file.*accepted: a \.json or \.yaml file, or a list in JSON"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    if text is not None:
        (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        check_values({"param_rules": read("param_rules", str(tmp_path / "rules.yaml"))})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("way", ["factory", "groups"])
def test_ways_into_trainer(tmp_path, way):
    model, args = gpt2(), arguments(tmp_path, learning_rate=1e-3)
    rules = [("*.mlp.*", {"lr": 2e-3, "gamma": 0.1}), ("*.bias", {"lr_1d": 1e-4})]
    make, settings = mars_hf.factory(args, param_rules=iter(rules))
    if way == "groups":
        optimizer = make([{"params": [param]} for param in model.parameters()], model=model, **settings)
    else:
        optimizer = trainer(args, model, optimizer_cls_and_kwargs=(make, settings)).create_optimizer()
        assert optimizer.created_with["param_rules"] == rules
    made, expected = (
        {
            id(param): (group.get("pattern"), group["lr"], group["gamma"])
            for group in groups
            for param in group["params"]
        }
        for groups in (optimizer.param_groups, mars_hf.create(model, lr=1e-3, param_rules=rules).param_groups)
    )
    assert made == expected


def test_loaded_state():
    rules = [("*", {"gamma": 0.1, "clip_threshold": None})]
    with_rules, without = mars_hf.create(small(), param_rules=rules, lr=3e-3), mars_hf.create(small(), lr=3e-3)
    without.load_state_dict(with_rules.state_dict())
    settings = [(group.get("pattern"), group["gamma"], group["clip_threshold"]) for group in without.param_groups]
    assert set(settings) == {(None, 0.1, None)}


# --- param_rules that do nothing, and rates as they are stated --------------------------------------------------------


def test_an_empty_override():
    """It keeps parameters from later patterns."""
    rules = [("*.bias", {}), ("a.*", {"lr": 1e-2})]
    rates = by_name(mars_hf.create(small(), lr=1e-3, param_rules=rules), "lr")
    assert (rates["a.bias"], rates["a.weight"]) == (5e-4, 1e-2)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-m", "muon"])
def test_stated_rates_under_adamw_rates(mars_type):
    """As they are, for matrices, vectors and embeddings: 2e-5 on wte trained at 1.57e-5 under mars-m."""
    rules = [("wte.*", {"lr": 2e-5}), ("a.*", {"lr": 3e-5}), ("*.bias", {"lr": 4e-5, "lr_1d": 5e-5})]
    made = mars_hf.create(small(), mars_type=mars_type, lr=2e-5, adamw_rates=True, param_rules=rules)
    rates = by_name(made, "lr")
    assert rates["wte.weight"] == 2e-5
    assert rates["a.weight"] == rates["a.bias"] == 3e-5
    assert rates["b.bias"] == rates["norm.bias"] == 5e-5
    assert rates["norm.weight"] == 2e-5  # stated for nobody: AdamW's


def test_stated_lr_1d_under_adamw_rates():
    rates = by_name(mars_hf.create(small(), lr=2e-5, lr_1d=7e-5, adamw_rates=True), "lr")
    assert {rates["a.bias"], rates["norm.weight"]} == {7e-5} and rates["a.weight"] != 2e-5


def test_overrides_of_another_size_under_adamw_rates():
    """A rate derived for mars-adamw is none for mars-lion."""
    given = {"lr": 2e-5, "adamw_rates": True}
    with pytest.raises(ValueError, match=r"param_rules 'a\.\*' have another size .* lr there: AdamW's times 0\.2"):
        mars_hf.create(small(), param_rules=[("a.*", {"mars_type": "mars-lion"})], **given)
    mars_hf.create(small(), param_rules=[("a.*", {"mars_type": "mars-lion", "lr": 5e-6})], **given)
    mars_hf.create(small(), param_rules=[("a.*", {"weight_decay": 0.3, "gamma": 0.026})], **given)


def test_adamw_rates_with_optimize_1d():
    """Vectors take the rule of matrices, and its rate."""
    made = mars_hf.create(small(), lr=2e-5, adamw_rates=True, optimize_1d=True)
    assert len(set(by_name(made, "lr").values())) == 1


# --- groups that cannot be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"lr": 1}], r"parameter group.* has no 'params', only \['lr'\]: give it the tensors"),
        ([{}], r"has no 'params', only \[\]"),
        ([{"params": None}], "params is a NoneType; give a list of tensors"),
        ([{"params": nn.Linear(2, 2)}], r"params is a Linear; give a list of tensors, such as list\(model\.parameters"),
        ([{"params": nn.Linear(2, 2).parameters}], "params is a method; give a list"),
        ([{"params": "weight"}], "params is a str; give a list"),
    ],
    ids=str,
)
def test_groups_without_parameters(groups, message):
    for make in (
        mars_hf.Mars,
        lambda groups: mars_hf.create(groups, lr=1e-3),
        lambda groups: split_by_model(groups, []),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make([dict(group) for group in groups])


def test_parameters_in_a_list_of_torch():
    group = {"params": nn.ParameterList([nn.Parameter(torch.ones(2, 2))])}
    assert len(mars_hf.Mars([group]).param_groups) == 1


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "rules",
    [
        LONG,
        [LONG],
        [(LONG, {"lr": 1.0})],
        [(LONG, 1.0)],
        [(LONG, {"lr": -1.0})],
        [("a.*", {LONG: 1.0})],
        [("a.*", {"mars_type": LONG})],
        [(LONG, {"lr": 1.0}), (LONG, {"lr": 1.0})],
        [{"pattern": [LONG], "lr": 1.0}],
        {LONG: 1.0},
    ],
    ids=range(10),
)
def test_long_overrides(rules):
    with pytest.raises(ValueError, match="param_rules") as refused:
        mars_hf.create(small(), lr=1e-3, param_rules=rules)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)
