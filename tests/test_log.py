"""The logger: what a person sees of its lines, who has set up no logging, or has."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


def errors_of(script: str, folder: Path, *launcher: str) -> list[str]:
    """Return what a script writes to stderr, under Python's own filters of warnings."""
    path = folder / "script.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in (MODEL, script)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONWARNINGS", "RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_of_a_launcher_say_it_once(tmp_path):
    """Also what is said before there is a process group, as of an optimizer that was made first."""
    script = ACCELERATE.replace("create(model, lr=2e-5)", "create(model, lr=2e-5, weight_decay_mode='cautious')")
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    lines = errors_of(
        script, tmp_path, *launcher, "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"
    )
    assert sum(LOST in line or "1 parameters are bfloat16" in line for line in lines) == 1
    assert sum("weight_decay is 0 in all groups" in line for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", ["one", "two", "three"]),
        ("", "logging.basicConfig(format='user: %(message)s')", ["one", "user: two", "user: three"]),
        ("logging.basicConfig(format='user: %(message)s')", "", ["user: one", "user: two", "user: three"]),
        ("logging.getLogger('mars_hf').setLevel('ERROR')", "", []),
        ("", "logging.getLogger('mars_hf').setLevel('WARNING')", ["one", "two"]),
        # It silences loggers that exist, which nobody asks for who writes it.
        ("logging.config.dictConfig({'version': 1})", "", ["one", "two", "three"]),
    ],
)
def test_before_and_after_the_users_logging(before, after, expected, tmp_path):
    """Lines show without any, once each, and where the user sends them as soon as there is some."""
    script = f"""
import logging, logging.config, sys
from mars_hf import log
{before}
log.warning("one")
{after}
log.warning("two")
log.info("three")
"""
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    assert lines.splitlines() == expected


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
@pytest.mark.parametrize(("schedule", "count"), [("", 0), ("WarmupLR", 1)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rate_under_zero(stage, schedule, count, tmp_path):
    """ZeRO-1 and 2 show an optimizer one group at a time; only a scheduler that assigns one rate to all is told."""
    pytest.importorskip("deepspeed")
    script = ENGINE.replace("DISTRIBUTED", str(Path(__file__).parent / "distributed"))
    lines = errors_of(script.replace("STAGE", str(stage)).replace("SCHEDULE", schedule), tmp_path)
    assert sum("groups have the learning rate" in line for line in lines) == count


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
