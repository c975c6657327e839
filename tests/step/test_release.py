"""`release_gradients`: steps inside backward equal ordinary ones to the bit, and hold one gradient at a time."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from helpers import arguments, equal, gpt2, mars_trainer, newton_schulz_in, trainer
from torch import nn

import mars_hf


def make(rule: str = "mars-adamw", **settings: Any) -> tuple[Any, mars_hf.Mars]:
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    mars = mars_hf.create(model, mars_type=rule, lr=0.01, weight_decay=0.1, clip_threshold=0.05, **settings)
    return model, mars


def backward(model: Any, seed: int = 0) -> None:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "muon"])
def test_equals_ordinary_steps(rule):
    """With a schedule, metrics, a resume in the middle, a frozen parameter and a tied one."""
    runs: list[Any] = []
    for releases in (False, True):
        model, mars = make(rule, release_gradients=releases, **newton_schulz_in("float32", rule))
        schedule = torch.optim.lr_scheduler.LambdaLR(mars, lambda step: 1 / (1 + step))
        for step in range(4):
            if step == 2:
                state = copy.deepcopy(mars.state_dict())
                mars = mars_hf.create(model, mars_type=rule, release_gradients=releases, lr=3e-3)
                mars.load_state_dict(state)
                schedule = torch.optim.lr_scheduler.LambdaLR(mars, lambda step: 1 / (1 + step), last_epoch=1)
            mars.collect_metrics(step == 3)
            backward(model, step)
            assert releases == all(param.grad is None for param in model.parameters())
            mars.step()
            schedule.step()
            mars.zero_grad()
        runs.append((model.state_dict(), mars.state_dict(), mars.pop_metrics()))
    if rule in ("mars-adamw", "mars-lion"):
        assert equal(runs[0][:2], runs[1][:2])
    else:  # some processors multiply matrices in a batch in another order than alone
        torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-5)
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-4) and runs[0][2]["mars/update_rms"] > 0


def test_one_gradient_at_a_time():
    model, mars = make(release_gradients=True)
    most = []
    for param in filter(lambda param: param.requires_grad, model.parameters()):  # after the optimizer's hook
        param.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad is not None for p in model.parameters()))
        )
    for seed in range(2):
        backward(model, seed)
        mars.step()
    assert set(most) == {0} and len(most) == 2 * len(mars.state)
    assert mars.state[model.lm_head.weight]["last_grad"].untyped_storage().nbytes() == 4 * 64 * 8


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda model, _: backward(model), r"a second backward\(\) before step"),
        (lambda _, mars: setattr(mars, "max_grad_norm", 1.0), "max_grad_norm must be None"),
        (
            lambda _, mars: mars.param_groups[0].update(is_approx=False),
            "max_grad_norm must be None, and is_approx True",
        ),
    ],
)
def test_loops_that_need_whole_gradients(prepare, words):
    model, mars = make(release_gradients=True)
    prepare(model, mars)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=f"release_gradients=True: .*{words}"):
        backward(model)
    assert all(map(torch.equal, before, model.parameters()))


def test_gradients_written_by_hand():
    model, mars = make(release_gradients=True)
    model.lm_head.weight.grad = torch.ones(64, 8)
    with pytest.raises(RuntimeError, match=r"1 parameters have gradients that backward\(\) did not hand over"):
        mars.step()
    del mars  # and with it the hooks
    backward(model)
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


def test_exchanged_parameters():
    """By the model's new ones, as accelerate does under FSDP2: a step, then they have hooks. By others: an error."""
    model, mars = make(release_gradients=True)
    twin, ordinary = make()
    new = copy.deepcopy(twin)
    fresh = dict(zip(model.parameters(), new.parameters(), strict=True))
    for group in mars.param_groups:
        group["params"] = [fresh[param] for param in group["params"]]
    for step in range(3):
        for each, optimizer in ((new, mars), (twin, ordinary)):
            backward(each, step)
            assert any(param.grad is not None for param in each.parameters()) is (each is twin or step == 0)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(new.state_dict(), twin.state_dict())
    with pytest.raises(RuntimeError, match="an engine has exchanged the optimizer's parameters"):
        backward(model)


def test_groups_added_in_the_middle():
    """A parameter that is unfrozen between two steps steps inside backward, too."""
    runs = []
    for releases in (False, True):
        model, mars = make(release_gradients=releases)
        for step in range(3):
            if step == 1:
                table = model.transformer.wpe.weight.requires_grad_()
                mars.add_param_group({"params": [table]})
            backward(model, step)
            assert releases == all(param.grad is None for param in model.parameters())
            mars.step()
            mars.zero_grad()
        assert mars.state[table]["step"] == 2
        runs.append((model.state_dict(), mars.state_dict()))
    assert equal(*runs)


def test_parameters_on_several_devices_are_refused():
    """Their gradients may come at the same time, from a thread of backward for each device."""
    model = nn.ModuleDict({"here": nn.Linear(3, 3), "there": nn.Linear(3, 3, device="meta")})
    mars = mars_hf.create(model, release_gradients=True, lr=3e-3)
    with pytest.raises(RuntimeError, match="parameters on several devices"):
        model["here"](torch.ones(2, 3)).sum().backward()
    assert not mars.state


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_average_gradients_later_are_refused(world, monkeypatch):
    """DistributedDataParallel on two ranks; test_release_on_ranks.py starts them."""
    model = nn.Linear(3, 3)
    mars = mars_hf.create(model, release_gradients=True, lr=3e-3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: world)
    message = "DistributedDataParallel averages gradients later"
    with contextlib.nullcontext() if world == 1 else pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 3)).sum().backward()
    assert (len(mars.state) == 2) == (world == 1)


@pytest.mark.parametrize("own", [False, True], ids=["Trainer", "MarsTrainer"])
def test_release_gradients_in_trainers(own, tmp_path):
    ends = []
    for releases in (False, True):
        model, args = gpt2(), arguments(tmp_path, max_grad_norm=0.0, learning_rate=0.01)
        given: dict[str, Any] = {"mars_kwargs": {"release_gradients": releases}}
        if not own:
            given = {"optimizers": (mars_hf.create(model, lr=0.01, release_gradients=releases), None)}
        run = (mars_trainer if own else trainer)(args, model, **given)
        run.train()
        ends.append(model.state_dict())
        norms = [row["grad_norm"] for row in run.state.log_history if "grad_norm" in row]
        assert len(norms) == (0 if releases else 4)  # those of released gradients are unknown, and not 0
    assert equal(*ends)


def test_hooked_models_can_be_saved(tmp_path):
    model = torch.nn.Linear(3, 3)
    mars_hf.create(model, lr=1e-3, release_gradients=True)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded.weight, model.weight)
