"""GPT-2 and the configs gpt2-*.yaml hold the published settings, and train as published.

The official trainer sums gradients over its accumulation steps; Trainer averages them. A sum over A micro-batches is A
times their mean: a threshold of norms and eps divided by A then give the same weights.
"""

from __future__ import annotations

import copy
import itertools
import math

import pretrain_gpt2
import pytest
import torch
from helpers import gpt2
from pretraining.run import arguments, model, optimizers
from test_pretrain_gpt2 import TINY
from torch.nn import functional
from transformers import default_data_collator

import mars_hf

ON_CPU = ["--bf16", "false", "--tf32", "false", "--use_cpu", "true"]  # settings that need a GPU
PAPER = {  # PAPER.md 3.2: layers, heads, width; lr and lr_1d of MARS; lr of AdamW; min_lr
    "gpt2-small": (12, 12, 768, 6e-3, 3e-3, 6e-4, 3e-5),
    "gpt2-medium": (24, 16, 1024, 3e-3, 1.5e-3, 3e-4, 6e-5),
    "gpt2-large": (36, 20, 1280, 2e-3, 1e-3, 2e-4, 1e-5),
    "gpt2-xl": (48, 25, 1600, 2e-3, 1e-3, 2e-4, 1e-5),
}
ORTHOGONAL = {  # PAPER.md 3.2: lr and lr_1d of Muon, lr of MARS-M and of Moonlight's Muon
    "gpt2-small": (2e-2, 3e-3, 6e-3),
    "gpt2-medium": (1e-2, 1.5e-3, 5e-3),
    "gpt2-large": (6.67e-3, 1e-3, 5e-3),
    "gpt2-xl": (6.67e-3, 1e-3, 3e-3),
}
OPTIMIZERS = list(arguments.OPTIMIZERS)
# PAPER.md 3.1: micro-batch and accumulation on 8 GPUs.
OFFICIAL_BATCH = {"gpt2-small": (15, 4), "gpt2-medium": (15, 4), "gpt2-large": (5, 12), "gpt2-xl": (5, 12)}


def parse(name, *argv):
    return arguments.parse(["--config", name, *ON_CPU, *argv, "--output_dir", "unused"])


def made(run, network):
    """Return the optimizer of a model under the run's settings."""
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    return make()(network, **settings)


# --- models ----------------------------------------------------------------------------------------------------------


def build(**settings):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, **settings}
    return model.build(arguments.ModelArguments(**sizes), vocab_size=50, end_of_text=0)


def test_without_biases_they_are_zero_and_frozen():
    network = build(bias=False)
    biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * 6 + 1 and not any(bias.any() or bias.requires_grad for bias in biases)
    assert len(mars_hf.create(network, lr=3e-3).param_groups[1]["params"]) == 2 * 2 + 1  # LayerNorm gains


def test_sizes_and_activations():
    network = build(dropout=0.25, vocab_size=64, scale_attn_by_inverse_layer_idx=True, attn_implementation="eager")
    assert network.config.scale_attn_by_inverse_layer_idx and network.config._attn_implementation == "eager"
    assert network.transformer.drop.p == network.transformer.h[0].mlp.dropout.p == 0.25
    assert [each.get_input_embeddings().num_embeddings for each in (network, build())] == [64, 50]
    x, exact = torch.linspace(-4, 4, 101), build(activation_function="gelu").transformer.h[0].mlp.act
    assert torch.equal(exact(x), functional.gelu(x)) and not torch.equal(network.transformer.h[0].mlp.act(x), exact(x))
    sizes = {"n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48, "block_size": 32}
    for kind, name, rows in (("llama", "k_proj", 16), ("phi3", "qkv_proj", 32 + 2 * 16)):
        network = build(**sizes, model_type=kind)
        layer, config = network.model.layers[1], network.config
        assert getattr(layer.self_attn, name).weight.shape == (rows, 32) and layer.mlp.down_proj.weight.shape == (
            32,
            48,
        )
        assert config.max_position_embeddings == 32 and network.lm_head.weight is network.model.embed_tokens.weight
    with pytest.raises(ValueError, match="vocab_size=40 is smaller than the tokenizer's 50"):
        build(vocab_size=40)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_run(name):
    run, (layers, heads, width, *_), (batch, accumulation) = parse(name), PAPER[name], OFFICIAL_BATCH[name]
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": 1024, "vocab_size": 50304}
    others = {"bias": False, "dropout": 0.0, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu_new"}
    assert vars(run.model).items() >= {**sizes, **others}.items()
    assert (run.training.max_steps, run.training.warmup_steps) == (100_000, 2000)
    assert run.data.data_dir == ("data/fineweb-edu" if name == "gpt2-xl" else "data/openwebtext")
    assert batch * accumulation * 8 * 1024 == run.training.tokens_per_step == 491_520
    assert run.training.train_batch_size * run.training.gradient_accumulation_steps == batch * accumulation


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", PAPER)
def test_groups_of_every_optimizer(name, optimizer):
    """Schedules, rates, decays and betas; thresholds and eps are the official ones of summed gradients."""
    lr, lr_1d, adamw_lr, min_lr = PAPER[name][3:]
    muon_lr, muon_lr_1d, mars_m_lr = ORTHOGONAL[name]
    mars, adam = (0.95, 0.99), (0.9, 0.95)
    expected = {  # of matrices, vectors and embeddings: learning rate, decay, betas
        "mars_adamw": ((lr, 1e-2, *mars), (lr_1d, 0.1, *adam), (lr, 0.0, *mars)),
        "mars_lion": ((adamw_lr, 0.1, *mars), (lr_1d, 0.1, *adam), (adamw_lr, 0.0, *mars)),
        "mars_shampoo": ((muon_lr, 0.0, *mars), (muon_lr_1d, 0.1, *adam), (muon_lr_1d, 0.0, *adam)),
        "mars_m": ((mars_m_lr, 1e-2, *mars), (mars_m_lr, 1e-2, *adam), (mars_m_lr, 1e-2, *adam)),
        "mars_muon": ((mars_m_lr, 0.1, *mars), (mars_m_lr, 0.1, *adam), (mars_m_lr, 0.1, *adam)),
        "muon": ((muon_lr, 0.0, 0.95), (muon_lr_1d, 0.1, *adam), (muon_lr, 0.0, 0.95)),
        "adamw": ((adamw_lr, 0.1, *adam), (adamw_lr, 0.0, *adam), (adamw_lr, 0.0, *adam)),
    }["adamw" if optimizer == "nadamw" else optimizer]
    run, accumulation = parse(name, "--optimizer", optimizer), OFFICIAL_BATCH[name][1]
    schedule = (run.training.lr_scheduler_type, run.training.lr_scheduler_kwargs)
    assert schedule == ("cosine_with_min_lr", {"min_lr": min_lr})
    assert run.training.max_grad_norm == pytest.approx(1 / accumulation, rel=1e-15)
    groups = {each: group for group in made(run, gpt2()).param_groups for each in group["param_names"]}
    matrix, vector, embedding = (groups[f"transformer.{each}.weight"] for each in ("h.0.mlp.c_fc", "ln_f", "wpe"))
    for group, numbers in zip((matrix, vector, embedding), expected, strict=True):
        betas = group["betas"] if "betas" in group else [group["momentum"]]
        assert (group["lr"], group["weight_decay"], *betas) == numbers
        assert group["eps"] == pytest.approx(1e-8 / accumulation, rel=1e-15) or "momentum" in group
        if optimizer.startswith("mars") and optimizer != "mars_muon":
            assert group["clip_threshold"] == run.training.max_grad_norm
    if optimizer == "muon":
        assert embedding.items() >= {"role": "matrix", "nesterov": True, "adjust_lr_fn": "original"}.items()
    if optimizer in ("mars_m", "mars_muon"):  # query, key and value stay one matrix
        assert groups["transformer.h.0.attn.c_attn.weight"]["layout"]["parts"] is None


# --- summed gradients ------------------------------------------------------------------------------------------------

# Relative to how far the weights move. Newton-Schulz divides by the norm + 1e-7, or in bfloat16 (muon),
# which a factor of 12 rounds differently; a factor of 4 does not.
OF_EPS = dict.fromkeys(itertools.product(("mars_m", "mars_muon"), (4, 12)), 1e-4)
BARS = {**OF_EPS, ("muon", 12): 0.1}
OFFICIAL = ["--max_grad_norm", "1", "--eps", "1e-8", "--clip_threshold", "1"]


def distance(one, other, start):
    """Return the largest distance of two models' weights, relative to how far the first has moved."""
    moved = max(float((a - s).norm()) for a, s in zip(one, start, strict=True))
    return max(float((a - b).norm()) for a, b in zip(one, other, strict=True)) / moved


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-large"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "mars_adamw --is_approx false"])
def test_paper_configs_averaged_gradients(name, optimizer):
    """The embedding has most of the global norm, so that c is clipped, too."""
    argv, accumulation, ends = ["--optimizer", *optimizer.split()], OFFICIAL_BATCH[name][1], []
    if optimizer in ("mars_shampoo", "mars_m", "mars_muon"):  # bfloat16's rounding would hide a difference
        argv += ["--ns_dtype", "float64"]
    for scale, words in ((1 / accumulation, []), (1, OFFICIAL if "mars" in optimizer else OFFICIAL[:-2])):
        run, network = parse(name, *argv, *words), gpt2(n_layer=1).double()
        stepped, generator, params = made(run, network), torch.Generator().manual_seed(1), list(network.parameters())
        for is_stale in (False, *((True, False) if "approx" in optimizer else (False,)) * 3):
            for param in params:
                param.grad = scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)
            network.transformer.wte.weight.grad *= 20
            norm = torch.cat([param.grad.flatten() for param in params]).norm()
            assert norm > run.training.max_grad_norm
            for param in params:  # torch's function adds 1e-6 to the norm
                param.grad *= float(run.training.max_grad_norm / norm)
            if is_stale:
                stepped.update_previous_grad()
                stepped.update_last_grad()
            else:
                stepped.step()
        ends.append([param.detach() for param in params])
    start = [param.detach() for param in gpt2(n_layer=1).double().parameters()]
    assert distance(*ends, start) < BARS.get((optimizer, accumulation), 1e-10)


def test_recipe_equals_official_loop(tokens, tmp_path):
    """gpt2-small's own accumulation, thresholds, rates and decays, on a small model in float64."""
    steps, warmup, accumulation = 6, 2, 4
    argv = [*TINY, "--config", "gpt2-small", *ON_CPU, "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")]
    argv += ["--max_steps", str(steps), "--vocab_size", "512", "--tokens_per_step", str(4 * accumulation * 32)]
    argv += ["--dataloader_num_workers", "0", "--eval_strategy", "no", "--save_strategy", "no"]
    models, batches = [], []

    def collate(rows):
        batches.append(default_data_collator(rows))
        return dict(batches[-1])

    def prepare(trainer):
        trainer.data_collator = collate
        models.extend([copy.deepcopy(trainer.model.double()), trainer.model])

    run = pretrain_gpt2.train(argv, prepare)
    assert run.training.gradient_accumulation_steps == accumulation

    network, start = models[0], copy.deepcopy(models[0])
    official = made(parse("gpt2-small", *OFFICIAL), network)
    rates = [group["lr"] for group in official.param_groups]
    for step in range(steps):
        network.zero_grad()
        for batch in batches[step * accumulation :][:accumulation]:
            network(**batch).loss.backward()  # a sum, not a mean
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        cosine = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        factor = step / warmup if step < warmup else 0.005 + 0.995 * cosine  # of 6e-3, to 3e-5
        for group, rate in zip(official.param_groups, rates, strict=True):
            group["lr"] = factor * rate
        official.step()
    # torch's global clip adds 1e-6 to the norm, which is four times larger here.
    assert distance(*([param.detach() for param in each.parameters()] for each in (*models, start))) < 1e-6
