"""MarsTrainer, and `with_mars` for other classes of trainers: the optimizer, its settings, what a class overrides."""

from __future__ import annotations

import abc
import contextlib
import inspect
import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from any_trainer import STEPS, TEXTS, hold_to_straight_lines, tokenizer
from helpers import VOCAB, Blocks, arguments, gpt2, mars_trainer, trainer
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import mars_hf
from mars_hf import log
from mars_hf.training.registry import OPTIM_NAMES
from mars_hf.training.trainer import TrainerWithMars

ROOT = Path(__file__).resolve().parents[2]


def weights(run) -> list[Tensor]:
    return [param.detach() for param in run.model.parameters()]


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_two_sources_of_optimizers(tmp_path):
    model, args = gpt2(), arguments(tmp_path)
    instance, by_factory = {"optimizers": (mars_hf.create(model, lr=3e-3), None)}, mars_hf.factory(args)
    for other in ({"model_init": gpt2}, {"optimizer_cls_and_kwargs": by_factory}):
        with pytest.raises(ValueError, match=next(iter(other))):
            mars_trainer(args, model, **instance, **other)
    for source in (instance, {"optimizer_cls_and_kwargs": by_factory}):
        with pytest.raises(ValueError, match=r"mars_kwargs=\{'gamma': 0.1\} and an optimizer are both given"):
            mars_trainer(args, model, mars_kwargs={"gamma": 0.1}, **source)


class ByName(Trainer):
    """Make the optimizer by the name in TrainingArguments, for groups of one's own, and a first one at once."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.create_optimizer()

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
    args = arguments(tmp_path, **values, **named)
    stated = dict(vars(args))
    run = mars_hf.with_mars(kind)(gpt2(), args, mars_kwargs=given, train_dataset=Blocks())
    args = arguments(tmp_path, **values)
    twin = trainer(args, gpt2(), optimizer_cls_and_kwargs=mars_hf.factory(args, **given, **expected))
    run.train(), twin.train()
    assert isinstance(run.optimizer.optimizer, mars_hf.Mars)
    assert all(map(torch.equal, weights(run), weights(twin)))
    assert vars(run.args) == stated  # the user's


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, mars_hf.with_mars(ByName)])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_another_optimizer_by_name(tmp_path, kind, optim):
    message = rf"optim='{optim}' and {kind.__name__}, which trains MARS.* mars_m, mars_muon, muon, leave"
    with pytest.raises(ValueError, match=message):
        kind(gpt2(), arguments(tmp_path, optim=optim))


@pytest.mark.parametrize(
    ("named", "given", "message"),
    [
        ({}, {"gama": 0.1}, "gama"),
        ({}, {"gamma": -1}, "gamma=-1"),
        (
            {"learning_rate": 1e-3},
            {"lr": 1e-2},
            "set learning_rate=0.01 in TrainingArguments alone",
        ),
        ({}, {"beta": (0.9, 0.999)}, "mars_kwargs: unknown 'beta'; did you mean 'betas'"),
        ({"optim_args": "gamma=0.1"}, {"gamma": 0.1}, "gamma: given in optim_args='gamma=0.1' and in mars_kwargs"),
        ({"optim": "mars_m"}, {"mars_type": "mars-lion"}, "optim='mars_m' and mars_type 'mars-lion' contradict"),
    ],
)
def test_wrong_mars_kwargs(tmp_path, named, given, message):
    with pytest.raises(ValueError, match=message):
        mars_trainer(arguments(tmp_path, **named), gpt2(), mars_kwargs=given)


def test_mars_kwargs_with_an_iterator(tmp_path):
    """The settings are read when the trainer is made, and again when the optimizer is."""
    rules = zip(["*.wte.weight"], [{"lr": 1e-4}], strict=True)
    run = mars_trainer(arguments(tmp_path, learning_rate=1e-3), gpt2(), mars_kwargs={"param_rules": rules})
    assert [group.get("pattern") for group in run.create_optimizer().param_groups] == [None, None, "*.wte.weight"]


class OwnOptimizer(mars_hf.MarsTrainer):
    """Makes an exact Mars itself."""

    ends_with_super = False

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = self.optimizer or mars_hf.create(self.model, lr=1e-3, is_approx=False)
        return super().create_optimizer(model) if self.ends_with_super else self.optimizer


def test_exact_from_an_override_of_create_optimizer(tmp_path):
    """MarsTrainer takes over what its own method returns."""
    run = OwnOptimizer(gpt2(), arguments(tmp_path), train_dataset=Blocks(), data_collator=default_data_collator)
    with pytest.raises(RuntimeError, match=r"override of .* has to end with super\(\)\.create_optimizer\(model\)"):
        run.train()
    run.ends_with_super = True
    run.train()
    assert run.state.global_step == 4


# --- with_mars --------------------------------------------------------------------------------------------------------


class Own(Trainer):
    """A loss of its own, which may have weights."""

    loss: nn.Module = nn.Identity()

    def __init__(self, *args: Any, temperature: float = 2.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = self.loss(model(input_ids=inputs["input_ids"]).logits / self.temperature)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


class Making(Own):
    """Override what people override: the training step, the optimizer, clipping with a look at what comes of it."""

    optimizer_of: Callable[[Any], Any]
    norms: tuple[float, ...] = ()

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = self.optimizer or self.optimizer_of(list(self.model.parameters()))
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.norms += (nn.utils.get_total_norm([param.grad for param in model.parameters()]).item(),)
        return norm


class Seen(TrainerCallback):
    """Record the norm at which the optimizer clips in each step."""

    def __init__(self) -> None:
        self.norms: list[float | None] = []

    def on_step_end(self, args, state, control, optimizer=None, **_):
        self.norms.append(optimizer.optimizer.max_grad_norm)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("kind", "kind_of_loss"), [(Own, nn.LayerNorm), (Own, nn.Identity), (Making, nn.Identity)])
def test_overrides_against_straight_lines(tmp_path, kind, kind_of_loss, exact):
    """With every argument by its position; the step clips only where the class does not.

    A loss may have weights outside the model, as in sentence-transformers: they train, and their gradients are cleared.
    """
    seen = Seen()

    def make(kind: type, optimizer: Callable[[Any], Any]) -> Any:
        model, args, loss = gpt2(), arguments(tmp_path, max_steps=STEPS), kind_of_loss(VOCAB)
        before = (model, args, default_data_collator, Blocks(), *[None] * 5, [seen])
        mars = None if issubclass(kind, Making) else optimizer([*model.parameters(), *loss.parameters()])
        run = kind(*before, (mars, None))
        run.optimizer_of, run.loss = optimizer, loss
        return run

    run = hold_to_straight_lines(make, kind, exact=exact)
    assert seen.norms == [None if exact or kind is Making or kind_of_loss is nn.LayerNorm else 1.0] * STEPS
    assert kind is Own or (len(run.norms) == STEPS and max(run.norms) <= 1.0001)


class Configured(Trainer):
    """A Trainer with an argument of its own, like trl's trainers."""

    def __init__(self, model, args, temperature, train_dataset=None, optimizers=(None, None), callbacks=None):
        self.temperature = temperature
        super().__init__(model, args, default_data_collator, train_dataset, optimizers=optimizers, callbacks=callbacks)


@pytest.mark.parametrize("other", [Configured, Own])
@pytest.mark.parametrize("order", [1, -1])
def test_inheritance_with_other_trainers(tmp_path, other, order):
    model = gpt2()
    optimizer = mars_hf.create(model, is_approx=False, lr=1e-2)
    given = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    both = type("Both", (mars_hf.MarsTrainer, other)[::order], {})
    run = both(model, arguments(tmp_path), temperature=1, train_dataset=Blocks(), optimizers=given)
    assert run.optimizer is None and run._given_optimizer is optimizer and run.temperature == 1
    run.train()
    assert run.optimizer.optimizer is optimizer and optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)


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


class OfAnotherMetaclass(Trainer, abc.ABC):
    """As sentence-transformers' trainers are."""


class OfAUser(mars_hf.with_mars(Own)):
    """A subclass is in its module, under its own name."""


@pytest.mark.parametrize("kind", [Own, OfAnotherMetaclass])
def test_class_of_with_mars_is_pickled(kind):
    """Ray and spawned processes get classes so."""
    assert pickle.loads(pickle.dumps(mars_hf.with_mars(kind))) is mars_hf.with_mars(kind)
    assert pickle.loads(pickle.dumps(OfAUser)) is OfAUser
    assert pickle.loads(pickle.dumps(mars_hf.MarsTrainer)) is mars_hf.MarsTrainer


@pytest.mark.slow
def test_class_of_with_mars_in_another_process(tmp_path):
    (tmp_path / "class").write_bytes(pickle.dumps(mars_hf.with_mars(Seq2SeqTrainer)))
    script = """
import pickle
kind = pickle.load(open("class", "rb"))
import mars_hf
from transformers import Seq2SeqTrainer, TrainingArguments
assert kind is mars_hf.with_mars(Seq2SeqTrainer)
arguments = TrainingArguments("out", optim="mars_m", use_cpu=True)  # the names are registered with the class
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True)


def test_settings_among_the_keywords(tmp_path):
    args, model = arguments(tmp_path), gpt2()
    for name, remedy in (("gamma", "mars_kwargs={'gamma': 0.1}"), ("lr", "learning_rate=0.1 in TrainingArguments")):
        with pytest.raises(TypeError, match=f"^MarsTrainer takes no {name}; give {re.escape(remedy)}$"):
            mars_trainer(args, model, **{name: 0.1})
    optimizer = mars_hf.create(model, lr=0.01)
    with pytest.raises(TypeError, match=r"optimizers is a Mars; give a pair: optimizers=\(optimizer, None\)"):
        mars_trainer(args, model, optimizers=optimizer)
    with pytest.raises(TypeError, match="takes the Trainer's TrainingArguments, not GPT2LMHeadModel"):
        mars_hf.factory(model)


# --- Axolotl: stand-ins for what the plugin uses, and the package itself ----------------------------------------------


class ChosenTrainer(Trainer):
    """A class that Axolotl chooses."""


class AxolotlRewardTrainer(Trainer):
    """Known by its name in Axolotl."""


@contextlib.contextmanager
def axolotl_log() -> Iterator[io.StringIO]:
    """Show what Axolotl's configuration of logging shows: its own INFO, other loggers' warnings."""
    shown, loggers = io.StringIO(), [logging.getLogger("axolotl"), logging.getLogger()]
    handler, level = logging.StreamHandler(shown), loggers[1].level
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith("axolotl"))
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    for logger, at in zip(loggers, (logging.INFO, logging.WARNING), strict=True):
        logger.addHandler(handler), logger.setLevel(at)
    loggers[0].propagate = False
    yield shown
    for logger in loggers:
        logger.removeHandler(handler), logger.setLevel(level)
    loggers[0].propagate = True


@pytest.mark.parametrize(
    ("kind", "optim", "is_exact"),
    [(ChosenTrainer, "mars_adamw", True), (AxolotlRewardTrainer, "mars_adamw", False), (ChosenTrainer, "sgd", None)],
)
def test_axolotl_plugin(tmp_path, monkeypatch, kind, optim, is_exact):
    """Exact MARS is what a trainer without it refuses; reward trainers and other optimizers' keep their class."""

    class Axolotl:
        """In place of the plugin's base class, and of what builds trainers."""

        def register(self, cfg: Any) -> None: ...

        pre_model_load = register

        def hook_pre_create_trainer(self, trainer_kwargs: Any, trainer_cls: Any) -> tuple[Any, Any]:
            return trainer_kwargs, trainer_cls

    for name in ("", ".integrations", ".integrations.base", ".core", ".core.builders", ".core.builders.base"):
        stand_in = SimpleNamespace(BasePlugin=Axolotl, TrainerBuilderBase=Axolotl)
        monkeypatch.setitem(sys.modules, f"axolotl{name}", stand_in)
    monkeypatch.setattr(log, "_name", log._name)  # which the plugin replaces
    monkeypatch.setitem(sys.modules, "mars_hf.training.axolotl", None)  # its base class is the stand-in
    del sys.modules["mars_hf.training.axolotl"]
    builder, plugin = Axolotl(), mars_hf.AxolotlPlugin()
    builder.cfg = SimpleNamespace(optimizer=optim)
    plugin.register(builder.cfg), plugin.pre_model_load(builder.cfg), plugin.pre_model_load(builder.cfg)
    settings = {"optim_args": "gamma=0.05,is_approx=false"} if is_exact else {}
    kwargs = {"model": gpt2(), "args": arguments(tmp_path, optim=optim, max_steps=2, **settings)}
    kwargs, chosen = builder.hook_pre_create_trainer({**kwargs, "train_dataset": Blocks()}, kind)
    assert issubclass(chosen, kind) and issubclass(chosen, TrainerWithMars) == bool(is_exact)
    run = chosen(**kwargs)
    with axolotl_log() as shown:
        run.train()
    assert getattr(run.optimizer.optimizer, "is_exact", None) == is_exact
    assert ("[axolotl.mars_hf] mars-adamw (" in shown.getvalue()) == (is_exact is not None)


def test_axolotl_config_of_the_docs():
    page = (ROOT / "docs" / "elsewhere.md").read_text()
    config = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert config["plugins"] == ["mars_hf.AxolotlPlugin"] and config["optimizer"] in OPTIM_NAMES


CONFIG = {
    **{"base_model": "tiny", "datasets": [{"path": "rows.jsonl", "type": "completion"}], "sequence_len": 32},
    **{"plugins": ["mars_hf.AxolotlPlugin"], "optimizer": "mars_adamw", "optim_args": {"is_approx": False}},
    **{"learning_rate": 6e-3, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "num_epochs": 1},
    **{"logging_steps": 1, "val_set_size": 0, "bf16": False, "dataset_num_proc": 1},
    **{"dataset_prepared_path": "prepared", "output_dir": "out"},
}


@pytest.mark.slow
def test_axolotl_trains(tmp_path):
    pytest.importorskip("axolotl", reason="axolotl is not installed; it pins other versions than the test extra has")
    tokenizer().save_pretrained(tmp_path / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "tiny")
    Path(tmp_path, "rows.jsonl").write_text("\n".join([json.dumps({"text": TEXTS[0]})] * 32))
    Path(tmp_path, "config.yaml").write_text(yaml.safe_dump(CONFIG))
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "axolotl.cli.train", "config.yaml"]
    environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-3000:]
    assert "mars-adamw (exact, gamma" in output and "mars/grad_cosine" in output
