"""MarsTrainer steps with the given optimizer."""

from __future__ import annotations

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


@pytest.mark.slow
def test_without_an_optimizer_it_is_a_trainer(tmp_path):
    run = mars_trainer(arguments(tmp_path, optim="adamw_torch"), gpt2())
    run.train()
    assert isinstance(run.optimizer.optimizer, torch.optim.AdamW)
    made = mars_trainer(arguments(tmp_path), gpt2(), optimizer_cls_and_kwargs=mars_hf.factory(gamma=0.1))
    made.train()
    assert isinstance(made.optimizer.optimizer, mars_hf.Mars)


@pytest.mark.parametrize("other", ["model_init", "optimizer_cls_and_kwargs"])
def test_two_sources_of_optimizers_are_refused(tmp_path, other):
    model = gpt2()
    settings = {"model_init": lambda: gpt2(), "optimizer_cls_and_kwargs": mars_hf.factory()}
    with pytest.raises(ValueError, match=other):
        mars_trainer(arguments(tmp_path), model, optimizers=(mars_hf.create(model), None), **{other: settings[other]})


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
