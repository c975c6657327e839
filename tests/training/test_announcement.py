"""The first line of a run."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import arguments, gpt2, mars_trainer, trainer

import mars_hf


@pytest.fixture(scope="module", autouse=True)
def registered():
    mars_hf.register()


@pytest.fixture
def said(caplog):
    """Return the lines at warning level, transformers' default."""
    caplog.set_level(logging.WARNING)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith("mars_hf")]

    lines.clear = caplog.clear
    return lines


def test_one_line_says_what_trains(tmp_path, said):
    settings = {"learning_rate": 1e-3, "adam_beta2": 0.98, "optim_args": "gamma=0.05", "lr_scheduler_type": "linear"}
    trainer(arguments(tmp_path, optim="mars_adamw", warmup_steps=2, **settings)).train()
    (line,) = said()
    assert line == (
        "MARS trains with mars-adamw (approximate, gamma=0.05, eps=1e-08, clip_threshold=1); "
        "10 matrices: lr=0.001, betas=(0.95, 0.98), weight_decay=0; "
        "18 vectors under adamw: lr=0.0005, betas=(0.9, 0.95), weight_decay=0. "
        "MARS's defaults: beta1=0.95 (not adam_beta1=0.9), eps=1e-08, weight_decay=0, clip_threshold=1, lr_1d=0.5 lr, "
        "beta1_1d=0.9, beta2_1d=0.95, weight_decay_1d=0"
    )


def test_a_given_optimizer_says_that_the_arguments_rate_is_not_used(tmp_path, said):
    model = gpt2()
    optimizer = mars_hf.create(model, lr=6e-3, lr_1d=1e-3, betas=(0.9, 0.98), mars_type="mars-lion")
    callbacks = [mars_hf.LastGradientCallback()]  # does not repeat it
    trainer(arguments(tmp_path, max_steps=1), model, optimizers=(optimizer, None), callbacks=callbacks).train()
    (line,) = said()
    assert "mars-lion (" in line and "10 matrices: lr=0.006, betas=(0.9, 0.98)" in line
    assert "18 vectors under adamw: lr=0.001" in line
    assert "MARS's defaults: eps=1e-08, weight_decay=0, gamma=0.025, clip_threshold=1, beta1_1d" in line
    assert line.endswith("learning_rate=5e-05 in TrainingArguments is not used: the optimizer was given")


def test_embeddings_that_take_adamw_are_named(tmp_path, said):
    trainer(arguments(tmp_path, optim="mars_m", learning_rate=1e-3, max_steps=1)).train()
    (line,) = said()
    assert "2 embeddings under adamw: lr=0.001" in line and "lr_1d=lr," in line


def test_other_ranks_and_other_optimizers_say_nothing(tmp_path, said, monkeypatch):
    from transformers import TrainerState

    trainer(arguments(tmp_path, max_steps=1, optim="adamw_torch")).train()
    assert said() == []
    monkeypatch.setattr(TrainerState, "is_world_process_zero", property(lambda self: False, lambda self, value: None))
    trainer(arguments(tmp_path, max_steps=1, optim="mars_adamw")).train()
    assert said() == []


# --- resuming --------------------------------------------------------------------------------------------------------

SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["optim", "instance", "MarsTrainer"])
def test_resuming_with_other_settings_says_which_win(tmp_path, said, way):
    """The line matches the facts: logged rates and the groups' settings."""

    def make(rate, gamma, **settings):
        if way == "optim":
            own = {"optim": "mars_adamw", "optim_args": f"gamma={gamma}", "learning_rate": rate}
            return trainer(arguments(tmp_path, **{**SAVED, **own, **settings}))
        model = gpt2()
        optimizer = mars_hf.create(model, lr=rate, gamma=gamma)
        kind = trainer if way == "instance" else mars_trainer
        return kind(arguments(tmp_path, **{**SAVED, **settings}), model, optimizers=(optimizer, None))

    make(1e-2, 0.1).train()
    said.clear()
    run = make(4e-3, 0.05, max_steps=8)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rates = {row["step"]: row["learning_rate"] for row in run.state.log_history if "loss" in row}
    assert rates[5] == pytest.approx(1e-2 * (1 - 4 / 8))  # the saved rate on this run's schedule
    assert run.optimizer.optimizer.param_groups[0]["gamma"] == 0.1
    introduced, resumed = said()
    assert "gamma=0.1" in introduced and "10 matrices: lr=0.01" in introduced
    assert resumed.startswith("resuming: the checkpoint's settings win, ")
    assert "matrix lr=0.01 (now given: 0.004)" in resumed and "vector lr=0.005 (now given: 0.002)" in resumed
    assert "matrix gamma=0.1 (now given: 0.05)" in resumed
    assert "The schedule's shape and max_grad_norm are this run's" in resumed


@pytest.mark.slow
@pytest.mark.parametrize("make", [trainer, mars_trainer], ids=["Trainer", "MarsTrainer"])
def test_resuming_with_the_same_settings_says_nothing(tmp_path, said, make):
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        said.clear()
        model = gpt2()
        optimizer = mars_hf.create(model, lr=1e-2)
        run = make(arguments(tmp_path, **SAVED), model, optimizers=(optimizer, None))
        run.train(resume_from_checkpoint=checkpoint)
        assert len(said()) == 1


# --- schedulers ------------------------------------------------------------------------------------------------------


def one_cycle(optimizer, rate, **settings):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=10, **settings)


def cyclic(optimizer, rate, **settings):
    base = [x / 10 for x in rate] if isinstance(rate, list) else rate / 10
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=base, max_lr=rate, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [one_cycle, cyclic])
def test_one_rate_for_all_groups_is_pointed_out(tmp_path, said, schedule):
    kind = {one_cycle: "OneCycleLR", cyclic: "CyclicLR"}[schedule]

    def noted(scheduler_of, **settings) -> list[str]:
        said.clear()
        model = gpt2()
        optimizer = mars_hf.create(model, lr=1e-2, **settings)
        run = trainer(arguments(tmp_path, max_steps=2), model, optimizers=(optimizer, scheduler_of(optimizer)))
        run.train()
        return [line for line in said() if kind in line]

    (line,) = noted(lambda optimizer: schedule(optimizer, 1e-2))
    assert "one max_lr=0.01 trains vectors and embeddings at the matrices' rate" in line
    assert "0.5 of it" in line and "cycles beta1" in line
    (line,) = noted(lambda optimizer: schedule(optimizer, 1e-2, cycle_momentum=False))
    assert "beta1" not in line
    assert noted(lambda optimizer: schedule(optimizer, [group["lr"] for group in optimizer.param_groups])) == []
    assert noted(lambda optimizer: schedule(optimizer, 1e-2), lr_1d=1e-2) == []


@pytest.mark.slow
def test_a_norm_that_trainer_overrules_is_pointed_out(tmp_path, said):
    def noted(make, own, **settings) -> list[str]:
        said.clear()
        model = gpt2()
        optimizer = mars_hf.create(model, max_grad_norm=own)
        make(arguments(tmp_path, max_steps=1, **settings), model, optimizers=(optimizer, None)).train()
        return [line for line in said() if "has no effect" in line]

    (line,) = noted(trainer, 5.0)
    assert "Trainer clips at max_grad_norm=1 before" in line
    assert noted(trainer, 0.5) == noted(trainer, 5.0, max_grad_norm=0.0) == noted(mars_trainer, 5.0) == []
