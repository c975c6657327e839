"""Settings of a run from config, section and command line; the optimizers that they make; errors in one line."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import torch
from pretraining.run import arguments, optimizers, report
from pretraining.run.errors import one_line_errors
from pretraining.run.torch_optimizers import GammaSchedule
from test_pretrain_gpt2 import SCRIPT
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
        (["--optimizer", "adamw"], "embedded-adamw"),
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
    run = parse(*config, "--n_layer", "1", "--beta2", "0.7")
    assert (run.model.n_layer, run.optimizer.optimizer) == (1, "adamw")
    assert (run.optimizer.beta1, run.optimizer.beta2) == (0.8, 0.7)
    assert (run.training.learning_rate, run.training.weight_decay) == (1e-3, 0.3)
    assert run.training.lr_scheduler_kwargs == {"min_lr": 3e-5}
    (group,) = (group for group in make(gpt2(), *config).param_groups if group["lr"] == 2e-3)
    assert group["param_names"] == ["transformer.wte.weight"]
    run = parse("--config", "llama", "--model_type", "phi3")
    model, training = run.model, run.training
    assert (model.model_type, model.n_head, model.n_kv_head, model.n_inner) == ("phi3", 4, 2, 352)
    assert (run.optimizer.optimizer, training.learning_rate, run.optimizer.lr_1d) == ("mars_m", 1.6e-2, 3.2e-2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--config gpt2-tiny", r"--config 'gpt2-tiny': no such file, and not one of .* \(embedded, gpt2-"),
        ("--optimizer sgd", "optimizer 'sgd' is unknown; accepted: mars_adamw, mars_lion"),
        ("--optim adafactor", "--optim and --optim_args would be ignored; give --optimizer"),
        ("--max_steps -1", "--max_steps -1: the recipe does not count epochs; give a number of steps"),
        ("--metric_for_best_model accuracy", "--metric_for_best_model accuracy: accepted: loss"),
        (f"--max_steps {10**400}", "give a number below 2"),
        ("--lr_scheduler_kwargs 3", "must be a mapping.*; give --lr_scheduler_kwargs"),
        ("--lr_scheduler_type linear", "min_lr_rate.*; give --lr_scheduler_kwargs"),
        ("--optimizer adamw --gamma 0.1", "adamw has no gamma"),
        ("--optimizer adamw --is_approx false", "adamw has no is_approx"),
        ("--optimizer adamw --gamma_schedule linear", "adamw has no gamma_schedule"),
        ("--optimizer mars_adamw --ns_steps 3", "mars_adamw has no ns_steps; it takes "),
        ("--optimizer mars_lion --ns_steps 3", "mars_lion has no ns_steps; it takes "),
        ("--optimizer muon --gamma 0.1", "muon has no gamma"),
        ("--optimizer nadamw --clip_threshold 1", "nadamw has no clip_threshold"),
        ("--optimizer mars_m --clip_threshold 0 --gamma_schedule linear", "keeps no last gradient"),
    ],
)
def test_wrong_settings(argv, words):
    with pytest.raises(ValueError, match=words):
        make(gpt2(), *argv.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_paper_config_names_all_flags_that_it_needs_on_cpu():
    flags = "--use_cpu true --tf32 false.* --data_dir .* --gradient_accumulation_steps 32, or --tokens_per_step 0"
    with pytest.raises(ValueError, match=rf"gpt2-small.yaml: tf32 needs an NVIDIA GPU.*; give {flags}"):
        parse("--config", "gpt2-small")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_layers: 3", "mine.yaml: error: unrecognized arguments: --n_layers=3"),
        ("n_layer: 2.5", "mine.yaml: error: argument --n_layer/--n-layer: invalid int value: '2.5'"),
        ("bias: 7", "mine.yaml: error: argument --bias"),
        ("", "mine.yaml holds no settings"),
        ("- 3", "mine.yaml holds no settings"),
        ("a: [", "mine.yaml is not YAML"),
        ("optimizers: {sgd: {}}", "optimizer 'sgd' is unknown"),
    ],
)
def test_wrong_configs(text, words, capsys):
    Path("mine.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        one_line_errors("pretrain_gpt2.py")(parse)("--config", "mine.yaml")
    assert end.value.code == 2 and words in capsys.readouterr().err


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
    training = SimpleNamespace(train_batch_size=batch, per_device_train_batch_size=batch, n_gpu=1, world_size=devices)
    training.gradient_accumulation_steps, training.tokens_per_step = accumulation, 491_520
    run = arguments.RunArguments(arguments.ModelArguments(block_size=block), None, None, training, None)
    assert run.count_tokens() == batch * accumulation * devices * block
    if remedy is None:
        return run.check_tokens()
    with pytest.raises(ValueError, match=f"tokens_per_step is 491,520; {remedy} --tokens_per_step 0 for any"):
        run.check_tokens()
    training.tokens_per_step = 0
    run.check_tokens()


# --- optimizers ------------------------------------------------------------------------------------------------------

STEPS = 4


def gradients(model, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(param.shape, generator=generator) for param in model.parameters()] for _ in range(steps)]


def train(model, optimizer, steps):
    for step in steps:
        for param, gradient in zip(model.parameters(), step, strict=True):
            param.grad = gradient.to(param.dtype)
        optimizer.step()
    return [param.detach().double().clone() for param in model.parameters()]


def of_role(model, optimizer, role):
    ids = {id(param) for group in optimizer.param_groups if group["role"] == role for param in group["params"]}
    return [index for index, param in enumerate(model.parameters()) if id(param) in ids]


def rates_of(optimizer):
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


EMBEDDINGS = {"transformer.wte.weight", "transformer.wpe.weight"}


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_lion", "mars_m", "mars_shampoo"])
def test_every_optimizer_takes_a_rate_for_embeddings(optimizer):
    argv = ("--config", "plain.yaml", "--optimizer", optimizer, "--learning_rate", "0.002")
    plain = rates_of(make(gpt2(), *argv))
    changed = rates_of(make(gpt2(), *argv, "--lr_embeddings", "0.05"))
    assert changed == plain | dict.fromkeys(EMBEDDINGS, 0.05) and 0.05 not in plain.values()


@pytest.mark.parametrize("optimizer", ["mars_shampoo", "mars_m"])
def test_settings_of_newton_schulz_reach_the_optimizer(optimizer):
    config = write("own.yaml", f"optimizer: {optimizer}\nlearning_rate: 0.01\nlr_1d: 0.02\n")  # no lr_embeddings
    mars = make(gpt2(), *config, "--ns_steps", "3", "--ns_coefficients", "quintic", "--split_fused", "none")
    groups, rates = mars.param_groups, rates_of(mars)
    assert {group["mars_type"] for group in groups} == {optimizer.replace("_", "-")}
    assert {(group["ns_steps"], group["ns_coefficients"]) for group in groups} == {(3, "quintic")}
    assert all(group["layout"]["parts"] is None for group in groups if group["role"] == "matrix")
    assert {rates[name] for name in EMBEDDINGS} == {0.02}
    argv = ["--optimizer", optimizer, "--param_rules", '[["*.w[tp]e.weight", {"role": "matrix"}]]']
    groups = make(gpt2(), *argv).param_groups
    assert {group["role"] for group in groups} == {"matrix", "vector"}
    assert any(group["layout"]["parts"] for group in groups if group["role"] == "matrix")


def test_mars_and_adamw():
    assert make(gpt2(), "--is_approx", "false").is_exact
    lion = make(gpt2(), "--optimizer", "mars_lion", "--clip_threshold", "0")
    assert lion.param_groups[0]["mars_type"] == "mars-lion" and lion.param_groups[0]["clip_threshold"] is None
    argv = ["--optimizer", "adamw", "--param_rules", '[["*.wte.weight", {"weight_decay": 0}]]', "--beta1", "0.8"]
    model = gpt2()
    adamw = make(model, *argv)
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"][0] == 0.8
    decayed = {name for group in adamw.param_groups if group["weight_decay"] for name in group["param_names"]}
    assert decayed == {name for name, param in model.named_parameters() if param.ndim == 2 and "wte" not in name}


def test_muon_is_torch_muon_on_matrices_and_torch_adamw_on_the_rest():
    """At half the rates, by a schedule; mars_muon too, but for bfloat16's rounding."""
    settings = "--config plain.yaml --learning_rate 0.02 --lr_1d 0.006 --weight_decay 0.1 --beta1 0.9".split()
    ends, steps = [], gradients(gpt2())
    for words in ("muon", "mars_muon", "mars_muon --gamma 0"):
        model = gpt2()
        optimizer = make(model, *settings, "--optimizer", *words.split())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        ends.append(train(model, optimizer, steps))
    assert isinstance(optimizer, mars_hf.Mars)
    matrices, twin = of_role(model, optimizer, "matrix"), gpt2()
    params, start = list(twin.parameters()), [param.detach().double().clone() for param in twin.parameters()]
    muon = torch.optim.Muon(
        [params[index] for index in matrices], lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    rest = [param for index, param in enumerate(params) if index not in matrices]
    adamw = torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-8)
    both = SimpleNamespace(step=lambda: (muon.step(), adamw.step()))
    for one, expected, mars, zero in zip(ends[0], train(twin, both, steps), ends[1], start, strict=True):
        assert torch.equal(one, expected)
        assert (mars - one).norm() <= 0.02 * (one - zero).norm()
    index = matrices[0]  # without the correction it is another optimizer
    assert (ends[2][index] - ends[0][index]).norm() > 0.1 * (ends[0][index] - start[index]).norm()


def test_nadamw_is_nesterov_adam_with_decoupled_decay():
    """Dozat's NAdam in float64, with beta1 whole from the first step."""
    model = gpt2().double()
    start = [param.detach().clone() for param in model.parameters()]
    argv = ["--config", "plain.yaml", "--optimizer", "nadamw", "--learning_rate", "0.01", "--weight_decay", "0.1"]
    optimizer, steps = make(model, *argv, "--beta1", "0.9", "--beta2", "0.95"), gradients(model)
    decays, ends = of_role(model, optimizer, "matrix"), train(model, optimizer, steps)
    for index, value in enumerate(start):
        m, v = torch.zeros_like(value), torch.zeros_like(value)
        for number, step in enumerate(steps, start=1):
            g = step[index].double()
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * g * g
            ahead = 0.9 * m / (1 - 0.9 ** (number + 1)) + 0.1 * g / (1 - 0.9**number)
            value = value * (1 - 0.01 * 0.1 * (index in decays))
            value = value - 0.01 * ahead / ((v / (1 - 0.95**number)).sqrt() + 1e-8)
        # Updates are 0.01; NAdam keeps its product in float32.
        torch.testing.assert_close(ends[index], value, rtol=0, atol=1e-7)


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
    (described,) = report.groups([{**mars.param_groups[0], "role": "matrix"}])
    assert described["gamma"] == 0.1  # the setting, not its last value


RULES = '- {pattern: "*.mlp.*", lr: 1e-3, gamma: 0.1}\n- {pattern: "*.wpe.weight", role: vector}\n'
IN_LINE = '[["*.mlp.*", {"lr": 1e-3, "gamma": 0.1}], ["*.wpe.weight", {"role": "vector"}]]'


@pytest.mark.parametrize("place", ["config", "command line", "file"])
def test_rules_by_name_come_from_the_config_the_command_line_or_a_file(place):
    Path("rules.yaml").write_text(RULES)
    config = write("mine.yaml", f"param_rules:\n{RULES}" if place == "config" else "")
    argv = {"config": [], "command line": ["--param_rules", IN_LINE], "file": ["--param_rules", "rules.yaml"]}[place]
    groups = [group for group in make(gpt2(), *config, *argv).param_groups if "pattern" in group]
    assert [(group["pattern"], group["role"], group["gamma"]) for group in groups] == [
        *(("*.mlp.*", "matrix", 0.1), ("*.mlp.*", "vector", 0.1), ("*.wpe.weight", "vector", 0.025))
    ]
    assert groups[0]["lr"] == 1e-3


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\n  lines"), 2, "program: two lines\n"),
        (OSError(errno.ENOSPC, "No space left", "/disk/x"), 2, "program: [Errno 28] No space left: '/disk/x'\n"),
        (OverflowError("too large"), 2, "program: too large\n"),
        (ValueError("\x1b[31mred " + "9" * 400), 2, f"program: \\x1b[31mred {'9' * 200}...\n"),
        (KeyboardInterrupt(), 130, "program: interrupted\n"),
        (RuntimeError("x"), None, ""),
        (KeyError("x"), None, ""),
        (SystemExit(3), 3, ""),
    ],
    ids=["value", "system", "number", "text of others", "ctrl-c", "ours", "key", "exit"],
)
def test_errors_of_the_first_process(error, code, line, capsys, monkeypatch):
    """One line, unless they are mistakes of the program."""

    @one_line_errors("program")
    def main() -> None:
        raise error

    for rank, printed in (("0", line), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit if line else type(error)) as end:
            main()
        assert getattr(end.value, "code", None) == code
        assert end.value.__cause__ is error if line else end.value is error
        assert capsys.readouterr().err == printed


def test_environment_that_is_no_number(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(SystemExit):
        one_line_errors("program")(lambda: None)()
    assert "LOCAL_WORLD_SIZE=two in the environment is not a number" in capsys.readouterr().err


ENDING = """
import atexit, sys
from pretraining.run import errors

class Kept:
    def __del__(self):
        print("the interpreter ends")

kept = Kept()
atexit.register(print, "at exit")

@errors.one_line_errors("program")
def main():
    print("done")
    if sys.argv[1] == "fails":
        raise ValueError("no")

errors.run(main)
"""


@pytest.mark.parametrize(
    ("processes", "end", "code", "printed"),
    [
        ("1", "succeeds", 0, "done\nat exit\nthe interpreter ends\n"),
        ("2", "succeeds", 0, "done\nat exit\n"),
        ("2", "fails", 2, "done\nat exit\nthe interpreter ends\n"),
    ],
)
def test_a_process_of_several_ends_before_the_interpreter(processes, end, code, printed):
    """Threads of gloo abort an interpreter that ends; what is registered to run at exit runs, and no output is lost."""
    environment = {"WORLD_SIZE": processes, "PYTHONPATH": str(SCRIPT.parent)}
    ended = subprocess.run([sys.executable, "-c", ENDING, end], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr
