"""LastGradientCallback: the guard, and metrics that reach every tracker."""

from __future__ import annotations

import logging
from typing import ClassVar

import pytest
import torch
from helpers import arguments, gpt2, trainer
from transformers import TrainerCallback
from transformers import trainer as transformers_trainer
from transformers.integrations import integration_utils

import mars_hf
from mars_hf.training import callbacks

METRICS = {"mars/clip_fraction", "mars/corrected_norm_ratio", "mars/grad_cosine", "mars/update_rms"}


class Tracker(TrainerCallback):
    """Receive what wandb, tensorboard and other reporters receive."""

    rows: ClassVar[list]

    def on_log(self, args, state, control, logs=None, **kwargs):
        type(self).rows.append(dict(logs))


@pytest.fixture
def tracker(monkeypatch):
    class Fresh(Tracker):
        rows: ClassVar[list] = []

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Fresh)
    return Fresh


def mars_trainer(args, model=None, **settings):
    model = model or gpt2()
    optimizer = mars_hf.create(model, lr=1e-2)
    settings.setdefault("callbacks", [mars_hf.LastGradientCallback()])
    return trainer(args, model, optimizers=(optimizer, None), **settings)


def test_metrics_are_on_the_log_line_of_every_tracker(tmp_path, tracker):
    run = mars_trainer(arguments(tmp_path, report_to=["tensorboard"]))
    run.train()
    training = [row for row in tracker.rows if "loss" in row]
    assert len(training) == 4
    for row in training:
        assert METRICS <= set(row)
        assert all(type(row[name]) is float for name in METRICS)
    assert [row for row in run.state.log_history if "loss" in row and METRICS <= set(row)] == [
        row | {"step": index + 1} for index, row in enumerate(training)
    ]
    (summary,) = [row for row in tracker.rows if "loss" not in row]
    assert not METRICS & set(summary)


def test_the_class_may_be_passed_as_well(tmp_path, tracker):
    mars_trainer(arguments(tmp_path, report_to=["tensorboard"]), callbacks=[mars_hf.LastGradientCallback]).train()
    assert METRICS <= set(tracker.rows[0])


def test_tensorboard_files_hold_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = mars_trainer(arguments(tmp_path, report_to=["tensorboard"]))
    run.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {f"train/{name}" for name in METRICS} <= set(events.Tags()["scalars"])


def test_values_are_those_of_the_logged_step(tmp_path):
    run = mars_trainer(arguments(tmp_path, logging_steps=3, max_steps=6))
    run.train()
    every = mars_trainer(arguments(tmp_path, logging_steps=1, max_steps=6))
    every.train()
    sparse = {row["step"]: row for row in run.state.log_history if "loss" in row}
    dense = {row["step"]: row for row in every.state.log_history if "loss" in row}
    assert set(sparse) == {3, 6}
    for step, row in sparse.items():
        assert {name: row[name] for name in METRICS} == {name: dense[step][name] for name in METRICS}


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({"logging_steps": 2}, {2, 4}),
        ({"logging_steps": 2, "logging_first_step": True}, {1, 2, 4}),
        ({"logging_strategy": "no"}, set()),
        ({"logging_strategy": "epoch"}, {1, 2, 3, 4}),
    ],
)
def test_only_steps_that_will_be_logged_are_measured(tmp_path, settings, measured):
    seen = set()

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            if callbacks.innermost(optimizer)._metrics is not None:
                seen.add(state.global_step + 1)

    mars_trainer(arguments(tmp_path, **settings), callbacks=[mars_hf.LastGradientCallback(), Watch()]).train()
    assert seen == measured


def test_epoch_logs_carry_metrics(tmp_path):
    run = mars_trainer(
        arguments(tmp_path, logging_strategy="epoch", max_steps=-1, num_train_epochs=2, per_device_train_batch_size=32)
    )
    run.train()
    rows = [row for row in run.state.log_history if "loss" in row]
    assert len(rows) == 2 and all(METRICS <= set(row) for row in rows)


def test_metrics_with_gradient_accumulation(tmp_path):
    run = mars_trainer(arguments(tmp_path, gradient_accumulation_steps=2))
    run.train()
    assert all(METRICS <= set(row) for row in run.state.log_history if "loss" in row)


def test_a_foreign_optimizer_stops_the_run(tmp_path):
    model = gpt2()
    for settings in ({}, {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}):
        run = trainer(arguments(tmp_path), model, callbacks=[mars_hf.LastGradientCallback()], **settings)
        with pytest.raises(RuntimeError, match=r"not Mars; pass Trainer\(optimizers="):
            run.train()


def test_another_mars_stops_the_run(tmp_path):
    model = gpt2()
    stepping, given = mars_hf.create(model), mars_hf.create(model)
    run = trainer(
        arguments(tmp_path), model, optimizers=(stepping, None), callbacks=[mars_hf.LastGradientCallback(given)]
    )
    with pytest.raises(RuntimeError, match="another Mars"):
        run.train()
    run = trainer(arguments(tmp_path), model, optimizers=(given, None), callbacks=[mars_hf.LastGradientCallback(given)])
    run.train()


def test_optim_by_name_is_guarded_and_measured_without_the_callback(tmp_path, tracker):
    mars_hf.register()
    run = trainer(arguments(tmp_path, optim="mars_adamw", report_to=["tensorboard"]))
    run.train()
    assert METRICS <= set(tracker.rows[0])
    model = gpt2()
    swapped = trainer(
        arguments(tmp_path, optim="mars_adamw"), model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None)
    )
    with pytest.raises(RuntimeError, match="SGD, not Mars"):
        swapped.train()


def test_runs_without_mars_are_left_alone(tmp_path, tracker):
    trainer(arguments(tmp_path, report_to=["tensorboard"])).train()
    assert not METRICS & set().union(*tracker.rows)


def test_the_default_callback_is_installed_once():
    import importlib

    importlib.reload(callbacks)
    names = [callback.__name__ for callback in transformers_trainer.DEFAULT_CALLBACKS]
    assert names.count("DefaultMarsCallback") == 1


def test_added_too_late_it_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        transformers_trainer, "DEFAULT_CALLBACKS", [transformers_trainer.DEFAULT_CALLBACKS[0]]
    )  # as if mars_hf.training.callbacks had not been imported yet
    run = mars_trainer(arguments(tmp_path), callbacks=[])
    run.add_callback(mars_hf.LastGradientCallback())
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        logger = logging.getLogger("mars_hf.training.callbacks")
        logger.propagate = True
        callbacks.logger.warning_once.cache_clear()
        run.train()
    assert "trackers do not see them" in caplog.text
    assert all(METRICS <= set(row) for row in run.state.log_history if "loss" in row)


def test_an_overflow_step_logs_no_stale_metrics():
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = mars_hf.Mars([param])
    optimizer.collect_metrics(True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    param.grad = torch.full((2, 2), float("inf"))
    scaler.step(optimizer)
    assert optimizer.pop_metrics() == {}
