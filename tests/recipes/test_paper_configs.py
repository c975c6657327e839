"""GPT-2 and the configs gpt2-*.yaml hold the published settings, say where there are none, and train as published.

The official trainer sums gradients over its accumulation steps; Trainer averages them. A sum over A micro-batches is A
times their mean: a threshold of norms and eps divided by A then give the same weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pretrain_gpt2
import pytest
import torch
from helpers import gpt2
from pretraining.run import arguments, model, optimizers
from torch import nn
from torch.nn import functional
from transformers import default_data_collator, get_scheduler

import mars_hf
from mars_hf.reference import MarsReference
from mars_hf.training.registry import MarsFactory, resolve

ROOT = Path(__file__).resolve().parents[2]
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


def test_attention_scaling_holds_for_every_implementation():
    ids, logits = torch.randint(0, 50, (2, 12)), {}
    for scaled in (False, True):
        for kind in ("eager", "sdpa"):
            network = build(scale_attn_by_inverse_layer_idx=scaled, attn_implementation=kind).eval()
            with torch.no_grad():
                for block in network.transformer.h:  # large enough for the scale to show
                    block.attn.c_attn.weight.mul_(50)
                logits[scaled, kind] = network(input_ids=ids).logits
        torch.testing.assert_close(logits[scaled, "eager"], logits[scaled, "sdpa"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits[False, "sdpa"], logits[True, "sdpa"], atol=1e-3)


def test_sizes_and_activations():
    network = build(dropout=0.25, vocab_size=64)
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
    layers, heads, width, *_, min_lr = PAPER[name]
    run = parse(name)
    sizes, training = run.model, run.training
    assert (sizes.n_layer, sizes.n_head, sizes.n_embd, sizes.block_size) == (layers, heads, width, 1024)
    assert (sizes.vocab_size, sizes.bias, sizes.dropout) == (50304, False, 0.0)
    assert sizes.scale_attn_by_inverse_layer_idx and sizes.activation_function == "gelu_new"
    assert (training.max_steps, training.warmup_steps) == (100_000, 2000)
    assert training.lr_scheduler_kwargs == {"min_lr": min_lr}
    assert run.data.data_dir == ("data/fineweb-edu" if name == "gpt2-xl" else "data/openwebtext")
    batch, accumulation = OFFICIAL_BATCH[name]
    assert batch * accumulation * 8 * 1024 == training.tokens_per_step == 491_520
    eight = SimpleNamespace(train_batch_size=training.train_batch_size, world_size=8)
    eight.gradient_accumulation_steps = training.gradient_accumulation_steps
    assert run._replace(training=eight).count_tokens() == 491_520


@pytest.mark.parametrize("optimizer", arguments.OPTIMIZERS)
@pytest.mark.parametrize("name", PAPER)
def test_groups_of_every_optimizer(name, optimizer):
    """Rates, decays and first betas; thresholds and eps are the official ones of summed gradients."""
    lr, lr_1d, adamw_lr = PAPER[name][3:6]
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


@pytest.mark.parametrize("name", PAPER)
def test_exact_form_and_sections(name):
    """The exact form has the approximate one's settings; every optimizer's section says whether it is published."""
    approx, exact = (made(parse(name, *argv)).param_groups for argv in ([], ["--is_approx", "false"]))
    for one, other in zip(approx, exact, strict=True):
        assert {key for key in one if key != "params" and one[key] != other[key]} == {"is_approx"}
    lines = (arguments.CONFIGS / f"{name}.yaml").read_text().splitlines()
    comment, sections = [], {}
    for line in lines[lines.index("optimizers:") + 1 :]:
        if line.startswith("  #"):
            comment.append(line.strip(" #"))
        elif not line.startswith("   "):
            sections[line.strip().rstrip(":")], comment = " ".join(comment), []
    assert set(sections) == set(arguments.OPTIMIZERS)
    for optimizer, text in sections.items():
        assert text.startswith("Not published" if optimizer in NOT_PUBLISHED else "Published"), optimizer


@pytest.mark.parametrize("optimizer", arguments.OPTIMIZERS)
def test_schedule(optimizer):
    """It starts at 0, peaks after 2,000 steps, and ends at min_lr."""
    run = parse("gpt2-small", "--optimizer", optimizer)
    training, peak = run.training, run.training.learning_rate
    scheduler = get_scheduler(
        training.lr_scheduler_type, made(run), 2000, 100_000, scheduler_specific_kwargs=training.lr_scheduler_kwargs
    )
    for step, rate in ((0, 0.0), (1000, peak / 2), (2000, peak), (100_000, 3e-5)):
        assert scheduler.lr_lambdas[0](step) * peak == pytest.approx(rate, rel=1e-6)


def test_original_muon_scales_by_the_true_shape_and_decays_by_the_rate_alone():
    """Conv1D stores (in, out): a wide layer out of 8 into 32 is doubled, a narrow one out of 32 into 8 is not."""
    moves, decays = {}, {}
    start = gpt2(n_layer=1).state_dict()
    for scale in ("original", "match_rms_adamw"):
        for moved, decay in ((moves, "0"), (decays, "0.5")):
            network = gpt2(n_layer=1)
            argv = ["--optimizer", "muon", "--adjust_lr_fn", scale, "--weight_decay", decay, "--learning_rate", "0.1"]
            optimizer = made(arguments.parse(argv), network)
            for param in network.parameters():
                gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
                param.grad = gradient if decay == "0" else torch.zeros_like(param)
            optimizer.step()
            moved[scale] = {name: param.detach() - start[name] for name, param in network.named_parameters()}
    for name, outputs, inputs in (
        ("attn.c_attn", 24, 8),
        ("attn.c_proj", 8, 8),
        ("mlp.c_fc", 32, 8),
        ("mlp.c_proj", 8, 32),
    ):
        name = f"transformer.h.0.{name}.weight"
        expected = max(1, outputs / inputs) ** 0.5 / (0.2 * max(outputs, inputs) ** 0.5)
        ratio = moves["original"][name] / moves["match_rms_adamw"][name]
        assert ratio.median() == pytest.approx(expected, rel=1e-4), name
        for moved in decays.values():
            torch.testing.assert_close(moved[name], -0.05 * start[name])


@pytest.mark.parametrize("name", PAPER)
def test_hours_and_memory_of_the_docs_are_those_of_the_formulas(name):
    """FLOPs of 100,000 steps at 30 % of 8 GPUs' peak: 312 TFLOP/s of an A100, 989 of an H100.

    26 bytes a parameter, 88 x width for each token and layer, 14 for each logit; exact MARS 4 a parameter more.
    """
    rows = [line.split("|") for line in (ROOT / "docs" / "pretraining.md").read_text().splitlines()]
    rows = [[cell.strip(" `") for cell in row[1:-1]] for row in rows]
    run = parse(name)
    sizes, training = run.model, run.training
    with torch.device("meta"):
        parameters = model.build(sizes, 1, 0).num_parameters(only_trainable=True)
    flops = (6 * parameters + 12 * sizes.n_layer * sizes.n_embd * 1024) * training.tokens_per_step * training.max_steps
    hours = [f"{round(flops / (8 * peak * 0.30) / 3600)}" for peak in (312e12, 989e12)]
    shown = [row[-2:] for row in rows if len(row) > 3 and row[0] == name]
    assert shown and all(row == hours for row in shown)

    batch = training.per_device_train_batch_size
    parts = [26 * parameters, 88 * sizes.n_embd * sizes.n_layer * batch * 1024, 14 * sizes.vocab_size * batch * 1024]
    numbers = [*parts, sum(parts), sum(parts) + 4 * parameters]
    state, active, logits, whole, exact = cells = [f"{number / 1e9:.0f}" for number in numbers]
    (row,) = (row[1:] for row in rows if len(row) == 7 and row[0] == name.removeprefix("gpt2-"))
    assert row == [f"{batch} × {training.gradient_accumulation_steps}", *(f"{cell} GB" for cell in cells)]
    assert numbers[-1] < 72e9  # 80 GB with room for fragments and workspaces
    comment = " ".join((arguments.CONFIGS / f"{name}.yaml").read_text().replace("\n#", "").split())
    assert f"{state} GB of weights, gradients and states, {active} GB of activations, {logits} GB of logits" in comment
    assert f"{whole} of 80 GB, with exact MARS {exact}." in comment


# --- summed gradients ------------------------------------------------------------------------------------------------

STEPS, VOCAB, LENGTH = 4, 31, 6
OFFICIAL = {"max_grad_norm": 1.0, "eps": 1e-8, "clip_threshold": 1.0}
# Relative to how far the weights move. Newton-Schulz divides by the norm + 1e-7 (mars_m), or in bfloat16 (muon),
# which a factor of 12 rounds differently; a factor of 4 does not.
BARS = {("mars_m", 4): 1e-4, ("mars_m", 12): 1e-4, ("muon", 12): 0.1}
EXACT_TO_ROUNDING = 1e-10


class Network(nn.Module):
    """A language model without attention: embeddings, two matrices, and the vectors of a normalization."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCAB, 8), "wpe": nn.Embedding(LENGTH, 8), "ln": nn.LayerNorm(8)}
            | {"wide": nn.Linear(8, 16), "narrow": nn.Linear(16, 8)}
        )
        with torch.no_grad():  # so that the norm of one embedding is most of the global norm, and c is clipped
            for name in ("wide", "narrow"):
                self.transformer[name].weight *= 0.1
        self.double()

    def forward(self, ids):
        parts = self.transformer
        hidden = parts["wte"](ids) + parts["wpe"].weight
        hidden = hidden + parts["narrow"](functional.gelu(parts["wide"](parts["ln"](hidden))))
        logits = hidden[:, :-1] @ parts["wte"].weight.T
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def settings_of(config, optimizer, *argv):
    run = parse(config, "--optimizer", optimizer, *argv)
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    if isinstance(make, MarsFactory):
        return run, (lambda: mars_hf.create, resolve(make.settings, run.training))
    return run, (make, settings)


def train(start, make, settings, max_grad_norm, micro_batches, divide):
    """Train a copy of a model; `divide` is what the loss of each micro-batch is divided by."""
    network = copy.deepcopy(start)
    optimizer = make()(network, **settings)
    params = list(network.parameters())

    def gradients(batches):
        network.zero_grad()
        for ids in batches:
            (network(ids) / divide).backward()
        norm = torch.cat([param.grad.flatten() for param in params]).norm()
        for param in params:
            param.grad *= min(1.0, float(max_grad_norm / norm))  # torch's function adds 1e-6 to the norm
        return norm

    norms = []  # before the clip, in units of it
    for batches in micro_batches:
        if getattr(optimizer, "has_previous_params", False):
            with optimizer.previous_params():
                gradients(batches)
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
        norms.append(float(gradients(batches)) / max_grad_norm)
        optimizer.step()
    return [param.detach() for param in params], norms


def apart(one, other, start):
    """Return the largest distance of two models' weights, relative to how far the first has moved."""
    moved = max(float((a - s).norm()) for a, s in zip(one, start, strict=True))
    return max(float((a - b).norm()) for a, b in zip(one, other, strict=True)) / moved


@pytest.mark.parametrize("config", ["gpt2-small", "gpt2-large"])
@pytest.mark.parametrize(
    "optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_adamw exact", "mars_lion", "mars_shampoo", "mars_m"]
)
def test_averaged_gradients_under_the_configs_end_where_summed_ones_do(config, optimizer):
    name, _, exact = optimizer.partition(" ")
    argv = ["--is_approx", "false"] if exact else []
    # The official iteration is bfloat16, whose rounding would hide a difference.
    argv += ["--ns_dtype", "float64"] if name in ("mars_shampoo", "mars_m") else []
    run, (make, averaged) = settings_of(config, name, *argv)
    summed_over = run.training.gradient_accumulation_steps
    assert summed_over == {"gpt2-small": 4, "gpt2-large": 12}[config]
    summed = {key: OFFICIAL.get(key, value) for key, value in averaged.items()}
    assert summed["eps"] != averaged["eps"]

    start = Network()
    ids = torch.randint(0, VOCAB, (STEPS, summed_over, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    first = [param.detach().clone() for param in start.parameters()]
    ours, norms = train(start, make, averaged, run.training.max_grad_norm, ids, divide=summed_over)
    official, same_norms = train(start, make, summed, 1.0, ids, divide=1)
    assert min(norms) > 1  # every gradient is clipped
    assert norms == pytest.approx(same_norms, rel=1e-3)
    assert apart(ours, official, first) < BARS.get((name, summed_over), EXACT_TO_ROUNDING)
    if name in ("mars_adamw", "mars_lion"):  # with a threshold that is not divided, fewer gradients are clipped
        unscaled, _ = train(
            start, make, averaged | {"clip_threshold": 1.0}, run.training.max_grad_norm, ids, summed_over
        )
        assert apart(ours, unscaled, first) > 1e-3


class Official:
    """The official MARS-AdamW of a model: the rule on matrices and embeddings, AdamW on vectors."""

    def __init__(self, network, lr, lr_1d):
        self.lr, self.lr_1d, self.t = lr, lr_1d, 0
        self.rules, self.vectors = [], []
        for name, param in network.named_parameters():
            if not param.requires_grad:
                continue
            if param.ndim == 2:
                decay = 0.0 if ".wte." in name or ".wpe." in name else 1e-2
                self.rules.append((param, MarsReference(param.data, "mars-adamw", 0.0, weight_decay=decay)))
            else:
                self.vectors.append((param, torch.zeros_like(param), torch.zeros_like(param)))

    @torch.no_grad()
    def step(self, factor):
        self.t += 1
        for param, rule in self.rules:
            rule.lr = self.lr * factor
            rule.step(param.grad.clone())
        for param, m, v in self.vectors:
            m.mul_(0.9).add_(param.grad, alpha=0.1)
            v.mul_(0.95).add_(param.grad**2, alpha=0.05)
            direction = (m / (1 - 0.9**self.t)) / ((v / (1 - 0.95**self.t)).sqrt() + 1e-8)
            param -= self.lr_1d * factor * (direction + 0.1 * param)


def official_rate(step, lr, min_lr, warmup, steps):
    """Return the official learning rate of a step, from 0 on."""
    if step < warmup:
        return lr * step / warmup
    share = (step - warmup) / (steps - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (lr - min_lr)


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
    optimizer = Official(network, lr=6e-3, lr_1d=3e-3)
    batches = iter(recorded["batches"])
    for step in range(steps):
        network.zero_grad()
        for _ in range(accumulation):
            network(**next(batches)).loss.backward()  # a sum, not a mean
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step(official_rate(step, 6e-3, 3e-5, warmup, steps) / 6e-3)
    trained = [param.detach() for param in recorded["trained"].parameters()]
    # torch's global clip adds 1e-6 to the norm, which is four times larger here.
    assert apart([param.detach() for param in network.parameters()], trained, first) < 1e-6
