"""Both passes of an exact step see the same batch, and the first leaves only its gradient."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers import VOCAB, arguments, gpt2
from test_stale_pass import Rows
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, default_data_collator

import mars_hf

STEPS = 4
MICRO = 2  # micro-batches per step


def exact_run(folder, kind: type = mars_hf.MarsTrainer, model: Any = None, **settings: Any) -> Any:
    model = gpt2() if model is None else model
    own = {key: settings.pop(key) for key in ("callbacks", "train_dataset", "data_collator") if key in settings}
    args = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": MICRO, **settings}
    run = kind(
        model,
        arguments(folder, **args),
        optimizers=(mars_hf.create(model, is_approx=False, lr=1e-2, eps=1e-6), None),
        **{"train_dataset": Rows(), "data_collator": default_data_collator, **own},
    )
    return run


def weights(run) -> list[torch.Tensor]:
    return [param.detach() for param in run.model.parameters()]


# --- state -----------------------------------------------------------------------------------------------------------


class Assigning(nn.Module):
    """Keep running statistics as many models do: by assignment, in the dict of buffers, in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.head = nn.Linear(4, VOCAB)
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("in_the_dict", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))
        self.number = 0
        self.tensor = torch.zeros(())

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids).flatten(0, 1)
        self.assigned = self.assigned + 1
        self._buffers["in_the_dict"] = self._buffers["in_the_dict"] + 1
        self.number += 1
        self.tensor = self.tensor + 1
        loss = nn.functional.cross_entropy(self.head(hidden - self.average), labels.flatten())
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return {"loss": loss}


def test_buffers_updated_by_assignment_count_every_batch_once(tmp_path):
    torch.manual_seed(0)
    model = Assigning()
    exact_run(tmp_path, model=model).train()
    counted = (model.assigned, model.in_the_dict, model.number, model.tensor)
    assert [int(count) for count in counted] == [STEPS * MICRO] * 4


def test_both_passes_start_from_the_same_statistics(tmp_path):
    """At the same parameters both gradients are equal, although the loss depends on the buffers."""
    pairs = []

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
            stale = optimizer.optimizer.state[model.head.weight].get("last_grad")
            if stale is not None:
                pairs.append((stale.clone(), model.head.weight.grad.clone()))

    torch.manual_seed(0)
    model = Assigning()
    run = exact_run(tmp_path, model=model, callbacks=[Compare()])
    for group in run._kept_optimizer.param_groups:
        group["lr"] = 0.0
    run.train()
    assert len(pairs) == STEPS - 1
    assert all(torch.equal(stale, now) for stale, now in pairs)


class Metered(mars_hf.MarsTrainer):
    """Count and log as trl's SFTTrainer does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0
        self.running_loss = torch.zeros(())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._metrics["train"]["entropy"].append(float(loss.detach()))
        self._total_train_tokens += inputs["input_ids"].numel()
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        self.running_loss += loss.detach()
        self.log({"inside": float(loss.detach())})
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs |= {"averaged": len(self._metrics["train"]["entropy"]), **self._metrics["train"]}
            self._metrics["train"].clear()
        super().log(logs, start_time)


def test_counters_and_metrics_of_a_trainer_count_every_batch_once(tmp_path):
    run = exact_run(tmp_path, Metered)
    run.train()
    rows = [row for row in run.state.log_history if "loss" in row]
    tokens = MICRO * 2 * 12  # of a step
    assert [row["num_tokens"] for row in rows] == [[tokens * (step + 1)] for step in range(STEPS)]
    assert [row["averaged"] for row in rows] == [MICRO] * STEPS
    inside = [row["inside"] for row in run.state.log_history if "inside" in row]
    assert len(inside) == STEPS * MICRO
    assert run.running_loss.item() == pytest.approx(sum(inside), rel=1e-5)


# --- inputs ----------------------------------------------------------------------------------------------------------


class Spoiling(mars_hf.MarsTrainer):
    """Consume the inputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        extra = inputs.pop("extra")
        inputs["input_ids"].add_(extra["shift"][0]).remainder_(VOCAB)
        extra["shift"].clear()
        loss = super().compute_loss(model, dict(inputs), return_outputs, num_items_in_batch)
        inputs["labels"].fill_(0)
        return loss


class Careful(mars_hf.MarsTrainer):
    """Compute the same loss without changing the inputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        shifted = (inputs["input_ids"] + inputs["extra"]["shift"][0]) % VOCAB
        inputs = {"input_ids": shifted, "labels": inputs["labels"]}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def with_nested_extras(rows):
    return default_data_collator(rows) | {"extra": {"shift": [torch.tensor(3)]}}


@pytest.mark.slow
def test_inputs_changed_in_place_are_as_collated_in_the_second_pass(tmp_path):
    runs = [exact_run(tmp_path, kind, data_collator=with_nested_extras) for kind in (Spoiling, Careful)]
    for run in runs:
        run.train()
    assert all(torch.equal(a, b) for a, b in zip(*map(weights, runs), strict=True))


class Generating(mars_hf.MarsTrainer):
    """Generate inputs in the step with the model and reuse them for some steps, as trl's GRPOTrainer does."""

    generate_every = 2 * MICRO

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step = 0
        self._buffered: list[Any] | None = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step += 1
        return loss

    def _prepare_inputs(self, inputs):
        if self._step % self.generate_every == 0 or self._buffered is None:
            with torch.no_grad():
                drawn = torch.rand(len(self._buffered or [0]) + 1)  # whatever random numbers it takes
                logits = self.model(input_ids=inputs["input_ids"]).logits
            scores = logits[..., : VOCAB // 2] + drawn.sum()
            ids = (scores * 1e6).long().sum(-1) % VOCAB
            self._buffered = [{"input_ids": ids, "labels": ids}] * self.generate_every
        return self._buffered[self._step % self.generate_every]


def test_a_trainer_that_generates_in_the_step_is_stopped(tmp_path):
    """The second generation raises; until then both passes see the buffered inputs."""
    run = exact_run(tmp_path, Generating)
    message = r"Generating computes the two losses of a step from different inputs \(inputs\['input_ids'\] differs\)"
    with pytest.raises(RuntimeError, match=message + r".*is_approx=True"):
        run.train()
    assert run.state.global_step == 2
    assert run._step == 2 * MICRO  # the stale pass is not counted


class Sampling(mars_hf.MarsTrainer):
    """Train on the model's own samples, which may differ between the two passes."""

    def _prepare_inputs(self, inputs):
        ids = self.accelerator.unwrap_model(self.model).generate(inputs["input_ids"][:, :4], max_new_tokens=4)
        return {"input_ids": ids, "labels": ids}


def test_a_trainer_that_samples_from_the_model_is_stopped(tmp_path):
    run = exact_run(tmp_path, Sampling)
    with pytest.raises(RuntimeError, match=r"Sampling generates text inside the step.*is_approx=True"):
        run.train()
    assert run.state.global_step == 1
    assert "generate" not in vars(run.model)


class Augmenting(mars_hf.MarsTrainer):
    """Draw inputs from the generators that the passes share: the same in both."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        noise = torch.rand(inputs["input_ids"].shape) < 0.2
        return inputs | {"input_ids": torch.where(noise, 0, inputs["input_ids"])}


def test_inputs_drawn_from_shared_generators_are_the_same(tmp_path):
    exact_run(tmp_path, Augmenting).train()


class Bypassing(mars_hf.MarsTrainer):
    """Compute losses outside compute_loss."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        with self._stale_pass.micro_batch():
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()


class Overriding(mars_hf.MarsTrainer):
    """Skip MarsTrainer's training_step, which sets the random state."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


class Moody(mars_hf.MarsTrainer):
    """Compute an extra loss in one of the passes."""

    moods = (True,)

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.in_stale_pass in self.moods and not getattr(self, "_again", False):
            self._again = True
            loss = (loss + self.compute_loss(model, inputs, *args, **kwargs)) / 2
            self._again = False
        return loss


class MoodyLater(Moody):
    moods = (False,)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Bypassing, "Bypassing has a training_step that does not call compute_loss"),
        (Overriding, "Overriding has a training_step of its own that does not call MarsTrainer's"),
        (Moody, "did not call compute_loss as often"),
        (MoodyLater, "calls compute_loss more often"),
    ],
)
def test_passes_that_cannot_be_compared_are_stopped(tmp_path, kind, message):
    run = exact_run(tmp_path, kind)
    with pytest.raises(RuntimeError, match=message):
        run.train()
    assert run.state.global_step == 1  # the first step has one pass


@pytest.mark.slow
def test_a_run_that_broke_off_leaves_nothing_to_the_next(tmp_path):
    class Break(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise InterruptedError

    run = exact_run(tmp_path, callbacks=[Break()])
    before = run.compute_loss
    with pytest.raises(InterruptedError):
        run.train()
    assert run.compute_loss == before and "compute_loss" not in vars(run)
    run.pop_callback(Break)
    run.train()


# --- matrices --------------------------------------------------------------------------------------------------------


class Switching(nn.Module):
    """Use one of two matrices, by the sign of a vector that every step moves across zero and back."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.switch = nn.Parameter(torch.full((1,), 0.004))

    def forward(self, x):
        way = int(self.switch.item() > 0)
        return {"loss": self.ways[way](x).square().mean() + (self.switch.sum() if way else -self.switch.sum())}


class Vectors(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index]}


def test_passes_may_share_no_matrix(tmp_path):
    """A matrix that the stale pass does not reach has a stale gradient of zero."""
    torch.manual_seed(0)
    model = Switching()
    before = [way.weight.detach().clone() for way in model.ways]
    taken = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            taken.append([way.weight.grad is not None for way in model.ways])

    settings = {"train_dataset": Vectors(), "remove_unused_columns": False, "max_steps": 12}
    exact_run(tmp_path, model=model, callbacks=[Watch()], **settings).train()
    ways = [way.index(True) for way in taken]
    assert len(taken) == 12 and ways != sorted(ways)[::-1]  # there and back again
    assert not any(torch.equal(way.weight, old) for way, old in zip(model.ways, before, strict=True))
