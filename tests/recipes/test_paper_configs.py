"""GPT-2 and the configs gpt2-*.yaml hold the published settings, say where there are none, and train as published.

The official trainer sums gradients over its accumulation steps; Trainer averages them. A sum over A micro-batches is A
times their mean: a threshold of norms and eps divided by A then give the same weights.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pretrain_gpt2
import pytest
import torch
from helpers import gpt2
from pretraining.run import arguments, model, optimizers
from torch.nn import functional
from transformers import default_data_collator

import mars_hf
from mars_hf.reference import MarsReference

ON_CPU = ["--bf16", "false", "--tf32", "false", "--use_cpu", "true"]  # settings that need a GPU
PAPER = {  # PAPER.md 3.2: layers, heads, width; lr and lr_1d of MARS; lr of AdamW; min_lr
    "gpt2-small": (12, 12, 768, 6e-3, 3e-3, 6e-4, 3e-5),
    "gpt2-medium": (24, 16, 1024, 3e-3, 1.5e-3, 3e-4, 6e-5),
    "gpt2-large": (36, 20, 1280, 2e-3, 1e-3, 2e-4, 1e-5),
    "gpt2-xl": (48, 25, 1600, 2e-3, 1e-3, 2e-4, 1e-5),
}
ORTHOGONAL = {  # PAPER.md 3.2: lr and lr_1d of Muon, lr of MARS-M
    "gpt2-small": (2e-2, 3e-3, 6e-3),
    "gpt2-medium": (1e-2, 1.5e-3, 5e-3),
    "gpt2-large": (6.67e-3, 1e-3, 5e-3),
    "gpt2-xl": (6.67e-3, 1e-3, 3e-3),
}
# PAPER.md 3.1: micro-batch and accumulation on 8 GPUs.
OFFICIAL_BATCH = {"gpt2-small": (15, 4), "gpt2-medium": (15, 4), "gpt2-large": (5, 12), "gpt2-xl": (5, 12)}
NOT_PUBLISHED = ("mars_lion", "mars_shampoo", "nadamw")
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16}


def parse(name, *argv):
    return arguments.parse(["--config", name, *ON_CPU, *argv, "--output_dir", "unused"])


def made(run, network=None):
    """Return a small model's optimizer under the run's settings."""
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    return make()(network or gpt2(), **settings)


# --- models ----------------------------------------------------------------------------------------------------------


def build(**settings):
    torch.manual_seed(0)
    return model.build(arguments.ModelArguments(**{**TINY, **settings}), vocab_size=50, end_of_text=0)


def test_without_biases_they_are_zero_and_stay_zero():
    network = build(bias=False)
    optimizer, ids = mars_hf.create(network, lr=0.1, weight_decay_1d=0.1), torch.randint(0, 50, (2, 12))
    for _ in range(3):
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * 6 + 1 and not any(bias.any() or bias.requires_grad for bias in biases)
    assert len(optimizer.param_groups[1]["params"]) == 2 * 2 + 1  # LayerNorm gains


def test_sizes_and_activations():
    network = build(dropout=0.25, vocab_size=64, scale_attn_by_inverse_layer_idx=True, attn_implementation="eager")
    assert network.config.scale_attn_by_inverse_layer_idx and network.config._attn_implementation == "eager"
    assert network.transformer.drop.p == network.transformer.h[0].mlp.dropout.p == 0.25
    assert network.transformer.wte.weight.shape == (64, 8) and build().transformer.wte.weight.shape == (50, 8)
    x = torch.linspace(-4, 4, 101)
    for name, function in (("gelu", "none"), ("gelu_new", "tanh")):
        activation = build(activation_function=name).transformer.h[0].mlp.act
        torch.testing.assert_close(activation(x), functional.gelu(x, approximate=function))
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48, "block_size": 32}
    llama, phi3 = (build(**sizes, model_type=kind) for kind in ("llama", "phi3"))
    assert llama.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert phi3.model.layers[0].self_attn.qkv_proj.weight.shape == (32 + 2 * 16, 32)
    assert llama.model.layers[0].mlp.up_proj.weight.shape == (48, 32) and llama.config.max_position_embeddings == 32
    assert llama.lm_head.weight is llama.model.embed_tokens.weight and phi3.config.tie_word_embeddings
    with pytest.raises(ValueError, match="vocab_size=40 is smaller than the tokenizer's 50"):
        build(vocab_size=40)
    with pytest.raises(ValueError, match="n_embd=8 must be a multiple of n_head=3"):
        build(n_head=3)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_run(name):
    """The sections of the optimizers say whether they are published."""
    layers, heads, width, *_ = PAPER[name]
    run = parse(name)
    sizes, training = run.model, run.training
    assert (sizes.n_layer, sizes.n_head, sizes.n_embd, sizes.block_size) == (layers, heads, width, 1024)
    assert (sizes.vocab_size, sizes.bias, sizes.dropout) == (50304, False, 0.0)
    assert sizes.scale_attn_by_inverse_layer_idx and sizes.activation_function == "gelu_new"
    assert (training.max_steps, training.warmup_steps) == (100_000, 2000)
    assert run.data.data_dir == ("data/fineweb-edu" if name == "gpt2-xl" else "data/openwebtext")
    batch, accumulation = OFFICIAL_BATCH[name]
    assert batch * accumulation * 8 * 1024 == training.tokens_per_step == 491_520
    eight = SimpleNamespace(train_batch_size=training.train_batch_size, world_size=8)
    eight.gradient_accumulation_steps = training.gradient_accumulation_steps
    assert run._replace(training=eight).count_tokens() == 491_520
    comments = r"  # (Published|Not published)(?:.*\n  #)*.*\n  (\w+):"
    sections = re.findall(comments, (arguments.CONFIGS / f"{name}.yaml").read_text().partition("optimizers:")[2])
    assert {optimizer: comment for comment, optimizer in sections} == {
        optimizer: "Not published" if optimizer in NOT_PUBLISHED else "Published" for optimizer in arguments.OPTIMIZERS
    }


@pytest.mark.parametrize("optimizer", arguments.OPTIMIZERS)
@pytest.mark.parametrize("name", PAPER)
def test_groups_of_every_optimizer(name, optimizer):
    """Schedules, rates, decays and betas; thresholds and eps are the official ones of summed gradients."""
    lr, lr_1d, adamw_lr, min_lr = PAPER[name][3:]
    muon_lr, muon_lr_1d, mars_m_lr = ORTHOGONAL[name]
    beta1 = 0.9 if "adamw" in optimizer and "mars" not in optimizer else 0.95
    rates = {  # of matrices, vectors and embeddings
        "mars_adamw": ((lr, 1e-2), (lr_1d, 0.1), (lr, 0.0)),
        "mars_lion": ((adamw_lr, 0.1), (lr_1d, 0.1), (adamw_lr, 0.0)),
        "mars_shampoo": ((muon_lr, 0.0), (muon_lr_1d, 0.1), (muon_lr_1d, 0.0)),
        "mars_m": ((mars_m_lr, 1e-2),) * 3,
        "muon": ((muon_lr, 0.0), (muon_lr_1d, 0.1), (muon_lr, 0.0)),
        "adamw": ((adamw_lr, 0.1), (adamw_lr, 0.0), (adamw_lr, 0.0)),
    }["adamw" if optimizer == "nadamw" else optimizer]
    expected = dict(zip(("h.0.mlp.c_fc.weight", "ln_f.weight", "wpe.weight"), rates, strict=True))
    run = parse(name, "--optimizer", optimizer)
    groups = {each: group for group in made(run).param_groups for each in group["param_names"]}
    accumulation = OFFICIAL_BATCH[name][1]
    assert run.training.max_grad_norm == pytest.approx(1 / accumulation, rel=1e-15)
    assert run.training.lr_scheduler_type == "cosine_with_min_lr"
    assert run.training.lr_scheduler_kwargs == {"min_lr": min_lr}
    for each, (rate, decay) in expected.items():
        group = groups[f"transformer.{each}"]
        assert (group["lr"], group["weight_decay"]) == (rate, decay), each
        vector = each == "ln_f.weight" or (each == "wpe.weight" and optimizer in ("mars_m", "mars_shampoo"))
        betas = group.get("betas", (group.get("momentum"),))
        assert betas[0] == (0.9 if vector else beta1)
        if optimizer != "muon" or vector:
            assert betas[1] == (0.95 if vector or beta1 == 0.9 else 0.99)
            assert group["eps"] == pytest.approx(1e-8 / accumulation, rel=1e-15)
        if optimizer.startswith("mars"):
            assert group["clip_threshold"] == run.training.max_grad_norm
    if optimizer == "muon":
        matrix = groups["transformer.wpe.weight"]
        assert (matrix["role"], matrix["nesterov"], matrix["adjust_lr_fn"]) == ("matrix", True, "original")
    if optimizer == "mars_m":  # query, key and value stay one matrix
        assert groups["transformer.h.0.attn.c_attn.weight"]["layout"]["parts"] is None


def test_original_muon_scale_and_decay():
    """Conv1D stores (in, out): a wide layer out of 8 into 32 is doubled, a narrow one out of 32 into 8 is not."""
    start, moves = gpt2(n_layer=1).state_dict(), {}
    for scale in ("original", "match_rms_adamw"):
        network = gpt2(n_layer=1)
        argv = ["--optimizer", "muon", "--adjust_lr_fn", scale, "--weight_decay", "0.5", "--learning_rate", "0.1"]
        optimizer = made(arguments.parse(argv), network)
        for param in network.parameters():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        moves[scale] = {name: param.detach() - 0.95 * start[name] for name, param in network.named_parameters()}
    for layer, outputs, inputs in (
        ("attn.c_attn", 24, 8),
        ("attn.c_proj", 8, 8),
        ("mlp.c_fc", 32, 8),
        ("mlp.c_proj", 8, 32),
    ):
        original, matched = (moved[f"transformer.h.0.{layer}.weight"] for moved in moves.values())
        factor = max(1, outputs / inputs) ** 0.5 / (0.2 * max(outputs, inputs) ** 0.5)
        torch.testing.assert_close(original, factor * matched, rtol=1e-4, atol=1e-6)


# --- summed gradients ------------------------------------------------------------------------------------------------

# Relative to how far the weights move. Newton-Schulz divides by the norm + 1e-7 (mars_m), or in bfloat16 (muon),
# which a factor of 12 rounds differently; a factor of 4 does not.
BARS = {("mars_m", 4): 1e-4, ("mars_m", 12): 1e-4, ("muon", 12): 0.1}
EXACT_TO_ROUNDING = 1e-10


def distance(one, other, start):
    """Return the largest distance of two models' weights, relative to how far the first has moved."""
    moved = max(float((a - s).norm()) for a, s in zip(one, start, strict=True))
    return max(float((a - b).norm()) for a, b in zip(one, other, strict=True)) / moved


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-large"])
@pytest.mark.parametrize("optimizer", arguments.OPTIMIZERS)
def test_averaged_gradients_under_the_configs_end_where_summed_ones_do(name, optimizer):
    """The embedding has most of the global norm, so that c is clipped, too."""
    argv, accumulation, ends = ["--optimizer", optimizer], OFFICIAL_BATCH[name][1], []
    if optimizer in ("mars_shampoo", "mars_m"):  # bfloat16's rounding would hide a difference
        argv += ["--ns_dtype", "float64"]
    official = ["--max_grad_norm", "1", "--eps", "1e-8", *(["--clip_threshold", "1"] * ("mars" in optimizer))]
    for scale, words in ((0, []), (1 / accumulation, []), (1, official)):
        run, network = parse(name, *argv, *words), gpt2().double()
        optimizer_of_run, generator = made(run, network), torch.Generator().manual_seed(1)
        for _ in range(4 if scale else 0):
            for param in network.parameters():
                param.grad = scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)
            network.transformer.wte.weight.grad *= 20
            norm = torch.cat([param.grad.flatten() for param in network.parameters()]).norm()
            assert norm > run.training.max_grad_norm
            for param in network.parameters():  # torch's function adds 1e-6 to the norm
                param.grad *= float(run.training.max_grad_norm / norm)
            optimizer_of_run.step()
        ends.append([param.detach() for param in network.parameters()])
    start, averaged, summed = ends
    assert distance(averaged, summed, start) < BARS.get((optimizer, accumulation), EXACT_TO_ROUNDING)


@pytest.fixture
def recorded(monkeypatch) -> Iterator[dict]:
    """Record the recipe's micro-batches and its model before training, in float64."""
    seen: dict = {"batches": []}
    build = model.build

    def build_double(*args):
        seen["trained"] = build(*args).double()
        seen["start"] = copy.deepcopy(seen["trained"])
        return seen["trained"]

    def collate(rows):
        batch = default_data_collator(rows)
        seen["batches"].append({name: value.clone() for name, value in batch.items()})
        return batch

    monkeypatch.setattr(model, "build", build_double)
    monkeypatch.setattr(pretrain_gpt2, "default_data_collator", collate)
    return seen


def test_the_recipe_ends_at_the_weights_of_the_official_loop(tokens, tmp_path, recorded):
    """gpt2-small's own accumulation, thresholds, rates and decays, on a small model."""
    steps, warmup, accumulation, block = 6, 2, 4, 32
    argv = [
        *("--config", "gpt2-small", *ON_CPU, "--data_dir", str(tokens), "--output_dir", str(tmp_path / "run")),
        *("--n_layer", "2", "--n_head", "2", "--n_embd", "16", "--block_size", str(block), "--vocab_size", "512"),
        *("--max_steps", str(steps), "--warmup_steps", str(warmup), "--per_device_train_batch_size", "2"),
        *("--tokens_per_step", str(2 * accumulation * block), "--dataloader_num_workers", "0", "--cpu_threads", "1"),
        *("--eval_strategy", "no", "--max_eval_blocks", "2", "--save_strategy", "no", "--disable_tqdm", "true"),
        *("--sample_tokens", "0"),
    ]
    run = pretrain_gpt2.train(argv)
    assert run.training.gradient_accumulation_steps == accumulation
    assert run.count_tokens() == run.training.tokens_per_step

    network = recorded["start"]
    first = [param.detach().clone() for param in network.parameters()]
    named = dict(network.named_parameters())
    decays = {name: 0.0 if ".wte." in name or ".wpe." in name else 1e-2 for name, p in named.items() if p.ndim == 2}
    matrices = [
        (named[name], MarsReference(named[name].data, "mars-adamw", 0.0, weight_decay=decay))
        for name, decay in decays.items()
    ]
    vectors = [param for param in named.values() if param.ndim == 1 and param.requires_grad]
    adamw = torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    batches = iter(recorded["batches"])
    for step in range(steps):
        network.zero_grad()
        for _ in range(accumulation):
            network(**next(batches)).loss.backward()  # a sum, not a mean
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        cosine = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        rate = 6e-3 * step / warmup if step < warmup else 3e-5 + cosine * (6e-3 - 3e-5)
        adamw.param_groups[0]["lr"] = rate / 2
        adamw.step()
        for param, rule in matrices:
            rule.lr = rate
            rule.step(param.grad.clone())
    trained = [param.detach() for param in recorded["trained"].parameters()]
    # torch's global clip adds 1e-6 to the norm, which is four times larger here.
    assert distance([param.detach() for param in network.parameters()], trained, first) < 1e-6
