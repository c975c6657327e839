"""MarsTrainer steps with the given optimizer."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from transformers import Trainer, default_data_collator

import mars_hf


def weights(run) -> list[torch.Tensor]:
    return [param.detach() for param in run.model.parameters()]


@pytest.mark.slow
def test_it_trains_as_trainer_does(tmp_path):
    results = []
    for make in (trainer, lambda args, model, **settings: mars_trainer(args, model, **settings)):
        model = gpt2()
        optimizer = mars_hf.create(model, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        run = make(arguments(tmp_path), model, optimizers=(optimizer, scheduler))
        run.train()
        assert run.optimizer.optimizer is optimizer
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)
        results.append(weights(run))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_it_makes_a_scheduler_where_none_is_given(tmp_path):
    model = gpt2()
    optimizer = mars_hf.create(model, lr=1e-2)
    run = mars_trainer(arguments(tmp_path, lr_scheduler_type="linear"), model, optimizers=(optimizer, None))
    run.train()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    run.train()  # a second call starts a new schedule with the same optimizer
    assert run.optimizer.optimizer is optimizer


def test_it_guards_its_optimizer(tmp_path):
    model = gpt2()
    run = mars_trainer(arguments(tmp_path), model, optimizers=(mars_hf.create(model), None))
    run._kept_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # swap it as an engine would
    with pytest.raises(RuntimeError, match="SGD, not Mars"):
        run.train()


def test_it_adds_no_second_callback(tmp_path):
    model = gpt2()
    optimizer = mars_hf.create(model)
    for own in ([mars_hf.LastGradientCallback(optimizer)], [mars_hf.LastGradientCallback], None):
        run = mars_trainer(arguments(tmp_path), model, optimizers=(optimizer, None), callbacks=own)
        kinds = [type(callback).__name__ for callback in run.callback_handler.callbacks]
        assert kinds.count("LastGradientCallback") == 1


def test_another_optimizer_that_is_given_trains(tmp_path):
    model = gpt2()
    given = torch.optim.AdamW(model.parameters())
    run = mars_trainer(arguments(tmp_path, optim="sgd"), model, optimizers=(given, None))
    run.train()
    assert run.optimizer.optimizer is given


@pytest.mark.parametrize("other", ["model_init", "optimizer_cls_and_kwargs"])
def test_two_sources_of_optimizers_are_refused(tmp_path, other):
    model = gpt2()
    args = arguments(tmp_path)
    settings = {"model_init": lambda: gpt2(), "optimizer_cls_and_kwargs": mars_hf.factory(args)}
    with pytest.raises(ValueError, match=other):
        mars_trainer(args, model, optimizers=(mars_hf.create(model), None), **{other: settings[other]})


class Configured(Trainer):
    """A Trainer with an argument of its own, like trl's trainers."""

    def __init__(self, model, args, own, train_dataset=None, optimizers=(None, None), callbacks=None):
        self.own = own
        collate = {"data_collator": default_data_collator}
        super().__init__(
            model, args, train_dataset=train_dataset, optimizers=optimizers, callbacks=callbacks, **collate
        )


class PassingOn(Trainer):
    """A Trainer that names none of its arguments."""

    def __init__(self, *args, own, **kwargs):
        self.own = own
        super().__init__(*args, data_collator=default_data_collator, **kwargs)


@pytest.mark.parametrize("other", [Configured, PassingOn])
@pytest.mark.parametrize("order", ["first", "last"])
def test_it_goes_together_with_other_trainers(tmp_path, other, order):
    bases = (mars_hf.MarsTrainer, other) if order == "first" else (other, mars_hf.MarsTrainer)
    model = gpt2()
    optimizer = mars_hf.create(model, is_approx=False)
    run = type("Both", bases, {})(
        model, arguments(tmp_path), own=1, train_dataset=Blocks(), optimizers=(optimizer, None)
    )
    assert run.optimizer is None and run._kept_optimizer is optimizer and run.own == 1
    run.train()
    assert run.optimizer.optimizer is optimizer


# --- without an optimizer --------------------------------------------------------------------------------------------


class ByName(Trainer):
    """Make the optimizer as many trainers do: by the name in TrainingArguments, for groups of one's own."""

    def create_optimizer(self, model=None):
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(self.args)
        self.optimizer = kind([{"params": list(self.model.parameters())}], **settings)
        return self.optimizer


@pytest.mark.parametrize("kind", [Trainer, ByName])
@pytest.mark.parametrize(
    ("named", "given"),
    [
        ({}, {}),
        ({}, {"mars_type": "mars-lion", "gamma": 0.05, "beta1": 0.8}),
        ({"optim_args": "gamma=0.1"}, {"clip_threshold": None}),
        ({"optim": "mars_m"}, {"lr_1d": 2e-3}),
        ({"optim": "mars_shampoo", "optim_args": "ns_steps=3"}, {"mars_type": "mars-shampoo"}),
    ],
)
def test_it_makes_mars_as_factory_does(tmp_path, kind, named, given):
    values = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.9, "max_grad_norm": 0.0}
    args = arguments(tmp_path, **values, **named)
    run = mars_hf.with_mars(kind)(
        gpt2(), args, train_dataset=Blocks(), data_collator=default_data_collator, mars_kwargs=given
    )
    run.train()
    settings = {"optim_args": {"gamma": 0.1}, "optim": {"mars_type": "mars-m"}}
    expected = {key: value for name in named for key, value in settings.get(name, {}).items()} | given
    if named.get("optim") == "mars_shampoo":
        expected |= {"mars_type": "mars-shampoo", "ns_steps": 3}
        expected.pop("gamma")
    args = arguments(tmp_path, **values)
    twin = trainer(args, gpt2(), optimizer_cls_and_kwargs=mars_hf.factory(args, **expected))
    twin.train()
    assert isinstance(run.optimizer.optimizer, mars_hf.Mars)
    assert all(torch.equal(a, b) for a, b in zip(weights(run), weights(twin), strict=True))


def test_the_arguments_stay_the_users(tmp_path):
    args = arguments(tmp_path)
    run = mars_trainer(args, gpt2())
    run.train()
    assert run.args is args and "mars" not in str(args.optim) and not hasattr(args, "mars_kwargs")
    baseline = trainer(args, gpt2())
    baseline.train()
    assert type(baseline.optimizer.optimizer) is torch.optim.AdamW


def test_it_makes_exact_mars_and_mars_of_model_init(tmp_path):
    run = mars_trainer(arguments(tmp_path), None, model_init=lambda: gpt2(), mars_kwargs={"is_approx": False})
    run.train()
    assert run.optimizer.optimizer.is_exact and run.optimizer.optimizer.has_previous_params


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, mars_hf.with_mars(ByName)])
@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_torch"])
def test_another_optimizer_by_name_is_refused(tmp_path, kind, optim):
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
def test_settings_that_cannot_be_used_are_refused_at_once(tmp_path, named, given, message):
    with pytest.raises(ValueError, match=message):
        mars_trainer(arguments(tmp_path, **named), gpt2(), mars_kwargs=given)


def test_settings_beside_an_optimizer_are_refused(tmp_path):
    model = gpt2()
    args = arguments(tmp_path)
    for given in ({"optimizers": (mars_hf.create(model), None)}, {"optimizer_cls_and_kwargs": mars_hf.factory(args)}):
        with pytest.raises(ValueError, match=r"mars_kwargs=\{'gamma': 0.1\} and an optimizer are both given"):
            mars_trainer(args, model, mars_kwargs={"gamma": 0.1}, **given)


def test_a_class_that_makes_its_optimizer_at_once_makes_mars(tmp_path):
    class Making(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.create_optimizer()

    make = mars_hf.with_mars(Making)
    run = make(gpt2(), arguments(tmp_path), train_dataset=Blocks(), mars_kwargs={"gamma": 0.1})
    run.train()
    assert {group["gamma"] for group in run.optimizer.optimizer.param_groups} == {0.1}
    with pytest.raises(ValueError, match=r"optim='adafactor' and .*, which trains MARS"):
        make(gpt2(), arguments(tmp_path, optim="adafactor"))


def test_an_override_that_makes_another_optimizer_stops_the_run(tmp_path):
    class Making(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            return self.optimizer

    run = mars_hf.with_mars(Making)(gpt2(), arguments(tmp_path), train_dataset=Blocks())
    with pytest.raises(RuntimeError, match="AdamW, not Mars"):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["mars_hf", "transformers"])
def test_a_rule_by_name_needs_no_register(tmp_path, first):
    imports = ["from mars_hf import MarsTrainer", "from transformers import TrainingArguments"]
    script = f"""
        {imports[first == "transformers"]}
        {imports[first != "transformers"]}
        import torch
        args = TrainingArguments({str(tmp_path)!r}, optim="mars_m", use_cpu=True, report_to="none", max_steps=1)
        import mars_hf
        run = mars_hf.MarsTrainer(torch.nn.Linear(2, 2), args)
        run.create_optimizer()
        assert run.optimizer.defaults["mars_type"] == "mars-m"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
