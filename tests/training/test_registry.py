"""factory() and register(): Trainer builds MARS as its own optimizer."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass

import optuna
import pytest
import torch
from helpers import arguments, gpt2, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import mars_hf
from mars_hf.training import registry


@pytest.fixture(scope="module", autouse=True)
def registered():
    mars_hf.register()


def made_by(run) -> mars_hf.Mars:
    run.create_optimizer()
    assert type(run.optimizer) is mars_hf.Mars
    return run.optimizer


def rates(optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


# --- TrainingArguments -> hyperparameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["factory", "optim"])
@pytest.mark.parametrize("rate", [{}, {"learning_rate": 5e-5}], ids=["untouched", "explicit"])
def test_default_arguments(tmp_path, door, rate):
    """An explicit 5e-5 looks like the default, and fine-tuning must not use 3e-3."""
    args = arguments(tmp_path, **({"optim": "mars_adamw"} if door == "optim" else {}), **rate)
    made = {"optimizer_cls_and_kwargs": mars_hf.factory(args)} if door == "factory" else {}
    matrix, vector = made_by(trainer(args, **made)).param_groups
    assert (matrix["lr"], matrix["betas"], matrix["eps"], matrix["weight_decay"]) == (5e-5, (0.95, 0.99), 1e-8, 0.0)
    assert (vector["lr"], vector["betas"], vector["weight_decay"]) == (2.5e-5, (0.9, 0.95), 0.0)


@dataclass
class OtherDefaults(TrainingArguments):
    """A subclass with defaults of its own, like trl's configs."""

    learning_rate: float = 1e-6
    adam_beta1: float = 0.8
    adam_epsilon: float = 1e-7


def test_default_arguments_of_a_subclass(tmp_path):
    shared = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "optim": "mars_adamw"}
    matrix, _ = made_by(trainer(OtherDefaults(**shared))).param_groups
    assert (matrix["lr"], matrix["betas"], matrix["eps"]) == (1e-6, (0.95, 0.99), 1e-8)
    matrix, _ = made_by(trainer(OtherDefaults(**shared, adam_beta1=0.9, adam_epsilon=1e-8))).param_groups
    assert matrix["betas"] == (0.9, 0.99)  # TrainingArguments' default is a choice in this class


@pytest.mark.parametrize("door", ["factory", "optim"])
def test_set_arguments(tmp_path, door):
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
    if door == "factory":
        args = arguments(tmp_path, **settings)
        run = trainer(args, optimizer_cls_and_kwargs=mars_hf.factory(args, gamma=0.1, lr_1d=2e-4))
    else:
        run = trainer(arguments(tmp_path, optim="mars_adamw", optim_args="gamma=0.1,lr_1d=2e-4", **settings))
    matrix, vector = made_by(run).param_groups
    assert (matrix["lr"], matrix["betas"], matrix["eps"], matrix["weight_decay"]) == (1e-3, (0.8, 0.99), 1e-6, 0.1)
    assert matrix["gamma"] == vector["gamma"] == 0.1
    assert (vector["lr"], vector["weight_decay"]) == (2e-4, 0.0)


def test_arguments_are_read_when_the_optimizer_is_made(tmp_path):
    args = arguments(tmp_path, learning_rate=1e-3, adam_beta2=0.9)
    make, settings = mars_hf.factory(args, gamma=0.1)
    args.learning_rate = 1e-4
    mars = make()(gpt2(), **settings)
    assert rates(mars) == [1e-4, 5e-5] and mars.param_groups[0]["betas"] == (0.95, 0.9)


def test_contradictions(tmp_path):
    with pytest.raises(ValueError, match=r"learning_rate=5e-05 .* lr=0\.002 .* give learning_rate alone"):
        mars_hf.factory(arguments(tmp_path), lr=2e-3)
    with pytest.raises(ValueError, match=r"learning_rate=5e-05 .* lr=0\.002"):
        arguments(tmp_path, optim="mars_adamw", optim_args="lr=2e-3")
    with pytest.raises(ValueError, match=r"adam_beta1=0\.8 .* beta1=0\.95"):
        mars_hf.factory(arguments(tmp_path, adam_beta1=0.8), betas=(0.95, 0.99))
    args = arguments(tmp_path, learning_rate=1e-3)
    same = trainer(args, optimizer_cls_and_kwargs=mars_hf.factory(args, lr=1e-3))
    assert rates(made_by(same)) == [1e-3, 5e-4]
    args.learning_rate = 1e-4  # as a search would
    with pytest.raises(ValueError, match="contradict"):
        trainer(args, optimizer_cls_and_kwargs=same.optimizer_cls_and_kwargs).create_optimizer()


def test_wrong_settings(tmp_path):
    args = arguments(tmp_path)
    for error in (ValueError, TypeError):
        with pytest.raises(error, match=r"'gama'; did you mean 'gamma'\?; accepted: lr, .*beta1"):
            mars_hf.factory(args, gama=0.1)
    with pytest.raises(ValueError, match="clip_threshold=-1 is not valid"):
        mars_hf.factory(args, clip_threshold=-1)
    with pytest.raises(ValueError, match="give one"):
        mars_hf.factory(args, betas=(0.9, 0.99), beta1=0.9)


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


def test_lion_by_name(tmp_path):
    matrix, vector = made_by(trainer(arguments(tmp_path, optim="mars_lion"))).param_groups
    assert matrix["mars_type"] == vector["mars_type"] == "mars-lion"
    assert (matrix["lr"], matrix["betas"], vector["lr"], vector["betas"]) == (5e-5, (0.95, 0.99), 2.5e-5, (0.9, 0.95))
    with pytest.raises(ValueError, match="contradict"):
        arguments(tmp_path, optim="mars_lion", optim_args="mars_type=mars-adamw")


@pytest.mark.parametrize("name", ["mars_shampoo", "mars_m"])
def test_rules_that_orthogonalize_by_name(tmp_path, name):
    rules = tmp_path / "rules.json"
    rules.write_text('[["*.mlp.c_fc.weight", {"role": "adamw"}]]')
    text = f"split_fused=none,param_rules={rules},ns_steps=3"
    run = trainer(arguments(tmp_path, optim=name, learning_rate=1e-3, optim_args=text))
    run.train()
    groups = [group for group in run.optimizer.optimizer.param_groups if group["params"]]
    assert [group["role"] for group in groups] == ["matrix", "adamw", "vector", "adamw"]  # no matrix is split
    assert {(group["mars_type"], group["ns_steps"]) for group in groups} == {(name.replace("_", "-"), 3)}
    names = [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in (0, 1)]
    assert [name for name in groups[3]["param_names"] if "c_fc" in name] == names


@pytest.mark.slow
def test_hyperparameter_search(tmp_path):
    seen = []

    class Recorded(registry.MarsFactory):
        def __call__(self, *model):
            optimizer = super().__call__(*model)
            if model:
                seen.append(optimizer.param_groups[0]["lr"])
            return optimizer

    args = arguments(tmp_path, max_steps=1, eval_strategy="no")
    made_by = Recorded(args, {"gamma": 0.1})
    run = trainer(args, model_init=lambda trial: gpt2(), optimizer_cls_and_kwargs=(made_by, {}))
    run.eval_dataset = run.train_dataset
    proposals = []

    def space(trial):
        proposals.append(trial.suggest_categorical("learning_rate", [1e-3, 5e-5]))
        return {"learning_rate": proposals[-1]}

    best = run.hyperparameter_search(
        hp_space=space,
        backend="optuna",
        n_trials=2,
        direction="minimize",
        compute_objective=lambda m: m["eval_loss"],
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e-3, 5e-5]}, seed=0),
    )
    assert seen == proposals and set(seen) == {1e-3, 5e-5}
    assert best.hyperparameters["learning_rate"] in proposals


# --- as other trainers call what Trainer makes its optimizer with ----------------------------------------------------


def described(optimizer) -> list[tuple]:
    return [
        (group["role"], group["lr"], group["weight_decay"], group["gamma"], [id(param) for param in group["params"]])
        for group in optimizer.param_groups
    ]


def decay_groups(run, **settings) -> list[dict]:
    """Arguments come in the form that Trainer and its subclasses use."""
    decayed = set(run.get_decay_parameter_names(run.model))
    named = list(run.model.named_parameters())
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": run.args.weight_decay, **settings},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "optim_args": "gamma=0.1"}


@pytest.mark.parametrize("way", ["class", "named", "args", "args again", "optimizer_dict", "params"])
def test_ways_of_calling(tmp_path, way):
    run = trainer(arguments(tmp_path, optim="mars_adamw", **SETTINGS))
    expected = described(made_by(run))
    cls, kwargs = run.get_optimizer_cls_and_kwargs(run.args)
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
    assert type(optimizer) is mars_hf.Mars
    found = described(optimizer)
    assert [group[:4] for group in found] == [group[:4] for group in expected]
    assert [set(group[4]) for group in found] == [set(group[4]) for group in expected]


def test_rates_of_groups_and_weights_of_a_loss(tmp_path):
    """Groups have their own rates, and a loss has weights outside the model, as in sentence-transformers."""
    run = trainer(arguments(tmp_path, optim="mars_adamw", **SETTINGS))
    loss = torch.nn.Linear(4, 3)
    groups = [*decay_groups(run, lr=5e-4), {"params": list(loss.parameters()), "weight_decay": 0.0}]
    cls, kwargs = run.get_optimizer_cls_and_kwargs(run.args, run.model)
    optimizer = cls()(run.model, optimizer_dict=groups, **kwargs)
    assert [(group["role"], group["lr"], len(group["params"])) for group in optimizer.param_groups] == [
        ("matrix", 5e-4, 10),
        ("vector", 5e-4, 18),
        ("matrix", 1e-3, 1),
        ("vector", 5e-4, 1),
    ]


class CreatesFromGroups(Trainer):
    """A Trainer that builds its optimizer from groups, as some subclasses do."""

    def create_optimizer(self, model=None):
        cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = cls(decay_groups(self), **kwargs)
        return self.optimizer


@pytest.mark.parametrize("name", ["mars_adamw", "mars_m"])
def test_roles_of_groups(tmp_path, name):
    """Grouping the parameters must not make mars-m orthogonalize embeddings."""
    run = trainer(arguments(tmp_path, optim=name, **SETTINGS))
    expected = {(g["role"], repr(g["layout"])): {id(p) for p in g["params"]} for g in made_by(run).param_groups}
    other = CreatesFromGroups(run.model, arguments(tmp_path, optim=name, **SETTINGS))
    found = {}
    for group in made_by(other).param_groups:
        found.setdefault((group["role"], repr(group["layout"])), set()).update(id(p) for p in group["params"])
    assert found == expected


def test_groups_without_a_model(tmp_path, caplog):
    args = arguments(tmp_path, optim="mars_m")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    model = gpt2()
    optimizer = cls([{"params": list(model.parameters())}], **kwargs)
    assert [group["role"] for group in optimizer.param_groups] == ["matrix", "vector"]
    assert "embeddings and heads included" in caplog.text
    caplog.clear()
    cls([{"params": list(model.parameters())}], model=model, **kwargs)
    assert not caplog.text
    assert cls() is cls


def test_groups_keep_options_for_models(tmp_path):
    model = gpt2()
    rules = [("*.mlp.c_fc.weight", {"role": "adamw"})]
    made, settings = mars_hf.factory(arguments(tmp_path), mars_type="mars-m", param_rules=rules)
    mars = made(list(model.parameters()), model=model, **settings)
    assert {"param_rules": rules, "mars_type": "mars-m"}.items() <= mars.created_with.items()


# --- names -----------------------------------------------------------------------------------------------------------


def test_name_of_a_rule(tmp_path):
    mars_hf.register()  # once more
    assert [member.value for member in OptimizerNames].count("mars_adamw") == 1
    args = arguments(tmp_path, optim="mars_adamw")
    assert args.optim is OptimizerNames("mars_adamw") is OptimizerNames.MARS_ADAMW is copy.deepcopy(args).optim
    assert args.to_dict()["optim"] == "mars_adamw"
    parser = HfArgumentParser(TrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "mars_lion"])
    assert parsed.optim == "mars_lion"
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "mars_sgd"])


@pytest.mark.slow
def test_training_args_load_without_mars_hf(tmp_path):
    args = arguments(tmp_path, optim="mars_adamw")
    assert pickle.loads(pickle.dumps(args.optim)) == "mars_adamw"
    torch.save(args, tmp_path / "training_args.bin")
    script = (
        "import sys, torch\n"
        f"args = torch.load({str(tmp_path / 'training_args.bin')!r}, weights_only=False)\n"
        "assert args.optim == 'mars_adamw', args.optim\n"
        "assert 'mars_hf' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_optim_args(tmp_path):
    text = "gamma=5e-2,clip_threshold=none,amsgrad=True,beta1=0.8,beta2_1d=0.8,state_dtype=bfloat16,fused=false"
    group, vectors = made_by(trainer(arguments(tmp_path, optim="mars_adamw", optim_args=text))).param_groups
    assert (group["gamma"], group["clip_threshold"], group["amsgrad"], group["fused"]) == (0.05, None, True, False)
    assert (group["betas"], vectors["betas"], group["state_dtype"]) == ((0.8, 0.99), (0.9, 0.8), "bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama=1", "unknown 'gama'; did you mean 'gamma'"),
        ("gamma=much", "gamma='much' is not valid"),
        ("gamma", "'gamma' is not name=value"),
        ("mars_type=mars-lion", "optim='mars_adamw' and mars_type 'mars-lion' contradict.*mars_adamw, mars_lion"),
    ],
)
def test_wrong_optim_args(tmp_path, text, message):
    """Errors appear when arguments are built, not when training starts an hour later."""
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, optim="mars_adamw", optim_args=text)
    assert arguments(tmp_path, optim="adamw_torch", optim_args=text).optim_args == text
