"""`max_grad_norm`: MarsTrainer leaves clipping to the step, with Trainer's own results."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Blocks, arguments, gpt2, mars_trainer, trainer
from test_stale_pass import use_fp16_on_cpu
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import Trainer, TrainerCallback, default_data_collator

import mars_hf


class Watch(TrainerCallback):
    """Record the optimizer's settings in each step, and optionally raise between two micro-batches."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.norms: list[Any] = []
        self.breaks_at = breaks_at

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == self.breaks_at:
            raise InterruptedError

    def on_step_end(self, args, state, control, optimizer=None, **_):
        self.norms.append(optimizer.optimizer.max_grad_norm)


class Unfreeze(TrainerCallback):
    """Train the second block from the third step on; torch's schedulers need a rate for each new group."""

    def __init__(self, told: bool) -> None:
        self.told = told  # whether the optimizer hears of it

    def on_step_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        thawed = [param.requires_grad_(state.global_step >= 2) for param in model.transformer.h[1].parameters()]
        if state.global_step == 2 and self.told:
            before = len(optimizer.param_groups)
            optimizer.add_param_group({"params": thawed})
            for group in optimizer.param_groups[before:]:
                lr_scheduler.base_lrs.append(group["lr"])
                lr_scheduler.lr_lambdas.append(lr_scheduler.lr_lambdas[0])


def compare_with_trainer(folder: Path, unfreeze: Any = None, checkpoint: Path | None = None, **settings: Any) -> Watch:
    """Compare norms and weights of Trainer and MarsTrainer; return what was set in the latter's optimizer."""
    logs, weights = [], []
    for make in (trainer, mars_trainer):
        model, watch = gpt2(), Watch()
        model.transformer.h[1].requires_grad_(unfreeze is None)
        mars = mars_hf.create([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)
        args = arguments(folder / make.__name__, **{"max_steps": 6, **settings})
        run = make(args, model, optimizers=(mars, None), callbacks=[*filter(None, [unfreeze]), watch])
        run.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        assert mars.max_grad_norm is None
        assert make is mars_trainer or watch.norms == [None] * len(watch.norms)
        logs.append([row["grad_norm"] for row in run.state.log_history if "grad_norm" in row])
        weights.append([param.detach() for param in model.parameters()])
    assert len(logs[0]) == 6
    assert logs[1] == pytest.approx(logs[0], rel=2e-6)
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
    return watch


@pytest.mark.parametrize(
    ("max_grad_norm", "unfreeze", "norms"),
    [
        (0.1, None, [0.1] * 6),
        (0.0, None, [None] * 6),
        (1e3, None, [1e3] * 6),
        (0.1, Unfreeze(told=True), [0.1] * 6),
        (0.1, Unfreeze(told=False), [0.1, 0.1, *[None] * 4]),
        (float("inf"), None, [None] * 6),
    ],
)
def test_parity_with_trainer(tmp_path, max_grad_norm, unfreeze, norms):
    """Also with layers that are unfrozen in mid-training, and are known to the optimizer or not."""
    micro_batches = 2 if unfreeze is None else 1
    watch = compare_with_trainer(
        tmp_path, unfreeze, max_grad_norm=max_grad_norm, gradient_accumulation_steps=micro_batches
    )
    assert watch.norms == norms


class EndClipping(TrainerCallback):
    """Clip in the first steps alone, as through a warmup."""

    def on_step_begin(self, args, state, control, **_):
        args.max_grad_norm = 0.05 if state.global_step < 3 else 0.0


def test_clipping_that_ends_in_training(tmp_path):
    watch = compare_with_trainer(tmp_path, EndClipping())
    assert watch.norms == [0.05] * 3 + [None] * 3


class ClipByValue(TrainerCallback):
    """Clip each element, and record the largest norm that it has seen."""

    seen = 0.0

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        grads = [param.grad for param in model.parameters()]
        self.seen = max(self.seen, torch.nn.utils.get_total_norm(grads).item())
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


class ClipAfter(ClipByValue):
    """Look at what the step has left, as PEFT's callbacks for AdaLoRA and the like do."""

    on_pre_optimizer_step, on_optimizer_step = TrainerCallback.on_pre_optimizer_step, ClipByValue.on_pre_optimizer_step


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which looks at gradients first."""

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)
    max_grad_norm = property(lambda self: self.optimizer.max_grad_norm)

    def __init__(self, optimizer: mars_hf.Mars, look: Any) -> None:
        self.optimizer, self.look = optimizer, look

        for name in ("zero_grad", "state_dict", "load_state_dict"):
            setattr(self, name, getattr(optimizer, name))

    def step(self, closure: Any = None) -> None:
        self.look()
        self.optimizer.step()


@pytest.mark.parametrize("how", ["callback", "after", "hook", "hook after", "global hook", "global after", "wrapper"])
def test_whoever_comes_before_the_step_sees_clipped_gradients(tmp_path, how):
    """As in Trainer, and after the step too; the weights are its, too."""
    weights, callbacks = [], []
    for make in (trainer, mars_trainer):
        model, clip, watch = gpt2(), ClipAfter() if how == "after" else ClipByValue(), Watch()
        optimizer = mars = mars_hf.create(model, lr=1e-2, eps=1e-6)

        def look(*_: Any, clip: Any = clip, model: Any = model) -> None:
            ClipByValue.on_pre_optimizer_step(clip, None, None, None, model=model)

        with contextlib.ExitStack() as hooks:
            register = {
                "hook": mars.register_step_pre_hook,
                "hook after": mars.register_step_post_hook,
                "global hook": register_optimizer_step_pre_hook,
                "global after": register_optimizer_step_post_hook,
            }
            if how in register:
                hooks.callback(register[how](look).remove)
            if how == "wrapper":
                optimizer = Wrapper(mars, look)
            args = arguments(tmp_path / make.__name__, max_grad_norm=0.1)
            others = [clip] if how in ("callback", "after") else []
            make(args, model, optimizers=(optimizer, None), callbacks=[watch, *others]).train()
        weights.append([param.detach() for param in model.parameters()])
        callbacks.append(clip)
        assert watch.norms == [None] * 4
    assert [clip.seen for clip in callbacks] == pytest.approx([0.1, 0.1], rel=1e-4)
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


class Norms(Trainer):
    """Keep the norm of each step, when Trainer has it."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.norms = [*getattr(self, "norms", []), float(grad_norm)]
        return super()._get_grad_norm(model, grad_norm=grad_norm)


def test_an_override_uses_the_norm(tmp_path):
    """It had the norm of the step before."""
    norms = []
    for kind in (Norms, mars_hf.with_mars(Norms)):
        model = gpt2()
        args, data = arguments(tmp_path, max_grad_norm=0.1), {"train_dataset": Blocks()}
        run = kind(model, args, default_data_collator, optimizers=(mars_hf.create(model, lr=1e-2), None), **data)
        run.train()
        norms.append(run.norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3) and len(norms[0]) == 4


@pytest.mark.parametrize("door", ["MarsTrainer", "factory", "instance", "without logs"])
def test_layers_unfrozen_in_training(tmp_path, door, caplog):
    """They never move: the run stops, or warns once where the optimizer is the user's own."""
    model = gpt2()
    model.transformer.h[1].requires_grad_(False)
    args = arguments(tmp_path, max_steps=6)
    settings = {"callbacks": [Unfreeze(told=False)]}
    if door == "factory":
        settings["optimizer_cls_and_kwargs"] = mars_hf.factory(args)
    if door == "instance":
        settings["optimizers"] = (mars_hf.create(model, lr=3e-3), None)
    if door == "without logs":
        args.logging_strategy = "no"
    run = (trainer if door == "factory" else mars_trainer)(args, model, **settings)
    step = 6 if door == "without logs" else 3
    message = (
        f"step {step}: the optimizer holds 16 of the model's 28 trainable parameters (missing: transformer.h.1.ln_1."
    )
    if door != "instance":
        with pytest.raises(RuntimeError, match=re.escape(message)):
            run.train()
        return
    with caplog.at_level("WARNING"):
        run.train()
    assert [record.message.startswith(message) for record in caplog.records if "unfrozen" in record.message] == [True]


@pytest.mark.parametrize("door", ["MarsTrainer", "factory"])
def test_layers_unfrozen_between_two_runs(tmp_path, door):
    """A Trainer keeps the optimizer of its first run; the error says how it makes another."""
    model = gpt2()
    block = model.transformer.h[1].requires_grad_(False)
    args = arguments(tmp_path, max_steps=1)
    run = mars_trainer(args, model)
    if door == "factory":
        run = trainer(args, model, optimizer_cls_and_kwargs=mars_hf.factory(args))
    run.train()
    block.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"holds 16 of .* another after trainer\.optimizer = None\. Freeze"):
        run.train()
    before = block.mlp.c_fc.weight.detach().clone()
    run.optimizer = None
    run.train()
    assert not torch.equal(block.mlp.c_fc.weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_resuming_with_another_norm(tmp_path, max_grad_norm):
    saves = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    model = gpt2()
    mars = mars_hf.create(list(model.parameters()), eps=1e-6, lr=3e-3)
    mars_trainer(arguments(tmp_path, **saves), model, optimizers=(mars, None)).train()
    compare_with_trainer(tmp_path, None, tmp_path / "checkpoint-3", **saves, max_grad_norm=max_grad_norm)


@pytest.mark.slow
@pytest.mark.parametrize("breaks_at", [None, 1])
@pytest.mark.parametrize("own", [None, 0.5])
def test_optimizer_is_given_back(tmp_path, own, breaks_at):
    """A second run clips as the first, and neither a custom loop nor a state dict has settings of the first one."""
    limit = 0.25 if own is None else own
    model, args = gpt2(), arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=limit)
    mars = mars_hf.create(model, max_grad_norm=own, lr=3e-3)
    run = mars_trainer(args, model, optimizers=(mars, None), callbacks=[Watch(breaks_at)])
    with contextlib.nullcontext() if breaks_at is None else pytest.raises(InterruptedError):
        run.train()
    assert mars.max_grad_norm == own
    for norm in (None, 0.7):
        other = mars_hf.create(gpt2(), max_grad_norm=norm, lr=3e-3)
        other.load_state_dict(mars.state_dict())
        assert other.max_grad_norm == norm
    second = Watch()
    again = mars_trainer(args, model, optimizers=(mars, None), callbacks=[second])
    again.train()
    again.train()  # the same Trainer once more
    assert second.norms == [limit] * 8


def test_exact_optimizer_is_given_back(tmp_path):
    """Also by a run that is interrupted within a step, whose stale gradients the next one does not meet."""
    model, args = gpt2(), arguments(tmp_path, gradient_accumulation_steps=2)
    mars = mars_hf.create(model, is_approx=False, lr=3e-3)
    run = mars_trainer(args, model, optimizers=(mars, None), callbacks=[Watch(breaks_at=2)])
    with pytest.raises(InterruptedError):
        run.train()
    run.pop_callback(Watch)
    run.train()
    with pytest.raises(RuntimeError, match=r"mars_hf\.MarsTrainer"):
        trainer(args, model, optimizers=(mars, None)).train()


@pytest.mark.parametrize("norm", [0.05, 50.0])
@pytest.mark.parametrize("form", ["exact", "scaler"])
def test_norm_where_the_step_cannot_clip(tmp_path, form, norm, monkeypatch):
    """The optimizer may state it too."""
    weights = []
    for stated in (norm, None):
        torch.manual_seed(0)
        model = gpt2()
        for param in model.parameters():
            param.data.mul_(4)  # so that gradients are longer than 1
        settings = {"is_approx": form != "exact", "lr": 1e-2, "eps": 1e-6, "max_grad_norm": stated}
        mars = mars_hf.create(model, **{"lr": 3e-3, **settings})
        run = mars_trainer(arguments(tmp_path, max_grad_norm=norm), model, optimizers=(mars, None))
        if form == "scaler":
            use_fp16_on_cpu(run, 8.0, monkeypatch)
        run.train()
        assert max(row["grad_norm"] for row in run.state.log_history if "grad_norm" in row) > 1.5
        weights.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("form", ["exact", "scaler", "own"])
def test_gradients_are_clipped_before_a_step_that_cannot_clip(tmp_path, form, monkeypatch):
    """Exact MARS has two gradients to clip, and a scaler divides before the norm is taken; the step sees the result."""
    seen: list[tuple[float, Any]] = []
    step = mars_hf.Mars.step

    def noted(mars: Any, *args: Any, **kwargs: Any) -> Any:
        grads = [param.grad for group in mars.param_groups for param in group["params"]]
        seen.append((torch.nn.utils.get_total_norm(grads).item(), mars.max_grad_norm))
        return step(mars, *args, **kwargs)

    monkeypatch.setattr(mars_hf.Mars, "step", noted)
    model = gpt2()
    mars = mars_hf.create(model, is_approx=form != "exact", lr=1e-3)
    run = mars_trainer(arguments(tmp_path, max_grad_norm=0.1), model, optimizers=(mars, None))
    if form == "scaler":
        use_fp16_on_cpu(run, 8.0, monkeypatch)
    run.train()
    assert min(row["grad_norm"] for row in run.state.log_history if "grad_norm" in row) > 0.5
    clips_in_step = form == "own"
    assert [limit for _, limit in seen] == [0.1 if clips_in_step else None] * 4
    assert all((norm > 0.5) if clips_in_step else (norm == pytest.approx(0.1, rel=1e-4)) for norm, _ in seen)


def test_contradicting_norms(tmp_path):
    model = gpt2()
    mars = mars_hf.create(model, max_grad_norm=0.5, lr=3e-3)
    for norm in (0.25, 0.0, 1.0):
        with pytest.raises(ValueError, match=rf"max_grad_norm={norm} .* 0\.5 .* in TrainingArguments alone"):
            mars_trainer(arguments(tmp_path, max_grad_norm=norm), model, optimizers=(mars, None)).train()
