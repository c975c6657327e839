"""Settings of the recipe: YAML, sections per optimizer, command line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import gpt2, refused
from pretraining.run import arguments, optimizers
from pretraining.run.errors import one_line_errors

import mars_hf


def parse(tmp_path, *argv):
    return arguments.parse([*argv, "--output_dir", str(tmp_path / "out")])


def test_the_default_is_the_embedded_job():
    run = arguments.parse([])
    assert run.config.name == "embedded.yaml"
    assert run.optimizer.optimizer == "mars_m"
    assert run.training.output_dir == "runs/embedded-mars_m"
    assert arguments.parse(["--optimizer", "adamw"]).training.output_dir == "runs/embedded-adamw"


def test_exact_runs_go_to_a_folder_of_their_own(tmp_path):
    assert arguments.parse(["--is_approx", "false"]).training.output_dir == "runs/embedded-mars_m-exact"
    assert arguments.parse(["--is_approx", "true"]).training.output_dir == "runs/embedded-mars_m"
    config = tmp_path / "mine.yaml"
    config.write_text("max_steps: 9\nuse_cpu: true\noptimizers: {mars_lion: {is_approx: false}}\n")
    argv = ["--config", str(config), "--optimizer", "mars_lion"]
    assert arguments.parse(argv).training.output_dir == "runs/mine-mars_lion-exact"
    assert arguments.parse([*argv, "--is_approx", "true"]).training.output_dir == "runs/mine-mars_lion"


def test_every_shipped_config_is_known():
    assert {path.stem for path in arguments.CONFIGS.glob("*.yaml")} == {
        "embedded",
        "llama",
        *(f"gpt2-{size}" for size in ("small", "medium", "large", "xl")),
    }


def test_command_line_overrides_config_and_section(tmp_path):
    run = parse(tmp_path, "--learning_rate", "0.5", "--n_layer", "1", "--gamma", "0.1")
    assert (run.training.learning_rate, run.model.n_layer, run.optimizer.gamma) == (0.5, 1, 0.1)


def test_a_config_of_ones_own(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text(
        "n_layer: 3\nmax_steps: 9\nlearning_rate: 1e-3\noptimizer: adamw\nuse_cpu: true\n"
        "optimizers: {adamw: {beta1: 0.8}}\n"
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
    argv = ["--optimizer", "adamw", "--param_rules", '[["*.wte.weight", {"weight_decay": 0}]]', "--beta1", "0.8"]
    make, settings = optimizers.for_trainer(*_settings(tmp_path, *argv))
    adamw = make()(model, **settings)
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"][0] == 0.8
    decayed = {id(p) for group in adamw.param_groups if group["weight_decay"] for p in group["params"]}
    for name, param in model.named_parameters():
        assert (id(param) in decayed) == (param.ndim == 2 and "wte" not in name)


@pytest.mark.parametrize(("name", "value"), [("gamma", "0.1"), ("is_approx", "false")])
def test_settings_of_mars_are_refused_for_adamw(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"adamw has no {name}"):
        parse(tmp_path, "--optimizer", "adamw", f"--{name}", value)


@pytest.mark.parametrize("optimizer", ["mars_shampoo", "mars_m"])
def test_settings_of_newton_schulz_reach_the_optimizer(tmp_path, optimizer):
    argv = ["--ns_steps", "3", "--ns_coefficients", "quintic", "--split_fused", "none", "--lr_embeddings", "0.5"]
    make, settings = optimizers.for_trainer(*_settings(tmp_path, "--optimizer", optimizer, *argv))
    groups = make()(gpt2(), **settings).param_groups
    assert {group["mars_type"] for group in groups} == {optimizer.replace("_", "-")}
    assert {(group["ns_steps"], group["ns_coefficients"]) for group in groups} == {(3, "quintic")}
    assert all(group["layout"]["parts"] is None for group in groups if group["role"] == "matrix")
    embeddings = [group for group in groups if group["role"] == "adamw"]
    assert embeddings and embeddings[0]["lr"] == 0.5
    config = tmp_path / "own.yaml"  # without a rate of embeddings
    config.write_text(f"max_steps: 9\nuse_cpu: true\noptimizer: {optimizer}\nlearning_rate: 0.01\nlr_1d: 0.02\n")
    make, _ = optimizers.for_trainer(*_settings(tmp_path, "--config", str(config)))
    groups = make()(gpt2()).param_groups
    assert {group["lr"] for group in groups if group["role"] == "adamw"} == {make.settings["lr_1d"]} == {0.02}
    argv = ["--optimizer", optimizer, "--param_rules", '[["*.w[tp]e.weight", {"role": "matrix"}]]']
    make, settings = optimizers.for_trainer(*_settings(tmp_path, *argv))
    groups = make()(gpt2(), **settings).param_groups
    assert {group["role"] for group in groups} == {"matrix", "vector"}
    assert any(group["layout"]["parts"] for group in groups if group["role"] == "matrix")


@pytest.mark.parametrize("optimizer", ["mars_adamw", "mars_lion"])
def test_settings_of_newton_schulz_are_refused_where_nothing_is_orthogonalized(tmp_path, optimizer):
    with pytest.raises(ValueError, match=f"{optimizer} has no ns_steps; it takes "):
        parse(tmp_path, "--optimizer", optimizer, "--ns_steps", "3")


def _settings(tmp_path, *argv):
    run = parse(tmp_path, *argv)
    return run.optimizer, run.training


def test_nonfinite_patience(tmp_path):
    assert parse(tmp_path).training.nonfinite_patience == 3
    assert parse(tmp_path, "--nonfinite_patience", "5").training.nonfinite_patience == 5


def test_the_llama_config(tmp_path):
    run = parse(tmp_path, "--config", "llama", "--model_type", "phi3")
    sizes = run.model
    assert (sizes.model_type, sizes.n_head, sizes.n_kv_head, sizes.n_inner) == ("phi3", 4, 2, 352)
    assert (run.optimizer.optimizer, run.training.learning_rate, run.optimizer.lr_1d) == ("mars_m", 1.6e-2, 3.2e-2)


def test_numbers_of_a_config_in_any_form(tmp_path):
    """YAML 1.1 takes 3e-5 for a word, in a mapping too."""
    config = tmp_path / "mine.yaml"
    config.write_text(
        "learning_rate: 1e-3\nuse_cpu: true\nmax_steps: 9\nmax_eval_blocks: null\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 3e-5}\n"
        "param_rules: [{pattern: '*.wte.weight', lr: 2e-3}]\n"
    )
    run = parse(tmp_path, "--config", str(config))
    assert run.training.learning_rate == 1e-3 and run.training.lr_scheduler_kwargs == {"min_lr": 3e-5}
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    (group,) = (group for group in make()(gpt2(), **settings).param_groups if "pattern" in group)
    assert group["lr"] == 2e-3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            "--config gpt2-tiny",
            r"--config 'gpt2-tiny': no such file, and not one of .* \(embedded, gpt2-",
        ),
        ("--optimizer sgd", "optimizer 'sgd' is unknown; accepted: mars_adamw, mars_lion"),
        ("--optim adafactor", "--optim and --optim_args would be ignored; give --optimizer"),
        ("--optim_args gamma=1", "would be ignored"),
        ("--max_steps -1", "--max_steps -1: the recipe does not count epochs; give a number of steps"),
        ("--metric_for_best_model accuracy", "--metric_for_best_model accuracy: accepted: loss"),
        (f"--max_steps {10**400}", "give a number below 2"),
        ("--lr_scheduler_kwargs 3", "must be a mapping.*; give --lr_scheduler_kwargs"),
        ("--lr_scheduler_type linear", "min_lr_rate.*; give --lr_scheduler_kwargs"),
    ],
)
def test_wrong_settings(tmp_path, argv, words):
    with pytest.raises(ValueError, match=words):
        parse(tmp_path, *argv.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_paper_config_names_all_flags_that_it_needs_on_cpu(tmp_path):
    flags = "--use_cpu true --tf32 false.* --data_dir .* --gradient_accumulation_steps 32, or --tokens_per_step 0"
    with pytest.raises(ValueError, match=rf"gpt2-small.yaml: tf32 needs an NVIDIA GPU.*; give {flags}"):
        parse(tmp_path, "--config", "gpt2-small")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_layers: 3", "mine.yaml: error: unrecognized arguments: --n_layers=3"),
        ("n_layer: 2.5", "mine.yaml: error: argument --n_layer/--n-layer: invalid int value: '2.5'"),
        ("bias: 7", "mine.yaml: error: argument --bias"),
    ],
)
def test_argparse_names_the_config(tmp_path, text, words, capsys):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        parse(tmp_path, "--config", str(tmp_path / "mine.yaml"))
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "- 3", "a: [", "optimizers: {sgd: {}}"])
def test_configs_that_are_none(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    main = one_line_errors("pretrain_gpt2.py")(parse)
    with refused("mine.yaml (holds no settings|is not YAML)|optimizer 'sgd' is unknown"):
        main(tmp_path, "--config", str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("batch", "accumulation", "devices", "block", "remedy"),
    [
        (15, 2, 16, 1024, None),
        (3, 5, 7, 1024, "give another --block_size or number of devices, whose product divides 491,520, or"),
        (15, 4, 4, 1024, "give --per_device_train_batch_size 15 --gradient_accumulation_steps 8, or"),
        (15, 4, 3, 1024, "give --per_device_train_batch_size 10 --gradient_accumulation_steps 16, or"),
        (15, 4, 8, 1000, "give another --block_size or number of devices, whose product divides 491,520, or"),
    ],
)
def test_tokens_per_step(batch, accumulation, devices, block, remedy):
    training = SimpleNamespace(
        train_batch_size=batch,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        world_size=devices,
        n_gpu=1,
        tokens_per_step=491_520,
    )
    run = arguments.RunArguments(arguments.ModelArguments(block_size=block), None, None, training, None)
    assert run.count_tokens() == batch * accumulation * devices * block
    if remedy is None:
        return run.check_tokens()
    with pytest.raises(ValueError, match=f"tokens_per_step is 491,520; {remedy} --tokens_per_step 0 for any"):
        run.check_tokens()
    training.tokens_per_step = 0
    run.check_tokens()
