"""Exact MARS in MarsTrainer: the algorithm in straight lines, and a stale pass that leaves only its gradient."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import reference
import torch
from helpers import VOCAB, arguments, gpt2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import BatchEncoding, Trainer, TrainerCallback, TrainingArguments, default_data_collator

import mars_hf
from mars_hf.training import stale_pass

SETTINGS = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "gamma": 0.1, "clip_threshold": 0.3}
LR_1D = 1e-3
BATCH = 2


def rows() -> list[dict[str, torch.Tensor]]:
    """Return 22 rows with different numbers of labels: 11 micro-batches, not a multiple of 4.

    The first label is nobody's target; Trainer may count it.
    """
    ids = torch.randint(0, 64, (22, 12), generator=torch.Generator().manual_seed(7))
    place = torch.arange(12)
    return [{"input_ids": x, "labels": x.where(place > index % 7, -100)} for index, x in enumerate(ids)]


class Notes(TrainerCallback):
    """The random state of every forward pass and the parameters after every step."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, bool, torch.Tensor]] = []
        self.trajectory: list[dict[str, torch.Tensor]] = []

    def on_optimizer_step(self, args, state, control, model=None, **_):
        self.trajectory.append({name: param.detach().clone() for name, param in model.named_parameters()})


class Recording(mars_hf.MarsTrainer):
    """Take notes, of stale passes too, which change copies of lists among the attributes; some losses may overflow."""

    overflow: tuple[tuple[int, bool], ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes = Notes()
        self.add_callback(self.notes)

    def compute_loss(self, model, inputs, *args, **kwargs):
        now = (self.state.global_step, self.in_stale_pass)
        self.notes.passes.append((*now, torch.get_rng_state()))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * float("inf") if now in self.overflow else loss


def exact_run(
    folder: Path, model: nn.Module, *, kind: type = Recording, settings: Any = None, callbacks: Any = None, **args: Any
) -> Any:
    mars = mars_hf.create(model, **{**SETTINGS, "is_approx": False, **(settings or {})}, lr_1d=LR_1D)
    defaults = {"max_steps": 20, "per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential"}
    given = {"train_dataset": rows(), "data_collator": default_data_collator, "optimizers": (mars, None)}
    return kind(model, arguments(folder, **{**defaults, **args}), callbacks=callbacks, **given)


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
def test_straight_line_parity(tmp_path, accumulation, mars_type):
    """The run crosses epoch boundaries and incomplete accumulations, with dropout."""
    settings = {**SETTINGS, "lr": 2e-4} if mars_type == "mars-lion" else SETTINGS
    given = {"settings": {**settings, "mars_type": mars_type}, "gradient_accumulation_steps": accumulation}
    run = exact_run(tmp_path, gpt2(**dropout(0.1)), **given)
    run.train()
    steps = reference.batches(rows(), BATCH, accumulation, 7)[:20]
    assert {len(micro) for micro in steps} == ({1} if accumulation == 1 else {3, 4})
    states = defaultdict(list)  # before the ordinary micro-batches of each step
    for step, in_stale_pass, state in run.notes.passes:
        if not in_stale_pass:
            states[step].append(state)
    expected = reference.train(
        gpt2(**dropout(0.1)).train(),
        steps,
        settings=settings,
        mars_type=mars_type,
        lr_1d=LR_1D,
        random_states=list(states.values()),
    )
    assert apart(run.notes.trajectory, expected) <= 1e-5


class FirstGradients(TrainerCallback):
    """Record both gradients of every step, and draw random numbers between the passes, as other callbacks may."""

    def __init__(self) -> None:
        self.pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def on_step_begin(self, *args, **kwargs):
        random.random(), numpy.random.rand(), torch.rand(3)

    on_substep_end = on_step_begin

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        states = optimizer.optimizer.state
        params = [param for param in model.parameters() if "last_grad" in states[param]]
        self.pairs.append([(param.grad.clone(), states[param]["last_grad"].clone()) for param in params])


def still_run(folder: Path, model: nn.Module, *, kind: type = mars_hf.MarsTrainer, **settings: Any) -> Trainer:
    """Return a run that moves no weight, so that both gradients of a step are equal."""
    run = exact_run(folder, model, kind=kind, settings={"weight_decay": 0.0}, **settings)
    for group in run._given_optimizer.param_groups:
        group["lr"] = 0.0
    return run


# Renamed after transformers 5.19.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_gradients_at_equal_parameters_are_equal(tmp_path, max_grad_norm, checkpointing):
    """Both passes have the same dropout masks and the same gradient scaling."""
    noted = FirstGradients()
    settings = {"max_grad_norm": max_grad_norm, CHECKPOINTING: checkpointing, "gradient_accumulation_steps": 4}
    still_run(tmp_path, gpt2(**dropout(0.1)), max_steps=3, callbacks=[noted], **settings).train()
    assert [len(pairs) for pairs in noted.pairs] == [0, 10, 10]  # the first step has none
    assert all(torch.equal(grad, stale) for pairs in noted.pairs for grad, stale in pairs)
    assert not torch.equal(noted.pairs[1][0][0], noted.pairs[2][0][0])


def use_fp16_on_cpu(run: Trainer, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up what accelerate does with fp16=True on an accelerator; on CPUs it refuses."""
    monkeypatch.setattr(run.accelerator.state, "_mixed_precision", "fp16")  # shared by all Trainers of a process
    run.accelerator.native_amp = True
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)


class Noisy(nn.Module):
    """Draw numbers in the forward pass from one generator."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.draw = nn.Embedding(64, 4), nn.Linear(4, 64), draw

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids) * (1 + self.draw())
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


DRAWS = {"random": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(())}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_both_passes_draw_the_same_numbers(tmp_path, draw):
    noted = FirstGradients()
    still_run(tmp_path, Noisy(draw), max_steps=3, callbacks=[noted], gradient_accumulation_steps=2).train()
    assert [len(pairs) for pairs in noted.pairs] == [0, 2, 2]
    assert all(torch.equal(grad, stale) for pairs in noted.pairs for grad, stale in pairs)
    assert not torch.equal(noted.pairs[1][0][0], noted.pairs[2][0][0])


class Cuda:
    """The generators of two devices, as torch.cuda has them."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def draw(self) -> torch.Tensor:
        return sum(torch.rand((), generator=generator) for generator in self.generators)

    def get_rng_state(self, device=None):
        return self.generators[0].get_state()

    def set_rng_state(self, state, device=None):
        self.generators[0].set_state(state)

    def get_rng_state_all(self):
        return [generator.get_state() for generator in self.generators]

    def set_rng_state_all(self, states):
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


class Mps:
    """The generator of the one device, as torch.mps has it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def draw(self) -> torch.Tensor:
        return torch.rand((), generator=self.generator)

    def get_rng_state(self, device="mps"):
        return self.generator.get_state()

    def set_rng_state(self, state, device="mps"):
        self.generator.set_state(state)


@pytest.mark.parametrize("kind", [Cuda, Mps])
def test_both_passes_draw_the_same_numbers_on_all_devices(tmp_path, kind, monkeypatch):
    """DataParallel, and models with a device_map, draw on several; torch.mps has one and no function for all."""
    accelerator, capture = kind(), stale_pass._capture_random_state
    monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
    monkeypatch.setattr(stale_pass, "_capture_random_state", lambda _: capture(torch.device(kind.__name__.lower(), 0)))
    test_both_passes_draw_the_same_numbers(tmp_path, accelerator.draw)


def test_stale_gradients_under_a_scaler_are_unscaled(tmp_path, monkeypatch):
    """Without clipping, which would hide a factor of long ones."""
    noted = FirstGradients()
    run = still_run(tmp_path, gpt2(), max_steps=3, max_grad_norm=0.0, callbacks=[noted])
    use_fp16_on_cpu(run, 1024.0, monkeypatch)
    run.train()
    assert [len(pairs) for pairs in noted.pairs] == [0, 10, 10]
    for grad, stale in noted.pairs[1] + noted.pairs[2]:
        torch.testing.assert_close(stale, grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("overflow", [[True], [False], [True, False]], ids=["stale", "ordinary", "both"])
def test_a_step_that_overflows_is_skipped_once(tmp_path, overflow, monkeypatch):
    """Whichever pass overflows, the scaler halves its scale once, and the step leaves no trace."""
    run = exact_run(tmp_path, gpt2(), max_steps=4)
    run.overflow = tuple((2, in_stale_pass) for in_stale_pass in overflow)
    use_fp16_on_cpu(run, 1024.0, monkeypatch)
    run.train()
    weights = run.notes.trajectory
    same = [all(torch.equal(now[name], then[name]) for name in now) for then, now in itertools.pairwise(weights)]
    assert same == [False, True, False]
    assert run.accelerator.scaler.get_scale() == 512.0
    assert {state["step"].item() for state in run._given_optimizer.state.values()} == {3.0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parity(tmp_path, dtype, monkeypatch):
    """In fp16 a step whose stale or ordinary gradient overflows leaves no trace of its batch."""
    is_fp16 = dtype == torch.float16
    overflow = ((0, False), (4, True), (9, False)) if is_fp16 else ()
    run = exact_run(tmp_path, gpt2(), gradient_accumulation_steps=2, bf16=not is_fp16)
    run.overflow = overflow
    if is_fp16:
        use_fp16_on_cpu(run, 1024.0, monkeypatch)
    run.train()
    skipped = [step for step, _ in overflow]
    assert not is_fp16 or run.accelerator.scaler.get_scale() == 1024.0 / 2 ** len(overflow)
    expected = reference.train(
        gpt2().train(),
        reference.batches(rows(), BATCH, 2, 4)[:20],
        settings=SETTINGS,
        lr_1d=LR_1D,
        autocast=dtype,
        scales=[1024.0 / 2 ** sum(other < step for other in skipped) for step in range(20)] if is_fp16 else None,
        skipped=skipped.__contains__,
        found=run.notes.trajectory,
    )
    assert apart(run.notes.trajectory, expected) <= 1e-5


@pytest.mark.slow
def test_resume_within_an_epoch(tmp_path):
    """Resuming is bit-exact with dropout and an accumulation that does not divide the epoch."""
    settings = {"gradient_accumulation_steps": 4, "max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    whole = gpt2(**dropout(0.1))
    exact_run(tmp_path, whole, **settings).train()
    resumed = gpt2(seed=1, **dropout(0.1))
    again = exact_run(tmp_path, resumed, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert again.notes.passes[0][:2] == (5, True)  # the first step after resuming has a stale gradient


@pytest.mark.parametrize("way", ["optim", "factory"])
def test_optim_and_factory(tmp_path, way):
    """Exact in MarsTrainer; a plain Trainer refuses."""
    mars_hf.register()
    named = {"optim": "mars_adamw", "optim_args": "is_approx=false,gamma=0.1"} if way == "optim" else {}
    args = arguments(tmp_path, max_steps=3, **named)
    made = {"optimizer_cls_and_kwargs": mars_hf.factory(args, is_approx=False, gamma=0.1)} if way == "factory" else {}
    runs = [kind(gpt2(), args, train_dataset=rows(), **made) for kind in (Recording, Trainer)]
    runs[0].train()
    assert [stale for _, stale, _ in runs[0].notes.passes] == [False, True, False, True, False]
    with pytest.raises(RuntimeError, match=r"mars_hf\.MarsTrainer"):
        runs[1].train()
    assert runs[1].state.global_step == 0


class Averaging(nn.Module):
    """Keep statistics in buffers: in place (BatchNorm), by assignment, in the dict; the loss depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 64)
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("in_the_dict", torch.zeros(()))

    def forward(self, input_ids, labels):
        hidden = self.norm(self.embed(input_ids).flatten(0, 1)) + 0.1 * self.assigned
        self.assigned = self.assigned + 1
        self._buffers["in_the_dict"] = self.in_the_dict + 1
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels.flatten().clone())}


class Metered(mars_hf.MarsTrainer):
    """Count and log as trl's SFTTrainer does, and spoil the inputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list)}
        self._total_train_tokens = 0
        self.running_loss = torch.zeros(())

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["input_ids"].add_(inputs.pop("extra")["shift"].pop()).remainder_(64)
        loss = super().compute_loss(model, dict(inputs), *args, **kwargs)
        self._total_train_tokens += inputs["input_ids"].numel()
        self._metrics["train"]["num_tokens"].append(self._total_train_tokens)
        self.running_loss += loss.detach()
        self.log({"inside": float(loss.detach())})
        inputs["labels"].fill_(0)
        return loss


def test_stale_pass_leaves_only_its_gradient(tmp_path):
    """Not buffers, metrics, log lines, nor what the loss makes of its inputs; a refusal would follow from those."""
    torch.manual_seed(0)
    model, noted = Averaging(), FirstGradients()
    run = still_run(tmp_path, model, kind=Metered, max_steps=4, gradient_accumulation_steps=2, callbacks=[noted])
    metrics = run._metrics
    run.data_collator = lambda rows: default_data_collator(rows) | {"extra": {"shift": [torch.tensor(3)]}}
    run.train()
    assert model.norm.num_batches_tracked == model.assigned == model.in_the_dict == 8
    pairs = [pair for pairs in noted.pairs for pair in pairs]
    assert pairs and all(torch.equal(grad, stale) for grad, stale in pairs)
    inside = [row["inside"] for row in run.state.log_history if "inside" in row]
    assert len(inside) == 8 and run._metrics is metrics
    assert metrics["train"]["num_tokens"] == [24 * (1 + i) for i in range(8)]
    assert run.running_loss.item() == pytest.approx(sum(inside), rel=1e-5)


class Sampling(mars_hf.MarsTrainer):
    """Train on what the model makes of the inputs."""

    def _prepare_inputs(self, inputs):
        with torch.no_grad():
            ids = (self.model(input_ids=inputs["input_ids"]).logits.sum(-1) * 1e6).long() % 64
        return {"input_ids": ids, "labels": ids}


class Overriding(mars_hf.MarsTrainer):
    """Skip MarsTrainer's training_step, which sets the random state."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


class Extra(Trainer):
    """Compute one more loss in one of the passes."""

    in_pass = True

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.in_stale_pass == self.in_pass:
            self.compute_loss(model, inputs)
        return super().training_step(model, inputs, num_items_in_batch)


ExtraLater = type("ExtraLater", (Extra,), {"in_pass": False})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sampling, r"computes the two losses of a step from different inputs \(inputs\['input_ids'\] differs\)"),
        (Overriding, "has a training_step of its own that does not call MarsTrainer's"),
        (Extra, "calls compute_loss less often"),
        (ExtraLater, r"computes the two losses of a step from different inputs \(their number differs\)"),
    ],
)
def test_different_inputs_are_refused(tmp_path, kind, message):
    run = exact_run(tmp_path, gpt2(), kind=mars_hf.with_mars(kind))
    with pytest.raises(RuntimeError, match=f"{kind.__name__} {message}.*is_approx=True"):
        run.train()
    assert run.state.global_step == 1  # the first step has one pass
    assert "compute_loss" not in vars(run)


class Stumbling(mars_hf.MarsTrainer):
    """Fail once, in the ordinary pass of the third step, after its first micro-batch."""

    stumbles = True

    def compute_loss(self, *args, **kwargs):
        if self.stumbles and self.state.global_step == 2 and not self.in_stale_pass:
            if vars(self).setdefault("has_computed", False):
                self.stumbles = False
                raise KeyboardInterrupt
            self.has_computed = True
        return super().compute_loss(*args, **kwargs)


def test_an_interrupted_step_leaves_nothing_for_the_next_run(tmp_path):
    run = exact_run(tmp_path, gpt2(), kind=Stumbling, max_steps=4, gradient_accumulation_steps=3)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not run._stale_pass._pending  # one of three had its stale pass alone
    run.train()
    assert run.state.global_step == 4


class Synchronizing(mars_hf.MarsTrainer):
    """Note in which micro-batches ranks would reduce gradients; a stale pass leaves nothing in lists of its own."""

    seen: ClassVar[list[tuple[bool, bool]]] = []

    def compute_loss(self, *args, **kwargs):
        type(self).seen.append((self.in_stale_pass, self.accelerator.sync_gradients))
        return super().compute_loss(*args, **kwargs)


def test_stale_gradients_are_reduced_with_the_last_micro_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(Synchronizing, "seen", [])
    run = exact_run(tmp_path, gpt2(), kind=Synchronizing, max_steps=2, gradient_accumulation_steps=3)
    run.train()
    last = [False, False, True]
    assert Synchronizing.seen == [(False, is_last) for is_last in last] + [
        (stale, each) for stale in (True, False) for each in last
    ]


class Drawing(TrainerCallback):
    """Draw at each step's beginning, after the stale pass."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, ...]] = []

    def on_step_begin(self, *args, **kwargs):
        self.drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))


def test_what_draws_after_a_stale_pass_draws_as_without_it(tmp_path):
    def drawn(is_approx: bool) -> list[tuple[float, ...]]:
        torch.manual_seed(0)
        model = Noisy(lambda: random.random() + numpy.random.rand() + torch.rand(()))
        run = exact_run(tmp_path, model, kind=mars_hf.MarsTrainer, settings={"is_approx": is_approx}, max_steps=3)
        drawing = Drawing()
        run.add_callback(drawing)
        run.train()
        return drawing.drawn

    assert drawn(False)[:2] == drawn(True)[:2]


Pair = namedtuple("Pair", "left right")
CHANGES = [
    ("inputs['ids']", lambda batch: batch["ids"].add_(1)),
    ("inputs['ids']", lambda batch: batch.update(ids=batch["ids"].float())),
    ("inputs['ids']", lambda batch: batch.update(ids=None)),
    ("inputs['nan']", lambda batch: batch.pop("nan")),
    ("inputs['nan']", lambda batch: batch["nan"].fill_(0)),
    ("inputs['nan']", lambda batch: batch.update(nan=batch["nan"][:0])),
    ("inputs['nested'][2]", lambda batch: batch["nested"].append(torch.ones(1))),
    ("inputs['nested'][0]['x']", lambda batch: batch["nested"][0]["x"].add_(1)),
    ("inputs['pair'][0]", lambda batch: batch["pair"].left.add_(1)),
    ("inputs['encoding']['y']", lambda batch: batch["encoding"]["y"].add_(1)),
]


@pytest.mark.parametrize(("place", "change"), CHANGES)
def test_copied_batch_and_difference(place, change):
    batch = {
        "ids": torch.arange(4),
        "nested": [{"x": torch.zeros(2)}, (torch.zeros(1), "text")],
        "pair": Pair(torch.ones(1), numpy.zeros(1)),
        "encoding": BatchEncoding({"y": torch.zeros(2)}),
        "nan": torch.tensor([float("nan")]),
    }
    changed = stale_pass._copied(batch)
    assert stale_pass._difference(batch, changed) is None
    assert type(changed["pair"]) is Pair and type(changed["encoding"]) is BatchEncoding
    change(changed)
    changed["pair"].right.fill(1)
    assert stale_pass._difference(batch, changed) == place
    assert torch.equal(batch["ids"], torch.arange(4)) and not batch["pair"].right.any()


# --- tensor parallelism that divides some of a model's parameters -----------------------------------------------------


class Dense(nn.Module):
    """Predict each token's label from the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCAB)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def partly_parallel() -> Dense:
    """Return the model with an embedding and a head of DTensors, each on a mesh of its own."""
    model = Dense()
    one, other = (init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("tp", "tp_of_the_head"))
    parallelize_module(model.embed, one, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model.head, other, ColwiseParallel(output_layouts=Replicate()))
    # As transformers' models that a `tp_plan` divides, which Trainer leaves where they are.
    model.is_distributed_loading_by_transformers = True
    return model


def test_norm_of_gradients_on_several_meshes(alone, tmp_path):
    """The stale ones too are clipped as those of a model without DTensors; torch's own functions take one mesh only."""
    models = (Dense(), partly_parallel())
    for model in models:
        run = exact_run(tmp_path, model, kind=mars_hf.MarsTrainer, max_steps=4, max_grad_norm=0.3)
        run.train()
        assert min(row["grad_norm"] for row in run.state.log_history if "grad_norm" in row) > 0.3
    assert len({getattr(param, "device_mesh", None) for param in models[1].parameters()}) == 3
    for (name, plain), divided in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        found = divided.full_tensor() if isinstance(divided, DTensor) else divided
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5 * plain.abs().max().item(), msg=name)
