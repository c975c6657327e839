"""Layouts: matrices of tensors, modules and real models, where each part must do what its name says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from mars_hf import Mars
from mars_hf.groups import known_models, matrix_layouts
from mars_hf.groups.matrix_layouts import MatrixLayout
from mars_hf.newton_schulz import muon_scale, newton_schulz, orthogonalize, shampoo_scale

SMALL = {"num_hidden_layers": 2, "vocab_size": 50}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "hidden_size": 32, **SMALL}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 50, "n_positions": 16}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def takes_adamw(model, **options) -> set[str]:
    return set(matrix_layouts.left_out(model, **options))


def of(name: str, config: str, settings: dict) -> nn.Module:
    """Return a tiny model in eval mode."""
    return getattr(transformers, name)(getattr(transformers, config)(**{**settings, **NO_TOKENS})).eval()


def updates(model: nn.Module, gradients: dict, scale: Callable, **options) -> dict:
    """Return the update of the orthogonalizing rules for each parameter, by its layout."""
    found = {}
    for name, layout in matrix_layouts.of_model(model, **options).items():
        matrices = matrix_layouts.split(gradients[name], layout)
        results = orthogonalize(matrices, dtype=gradients[name].dtype)
        found[name] = join([result * scale(*result.shape[-2:]) for result in results], layout, like=gradients[name])
    return found


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
    ((6, 4), MatrixLayout(stacked=3), [(3, 2, 4)]),
    ((6, 4), MatrixLayout(stacked=2, transposed=True), [(2, 4, 3)]),
    ((12, 4), MatrixLayout(stacked=2, parts=(2, 1)), [(2, 4, 4), (2, 2, 4)]),
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
    matrices = matrix_layouts.split(tensor, layout)
    assert [tuple(m.shape) for m in matrices] == shapes == matrix_layouts.matrix_shapes(shape, layout)
    joined = join([m.clone() for m in matrices], layout, like=tensor)
    torch.testing.assert_close(joined, before, rtol=0, atol=0)
    assert joined.data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize(("shape", "layout", "shapes"), LAYOUTS, ids=str)
def test_views_write_through(shape, layout, shapes):
    tensor = torch.randn(shape)
    matrices = matrix_layouts.split(tensor.clone(), layout)
    for view, matrix in zip(matrix_layouts.views(tensor, layout), matrices, strict=True):
        view.sub_(matrix.view_as(view))
    assert not tensor.any()


def test_split_of_one_projection_is_a_view():
    weight = torch.randn(24, 72)
    for matrix in matrix_layouts.split(weight, MatrixLayout(transposed=True, parts=(24, 24, 24))):
        assert matrix._base is weight


def test_join_keeps_strides_and_takes_the_matrices_dtype():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    joined = join([m.bfloat16() for m in matrix_layouts.split(weight, MatrixLayout())], MatrixLayout(), like=weight)
    assert joined.stride() == weight.stride()
    assert joined.dtype == torch.bfloat16


def test_interleaved_parts_are_taken_head_by_head():
    weight = torch.arange(12.0)[:, None].expand(12, 2)
    query, key = matrix_layouts.split(weight, MatrixLayout(parts=(2, 1)))
    assert query[:, 0].tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert key[:, 0].tolist() == [2, 5, 8, 11]


def test_stacked_matrices_are_below_one_another():
    weight = torch.arange(6.0)[:, None].expand(6, 2)
    (experts,) = matrix_layouts.split(weight, MatrixLayout(stacked=3))
    assert experts[:, :, 0].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_layouts_as_plain_values():
    assert matrix_layouts.to_plain(MatrixLayout(batched=True)) == {"transposed": False, "parts": None, "batched": True}
    for layout in (MatrixLayout(stacked=3, transposed=True), MatrixLayout(parts=(2, 1)), MatrixLayout(), None):
        assert matrix_layouts.from_plain(matrix_layouts.to_plain(layout)) == layout


@pytest.mark.parametrize("stacked", [0, -1, True, 2.0, "2"])
def test_numbers_of_stacked_matrices_are_checked(stacked):
    with pytest.raises(ValueError, match=r"stacked=.*: an integer > 0 is needed"):
        matrix_layouts.from_plain({"stacked": stacked})


def test_stacked_layouts_that_do_not_fit():
    with pytest.raises(ValueError, match="batched=True and stacked=2"):
        matrix_layouts.from_plain({"stacked": 2, "batched": True})
    with pytest.raises(ValueError, match=r"shape \(6, 4\): 6 is no multiple of `stacked`"):
        matrix_layouts.check((6, 4), MatrixLayout(stacked=4))
    with pytest.raises(ValueError, match="too few dimensions"):
        matrix_layouts.check((6,), MatrixLayout(stacked=2))
    matrix_layouts.check((6, 4), MatrixLayout(stacked=2, parts=(3,)))
    with pytest.raises(ValueError, match="the parts do not fit its 3 outputs"):
        matrix_layouts.check((6, 4), MatrixLayout(stacked=2, parts=(2,)))


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
    found = updates(model, gradients, shampoo_scale)
    for index, to_rows in enumerate([lambda g: g, lambda g: g.transpose(0, 1), lambda g: g]):
        name = f"{index}.weight"
        rows = to_rows(gradients[name]).flatten(1)
        assert rows.shape[0] == 8
        expected = newton_schulz(rows, dtype=torch.float32) * shampoo_scale(*rows.shape)
        torch.testing.assert_close(to_rows(found[name]).flatten(1), expected, rtol=0, atol=1e-5)


def test_experts_are_matrices_of_their_own():
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.randn(4, 16, 6))
    gradient = torch.randn(4, 16, 6)
    found = updates(experts, {"down_proj": gradient}, shampoo_scale)["down_proj"]
    for expert in range(4):
        alone = newton_schulz(gradient[expert], dtype=torch.float32) * (16 / 6) ** 0.5
        torch.testing.assert_close(found[expert], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mars_type", ["mars-shampoo", "mars-m"])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_matrices_step_as_batched_ones(mars_type, transposed):
    start, shape = torch.randn(3, 4, 6), (12, 6)
    stacked, batched = nn.Parameter(start.reshape(shape).clone()), nn.Parameter(start.clone())
    stacked_group = {"params": [stacked], "layout": MatrixLayout(stacked=3, transposed=transposed)}
    batched_group = {"params": [batched], "layout": MatrixLayout(batched=True, transposed=transposed)}
    stack, batch = Mars([stacked_group], mars_type=mars_type), Mars([batched_group], mars_type=mars_type)
    for _ in range(3):
        batched.grad = torch.randn(3, 4, 6)
        stacked.grad = batched.grad.reshape(shape).clone()
        stack.step()
        batch.step()
    torch.testing.assert_close(stacked.detach(), batched.detach().reshape(shape), rtol=0, atol=0)
    assert (batched - start).abs().min() > 0


# Models


def test_gpt2():
    model = of("GPT2LMHeadModel", "GPT2Config", {**GPT2, "add_cross_attention": True})
    found = matrix_layouts.of_model(model)
    block = {name.removeprefix("transformer.h.1."): layout for name, layout in found.items() if ".h.1." in name}
    assert block == {
        "attn.c_attn.weight": MatrixLayout(transposed=True, parts=(24, 24, 24)),
        "attn.c_proj.weight": MatrixLayout(transposed=True),
        "crossattention.c_attn.weight": MatrixLayout(transposed=True, parts=(24, 24)),
        "crossattention.q_attn.weight": MatrixLayout(transposed=True),
        "crossattention.c_proj.weight": MatrixLayout(transposed=True),
        "mlp.c_fc.weight": MatrixLayout(transposed=True),
        "mlp.c_proj.weight": MatrixLayout(transposed=True),
    }
    assert found["transformer.wte.weight"] == MatrixLayout()
    assert set(found) == {name for name, p in model.named_parameters() if p.ndim >= 2}
    assert takes_adamw(model) == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert all(layout.parts is None for layout in matrix_layouts.of_model(model, split_fused="none").values())


def test_llama():
    model = of("LlamaForCausalLM", "LlamaConfig", GQA)
    assert set(matrix_layouts.of_model(model).values()) == {MatrixLayout()}
    assert takes_adamw(model) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_mixtral():
    model = of("MixtralForCausalLM", "MixtralConfig", {**GQA, "num_local_experts": 3})
    found = matrix_layouts.of_model(model)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == MatrixLayout(parts=(40, 40), batched=True)
    assert found["model.layers.0.mlp.experts.down_proj"] == MatrixLayout(batched=True)
    assert found["model.layers.0.mlp.gate.weight"] == MatrixLayout()
    assert takes_adamw(model) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_gpt_neox():
    model = of("GPTNeoXForCausalLM", "GPTNeoXConfig", {**GQA, "max_position_embeddings": 16})
    found = matrix_layouts.of_model(model)
    assert found["gpt_neox.layers.0.attention.query_key_value.weight"] == MatrixLayout(parts=(8, 8, 8))
    assert takes_adamw(model) == {"gpt_neox.embed_in.weight", "lm_head.weight"}


def test_classifiers_and_tables_take_adamw():
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    bert = of("BertForSequenceClassification", "BertConfig", {**tiny, "vocab_size": 50})
    table = "bert.embeddings.{}_embeddings.weight"
    assert takes_adamw(bert) == {
        *(table.format(kind) for kind in ("word", "position", "token_type")),
        "classifier.weight",
    }
    masked = of("BertForMaskedLM", "BertConfig", {**tiny, "vocab_size": 50})
    assert takes_adamw(masked) == {table.format(kind) for kind in ("word", "position", "token_type")}
    vit = of("ViTForImageClassification", "ViTConfig", {**tiny, "image_size": 8, "patch_size": 4})
    embeddings = "vit.embeddings"
    assert takes_adamw(vit) == {
        f"{embeddings}.cls_token",
        f"{embeddings}.position_embeddings",
        "classifier.weight",
    }
    assert matrix_layouts.of_model(vit)[f"{embeddings}.patch_embeddings.projection.weight"] == MatrixLayout()


def test_torch_modules():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "crossed": nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
            "bilinear": nn.Bilinear(3, 4, 5),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 5)),
            "qkv": nn.Linear(8, 24),
            "query_key_value": nn.Linear(8, 24),  # of an unknown module
        }
    )
    found = matrix_layouts.of_model(model)
    assert found["attention.in_proj_weight"] == MatrixLayout(parts=(8, 8, 8))
    assert found["crossed.k_proj_weight"] == MatrixLayout()
    assert found["bilinear.weight"] == MatrixLayout()
    assert found["parametrized.parametrizations.weight.original1"] == MatrixLayout()
    assert found["qkv.weight"] == MatrixLayout(parts=(8, 8, 8))
    assert found["query_key_value.weight"] == MatrixLayout()


def test_stated_parts():
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24), "mixed": nn.Linear(8, 24)})
    found = matrix_layouts.of_model(model, split_fused={"mixed.*": (8, 2, 2)})
    assert found["mixed.weight"] == MatrixLayout(parts=(8, 2, 2))
    assert found["qkv.weight"] == MatrixLayout()
    with pytest.raises(ValueError, match=r"sizes \(8, 8\) do not fit the 24 outputs of 'mixed.weight'"):
        matrix_layouts.of_model(model, split_fused={"mixed.*": (8, 8)})
    with pytest.raises(ValueError, match=r"\['wqkv'\] match no parameter .* names are like 'qkv.weight'"):
        matrix_layouts.of_model(model, split_fused={"wqkv": (8, 8, 8)})
    with pytest.raises(ValueError, match="'auto', 'none' or a mapping"):
        matrix_layouts.of_model(model, split_fused="thirds")


# Each part does what its name says: without the keys no query matters, and so on


FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "imagegpt": ("ImageGPTModel", "ImageGPTConfig", GPT2),
    "gpt_bigcode-mqa": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT2, "multi_query": True}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT2, "multi_query": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**GQA, "max_position_embeddings": 16}),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseForCausalLM",
        "GPTNeoXJapaneseConfig",
        {**GQA, "intermediate_multiple_size": 2},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**GQA, "multi_query": False}),
    "falcon-mqa": ("FalconForCausalLM", "FalconConfig", {**GQA, "multi_query": True}),
    "falcon-new": ("FalconForCausalLM", "FalconConfig", {**GQA, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", {**GQA, "max_position_embeddings": 16}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT2, "n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 50}),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 50},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 100.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32},
        },
    ),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**GQA}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GQA, "max_position_embeddings": 16}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**GQA, "head_dim": 8}),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**GQA, "head_dim": 8, "num_local_experts": 2, "layer_types": ["linear_attention"] * 2, "block_size": 8},
    ),
    "bark": (
        "BarkCausalModel",
        "BarkSemanticConfig",
        {"hidden_size": 24, "num_layers": 2, "num_heads": 3, "input_vocab_size": 50, "output_vocab_size": 50},
    ),
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
    fused = {name: layout for name, layout in matrix_layouts.of_model(model).items() if layout.parts}
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
        assert matters(leaf, value, without=key) or family == "minimax"  # linear attention needs its keys
        assert matters(leaf, value, without=query) or family == "minimax"


def test_every_known_class_is_in_a_family_above():
    untested = {"DecisionTransformerGPT2Attention", "Phi4MultimodalAttention", "ModernBertDecoderMLP"}
    seen = set()
    for name, config, settings in FAMILIES.values():
        seen.update(type(module).__name__ for module in of(name, config, settings).modules())
    assert {owner for _, owner in known_models._FUSED} - seen == untested


def test_shapes_of_parameters_that_zero_init_has_emptied():
    model = nn.ModuleDict({"c": nn.Linear(8, 24), "embed": nn.Embedding(9, 8)})
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    found = matrix_layouts.of_model(model, split_fused={"c.weight": (8, 16)})
    assert found == {"c.weight": MatrixLayout(parts=(8, 16)), "embed.weight": MatrixLayout()}
    assert takes_adamw(model) == {"embed.weight"}
