"""The configs gpt2-*.yaml hold the published settings, and say where there are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import gpt2
from pretraining.run import arguments, model, optimizers
from pretraining.run.torch_optimizers import MuonWithAdamW
from transformers import get_scheduler

ROOT = Path(__file__).resolve().parents[2]
# Settings that need a GPU.
ON_CPU = ["--bf16", "false", "--tf32", "false", "--use_cpu", "true"]
PAPER = {  # PAPER.md 3.2: layers, heads, width; lr and lr_1d of MARS; lr of AdamW; min_lr
    "gpt2-small": (12, 12, 768, 6e-3, 3e-3, 6e-4, 3e-5),
    "gpt2-medium": (24, 16, 1024, 3e-3, 1.5e-3, 3e-4, 6e-5),
    "gpt2-large": (36, 20, 1280, 2e-3, 1e-3, 2e-4, 1e-5),
    "gpt2-xl": (48, 25, 1600, 2e-3, 1e-3, 2e-4, 1e-5),
}
# PAPER.md 3.1: micro-batch and accumulation on 8 GPUs.
OFFICIAL_BATCH = {"gpt2-small": (15, 4), "gpt2-medium": (15, 4), "gpt2-large": (5, 12), "gpt2-xl": (5, 12)}
# PAPER.md 3.2: lr and lr_1d of Muon, lr of MARS-M.
ORTHOGONAL = {
    "gpt2-small": (2e-2, 3e-3, 6e-3),
    "gpt2-medium": (1e-2, 1.5e-3, 5e-3),
    "gpt2-large": (6.67e-3, 1e-3, 5e-3),
    "gpt2-xl": (6.67e-3, 1e-3, 3e-3),
}
NOT_PUBLISHED = ("mars_lion", "mars_shampoo", "nadamw")


def parse(tmp_path, name, *argv):
    return arguments.parse(["--config", name, *ON_CPU, *argv, "--output_dir", str(tmp_path / "out")])


def made(run):
    """Return a small model's optimizer under the run's settings."""
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    return make()(gpt2(), **settings)


def groups_of(run):
    """Return a small model's groups, one per set of settings other than the layout."""
    groups = made(run).param_groups
    return list({(group["role"], group["lr"], group["weight_decay"]): group for group in groups}.values())


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_every_optimizer(tmp_path, name):
    layers, heads, width, lr, lr_1d, adamw_lr, min_lr = PAPER[name]
    run = parse(tmp_path, name)
    sizes, training = run.model, run.training
    assert (sizes.n_layer, sizes.n_head, sizes.n_embd, sizes.block_size) == (layers, heads, width, 1024)
    assert (sizes.vocab_size, sizes.bias, sizes.dropout) == (50304, False, 0.0)
    assert sizes.scale_attn_by_inverse_layer_idx and sizes.activation_function == "gelu_new"
    assert (training.max_steps, training.warmup_steps) == (100_000, 2000)
    assert (training.learning_rate, run.optimizer.lr_1d) == (lr, lr_1d)
    assert (training.weight_decay, run.optimizer.weight_decay_1d) == (1e-2, 0.1)
    assert training.lr_scheduler_kwargs == {"min_lr": min_lr}
    assert run.data.data_dir == ("data/fineweb-edu" if name == "gpt2-xl" else "data/openwebtext")
    for optimizer in ("adamw", "nadamw"):
        adam = parse(tmp_path, name, "--optimizer", optimizer)
        assert (adam.training.learning_rate, adam.training.weight_decay) == (adamw_lr, 0.1)
        assert (adam.optimizer.beta1, adam.optimizer.beta2) == (0.9, 0.95)


@pytest.mark.parametrize("name", PAPER)
def test_the_batch_is_the_papers_on_8_gpus(tmp_path, name):
    """Thresholds and eps are the official ones of summed gradients, see test_summed_gradients.py."""
    run = parse(tmp_path, name)
    training = run.training
    batch, accumulation = OFFICIAL_BATCH[name]
    assert batch * accumulation * 8 * 1024 == training.tokens_per_step == 491_520
    assert training.max_grad_norm == pytest.approx(1 / accumulation, rel=1e-15)
    assert run.optimizer.eps == pytest.approx(1e-8 / accumulation, rel=1e-15)
    for optimizer in ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m"):
        other = parse(tmp_path, name, "--optimizer", optimizer)
        assert (other.optimizer.clip_threshold, other.optimizer.eps) == (training.max_grad_norm, run.optimizer.eps)
    eight = SimpleNamespace(**{key: getattr(training, key) for key in ("train_batch_size", "tokens_per_step")})
    eight.gradient_accumulation_steps, eight.world_size = training.gradient_accumulation_steps, 8
    assert run._replace(training=eight).count_tokens() == training.tokens_per_step


@pytest.mark.parametrize("name", PAPER)
def test_every_optimizer_has_a_section_that_says_whether_it_is_published(name):
    lines = (arguments.CONFIGS / f"{name}.yaml").read_text().splitlines()
    start = lines.index("optimizers:") + 1
    comment, sections = [], {}
    for line in lines[start:]:
        if line.startswith("  #"):
            comment.append(line.strip(" #"))
        elif not line.startswith("   "):
            sections[line.strip().rstrip(":")] = " ".join(comment)
            comment = []
    assert set(sections) == set(arguments.OPTIMIZERS)
    for optimizer, text in sections.items():
        assert text.startswith("Not published" if optimizer in NOT_PUBLISHED else "Published"), optimizer


@pytest.mark.parametrize("name", PAPER)
def test_the_exact_form_has_the_settings_of_the_approximate_one(tmp_path, name):
    (approx, exact) = (groups_of(parse(tmp_path, name, *argv)) for argv in ([], ["--is_approx", "false"]))
    for one, other in zip(approx, exact, strict=True):
        assert {key for key in one if key != "params" and one[key] != other[key]} == {"is_approx"}


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_mars_shampoo_has_the_rates_of_muon(tmp_path, name):
    lr, lr_1d, _ = ORTHOGONAL[name]
    run = parse(tmp_path, name, "--optimizer", "mars_shampoo")
    assert (run.training.learning_rate, run.optimizer.lr_1d) == (lr, lr_1d)
    matrix, vector, embedding = groups_of(run)
    assert (matrix["lr"], matrix["weight_decay"], matrix["betas"][0]) == (lr, 0, 0.95)
    assert (embedding["lr"], embedding["weight_decay"]) == (lr_1d, 0)
    assert (vector["lr"], vector["weight_decay"]) == (lr_1d, 0.1)


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_mars_m_has_one_rate_and_one_decay(tmp_path, name):
    groups = groups_of(parse(tmp_path, name, "--optimizer", "mars_m"))
    assert [group["role"] for group in groups] == ["matrix", "adamw", "vector"]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(ORTHOGONAL[name][2], 1e-2)}
    assert groups[0]["betas"][0] == 0.95 and groups[1]["betas"] == (0.9, 0.95)
    assert groups[0]["layout"]["parts"] is None  # query, key and value stay one matrix


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_muon_orthogonalizes_everything_but_vectors(tmp_path, name):
    lr, lr_1d, _ = ORTHOGONAL[name]
    run = parse(tmp_path, name, "--optimizer", "muon")
    optimizer = made(run)
    assert isinstance(optimizer, MuonWithAdamW)
    for group in optimizer.param_groups:
        if all(param.ndim == 2 for param in group["params"]):
            assert (group["role"], group["lr"], group["weight_decay"]) == ("matrix", lr, 0)
            assert (group["momentum"], group["nesterov"], group["adjust_lr_fn"]) == (0.95, True, "original")
        else:
            assert (group["role"], group["lr"], group["weight_decay"]) == ("vector", lr_1d, 0.1)
            assert group["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("optimizer", arguments.OPTIMIZERS)
def test_every_optimizer_takes_the_schedule(tmp_path, optimizer):
    """It starts at 0, peaks after 2,000 steps, and ends at min_lr."""
    run = parse(tmp_path, "gpt2-small", "--optimizer", optimizer)
    training, made_here = run.training, made(run)
    scheduler = get_scheduler(
        training.lr_scheduler_type, made_here, 2000, 100_000, scheduler_specific_kwargs=training.lr_scheduler_kwargs
    )
    peak = training.learning_rate
    for step, rate in ((0, 0.0), (1000, peak / 2), (2000, peak), (100_000, 3e-5)):
        assert scheduler.lr_lambdas[0](step) * peak == pytest.approx(rate, rel=1e-6)


def test_original_muon_scales_by_the_true_shape():
    """Conv1D stores (in, out): a wide layer out of 8 into 32 is doubled, a narrow one out of 32 into 8 is not."""
    start = gpt2(n_layer=1).state_dict()
    moves = {}
    for scale in ("original", "match_rms_adamw"):
        network = gpt2(n_layer=1)
        run = arguments.parse(["--optimizer", "muon", "--adjust_lr_fn", scale, "--weight_decay", "0"])
        make, settings = optimizers.for_trainer(run.optimizer, run.training)
        optimizer = make()(network, **settings)
        for param in network.parameters():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        moves[scale] = {name: param.detach() - start[name] for name, param in network.named_parameters()}
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


def test_original_muon_decays_by_the_rate_alone():
    for scale in ("original", "match_rms_adamw"):
        network = gpt2(n_layer=1)
        start = {name: param.detach().clone() for name, param in network.named_parameters()}
        argv = ["--adjust_lr_fn", scale, "--weight_decay", "0.5", "--learning_rate", "0.1"]
        run = arguments.parse(["--optimizer", "muon", *argv])
        make, settings = optimizers.for_trainer(run.optimizer, run.training)
        optimizer = make()(network, **settings)
        for param in network.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        for name, param in network.named_parameters():
            if ".mlp.c_fc.weight" in name or ".attn.c_attn.weight" in name:
                torch.testing.assert_close(param.detach(), 0.95 * start[name])


def test_the_hours_of_the_docs_are_those_of_the_formula(tmp_path):
    """FLOPs of 100,000 steps at 30 % of 8 GPUs' peak: 312 TFLOP/s of an A100, 989 of an H100."""
    rows = [line.split("|") for line in (ROOT / "docs" / "pretraining.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) > 5 and row[1].startswith(" `gpt2-")]
    assert {row[1].strip("`") for row in rows} == set(PAPER)
    for row in rows:
        run = parse(tmp_path, row[1].strip("`"))
        sizes = run.model
        with torch.device("meta"):
            parameters = model.build(sizes, 1, 0).num_parameters(only_trainable=True)
        flops = 6 * parameters + 12 * sizes.n_layer * sizes.n_embd * sizes.block_size
        flops *= run.training.tokens_per_step * run.training.max_steps
        hours = [round(flops / (8 * peak * 0.30) / 3600) for peak in (312e12, 989e12)]
        assert [int(cell) for cell in row[-3:-1]] == hours


def test_the_memory_of_the_docs_and_configs_is_that_of_the_formula(tmp_path):
    """26 bytes a parameter, 88 x width for each token and layer, 14 for each logit; exact MARS 4 a parameter more."""
    rows = [line.split("|") for line in (ROOT / "docs" / "pretraining.md").read_text().splitlines() if " × " in line]
    rows = {row[1].strip(" `"): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) == 9}
    for name in PAPER:
        run = parse(tmp_path, name)
        sizes, training = run.model, run.training
        batch = training.per_device_train_batch_size
        with torch.device("meta"):
            parameters = model.build(sizes, 1, 0).num_parameters(only_trainable=True)
        tokens = batch * sizes.block_size
        parts = [26 * parameters, 88 * sizes.n_embd * sizes.n_layer * tokens, 14 * sizes.vocab_size * tokens]
        numbers = [*parts, sum(parts), sum(parts) + 4 * parameters]
        batch_cell, *cells = rows[name.removeprefix("gpt2-")]
        assert batch_cell == f"{batch} × {training.gradient_accumulation_steps}"
        assert cells == [f"{number / 1e9:.0f} GB" for number in numbers]
        assert numbers[-1] < 72e9  # 80 GB with room for fragments and workspaces
        comment = " ".join((arguments.CONFIGS / f"{name}.yaml").read_text().replace("\n#", "").split())
        state, active, logits, whole, exact = (cell.removesuffix(" GB") for cell in cells)
        assert (
            f"{state} GB of weights, gradients and states, {active} GB of activations, {logits} GB of logits" in comment
        )
        assert f"{whole} of 80 GB, with exact MARS {exact}." in comment
