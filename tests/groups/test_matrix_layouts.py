"""Layouts of tensors, modules and real models, where each part must do what its name says.

`python tests/groups/test_matrix_layouts.py` writes architectures.json anew: review the difference, row by row.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import mars_hf
from mars_hf.arithmetic import matrix_layouts
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.groups import model_layouts
from mars_hf.groups.model_layouts import LeftOut

SMALL = {"num_hidden_layers": 2, "vocab_size": 50}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "hidden_size": 32, **SMALL}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 50, "n_positions": 16}
MOE = {**GQA, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def of(name: str, config: str, settings: dict) -> nn.Module:
    """Return a tiny model in eval mode."""
    return getattr(transformers, name)(getattr(transformers, config)(**{**settings, **NO_TOKENS})).eval()


def layouts_of(model: nn.Module, split_fused: object = "auto") -> dict[str, MatrixLayout | LeftOut]:
    layouts = model_layouts.of_model(model, split_fused)
    return {name: layouts[param] for name, param in model.named_parameters() if param in layouts}


def split(tensor: torch.Tensor, layout: MatrixLayout) -> list[torch.Tensor]:
    """Return the matrices in a parameter-shaped tensor."""
    shapes = matrix_layouts.matrix_shapes(tensor.shape, layout)
    return [view.reshape(shape) for view, shape in zip(matrix_layouts.views(tensor, layout), shapes, strict=True)]


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dimensions", "batched"), [(2, False), (3, True), (4, False), (5, False)])
def test_default_layouts(dimensions, batched):
    """A convolution is one matrix, (out, all others), and not a batch of slices."""
    assert matrix_layouts.of_shape(range(2, 2 + dimensions)) == MatrixLayout(batched=batched)


@pytest.mark.parametrize("parts", [(0, 4), (-1, 5), (2, 2.0), (), ("2", 2)])
def test_parts_are_sizes(parts):
    with pytest.raises(ValueError, match="parts are sizes > 0"):
        matrix_layouts.to_plain(MatrixLayout(parts=parts))


LAYOUTS = [
    ((6, 4), MatrixLayout(), [(6, 4)]),
    ((4, 6), MatrixLayout(transposed=True), [(6, 4)]),
    ((7, 4), MatrixLayout(parts=(3, 2, 2)), [(3, 4), (2, 4), (2, 4)]),
    ((4, 7), MatrixLayout(transposed=True, parts=(3, 4)), [(3, 4), (4, 4)]),
    ((12, 4), MatrixLayout(parts=(2, 1, 1)), [(6, 4), (3, 4), (3, 4)]),
    ((6, 4, 3, 2), MatrixLayout(), [(6, 24)]),
    ((4, 6, 3), MatrixLayout(transposed=True), [(6, 12)]),
    ((6, 4, 3), MatrixLayout(parts=(3, 3)), [(3, 12), (3, 12)]),
    ((3, 6, 4), MatrixLayout(batched=True), [(3, 6, 4)]),
    ((3, 4, 6), MatrixLayout(batched=True, transposed=True, parts=(1, 1)), [(3, 3, 4), (3, 3, 4)]),
    ((0, 4), MatrixLayout(), [(0, 4)]),
    ((6, 0), MatrixLayout(parts=(3, 3)), [(3, 0), (3, 0)]),
    ((1, 1), MatrixLayout(transposed=True), [(1, 1)]),
]


@pytest.mark.parametrize(("shape", "layout", "shapes"), LAYOUTS, ids=str)
@pytest.mark.parametrize("strides", ["contiguous", "transposed", "strided"])
def test_views_of_layouts(shape, layout, shapes, strides):
    """They write through, and hold every element once."""
    tensor = torch.randn(shape)
    if strides == "transposed":
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif strides == "strided":
        tensor = torch.randn(*shape, 2)[..., 1]
    matrices = split(tensor.clone(), layout)
    assert [tuple(matrix.shape) for matrix in matrices] == shapes == matrix_layouts.matrix_shapes(shape, layout)
    for view, matrix in zip(matrix_layouts.views(tensor, layout), matrices, strict=True):
        view.sub_(matrix.view_as(view))
    assert not tensor.any()


def test_interleaved_parts():
    weight = torch.arange(12.0)[:, None].expand(12, 2)
    query, key = split(weight, MatrixLayout(parts=(2, 1)))
    assert query[:, 0].tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert key[:, 0].tolist() == [2, 5, 8, 11]


def test_plain_values():
    assert matrix_layouts.to_plain(MatrixLayout(batched=True)) == {"transposed": False, "parts": None, "batched": True}
    for layout in (MatrixLayout(batched=True, transposed=True), MatrixLayout(parts=(2, 1)), None):
        plain = matrix_layouts.to_plain(layout)
        assert matrix_layouts.to_plain(plain) == plain and (plain is None or MatrixLayout(**plain) == layout)
    assert matrix_layouts.to_plain({"parts": [2, 1]})["parts"] == (2, 1)


# --- modules ----------------------------------------------------------------------------------------------------------


def test_torch_modules():
    modules = {
        "attention": nn.MultiheadAttention(8, 2),
        "crossed": nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        "grouped": nn.Conv1d(4, 4, 3, groups=2),
        "up": nn.ConvTranspose2d(3, 4, 5),
        "conv1d": Conv1D(4, 3),
        "table": nn.EmbeddingBag(5, 4),
        "normalized": nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 5)),
        "recurrent": nn.LSTM(3, 4),
        "gate": nn.Linear(4, 1),
        "qkv": nn.Linear(8, 24),
        "query_key_value": nn.Linear(8, 24),  # of an unknown module
    }
    expected = {
        "attention.in_proj_weight": MatrixLayout(parts=(8, 8, 8)),
        "crossed.k_proj_weight": MatrixLayout(),
        **dict.fromkeys(["up.weight", "conv1d.weight"], MatrixLayout(transposed=True)),
        "grouped.weight": LeftOut("depthwise or grouped convolution"),
        "table.weight": LeftOut("embedding"),
        "normalized.parametrizations.weight.original1": LeftOut(
            "ParametrizationList is not known to multiply activations with it"
        ),
        "recurrent.weight_ih_l0": LeftOut("LSTM is not known to multiply activations with it"),
        "gate.weight": LeftOut("a single row or column"),
        "qkv.weight": MatrixLayout(parts=(8, 8, 8)),
        "query_key_value.weight": MatrixLayout(),
    }
    assert expected.items() <= layouts_of(nn.ModuleDict(modules)).items()


@pytest.mark.parametrize(
    ("attributes", "parts"),
    [
        ({"head_first": True, "num_heads": 2, "dim_head": 4}, (4, 4, 4)),  # timm's MaxViT and CoAtNet
        ({"head_first": False, "num_heads": 2, "dim_head": 4}, (8, 8, 8)),
        ({"key_dim": 4, "val_dim": 4, "num_heads": 2}, (4, 4, 4)),  # TinyViT
        ({"key_dim": 2, "val_dim": 8, "num_heads": 2}, (2, 2, 8)),  # EfficientFormer
    ],
)
def test_qkv_whose_heads_come_first(attributes, parts):
    """Query, key and value of one head lie before those of the next in some of timm's attentions."""
    for layer in (nn.Linear(8, 24), nn.Conv2d(8, 24, 1)):
        attention = nn.ModuleDict({"qkv": layer})
        for name, value in attributes.items():
            setattr(attention, name, value)
        assert layouts_of(nn.ModuleDict({"attn": attention}))["attn.qkv.weight"] == MatrixLayout(parts=parts)


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")], ids="-".join)
def test_tied_weights_multiply_activations_in_one_place(order):
    """Whichever name comes first: a table that is a projection too is orthogonalized as that."""
    modules = {"first": nn.Linear(6, 5, bias=False), "second": nn.Embedding(5, 6)}
    modules["second"].weight = modules["first"].weight
    model = nn.ModuleDict({name: modules[name] for name in order})
    assert list(layouts_of(model).values()) == [MatrixLayout()]


def test_stated_parts():
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24), "mixed": nn.Linear(8, 24)})
    layouts = layouts_of(model, {"mixed.*": (8, 2, 2)})
    assert layouts["mixed.weight"] == MatrixLayout(parts=(8, 2, 2))
    assert layouts["qkv.weight"] == MatrixLayout()
    with pytest.raises(ValueError, match=r"the parts do not fit its 24 outputs"):
        model_layouts.of_model(model, split_fused={"mixed.*": (8, 8)})
    with pytest.raises(ValueError, match=r"\['wqkv'\] match no parameter .* names are like 'qkv.weight'"):
        model_layouts.of_model(model, split_fused={"wqkv": (8, 8, 8)})


def test_emptied_parameters():
    model = nn.ModuleDict({"c": nn.Linear(8, 24), "embed": nn.Embedding(9, 8)})
    for param in model.parameters():  # as deepspeed.zero.Init leaves them
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    layouts = layouts_of(model, {"c.weight": (8, 16)})
    assert layouts == {"c.weight": MatrixLayout(parts=(8, 16)), "embed.weight": LeftOut("embedding")}


# --- models: each part does what its name says, without the keys no query matters, and so on --------------------------


FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**GQA, "max_position_embeddings": 16}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT2, "n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 50}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**GQA}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GQA, "max_position_embeddings": 16}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**GQA, "head_dim": 8}),
    "deberta": ("DebertaModel", "DebertaConfig", {**GQA, "max_position_embeddings": 16}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GQA, "num_local_experts": 3}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**MOE, "layer_types": ["full_attention"] * 2}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {**MOE, "intermediate_size_mlp": 40}),
}
# Query and key, in the order of the parts; CodeGen has query, value, key.
QUERY_AND_KEY = {"codegen": (0, 2)}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_models(family):
    model = of(*FAMILIES[family])
    fused = {name: layout for name, layout in layouts_of(model).items() if getattr(layout, "parts", None)}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in fused:
                param.normal_(std=0.5)
            elif name.endswith("bias"):
                param.zero_()
    weights = {name: model.get_parameter(name).detach().clone() for name in fused}
    tokens = torch.randint(3, 50, (2, 6))

    @torch.no_grad()
    def output(leaf: str, *, zeroed: int | None = None, changed: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        for name, layout in fused.items():
            param = model.get_parameter(name)
            param.copy_(weights[name])
            parts = matrix_layouts.views(param, layout) if leaf in name.split(".") else []
            if zeroed is not None and parts:
                parts[zeroed].zero_()
            if changed is not None and parts:
                parts[changed].add_(torch.randn(parts[changed].shape, generator=generator))
        return model(tokens)[0]

    def matters(leaf: str, changed: int, without: int | None) -> bool:
        return bool((output(leaf, zeroed=without, changed=changed) != output(leaf, zeroed=without)).any())

    for leaf in {name.removesuffix(".weight").rpartition(".")[2] for name in fused}:
        parts = next(len(layout.parts) for name, layout in fused.items() if leaf in name.split("."))
        assert all(matters(leaf, part, None) for part in range(parts))
        # Without the gate, up does not matter. Without the value nothing does, and query and key need each other.
        query, key = QUERY_AND_KEY.get(family, (0, 1))
        value = 3 - query - key
        needs = {(1, 0): False} if parts == 2 else {(query, key): False, (key, query): False, (query, value): False}
        needs |= {} if parts == 2 else {(key, value): False, (value, key): True, (value, query): True}
        assert {pair: matters(leaf, *pair) for pair in needs} == needs


def test_families_cover_every_known_class():
    seen = {"MultiheadAttention"}
    for name, config, settings in FAMILIES.values():
        seen.update(type(module).__name__ for module in of(name, config, settings).modules())
    assert {owner for _, owner in model_layouts._FUSED} <= seen


# --- roles and layouts of real architectures --------------------------------------------------------------------------

TABLE = Path(__file__).with_name("architectures.json")
ROWS = json.loads(TABLE.read_text())


def from_row(row: dict) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, row["model"])(getattr(transformers, row["config"])(**row["settings"]))


def described(model: nn.Module) -> dict[str, str]:
    """Map names of parameters, numbers as `*`, to the matrices that mars-m orthogonalizes, or to what it does not."""
    parameters: dict[str, str] = {}
    for group in mars_hf.create(model, mars_type="mars-m", lr=3e-3).param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if param.ndim < 2:
                text = group["role"]
            elif group["role"] == "matrix":
                shapes = matrix_layouts.matrix_shapes(param.shape, MatrixLayout(**group["layout"]))
                text = " + ".join("x".join(map(str, shape)) for shape in shapes)
                text += " transposed" if group["layout"]["transposed"] else ""
            else:
                text = f"{group['role']}: {group['left_out'][name]}"
            key = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            known = parameters.get(key, text)
            parameters[key] = known if text in known.split(", ") else f"{known}, {text}"
    return {name: text for name, text in parameters.items() if text != "vector"}


@pytest.mark.parametrize("row", ROWS)
def test_roles_and_layouts(row):
    assert described(from_row(ROWS[row])) == ROWS[row]["parameters"]


# --- routers ----------------------------------------------------------------------------------------------------------


class ToyExperts(nn.Module):
    """A stack of experts, told by the name of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_in = nn.Parameter(torch.zeros(3, 4, 4))


@pytest.mark.parametrize("name", ["gate", "gating", "wg"])
@pytest.mark.parametrize("experts", [("experts", nn.ModuleList()), ("mlp", ToyExperts())], ids=["named", "class"])
def test_gates_beside_experts_are_routers(name, experts):
    """Experts are told by their name or by their class; a gate beside anything else is a matrix."""
    block = nn.ModuleDict({name: nn.Linear(4, 3), experts[0]: experts[1]})
    assert layouts_of(nn.ModuleDict({"block": block}))[f"block.{name}.weight"] == LeftOut("router")
    alone = nn.ModuleDict({name: nn.Linear(4, 3), "other": nn.Linear(4, 4)})
    assert layouts_of(nn.ModuleDict({"block": alone}))[f"block.{name}.weight"] == MatrixLayout()


@pytest.mark.parametrize("name", ["router", "expert_router", "router_proj", "routers"])
def test_modules_named_as_routers(name):
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))})
    assert set(layouts_of(model).values()) == {LeftOut("router")}


if __name__ == "__main__":
    for row in ROWS.values():
        row["parameters"] = described(from_row(row))
    TABLE.write_text(json.dumps(ROWS, indent=1) + "\n")
