"""`max_grad_norm`: the step clips like clip_grad_norm_ before it, and MarsTrainer leaves clipping to the step."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from helpers import arguments, gpt2, mars_of, mars_trainer, needs_compiler, trainer
from torch import nn
from transformers import TrainerCallback

import mars_hf
from mars_hf import Mars

SHAPES = ((16, 12), (5,), (7, 3), (3, 2, 4))


def make_params(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        size = (0.01, 1.0, 30.0)[step % 3]  # below the global norm, near it, far above
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) * size


SETTINGS = {
    "adamw": {},
    "lion": {"mars_type": "mars-lion"},
    "1d": {"optimize_1d": True},
    "gradient": {"second_moment": "gradient"},
    "unclipped": {"clip_threshold": None},
    "recursive": {"clip_threshold": None, "second_moment": "gradient"},
    "maximize": {"maximize": True},
    "storm": {"gamma": 1.0},
}


@pytest.mark.parametrize("take_grad", [False, True])
@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("case", SETTINGS)
def test_it_is_clip_grad_norm_before_the_step(case, fused, foreach, take_grad):
    settings = {"lr": 0.01, "weight_decay": 0.1, "clip_threshold": 0.5, **SETTINGS[case]}
    folded, plain = make_params(), make_params()
    one = mars_of(folded, max_grad_norm=1.0, take_grad=take_grad, fused=fused, **settings)
    two = Mars(plain, fused=False, **settings)
    for step in range(7):
        set_gradients(folded, step)
        set_gradients(plain, step)
        norm = nn.utils.clip_grad_norm_(plain, 1.0)
        one.step()
        two.step()
        torch.testing.assert_close(one.grad_norm.double(), norm, rtol=1e-6, atol=0)
        for a, b in zip(folded, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_saved_state_goes_on(tmp_path):
    """The saved state includes the scale that moved gradients still need."""
    settings = {"lr": 0.01, "max_grad_norm": 1.0, "take_grad": True}
    params = make_params()
    optimizer = mars_of(params, **settings)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    assert optimizer.state[params[0]]["last_grad_scale"] < 1
    resumed = copy.deepcopy(params)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = mars_of(resumed, **settings)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for step in range(3, 6):
        for own, steps in ((params, optimizer), (resumed, other)):
            set_gradients(own, step)
            steps.step()
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_metrics_are_those_of_clipped_gradients():
    folded, plain = make_params(), make_params()
    one, two = Mars(folded, max_grad_norm=1.0), Mars(plain)
    for optimizer in (one, two):
        optimizer.collect_metrics(True)
    for step in range(4):
        set_gradients(folded, step)
        set_gradients(plain, step)
        nn.utils.clip_grad_norm_(plain, 1.0)
        one.step()
        two.step()
        assert one.pop_metrics() == pytest.approx(two.pop_metrics(), rel=1e-5, abs=1e-9)


def test_gradients_are_not_scaled_in_place():
    params = make_params()
    set_gradients(params, 2)
    before = [param.grad.clone() for param in params]
    Mars(params, max_grad_norm=1.0).step()
    assert all(torch.equal(param.grad, old) for param, old in zip(params, before, strict=True))


def test_groups_share_one_norm():
    params = make_params()
    with pytest.raises(ValueError, match="give one"):
        Mars([{"params": params[:2], "max_grad_norm": 1.0}, {"params": params[2:]}]).max_grad_norm  # noqa: B018
    optimizer = Mars(params)
    optimizer.max_grad_norm = 2.0
    assert {group["max_grad_norm"] for group in optimizer.param_groups} == {2.0}
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        optimizer.max_grad_norm = 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 1e3])
def test_mars_trainer_logs_and_clips_as_trainer(tmp_path, max_grad_norm):
    logs, weights = [], []
    for make in (trainer, mars_trainer):
        model = gpt2()
        settings = {"max_grad_norm": max_grad_norm, "max_steps": 6, "gradient_accumulation_steps": 2}
        run = make(arguments(tmp_path, **settings), model, optimizers=(mars_hf.create(model, lr=1e-2, eps=1e-6), None))
        run.train()
        logs.append([row["grad_norm"] for row in run.state.log_history if "grad_norm" in row])
        weights.append([param.detach() for param in model.parameters()])
    assert len(logs[0]) == 6
    assert logs[1] == pytest.approx(logs[0], rel=1e-6 if max_grad_norm != 0.1 else 2e-6)
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


class Watch(TrainerCallback):
    """Record the optimizer's settings in each step, and optionally raise."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.norms: list[set] = []
        self.takes: list[bool] = []
        self.breaks_at = breaks_at

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.norms.append({group["max_grad_norm"] for group in optimizer.optimizer.param_groups})
        self.takes.append(optimizer.optimizer.take_grad)
        if state.global_step == self.breaks_at:
            raise InterruptedError


def test_mars_trainer_folds(tmp_path):
    model = gpt2()
    mars = mars_hf.create(model)
    watch = Watch()
    mars_trainer(arguments(tmp_path), model, optimizers=(mars, None), callbacks=[watch]).train()
    assert watch.norms == [{1.0}] * 4
    assert watch.takes == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("breaks_at", [None, 1])
@pytest.mark.parametrize("own", [None, 0.5])
def test_mars_trainer_gives_the_optimizer_back_as_it_was(tmp_path, own, breaks_at):
    """A second run clips at its own norm, and a custom loop keeps its gradients."""
    model = gpt2()
    mars = mars_hf.create(model, max_grad_norm=own)
    run = mars_trainer(arguments(tmp_path), model, optimizers=(mars, None), callbacks=[Watch(breaks_at)])
    with contextlib.nullcontext() if breaks_at is None else pytest.raises(InterruptedError):
        run.train()
    assert mars.max_grad_norm == own
    assert not mars.take_grad
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    mars.step()
    assert all(param.grad is not None for param in model.parameters())
    second = Watch()
    norm = 0.25 if own is None else own
    again = mars_trainer(arguments(tmp_path, max_grad_norm=norm), model, optimizers=(mars, None), callbacks=[second])
    again.train()
    again.train()  # the same Trainer once more
    assert second.norms == [{norm}] * 8 and second.takes == [True] * 8


def test_an_exact_optimizer_is_given_back_as_it_was(tmp_path):
    model = gpt2()
    mars = mars_hf.create(model, is_approx=False)
    mars_trainer(arguments(tmp_path), model, optimizers=(mars, None)).train()
    with pytest.raises(RuntimeError, match=r"mars_hf\.MarsTrainer"):
        trainer(arguments(tmp_path), model, optimizers=(mars, None)).train()


class Unfreeze(TrainerCallback):
    """Train the second block from the third step on; torch's schedulers need a rate for each new group."""

    def on_step_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        if state.global_step == 2:
            before = len(optimizer.param_groups)
            optimizer.add_param_group({"params": [p.requires_grad_() for p in model.transformer.h[1].parameters()]})
            for group in optimizer.param_groups[before:]:
                lr_scheduler.base_lrs.append(group["lr"])
                lr_scheduler.lr_lambdas.append(lr_scheduler.lr_lambdas[0])


@pytest.mark.slow
def test_layers_unfrozen_in_mid_training_are_clipped_with_the_others(tmp_path):
    weights, logs = [], []
    for make in (trainer, mars_trainer):
        model = gpt2()
        model.transformer.h[1].requires_grad_(False)
        frozen = {name: param.detach().clone() for name, param in model.transformer.h[1].named_parameters()}
        mars = mars_hf.create([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)
        watch = Watch()
        args = arguments(tmp_path, max_grad_norm=0.1, max_steps=6)
        run = make(args, model, optimizers=(mars, None), callbacks=[Unfreeze, watch])
        run.train()
        assert watch.norms == [{None if make is trainer else 0.1}] * 6
        assert watch.takes == [make is mars_trainer] * 6
        assert not any(torch.equal(param, frozen[name]) for name, param in model.transformer.h[1].named_parameters())
        assert {group["max_grad_norm"] for group in mars.param_groups} == {None}
        assert not mars.take_grad
        weights.append([param.detach() for param in model.parameters()])
        logs.append([row["grad_norm"] for row in run.state.log_history if "grad_norm" in row])
    assert logs[1] == pytest.approx(logs[0], rel=2e-6)
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


class UnfreezeUnknown(TrainerCallback):
    """Unfreeze parameters without telling the optimizer."""

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            model.transformer.wte.requires_grad_()


def test_parameters_unknown_to_the_optimizer_are_clipped_with_the_others(tmp_path):
    logs = []
    for make in (trainer, mars_trainer):
        model = gpt2()
        model.transformer.wte.requires_grad_(False)
        mars = mars_hf.create(model, eps=1e-6)
        watch = Watch()
        args = arguments(tmp_path, max_grad_norm=0.1)
        run = make(args, model, optimizers=(mars, None), callbacks=[UnfreezeUnknown, watch])
        run.train()
        if make is mars_trainer:
            assert watch.norms == [{0.1}, {0.1}, {None}, {None}]
        logs.append([row["grad_norm"] for row in run.state.log_history if "grad_norm" in row])
    assert logs[1] == pytest.approx(logs[0], rel=2e-6)


@pytest.mark.parametrize("own", [0.05, 50.0])
@pytest.mark.parametrize("form", ["exact", "scaler"])
def test_the_optimizers_own_norm_counts_where_the_step_cannot_clip(tmp_path, form, own, monkeypatch):
    """It overrides TrainingArguments' default, 1.0, which would also clip this model's gradients."""
    weights = []
    for by in ("optimizer", "arguments"):
        torch.manual_seed(0)
        model = gpt2()
        for param in model.parameters():
            param.data.mul_(4)  # so that gradients are longer than 1
        settings = {"is_approx": form != "exact", "lr": 1e-2, "eps": 1e-6}
        mars = mars_hf.create(model, **settings, **({"max_grad_norm": own} if by == "optimizer" else {}))
        args = arguments(tmp_path, **({"max_grad_norm": own} if by == "arguments" else {}))
        run = mars_trainer(args, model, optimizers=(mars, None))
        if form == "scaler":
            monkeypatch.setattr(run.accelerator.state, "_mixed_precision", "fp16")
            run.accelerator.native_amp = True
            run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        run.train()
        assert max(row["grad_norm"] for row in run.state.log_history if "grad_norm" in row) > 1.5
        assert run.args.max_grad_norm == (1.0 if by == "optimizer" else own)
        weights.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_contradicting_norms_are_refused(tmp_path):
    model = gpt2()
    mars = mars_hf.create(model, max_grad_norm=0.5)
    mars_trainer(arguments(tmp_path), model, optimizers=(mars, None)).train()
    with pytest.raises(ValueError, match=r"max_grad_norm=0\.25 .* 0\.5"):
        mars_trainer(arguments(tmp_path, max_grad_norm=0.25), model, optimizers=(mars, None)).train()


@pytest.mark.parametrize("saved_by", ["trainer", "user"])
def test_a_loaded_state_brings_no_settings_of_another_loop(tmp_path, saved_by):
    """Clipping and ownership of gradients follow this run, not the run that saved."""
    model = gpt2()
    mars = mars_hf.create(model, max_grad_norm=0.3 if saved_by == "user" else None)
    mars_trainer(arguments(tmp_path), model, optimizers=(mars, None)).train()
    plain = mars_hf.create(gpt2())
    plain.load_state_dict(mars.state_dict())
    assert plain.max_grad_norm is None
    assert not plain.take_grad
    own = mars_hf.create(gpt2(), max_grad_norm=0.5)
    own.load_state_dict(mars.state_dict())
    assert own.max_grad_norm == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_resuming_with_another_norm(tmp_path, max_grad_norm):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    model = gpt2()
    mars_trainer(arguments(tmp_path, **settings), model, optimizers=(mars_hf.create(model, eps=1e-6), None)).train()
    logs, weights = [], []
    for make in (trainer, mars_trainer):
        resumed = gpt2()
        args = arguments(tmp_path / make.__name__, **{**settings, "max_grad_norm": max_grad_norm})
        run = make(args, resumed, optimizers=(mars_hf.create(resumed, eps=1e-6), None))
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        logs.append([row["grad_norm"] for row in run.state.log_history if "grad_norm" in row])
        weights.append([param.detach() for param in resumed.parameters()])
    assert logs[1] == pytest.approx(logs[0], rel=2e-6)
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
