"""python -m mars_hf suggest: held to what the real optimizers do, and its output can be pasted."""

from __future__ import annotations

import math
import re
import shlex

import pytest
import torch
from helpers import orthogonalizes
from transformers import Trainer, TrainingArguments

import mars_hf
from mars_hf.__main__ import main
from mars_hf.groups.settings import MARS_TYPES
from mars_hf.groups.suggest import cells_of_table, suggest, update_rms

WIDTH = 32
# Newton-Schulz leaves singular values of a root mean square of 0.85 to 0.95, by shape, and 0.9 is assumed.
TOLERANCES = {"mars-adamw": 0.03, "mars-lion": 0.03, "mars-shampoo": 0.08, "mars-m": 0.08}
SHAPES = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]


def updates(optimizer: torch.optim.Optimizer) -> float:
    """Return the RMS of late updates, lr included, from gradients that are independent from step to step.

    They are small, so that the clip of MARS does not act. Orthogonalized updates have their size from the first step.
    """
    steps, warmup = (8, 2) if orthogonalizes(optimizer.defaults.get("mars_type")) else (100, 70)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    squares = elements = 0.0
    for step in range(steps):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-4
        optimizer.step()
        if step >= warmup:
            squares += sum(float((a.detach() - b).square().sum()) for a, b in zip(params, before, strict=True))
            elements += sum(param.numel() for param in params)
    return math.sqrt(squares / elements)


def matrices() -> list[torch.nn.Parameter]:
    """Return the matrices of a transformer's block."""
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.95, 0.99)])
@pytest.mark.parametrize("rule", MARS_TYPES)
def test_size_of_updates(rule, betas):
    settings = suggest(rule, 3e-4, betas, width=WIDTH)
    ours = updates(mars_hf.Mars(matrices(), **{**settings, "eps": 1e-12, "weight_decay": 0.0}))
    theirs = updates(torch.optim.AdamW(matrices(), lr=3e-4, betas=betas, eps=1e-12, weight_decay=0.0))
    assert ours == pytest.approx(theirs, rel=TOLERANCES[rule])


def rows_of_table() -> list[tuple[str, str, float]]:
    """Return rule, betas and factor of the rows of README's table, without AdamW's."""
    cells = cells_of_table()[2:]
    return [(rule, betas, float(factor)) for names, betas, factor, *_ in cells for rule in names.split(", ")]


@pytest.mark.parametrize(("rule", "betas", "factor"), rows_of_table())
def test_table_rates_update_rms(rule, betas, factor):
    settings = {} if "default" in betas else {"betas": (0.9, 0.95)}
    of_rule = "mars-m" if rule == "muon" else rule
    ours = updates(mars_hf.Mars(matrices(), factor * 3e-4, mars_type=of_rule, eps=1e-12, **settings))
    theirs = updates(torch.optim.AdamW(matrices(), lr=3e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0))
    assert ours == pytest.approx(theirs, rel=TOLERANCES[of_rule] + 0.02)  # factors have two digits


RULES_OF_ADAMW_RATES = [
    ({"mars_type": "mars-adamw"}, "mars-adamw"),
    ({"mars_type": "mars-adamw", "betas": (0.9, 0.999), "gamma": 0.1}, "mars-adamw"),
    ({"mars_type": "mars-adamw", "second_moment": "gradient"}, "mars-adamw"),
    ({"mars_type": "mars-lion"}, "mars-lion"),
    ({"mars_type": "mars-m"}, "mars-m"),
    ({"mars_type": "muon", "betas": (0.9, 0.95)}, "mars-m"),
]


@pytest.mark.parametrize(("settings", "rule"), RULES_OF_ADAMW_RATES)
def test_adamw_rates(settings, rule):
    """Updates are as large as AdamW's, vectors train at its rate, and weights decay as under it."""
    params = [*matrices(), torch.nn.Parameter(torch.zeros(3))]
    given = {**settings, "lr": 3e-4, "weight_decay": 0.1, "adamw_rates": True}
    made = mars_hf.create(params, **given)
    matrix, vector = made.param_groups
    assert matrix["lr"] * matrix["weight_decay"] == pytest.approx(3e-5) and vector["lr"] == 3e-4
    assert made.created_with["lr"] == matrix["lr"] and "adamw_rates" not in made.created_with
    ours = updates(mars_hf.create(matrices(), **{**given, "weight_decay": 0.0}, eps=1e-12))
    theirs = updates(torch.optim.AdamW(matrices(), lr=3e-4, betas=(0.9, 0.999), eps=1e-12, weight_decay=0.0))
    assert ours == pytest.approx(theirs, rel=TOLERANCES[rule])


def test_adamw_rates_decoupled_decay():
    """Weights shrink in a step as under AdamW, whose decay follows its rate."""
    made = mars_hf.create(
        torch.nn.Linear(4, 4), lr=3e-4, weight_decay=0.1, weight_decay_mode="decoupled", adamw_rates=True
    )
    assert made.param_groups[0]["weight_decay"] == pytest.approx(3e-5)


def test_adamw_rates_at_every_door(tmp_path):
    """TrainingArguments' rate and decay are AdamW's then: a script changes one word."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    by_hand = mars_hf.create(model, lr=2e-5, weight_decay=0.1, adamw_rates=True)
    mars_hf.register()
    named = {"optim": "mars_adamw", "optim_args": "adamw_rates=true"}
    args = TrainingArguments(tmp_path, use_cpu=True, learning_rate=2e-5, weight_decay=0.1, **named)
    make, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    plain = TrainingArguments(tmp_path, use_cpu=True, learning_rate=2e-5, weight_decay=0.1)
    by_factory, _ = mars_hf.factory(plain, adamw_rates=True)
    for optimizer in (make()(model, **settings), by_factory(model)):
        for group, expected in zip(optimizer.param_groups, by_hand.param_groups, strict=True):
            assert (group["lr"], group["weight_decay"]) == (expected["lr"], expected["weight_decay"])
    assert by_hand.param_groups[0]["lr"] == pytest.approx(2.14 * 2e-5, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "adamw_rates=True: give AdamW's learning rate as lr"),
        ({"lr": 1e-3, "mars_type": "mars-shampoo"}, "mars-shampoo's updates depends on the width .* suggest --width"),
        ({"lr": 1e-3, "like": "run"}, "like='run' has rates of MARS; leave adamw_rates out"),
    ],
)
def test_adamw_rates_that_cannot_be(settings, message, monkeypatch):
    monkeypatch.setattr("mars_hf.groups.saved_settings.read", lambda *_: {})
    with pytest.raises(ValueError, match=message):
        mars_hf.create(matrices(), adamw_rates=True, **settings)
    with pytest.raises(ValueError, match=r"param group 0 states lr=0\.1: give rates of MARS"):
        mars_hf.create(iter([{"params": matrices(), "lr": 0.1}]), lr=1e-3, adamw_rates=True)


def test_rates_of_the_table():
    header, *rows = cells_of_table()
    assert header[-1] == "LoRA adapters"
    for rule, _, factor, *rates in rows:
        for rate, of_adamw in zip(rates, (3e-4, 2e-5, 2e-4), strict=True):
            if "mars-m" in rule and of_adamw != 3e-4:  # of fine-tuning, the search on SmolLM2 supports none
                assert rate == "search"
                continue
            assert float(rate) == pytest.approx(float(factor) * of_adamw, rel=0.05)


def test_suggest_prints_an_aligned_table(capsys):
    """Words begin and numbers end below each other, within 80 columns."""
    main(["suggest"])
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    titles, *rows = cells_of_table()
    header = " ".join(" ".join(lines[: -len(rows)]).split())
    assert sorted(header.split()) == sorted(" ".join(titles).split())
    assert [re.split(r" {2,}", line) for line in lines[-len(rows) :]] == rows
    assert {len(line) for line in lines[-len(rows) - 1 :]} == {max(map(len, lines))} and len(lines[-1]) <= 80
    assert {line.index(f"  {betas}  ") for line, (_, betas, *_) in zip(lines[-len(rows) :], rows, strict=True)} == {12}


@pytest.mark.parametrize("gamma", [0.0, 0.025, 0.1])
@pytest.mark.parametrize("rule", MARS_TYPES)
def test_update_rms(rule, gamma):
    optimizer = mars_hf.Mars(matrices(), 1e-3, (0.95, 0.99), eps=1e-12, gamma=gamma, mars_type=rule)
    predicted = update_rms(rule, beta1=0.95, gamma=gamma, width=WIDTH)
    assert updates(optimizer) / 1e-3 == pytest.approx(predicted, rel=TOLERANCES[rule])


@pytest.mark.parametrize("rule", MARS_TYPES)
def test_half_lives(rule):
    settings = suggest(rule, 3e-4, width=WIDTH)
    first, second = (math.log(0.5) / math.log(beta) for beta in settings["betas"])
    assert first == pytest.approx(6.5788 * (2 if orthogonalizes(rule) else 1), rel=1e-4)  # 0.9 ** 6.5788 = 0.5
    assert second == pytest.approx(13.5134, rel=1e-4)  # 0.95 ** 13.5134 = 0.5
    assert settings["betas_1d"] == (0.9, 0.95) and settings["lr_1d"] == 3e-4


def test_suggest_width():
    assert suggest("mars-m", 3e-4, width=64)["lr"] == pytest.approx(suggest("mars-m", 3e-4)["lr"])
    small, large = (suggest("mars-shampoo", 3e-4, width=width)["lr"] for width in (256, 1024))
    assert large == pytest.approx(2 * small)


@pytest.mark.parametrize("rule", MARS_TYPES)
def test_weight_decay(rule):
    """Compare weights without gradients after 20 steps."""

    def decayed(make, **settings) -> float:
        param = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        optimizer = make([param], **settings)
        for _ in range(20):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        return 1 - float(param.detach().mean())

    theirs = decayed(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
    assert decayed(mars_hf.Mars, **suggest(rule, 3e-4, width=WIDTH)) == pytest.approx(theirs, rel=1e-3)


def printed(capsys, *argv: str) -> str:
    main(["suggest", "--adamw-lr", "3e-4", *argv])
    return capsys.readouterr().out


def test_suggest_one_rule(capsys):
    text = printed(capsys, "--width", "768")
    assert [line for line in text.splitlines() if line in MARS_TYPES] == list(MARS_TYPES)
    assert "\nmuon is mars-m without the clip" in text
    # 3e-4 sqrt(0.1 / 1.9), 0.1 * 3e-4 / 6.88e-5
    assert "--optim mars_lion --learning_rate 6.88e-05 --weight_decay 0.436 " in text
    text = printed(capsys)
    assert "\nmars-m\n" in text and "mars-shampoo\n  --optim" not in text
    assert text.endswith("\nleft out without --width: mars-shampoo\n")


def test_stated_betas_are_printed_with_their_digits(capsys):
    """Both pairs, with three digits of 1 - beta: 0.9995 is not 1, and not the default of betas_1d."""
    text = printed(capsys, "--adamw-betas", "0.9", "0.9995", "--rule", "mars-adamw")
    assert "beta1=0.9,beta1_1d=0.9,beta2=0.9995,beta2_1d=0.9995" in text
    assert "betas=(0.9, 0.9995), betas_1d=(0.9, 0.9995)" in " ".join(text.split())


def test_stated_name_of_muon_in_the_printed_line(capsys, tmp_path):
    """A later transformers may have a muon of its own."""
    text = printed(capsys, "--rule", "muon")
    line = text[text.index("--optim ") :].splitlines()[0]
    assert line.split()[:2] == ["--optim", "mars_muon"]
    mars_hf.register()
    args = TrainingArguments(tmp_path, use_cpu=True, optim=line.split()[1])
    make, _ = Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(2, 2))
    assert make()(torch.nn.Linear(2, 2)).created_with["mars_type"] == "muon"


@pytest.mark.parametrize("rule", [*MARS_TYPES, "muon"])
@pytest.mark.parametrize("betas", ["0.9 0.95", "0.9 0.999", "0.95 0.99", None])
def test_suggest_command_and_call(rule, betas, capsys, tmp_path):
    """The command's arguments and the call make the same optimizer."""
    further = ["--adamw-betas", *betas.split()] if betas else ["--finetuning"]
    text = printed(capsys, "--width", "768", "--rule", rule, *further)
    command, call = text[text.index("  --optim ") :].split("  mars_hf.create")
    words = shlex.split(command.replace("\\\n", " "))
    flags = dict(zip([word.removeprefix("--") for word in words[::2]], words[1::2], strict=True))
    flags |= {name: float(flags[name]) for name in ("learning_rate", "weight_decay")}
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    mars_hf.register()
    make, settings = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(tmp_path, use_cpu=True, **flags), model)
    by_call = eval(f"mars_hf.create{call}", {"mars_hf": mars_hf, "model": model})
    groups, others = (
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in (make()(model, **settings), by_call)
    )
    assert groups == others
    assert groups[0]["mars_type"] == ("mars-m" if rule == "muon" else rule)
    assert (groups[0]["clip_threshold"] is None) == (rule == "muon")


def test_call_states_a_rate_that_is_the_default_of_mars(capsys):
    """`create` has no default rate."""
    main(["suggest", "--adamw-lr", "2.35e-3", "--rule", "mars-m"])
    assert 'mars_type="mars-m", lr=0.003, lr_1d=0.00235' in " ".join(capsys.readouterr().out.split())


def test_settings_of_finetuning(capsys):
    main(["suggest", "--adamw-lr", "2e-5", "--rule", "mars_adamw", "--finetuning"])
    text = capsys.readouterr().out
    assert "--optim mars_adamw --learning_rate 2.43e-05 --weight_decay 0 " in text and "beta2=0.999" in text
    main(["suggest", "--adamw-lr", "2e-5", "--rule", "mars-adamw", "--finetuning", "--adamw-weight-decay", "0.1"])
    assert "--weight_decay 0.0825 " in capsys.readouterr().out


@pytest.mark.parametrize("rule", ["mars-m", "muon", None])
def test_unsupported_rates_of_finetuning(capsys, rule):
    one = ["--rule", rule] if rule else []
    assert "so search upward (docs/finetuning.md)." in printed(capsys, "--finetuning", *one)
    assert "search upward" not in printed(capsys, *one)


def test_flags_may_have_underscores(capsys):
    text = printed(capsys, "--adamw-weight-decay", "0.2", "--rule", "mars-m")
    main(["suggest", "--adamw_lr=3e-4", "--adamw_weight_decay", "0.2", "--rule", "mars_m"])
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("--rule mars-m", "--rule needs --adamw-lr"),
        ("--adamw-weight-decay 0", "--adamw-weight-decay needs --adamw-lr"),
        ("--adamw-lr 0", "--adamw-lr and --width are numbers > 0"),
        ("--adamw-lr nan", "--adamw-lr: lr=nan is not valid"),
        ("--adamw-lr 1e-3 --adamw-betas 0.9 1", "--adamw-betas: betas=(0.9, 1.0) is not valid"),
        ("--adamw-lr 1e-3 --adamw-weight-decay -1", "--adamw-weight-decay: weight_decay=-1.0 is not valid"),
        ("--adamw-lr 1e-3 --width 0", "--adamw-lr and --width are numbers > 0"),
        ("--adamw-lr 1e-3 --width wide", "invalid int value: 'wide'"),
        ("--adamw-lr 1e-3 --rule mars-shampoo", "depends on the width of the model; give --width"),
        ("--adamw-lr 1e-3 --rule adamw", "invalid choice: 'adamw'"),
    ],
)
def test_wrong_command_lines(argv, part, capsys):
    with pytest.raises(SystemExit) as end:
        main(["suggest", *argv.split()])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert part in line and line.count("\n") == 1
    assert line.startswith("python -m mars_hf: ")
