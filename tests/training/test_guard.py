"""The guard at the start of a run: what it refuses, told by wrappers such as accelerate's and DeepSpeed's."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from forks import run_in_forks
from helpers import Blocks, arguments, equal, gpt2, mars_trainer, trainer
from torch import nn
from torch.optim import lr_scheduler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.optimization import GreedyLR

import mars_hf
from mars_hf import Mars
from mars_hf.groups import saved_settings
from mars_hf.training import guard


def begin(optimizer: Any, model: nn.Module, folder: Any, scheduler: Any = None, **args: Any) -> None:
    """Begin a run with an optimizer, as Trainer does."""
    callback = mars_hf.LastGradientCallback()
    run = {"optimizer": optimizer, "lr_scheduler": scheduler, "model": model}
    callback.on_train_begin(arguments(folder, **args), TrainerState(), TrainerControl(), **run)


RELOADED = """
import sys
import mars_hf
mars_hf.register()
for name in [name for name in sys.modules if name.startswith("mars_hf")]:
    del sys.modules[name]
import mars_hf
try:
    mars_hf.MarsTrainer
except RuntimeError as error:
    print(error)
"""
WITHOUT = """
import sys
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

(checkpoint,) = sys.argv[1:]
model = GPT2LMHeadModel.from_pretrained(checkpoint)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
args = TrainingArguments("out", max_steps=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
try:
    Trainer(model, args, train_dataset=rows).train(resume_from_checkpoint=checkpoint)
finally:
    print("mars_hf" in sys.modules)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run both scripts; the second has a checkpoint of MARS, and not mars_hf."""
    folder = tmp_path_factory.mktemp("scripts")
    _, checkpoint = saved_checkpoint(folder / "mars")
    scripts = {"reloaded": RELOADED, "without": WITHOUT}
    return run_in_forks(scripts, folder, ["transformers.trainer"], arguments={"without": [str(checkpoint)]})


@pytest.mark.slow
def test_reloaded_package(ended):
    """It would replace the methods of transformers again."""
    line = ended["reloaded"].stdout.strip().splitlines()[-1]
    assert line.startswith("mars_hf has been reloaded, or removed from sys.modules") and line.endswith("restart Python")


def wrapped(optimizer: Any, kind: str, **attributes: Any) -> Any:
    """Return a wrapper of a class of this name around an optimizer."""
    return type(kind, (), {"optimizer": optimizer, **attributes})()


@pytest.mark.parametrize(
    ("setting", "value"), [("fp16", True), ("max_grad_norm", 1.0), ("gradient_accumulation_steps", 2)]
)
def test_release_gradients_is_refused_where_gradients_change_later(tmp_path, setting, value):
    """A scaler unscales, a norm scales and an accumulation adds up what parameters have stepped on in backward()."""
    model = gpt2()
    mars = mars_hf.create(model, release_gradients=True, lr=3e-3)
    run = trainer(arguments(tmp_path, max_grad_norm=0.0, max_steps=1), model, optimizers=(mars, None))
    setattr(run.args, setting, value)  # TrainingArguments refuse fp16 on a CPU
    with pytest.raises(RuntimeError, match=rf"release_gradients=True with .*{setting}={value}.* no fp16"):
        run.train()
    assert not mars.state
    setattr(run.args, setting, {"fp16": False, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1}[setting])
    run.train()
    assert run.state.global_step == 1


@pytest.mark.parametrize("held", [0, 1, 3])
def test_missing_parameters_are_counted(tmp_path, held):
    """One that is missing among several is one too many."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    params = list(model.parameters())
    mars = mars_hf.Mars(params[:held] or [nn.Parameter(torch.ones(2, 2))])
    more = "" if held == 3 else f" and {3 - held} more"
    with pytest.raises(
        RuntimeError, match=rf"holds {held} of the model's 4 trainable parameters \(missing: .*\){more}"
    ):
        begin(mars, model, tmp_path)
    model.requires_grad_(False)
    for param in params[:held]:
        param.requires_grad_(True)
    begin(mars, model, tmp_path)  # frozen parameters are not missing


@pytest.mark.parametrize("name", ["fp16_groups", "bit16_groups", "bf16_groups"])
def test_parameters_in_groups_of_deepspeed_are_there(tmp_path, name):
    """Its wrappers keep the model's parameters, and give flat tensors to the optimizer."""
    model = nn.Linear(3, 2)
    flat = mars_hf.Mars([nn.Parameter(torch.ones(8))])
    groups = [[model.weight], [model.bias]]
    begin(wrapped(wrapped(flat, "ZeRO", **{name: groups}), "Accelerated"), model, tmp_path)
    for incomplete in (groups[:1], []):
        with pytest.raises(RuntimeError, match=rf"holds {len(incomplete)} of the model's 2"):
            begin(wrapped(flat, "ZeRO", **{name: incomplete}), model, tmp_path)


SCALED = SimpleNamespace(use_grad_scaling=True)
UNSCALED = SimpleNamespace(use_grad_scaling=False)


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "FP16_UnfusedOptimizer"])
@pytest.mark.parametrize(
    ("attributes", "is_refused"),
    [
        ({"loss_scale_config": SCALED}, True),  # from DeepSpeed 0.19 on
        ({"loss_scale_config": UNSCALED, "cur_scale": 2.0}, False),
        ({"cur_scale": 2.0}, True),
        ({"cur_scale": 1}, False),
    ],
    ids=str,
)
def test_scaled_losses_without_zero(tmp_path, kind, attributes, is_refused):
    """DeepSpeed's engine divides gradients by a scale that its backward has not applied."""
    model = nn.Linear(3, 2)
    optimizer = wrapped(mars_hf.Mars(model.parameters()), kind, **attributes)
    if not is_refused:
        begin(optimizer, model, tmp_path)
        return
    for each in (optimizer, wrapped(optimizer, "Accelerated")):
        with pytest.raises(RuntimeError, match=r'fp16 under DeepSpeed without ZeRO .*"stage": 1'):
            begin(each, model, tmp_path)
    begin(wrapped(optimizer.optimizer, "DeepSpeedZeroOptimizer", **attributes), model, tmp_path)  # it scales losses


@pytest.mark.parametrize(
    ("kind", "wrapper", "remedy"),
    [
        ("DeepSpeedCPUAdam", "DeepSpeedOptimizerWrapper", r'"zero_force_ds_cpu_optimizer": false in a DeepSpeed JSON'),
        ("AdamW", "DeepSpeedOptimizerWrapper", r"a JSON without 'optimizer' section"),
        ("AdamW", "AcceleratedOptimizer", r"pass Trainer\(optimizers="),
    ],
)
def test_remedy_for_another_optimizer(tmp_path, kind, wrapper, remedy):
    """It names what has put the other optimizer there."""
    model = nn.Linear(3, 2)
    optimizer = wrapped(type(kind, (torch.optim.AdamW,), {})(model.parameters()), wrapper)
    with pytest.raises(RuntimeError, match=rf"would step is {kind}, not Mars; .*{remedy}"):
        begin(optimizer, model, tmp_path)


def in_sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


def of_deepspeed(optimizer: Any) -> Any:
    return pytest.importorskip("deepspeed.runtime.lr_schedules").WarmupLR(optimizer)


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "greedy": GreedyLR,
    "sequence": in_sequence,
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer)]),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.1], 4, cycle_momentum=False),
    "deepspeed": of_deepspeed,
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_of_another_optimizer(tmp_path, kind):
    """Its decay is logged, and MARS trains at its first rate; whatever wraps scheduler and optimizer."""
    model = nn.Linear(3, 2)
    mars, make = mars_hf.create(model, lr=3e-3), SCHEDULERS[kind]
    Accelerator(cpu=True)  # whose state its wrappers read
    accelerated = AcceleratedOptimizer(mars)
    of_zero = type("DeepSpeedZeroOptimizer", (torch.optim.Optimizer,), {"__init__": lambda self: None})()
    of_zero.optimizer, of_zero.param_groups, of_zero.defaults = mars, mars.param_groups, {}
    for scheduled in (mars, accelerated, of_zero):
        scheduler = make(scheduled)
        for stepping in (mars, accelerated, of_zero):
            begin(stepping, model, tmp_path, scheduler)
            begin(stepping, model, tmp_path, AcceleratedScheduler(scheduler, stepping))
    groups = [{"params": [param]} for param in model.parameters()]
    for other, name in (
        (torch.optim.SGD(groups, lr=0.1, momentum=0.9), "SGD"),
        (mars_hf.create(model, lr=3e-3), "another Mars"),
    ):
        for scheduler in (make(other), AcceleratedScheduler(make(other), accelerated)):
            with pytest.raises(RuntimeError, match=rf"was made for {name}: .* at lr=\S+ to the end; make it from the"):
                begin(accelerated, model, tmp_path, scheduler)
    begin(accelerated, model, tmp_path, SimpleNamespace(step=print))  # does not say what it schedules


@pytest.mark.parametrize("make", [trainer, mars_trainer])
def test_scheduler_of_before_stops_a_run(tmp_path, make):
    model = gpt2()
    before = lr_scheduler.LambdaLR(torch.optim.AdamW(model.parameters()), lambda step: 1 / (1 + step))
    run = make(arguments(tmp_path), model, optimizers=(mars_hf.create(model, lr=3e-3), before))
    with pytest.raises(
        RuntimeError, match=r"the scheduler LambdaLR was made for AdamW: .* optimizers=\(optimizer, None"
    ):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.parametrize("make", [trainer, mars_trainer])
@pytest.mark.parametrize("kind", [mars_hf.Mars, torch.optim.SGD])
def test_optimizer_replaced_in_training(tmp_path, make, kind):
    """The scheduler would be the old one's, and clipping in the step would be left to it."""

    class Replace(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            run.optimizer = kind(model.parameters(), lr=0.1)

    model = gpt2()
    run = make(arguments(tmp_path), model, optimizers=(mars_hf.create(model, lr=3e-3), None), callbacks=[Replace()])
    with pytest.raises(
        RuntimeError, match=rf"has been replaced by {kind.__name__} in training, which neither its sched"
    ):
        run.train()
    assert run.state.global_step == 1


def test_weights_of_a_loss_without_gradients():
    """A guide or teacher that a loss holds is not missing, nor is the model in it; what gets a gradient is."""
    model, loss = nn.Linear(3, 2), nn.Module()
    loss.model, loss.guide, loss.head = model, nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
    mars = mars_hf.create(model, lr=3e-3)
    model.weight.grad = torch.ones(2, 3)
    assert not guard.missing_parameters_of_loss(mars, loss, model)
    loss.head.weight.grad = torch.ones(2, 2)
    for held in (loss, {"one": loss, "other": loss}):
        assert guard.missing_parameters_of_loss(mars, held, model) == "Module.head.weight"
    assert not guard.missing_parameters_of_loss(mars_hf.create([model, loss], lr=3e-3), loss, model)
    assert not guard.missing_parameters_of_loss(mars, lambda: loss, model)


# --- checkpoints where mars_hf is not imported ------------------------------------------------------------------------


def saved_checkpoint(folder: Path) -> tuple[Any, Path]:
    run = mars_trainer(arguments(folder, max_steps=2, save_strategy="steps", save_steps=2), gpt2())
    run.train()
    return run, folder / "checkpoint-2"


@pytest.mark.slow
def test_plain_trainer_refuses_a_checkpoint(ended):
    finished = ended["without"]
    assert finished.stdout.splitlines()[-1] == "False"
    last = finished.stderr.strip().splitlines()[-1]
    assert "step 2 of MARS (mars_hf): resume with the optimizer that saved it" in last, finished.stderr[-2000:]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad])
def test_other_optimizers_refuse_a_checkpoint(tmp_path, kind):
    run, checkpoint = saved_checkpoint(tmp_path)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    mars = run.optimizer.optimizer
    groups = [{"params": group["params"]} for group in mars.param_groups]
    with pytest.raises(ValueError, match=r"step 2 of MARS \(mars_hf\): resume with"):
        kind(groups).load_state_dict(saved)
    before = copy.deepcopy(mars.state_dict())
    mars.load_state_dict(saved)
    assert equal(mars.state_dict(), before)
    assert all(torch.is_tensor(state["step"]) for state in before["state"].values())  # the user's own, after training


def test_wrong_step_counts_are_refused(tmp_path):
    run, checkpoint = saved_checkpoint(tmp_path)
    for step in (b"step x of MARS", b"3", "3", None):
        saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        saved["state"][0]["step"] = step
        with pytest.raises(ValueError, match="a number is needed"):
            run.optimizer.optimizer.load_state_dict(saved)


# --- another optimizer under the name of MARS -------------------------------------------------------------------------


class GivesAdamW(Trainer):
    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, optimizers=(torch.optim.AdamW(model.parameters()), None), **kwargs)


class SetsAdamW(Trainer):
    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.optimizer = torch.optim.AdamW(model.parameters())


class CreatesAdamW(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        return self.optimizer


class TrainsAdamW(Trainer):
    """Its optimizer comes in the middle of the first step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        return loss


def test_another_optimizer_within_the_first_step(tmp_path):
    model = gpt2()
    run = mars_hf.with_mars(TrainsAdamW)(model, arguments(tmp_path), train_dataset=Blocks())
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="has been replaced by AdamW in training"):
        run.train()
    assert equal(before, list(model.parameters()))


def test_a_trainer_evaluates_with_another_optimizer(tmp_path):
    model = gpt2()
    run = mars_trainer(arguments(tmp_path), model, optimizers=(torch.optim.AdamW(model.parameters()), None))
    assert run.evaluate(Blocks())["eval_loss"] > 0


@pytest.mark.parametrize("kind", [GivesAdamW, SetsAdamW, CreatesAdamW])
def test_trainers_that_bring_another_optimizer(tmp_path, kind):
    check_that_adamw_stops(mars_hf.with_mars(kind), tmp_path)


@pytest.mark.parametrize("way", ["instance", "class", "later"])
def test_mars_trainer_with_another_optimizer(tmp_path, way):
    model = gpt2()
    settings: dict[str, Any] = {}
    if way == "instance":
        settings["optimizers"] = (torch.optim.AdamW(model.parameters()), None)
    if way == "class":
        settings["optimizer_cls_and_kwargs"] = (torch.optim.AdamW, {"lr": 1e-3})
    run = mars_trainer(arguments(tmp_path), model, **settings)
    if way == "later":
        run.optimizer = torch.optim.AdamW(model.parameters())
    check_stopped(run, model)


def check_that_adamw_stops(kind: Any, folder: Path) -> None:
    model = gpt2()
    check_stopped(kind(model, arguments(folder), train_dataset=Blocks()), model)


def check_stopped(run: Trainer, model: nn.Module) -> None:
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"the optimizer that would step is AdamW, not Mars; .* python -m mars_hf run"
    ):
        run.train()
    assert equal(before, list(model.parameters()))


@pytest.mark.parametrize("kind", [Trainer, mars_hf.MarsTrainer])
def test_optim_that_contradicts_a_given_optimizer(tmp_path, kind):
    """`python -m mars_hf run SCRIPT --optim mars_m` does so where the script hands over an optimizer of its own."""
    model = gpt2()
    optimizers = (mars_hf.create(model, lr=1e-3, mars_type="mars-adamw"), None)
    run = kind(model, arguments(tmp_path, optim="mars_m"), train_dataset=Blocks(), optimizers=optimizers)
    with pytest.raises(RuntimeError, match=r"optim names mars-m, and the optimizer .* would step, is mars-adamw; "):
        run.train()


@pytest.mark.parametrize("kind", [Trainer, mars_hf.MarsTrainer])
def test_optim_args_beside_a_given_optimizer(tmp_path, kind):
    """They are checked when TrainingArguments are made, and would then be ignored."""
    model = gpt2()
    args = arguments(tmp_path, optim="mars_adamw", optim_args="gamma=0.2")
    run = kind(model, args, train_dataset=Blocks(), optimizers=(mars_hf.create(model, lr=1e-3), None))
    with pytest.raises(RuntimeError, match=r"optim_args='gamma=0\.2' does not reach the optimizer that is given"):
        run.train()


@pytest.mark.parametrize("rule", ["mars-adamw", "muon"])
def test_optim_that_names_a_given_optimizer(tmp_path, rule):
    model = gpt2()
    optimizers = (mars_hf.create(model, lr=1e-3, mars_type=rule), None)
    args = arguments(tmp_path, optim=rule.replace("-", "_"))
    assert Trainer(model, args, train_dataset=Blocks(), optimizers=optimizers).train().global_step == 4


def test_a_subclass_may_train_other_optimizers(tmp_path):
    class Comparing(mars_hf.MarsTrainer):
        requires_mars = False

    model = gpt2()
    optimizers = (torch.optim.AdamW(model.parameters()), None)
    run = Comparing(model, arguments(tmp_path), train_dataset=Blocks(), optimizers=optimizers)
    assert run.train().global_step == 4


# --- checkpoints whose files do not belong together -------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    args = arguments(folder, save_strategy="steps", save_steps=2)
    mars_trainer(args, gpt2()).train()
    return folder


def resume(checkpoint: Path, kind: Any = mars_hf.MarsTrainer) -> None:
    args = arguments(checkpoint.parent / "resumed", optim="mars_adamw", max_steps=6)
    kind(gpt2(), args, train_dataset=Blocks()).train(resume_from_checkpoint=str(checkpoint))


def copied(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / checkpoint.name))


@pytest.mark.parametrize("kind", [Trainer, mars_hf.MarsTrainer])
@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_resuming_without_states_is_said(two_checkpoints, tmp_path, caplog, missing, kind):
    checkpoint = copied(two_checkpoints / "checkpoint-4", tmp_path)
    resume(checkpoint, kind)
    assert "without states of the optimizer" not in caplog.text
    (checkpoint / missing).unlink()
    resume(checkpoint, kind)
    assert caplog.text.count("resuming at step 4 without states of the optimizer") == 1


@pytest.mark.parametrize("kind", [Trainer, mars_hf.MarsTrainer])
def test_states_of_another_step(two_checkpoints, tmp_path, kind):
    checkpoint = copied(two_checkpoints / "checkpoint-4", tmp_path)
    shutil.copy(two_checkpoints / "checkpoint-2" / "optimizer.pt", checkpoint / "optimizer.pt")
    with pytest.raises(
        RuntimeError, match=r"states are of step 2, and the checkpoint of step 4 was saved with .* step 4"
    ):
        resume(checkpoint, kind)


def test_an_optimizer_that_had_trained_before_resumes(tmp_path):
    """Its steps are not those of the Trainer."""
    model = gpt2()
    mars = mars_hf.create(model, lr=1e-3)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        mars.step()
    settings = {"save_strategy": "steps", "save_steps": 2}
    mars_trainer(arguments(tmp_path, **settings), model, optimizers=(mars, None)).train()
    assert guard.steps_of_first(mars) == 7
    resume(tmp_path / "checkpoint-4")


def test_states_under_zero_3():
    """It takes the parameters out of the groups after each step."""
    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))]
    mars = mars_hf.Mars(params, lr=1e-3)
    assert guard.steps_of_first(mars) is None
    for param in params:
        param.grad = torch.ones_like(param)
    mars.step()
    for group in mars.param_groups:
        group["params"] = []
    assert guard.steps_of_first(mars) == 1


def test_a_file_damaged_in_its_middle(two_checkpoints, tmp_path):
    file = copied(two_checkpoints / "checkpoint-4", tmp_path) / "optimizer.pt"
    content = bytearray(file.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 64):
        content[place] ^= 255
    file.write_bytes(content)
    assert guard.damaged_file(str(file.parent)) == file
    assert guard.damaged_file(str(two_checkpoints / "checkpoint-4")) is None


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_truncated_files_are_named(two_checkpoints, tmp_path, name, part):
    file = copied(two_checkpoints / "checkpoint-4", tmp_path) / name
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match=rf"checkpoint-4/{name} is damaged: .*Resume from another checkpoint"):
        resume(file.parent)


# --- a checkpoint's settings ------------------------------------------------------------------------------------------


def followed(saved: dict[str, Any], **settings: Any) -> tuple[str | None, Mars]:
    """Return what is said of a checkpoint's settings, and the optimizer that has taken its state."""
    weight = nn.Parameter(torch.ones(2, 2))
    model = nn.ParameterDict({"weight": weight})
    mars = mars_hf.create(model, lr=1e-2, **settings)
    weight.grad = torch.ones(2, 2)
    mars.step()
    state = TrainerState(stateful_callbacks={"mars_hf": {"mars_type": "mars-adamw", "create": saved}})
    line = guard.follow_checkpoint(state, mars)
    kept = state.stateful_callbacks["mars_hf"]["create"]
    assert kept == saved_settings.to_json(mars.created_with)
    return line, mars


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        ({}, {"state_dtype": "8bit"}, "8bit"),
        ({"state_dtype": "8bit"}, {}, None),
        ({"state_dtype": "8bit"}, {"state_dtype": "bfloat16"}, "bfloat16"),
        ({"state_dtype": "8bit"}, {"state_dtype": "8bit"}, "8bit"),
    ],
    ids=str,
)
def test_state_dtype_of_a_checkpoint_does_not_win(before, now, kept):
    """Loading converts states to the run's own form: mars.json says so, and no line says the opposite."""
    line, mars = followed(saved_settings.to_json({"lr": 1e-2, **before}), **now)
    assert line is None and mars.created_with["state_dtype"] == kept


def test_state_dtypes_of_overrides_do_not_win():
    rules = [("weight", {"state_dtype": "8bit", "eps": 1e-6})]
    saved = saved_settings.to_json({"lr": 1e-2, "param_rules": rules})
    own = [("weight", {"state_dtype": "float32", "eps": 1e-6})]
    line, mars = followed(saved, param_rules=own)
    assert line is None and mars.created_with["param_rules"][0].settings["state_dtype"] == "float32"


def test_other_state_dtypes_of_a_checkpoint_win():
    saved = saved_settings.to_json({"lr": 1e-2, "state_dtype": "bfloat16"})
    line, mars = followed(saved)
    assert mars.created_with["state_dtype"] == "bfloat16"
    assert "state_dtype=bfloat16 (given: None)" in line


def test_settings_that_an_earlier_version_did_not_have():
    saved = saved_settings.to_json({"lr": 1e-2})
    del saved["weight_decay_mode"], saved["normalize_rows"]
    line, mars = followed(saved, weight_decay_mode="cautious")
    assert mars.created_with["weight_decay_mode"] == "standard"
    assert line == (
        "resuming with the checkpoint's weight_decay_mode=standard (given: cautious); to change one, start a new run "
        "from the model"
    )
