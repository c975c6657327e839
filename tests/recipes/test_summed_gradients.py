"""The official trainer sums gradients over its accumulation steps; Trainer averages them. The configs make up for it.

A sum over A micro-batches is A times their mean. A threshold of norms and eps divided by A then give the same weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pretrain_gpt2
import pytest
import torch
from pretraining.run import arguments, model, optimizers
from torch import nn
from torch.nn import functional
from transformers import default_data_collator

import mars_hf
from mars_hf.reference import MarsReference
from mars_hf.training.registry import MarsFactory, resolve

ON_CPU = ["--bf16", "false", "--tf32", "false", "--use_cpu", "true"]
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
    run = arguments.parse(["--config", config, "--optimizer", optimizer, *ON_CPU, *argv, "--output_dir", "unused"])
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
