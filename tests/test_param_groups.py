"""Roles, learning rates and decay of parameters and models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.trainer_pt_utils import get_parameter_names

import mars_hf
from mars_hf import Mars
from mars_hf.param_groups import embeddings_and_heads, rule_of


def tiny_gpt2(**settings) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, vocab_size=32, **settings))


def roles(optimizer) -> list[str]:
    return [group["role"] for group in optimizer.param_groups]


def names(optimizer, role: str) -> list[str]:
    return [name for group in optimizer.param_groups if group["role"] == role for name in group["param_names"]]


def params(*shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


# --- plain parameters ------------------------------------------------------------------------------------------------


def test_order_of_parameters():
    a, b, c, d, e = params((2,), (2, 2), (), (2, 2, 1), (3, 1))
    optimizer = Mars(iter([a, b, c, d, e]))
    assert roles(optimizer) == ["matrix", "vector"]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(b), id(d), id(e)]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(a), id(c)]


def test_order_of_groups():
    a, b, c, d = params((2,), (2, 2), (2, 2), (3,))
    optimizer = Mars([{"params": [a, b]}, {"params": c}, {"params": [d]}])
    assert roles(optimizer) == ["matrix", "vector", "matrix", "vector"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 1]


def test_settings_of_vectors():
    optimizer = Mars(params((2, 2), (2,)), lr=6e-3, weight_decay=0.1, lr_1d=1e-3, betas_1d=(0.8, 0.9))
    matrix, vector = optimizer.param_groups
    assert (matrix["lr"], matrix["betas"], matrix["weight_decay"]) == (6e-3, (0.95, 0.99), 0.1)
    assert (vector["lr"], vector["betas"], vector["weight_decay"]) == (1e-3, (0.8, 0.9), 0.0)


def test_rates_of_vectors_by_default():
    optimizer = Mars([{"params": params((2, 2), (2,))}, {"params": params((2, 2), (2,)), "lr": 1e-4}], lr=6e-3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([6e-3, 3e-3, 1e-4, 5e-5])


def test_rates_of_vectors():
    groups = [{"params": params((2, 2), (2,)), "lr": 1e-3}, {"params": params((2, 2), (2,)), "lr_1d": 7e-4}]
    optimizer = Mars(groups, lr=4e-3, lr_1d=1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 2.5e-4, 4e-3, 7e-4])


def test_optimize_1d():
    _, vector = Mars(params((2, 2), (2,)), lr=6e-3, lr_1d=1e-3, weight_decay=0.1, optimize_1d=True).param_groups
    assert (vector["role"], vector["lr"], vector["betas"], vector["weight_decay"]) == (
        "vector",
        6e-3,
        (0.95, 0.99),
        0.1,
    )


def test_decay_of_groups():
    a, b = params((2,), (2,))
    groups = [{"params": [a], "weight_decay": 0.0}, {"params": [b], "weight_decay": 0.2}]
    optimizer = Mars(groups, weight_decay=0.1, weight_decay_1d=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2]


def test_role_adamw():
    groups = [{"params": params((5, 2)), "role": "adamw"}, {"params": params((2,))}, {"params": params((2, 2))}]
    settings = {"lr_1d": 1e-4, "betas_1d": (0.8, 0.9), "weight_decay_1d": 0.2, "weight_decay": 0.1}
    for optimize_1d in (False, True):
        embedding, vector, _ = Mars(groups, optimize_1d=optimize_1d, **settings).param_groups
        assert (embedding["lr"], embedding["betas"], embedding["weight_decay"]) == (1e-4, (0.8, 0.9), 0.2)
        assert [rule_of(group) for group in (embedding, vector)] == [
            "adamw",
            "mars-adamw" if optimize_1d else "adamw",
        ]


def test_rates_of_mars_m():
    optimizer = Mars(
        [{"params": params((2, 2), (2,))}, {"params": params((2,)), "lr": 1e-4}], lr=6e-3, mars_type="mars-m"
    )
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([6e-3, 6e-3, 1e-4])


def test_partitioned_parameters():
    partitioned = nn.Parameter(torch.empty(0))
    partitioned.ds_shape = torch.Size((4, 8))  # as deepspeed.zero.Init leaves it
    assert roles(Mars([partitioned])) == ["matrix"]


# --- models ----------------------------------------------------------------------------------------------------------


def test_decay_is_that_of_trainer():
    model = tiny_gpt2()
    optimizer = mars_hf.create(model, weight_decay=0.1)
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    trainers = set(get_parameter_names(model, [nn.LayerNorm], patterns)) & {n for n, _ in model.named_parameters()}
    decayed = {n for g in optimizer.param_groups if g["weight_decay"] > 0 for n in g["param_names"]}
    assert decayed == trainers
    assert set(names(optimizer, "matrix")) == {n for n, p in model.named_parameters() if p.ndim == 2}
    assert set(names(optimizer, "vector")) == {n for n, p in model.named_parameters() if p.ndim == 1}


def test_tied_weights():
    model = tiny_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = mars_hf.create(model)
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == len(list(model.parameters()))
    assert names(optimizer, "matrix")[0] == "transformer.wte.weight"
    untied = tiny_gpt2(tie_word_embeddings=False)
    assert "lm_head.weight" in names(mars_hf.create(untied), "matrix")


def test_frozen_parameters():
    model = tiny_gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    assert "transformer.wte.weight" not in names(mars_hf.create(model), "matrix")
    with pytest.raises(ValueError, match="no trainable parameter"):
        mars_hf.create(model.requires_grad_(False))


def test_norms_and_biases():
    model = nn.Sequential(nn.LayerNorm((3, 4)), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.Linear(4, 4))
    optimizer = mars_hf.create(model)
    assert set(names(optimizer, "matrix")) == {"2.weight", "3.weight"}

    class BiasTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.bias = nn.Parameter(torch.ones(4, 4))

    assert names(mars_hf.create(BiasTable()), "vector") == ["bias"]


def test_create_from_parameters():
    optimizer = mars_hf.create(params((2, 2), (2,)), lr=1e-2, gamma=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 5e-3]
    with pytest.raises(TypeError, match=r"'gama'.*gamma"):
        mars_hf.create(params((2, 2)), gama=0.1)
    with pytest.raises(ValueError, match="'gama'"):
        mars_hf.create(params((2, 2)), gama=0.1)


class Odd(nn.Module):
    """A projection, and parameters that are not one, with a reason for each."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.grouped = nn.ModuleList([nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 3, groups=4)])
        self.norm = nn.LayerNorm((3, 4))
        self.latents = nn.Parameter(torch.ones(3, 4))
        self.r_w_bias = nn.Parameter(torch.ones(2, 4))
        self.gate = nn.Linear(4, 1)
        self.score = nn.Linear(4, 3)


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


def left_out(optimizer) -> dict[str, str]:
    return {name: why for group in optimizer.param_groups for name, why in group.get("left_out", {}).items()}


@pytest.mark.parametrize("mars_type", ["mars-shampoo", "mars-m"])
def test_reasons(mars_type):
    optimizer = mars_hf.create(Odd(), mars_type=mars_type)
    assert left_out(optimizer) == REASONS
    assert names(optimizer, "matrix") == ["layers.0.weight", "layers.1.weight"]
    for group in optimizer.param_groups:
        assert set(group.get("left_out", {})) <= set(group["param_names"])
        assert group.get("left_out") != {}
    named = mars_hf.create(Odd(), mars_type=mars_type, param_rules=[("layers.1.weight", {"role": "adamw"})])
    assert left_out(named) == {**REASONS, "layers.1.weight": "role 'adamw' in param_rules"}
    vouched = mars_hf.create(Odd(), mars_type=mars_type, split_fused={"latents": (1, 2)})
    assert "latents" in names(vouched, "matrix") and "latents" not in left_out(vouched)
    for mars_type_without in ("mars-adamw", "mars-lion"):
        assert left_out(mars_hf.create(Odd(), mars_type=mars_type_without)) == {}


def test_printed_reasons():
    text = str(mars_hf.create(Odd(), mars_type="mars-m"))
    below = text[text.index("not orthogonalized:") :].splitlines()
    assert below == [
        "not orthogonalized:",
        "  Odd is not known to multiply activations with it: latents",
        "  embedding: table.weight",
        "  depthwise or grouped convolution: grouped.*.weight (2)",
        "  a single row or column: gate.weight",
        "  head: score.weight",
        "  bias or norm: r_w_bias, norm.weight, norm.bias",
    ]
    assert "not orthogonalized" not in str(mars_hf.create(Odd()))
    assert "not orthogonalized" not in str(mars_hf.create(nn.Linear(4, 4), mars_type="mars-m"))


def test_step_of_what_is_left_out():
    model = Odd()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = mars_hf.create(model, mars_type="mars-m", lr=0.1, lr_1d=0.01)
    for name, param in model.named_parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name)))
    optimizer.step()
    for name in REASONS:  # the first step of AdamW is lr in each element
        change = model.get_parameter(name).detach() - before[name]
        torch.testing.assert_close(change.abs(), torch.full_like(change, 0.01), rtol=1e-4, atol=0)


def test_summary():
    text = repr(mars_hf.create(tiny_gpt2(), lr=6e-3, weight_decay=0.1))
    lines = text.splitlines()
    assert lines[0] == "Mars"
    assert lines[2].split() == ["matrix", "mars-adamw", "10", "1,920", "0.006", "(0.95,", "0.99)", "0.1"]
    assert lines[3].split()[:2] == ["vector", "adamw"]


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
def test_lr_embeddings(mars_type):
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
    optimizer = mars_hf.create(model, mars_type=mars_type, lr=1e-3, lr_1d=2e-3, lr_embeddings=0.5)
    names = {id(param): name for name, param in model.named_parameters()}
    rates = {names[id(param)]: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    assert rates == {
        "wte.weight": 0.5,
        "lm_head.weight": 0.5,
        "fc.weight": 1e-3,
        "fc.bias": 2e-3,
        "lm_head.bias": 2e-3,
    }


def test_lr_embeddings_without_embeddings():
    with pytest.raises(ValueError, match=r"lr_embeddings=0\.5: Linear trains no embedding or head"):
        mars_hf.create(nn.Linear(3, 3), lr_embeddings=0.5)
    with pytest.raises(ValueError, match=r"lr_embeddings=0\.5: plain parameters"):
        mars_hf.create(list(nn.Linear(3, 3).parameters()), lr_embeddings=0.5)
    with pytest.raises(ValueError, match="lr_embeddings"):
        mars_hf.create(nn.Embedding(3, 3), lr_embeddings=-1.0)


def head_names(model: nn.Module) -> set[str]:
    tables = embeddings_and_heads(model)
    return {name for name, param in model.named_parameters() if tables.get(param) == "head" and param.ndim > 1}


def part(**children: nn.Module) -> nn.Module:
    return nn.ModuleDict(children)


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
    ],
)  # fmt: skip
def test_heads_by_name(model, heads):
    assert head_names(model) == heads


def test_heads_of_models():
    model = part(body=nn.Linear(4, 4), to_labels=nn.Linear(4, 3))
    model.get_classifier = lambda: model["to_labels"]  # as timm has it
    assert head_names(model) == {"to_labels.weight"}
    model.get_classifier = lambda name: None  # of something else
    assert head_names(model) == set()
    tied = part(body=nn.Linear(4, 3), score=nn.Linear(4, 3))
    tied["body"].weight = tied["score"].weight
    assert head_names(tied) == {"body.weight"}
