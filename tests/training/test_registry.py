"""factory() and register(): Trainer builds MARS as its own optimizer."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import optuna
import pytest
import torch
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator
from transformers.training_args import OptimizerNames

import mars_hf


@pytest.fixture(scope="module", autouse=True)
def registered():
    mars_hf.register()


def made_by(run) -> mars_hf.Mars:
    run.create_optimizer()
    assert type(run.optimizer) is mars_hf.Mars
    return run.optimizer


def shown(optimizer, *names: str) -> list[tuple]:
    """Return settings of each group."""
    return [tuple(group[name] for name in names) for group in optimizer.param_groups]


# --- TrainingArguments -> hyperparameters ----------------------------------------------------------------------------


def through(door, folder, rule="mars-adamw", text="", given=None, **settings) -> mars_hf.Mars:
    """Make the optimizer of a Trainer by `factory` or by name."""
    if door == "factory":
        args = arguments(folder, **settings)
        return made_by(trainer(args, optimizer_cls_and_kwargs=mars_hf.factory(args, mars_type=rule, **(given or {}))))
    return made_by(trainer(arguments(folder, optim=rule.replace("-", "_"), optim_args=text, **settings)))


SHOWN = ("mars_type", "lr", "betas", "eps", "weight_decay", "gamma")


@pytest.mark.parametrize("door", ["factory", "optim"])
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("rate", [{}, {"learning_rate": 5e-5}], ids=["untouched", "explicit"])
def test_default_arguments(tmp_path, door, rule, rate):
    """An explicit 5e-5 looks like the default, and fine-tuning must not use 3e-3."""
    assert shown(through(door, tmp_path, rule, **rate), *SHOWN) == [
        (rule, 5e-5, (0.95, 0.99), 1e-8, 0.0, 0.025),
        (rule, 2.5e-5, (0.9, 0.95), 1e-8, 0.0, 0.025),
    ]


@pytest.mark.parametrize("door", ["factory", "optim"])
def test_set_arguments(tmp_path, door):
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
    mars = through(door, tmp_path, text="gamma=0.1,lr_1d=2e-4", given={"gamma": 0.1, "lr_1d": 2e-4}, **settings)
    assert shown(mars, *SHOWN) == [
        ("mars-adamw", 1e-3, (0.8, 0.99), 1e-6, 0.1, 0.1),
        ("mars-adamw", 2e-4, (0.9, 0.95), 1e-6, 0.0, 0.1),
    ]


@pytest.mark.parametrize("door", ["factory", "optim"])
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion", "mars-m"])
def test_matrices_embeddings_and_heads_decay(tmp_path, door, rule):
    """As under Trainer's AdamW, whose names of undecayed parameters these are; the table says so."""
    mars = through(door, tmp_path, rule, weight_decay=0.1)
    model = gpt2()
    decayed = set(trainer(arguments(tmp_path), model).get_decay_parameter_names(model))
    for group in mars.param_groups:
        for name in group["param_names"]:
            assert group["weight_decay"] == (0.1 if name in decayed else 0.0), name
    assert any("wte" in name for name in decayed)
    roles = {line.split()[0]: line.split()[-1] for line in repr(mars).splitlines()[2:] if line.split()[0] != "not"}
    assert roles["vector"] == "0" and {roles[role] for role in roles if role in ("matrix", "adamw")} == {"0.1"}


class SubclassedTrainer(Trainer):
    """Somebody's own trainer."""


@dataclass
class OtherDefaults(TrainingArguments):
    """A subclass with defaults of its own, like trl's configs."""

    learning_rate: float = 1e-4
    adam_beta1: float = 0.85
    weight_decay: float = 0.05


def test_default_arguments_of_a_subclass(tmp_path):
    """The class's author has stated what differs from TrainingArguments; its user, what differs from the class."""
    shared = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    for mars in (
        made_by(trainer(OtherDefaults(**shared, optim="mars_adamw"))),
        made_by(mars_trainer(OtherDefaults(**shared), gpt2())),
        mars_hf.factory(OtherDefaults(**shared))[0](gpt2()),
    ):
        assert shown(mars, "lr", "betas", "eps", "weight_decay")[0] == (1e-4, (0.85, 0.99), 1e-8, 0.05)
    mars = made_by(trainer(OtherDefaults(**shared, optim="mars_adamw", adam_beta1=0.9, weight_decay=0.0)))
    assert shown(mars, "betas", "weight_decay")[0] == ((0.9, 0.99), 0.0)
    with pytest.raises(ValueError, match=r"weight_decay=0\.05 in TrainingArguments.* contradict"):
        mars_hf.factory(OtherDefaults(**shared), weight_decay=0.1)


def test_default_factories_of_a_subclass(tmp_path):
    """A default is one whichever way a dataclass states it."""
    stated = {"adam_beta1": 0.85, "optim": "adamw_torch"}
    fields = [(name, type(value), field(default_factory=lambda value=value: value)) for name, value in stated.items()]
    kind = make_dataclass("Stated", fields, bases=(TrainingArguments,))
    args = kind(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert mars_trainer(args, gpt2()).create_optimizer().param_groups[0]["betas"] == (0.85, 0.99)


def test_arguments_are_read_when_the_optimizer_is_made(tmp_path):
    """A search changes them in place, and may contradict what was given."""
    args = arguments(tmp_path, learning_rate=1e-3, adam_beta2=0.9)
    (make, settings), (contradicting, _) = mars_hf.factory(args, gamma=0.1), mars_hf.factory(args, lr=1e-3)
    assert shown(contradicting()(gpt2()), "lr") == [(1e-3,), (5e-4,)]
    args.learning_rate = 1e-4
    mars = make()(gpt2(), **settings)
    assert shown(mars, "lr", "betas") == [(1e-4, (0.95, 0.9)), (5e-5, (0.9, 0.95))]
    with pytest.raises(ValueError, match="contradict"):
        contradicting()(gpt2())


@pytest.mark.parametrize(
    ("stated", "given", "message"),
    [
        ({}, {"lr": 2e-3}, r"=5e-05 in .*, its default, and lr=0\.002 .* set learning_rate=0\.002 in Train.* alone"),
        ({"optim_target_modules": ["attn"]}, {}, r"optim_target_modules=\['attn'\] .* param_rules"),
        ({"adam_beta1": 0.8}, {"betas": (0.95, 0.99)}, r"adam_beta1=0\.8 .* beta1=0\.95"),
        ({}, {"betas": (0.9, 0.99), "beta1": 0.9}, "give one"),
        ({}, {"clip_threshold": -1}, "clip_threshold=-1 is not valid"),
        ({}, {"gama": 0.1}, r"'gama'; did you mean 'gamma'\?; accepted: lr, .*beta1"),
    ],
)
def test_wrong_settings(tmp_path, stated, given, message):
    with pytest.raises(ValueError, match=message) as error:
        mars_hf.factory(arguments(tmp_path, **stated), **given)
    assert isinstance(error.value, TypeError) == ("gama" in given)


@pytest.mark.parametrize(
    ("stated", "given", "message"),
    [
        ({"optim": "mars_m"}, {}, r"optim='mars_m' .* mars_type 'mars-adamw' contradict"),
        ({"optim": "mars_m"}, {"mars_type": "mars-lion"}, r"optim='mars_m' .* mars_type 'mars-lion' contradict"),
        ({"optim": "mars_m", "optim_args": "gamma=0.1"}, {"mars_type": "mars-m"}, r"optim_args='gamma=0\.1'"),
        ({"optim": "mars_adamw", "optim_args": "gamma=0.1"}, {"gamma": 0.2}, r"optim_args='gamma=0\.1'"),
    ],
)
def test_factory_and_a_rule_by_name(tmp_path, stated, given, message):
    """What `optim` and `optim_args` ask for does not go unheard."""
    with pytest.raises(ValueError, match=message):
        mars_hf.factory(arguments(tmp_path, **stated), **given)


def test_factory_of_the_rule_that_optim_names(tmp_path):
    args = arguments(tmp_path, optim="mars_lion")
    make, settings = mars_hf.factory(args, mars_type="mars-lion")
    assert make()(gpt2(), **settings).defaults["mars_type"] == "mars-lion"
    args.optim = OptimizerNames("mars_m")  # as a search sets it
    with pytest.raises(ValueError, match="contradict"):
        make()(gpt2(), **settings)


# --- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["factory", "optim", "model_init"])
def test_parity_with_an_instance(tmp_path, door):
    model = gpt2()
    optimizer = mars_hf.create(model, lr=1e-2, gamma=0.1, weight_decay=0.1)
    trainer(arguments(tmp_path), model, optimizers=(optimizer, None)).train()
    named = {"optim": "mars_adamw", "optim_args": "gamma=0.1"} if door == "optim" else {}
    args = arguments(tmp_path, learning_rate=1e-2, weight_decay=0.1, **named)
    settings = {} if named else {"optimizer_cls_and_kwargs": mars_hf.factory(args, gamma=0.1)}
    settings |= {"model_init": lambda: gpt2()} if door == "model_init" else {}
    run = trainer(args, **settings)
    run.train()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), run.model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, mars_hf.with_mars(SubclassedTrainer)], ids=["own", "with_mars"])
def test_hyperparameter_search_of_optim_and_optim_args(tmp_path, kind):
    """Every trial trains what it was given, not the first one's settings."""
    trials = [("mars_lion", "gamma=0.1"), ("mars_adamw", "gamma=0.2"), ("mars_m", "clip_threshold=0.5,beta1=0.8")]
    seen = []

    class Kind(kind):
        def create_optimizer(self, model=None):
            mars = super().create_optimizer(model)
            seen.append((mars.defaults["mars_type"], *shown(mars, "gamma", "betas", "clip_threshold")[0]))
            return mars

    def space(trial):
        optim = trial.suggest_categorical("optim", [optim for optim, _ in trials])
        return {"optim": optim, "optim_args": dict(trials)[optim]}

    run = Kind(
        args=arguments(tmp_path, max_steps=1, eval_strategy="no"),
        model_init=lambda: gpt2(),
        train_dataset=Blocks(),
        eval_dataset=Blocks(4),
        data_collator=default_data_collator,
    )
    sampler = optuna.samplers.GridSampler({"optim": [optim for optim, _ in trials]}, seed=0)
    run.hyperparameter_search(space, n_trials=3, direction="minimize", backend="optuna", sampler=sampler)
    expected = {
        ("mars-lion", 0.1, (0.95, 0.99), 1.0),
        ("mars-adamw", 0.2, (0.95, 0.99), 1.0),
        ("mars-m", 0.025, (0.8, 0.99), 0.5),
    }
    assert set(seen) == expected and len(seen) == 3


@pytest.mark.slow
def test_hyperparameter_search(tmp_path):
    rates = []

    def objective(metrics):
        rates.append(run.optimizer.optimizer.param_groups[0]["lr"])
        return metrics["eval_loss"]

    args = arguments(tmp_path, max_steps=1)
    run = trainer(args, model_init=lambda trial: gpt2(), optimizer_cls_and_kwargs=mars_hf.factory(args, gamma=0.1))
    run.eval_dataset = run.train_dataset
    grid = {"learning_rate": [1e-3, 1e-4]}
    sampler = optuna.samplers.GridSampler(grid, seed=0)

    def space(trial):
        return {name: trial.suggest_categorical(name, values) for name, values in grid.items()}

    run.hyperparameter_search(space, objective, n_trials=2, direction="minimize", backend="optuna", sampler=sampler)
    assert sorted(rates) == [1e-4, 1e-3]


# --- as other trainers call what Trainer makes its optimizer with ----------------------------------------------------


def decay_groups(run, **settings) -> list[dict]:
    """Arguments come in the form that Trainer and its subclasses use."""
    decayed = set(run.get_decay_parameter_names(run.model))
    named = list(run.model.named_parameters())
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": run.args.weight_decay, **settings},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "optim_args": "gamma=0.1"}


def facts(optimizer: mars_hf.Mars) -> set[tuple]:
    """Return what trains each parameter; groups state their own weight decay."""
    return {
        (*(group[name] for name in ("role", "lr", "gamma")), repr(group["layout"]), param)
        for group in optimizer.param_groups
        for param in group["params"]
    }


@pytest.mark.parametrize("way", ["class", "named", "args", "args again", "optimizer_dict", "params"])
def test_ways_of_calling(tmp_path, way):
    """Trainers that group the parameters must not make mars-m orthogonalize embeddings."""
    rules = tmp_path / "rules.json"
    rules.write_text('[["*.mlp.c_fc.weight", {"role": "adamw"}]]')
    options = {"optim_args": f"gamma=0.1,split_fused=none,param_rules={rules}"}
    run = trainer(arguments(tmp_path, optim="mars_m", **SETTINGS | options))
    expected = made_by(run)
    assert [group["role"] for group in expected.param_groups] == ["matrix", "adamw", "vector", "adamw"]  # no split one
    cls, kwargs = run.get_optimizer_cls_and_kwargs(run.args, run.model)
    assert kwargs["lr"] == 1e-3  # as those of other optimizers
    groups = decay_groups(run)
    optimizer = {
        "class": lambda: cls(groups, **kwargs),
        "named": lambda: cls(params=groups, **kwargs),
        "args": lambda: cls()(run.model, run.args, gamma=0.1),  # Axolotl
        "args again": lambda: cls()(run.model, run.args, **kwargs),
        "optimizer_dict": lambda: cls()(run.model, optimizer_dict=groups, **kwargs),  # sentence-transformers
        "params": lambda: cls()(run.model, params=groups, **kwargs),
    }[way]()
    assert type(optimizer) is mars_hf.Mars and facts(optimizer) == facts(expected)
    assert optimizer.created_with == expected.created_with


def test_names_decide_over_the_groups_of_a_trainer(tmp_path):
    """What `param_rules` state of a name wins over its group; what they do not state is the group's."""
    rules = [("*.wte.weight", {"weight_decay": 0.0, "lr": 5e-3}), ("*.c_fc.weight", {"gamma": 0.2})]
    run = trainer(arguments(tmp_path, optim="mars_adamw", **SETTINGS))
    make, _ = mars_hf.factory(run.args, gamma=0.1, param_rules=rules)
    optimizer = make(run.model, optimizer_dict=decay_groups(run, lr=5e-4))
    found = {
        param: tuple(group[name] for name in ("lr", "weight_decay", "gamma"))
        for group in optimizer.param_groups
        for param in group["params"]
    }
    body, block = run.model.transformer, run.model.transformer.h[0]
    assert found[body.wte.weight] == (5e-3, 0.0, 0.1)
    assert found[block.mlp.c_fc.weight] == (5e-4, 0.1, 0.2)
    assert found[body.wpe.weight] == found[block.attn.c_attn.weight] == (5e-4, 0.1, 0.1)
    assert found[block.ln_1.weight][1] == 0.0


@pytest.mark.parametrize(
    "text", ["weight_decay=0.1", "weight_decay_1d=0.2", "weight_decay=0.1,weight_decay_1d=0.2", "adamw_rates=true"]
)
@pytest.mark.parametrize("rule", ["mars_adamw", "mars_m"])
def test_decays_of_settings_over_the_groups_of_a_trainer(tmp_path, rule, text):
    """sentence-transformers gives its groups the decay of TrainingArguments, which here nobody has stated."""
    stated = {"weight_decay": 0.05} if text == "adamw_rates=true" else {}
    run = trainer(arguments(tmp_path, optim=rule, optim_args=text, learning_rate=1e-3, **stated))
    cls, kwargs = run.get_optimizer_cls_and_kwargs(run.args, run.model)
    optimizer = cls()(run.model, optimizer_dict=decay_groups(run), **kwargs)
    expected = made_by(run)
    found, right = (
        {p: g["weight_decay"] for g in each.param_groups for p in g["params"]} for each in (optimizer, expected)
    )
    assert found == right and any(right.values())
    assert facts(optimizer) == facts(expected)
    assert optimizer.created_with == expected.created_with


def test_rates_of_groups_and_weights_of_a_loss(tmp_path):
    """Groups have their own rates, and a loss has weights outside the model, as in sentence-transformers."""
    run = trainer(arguments(tmp_path, optim="mars_adamw", **SETTINGS))
    loss = torch.nn.Linear(4, 3)
    groups = [*decay_groups(run, lr=5e-4), {"params": list(loss.parameters()), "weight_decay": 0.0}]
    cls, kwargs = run.get_optimizer_cls_and_kwargs(run.args, run.model)
    optimizer = cls()(run.model, optimizer_dict=groups, **kwargs)
    assert shown(optimizer, "role", "lr", "weight_decay") == [
        ("matrix", 5e-4, 0.1),
        ("vector", 5e-4, 0.0),
        ("matrix", 1e-3, 0.0),
        ("vector", 5e-4, 0.0),
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [10, 18, 1, 1]


def test_groups_without_a_model(tmp_path, caplog):
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="mars_m"))
    model = gpt2()
    optimizer = cls([{"params": list(model.parameters())}], **kwargs)
    assert shown(optimizer, "role") == [("matrix",), ("vector",)]
    cls([{"params": list(model.parameters())}], model=model, **kwargs)
    assert caplog.text.count("embeddings and heads included") == 1 and cls() is cls


def test_groups_added_to_a_mars_made_by_name(tmp_path):
    """They take roles and layouts from the model, as after `create(model)`."""
    run = trainer(arguments(tmp_path, optim="mars_m", **SETTINGS))
    run.model.transformer.wte.requires_grad_(False)
    cls, kwargs = run.get_optimizer_cls_and_kwargs(run.args, run.model)
    params = [param for param in run.model.parameters() if param.requires_grad]
    optimizer = cls()(run.model, optimizer_dict=[{"params": params}], **kwargs)
    run.model.transformer.wte.requires_grad_(True)
    optimizer.add_param_group({"params": run.model.transformer.wte.parameters()})
    assert optimizer.param_groups[-1]["role"] == "adamw"


class Copying(Trainer):
    """Copy the arguments, as TRL's trainers do with TrainingArguments that are not of their own class."""

    def __init__(self, model: Any = None, args: Any = None, **others: Any) -> None:
        super().__init__(model, copy.copy(args), **others)


def test_arguments_that_a_trainer_copies(tmp_path):
    """A search changes the copy; the factory read the others, and every trial trained alike. Others are refused."""
    args = arguments(tmp_path, learning_rate=1e-3)
    run = Copying(gpt2(), args, optimizer_cls_and_kwargs=mars_hf.factory(args))
    run.args.learning_rate = 5e-3
    assert run.create_optimizer().param_groups[0]["lr"] == 5e-3
    with pytest.raises(
        ValueError, match=r"other TrainingArguments than the Trainer \(lr=0\.001 and 0\.002\); give both"
    ):
        Copying(gpt2(), arguments(tmp_path, learning_rate=2e-3), optimizer_cls_and_kwargs=mars_hf.factory(args))


def test_rates_by_name_of_sentence_transformers(tmp_path):
    """The factory does not see its `learning_rate_mapping`."""
    args = arguments(tmp_path)
    args.learning_rate_mapping = {}
    mars_hf.factory(args)
    args.learning_rate_mapping = {"classifier": 1e-2}
    with pytest.raises(
        ValueError, match=r"learning_rate_mapping=\{'classifier': 0\.01\} does not reach.*optim='mars_ad"
    ):
        mars_hf.factory(args)


# --- what decays ------------------------------------------------------------------------------------------------------


class Deciding(Trainer):
    """Let every bias decay, and neither the embedding of positions nor the first block."""

    def get_decay_parameter_names(self, model):
        names = super().get_decay_parameter_names(model)
        names += [name for name, _ in model.named_parameters() if name.endswith(".bias")]
        return [name for name in names if ".h.0." not in name and "wpe" not in name]


def decays(mars: mars_hf.Mars) -> dict[str, float]:
    return {name: group["weight_decay"] for group in mars.param_groups for name in group["param_names"]}


def deciding_run(door: str, folder: Any, **settings: Any) -> Trainer:
    """Return a run of `Deciding`, or with everything of MarsTrainer, that makes its own Mars."""
    rule = settings.pop("rule", "mars-adamw")
    names = {"optim": rule.replace("-", "_")} if door in ("optim", "with_mars") else {}
    text = ",".join(f"{name}={value}" for name, value in settings.items())
    args = arguments(folder, weight_decay=0.1, **names, **({"optim_args": text} if door == "optim" else {}))
    kind = Deciding if door in ("optim", "factory") else mars_hf.with_mars(Deciding)
    others: dict[str, Any] = {}
    if door == "factory":
        others["optimizer_cls_and_kwargs"] = mars_hf.factory(args, mars_type=rule, **settings)
    elif door == "with_mars":
        others["mars_kwargs"] = settings
    return kind(gpt2(), args, train_dataset=Blocks(), data_collator=default_data_collator, **others)


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("door", ["optim", "factory", "with_mars"])
def test_a_trainer_that_says_what_decays(door, rule, tmp_path):
    """transformers' documented method, which AdamW follows to the parameter."""
    run = deciding_run(door, tmp_path, rule=rule)
    mars = made_by(run)
    plain = Deciding(gpt2(), arguments(tmp_path, optim="adamw_torch", weight_decay=0.1))
    adamw = plain.create_optimizer()
    names = {param: name for name, param in plain.model.named_parameters()}
    expected = {names[param]: group["weight_decay"] for group in adamw.param_groups for param in group["params"]}
    assert decays(mars) == expected
    assert expected["transformer.h.1.attn.c_attn.bias"] == 0.1 and expected["transformer.wpe.weight"] == 0.0


def test_layers_added_later_decay_as_the_trainer_says(tmp_path):
    run = deciding_run("optim", tmp_path)
    late = run.model.transformer.h[1].mlp.c_fc
    late.requires_grad_(False)
    mars = made_by(run)
    late.requires_grad_(True)
    mars.add_param_group({"params": [late.weight, late.bias]})
    assert [group["weight_decay"] for group in mars.param_groups[-2:]] == [0.1, 0.1]
    assert {group["role"] for group in mars.param_groups[-2:]} == {"matrix", "vector"}


def test_decays_beside_those_of_the_trainer(tmp_path):
    """How much is ours to state, and `param_rules` name parameters themselves."""
    rules = [("*.h.0.mlp.*", {"weight_decay": 0.3})]
    found = decays(made_by(deciding_run("factory", tmp_path, weight_decay_1d=0.2, param_rules=rules)))
    assert found["transformer.h.1.attn.c_attn.bias"] == 0.2 and found["transformer.h.1.attn.c_attn.weight"] == 0.1
    assert found["transformer.h.0.mlp.c_fc.weight"] == 0.3 and found["transformer.h.0.attn.c_attn.weight"] == 0.0


class WithoutVectors(Trainer):
    def get_decay_parameter_names(self, model):
        return [name for name, param in model.named_parameters() if param.ndim == 2]


def test_decay_of_vectors_that_no_name_takes(tmp_path):
    args = arguments(tmp_path, optim="mars_adamw", weight_decay=0.1, optim_args="weight_decay_1d=0.2")
    run = WithoutVectors(gpt2(), args)
    with pytest.raises(ValueError, match=r"weight_decay_1d=0\.2, and WithoutVectors\.get_decay_parameter_names names"):
        run.create_optimizer()


def test_a_trainer_that_says_nothing_of_decays(tmp_path):
    """Our own rule stands: norms of any class, and what `create` does."""
    found = decays(made_by(trainer(arguments(tmp_path, optim="mars_adamw", weight_decay=0.1))))
    assert found == decays(mars_hf.create(gpt2(), lr=1e-3, weight_decay=0.1))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mars_adam", "mars-adamw", "MARS_M", "mars", "mars_sgd", "marsadamw", "mars_muom"])
def test_names_that_are_nearly_ours(name, tmp_path):
    """transformers would list its own 50."""
    with pytest.raises(
        ValueError, match=rf"^optim='{name}' is no optimizer; .*MARS has mars_adamw, mars_lion"
    ) as refused:
        arguments(tmp_path, optim=name)
    line = str(refused.value)
    assert len(line) < 200 and "adafactor" not in line
    if name == "mars_adam":
        assert "did you mean 'mars_adamw'?" in line


def test_other_wrong_names_are_not_ours(tmp_path):
    with pytest.raises(ValueError, match="is not a valid OptimizerNames"):
        arguments(tmp_path, optim="adamw_tortch")
    assert arguments(tmp_path, optim="adamw_torch").optim == OptimizerNames.ADAMW_TORCH


def test_name_of_a_rule(tmp_path):
    mars_hf.register()  # once more
    assert [member.value for member in OptimizerNames].count("mars_adamw") == 1
    args = arguments(tmp_path, optim="mars_adamw")
    assert args.optim is OptimizerNames("mars_adamw") is OptimizerNames.MARS_ADAMW is copy.deepcopy(args).optim
    assert args.to_dict()["optim"] == "mars_adamw"
    pickled = pickle.dumps(args)  # training_args.bin, which loads without mars_hf
    assert b"mars_hf" not in pickled and type(pickle.loads(pickled).optim) is str
    parser = HfArgumentParser(TrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "mars_lion"])
    assert parsed.optim == "mars_lion"
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "mars_sgd"])


def test_optim_args_of_a_mapping(tmp_path):
    optimizer = made_by(trainer(arguments(tmp_path, optim="mars_m", optim_args={"gamma": "5e-2", "beta1": 0.9})))
    assert optimizer.param_groups[0]["gamma"] == 0.05 and optimizer.param_groups[0]["betas"][0] == 0.9


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "adam_epsilon", "adam_beta1"])
def test_arguments_that_are_text(tmp_path, name):
    """YAML reads 1e-3 so, and TrainingArguments take it."""
    with pytest.raises(ValueError, match=rf"^{name}='1e-3' in TrainingArguments is not valid; it is text: write 0.001"):
        arguments(tmp_path, optim="mars_adamw", **{name: "1e-3"})


def test_optim_args(tmp_path):
    text = "gamma=5e-2,clip_threshold=none,amsgrad=True,beta1=0.8,beta2_1d=0.8,state_dtype=bfloat16,fused=false"
    mars = through("optim", tmp_path, text=text)
    assert shown(mars, "betas", "gamma", "clip_threshold", "amsgrad", "fused", "state_dtype") == [
        (betas, 0.05, None, True, False, "bfloat16") for betas in ((0.8, 0.99), (0.9, 0.8))
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=2e-3", r"learning_rate=5e-05 .* lr=0\.002"),
        ("gama=1", "unknown 'gama'; did you mean 'gamma'"),
        ("gamma=much", "gamma='much' is not valid"),
        ("gamma", "'gamma' is not name=value"),
        ("mars_type=mars-lion", "optim='mars_adamw' and mars_type 'mars-lion' contradict.*mars_adamw, mars_lion"),
        ("mars_type=muon", "optim='mars_adamw' and mars_type 'muon' contradict"),
    ],
)
def test_wrong_optim_args(tmp_path, text, message):
    """Errors appear when arguments are built, not when training starts an hour later."""
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, optim="mars_adamw", optim_args=text)
    assert arguments(tmp_path, optim="adamw_torch", optim_args=text).optim_args == text
