"""The recipe's optimizers from torch: the groups of MARS, and the arithmetic that their names promise."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from pretraining.run import arguments, optimizers, report
from pretraining.run.torch_optimizers import GammaSchedule, MuonWithAdamW
from transformers import GPT2Config, GPT2LMHeadModel, TrainerControl, TrainerState

import mars_hf

STEPS = 4


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=5, n_embd=8, n_layer=1, n_head=2))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text("use_cpu: true\nmax_steps: 9\n")  # a config without tuned settings


def make(model, *argv):
    run = arguments.parse(["--config", "plain.yaml", *argv])
    factory, settings = optimizers.for_trainer(run.optimizer, run.training)
    return factory()(model, **settings)


def gradients(model, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(param.shape, generator=generator) for param in model.parameters()] for _ in range(steps)]


def train(model, optimizer, steps):
    for step in steps:
        for param, gradient in zip(model.parameters(), step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    return [param.detach().double().clone() for param in model.parameters()]


def of_role(model, optimizer, role):
    ids = {id(param) for group in optimizer.param_groups if group["role"] == role for param in group["params"]}
    return [index for index, param in enumerate(model.parameters()) if id(param) in ids]


@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "muon", "mars_adamw", "mars_lion", "mars_m", "mars_shampoo"])
def test_every_optimizer_takes_a_rate_for_embeddings(optimizer):
    model = gpt2()
    argv = ("--optimizer", optimizer, "--learning_rate", "0.002")
    plain, own = make(model, *argv), make(model, *argv, "--lr_embeddings", "0.05")
    names = {id(param): name for name, param in model.named_parameters()}

    def rates(made):
        return {names[id(param)]: group["lr"] for group in made.param_groups for param in group["params"]}

    embeddings = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert {name for name, rate in rates(own).items() if rate == 0.05} == embeddings
    assert {name: rate for name, rate in rates(own).items() if name not in embeddings} == {
        name: rate for name, rate in rates(plain).items() if name not in embeddings
    }


def test_muon_is_torch_muon_on_matrices_and_torch_adamw_on_the_rest():
    model = gpt2()
    argv = ("--learning_rate", "0.01", "--lr_1d", "0.003", "--weight_decay", "0.1", "--beta1", "0.9")
    optimizer = make(model, "--optimizer", "muon", *argv)
    assert isinstance(optimizer, MuonWithAdamW)
    twin = copy.deepcopy(model)
    matrices = of_role(model, optimizer, "matrix")
    names = [name for name, _ in model.named_parameters()]
    assert {names[index].rpartition(".")[0].split(".")[-1] for index in matrices} == {"c_attn", "c_proj", "c_fc"}
    params = list(twin.parameters())
    muon = torch.optim.Muon(
        [params[index] for index in matrices],
        **{"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    )
    rest = [param for index, param in enumerate(params) if index not in matrices]
    adamw = torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-8)
    steps = gradients(model)
    found = train(model, optimizer, steps)
    train(twin, adamw, [])
    for step in steps:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        muon.step()
        adamw.step()
    for one, other in zip(found, params, strict=True):
        assert torch.equal(one, other.detach().double())


def test_muon_resumes_and_follows_a_schedule():
    model = gpt2()
    steps = gradients(model)
    other, whole = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(whole, make(whole, "--optimizer", "muon"), steps)
    first = make(model, "--optimizer", "muon")
    train(model, first, steps[:2])
    other.load_state_dict(model.state_dict())
    second = make(other, "--optimizer", "muon")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for one, two in zip(train(other, second, steps[2:]), expected, strict=True):
        assert torch.equal(one, two)
    torch.optim.lr_scheduler.LambdaLR(second, lambda _: 0.0)
    before = [param.clone() for param in other.parameters()]
    for param, after in zip(before, train(other, second, steps[:1]), strict=True):
        assert torch.equal(param.double(), after)


def test_mars_m_without_clipping_at_gamma_one_minus_beta1_is_muon():
    """The control that the comparison rests on: both iterate in bfloat16, whose rounding is the tolerance."""
    model = gpt2()
    twin = copy.deepcopy(model)
    argv = ("--learning_rate", "0.01", "--lr_1d", "0.003", "--weight_decay", "0.1", "--beta1", "0.9")
    mars = make(
        model, "--optimizer", "mars_m", *argv, "--gamma", "0.1", "--clip_threshold", "0", "--split_fused", "none"
    )
    muon = make(twin, "--optimizer", "muon", *argv)
    steps = gradients(model)
    start = [param.detach().double() for param in model.parameters()]
    found, expected = train(model, mars, steps), train(twin, muon, steps)
    for one, two, zero in zip(found, expected, start, strict=True):
        assert (one - two).norm() <= 0.02 * (two - zero).norm()
    # Without the correction it is another optimizer.
    other = copy.deepcopy(gpt2())
    argv = (*argv, "--gamma", "0", "--clip_threshold", "0", "--split_fused", "none")
    apart = train(other, make(other, "--optimizer", "mars_m", *argv), steps)
    index = of_role(twin, muon, "matrix")[0]
    assert (apart[index] - expected[index]).norm() > 0.1 * (expected[index] - start[index]).norm()


@pytest.mark.parametrize("momentum_decay", [None, 0.5])
def test_nadamw_is_nesterov_adam_with_decoupled_decay(momentum_decay):
    """Dozat's NAdam in float64, with beta1 whole from the first step unless `momentum_decay` says otherwise."""
    model = gpt2().double()
    start = [param.detach().clone() for param in model.parameters()]
    argv = ["--optimizer", "nadamw", "--learning_rate", "0.01", "--weight_decay", "0.1", "--beta1", "0.9"]
    if momentum_decay is not None:
        argv += ["--momentum_decay", str(momentum_decay)]
    optimizer = make(model, *argv, "--beta2", "0.95")
    steps = [[gradient.double() for gradient in step] for step in gradients(model)]
    decays = of_role(model, optimizer, "matrix")
    found = train(model, optimizer, steps)

    def share(step):
        return 0.9 * (1 - 0.5 * 0.96 ** (step * momentum_decay)) if momentum_decay is not None else 0.9

    for index, value in enumerate(start):
        m, v, product = torch.zeros_like(value), torch.zeros_like(value), 1.0
        for number, step in enumerate(steps, start=1):
            g = step[index]
            product *= share(number)
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * g * g
            ahead = share(number + 1) * m / (1 - product * share(number + 1)) + (1 - share(number)) * g / (1 - product)
            value = value * (1 - 0.01 * 0.1 * (index in decays))
            value = value - 0.01 * ahead / ((v / (1 - 0.95**number)).sqrt() + 1e-8)
        torch.testing.assert_close(
            found[index], value, rtol=0, atol=1e-7
        )  # updates are 0.01; NAdam keeps its product in float32


@pytest.mark.slow
def test_mars_without_clipping_at_gamma_one_minus_beta1_is_nadamw_once_started():
    """Bias corrections differ in the first steps; after 150 nothing does, with the second moment of the gradients."""
    model, twin = gpt2().double(), gpt2().double()
    steps = [[gradient.double() for gradient in step] for step in gradients(model, 250)]
    shared = ("--learning_rate", "0.001", "--weight_decay", "0", "--beta1", "0.9", "--beta2", "0.95")
    mars = (*shared, "--gamma", "0.1", "--clip_threshold", "0", "--second_moment", "gradient")
    moves = []
    for one, argv in ((model, ("--optimizer", "mars_adamw", *mars)), (twin, ("--optimizer", "nadamw", *shared))):
        optimizer = make(one, *argv)
        middle = train(one, optimizer, steps[:150])
        end = train(one, optimizer, steps[150:])
        moves.append([end[index] - middle[index] for index in of_role(one, optimizer, "matrix")])
    for mine, theirs in zip(*moves, strict=True):
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()


@pytest.mark.parametrize(("shape", "factors"), [("linear", [1, 0.75, 0.5]), ("cosine", [1, 0.85355339, 0.5])])
def test_gamma_falls(shape, factors):
    mars = mars_hf.Mars([torch.nn.Parameter(torch.ones(2, 2))], gamma=0.1)
    schedule, state = GammaSchedule(shape), TrainerState(max_steps=8)
    for step, factor in zip((0, 2, 4), factors, strict=True):
        state.global_step = step
        schedule.on_step_begin(None, state, TrainerControl(), optimizer=mars)
        assert mars.param_groups[0]["gamma"] == pytest.approx(0.1 * factor)
    (described,) = report.groups([{**mars.param_groups[0], "role": "matrix"}])
    assert described["gamma"] == 0.1  # the setting, not its last value


def test_gamma_stays_without_a_schedule():
    mars = mars_hf.Mars([torch.nn.Parameter(torch.ones(2, 2))], gamma=0.1)
    GammaSchedule().on_step_begin(None, TrainerState(global_step=4, max_steps=8), TrainerControl(), optimizer=mars)
    assert mars.param_groups[0]["gamma"] == 0.1 and "initial_gamma" not in mars.param_groups[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--optimizer muon --gamma 0.1", "muon has no gamma"),
        ("--optimizer nadamw --clip_threshold 1", "nadamw has no clip_threshold"),
        ("--optimizer adamw --momentum_decay 0.004", "adamw has no momentum_decay"),
        ("--optimizer mars_adamw --momentum_decay 0.004", "mars_adamw has no momentum_decay; it takes"),
        ("--optimizer adamw --gamma_schedule linear", "adamw has no gamma_schedule"),
        ("--optimizer mars_m --clip_threshold 0 --gamma_schedule linear", "keeps no last gradient"),
    ],
)
def test_settings_that_an_optimizer_lacks_are_refused(argv, words):
    with pytest.raises(ValueError, match=words):
        run = arguments.parse(["--config", "plain.yaml", *argv.split()])
        optimizers.for_trainer(run.optimizer, run.training)


RULES = """
use_cpu: true
max_steps: 9
param_rules:
  - {pattern: "*.mlp.*", lr: 1e-3, gamma: 0.1}
  - {pattern: "*.wpe.weight", role: vector}
"""
IN_LINE = '[["*.mlp.*", {"lr": 1e-3, "gamma": 0.1}], ["*.wpe.weight", {"role": "vector"}]]'


@pytest.mark.parametrize("place", ["config", "command line", "file"])
def test_rules_by_name_come_from_the_config_the_command_line_or_a_file(tmp_path, place):
    config, rules = tmp_path / "mine.yaml", tmp_path / "rules.yaml"
    rules.write_text(RULES[RULES.index("  -") :])
    config.write_text(RULES if place == "config" else "use_cpu: true\nmax_steps: 9\n")
    argv = {"config": [], "command line": ["--param_rules", IN_LINE], "file": ["--param_rules", str(rules)]}[place]
    run = arguments.parse(["--config", str(config), "--output_dir", str(tmp_path / "out"), *argv])
    make, settings = optimizers.for_trainer(run.optimizer, run.training)
    groups = [group for group in make()(gpt2(), **settings).param_groups if "pattern" in group]
    assert [(group["pattern"], group["role"], group["gamma"]) for group in groups] == [
        ("*.mlp.*", "matrix", 0.1),
        ("*.mlp.*", "vector", 0.1),
        ("*.wpe.weight", "vector", 0.025),
    ]
    assert groups[0]["lr"] == 1e-3
