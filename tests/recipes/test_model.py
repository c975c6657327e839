"""GPT-2 with the settings of the papers."""

from __future__ import annotations

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
    with pytest.raises(ValueError, match="n_embd=8 is not a multiple of n_head=3"):
        build(n_head=3)
