"""The logger: what a person sees of its lines, who has set up no logging, or has."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_in_forks

# A bfloat16 model at a rate of fine-tuning, which loses most updates.
MODEL = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, x, labels):
            return {"loss": (self.layer(x.to(self.layer.weight.dtype)) - labels).square().mean()}

    model = Model()
    data = [{"x": torch.ones(4), "labels": torch.zeros(4)}] * 8
"""
ACCELERATE = """
    import mars_hf
    from accelerate import Accelerator
    optimizer = mars_hf.create(model, lr=2e-5)  # before there is a process group
    accelerator = Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for row in data[:3]:
        accelerator.backward(model(**row)["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""
LOST = "2 parameters are bfloat16"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_of_a_launcher_say_it_once(tmp_path):
    """Also what is said before there is a process group, as of an optimizer that was made first."""
    script = ACCELERATE.replace("create(model, lr=2e-5)", "create(model, lr=2e-5, weight_decay_mode='cautious')")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    finished = run_in_forks({"run": MODEL + script}, tmp_path, [], launch)["run"]
    assert finished.returncode == 0, finished.stderr
    lines = finished.stderr.splitlines()
    assert sum(LOST in line or "1 parameters are bfloat16" in line for line in lines) == 1
    assert sum("weight_decay is 0 in all groups" in line for line in lines) == 1


# What the user sets up before the first line and after it, and what stderr then has.
LOGGING = {
    "none": ("", "", ["one", "two", "three"]),
    "after": ("", "logging.basicConfig(format='user: %(message)s')", ["one", "user: two", "user: three"]),
    "before": ("logging.basicConfig(format='user: %(message)s')", "", ["user: one", "user: two", "user: three"]),
    "errors alone": ("logging.getLogger('mars_hf').setLevel('ERROR')", "", []),
    "warnings": ("", "logging.getLogger('mars_hf').setLevel('WARNING')", ["one", "two"]),
    # By default it silences the loggers that exist, which few users intend.
    "dictConfig": ("logging.config.dictConfig({'version': 1})", "", ["one", "two", "three"]),
}


@pytest.mark.slow
def test_before_and_after_the_users_logging(tmp_path):
    """Lines show without any, once each, and where the user sends them as soon as there is some."""
    script = """
        import logging, logging.config
        from mars_hf import log
        BEFORE
        log.warning("one")
        AFTER
        log.warning("two")
        log.info("three")
    """
    scripts = {
        name: script.replace("BEFORE", before).replace("AFTER", after) for name, (before, after, _) in LOGGING.items()
    }
    finished = run_in_forks(scripts, tmp_path, ["torch"])
    written = {name: each.stderr.splitlines() for name, each in finished.items()}
    assert written == {name: lines for name, (*_, lines) in LOGGING.items()}


ENGINE = """
    import os, sys
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    sys.path.append("DISTRIBUTED")
    import launching, mars_hf
    deepspeed = launching.import_deepspeed()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": STAGE}
    if "SCHEDULE":
        config["scheduler"] = {"type": "SCHEDULE", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
    model = model.float()
    deepspeed.init_distributed("gloo", verbose=False)
    engine = deepspeed.initialize(model=model, optimizer=mars_hf.create(model, lr=1e-3), config=config)[0]
    for row in data[:3]:
        engine.backward(engine(**row)["loss"])
        engine.step()
"""


@pytest.mark.slow
def test_one_rate_under_zero(tmp_path, monkeypatch):
    """ZeRO-1 and 2 show an optimizer one group at a time; only a scheduler that assigns one rate to all is told."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    script = MODEL + ENGINE.replace("DISTRIBUTED", str(Path(__file__).parent / "distributed"))
    scripts = {
        f"stage {stage}, {schedule}": script.replace("STAGE", str(stage)).replace("SCHEDULE", schedule)
        for stage in (1, 2, 3)
        for schedule in ("", "WarmupLR")
    }
    finished = run_in_forks(scripts, tmp_path, ["deepspeed", "mars_hf.optimizer"])
    assert [each.stderr for each in finished.values() if each.returncode] == []
    counts = {name: each.stderr.count("groups have the learning rate") for name, each in finished.items()}
    assert counts == {name: int(name.endswith("WarmupLR")) for name in scripts}


@pytest.mark.parametrize(
    ("environment", "warned", "of_machine"),
    [
        ({}, 1, 1),
        ({"RANK": "0", "LOCAL_RANK": "0"}, 1, 1),
        ({"RANK": "3", "LOCAL_RANK": "3"}, 0, 0),
        ({"RANK": "8", "LOCAL_RANK": "0"}, 0, 1),
    ],
    ids=["alone", "first", "another", "first of its machine"],
)
def test_who_speaks_on_ranks(environment, warned, of_machine, monkeypatch, caplog):
    from mars_hf import log

    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    log.warning("of the run")
    log.warning_on_machine("of the machine")
    assert (caplog.text.count("of the run"), caplog.text.count("of the machine")) == (warned, of_machine)
