"""Settings of a run from config, section and command line; the optimizers that they make; errors in one line."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import SimpleNamespace

import helpers
import pretrain_gpt2
import pytest
import torch
from pretraining.run import arguments, optimizers
from pretraining.run.errors import one_line_errors
from pretraining.run.torch_optimizers import GammaSchedule
from transformers import TrainerControl, TrainerState

import mars_hf

# --- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("plain.yaml", "")  # a config without tuned settings


def write(name: str, text: str) -> list[str]:
    Path(name).write_text(f"use_cpu: true\nmax_steps: 9\n{text}")
    return ["--config", name]


def parse(*argv: str) -> arguments.RunArguments:
    return arguments.parse([*argv, "--output_dir", "out"])


def gpt2():
    return helpers.gpt2(vocab_size=11, n_positions=5, n_layer=1)


def make(model, *argv):
    run = parse(*argv)
    factory, settings = optimizers.for_trainer(run.optimizer, run.training)
    return factory()(model, **settings)


def test_output_dir():
    config = write("mine.yaml", "optimizers: {mars_lion: {is_approx: false}}\n")
    for argv, folder in (
        ([], "embedded-mars_m"),
        *((["--optimizer", name], f"embedded-{name}") for name in arguments.OPTIMIZERS),
        (["--config", "llama", "--optimizer", "mars_lion", "--learning-rate=1e-3"], "llama-mars_lion"),
        (["--is_approx", "false"], "embedded-mars_m-exact"),
        ([*config, "--optimizer", "mars_lion"], "mine-mars_lion-exact"),
        ([*config, "--optimizer", "mars_lion", "--is_approx", "true"], "mine-mars_lion"),
    ):
        assert arguments.parse(argv).training.output_dir == f"runs/{folder}"


def test_config_section_and_command_line():
    """In this order; YAML 1.1 takes 1e-3 for a word, in a mapping too."""
    config = write(
        "mine.yaml",
        "n_layer: 3\nlearning_rate: 1e-3\noptimizer: adamw\noptimizers: {adamw: {beta1: 0.8, weight_decay: 0.3}}\n"
        "weight_decay: 0.2\nmax_eval_blocks: null\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs: {min_lr: 3e-5}\nparam_rules: [{pattern: '*.wte.weight', lr: 2e-3}]\n",
    )
    model, _, optimizer, training, _ = parse(*config, "--n_layer", "1", "--beta2", "0.7")
    assert (model.n_layer, optimizer.optimizer, optimizer.beta1, optimizer.beta2) == (1, "adamw", 0.8, 0.7)
    assert (training.learning_rate, training.weight_decay) == (1e-3, 0.3)
    assert training.lr_scheduler_kwargs == {"min_lr": 3e-5}
    (group,) = (group for group in make(gpt2(), *config).param_groups if group["lr"] == 2e-3)
    assert group["param_names"] == ["transformer.wte.weight"]
    model, _, optimizer, training, _ = parse("--config", "llama", "--model_type", "phi3")
    assert (model.model_type, model.n_head, model.n_kv_head, model.n_inner) == ("phi3", 4, 2, 352)
    assert (optimizer.optimizer, training.learning_rate, optimizer.lr_1d) == ("mars_m", 1.6e-2, 3.2e-2)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--config gpt2-tiny", r"--config 'gpt2-tiny': no such file, and not one of .* \(embedded, gpt2-"),
        ("--optimizer sgd", "optimizer 'sgd' is unknown; accepted: mars_adamw, mars_lion"),
        ("--optim adafactor", "--optim and --optim_args would be ignored; give --optimizer"),
        ("--max_steps -1", "--max_steps -1: the recipe does not count epochs; give a number of steps"),
        ("--lr_scheduler_kwargs 3", "must be a mapping.*; give --lr_scheduler_kwargs"),
        ("--lr_scheduler_type linear", "min_lr_rate.*; give --lr_scheduler_kwargs"),
        ("--optimizer adamw --gamma_schedule linear", "adamw has no gamma_schedule"),
        ("--optimizer mars_adamw --ns_steps 3", "mars_adamw has no ns_steps; it takes "),
        ("--optimizer mars_lion --ns_steps 3", "mars_lion has no ns_steps; it takes "),
        ("--optimizer muon --gamma 0.1", "muon has no gamma"),
        ("--optimizer mars_m --clip_threshold 0 --gamma_schedule linear", "keeps no last gradient"),
        ("n_layers: 3", "mine.yaml: error: unrecognized arguments: --n_layers=3"),
        ("n_layer: 2.5", "mine.yaml: error: argument --n_layer/--n-layer: invalid int value: '2.5'"),
        ("- 3", "mine.yaml holds no settings"),
        ("a: [", "mine.yaml is not YAML"),
        ("optimizers: {sgd: {}}", "optimizer 'sgd' is unknown"),
        ("--optimizer=", "optimizer '' is unknown; accepted: mars_adamw"),
        ("optimizer: [mars_m]", r"optimizer \['mars_m'\] is unknown"),
        ("learning_rate: 2020-01-01", "mine.yaml is not YAML of settings: found timestamp; write a number, a word"),
        ("learning_rate: !!set {a, b}", "found set; write a number"),
        ("learning_rate: !!binary aGVsbG8=", "found binary; write a number"),
        ("learning_rate: !!python/object:os.system x", "not YAML of settings: .*python/object"),
        ("learning_rate: [1, 2]", "argument --learning_rate/--learning-rate: invalid float value"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "found an alias; write its value"),
        pytest.param("learning_rate: " + "[" * 2000 + "]" * 2000, "nested too deeply", id="nested"),
        ("--config llama --optimizer mars_lion", "llama.yaml has no settings for mars_lion; give --learning_rate"),
        pytest.param(
            "--config gpt2-small",
            "gpt2-small.yaml: tf32 needs an NVIDIA GPU.*; give --use_cpu true --tf32 false",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU"),
        ),
    ],
)
def test_wrong_settings(setting, words, capsys):
    """On the command line, or in a config; they end a run with one line."""
    Path("mine.yaml").write_text(setting)
    argv = setting.split() if setting.startswith("--") else ["--config", "mine.yaml"]
    with pytest.raises(SystemExit) as end, one_line_errors("pretrain_gpt2.py"):
        make(gpt2(), *argv)
    assert end.value.code == 2 and re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("batch", "accumulation", "devices", "block", "remedy"),
    [
        (15, 2, 16, 1024, None),
        (3, 5, 7, 1024, "another --per_device_train_batch_size"),
        (15, 4, 4, 1024, "--gradient_accumulation_steps 8"),
    ],
)
def test_tokens_per_step(batch, accumulation, devices, block, remedy):
    training = SimpleNamespace(train_batch_size=batch, per_device_train_batch_size=batch, n_gpu=1, world_size=devices)
    training.gradient_accumulation_steps, training.tokens_per_step = accumulation, 491_520
    run = arguments.RunArguments(arguments.ModelArguments(block_size=block), None, None, training, None)
    assert run.count_tokens() == batch * accumulation * devices * block
    if remedy:
        with pytest.raises(ValueError, match=f"is 491,520; give {remedy}, or --tokens_per_step 0 for any"):
            run.check_tokens()
        training.tokens_per_step = 0
    run.check_tokens()


# --- optimizers ------------------------------------------------------------------------------------------------------


def gradients(model):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(param.shape, generator=generator) for param in model.parameters()] for _ in range(4)]


def copies(model):
    return [param.detach().double().clone() for param in model.parameters()]


def train(model, optimizer, steps):
    for step in steps:
        for param, gradient in zip(model.parameters(), step, strict=True):
            param.grad = gradient.to(param.dtype)
        optimizer.step()
    return copies(model)


def of_role(model, optimizer, role):
    ids = {id(param) for group in optimizer.param_groups if group["role"] == role for param in group["params"]}
    return [index for index, param in enumerate(model.parameters()) if id(param) in ids]


@pytest.mark.parametrize("optimizer", arguments.OPTIMIZERS)
def test_every_optimizer_takes_a_rate_for_embeddings(optimizer):
    argv = ("--config", "plain.yaml", "--optimizer", optimizer, "--learning_rate", "0.002", "--lr_embeddings", "0.05")
    rates = {name: group["lr"] for group in make(gpt2(), *argv).param_groups for name in group["param_names"]}
    embeddings = {name for name, rate in rates.items() if rate == 0.05}
    assert embeddings == {"transformer.wte.weight", "transformer.wpe.weight"} and 0.002 in rates.values()


def test_mars_and_adamw():
    group = make(gpt2(), "--optimizer", "mars_lion", "--clip_threshold", "0").param_groups[0]
    assert (group["mars_type"], group["clip_threshold"]) == ("mars-lion", None)
    group = make(gpt2(), "--optimizer", "mars_m", "--ns_steps", "3", "--ns_coefficients", "quintic").param_groups[0]
    assert (group["mars_type"], group["ns_steps"], group["ns_coefficients"]) == ("mars-m", 3, "quintic")
    model, rules = gpt2(), '[["*.wte.weight", {"weight_decay": 0}]]'
    adamw = make(model, "--optimizer", "adamw", "--param_rules", rules, "--beta1", "0.8")
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"][0] == 0.8
    decayed = {name for group in adamw.param_groups if group["weight_decay"] for name in group["param_names"]}
    assert decayed == {name for name, param in model.named_parameters() if param.ndim == 2 and "wte" not in name}


@pytest.mark.parametrize(
    ("scale", "rule", "tolerance"),
    [
        ("match_rms_adamw", "mars_muon", 0),
        ("original", "mars_shampoo --clip_threshold 0 --split_fused none --gamma 0.1", 1e-4),
    ],
)
def test_muon_baseline_is_torch_muon_with_adamw(scale, rule, tolerance):
    """At half the rates, by a schedule; a rule of MARS too, but for bfloat16's rounding.

    Conv1D stores (in, out): the original scale of a layer out of 8 into 32 is 2, of one out of 32 into 8 is 1.
    """
    settings = "--config plain.yaml --learning_rate 0.02 --lr_1d 0.006 --weight_decay 0.1 --beta1 0.9".split()
    ends, steps = [], gradients(gpt2())
    for words in (f"muon --adjust_lr_fn {scale}", rule):
        model = gpt2()
        start, optimizer = copies(model), make(model, *settings, "--optimizer", *words.split())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        ends.append(train(model, optimizer, steps))
    matrices, twin, rest, groups = of_role(model, optimizer, "matrix"), gpt2(), [], []
    for index, param in enumerate(twin.parameters()):
        if index not in matrices:
            rest.append(param)
            continue
        inputs, outputs = param.shape
        factor = max(1, outputs / inputs) ** 0.5 / (0.2 * max(param.shape) ** 0.5) if scale == "original" else 1
        groups.append({"params": [param], "lr": 0.01 * factor, "weight_decay": 0.1 / factor})
    muon = torch.optim.Muon(groups, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    tables, vectors = ([param for param in rest if (param.ndim > 1) is wanted] for wanted in (True, False))
    rest = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), eps=1e-8)
    both = SimpleNamespace(step=lambda: (muon.step(), adamw.step()))
    for one, mars, expected, zero in zip(*ends, train(twin, both, steps), start, strict=True):
        assert (one - expected).norm() <= tolerance * (one - zero).norm()
        assert (mars - one).norm() <= 0.02 * (one - zero).norm()


def test_nadamw_is_nesterov_adam_with_decoupled_decay():
    """Dozat's NAdam in float64, with beta1 whole from the first step."""
    model = gpt2().double()
    start = copies(model)
    argv = "--config plain.yaml --optimizer nadamw --learning_rate 0.01 --weight_decay 0.1 --beta1 0.9 --beta2 0.95"
    optimizer, steps = make(model, *argv.split()), gradients(model)
    decays, ends = of_role(model, optimizer, "matrix"), train(model, optimizer, steps)
    for index, (value, end) in enumerate(zip(start, ends, strict=True)):
        m = v = torch.zeros_like(value)
        for number, step in enumerate(steps, start=1):
            g = step[index].double()
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            ahead = 0.9 * m / (1 - 0.9 ** (number + 1)) + 0.1 * g / (1 - 0.9**number)
            value = value * (1 - 0.01 * 0.1 * (index in decays)) - 0.01 * ahead / (
                (v / (1 - 0.95**number)).sqrt() + 1e-8
            )
        # Updates are 0.01; NAdam keeps its product in float32.
        torch.testing.assert_close(end, value, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "factors"), [("linear", [1, 0.75, 0.5]), ("cosine", [1, 0.85355339, 0.5]), ("constant", [1, 1, 1])]
)
def test_gamma_schedule(shape, factors):
    mars = mars_hf.Mars([torch.nn.Parameter(torch.ones(2, 2))], gamma=0.1)
    schedule, state = GammaSchedule(shape), TrainerState(max_steps=8)
    for step, factor in zip((0, 2, 4), factors, strict=True):
        state.global_step = step
        schedule.on_step_begin(None, state, TrainerControl(), optimizer=mars)
        assert mars.param_groups[0]["gamma"] == pytest.approx(0.1 * factor)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\n  lines"), 2, "program: two lines\n"),
        (OSError(errno.ENOSPC, "No space left", "/disk/x"), 2, "program: [Errno 28] No space left: '/disk/x'\n"),
        (ImportError("install x"), 2, "program: install x\n"),
        (KeyboardInterrupt(), 130, "program: interrupted\n"),
        (KeyError("x"), None, ""),
        (SystemExit(3), 3, ""),
    ],
    ids=["value", "system", "package", "ctrl-c", "ours", "exit"],
)
def test_errors_of_the_first_process(error, code, line, capsys, monkeypatch):
    """One line, unless they are mistakes of the program."""
    for rank, printed in (("0", line), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit if line else type(error)) as end, one_line_errors("program"):
            raise error
        assert getattr(end.value, "code", None) == code
        assert end.value.__cause__ is error if line else end.value is error
        assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    ("argv", "name", "defaults"),
    [
        ([], "embedded.yaml with mars_m", {"n_layer": 4, "optimizer": "mars_m", "learning_rate": 0.016, "beta1": 0.95}),
        (["--optimizer", "adamw"], "embedded.yaml with adamw", {"learning_rate": 0.002, "beta2": 0.95}),
        (["--config", "gpt2-small"], "gpt2-small.yaml with mars_adamw", {"n_layer": 12, "max_steps": 100000}),
    ],
)
def test_help_states_the_defaults_of_the_config(argv, name, defaults, capsys):
    with pytest.raises(SystemExit):
        pretrain_gpt2.main([*argv, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f"Defaults are those of {name}." in words
    for flag, value in defaults.items():
        assert re.search(rf" --{flag} [^-].*?\(default: (.*?)\)(?= --|$| options)", words)[1] == str(value), flag
