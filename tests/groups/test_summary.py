"""What `print(optimizer)` and the first log line of a run say; test_callback.py has who logs it, and when."""

from __future__ import annotations

import pytest
import torch
from helpers import arguments, gpt2
from test_param_groups import Odd
from torch import nn

import mars_hf
from mars_hf.groups import summary


def test_summary_table():
    lines = str(mars_hf.create(gpt2(), lr=6e-3, weight_decay=0.1)).splitlines()
    assert lines[0] == "Mars" and len(lines) == 4
    assert lines[2].split() == ["matrix", "mars-adamw", "10", "2,176", "0.006", "(0.95,", "0.99)", "0.1"]
    assert lines[3].split()[:2] == ["vector", "adamw"]
    header, split, whole = str(mars_hf.create(gpt2(), mars_type="mars-m", lr=6e-3)).splitlines()[1:4]
    assert header.split()[-1] == "split" and split.split()[-2:] == ["in", "3"]
    assert split.split()[:2] == whole.split()[:2] == ["matrix", "mars-m"] and whole.split()[-1] == "0"
    text = str(mars_hf.create(Odd(), mars_type="mars-m", lr=3e-3))
    assert text[text.index("not orthogonalized:") :].splitlines() == [
        "not orthogonalized:",
        "  Odd is not known to multiply activations with it: latents",
        "  embedding: table.weight",
        "  depthwise or grouped convolution: grouped.*.weight (2)",
        "  a single row or column: gate.weight",
        "  head: score.weight",
        "  bias or norm: r_w_bias, norm.weight, norm.bias",
    ]


def test_column_of_states_in_8_bits():
    """Of a LoRA of rank 16 half the matrices, whose rows are too short, stay in float32."""
    layers = [nn.Linear(512, 16, bias=False), nn.Linear(16, 512, bias=False), nn.Linear(64, 64)]
    mars = mars_hf.create(nn.Sequential(*layers), lr=3e-3, state_dtype="8bit")
    header, matrices, vectors = str(mars).splitlines()[1:]
    assert (
        "in 8 bits" in header
        and matrices.rstrip().endswith("2 of 3 (60%)")
        and vectors.rstrip().endswith("0 of 1 (0%)")
    )
    for param in [param for group in mars.param_groups for param in group["params"]]:
        param.grad = torch.ones_like(param)
    mars.step()
    dtypes = [mars.state[layer.weight]["exp_avg"].dtype for layer in layers]
    assert dtypes == [torch.int8, torch.float32, torch.int8]
    assert "in 8 bits" not in str(mars_hf.create(nn.Linear(512, 16), lr=3e-3))


def one_line(model: torch.nn.Module, name: str | None = None, **settings) -> str:
    return summary.one_line_summary(mars_hf.create(model, **{"lr": 3e-3, **settings}).param_groups, model, name)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "mars-adamw (approximate, gamma=0.025, betas=(0.95, 0.99)): "),
        ({"is_approx": False, "gamma": 0.1}, "mars-adamw (exact, gamma=0.1, betas=(0.95, 0.99)): "),
        ({"mars_type": "mars-lion", "betas": (0.9, 0.98)}, "mars-lion (approximate, gamma=0.025, betas=(0.9, 0.98)): "),
    ],
    ids=str,
)
def test_one_line_of_rule_and_form(settings, expected):
    """One tensor is a matrix or a vector, several are matrices or vectors."""
    assert (
        one_line(torch.nn.Linear(2, 2), **settings) == f"{expected}1 matrix (4) at lr=0.003, 1 vector (2) at lr=0.0015"
    )
    two = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert one_line(two, **settings) == f"{expected}2 matrices (8) at lr=0.003, 2 vectors (4) at lr=0.0015"


def test_one_line_of_muon():
    """Groups say mars-m, and `create` was asked for muon."""
    model = torch.nn.Linear(2, 2)
    assert one_line(model, "muon", mars_type="muon").startswith("muon (approximate, gamma=0.05, betas=(0.95, 0.99)): ")
    assert one_line(model, mars_type="muon").startswith("mars-m (")


def test_one_line_says_that_nothing_is_orthogonalized():
    """Under mars-m and the like; a user of an unknown kind of adapter would not notice."""
    model = torch.nn.ModuleList([torch.nn.Embedding(5, 4)])
    starts = {"mars-m": "nothing is orthogonalized, 1 adamw (20) ", "mars-lion": "1 matrix (20) "}
    for mars_type, start in starts.items():
        assert one_line(model, mars_type=mars_type).partition("): ")[2].startswith(start)


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
def test_one_line_says_that_all_takes_adamw(mars_type):
    """Who trains biases or norms alone trains no MARS, at half the rate."""
    norm = torch.nn.LayerNorm(4)
    assert one_line(norm, mars_type=mars_type).endswith("): all takes AdamW, 2 vectors (8) at lr=0.0015")
    assert "AdamW" not in one_line(norm, mars_type=mars_type, optimize_1d=True)


def test_one_line_has_the_rate_before_any_schedule():
    model = torch.nn.Linear(2, 2)
    mars = mars_hf.create(model, lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(mars, lambda step: 0.0)
    assert "at lr=0.01, " in summary.one_line_summary(mars.param_groups, model)


def test_table_says_how_weights_decay():
    model = torch.nn.Linear(2, 2)
    cells = {"standard": "0.1 ", "cautious": "0.1 cautious", "decoupled": "0.1 decoupled"}
    for mode, cell in cells.items():
        mars = mars_hf.create(model, lr=1e-2, weight_decay=0.1, weight_decay_mode=mode)
        assert f"  {cell}" in f"{summary.summary(mars.param_groups).splitlines()[1]} "


def test_one_line_is_short():
    """GPT-3's sizes, and parameters that the model lacks."""
    sizes = {"matrix": 1e12, "adamw": 6e8, "vector": 9999999}
    (group,) = mars_hf.Mars([torch.nn.Parameter(torch.ones(2, 2))], mars_type="mars-shampoo").param_groups
    groups = [
        {**group, "role": role, "lr": 1.2345e-5 * factor}
        | {"params": [torch.nn.Parameter(torch.empty(int(size), 1, device="meta"))] * 100}
        for role, size in sizes.items()
        for factor in (1, 3)
    ]
    line = summary.one_line_summary(groups, torch.nn.Linear(1, 1))
    assert len(line) <= 160 and "200 matrices (200,000,000,000,000) at lr=1.23e-05-3.7e-05" in line


@pytest.mark.parametrize("door", ["groups of the user", "a later group"])
def test_names_left_out_are_counted_once(door, tmp_path):
    """Groups that a model's group is split into name their own parameters alone."""
    model = gpt2()
    tables = [model.transformer.wte.weight, model.transformer.wpe.weight]
    if door == "a later group":
        tables[1].requires_grad_(False)
        mars = mars_hf.create(model, mars_type="mars-m", lr=3e-3)
        tables[1].requires_grad_(True)
        mars.add_param_group({"params": tables[1:]})
    else:
        others = [param for param in model.parameters() if all(param is not table for table in tables)]
        groups = [{"params": params} for params in (tables[:1], tables[1:], others)]
        make, _ = mars_hf.factory(arguments(tmp_path), mars_type="mars-m")
        mars = make(groups, model=model)
    counts = {"transformer.wte.weight": 1, "transformer.wpe.weight": 1}
    assert summary.names_left_out(mars.param_groups) == {"embedding": counts}
