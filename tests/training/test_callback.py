"""LastGradientCallback: the guard, and metrics that reach every tracker."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers import arguments, gpt2, trainer
from helpers import mars_trainer as plain_mars_trainer
from transformers import TrainerCallback, TrainerState
from transformers.integrations import integration_utils

import mars_hf
from mars_hf import summary
from mars_hf.training.guard import innermost

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
            if innermost(optimizer)._metrics is not None:
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


def test_a_trainer_has_one_callback_ahead_of_its_reporters(tmp_path, caplog):
    for given in ([], [mars_hf.LastGradientCallback()], [mars_hf.LastGradientCallback]):
        run = mars_trainer(arguments(tmp_path, report_to=["tensorboard"]), callbacks=given)
        kinds = [type(callback).__name__ for callback in run.callback_handler.callbacks]
        assert kinds.count("LastGradientCallback") == 1
        assert kinds.index("LastGradientCallback") < kinds.index("TensorBoardCallback")
    assert "there is already one" not in caplog.text


def test_an_overflow_step_logs_no_stale_metrics():
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = mars_hf.Mars([param])
    optimizer.collect_metrics(True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    param.grad = torch.full((2, 2), float("inf"))
    scaler.step(optimizer)
    assert optimizer.pop_metrics() == {}


# --- what it logs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog):
    """Return the lines of mars_hf so far."""
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith("mars_hf")]

    lines.clear = caplog.clear
    return lines


def test_first_line(tmp_path, said):
    mars_hf.register()
    settings = {"learning_rate": 1e-3, "adam_beta2": 0.98, "optim_args": "gamma=0.05", "lr_scheduler_type": "linear"}
    trainer(arguments(tmp_path, optim="mars_adamw", warmup_steps=2, **settings)).train()
    assert said() == [
        "mars-adamw (approximate, gamma=0.05, betas=(0.95, 0.98)): 10 matrices (2.18K) at lr=0.001, "
        "18 vectors (224) at lr=0.0005"
    ]
    said.clear()
    rules = [("*.c_attn.weight", {"lr": 1e-2})]
    model = gpt2()
    optimizer = mars_hf.create(model, lr=3e-3, mars_type="mars-m", param_rules=rules)
    trainer(arguments(tmp_path, max_steps=1), model, optimizers=(optimizer, None)).train()
    (line,) = said()
    assert line.startswith("mars-m (approximate, gamma=0.025, betas=(0.95, 0.99)): ")
    assert "8 matrices (1.54K) at lr=0.003-0.01, " in line and "2 adamw (640) at lr=0.003" in line


def test_first_line_is_short():
    """GPT-3's sizes, and a name that the model lacks."""
    sizes = {"matrix": 1e12, "adamw": 6e8, "vector": 9999999}
    groups = [
        {**mars_hf.Mars([torch.nn.Parameter(torch.ones(2, 2))], mars_type="mars-shampoo").param_groups[0], "role": role}
        | {"params": [torch.nn.Parameter(torch.empty(int(size), 1, device="meta"))] * 100, "lr": 1.2345e-5 * factor}
        for role, size in sizes.items()
        for factor in (1, 3)
    ]
    line = summary.line(groups, torch.nn.Linear(1, 1))
    assert len(line) <= 160 and "200 matrices (200T) at lr=1.23e-05-3.7e-05" in line


def test_other_ranks_and_other_optimizers_say_nothing(tmp_path, said, monkeypatch):
    mars_hf.register()
    trainer(arguments(tmp_path, max_steps=1, optim="adamw_torch")).train()
    assert said() == []
    monkeypatch.setattr(TrainerState, "is_world_process_zero", property(lambda self: False, lambda self, value: None))
    trainer(arguments(tmp_path, max_steps=1, optim="mars_adamw")).train()
    assert said() == []


@pytest.mark.slow
def test_first_line_shows_by_default(tmp_path):
    script = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from pathlib import Path
        from helpers import arguments, gpt2, mars_trainer
        mars_trainer(arguments(Path({str(tmp_path)!r}), max_steps=1), gpt2()).train()
    """
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    lines = [line for line in finished.stderr.splitlines() if "10 matrices" in line]
    assert len(lines) == 1 and lines[0].startswith("mars-adamw ("), finished.stderr


SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [trainer, plain_mars_trainer], ids=["Trainer", "MarsTrainer"])
def test_settings_of_a_checkpoint_win_and_are_named(tmp_path, said, make):
    """The line matches the facts: logged rates, the groups' settings, and mars.json."""

    def build(rate, gamma, **settings):
        model = gpt2()
        optimizer = mars_hf.create(model, lr=rate, gamma=gamma)
        return make(arguments(tmp_path, **{**SAVED, **settings}), model, optimizers=(optimizer, None))

    build(1e-2, 0.1).train()
    said.clear()
    build(1e-2, 0.1).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(said()) == 1
    said.clear()
    run = build(4e-3, 0.05, max_steps=8)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rates = {row["step"]: row["learning_rate"] for row in run.state.log_history if "loss" in row}
    assert rates[5] == pytest.approx(1e-2 * (1 - 4 / 8))  # the saved rate on this run's schedule
    mars = innermost(run.optimizer)
    assert mars.param_groups[0]["gamma"] == 0.1
    assert {"lr": 0.01, "gamma": 0.1}.items() <= mars.created_with.items()
    first, resumed = said()
    assert "gamma=0.1" in first and "at lr=0.01" in first
    assert "lr=0.01 (given: 0.004)" in resumed and "gamma=0.1 (given: 0.05)" in resumed


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
    assert noted(trainer, 0.5) == noted(trainer, 5.0, max_grad_norm=0.0) == noted(plain_mars_trainer, 5.0) == []
