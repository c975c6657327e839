"""LastGradientCallback: metrics on every log line, one line about the settings, and the guard that Mars trains."""

from __future__ import annotations

import copy
import logging
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from helpers import arguments, gpt2, mars_trainer, trainer
from peft import LoraConfig, get_peft_model
from transformers import GPT2LMHeadModel, TrainerCallback, TrainerState

import mars_hf
from mars_hf.training import guard

METRICS = {"mars/clip_fraction", "mars/corrected_norm_ratio", "mars/grad_cosine", "mars/update_rms"}
SAVES = {"save_strategy": "steps", "save_steps": 2}
both_trainers = pytest.mark.parametrize("make", [trainer, mars_trainer], ids=["Trainer", "MarsTrainer"])


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    mars_hf.register()


class Tracker(TrainerCallback):
    """Keep what reporters receive."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


def run_with_mars(args, make=trainer, *, callbacks=None, **settings):
    model = gpt2()
    return make(args, model, optimizers=(mars_hf.create(model, **{"lr": 1e-2, **settings}), None), callbacks=callbacks)


def losses(run) -> list[dict]:
    return [row for row in run.state.log_history if "loss" in row]


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_reach_every_tracker(tmp_path):
    tracker = Tracker()
    run = run_with_mars(arguments(tmp_path, gradient_accumulation_steps=2), callbacks=[tracker])
    run.train()
    *rows, end = tracker.rows
    assert METRICS - set(rows[0]) == {"mars/grad_cosine"}  # which needs two steps
    assert len(rows) == 4 and all(type(row[name]) is float for row in rows[1:] for name in METRICS)
    assert losses(run) == [row | {"step": index + 1} for index, row in enumerate(rows)]
    assert "train_runtime" in end and not METRICS & set(end)
    others = run_with_mars(arguments(tmp_path, logging_steps=2, gradient_accumulation_steps=2))
    others.train()
    for row, expected in zip(losses(others), rows[1::2], strict=True):  # each line has the metrics of its step alone
        assert {name: row[name] for name in METRICS} == {name: expected[name] for name in METRICS}


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({"logging_steps": 2}, {2, 4}),
        ({"logging_steps": 2, "logging_first_step": True}, {1, 2, 4}),
        ({"logging_strategy": "no"}, set()),
        ({"logging_strategy": "epoch"}, {1, 2, 3, 4}),
    ],
)
def test_measured_steps(tmp_path, settings, measured):
    seen = set()

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            if guard.unwrap_optimizer(optimizer)._metrics is not None:
                seen.add(state.global_step + 1)

    run = run_with_mars(arguments(tmp_path, **settings), callbacks=[Watch])
    run.train()
    assert seen == measured
    assert all(METRICS <= set(row) for row in losses(run) if row["step"] > 1) and bool(losses(run)) == bool(measured)


def test_one_callback_ahead_of_the_reporters(tmp_path, caplog):
    for callbacks in ([], [mars_hf.LastGradientCallback()], [mars_hf.LastGradientCallback]):
        run = run_with_mars(arguments(tmp_path, report_to=["tensorboard"]), mars_trainer, callbacks=callbacks)
        kinds = [type(callback).__name__ for callback in run.callback_handler.callbacks]
        assert kinds.count("LastGradientCallback") == 1
        assert kinds.index("LastGradientCallback") < kinds.index("TensorBoardCallback")
    assert "there is already one" not in caplog.text


# --- what it logs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(caplog):
    """Return a function that returns the lines of mars_hf so far, and forgets them."""
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name.startswith("mars_hf")]
        caplog.clear()
        return messages

    return lines


def test_first_line(tmp_path, logged):
    settings = {"learning_rate": 1e-3, "adam_beta2": 0.98, "optim_args": "gamma=0.05", "lr_scheduler_type": "linear"}
    trainer(arguments(tmp_path, optim="mars_adamw", warmup_steps=2, **settings)).train()
    assert logged() == [
        "mars-adamw (approximate, gamma=0.05, betas=(0.95, 0.98)): 10 matrices (2,176) at lr=0.001, "
        "18 vectors (224) at lr=0.0005"
    ]
    rules = [("*.c_attn.weight", {"lr": 1e-2})]
    run_with_mars(arguments(tmp_path, max_steps=1), lr=3e-3, mars_type="mars-m", param_rules=rules).train()
    assert logged() == [
        "mars-m (approximate, gamma=0.025, betas=(0.95, 0.99)): 8 matrices (1,536) at lr=0.003-0.01, "
        "2 adamw (640) at lr=0.003, 18 vectors (224) at lr=0.003"
    ]


def test_other_ranks_and_other_optimizers_log_nothing(tmp_path, logged, monkeypatch):
    tracker = Tracker()
    trainer(arguments(tmp_path, max_steps=1, optim="adamw_torch"), callbacks=[tracker]).train()
    assert logged() == [] and not METRICS & set().union(*tracker.rows)
    monkeypatch.setattr(TrainerState, "is_world_process_zero", property(lambda self: False, lambda self, value: None))
    trainer(arguments(tmp_path, max_steps=1, optim="mars_adamw")).train()
    assert logged() == []


@pytest.mark.slow
def test_settings_of_a_checkpoint_win(tmp_path, logged):
    """The lines match the facts: logged rates, the groups' settings, and mars.json."""

    def train(checkpoint=None, steps=4, **settings):
        args = arguments(tmp_path, **SAVES, lr_scheduler_type="linear", max_steps=steps)
        logged()
        run = run_with_mars(args, **settings)
        run.train(resume_from_checkpoint=checkpoint)
        return run

    train(gamma=0.1)
    train(str(tmp_path / "checkpoint-2"), gamma=0.1)
    assert len(logged()) == 1
    run = train(str(tmp_path / "checkpoint-2"), 8, lr=4e-3, gamma=0.05)
    rates = {row["step"]: row["learning_rate"] for row in losses(run)}
    assert rates[4] == pytest.approx(1e-2 * (1 - 3 / 8))  # the saved rate on this run's schedule
    mars = guard.unwrap_optimizer(run.optimizer)
    assert mars.param_groups[0]["gamma"] == 0.1
    assert {"lr": 0.01, "gamma": 0.1}.items() <= mars.created_with.items()
    first, resumed = logged()
    assert "gamma=0.1" in first and "at lr=0.01" in first
    assert "lr=0.01 (given: 0.004)" in resumed and "gamma=0.1 (given: 0.05)" in resumed


# --- the optimizer ----------------------------------------------------------------------------------------------------


def sgd(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "way"),
    [
        *((trainer, way) for way in ("callback", "name and SGD", "factory", "instance")),
        *((mars_trainer, way) for way in ("instance", "own")),
    ],
)
def test_another_optimizer_stops_the_run(tmp_path, make, way):
    """DeepSpeed puts its own in Mars's place."""
    model, args = gpt2(), arguments(tmp_path, **({"optim": "mars_adamw"} if way == "name and SGD" else {}))
    sources = {
        "callback": {"callbacks": [mars_hf.LastGradientCallback()]},
        "name and SGD": {"optimizers": (sgd(model), None)},
        "factory": {"optimizer_cls_and_kwargs": mars_hf.factory(args)},
        "instance": {"optimizers": (mars_hf.create(model, lr=3e-3), None)},
        "own": {},
    }
    run = make(args, model, **sources[way])
    run.create_scheduler = lambda *_, **__: setattr(run, "optimizer", sgd(run.model))
    with pytest.raises(RuntimeError, match=r"SGD, not Mars; pass Trainer\(optimizers="):
        run.train()
    assert run.state.global_step == 0


def test_another_mars_stops_the_run(tmp_path):
    model = gpt2()
    stepping, given = mars_hf.create(model, lr=3e-3), mars_hf.create(model, lr=3e-3)
    callbacks = [mars_hf.LastGradientCallback(given)]
    with pytest.raises(RuntimeError, match="another Mars"):
        trainer(arguments(tmp_path), model, optimizers=(stepping, None), callbacks=callbacks).train()
    trainer(arguments(tmp_path), model, optimizers=(given, None), callbacks=callbacks).train()


@pytest.mark.slow
def test_fresh_process(tmp_path):
    """`create` installs the guard, without importing Trainer; MarsTrainer registers names; the first line shows."""
    script = f"""
        import pathlib, sys, torch, mars_hf
        mars_hf.create(torch.nn.Linear(2, 2), lr=1e-3)
        assert not any(name.startswith("transformers") for name in sys.modules)
        import transformers
        mars_hf.create(torch.nn.Linear(2, 2), lr=1e-3)
        assert "transformers.trainer" not in sys.modules
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from helpers import arguments, gpt2, mars_trainer, trainer
        folder = pathlib.Path({str(tmp_path)!r})
        run = trainer(arguments(folder), gpt2(), optimizers=(mars_hf.create(gpt2(), lr=1e-3), None))
        print("callbacks:", str(run.callback_handler.callbacks).count("LastGradientCallback"))
        try:
            run.train()
        except RuntimeError as error:
            print(error)
        from mars_hf import MarsTrainer
        mars_trainer(arguments(folder, optim="mars_m", max_steps=1), gpt2()).train()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert "callbacks: 1" in finished.stdout, finished.stderr
    assert "holds 0 of the model's 28 trainable parameters" in finished.stdout
    lines = [line for line in finished.stderr.splitlines() if "8 matrices" in line]
    assert len(lines) == 1 and lines[0].startswith("mars-m ("), finished.stderr


@pytest.mark.parametrize("given", [None, "another"])
def test_process_group_under_ddp(alone, tmp_path, monkeypatch, given):
    """Ranks that accelerate keeps alike share the work on matrices; a group that the user has named stays."""
    run = run_with_mars(arguments(tmp_path, max_steps=1), mars_type="mars-m")
    mars = run.optimizer
    mars.process_group = given and torch.distributed.new_group([0])
    expected = mars.process_group or alone
    run.train()
    assert given or mars.process_group is None  # without DDP, each rank works alone
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_CPU)
    run.callback_handler.on_train_begin(run.args, run.state, run.control)  # as `train` begins; it would wrap the model
    assert mars.process_group is expected


# --- parameters -------------------------------------------------------------------------------------------------------


def lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))


def new_head(model):
    model.lm_head = torch.nn.Linear(8, 64)
    return model


@both_trainers
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lora, r"holds 0 of the model's \d+ trainable .*lora_A.*mars_hf\.factory"),  # the base is frozen then
        (new_head, r"28 of the model's 30 .*missing: lm_head\.weight of shape \(64, 8\) and 1 more"),
        (copy.deepcopy, r"holds 0 of the model's 28 trainable parameters \(missing: transformer\.wte\.weight of shape"),
    ],
)
def test_parameters_made_after_the_optimizer_stop_the_run(tmp_path, make, change, message):
    model = gpt2()
    mars = mars_hf.create(model, lr=3e-3)
    run = make(arguments(tmp_path), change(model), optimizers=(mars, None))
    with pytest.raises(RuntimeError, match=message):
        run.train()
    assert run.state.global_step == 0


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Return a folder with a run of MARS, one of AdamW, and both without the states of optimizers and schedules."""
    folder = tmp_path_factory.mktemp("checkpoints")
    without_states = shutil.ignore_patterns("optimizer.pt", "scheduler.pt")
    for name, make in (("mars", mars_trainer), ("adamw", trainer)):
        make(arguments(folder / name, **SAVES), gpt2()).train()
        shutil.copytree(folder / name, folder / f"{name}-weights", ignore=without_states)
    return folder


@pytest.mark.parametrize("has_named_steps", [True, False], ids=["optimizer.pt", "plain steps, as engines save"])
@both_trainers
def test_another_optimizer_and_a_checkpoint_of_mars(tmp_path, checkpoints, make, has_named_steps):
    """torch.optim.AdamW would load all of it, and train with MARS's betas and learning rates."""
    checkpoint = shutil.copytree(checkpoints / "mars" / "checkpoint-2", tmp_path / "checkpoint-2")
    if not has_named_steps:
        saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        for state in saved["state"].values():
            state["step"] = torch.tensor(2.0)
        torch.save(saved, checkpoint / "optimizer.pt")
    model, settings, checkpoint = gpt2(), {}, str(checkpoint)
    if make is mars_trainer:
        params = sorted(model.parameters(), key=lambda param: param.ndim == 1)  # as MARS groups them
        settings["optimizers"] = (torch.optim.AdamW([{"params": params[:10]}, {"params": params[10:]}]), None)
    run = make(arguments(tmp_path), model, **settings)
    where = "step 2 of MARS" if has_named_steps else "MARS saved the checkpoint of step 2, and AdamW would resume"
    message = rf"{where}.*optim='mars_adamw'.*from_pretrained"
    if make is mars_trainer and not has_named_steps:
        message = "the optimizer that would step is AdamW, not Mars"
    with pytest.raises((ValueError, RuntimeError), match=message):
        run.train(resume_from_checkpoint=checkpoint)
    mars_trainer(arguments(tmp_path), gpt2()).train(resume_from_checkpoint=checkpoint)


def test_another_optimizer_and_a_checkpoint_without_state(tmp_path, checkpoints):
    """What it saves is its own."""
    for checkpoint in (checkpoints / "mars-weights" / "checkpoint-2", tmp_path / "checkpoint-4"):
        trainer(arguments(tmp_path, **SAVES), gpt2()).train(resume_from_checkpoint=str(checkpoint))


def test_mars_and_a_checkpoint_of_another_optimizer(tmp_path, checkpoints):
    """It is refused, and the remedies work."""
    checkpoint = checkpoints / "adamw" / "checkpoint-2"
    message = r"another optimizer saved it.*from_pretrained.*without DeepSpeed.*without optimizer\.pt"
    with pytest.raises(ValueError, match=message):
        mars_trainer(arguments(tmp_path), gpt2()).train(resume_from_checkpoint=str(checkpoint))
    # Its weights under MARS are a new run: moments, schedule and warmup start over; a copy keeps the count of steps.
    warm = {"learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    saved, weights = GPT2LMHeadModel.from_pretrained(checkpoint), checkpoints / "adamw-weights" / "checkpoint-2"
    for model, resumed, steps in ((saved, None, [1, 2, 3, 4]), (gpt2(), str(weights), [3, 4])):
        run = mars_trainer(arguments(tmp_path, **warm), model)
        run.train(resume_from_checkpoint=resumed)
        rows = [row for row in run.state.log_history if "mars/update_rms" in row]
        assert [row["step"] for row in rows] == steps
        assert [row["learning_rate"] for row in rows] == [0.0, 5e-4, 1e-3, 1e-3][: len(steps)]
        state = guard.unwrap_optimizer(run.optimizer).state[run.model.transformer.wte.weight]
        assert state["step"] == len(steps) and state["last_grad"].any()


class Interrupt(TrainerCallback):
    """Press Ctrl-C after the first step."""

    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_optimizer_of_an_interrupted_run_trains_in_another_trainer(tmp_path):
    model = gpt2()
    optimizers = mars_hf.create(model, lr=1e-2), None
    with pytest.raises(KeyboardInterrupt):
        trainer(arguments(tmp_path), model, optimizers=optimizers, callbacks=[Interrupt()]).train()
    trainer(arguments(tmp_path, **SAVES), model, optimizers=optimizers).train()
    assert (tmp_path / "checkpoint-4" / "optimizer.pt").exists()
    assert all(isinstance(state["step"], torch.Tensor) for state in optimizers[0].state_dict()["state"].values())
