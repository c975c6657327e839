"""Layouts: matrices of tensors, modules and real models, where each part must do what its name says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from mars_hf import matrix_layouts
from mars_hf.matrix_layouts import MatrixLayout
from mars_hf.newton_schulz import muon_scale, orthogonalize, shampoo_scale

SMALL = {"num_hidden_layers": 2, "vocab_size": 50}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "hidden_size": 32, **SMALL}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 50, "n_positions": 16}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def of(name: str, config: str, settings: dict) -> nn.Module:
    """Return a tiny model in eval mode."""
    return getattr(transformers, name)(getattr(transformers, config)(**{**settings, **NO_TOKENS})).eval()


def layouts_of(model: nn.Module, split_fused: object = "auto") -> dict[str, MatrixLayout | str]:
    layouts = matrix_layouts.of_model(model, split_fused)
    return {name: layouts[param] for name, param in model.named_parameters() if param in layouts}


def split(tensor: torch.Tensor, layout: MatrixLayout) -> list[torch.Tensor]:
    """Return the matrices in a parameter-shaped tensor."""
    shapes = matrix_layouts.matrix_shapes(tensor.shape, layout)
    return [view.reshape(shape) for view, shape in zip(matrix_layouts.views(tensor, layout), shapes, strict=True)]


def newton_schulz(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    (result,) = orthogonalize([matrix], dtype=dtype)
    return result


def updates(model: nn.Module, gradients: dict, scale: Callable, **options) -> dict:
    """Return the update of the orthogonalizing rules for each parameter, by its layout."""
    changes = {}
    for name, layout in layouts_of(model, **options).items():
        matrices = split(gradients[name], layout)
        results = orthogonalize(matrices, dtype=gradients[name].dtype)
        changes[name] = join([result * scale(*result.shape[-2:]) for result in results], layout, like=gradients[name])
    return changes


def join(matrices: list, layout: MatrixLayout, like: torch.Tensor) -> torch.Tensor:
    """Return the parameter-shaped tensor with these matrices."""
    joined = torch.empty_like(like, dtype=matrices[0].dtype)
    for view, matrix in zip(matrix_layouts.views(joined, layout), matrices, strict=True):
        view.copy_(matrix.reshape(view.shape))
    return joined


# Tensors


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
def test_split_and_join(shape, layout, shapes, strides):
    tensor = torch.randn(shape)
    if strides == "transposed":
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif strides == "strided":
        tensor = torch.randn(*shape, 2)[..., 1]
    before = tensor.clone()
    matrices = split(tensor, layout)
    assert [tuple(m.shape) for m in matrices] == shapes == matrix_layouts.matrix_shapes(shape, layout)
    joined = join([m.clone() for m in matrices], layout, like=tensor)
    torch.testing.assert_close(joined, before, rtol=0, atol=0)
    assert joined.data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize(("shape", "layout", "shapes"), LAYOUTS, ids=str)
def test_views_write_through(shape, layout, shapes):
    tensor = torch.randn(shape)
    matrices = split(tensor.clone(), layout)
    for view, matrix in zip(matrix_layouts.views(tensor, layout), matrices, strict=True):
        view.sub_(matrix.view_as(view))
    assert not tensor.any()


def test_split_of_one_projection_is_a_view():
    weight = torch.randn(24, 72)
    for matrix in split(weight, MatrixLayout(transposed=True, parts=(24, 24, 24))):
        assert matrix._base is weight


def test_join_keeps_strides_and_takes_the_matrices_dtype():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    joined = join([m.bfloat16() for m in split(weight, MatrixLayout())], MatrixLayout(), like=weight)
    assert joined.stride() == weight.stride()
    assert joined.dtype == torch.bfloat16


def test_interleaved_parts_are_taken_head_by_head():
    weight = torch.arange(12.0)[:, None].expand(12, 2)
    query, key = split(weight, MatrixLayout(parts=(2, 1)))
    assert query[:, 0].tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert key[:, 0].tolist() == [2, 5, 8, 11]


def test_layouts_as_plain_values():
    assert matrix_layouts.to_plain(MatrixLayout(batched=True)) == {"transposed": False, "parts": None, "batched": True}
    for layout in (MatrixLayout(batched=True, transposed=True), MatrixLayout(parts=(2, 1)), MatrixLayout(), None):
        plain = matrix_layouts.to_plain(layout)
        assert matrix_layouts.to_plain(plain) == plain and (plain is None or MatrixLayout(**plain) == layout)
    assert matrix_layouts.to_plain({"parts": [2, 1]})["parts"] == (2, 1)
    for wrong in (
        {"parts": (2, 0)},
        {"parts": ()},
        {"parts": 2},
        {"batched": 1},
        {"transposed": None},
        {"turned": True},
    ):
        with pytest.raises((TypeError, ValueError)):
            matrix_layouts.to_plain(wrong)


# Updates through layouts


def to_linear(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, Conv1D):
            linear = nn.Linear(child.nx, child.nf)
            linear.weight = nn.Parameter(child.weight.detach().T.clone())
            setattr(module, name, linear)
        else:
            to_linear(child)


@pytest.mark.parametrize("scale", [shampoo_scale, muon_scale])
@pytest.mark.parametrize("split_fused", ["auto", "none"])
def test_conv1d_and_linear_get_the_same_update(scale, split_fused):
    block = of("GPT2LMHeadModel", "GPT2Config", GPT2).transformer.h[0]
    # In float64: the two sum in different orders.
    gradients = {name: torch.randn_like(p, dtype=torch.float64) for name, p in block.named_parameters()}
    as_conv1d = updates(block, gradients, scale, split_fused=split_fused)
    to_linear(block)
    transposed = {name: g.T.contiguous() if g.ndim == 2 else g for name, g in gradients.items()}
    as_linear = updates(block, transposed, scale, split_fused=split_fused)
    assert len(as_conv1d) == 4
    for name, update in as_conv1d.items():
        assert update.norm() > 0.1
        torch.testing.assert_close(as_linear[name].T, update, rtol=0, atol=1e-12)
    # The scale follows the output dimension, not the storage: (24, 96) stored is 96 outputs.
    if scale is shampoo_scale and split_fused == "none":
        plain = newton_schulz(gradients["mlp.c_fc.weight"], dtype=torch.float64)
        torch.testing.assert_close(as_conv1d["mlp.c_fc.weight"], 2 * plain, rtol=0, atol=1e-12)


def test_fused_is_its_parts_apart():
    attention = of("GPT2LMHeadModel", "GPT2Config", GPT2).transformer.h[0].attn
    gradient = torch.randn(24, 72)
    gradients = {"c_attn.weight": gradient, "c_proj.weight": torch.randn(24, 24)}
    fused = updates(attention, gradients, shampoo_scale)["c_attn.weight"]
    apart = [newton_schulz(part.T, dtype=torch.float32).T for part in gradient.split(24, dim=1)]
    torch.testing.assert_close(fused, torch.cat(apart, dim=1), rtol=0, atol=1e-5)
    whole = updates(attention, gradients, shampoo_scale, split_fused="none")["c_attn.weight"]
    assert (whole - fused).abs().max() > 0.1


def test_convolution_is_its_flattened_matrix():
    model = nn.Sequential(nn.Conv2d(3, 8, (2, 3)), nn.ConvTranspose1d(3, 8, 5), nn.Conv2d(3, 8, 3))
    model[2].to(memory_format=torch.channels_last)
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    changes = updates(model, gradients, shampoo_scale)
    for index, to_rows in enumerate([lambda g: g, lambda g: g.transpose(0, 1), lambda g: g]):
        name = f"{index}.weight"
        rows = to_rows(gradients[name]).flatten(1)
        assert rows.shape[0] == 8
        expected = newton_schulz(rows, dtype=torch.float32) * shampoo_scale(*rows.shape)
        torch.testing.assert_close(to_rows(changes[name]).flatten(1), expected, rtol=0, atol=1e-5)


def test_experts_are_matrices_of_their_own():
    experts = type("TinyExperts", (nn.Module,), {})()
    experts.down_proj = nn.Parameter(torch.randn(4, 16, 6))
    gradient = torch.randn(4, 16, 6)
    changes = updates(experts, {"down_proj": gradient}, shampoo_scale)["down_proj"]
    for expert in range(4):
        alone = newton_schulz(gradient[expert], dtype=torch.float32) * (16 / 6) ** 0.5
        torch.testing.assert_close(changes[expert], alone, rtol=0, atol=1e-5)


# Models


def test_torch_modules():
    model = nn.ModuleDict(
        {
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
    )
    layouts = layouts_of(model)
    assert layouts["attention.in_proj_weight"] == MatrixLayout(parts=(8, 8, 8))
    assert layouts["crossed.k_proj_weight"] == MatrixLayout()
    assert layouts["up.weight"] == layouts["conv1d.weight"] == MatrixLayout(transposed=True)
    assert layouts["grouped.weight"] == "depthwise or grouped convolution" and layouts["table.weight"] == "embedding"
    assert layouts["normalized.parametrizations.weight.original1"].startswith("ParametrizationList is not known")
    assert layouts["recurrent.weight_ih_l0"] == "LSTM is not known to multiply activations with it"
    assert layouts["gate.weight"] == "a single row or column"
    assert layouts["qkv.weight"] == MatrixLayout(parts=(8, 8, 8))
    assert layouts["query_key_value.weight"] == MatrixLayout()


def test_stated_parts():
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24), "mixed": nn.Linear(8, 24)})
    layouts = layouts_of(model, {"mixed.*": (8, 2, 2)})
    assert layouts["mixed.weight"] == MatrixLayout(parts=(8, 2, 2))
    assert layouts["qkv.weight"] == MatrixLayout()
    with pytest.raises(ValueError, match=r"the parts do not fit its 24 outputs"):
        matrix_layouts.of_model(model, split_fused={"mixed.*": (8, 8)})
    with pytest.raises(ValueError, match=r"\['wqkv'\] match no parameter .* names are like 'qkv.weight'"):
        matrix_layouts.of_model(model, split_fused={"wqkv": (8, 8, 8)})


# Each part does what its name says: without the keys no query matters, and so on


FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_bigcode-mqa": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT2, "multi_query": True}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT2, "multi_query": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**GQA, "max_position_embeddings": 16}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**GQA, "multi_query": False}),
    "falcon-mqa": ("FalconForCausalLM", "FalconConfig", {**GQA, "multi_query": True}),
    "falcon-new": ("FalconForCausalLM", "FalconConfig", {**GQA, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT2, "n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 50}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**GQA}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GQA, "max_position_embeddings": 16}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**GQA, "head_dim": 8}),
    "deberta": ("DebertaModel", "DebertaConfig", {**GQA, "max_position_embeddings": 16}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GQA, "num_local_experts": 3}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GQA, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**GQA, "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 3},
    ),
}
# Query and key, in the order of the parts; CodeGen has query, value, key.
QUERY_AND_KEY = {"codegen": (0, 2)}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_do_what_they_are_taken_for(family):
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
        if parts == 2:  # gate and up
            assert not matters(leaf, 1, without=0)
            continue
        query, key = QUERY_AND_KEY.get(family, (0, 1))
        value = 3 - query - key
        assert not matters(leaf, query, without=key)
        assert not matters(leaf, key, without=query)
        assert not matters(leaf, query, without=value)
        assert not matters(leaf, key, without=value)
        assert matters(leaf, value, without=key)
        assert matters(leaf, value, without=query)


def test_every_known_class_is_in_a_family_above():
    seen = {"MultiheadAttention"}
    for name, config, settings in FAMILIES.values():
        seen.update(type(module).__name__ for module in of(name, config, settings).modules())
    assert {owner for _, owner in matrix_layouts._FUSED} <= seen


def test_shapes_of_parameters_that_zero_init_has_emptied():
    model = nn.ModuleDict({"c": nn.Linear(8, 24), "embed": nn.Embedding(9, 8)})
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    layouts = layouts_of(model, {"c.weight": (8, 16)})
    assert layouts == {"c.weight": MatrixLayout(parts=(8, 16)), "embed.weight": "embedding"}
