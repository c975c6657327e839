"""NonFiniteCallback: non-finite losses and gradients are reported, saved nowhere, and end the run."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCAB, arguments, gpt2
from test_stale_pass import use_fp16_on_cpu
from torch import Tensor
from transformers import GPT2LMHeadModel, Trainer, default_data_collator

import mars_hf
from mars_hf import NonFiniteCallback, NonFiniteError

GOOD, LOSS, GRADIENT = range(3)  # what a batch does


def poisoned(grad: Tensor) -> Tensor:
    return grad.flatten().index_fill(0, torch.tensor(1), torch.nan).view_as(grad)


class Model(GPT2LMHeadModel):
    """A GPT-2 whose batches may poison the loss alone, or one gradient alone."""

    def forward(self, input_ids: Tensor, labels: Tensor, kind: Tensor, **_: Any) -> dict[str, Tensor]:
        loss = super().forward(input_ids=input_ids, labels=labels).loss
        if GRADIENT in kind:
            copied = self.transformer.h[1].mlp.c_fc.weight.clone()
            copied.register_hook(poisoned)
            loss = loss + 0 * copied.sum()
        return {"loss": loss + torch.full_like(loss, torch.inf) if LOSS in kind else loss}


def rows(poison: dict[int, int], batches: int = 24) -> Any:
    """Return batches of two rows, some of them poisoned."""
    ids = torch.randint(0, VOCAB, (2 * batches, 12), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": x, "labels": x, "kind": torch.tensor(poison.get(i // 2, GOOD))} for i, x in enumerate(ids)]


def make(
    folder: Path, poison: dict[int, int], *callbacks: Any, kind: type = mars_hf.MarsTrainer, **settings: Any
) -> Trainer:
    batches = settings.pop("batches", 24)
    of_mars = {name: settings.pop(name) for name in ("lr", "is_approx", "release_gradients") if name in settings}
    torch.manual_seed(0)
    model = Model(gpt2().config)
    defaults = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "max_steps": 8}
    args = arguments(folder, **{**defaults, "remove_unused_columns": False, **settings})
    optimizers = (mars_hf.create(model, **{"lr": 1e-2, "eps": 1e-6, **of_mars}), None)
    given = {"train_dataset": rows(poison, batches), "data_collator": default_data_collator, "optimizers": optimizers}
    return kind(model, args, callbacks=list(callbacks), **given)


def from_step(first: int, kind: int) -> dict[int, int]:
    """Return poison for all batches from a step on, counted from 1."""
    return dict.fromkeys(range(first - 1, 24), kind)


@pytest.fixture
def reports(caplog) -> Any:
    """Return a function that lists the lines logged so far, by their beginning."""
    logger = logging.getLogger("mars_hf")
    logger.addHandler(caplog.handler)
    yield lambda pattern=r"step \d+: non-finite": [
        record.getMessage()
        for record in dict.fromkeys(caplog.records)
        if record.name == logger.name and re.match(pattern, record.getMessage())
    ]
    logger.removeHandler(caplog.handler)


def test_nonfinite_patience(tmp_path):
    for patience in (0, -1, 2.5, True, "3"):
        with pytest.raises(ValueError, match=r"^patience=.*>= 1$"):
            NonFiniteCallback(patience)
    for callbacks, kind, patiences in (
        ([], mars_hf.MarsTrainer, [3]),
        ([NonFiniteCallback(7)], mars_hf.MarsTrainer, [7]),
        ([], Trainer, []),
    ):
        known = make(tmp_path, {}, *callbacks, kind=kind).callback_handler.callbacks
        assert [each.patience for each in known if isinstance(each, NonFiniteCallback)] == patiences


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, Trainer])
def test_gradient_is_reported_and_stops(tmp_path, reports, caplog, kind):
    run = make(tmp_path, {2: GRADIENT}, NonFiniteCallback(), kind=kind)
    with pytest.raises(NonFiniteError, match=r"^3 steps in a row with a non-finite loss or gradient; .*step 5: "):
        run.train()
    lines = reports()
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 4", "step 5"]  # NaN is in the weights then
    assert lines[0] == "step 3: non-finite gradient norm nan (1 in a row, the run stops at 3)"
    logged = [record.message for record in caplog.records if "NaN" in record.message]  # without this callback, too
    assert logged[0] == "step 3: NaN gradients; lower the learning rate, check the data"


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, Trainer])
def test_released_gradients_are_looked_at(tmp_path, reports, kind):
    settings = {"release_gradients": True, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 1}
    run = make(tmp_path, {2: GRADIENT}, NonFiniteCallback(1), kind=kind, **settings)
    with pytest.raises(NonFiniteError, match="step 3: non-finite gradient norm nan"):
        run.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_loss_is_reported_and_good_steps_reset_the_count(tmp_path, reports):
    poison = dict.fromkeys((2, 5, 8, 10), LOSS)  # micro-batches of steps 2, 3, 5 and 6
    run = make(tmp_path, poison, gradient_accumulation_steps=2)
    run.train()
    assert reports() == [
        f"step {step}: non-finite loss inf ({count} in a row, the run stops at 3)"
        for step, count in ((2, 1), (3, 2), (5, 1), (6, 2))
    ]
    assert run.state.global_step == 8
    run.train_dataset = rows({0: LOSS})
    run.train()  # counts from zero
    assert reports()[4:] == ["step 1: non-finite loss inf (1 in a row, the run stops at 3)"]


def test_stale_gradient_counts(tmp_path, reports):
    run = make(tmp_path, {}, NonFiniteCallback(1), is_approx=False)
    commit = run._stale_pass._commit

    def poisoned(mars: mars_hf.Mars) -> None:
        run.model.transformer.h[1].mlp.c_fc.weight.grad[0] = torch.nan
        commit(mars)

    run._stale_pass._commit = poisoned
    with pytest.raises(NonFiniteError, match="step 2: non-finite gradient norm nan"):
        run.train()


@pytest.mark.parametrize("kind", [mars_hf.MarsTrainer, Trainer])
@pytest.mark.parametrize("patience", [1, 3])
def test_no_checkpoint_after_a_bad_step(tmp_path, reports, kind, patience):
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run = make(tmp_path, from_step(4, GRADIENT), NonFiniteCallback(patience), kind=kind, **saves)
    with pytest.raises(NonFiniteError) as error:
        run.train()
    assert str(error.value).startswith(f"{patience} steps in a row") and "\n" not in str(error.value)
    assert f"start a new run from the weights in {tmp_path / 'checkpoint-3'} (resuming keeps" in str(error.value)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert len(reports("checkpoint-")) == patience - 1


def test_no_checkpoint_after_an_epoch_that_ends_badly(tmp_path, reports):
    make(tmp_path, {3: LOSS}, batches=4, num_train_epochs=2, max_steps=-1, save_strategy="epoch").train()
    assert not list(tmp_path.glob("checkpoint-*"))
    assert reports("checkpoint-")[0] == "checkpoint-4 is not written: the last step was not finite"
    with pytest.raises(NonFiniteError, match=r"has no checkpoint: start again with a lower learning rate"):
        make(tmp_path / "absent", from_step(1, LOSS)).train()


def test_the_advice_after_bad_steps_works(tmp_path):
    """A new run from the weights has the lower rate; resuming goes on with other data, at the checkpoint's rate."""
    saves = {"save_strategy": "steps", "save_steps": 1}
    run = make(tmp_path, from_step(4, GRADIENT), **saves)
    with pytest.raises(NonFiniteError, match=r"For a lower learning rate, start .*; with other data, resume from it$"):
        run.train()
    checkpoint = tmp_path / "checkpoint-3"
    new = make(tmp_path / "new", {}, lr=1e-3)
    new.model.load_state_dict(Model.from_pretrained(checkpoint).state_dict())
    new.train()
    assert {entry["learning_rate"] for entry in new.state.log_history[:-1]} == {1e-3}
    resumed = make(tmp_path, {}, lr=1e-3, **saves)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 8
    assert {entry["learning_rate"] for entry in resumed.state.log_history[3:-1]} == {1e-2}


@pytest.mark.parametrize("is_approx", [True, False])
def test_a_finite_run_is_unchanged(tmp_path, is_approx):
    one, other = (make(tmp_path, {}, is_approx=is_approx, gradient_accumulation_steps=2) for _ in range(2))
    other.pop_callback(NonFiniteCallback)
    one.train(), other.train()
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


def test_the_search_for_the_loss_scale_does_not_count(tmp_path, reports, monkeypatch):
    run = make(tmp_path, {6: LOSS}, NonFiniteCallback(2))
    use_fp16_on_cpu(run, 2.0**20, monkeypatch)
    weight = run.model.transformer.h[0].mlp.c_fc.weight
    # At 2^20, 2^19 and 2^18; a real fp16 gradient overflows likewise.
    weight.register_hook(lambda grad: grad * torch.inf if run.accelerator.scaler.get_scale() > 2**17 else grad)
    run.train()
    assert reports() == ["step 7: non-finite loss inf (1 in a row, the run stops at 2)"]
    assert {state["step"].item() for state in run.optimizer.optimizer.state.values()} == {5.0}


def test_a_gradient_that_no_loss_scale_helps_counts(tmp_path, reports, monkeypatch):
    run = make(tmp_path, from_step(1, GRADIENT))
    use_fp16_on_cpu(run, 8.0, monkeypatch)
    with pytest.raises(NonFiniteError):
        run.train()
    assert [line.split(":")[0] for line in reports()] == ["step 4", "step 5", "step 6"]  # 8, 4 and 2 come first
