"""MarsTrainer, and `with_mars` for other classes of trainers: the optimizer, its settings, what a class overrides."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from any_trainer import STEPS, TEXTS, hold_to_straight_lines, optimizer_of, tokenizer
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import mars_hf
from mars_hf.training.registry import OPTIM_NAMES
from mars_hf.training.trainer import TrainerWithMars

ROOT = Path(__file__).resolve().parents[2]


def weights(run) -> list[Tensor]:
    return [param.detach() for param in run.model.parameters()]


# --- a given optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_given_optimizer_and_scheduler(tmp_path):
    results = []
    for make in (trainer, mars_trainer):
        model = gpt2()
        optimizer = mars_hf.create(model, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        run = make(arguments(tmp_path), model, optimizers=(optimizer, scheduler))
        run.train()
        assert run.optimizer.optimizer is optimizer and optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)
        results.append(weights(run))
    assert all(map(torch.equal, *results))


def test_another_optimizer_that_is_given(tmp_path):
    model = gpt2()
    given = torch.optim.AdamW(model.parameters())
    run = mars_trainer(arguments(tmp_path, optim="sgd"), model, optimizers=(given, None))
    run.train()
    assert run.optimizer.optimizer is given


def test_two_sources_of_optimizers(tmp_path):
    model, args = gpt2(), arguments(tmp_path)
    instance, by_factory = {"optimizers": (mars_hf.create(model), None)}, mars_hf.factory(args)
    for other in ({"model_init": gpt2}, {"optimizer_cls_and_kwargs": by_factory}):
        with pytest.raises(ValueError, match=next(iter(other))):
            mars_trainer(args, model, **instance, **other)
    for source in (instance, {"optimizer_cls_and_kwargs": by_factory}):
        with pytest.raises(ValueError, match=r"mars_kwargs=\{'gamma': 0.1\} and an optimizer are both given"):
            mars_trainer(args, model, mars_kwargs={"gamma": 0.1}, **source)


class Configured(Trainer):
    """A Trainer with an argument of its own, like trl's trainers."""

    def __init__(self, model, args, own, train_dataset=None, optimizers=(None, None), callbacks=None):
        self.own = own
        super().__init__(model, args, default_data_collator, train_dataset, optimizers=optimizers, callbacks=callbacks)


class PassingOn(Trainer):
    """A Trainer that names none of its arguments."""

    def __init__(self, *args, own, **kwargs):
        self.own = own
        super().__init__(*args, data_collator=default_data_collator, **kwargs)


@pytest.mark.parametrize("other", [Configured, PassingOn])
@pytest.mark.parametrize("order", [1, -1])
def test_inheritance_with_other_trainers(tmp_path, other, order):
    model = gpt2()
    optimizer = mars_hf.create(model, is_approx=False)
    both = type("Both", (mars_hf.MarsTrainer, other)[::order], {})
    run = both(model, arguments(tmp_path), own=1, train_dataset=Blocks(), optimizers=(optimizer, None))
    assert run.optimizer is None and run._kept_optimizer is optimizer and run.own == 1
    run.train()
    assert run.optimizer.optimizer is optimizer


# --- without an optimizer ---------------------------------------------------------------------------------------------


class ByName(Trainer):
    """Make the optimizer as many trainers do: by the name in TrainingArguments, for groups of one's own."""

    def create_optimizer(self, model=None):
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(self.args)
        self.optimizer = kind([{"params": list(self.model.parameters())}], **settings)
        return self.optimizer


@pytest.mark.parametrize("kind", [Trainer, ByName])
@pytest.mark.parametrize(
    ("named", "given", "expected"),
    [
        ({}, {}, {}),
        ({}, {"mars_type": "mars-lion", "gamma": 0.05, "beta1": 0.8}, {}),
        ({"optim_args": "gamma=0.1"}, {"clip_threshold": None}, {"gamma": 0.1}),
        ({"optim": "mars_m"}, {"lr_1d": 2e-3}, {"mars_type": "mars-m"}),
        ({"optim": "mars_shampoo", "optim_args": "ns_steps=3"}, {"mars_type": "mars-shampoo"}, {"ns_steps": 3}),
    ],
)
def test_parity_with_factory(tmp_path, kind, named, given, expected):
    values = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.9, "max_grad_norm": 0.0}
    data = {"train_dataset": Blocks(), "data_collator": default_data_collator}
    run = mars_hf.with_mars(kind)(gpt2(), arguments(tmp_path, **values, **named), mars_kwargs=given, **data)
    args = arguments(tmp_path, **values)
    twin = trainer(args, gpt2(), optimizer_cls_and_kwargs=mars_hf.factory(args, **given, **expected))
    run.train(), twin.train()
    assert isinstance(run.optimizer.optimizer, mars_hf.Mars)
    assert all(map(torch.equal, weights(run), weights(twin)))


def test_arguments_stay_the_users(tmp_path):
    args = arguments(tmp_path)
    run = mars_trainer(args, gpt2())
    run.train()
    assert run.args is args and "mars" not in str(args.optim) and not hasattr(args, "mars_kwargs")
    baseline = trainer(args, gpt2())
    baseline.train()
    assert type(baseline.optimizer.optimizer) is torch.optim.AdamW


def test_exact_mars_of_model_init(tmp_path):
    run = mars_trainer(arguments(tmp_path), None, model_init=lambda: gpt2(), mars_kwargs={"is_approx": False})
    run.train()
    assert run.optimizer.optimizer.is_exact and run.optimizer.optimizer.has_previous_params


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, mars_hf.with_mars(ByName)])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_another_optimizer_by_name(tmp_path, kind, optim):
    with pytest.raises(ValueError, match=rf"optim='{optim}' and {kind.__name__}, which trains MARS.* mars_m, leave"):
        kind(gpt2(), arguments(tmp_path, optim=optim))


@pytest.mark.parametrize(
    ("named", "given", "message"),
    [
        ({}, {"gama": 0.1}, "gama"),
        ({}, {"gamma": -1}, "gamma=-1"),
        ({"learning_rate": 1e-3}, {"lr": 1e-2}, "contradict each other; give learning_rate alone"),
        ({"optim_args": "gamma=0.1"}, {"gamma": 0.1}, "gamma: given in optim_args='gamma=0.1' and in mars_kwargs"),
        ({"optim": "mars_m"}, {"mars_type": "mars-lion"}, "optim='mars_m' and mars_type 'mars-lion' contradict"),
    ],
)
def test_wrong_mars_kwargs(tmp_path, named, given, message):
    with pytest.raises(ValueError, match=message):
        mars_trainer(arguments(tmp_path, **named), gpt2(), mars_kwargs=given)


def test_class_that_makes_its_optimizer_at_once(tmp_path):
    class AtOnce(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.create_optimizer()

    make = mars_hf.with_mars(AtOnce)
    run = make(gpt2(), arguments(tmp_path), train_dataset=Blocks(), mars_kwargs={"gamma": 0.1})
    run.train()
    assert {group["gamma"] for group in run.optimizer.optimizer.param_groups} == {0.1}
    with pytest.raises(ValueError, match=r"optim='adafactor' and .*, which trains MARS"):
        make(gpt2(), arguments(tmp_path, optim="adafactor"))


def test_override_that_makes_another_optimizer(tmp_path):
    class Other(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            return self.optimizer

    run = mars_hf.with_mars(Other)(gpt2(), arguments(tmp_path), train_dataset=Blocks())
    with pytest.raises(RuntimeError, match="AdamW, not Mars"):
        run.train()
    assert run.state.global_step == 0


# --- with_mars --------------------------------------------------------------------------------------------------------


class Own(Trainer):
    """Override what people override."""

    def __init__(self, *args: Any, temperature: float = 2.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature
        self.calls: list[str] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits / self.temperature
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


class Stepping(Own):
    """A training step without Trainer's."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.calls.append("training_step")
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Clipping(Own):
    """Clip, and look at what has come of it."""

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        after = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        assert after <= 1.0001
        self.calls.append("_clip_grad_norm")
        return norm


class Making(Own):
    """Make the optimizer, from settings of its own."""

    exact = False

    def create_optimizer(self, model: Any = None) -> Any:
        self.calls.append("create_optimizer")
        self.optimizer = self.optimizer or optimizer_of(list(self.model.parameters()), self.exact)
        return self.optimizer


@pytest.fixture
def make(tmp_path) -> Callable[..., Any]:
    """Return a function that makes a trainer of a class for GPT-2, with every argument by its position."""

    def made(kind: type, optimizer: Callable[[Any], Any]) -> Any:
        model, args = gpt2(), arguments(tmp_path, max_steps=STEPS)
        before = (model, args, default_data_collator, Blocks(), *[None] * 6)  # to callbacks
        return kind(*before, (None if issubclass(kind, Making) else optimizer(list(model.parameters())), None))

    return made


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [Own, Stepping, Clipping, Making])
def test_overrides_against_straight_lines(make, kind, exact, monkeypatch):
    monkeypatch.setattr(Making, "exact", exact)
    run = hold_to_straight_lines(make, kind, exact=exact)
    overrides = {Stepping: "training_step", Clipping: "_clip_grad_norm", Making: "create_optimizer"}
    assert all(name in run.calls for own, name in overrides.items() if isinstance(run, own))


def test_class_of_with_mars():
    assert mars_hf.with_mars(Trainer) is mars_hf.MarsTrainer
    made = mars_hf.with_mars(Own)
    assert made is mars_hf.with_mars(Own) and issubclass(made, Own) and made.__name__ == "MarsOwn"
    assert mars_hf.with_mars(made) is made
    assert list(inspect.signature(made).parameters) == ["args", "temperature", "mars_kwargs", "kwargs"]
    mixed = type("Mixed", (Own, mars_hf.MarsTrainer), {})
    assert mars_hf.with_mars(mixed) is mixed
    for wrong in (nn.Module, "Trainer", None):
        with pytest.raises(TypeError, match="give a class of trainers"):
            mars_hf.with_mars(wrong)


@pytest.mark.parametrize(("kind", "norm"), [(Own, 1.0), (Clipping, None)])
def test_folding_only_where_clipping_is_not_overridden(make, kind, norm):
    class Seen(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
            assert optimizer.optimizer.max_grad_norm == norm
            run.calls.append("seen")

    run = make(mars_hf.with_mars(kind), lambda params: optimizer_of(params, False))
    run.add_callback(Seen())
    run.train()
    assert run.calls.count("seen") == STEPS


def test_trainer_that_generates_cannot_be_exact(make):
    class Generates(Own):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return inputs

    run = make(mars_hf.with_mars(Generates), lambda params: optimizer_of(params, True))
    with pytest.raises(
        NotImplementedError, match=r"_generate_and_score_completions makes new completions.*is_approx=True"
    ):
        run.train()
    assert run.state.global_step == 0
    make(mars_hf.with_mars(Generates), lambda params: optimizer_of(params, False)).train()


# --- Axolotl: stand-ins for what the plugin uses, and the package itself ----------------------------------------------


class AxolotlRewardTrainer(Trainer):
    """Known by identity in Axolotl, and without `dataset_tags`."""


class ChosenTrainer(Trainer):
    """A class that Axolotl chooses."""

    def __init__(self, *args: Any, dataset_tags: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Config(dict):
    """Keys as attributes, None where there is none, as in Axolotl's."""

    __getattr__ = dict.get


@pytest.fixture
def build(monkeypatch, tmp_path) -> Any:
    """Return a function that goes through a run of Axolotl, up to the trainer, with stand-ins for what is used."""

    class BasePlugin:
        def register(self, cfg: Any) -> None: ...

        def pre_model_load(self, cfg: Any) -> None: ...

    class TrainerBuilderBase:
        def __init__(self, cfg: Any) -> None:
            self.cfg = cfg

        def hook_pre_create_trainer(self, trainer_kwargs: Any, trainer_cls: Any) -> tuple[Any, Any]:
            return trainer_kwargs, trainer_cls

    for name in ("", ".integrations", ".integrations.base", ".core", ".core.builders", ".core.builders.base"):
        module = ModuleType(f"axolotl{name}")
        vars(module).update(BasePlugin=BasePlugin, TrainerBuilderBase=TrainerBuilderBase)
        monkeypatch.setitem(sys.modules, f"axolotl{name}", module)
    monkeypatch.delitem(sys.modules, "mars_hf.training.axolotl", raising=False)

    def built(cfg: Config, kind: type = ChosenTrainer, **settings: Any) -> Any:
        plugin = mars_hf.AxolotlPlugin()
        plugin.register(cfg), plugin.pre_model_load(cfg), plugin.pre_model_load(cfg)
        args = arguments(tmp_path, optim=cfg.optimizer, max_steps=2, **settings)
        kwargs = {"model": gpt2(), "args": args, "train_dataset": Blocks()}
        kwargs, kind = TrainerBuilderBase(cfg).hook_pre_create_trainer(kwargs, kind)
        return kind(**kwargs, **({} if kind is AxolotlRewardTrainer else {"dataset_tags": ["rows"]}))

    yield built
    sys.modules.pop("mars_hf.training.axolotl", None)  # its base class is the stand-in


def test_axolotl_plugin(build):
    """Exact MARS is what a trainer without it refuses."""
    cfg = Config(optimizer="mars_adamw", optim_args={"gamma": 0.05, "is_approx": False, "clip_threshold": None})
    trainer = build(cfg, optim_args=",".join(f"{key}={value}" for key, value in cfg.optim_args.items()))
    assert isinstance(trainer, TrainerWithMars) and isinstance(trainer, ChosenTrainer)
    trainer.train()
    mars = trainer.optimizer.optimizer
    assert mars.is_exact and {"gamma": 0.05, "clip_threshold": None}.items() <= mars.param_groups[0].items()


def test_axolotl_reward_trainer_and_another_optimizer(build):
    trainer = build(Config(optimizer="mars_adamw"), AxolotlRewardTrainer)
    assert type(trainer) is AxolotlRewardTrainer
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, mars_hf.Mars)
    assert type(build(Config(optimizer="adamw_torch"))) is ChosenTrainer  # others keep theirs


def test_axolotl_config_of_the_docs():
    page = (ROOT / "docs" / "elsewhere.md").read_text()
    cfg = Config(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert cfg.plugins == ["mars_hf.AxolotlPlugin"] and cfg.optimizer in OPTIM_NAMES


CONFIG = """
base_model: tiny
datasets: [{path: rows.jsonl, type: completion}]
sequence_len: 32
plugins: [mars_hf.AxolotlPlugin]
optimizer: mars_adamw
optim_args: {is_approx: false}
learning_rate: 6e-3
micro_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 2
num_epochs: 1
logging_steps: 1
val_set_size: 0
bf16: false
dataset_num_proc: 1
dataset_prepared_path: prepared
output_dir: out
"""


@pytest.mark.slow
def test_axolotl_trains(tmp_path):
    pytest.importorskip("axolotl", reason="axolotl is not installed; it pins other versions than the test extra has")
    tokenizer().save_pretrained(tmp_path / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "tiny")
    Path(tmp_path, "rows.jsonl").write_text("\n".join([json.dumps({"text": TEXTS[0]})] * 32))
    Path(tmp_path, "config.yaml").write_text(CONFIG)
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", "config.yaml"],
        cwd=tmp_path,
        env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-3000:]
    assert "mars-adamw (exact, gamma" in output and "mars/grad_cosine" in output
