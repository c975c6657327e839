"""Advice reaches a person: scripts in processes of their own, with Python's and accelerate's filters as they are."""

from __future__ import annotations

import pytest
import torch
from forks import run_in_forks
from helpers import logged
from torch import nn

import mars_hf
from mars_hf import Mars

MODEL = """
import torch, mars_hf
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
sizes = dict(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes)).to(torch.bfloat16)
data = [dict(input_ids=ids, labels=ids) for ids in torch.randint(16, (8, 8))]
args = TrainingArguments("out", max_steps=3, learning_rate=2e-5, report_to="none", save_strategy="no", use_cpu=True)
"""
LOOP = """
for _ in range(3):
    model(**{name: torch.stack([row[name] for row in data]) for name in data[0]}).loss.backward()
    mars.step()
    mars.zero_grad()
"""
SCRIPTS = {
    "Trainer": "Trainer(model, args, train_dataset=data, optimizers=(mars_hf.create(model, lr=2e-5), None)).train()",
    "optim": "args.optim = 'mars_adamw'; Trainer(model, args, train_dataset=data).train()",
    "MarsTrainer": "mars_hf.MarsTrainer(model, args, train_dataset=data).train()",
    "own loop": f"mars = mars_hf.create(model, lr=2e-5){LOOP}",
    "accelerate": (
        "from accelerate import Accelerator\n"
        f"model, mars = Accelerator(cpu=True).prepare(model, mars_hf.create(model, lr=2e-5)){LOOP}"
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run all scripts."""
    trainer = "import mars_hf.training.trainer\n"
    scripts = {name: f"{MODEL}{trainer * (name == 'optim')}{code}\n" for name, code in SCRIPTS.items()}
    return run_in_forks(scripts, tmp_path_factory.mktemp("scripts"), ["accelerate", "transformers.trainer"])


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_person_reads_that_weights_do_not_move(script, finished):
    written = finished[script].stderr
    assert finished[script].returncode == 0, written
    assert written.count("do not move") == 1
    assert "parameters are bfloat16 and take rounding='nearest'" in written


def test_deepspeed_shows_one_group_at_a_time():
    """As ZeRO-1 and 2 do in each step; a rate that is assigned to all groups is said there, too."""
    matrix, vector = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    mars = Mars([matrix, vector], lr=1e-2)
    groups = mars.param_groups

    def step() -> None:
        for param in (matrix, vector):
            param.grad = torch.ones_like(param)
        for group in groups:
            mars.param_groups = [group]
            mars.step()
        mars.param_groups = groups

    assert logged(step) == []
    groups[1]["lr"] = groups[0]["lr"]
    (said,) = logged(step)
    assert "all 2 groups have the learning rate 0.01; they were made with 0.005 to 0.01" in said
    assert logged(step) == []


def test_advice_is_said_once_an_optimizer():
    for _ in range(2):
        param = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
        mars = Mars([param], lr=1e-5)

        def step(param=param, mars=mars) -> None:
            for threshold in (1.0, 2.0):  # groups that somebody edits are looked at again
                mars.param_groups[0]["clip_threshold"] = threshold
                param.grad = torch.ones_like(param)
                mars.step()

        assert len(logged(step, "do not move")) == 1


def test_advice_is_said_once_though_its_numbers_change():
    param = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    mars = Mars([param], lr=1e-5)

    def run() -> None:
        for step in range(1, 4):
            mars.param_groups[0] |= {"lr": 1e-5 * step, "gamma": 0.01 * step}
            param.grad = torch.ones_like(param)
            mars.step()
            mars.load_state_dict(mars.state_dict())

    assert len(logged(run)) == 1


def test_one_rate_is_said_of_a_run_that_is_resumed():
    """Not of rates that the checkpoint was made with, which are one where nobody wants two."""

    def make(**rates: float) -> Mars:
        return Mars([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))], **rates)

    def step(mars: Mars) -> None:
        for group in mars.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        mars.step()

    for saved, count in ((make(lr=0.1), 1), (make(lr=0.1, lr_1d=0.1), 0)):
        step(saved)
        resumed = make(lr=0.1)
        resumed.load_state_dict(saved.state_dict())
        assert logged(lambda resumed=resumed: step(resumed)) == []
        for group in resumed.param_groups:
            group["lr"] = 0.05
        assert len(logged(lambda resumed=resumed: step(resumed), "0.05; they were made with 0.05 to 0.1")) == count


def test_only_the_first_rank_speaks(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank, count in ((0, 1), (1, 0)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group=None, rank=rank: rank)
        assert len(logged(lambda: mars_hf.Mars([nn.Parameter(torch.ones(2))], lr=1e-4, lr_1d=1.0), "lr_1d")) == count
