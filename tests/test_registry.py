"""factory() and register(): MARS where Trainer makes its own optimizer."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import arguments, gpt2, trainer
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

import mars_hf
from mars_hf import registry


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


def test_untouched_arguments_leave_mars_defaults(tmp_path):
    optimizer = made_by(trainer(arguments(tmp_path), optimizer_cls_and_kwargs=mars_hf.factory()))
    matrix, vector = optimizer.param_groups
    assert (matrix["lr"], matrix["betas"], matrix["eps"], matrix["weight_decay"]) == (3e-3, (0.95, 0.99), 1e-8, 0.0)
    assert (vector["lr"], vector["betas"], vector["weight_decay"]) == (1.5e-3, (0.9, 0.95), 0.0)


@pytest.mark.parametrize("door", ["factory", "optim"])
def test_set_arguments_are_taken(tmp_path, door):
    settings = {
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_epsilon": 1e-6,
    }
    if door == "factory":
        run = trainer(arguments(tmp_path, **settings), optimizer_cls_and_kwargs=mars_hf.factory(gamma=0.1, lr_1d=2e-4))
    else:
        run = trainer(arguments(tmp_path, optim="mars_adamw", optim_args="gamma=0.1,lr_1d=2e-4", **settings))
    matrix, vector = made_by(run).param_groups
    assert (matrix["lr"], matrix["betas"], matrix["eps"], matrix["weight_decay"]) == (1e-3, (0.8, 0.99), 1e-6, 0.1)
    assert matrix["gamma"] == vector["gamma"] == 0.1
    assert (vector["lr"], vector["weight_decay"]) == (2e-4, 0.0)


def test_each_beta_counts_for_itself(tmp_path):
    optimizer = made_by(trainer(arguments(tmp_path, adam_beta2=0.9), optimizer_cls_and_kwargs=mars_hf.factory()))
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.9)


def test_contradictions_are_refused(tmp_path):
    run = trainer(arguments(tmp_path, learning_rate=1e-3), optimizer_cls_and_kwargs=mars_hf.factory(lr=2e-3))
    with pytest.raises(ValueError, match=r"learning_rate=0\.001.*lr=0\.002"):
        run.create_optimizer()
    run = trainer(arguments(tmp_path, adam_beta1=0.8), optimizer_cls_and_kwargs=mars_hf.factory(betas=(0.95, 0.99)))
    with pytest.raises(ValueError, match="adam_beta1"):
        run.create_optimizer()
    same = trainer(arguments(tmp_path, learning_rate=1e-3), optimizer_cls_and_kwargs=mars_hf.factory(lr=1e-3))
    assert rates(made_by(same)) == [1e-3, 5e-4]


def test_arguments_may_be_handed_over(tmp_path):
    args = arguments(tmp_path, learning_rate=1e-3)
    make, settings = mars_hf.factory(args, gamma=0.1)
    assert rates(make()(gpt2(), **settings)) == [1e-3, 5e-4]


def test_outside_of_a_trainer_the_defaults_hold():
    make, settings = mars_hf.factory(gamma=0.1)
    assert rates(make()(gpt2(), **settings)) == [3e-3, 1.5e-3]


def test_wrong_settings_are_refused_where_they_are_given():
    with pytest.raises(ValueError, match=r"'gama'.*gamma.*beta1"):
        mars_hf.factory(gama=0.1)
    with pytest.raises(TypeError, match="'gama'"):
        mars_hf.factory(gama=0.1)
    with pytest.raises(ValueError, match="clip_threshold"):
        mars_hf.factory(clip_threshold=-1)
    with pytest.raises(ValueError, match="give one"):
        mars_hf.factory(betas=(0.9, 0.99), beta1=0.9)


# --- Trainer ---------------------------------------------------------------------------------------------------------


def by_hand(args) -> list[torch.Tensor]:
    """Weights after the same run with an instance handed to Trainer."""
    model = gpt2()
    optimizer = mars_hf.create(model, lr=1e-2, gamma=0.1, weight_decay=0.1)
    trainer(args, model, optimizers=(optimizer, None)).train()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("door", ["factory", "optim", "model_init"])
def test_every_door_trains_the_same_model(tmp_path, door):
    expected = by_hand(arguments(tmp_path))
    model = gpt2()
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1}
    if door == "optim":
        run = trainer(arguments(tmp_path, optim="mars_adamw", optim_args="gamma=0.1", **settings), model)
    elif door == "factory":
        run = trainer(arguments(tmp_path, **settings), model, optimizer_cls_and_kwargs=mars_hf.factory(gamma=0.1))
    else:
        run = trainer(
            arguments(tmp_path, **settings),
            model_init=lambda: gpt2(),
            optimizer_cls_and_kwargs=mars_hf.factory(gamma=0.1),
        )
    run.train()
    weights = [param.detach() for param in run.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def test_lion_by_name(tmp_path):
    optimizer = made_by(trainer(arguments(tmp_path, optim="mars_lion", learning_rate=1e-4)))
    assert {group["mars_type"] for group in optimizer.param_groups} == {"mars-lion"}
    run = trainer(arguments(tmp_path, optim="mars_lion", optim_args="mars_type=mars-adamw"))
    with pytest.raises(ValueError, match="contradict"):
        run.create_optimizer()


@pytest.mark.parametrize("name", ["mars_shampoo", "mars_m"])
def test_rules_that_orthogonalize_by_name(tmp_path, name):
    text = "split_fused=none,adamw=*.mlp.c_fc.weight,ns_steps=3"
    run = trainer(arguments(tmp_path, optim=name, learning_rate=1e-3, optim_args=text))
    run.train()
    groups = [group for group in run.optimizer.optimizer.param_groups if group["params"]]
    assert [group["role"] for group in groups] == ["matrix", "embedding", "vector"]  # none of the matrices is split
    assert {(group["mars_type"], group["ns_steps"]) for group in groups} == {(name.replace("_", "-"), 3)}
    assert [name for name in groups[1]["param_names"] if "c_fc" in name] == [
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.1.mlp.c_fc.weight",
    ]


def test_hyperparameter_search_reaches_the_optimizer(tmp_path):
    seen = []

    class Recorded(registry.MarsFactory):
        def __call__(self, model, **settings):
            optimizer = super().__call__(model, **settings)
            seen.append(optimizer.param_groups[0]["lr"])
            return optimizer

    _, settings = mars_hf.factory(gamma=0.1)
    args = arguments(tmp_path, max_steps=1, eval_strategy="no")
    run = trainer(args, model_init=lambda trial: gpt2(), optimizer_cls_and_kwargs=(Recorded, settings))
    run.eval_dataset = run.train_dataset
    proposals = []

    def space(trial):
        proposals.append(trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True))
        return {"learning_rate": proposals[-1]}

    best = run.hyperparameter_search(
        hp_space=space, backend="optuna", n_trials=3, direction="minimize", compute_objective=lambda m: m["eval_loss"]
    )
    assert seen == pytest.approx(proposals) and len(set(seen)) == 3
    assert best.hyperparameters["learning_rate"] in proposals


# --- names -----------------------------------------------------------------------------------------------------------


def test_registering_twice_is_once():
    before = list(OptimizerNames)
    mars_hf.register()
    assert list(OptimizerNames) == before
    assert [member.value for member in OptimizerNames].count("mars_adamw") == 1


def test_the_name_behaves_like_a_built_in(tmp_path):
    args = arguments(tmp_path, optim="mars_adamw")
    assert args.optim is OptimizerNames("mars_adamw") is OptimizerNames.MARS_ADAMW
    assert args.to_dict()["optim"] == "mars_adamw"
    assert copy.deepcopy(args).optim is args.optim
    parser = HfArgumentParser(TrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "mars_lion"])
    assert parsed.optim == "mars_lion"
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "mars_sgd"])


def test_training_args_load_where_mars_hf_is_not(tmp_path):
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


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("gamma=0.025", "gamma", 0.025),
        ("gamma=5e-2", "gamma", 0.05),
        ("clip_threshold=none", "clip_threshold", None),
        ("amsgrad=True", "amsgrad", True),
        ("optimize_1d=false", "optimize_1d", False),
        ("foreach=1", "foreach", True),
        ("second_moment=gradient", "second_moment", "gradient"),
        ("beta1=0.8", "betas", (0.8, 0.99)),
        ("beta2_1d=0.8", "betas_1d", (0.9, 0.8)),
        ("lr_1d=1e-4", "lr_1d", 1e-4),
        ("fused=false", "fused", False),
        ("state_dtype=bfloat16", "state_dtype", "bfloat16"),
        ("ns_steps=6", "ns_steps", 6),
        ("ns_coefficients=polar-express", "ns_coefficients", "polar-express"),
        ("ns_dtype=none", "ns_dtype", None),
        ("split_fused=none", "split_fused", "none"),
        ("orthogonalize_embeddings=true", "orthogonalize_embeddings", True),
        ("adamw=*.c_proj.weight|*.c_fc.weight", "adamw", ["*.c_proj.weight", "*.c_fc.weight"]),
        ("no_decay=*.wte.weight|*.wpe.weight", "no_decay", ["*.wte.weight", "*.wpe.weight"]),
    ],
)
def test_optim_args_are_read(text, key, value):
    parsed = registry.parse_optim_args(dict([text.split("=")]))
    assert registry.resolve(parsed, None)[key] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama=1", r"'gama'.*gamma"),
        ("betas=0.9", r"'betas'.*beta1"),
        ("gamma=much", "not a number"),
        ("amsgrad=maybe", "true, false"),
        ("ns_steps=2.5", "not a number"),
        ("layout=none", "unknown 'layout'"),
        ("adamw=*.wte.weight", "orthogonalizes nothing"),
        ("mars_type=mars-sgd", "mars_adamw, mars_lion"),
    ],
)
def test_optim_args_that_cannot_be_read(tmp_path, text, message):
    run = trainer(arguments(tmp_path, optim="mars_adamw", optim_args=text))
    with pytest.raises(ValueError, match=message):
        run.create_optimizer()
