"""Exact MARS in MarsTrainer against the straight-line algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import straight_line
import torch
from helpers import arguments, gpt2
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

import mars_hf
from mars_hf.training.random_state import RandomState
from mars_hf.training.snapshots import buffers_kept

SETTINGS = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "gamma": 0.1, "clip_threshold": 0.3}
LR_1D = 1e-3
BATCH = 2


class Rows(Dataset):
    """22 rows with different numbers of labels: 11 micro-batches, not a multiple of 4."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, 64, (22, 12), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: 1 + index % 7] = -100  # the first one is nobody's target; Trainer may count it
        return {"input_ids": self.ids[index], "labels": labels}


class Notes:
    """Keep records where MarsTrainer cannot restore them, unlike lists among its attributes."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, bool, torch.Tensor]] = []


class Recording(mars_hf.MarsTrainer):
    """Record random state and parameters of every forward pass, and optionally make one overflow."""

    def __init__(self, *args: Any, overflow: tuple[tuple[int, bool], ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes = Notes()
        self.overflow = overflow

    @property
    def passes(self) -> list[tuple[int, bool, torch.Tensor]]:
        return self.notes.passes

    def compute_loss(self, model, inputs, *args, **kwargs):
        now = (self.state.global_step, self.in_stale_pass)
        self.notes.passes.append((*now, torch.get_rng_state()))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * float("inf") if now in self.overflow else loss

    def random_states(self, stale: bool = False) -> list[list[torch.Tensor]]:
        found: dict[int, list[torch.Tensor]] = {}
        for step, in_stale_pass, random in self.passes:
            if in_stale_pass == stale:
                found.setdefault(step, []).append(random)
        return [found[step] for step in sorted(found)]


def exact_run(folder: Path, model: nn.Module, *, kind: type = Recording, settings: dict | None = None, **args: Any):
    trajectory = Trajectory()
    own = {key: args.pop(key) for key in ("overflow",) if key in args}
    callbacks = [trajectory, *args.pop("callbacks", [])]
    mars = mars_hf.create(model, **{**SETTINGS, "is_approx": False, **(settings or {})}, lr_1d=LR_1D)
    defaults = {"max_steps": 20, "per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential"}
    run = kind(
        model,
        arguments(folder, **{**defaults, **args}),
        train_dataset=Rows(),
        data_collator=default_data_collator,
        optimizers=(mars, None),
        callbacks=callbacks,
        **own,
    )
    run.trajectory = trajectory.params
    return run


class Trajectory(TrainerCallback):
    """Return the parameters after every step."""

    def __init__(self) -> None:
        self.params: list[dict[str, torch.Tensor]] = []

    def on_optimizer_step(self, args, state, control, model=None, **_):
        self.params.append({name: param.detach().clone() for name, param in model.named_parameters()})


def apart(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> float:
    """Return the largest difference relative to the largest weight, over all tensors and steps."""
    return max(
        ((now[name] - weight).abs().max() / weight.abs().max()).item()
        for now, then in zip(found, expected, strict=True)
        for name, weight in then.items()
    )


def dropout(p: float) -> dict[str, float]:
    return {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("accumulation", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_the_algorithm_in_straight_lines(tmp_path, accumulation, mars_type):
    """The run crosses epoch boundaries and incomplete accumulations, with dropout."""
    model = gpt2(**dropout(0.1))
    settings = {"mars_type": mars_type} | ({"lr": 2e-4} if mars_type == "mars-lion" else {})
    run = exact_run(tmp_path, model, gradient_accumulation_steps=accumulation, settings=settings)
    run.train()
    steps = straight_line.batches(Rows(), BATCH, accumulation, 7)[:20]
    assert {len(micro) for micro in steps} == ({1} if accumulation == 1 else {3, 4})
    expected = straight_line.train(
        gpt2(**dropout(0.1)).train(),
        steps,
        settings=SETTINGS | ({"lr": 2e-4} if mars_type == "mars-lion" else {}),
        mars_type=mars_type,
        lr_1d=LR_1D,
        random_states=run.random_states(),
    )
    assert apart(run.trajectory, expected) <= 1e-5


def test_the_approximation_is_something_else(tmp_path):
    """Otherwise the comparison above would prove nothing."""
    model = gpt2()
    run = exact_run(tmp_path, model, settings={"is_approx": True})
    run.train()
    steps = straight_line.batches(Rows(), BATCH, 1, 2)[:20]
    expected = straight_line.train(gpt2().train(), steps, settings=SETTINGS, lr_1d=LR_1D)
    assert apart(run.trajectory, expected) > 1e-3


@pytest.mark.slow
def test_bf16_autocast(tmp_path):
    model = gpt2()
    run = exact_run(tmp_path, model, gradient_accumulation_steps=2, bf16=True)
    run.train()
    steps = straight_line.batches(Rows(), BATCH, 2, 4)[:20]
    settings = {"settings": SETTINGS, "lr_1d": LR_1D, "found": run.trajectory}
    expected = straight_line.train(gpt2().train(), steps, **settings, autocast=torch.bfloat16)
    assert apart(run.trajectory, expected) <= 1e-5


class FirstGradients(TrainerCallback):
    """Record both gradients of every step."""

    def __init__(self) -> None:
        self.pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        states = optimizer.optimizer.state
        found = [(param.grad.clone(), states[param].get("last_grad")) for param in model.parameters() if param.ndim > 1]
        self.pairs.append([(grad, stale.clone()) for grad, stale in found if stale is not None])


# Renamed after transformers 5.19.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_at_the_same_parameters_both_gradients_are_equal_to_the_bit(tmp_path, max_grad_norm, checkpointing):
    """Both passes have the same dropout masks and the same gradient scaling."""
    noted = FirstGradients()
    run = exact_run(
        tmp_path,
        gpt2(**dropout(0.1)),
        settings={"lr": 0.0, "weight_decay": 0.0},
        max_steps=3,
        gradient_accumulation_steps=4,
        max_grad_norm=max_grad_norm,
        **{CHECKPOINTING: checkpointing},
        callbacks=[noted],
    )
    run._kept_optimizer.param_groups[1]["lr"] = 0.0
    run.train()
    assert [len(pairs) for pairs in noted.pairs] == [0, 10, 10]  # the first step has none
    for pairs in noted.pairs:
        assert all(torch.equal(grad, stale) for grad, stale in pairs)
    later = [torch.stack([grad.norm() for grad, _ in pairs]) for pairs in noted.pairs[1:]]
    assert not torch.equal(*later)
    assert run.random_states(stale=True)[0] != []
    for stale, ordinary in zip(run.random_states(stale=True), run.random_states()[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(stale, ordinary, strict=True))


class DrawsRandomNumbers(TrainerCallback):
    """Draw random numbers between the passes, as other callbacks may."""

    def on_step_begin(self, *args, **kwargs):
        torch.rand(3)

    def on_substep_end(self, *args, **kwargs):
        torch.rand(3)


def test_callbacks_that_draw_random_numbers_do_not_part_the_masks(tmp_path):
    noted = FirstGradients()
    run = exact_run(
        tmp_path,
        gpt2(**dropout(0.1)),
        settings={"lr": 0.0, "weight_decay": 0.0},
        max_steps=2,
        gradient_accumulation_steps=3,
        callbacks=[DrawsRandomNumbers, noted],
    )
    run._kept_optimizer.param_groups[1]["lr"] = 0.0
    run.train()
    assert noted.pairs[1] and all(torch.equal(grad, stale) for grad, stale in noted.pairs[1])


def use_fp16_on_cpu(run: Trainer, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up what accelerate does with fp16=True on an accelerator; on CPUs it refuses."""
    monkeypatch.setattr(run.accelerator.state, "_mixed_precision", "fp16")  # shared by all Trainers of a process
    run.accelerator.native_amp = True
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.slow
def test_fp16_with_a_gradient_scaler(tmp_path, monkeypatch):
    """A step that overflows in either gradient leaves no trace of its batch."""
    overflow = ((0, False), (4, True), (9, False))
    model = gpt2()
    run = exact_run(tmp_path, model, overflow=overflow, gradient_accumulation_steps=2)
    use_fp16_on_cpu(run, 1024.0, monkeypatch)
    run.train()
    assert run.accelerator.scaler.get_scale() == 1024.0 / 2 ** len(overflow)
    skipped = [step for step, _ in overflow]
    scales = [1024.0 / 2 ** sum(other < step for other in skipped) for step in range(20)]
    steps = straight_line.batches(Rows(), BATCH, 2, 4)[:20]
    expected = straight_line.train(
        gpt2().train(),
        steps,
        settings=SETTINGS,
        lr_1d=LR_1D,
        autocast=torch.float16,
        scales=scales,
        skipped=skipped.__contains__,
        found=run.trajectory,
    )
    assert apart(run.trajectory, expected) <= 1e-5


class Snapshots(TrainerCallback):
    """Record parameters and states around every step."""

    def __init__(self) -> None:
        self.taken: list[dict] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        self._take(model, optimizer)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        self._take(model, optimizer)

    def _take(self, model, optimizer):
        states = optimizer.optimizer.state_dict()["state"]
        self.taken.append(
            {f"{i}.{key}": value.clone() for i, state in states.items() for key, value in state.items()}
            | {name: param.detach().clone() for name, param in model.named_parameters()}
        )


@pytest.mark.parametrize("stale", [False, True])
def test_a_skipped_step_changes_nothing(tmp_path, stale, monkeypatch):
    snapshots = Snapshots()
    run = exact_run(tmp_path, gpt2(), overflow=((2, stale),), max_steps=4, callbacks=[snapshots])
    use_fp16_on_cpu(run, 1024.0, monkeypatch)
    run.train()
    before, after = snapshots.taken[4:6]
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True)
    before, after = snapshots.taken[6:8]  # the next step is taken
    assert not torch.equal(before["transformer.wte.weight"], after["transformer.wte.weight"])


@pytest.mark.slow
def test_resuming_within_an_epoch(tmp_path):
    """Resuming is bit-exact with dropout and an accumulation that does not divide the epoch."""
    settings = {"gradient_accumulation_steps": 4, "max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    whole = gpt2(**dropout(0.1))
    exact_run(tmp_path, whole, **settings).train()
    resumed = gpt2(seed=1, **dropout(0.1))
    again = exact_run(tmp_path, resumed, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert again.passes[0][:2] == (5, True)  # the first step after resuming has a stale gradient


@pytest.mark.parametrize("way", ["optim", "factory"])
def test_it_is_chosen_by_name_or_factory(tmp_path, way):
    mars_hf.register()
    named = {"optim": "mars_adamw", "optim_args": "is_approx=false,gamma=0.1"} if way == "optim" else {}
    given = {"optimizer_cls_and_kwargs": mars_hf.factory(is_approx=False, gamma=0.1)} if way == "factory" else {}
    run = Recording(
        gpt2(),
        arguments(tmp_path, max_steps=3, **named),
        train_dataset=Rows(),
        data_collator=default_data_collator,
        **given,
    )
    run.train()
    assert [stale for _, stale, _ in run.passes] == [False, True, False, True, False]


@pytest.mark.parametrize("way", ["instance", "instance with callback", "factory", "optim"])
def test_plain_trainer_says_what_it_needs(tmp_path, way):
    mars_hf.register()
    model = gpt2()
    named, given = {}, {}
    if way.startswith("instance"):
        given["optimizers"] = (mars_hf.create(model, is_approx=False), None)
    if way == "instance with callback":
        given["callbacks"] = [mars_hf.LastGradientCallback()]
    if way == "factory":
        given["optimizer_cls_and_kwargs"] = mars_hf.factory(is_approx=False)
    if way == "optim":
        named = {"optim": "mars_adamw", "optim_args": "is_approx=false"}
    run = Trainer(
        model, arguments(tmp_path, **named), train_dataset=Rows(), data_collator=default_data_collator, **given
    )
    with pytest.raises(RuntimeError, match=r"mars_hf\.MarsTrainer"):
        run.train()
    assert run.state.global_step == 0


class Normalized(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 64)

    def forward(self, input_ids, labels):
        hidden = self.norm(self.embed(input_ids).flatten(0, 1))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels.flatten())}


def test_running_statistics_count_every_batch_once(tmp_path):
    torch.manual_seed(0)
    model = Normalized()
    exact_run(tmp_path, model, settings={"lr": 0.0}, max_steps=5, save_strategy="no").train()
    assert model.norm.num_batches_tracked == 5


def test_buffers_are_kept_in_place():
    module = nn.BatchNorm1d(3)
    buffer = module.running_mean
    with buffers_kept(module):
        module(torch.randn(5, 3))
        assert buffer.any()
    assert module.running_mean is buffer and not buffer.any()


def test_the_random_state_comes_back():
    import random

    import numpy

    def draw():
        return random.random(), numpy.random.rand(), torch.rand(2).tolist()

    state = RandomState.capture(torch.device("cpu"))
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first
