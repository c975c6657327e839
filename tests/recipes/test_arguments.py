"""Settings of the recipe: YAML, sections per optimizer, command line."""

from __future__ import annotations

import pytest
import torch
from helpers import gpt2
from pretraining import arguments, optimizers
from pretraining.mistakes import Mistake

import mars_hf

# Settings that need a GPU.
ON_CPU = ["--bf16", "false", "--tf32", "false", "--use_cpu", "true"]
PAPER = {  # PAPER.md 3.2: layers, heads, width, micro-batch, accumulation; lr and lr_1d of MARS; lr of AdamW; min_lr
    "gpt2-small": (12, 12, 768, 15, 4, 6e-3, 3e-3, 6e-4, 3e-5),
    "gpt2-medium": (24, 16, 1024, 15, 4, 3e-3, 1.5e-3, 3e-4, 6e-5),
    "gpt2-large": (36, 20, 1280, 5, 12, 2e-3, 1e-3, 2e-4, 1e-5),
    "gpt2-xl": (48, 25, 1600, 5, 12, 2e-3, 1e-3, 2e-4, 1e-5),
}
# PAPER.md 3.2: lr and lr_1d of Muon, lr of MARS-M.
ORTHOGONAL = {
    "gpt2-small": (2e-2, 3e-3, 6e-3),
    "gpt2-medium": (1e-2, 1.5e-3, 5e-3),
    "gpt2-large": (6.67e-3, 1e-3, 5e-3),
    "gpt2-xl": (6.67e-3, 1e-3, 3e-3),
}


def parse(tmp_path, *argv):
    return arguments.parse([*argv, "--output_dir", str(tmp_path / "out")])


def test_the_default_is_the_embedded_job():
    run = arguments.parse([])
    assert run.config.name == "embedded.yaml"
    assert run.optimizer.optimizer == "mars_adamw"
    assert run.training.output_dir == "runs/embedded-mars_adamw"
    assert arguments.parse(["--optimizer", "adamw"]).training.output_dir == "runs/embedded-adamw"


def test_exact_runs_go_to_a_folder_of_their_own(tmp_path):
    assert arguments.parse(["--is_approx", "false"]).training.output_dir == "runs/embedded-mars_adamw-exact"
    assert arguments.parse(["--is_approx", "true"]).training.output_dir == "runs/embedded-mars_adamw"
    config = tmp_path / "mine.yaml"
    config.write_text("use_cpu: true\noptimizers: {mars_lion: {is_approx: false}}\n")
    argv = ["--config", str(config), "--optimizer", "mars_lion"]
    assert arguments.parse(argv).training.output_dir == "runs/mine-mars_lion-exact"
    assert arguments.parse([*argv, "--is_approx", "true"]).training.output_dir == "runs/mine-mars_lion"


def test_every_shipped_config_is_known():
    assert {path.stem for path in arguments.CONFIGS.glob("*.yaml")} == {"embedded", *PAPER}


@pytest.mark.parametrize("name", PAPER)
def test_paper_configs_hold_the_published_settings(tmp_path, name):
    layers, heads, width, batch, accumulation, lr, lr_1d, adamw_lr, min_lr = PAPER[name]
    run = parse(tmp_path, "--config", name, *ON_CPU)
    model, training = run.model, run.training
    assert (model.n_layer, model.n_head, model.n_embd, model.block_size) == (layers, heads, width, 1024)
    assert (model.vocab_size, model.bias, model.dropout) == (50304, False, 0.0)
    assert model.scale_attn_by_inverse_layer_idx and model.activation_function == "gelu_new"
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (batch, accumulation)
    assert batch * accumulation * 8 == 480
    assert (training.max_steps, training.warmup_steps) == (100_000, 2000)
    assert (training.learning_rate, run.optimizer.lr_1d) == (lr, lr_1d)
    assert (training.weight_decay, run.optimizer.weight_decay_1d) == (1e-2, 0.1)
    assert training.lr_scheduler_kwargs == {"min_lr": min_lr}
    # Trainer averages over accumulation steps, the official trainer sums: thresholds and eps shrink by their number.
    assert training.max_grad_norm == pytest.approx(1 / accumulation, rel=1e-4)
    assert run.optimizer.clip_threshold == pytest.approx(1 / accumulation, rel=1e-4)
    assert run.optimizer.eps == pytest.approx(1e-8 / accumulation, rel=1e-3)
    adamw = parse(tmp_path, "--config", name, "--optimizer", "adamw", *ON_CPU)
    assert (adamw.training.learning_rate, adamw.training.weight_decay) == (adamw_lr, 0.1)
    assert (adamw.optimizer.beta1, adamw.optimizer.beta2) == (0.9, 0.95)


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_paper_configs_of_mars_shampoo_are_those_of_muon(tmp_path, name):
    lr, lr_1d, _ = ORTHOGONAL[name]
    run = parse(tmp_path, "--config", name, "--optimizer", "mars_shampoo", *ON_CPU)
    assert (run.training.learning_rate, run.optimizer.lr_1d) == (lr, lr_1d)
    matrix, embedding, vector = _groups(run)
    assert (matrix["lr"], matrix["weight_decay"], matrix["betas"][0]) == (lr, 0, 0.95)
    assert (embedding["lr"], embedding["weight_decay"]) == (lr_1d, 0)
    assert (vector["lr"], vector["weight_decay"]) == (lr_1d, 0.1)
    assert matrix["clip_threshold"] == run.training.max_grad_norm


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_paper_configs_of_mars_m_have_one_rate_and_one_decay(tmp_path, name):
    run = parse(tmp_path, "--config", name, "--optimizer", "mars_m", *ON_CPU)
    groups = _groups(run)
    assert [group["role"] for group in groups] == ["matrix", "embedding", "vector"]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(ORTHOGONAL[name][2], 1e-2)}
    assert groups[0]["betas"][0] == 0.95 and groups[1]["betas"] == (0.9, 0.95)
    assert groups[0]["layout"]["parts"] is None  # query, key and value stay one matrix
    assert groups[0]["clip_threshold"] == run.training.max_grad_norm


def _groups(run):
    """Return a small model's groups under the run's settings, one per set of settings other than the layout."""
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    groups = make()(gpt2(), **settings).param_groups
    return list({(group["role"], group["lr"], group["weight_decay"]): group for group in groups}.values())


def test_command_line_overrides_config_and_section(tmp_path):
    run = parse(tmp_path, "--learning_rate", "0.5", "--n_layer", "1", "--gamma", "0.1")
    assert (run.training.learning_rate, run.model.n_layer, run.optimizer.gamma) == (0.5, 1, 0.1)


def test_a_config_of_ones_own(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text(
        "n_layer: 3\nlearning_rate: 1e-3\noptimizer: adamw\nuse_cpu: true\noptimizers: {adamw: {beta1: 0.8}}\n"
    )
    run = parse(tmp_path, "--config", str(config))
    assert (run.model.n_layer, run.optimizer.optimizer, run.optimizer.beta1) == (3, "adamw", 0.8)
    assert run.training.learning_rate == 1e-3  # a string in YAML 1.1


def test_optimizers_of_a_run(tmp_path):
    model = gpt2()
    make, settings = optimizers.for_trainer(*_settings(tmp_path, "--optimizer", "mars_lion", "--clip_threshold", "0"))
    lion = make()(model, **settings)
    assert isinstance(lion, mars_hf.Mars)
    assert lion.param_groups[0]["mars_type"] == "mars-lion" and lion.param_groups[0]["clip_threshold"] is None
    make, settings = optimizers.for_trainer(*_settings(tmp_path, "--is_approx", "false"))
    assert make()(model, **settings).is_exact
    argv = ["--optimizer", "adamw", "--no_decay", "*.wte.weight", "--beta1", "0.8"]
    make, settings = optimizers.for_trainer(*_settings(tmp_path, *argv))
    adamw = make()(model, **settings)
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"][0] == 0.8
    decayed = {id(p) for group in adamw.param_groups if group["weight_decay"] for p in group["params"]}
    for name, param in model.named_parameters():
        assert (id(param) in decayed) == (param.ndim == 2 and "wte" not in name)


@pytest.mark.parametrize(("name", "value"), [("gamma", "0.1"), ("is_approx", "false")])
def test_settings_of_mars_are_refused_for_adamw(tmp_path, name, value):
    with pytest.raises(Mistake, match=f"adamw has no {name}"):
        parse(tmp_path, "--optimizer", "adamw", f"--{name}", value)


@pytest.mark.parametrize("optimizer", ["mars_shampoo", "mars_m"])
def test_settings_of_newton_schulz_reach_the_optimizer(tmp_path, optimizer):
    argv = ["--ns_steps", "3", "--ns_coefficients", "quintic", "--split_fused", "none"]
    make, settings = optimizers.for_trainer(*_settings(tmp_path, "--optimizer", optimizer, *argv))
    groups = make()(gpt2(), **settings).param_groups
    assert {group["mars_type"] for group in groups} == {optimizer.replace("_", "-")}
    assert {(group["ns_steps"], group["ns_coefficients"]) for group in groups} == {(3, "quintic")}
    assert all(group["layout"]["parts"] is None for group in groups if group["role"] == "matrix")
    embeddings = [group for group in groups if group["role"] == "embedding"]
    assert embeddings and embeddings[0]["lr"] == settings["lr_1d"]
    argv = ["--optimizer", optimizer, "--orthogonalize_embeddings", "true"]
    make, settings = optimizers.for_trainer(*_settings(tmp_path, *argv))
    groups = make()(gpt2(), **settings).param_groups
    assert {group["role"] for group in groups} == {"matrix", "vector"}
    assert any(group["layout"]["parts"] for group in groups if group["role"] == "matrix")


@pytest.mark.parametrize("optimizer", ["mars_adamw", "mars_lion"])
def test_settings_of_newton_schulz_are_refused_where_nothing_is_orthogonalized(tmp_path, optimizer):
    with pytest.raises(Mistake, match=f"{optimizer} has no ns_steps, which mars_shampoo and mars_m have"):
        parse(tmp_path, "--optimizer", optimizer, "--ns_steps", "3")


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [("ns_coefficients", "cubic", "'quintic', 'polar-express'"), ("split_fused", "yes", "'auto', 'none'")],
)
def test_unknown_choices_of_mars_m_are_named_with_the_accepted_ones(tmp_path, name, value, accepted):
    with pytest.raises(Mistake, match=f"--{name}: '{value}' is unknown.*{accepted}"):
        parse(tmp_path, "--optimizer", "mars_m", f"--{name}", value)


def _settings(tmp_path, *argv):
    run = parse(tmp_path, *argv)
    return run.optimizer, run.training


def test_what_a_non_finite_value_does(tmp_path):
    training = parse(tmp_path).training
    assert (training.on_nonfinite, training.nonfinite_patience) == ("stop", 3)
    training = parse(tmp_path, "--on_nonfinite", "skip", "--nonfinite_patience", "5").training
    assert (training.on_nonfinite, training.nonfinite_patience) == ("skip", 5)
    with pytest.raises(Mistake, match=r"--on_nonfinite: .*'explode'.*'stop', 'skip', 'ignore'"):
        parse(tmp_path, "--on_nonfinite", "explode")
    with pytest.raises(Mistake, match=r"--nonfinite_patience.*'0' is not a whole number from 1 on"):
        parse(tmp_path, "--nonfinite_patience", "0")
