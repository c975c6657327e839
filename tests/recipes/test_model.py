"""GPT-2 with the settings of the papers; Llama, whose projections may be fused."""

from __future__ import annotations

import copy

import pytest
import torch
from pretraining.run import model
from pretraining.run.arguments import ModelArguments

import mars_hf

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16}


def build(**settings):
    torch.manual_seed(0)
    return model.build(ModelArguments(**{**TINY, **settings}), vocab_size=50, end_of_text=0)


def test_without_biases_they_are_zero_and_stay_zero():
    gpt2 = build(bias=False)
    optimizer = mars_hf.create(gpt2, lr=0.1, weight_decay_1d=0.1)
    ids = torch.randint(0, 50, (2, 12))
    for _ in range(3):
        gpt2(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    biases = [p for name, p in gpt2.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * 6 + 1
    assert not any(bias.any() or bias.requires_grad for bias in biases)
    # A model without biases: LayerNorm and linear maps written out give the same logits.
    gpt2.eval()
    assert torch.isfinite(gpt2(input_ids=ids).logits).all()
    assert len(optimizer.param_groups[1]["params"]) == 2 * 2 + 1  # LayerNorm gains


def test_number_of_parameters_of_gpt2_small():
    with torch.device("meta"):
        gpt2 = build(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
    weights = sum(p.numel() for name, p in gpt2.named_parameters() if not name.endswith("bias"))
    assert weights / 1e6 == pytest.approx(124.4, abs=0.05)


@pytest.mark.parametrize("scaled", [False, True])
def test_attention_scaling_holds_for_every_implementation(scaled):
    ids = torch.randint(0, 50, (2, 12))
    logits = {}
    for implementation in ("eager", "sdpa"):
        gpt2 = build(scale_attn_by_inverse_layer_idx=scaled, attn_implementation=implementation).eval()
        with torch.no_grad():
            for block in gpt2.transformer.h:  # large enough for the scale to show
                block.attn.c_attn.weight.mul_(50)
            logits[implementation] = gpt2(input_ids=ids).logits
    torch.testing.assert_close(logits["eager"], logits["sdpa"], rtol=1e-4, atol=1e-4)
    if scaled:
        plain = build(attn_implementation="sdpa").eval()
        with torch.no_grad():
            for block in plain.transformer.h:
                block.attn.c_attn.weight.mul_(50)
            assert not torch.allclose(plain(input_ids=ids).logits, logits["sdpa"], atol=1e-3)


@pytest.mark.parametrize(("name", "function"), [("gelu", "none"), ("gelu_new", "tanh")])
def test_activations(name, function):
    x = torch.linspace(-4, 4, 101)
    activation = build(activation_function=name).transformer.h[0].mlp.act
    torch.testing.assert_close(activation(x), torch.nn.functional.gelu(x, approximate=function))


def test_dropout_and_vocabulary():
    gpt2 = build(dropout=0.25, vocab_size=64)
    assert gpt2.transformer.drop.p == gpt2.transformer.h[0].mlp.dropout.p == 0.25
    assert gpt2.transformer.wte.weight.shape == (64, 8)
    assert build().transformer.wte.weight.shape == (50, 8)
    with pytest.raises(ValueError, match="vocab_size=40 is smaller than the tokenizer's 50"):
        build(vocab_size=40)
    with pytest.raises(ValueError, match="n_embd=8 must be a multiple of n_head=3"):
        build(n_head=3)


LLAMA = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48, "block_size": 32}


def fuse(split):
    """Return Llama's weights under Phi-3's names."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    fused = {}
    for name, weight in split.items():
        part = name.split(".")[-2]
        whole = next((whole for whole, names in parts.items() if part in names), None)
        if whole is None:
            fused[name] = weight
        elif part == parts[whole][0]:
            fused[name.replace(part, whole)] = torch.cat([split[name.replace(part, other)] for other in parts[whole]])
    return fused


@pytest.fixture
def twins():
    """Return a Llama and a Phi-3 with the same weights."""
    llama, phi3 = (build(**LLAMA, model_type=kind) for kind in ("llama", "phi3"))
    phi3.load_state_dict(fuse(llama.state_dict()))
    return llama, phi3


def test_llama_and_phi3_compute_the_same_function(twins):
    llama, phi3 = twins
    assert llama.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert phi3.model.layers[0].self_attn.qkv_proj.weight.shape == (32 + 2 * 16, 32)
    assert llama.model.layers[0].mlp.up_proj.weight.shape == (48, 32) and llama.config.max_position_embeddings == 32
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(phi3(ids).logits, llama(ids).logits)


def test_mars_m_orthogonalizes_fused_projections_part_by_part(twins):
    """Clipping takes the norm of a whole tensor, so it is off here."""

    def steps(network, **settings):
        network = copy.deepcopy(network).double()
        settings |= {"lr": 1e-2, "ns_dtype": torch.float64, "clip_threshold": None}
        optimizer = mars_hf.create(network, mars_type="mars-m", **settings)
        for start in range(3):
            ids = torch.arange(start, start + 12)[None]
            network(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return network.state_dict()

    llama, phi3 = twins
    split, by_part, whole = fuse(steps(llama)), steps(phi3), steps(phi3, split_fused="none")
    for name, weight in split.items():
        torch.testing.assert_close(by_part[name], weight, rtol=1e-9, atol=1e-9)
        if "qkv_proj" in name or "gate_up_proj" in name:
            assert (whole[name] - weight).abs().max() > 1e-4
