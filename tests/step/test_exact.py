"""Exact MARS (`is_approx=False`) in the optimizer: hand-written loops, states and errors."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import equal
from reference import Reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mars_hf
from mars_hf import Mars

SHAPES = ((6, 5), (4, 4), (5,))
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "gamma": 0.3, "clip_threshold": 0.5}


def make_params(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def backward(params: list[torch.Tensor], step: int) -> None:
    """Compute gradients that depend on parameters and batch; batches never repeat."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        target = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        (param - target).pow(4).sum().mul(0.1).backward()


def behind(params, optimizer, steps: range) -> None:
    """Compute the stale gradient at the step itself, at the previous step's parameters."""
    for step in steps:
        if optimizer.has_previous_params:
            with optimizer.previous_params():
                backward(params, step)
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        optimizer.zero_grad()


def ahead(params, optimizer, steps: range) -> None:
    """Compute the next step's stale gradient before this step, as the official trainer does."""
    for step in steps:
        backward(params, step + 1)
        optimizer.update_previous_grad()
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.update_last_grad()


def straight_line(steps: int, mars_type: str, maximize: bool, clip: float | None) -> list[torch.Tensor]:
    x = [param.detach().clone() for param in make_params()]
    rules = [
        Reference(
            tensor,
            **(
                {**SETTINGS, "clip_threshold": clip}
                if tensor.ndim > 1
                else {"lr": 5e-3, "betas": (0.9, 0.95), "eps": 1e-6}
            ),
            rule=mars_type if tensor.ndim > 1 else "adamw",
        )
        for tensor in x
    ]

    def gradients(at: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in at]
        backward(leaves, step)
        return [-leaf.grad if maximize else leaf.grad for leaf in leaves]

    previous = None
    for step in range(steps):
        now = gradients(x, step)
        stale = [torch.zeros_like(tensor) for tensor in x] if previous is None else gradients(previous, step)
        previous = x
        x = [rule.step(g, s) for rule, g, s in zip(rules, now, stale, strict=True)]
    return x


@pytest.mark.parametrize(("maximize", "clip"), [(False, 0.5), (True, 0.5), (False, None)])
@pytest.mark.parametrize("foreach", [False, True], indirect=True)
@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
@pytest.mark.parametrize("loop", [behind, ahead])
def test_exact_steps(loop, mars_type, foreach, maximize, clip):
    params = make_params()
    settings = {**SETTINGS, "mars_type": mars_type, "lr_1d": 5e-3, "clip_threshold": clip, "maximize": maximize}
    optimizer = Mars(params, **settings, is_approx=False, fused=False)
    loop(params, optimizer, range(8))
    torch.testing.assert_close(
        [param.detach() for param in params], straight_line(8, mars_type, maximize, clip), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_previous_params(dtype):
    params = make_params(dtype=dtype)
    params[1].data = params[1].data.t()  # not contiguous
    before = [param.detach().clone() for param in params]
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    backward(params, 0)
    pointers = [param.data_ptr() for param in params]
    optimizer.step()
    after = [param.detach().clone() for param in params]
    with pytest.raises(KeyError), optimizer.previous_params():
        assert equal(params, before)
        raise KeyError
    assert equal(params, after)
    assert pointers == [param.data_ptr() for param in params]
    with optimizer.previous_params():
        assert equal(params, before)


def test_parameters_without_gradients():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    behind(params, optimizer, range(2))
    with optimizer.previous_params():
        backward(params, 2)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    optimizer.zero_grad()
    backward(params, 2)
    params[0].grad = None
    optimizer.step()
    still = params[0].detach().clone()
    with optimizer.previous_params():
        assert torch.equal(params[0], still)
        assert not torch.equal(params[1], still[:4, :4])
    assert "last_grad" not in optimizer.state[params[0]]  # that of another batch is not kept


def test_exact_buffers():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    behind(params, optimizer, range(3))
    kept = {"step", "exp_avg", "exp_avg_sq", "previous_param"}
    assert all(set(optimizer.state[param]) == kept for param in params)
    backward(params, 3)
    optimizer.update_previous_grad()
    optimizer.zero_grad()
    optimizer.update_previous_grad()  # those of another batch, which has none
    optimizer.update_last_grad()
    assert all(set(optimizer.state[param]) == kept for param in params)
    backward(params, 3)
    optimizer.update_previous_grad()
    params[0].grad.zero_()
    optimizer.update_last_grad()
    assert [set(optimizer.state[param]) - kept for param in params] == [{"last_grad"}, {"last_grad"}, set()]
    assert optimizer.state[params[0]]["last_grad"].any()  # a copy


def test_buffers_of_stale_gradients_taken_ahead():
    """That loop needs no previous parameters: copies would cost a third of the state."""
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    ahead(params, optimizer, range(3))
    kept = {"step", "exp_avg", "exp_avg_sq"}
    assert [set(optimizer.state[param]) - kept for param in params] == [{"last_grad"}, {"last_grad"}, set()]
    assert not optimizer.has_previous_params


@pytest.mark.parametrize("loop", [behind, ahead])
def test_state_dict_roundtrip(loop, tmp_path):
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    loop(params, optimizer, range(4))
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    loop(params, optimizer, range(4, 8))

    saved = torch.load(tmp_path / "state.pt", weights_only=False)
    resumed = saved["params"]
    other = Mars(resumed, **SETTINGS, is_approx=False)
    other.load_state_dict(saved["optimizer"])
    loop(resumed, other, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_step_without_stale_gradients():
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    backward(params, 0)
    optimizer.step()  # the first one has none
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=r"no stale gradient.*MarsTrainer.*update_previous_grad"):
        optimizer.step()
    assert equal(params, before)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no stale gradient"):  # each is good for one step
        optimizer.step()


def test_last_gradients_of_approximate_steps_are_no_stale_ones():
    params = make_params()
    optimizer = Mars(params, **SETTINGS)
    backward(params, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(2):  # refused as often as it is asked for
        for group in optimizer.param_groups:
            group["is_approx"] = False
        with pytest.raises(RuntimeError, match="no stale gradient"):
            optimizer.step()
    assert equal(before, optimizer.state_dict()["state"])
    for group in optimizer.param_groups:
        group["is_approx"] = True
    optimizer.step()


def test_no_previous_params():
    optimizer = Mars(make_params(), is_approx=False)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    assert not optimizer.has_previous_params and len(optimizer.state) == 0
    with pytest.raises(RuntimeError, match="no previous parameters"), optimizer.previous_params():
        pass


def test_one_exact_group():
    params = make_params()
    optimizer = mars_hf.create([{"params": [params[0]], "is_approx": False}, {"params": params[1:]}], **SETTINGS)
    behind(params, optimizer, range(3))
    assert "last_grad" not in optimizer.state[params[0]]
    assert "last_grad" in optimizer.state[params[1]]
    assert "previous_param" in optimizer.state[params[1]]  # the stale gradient of one depends on all


def test_stale_gradients_of_an_earlier_batch_go():
    """Also where this batch has none: nothing is corrected by a gradient of other data."""
    params = make_params()
    optimizer = Mars(params, **SETTINGS, is_approx=False)
    behind(params, optimizer, range(2))
    backward(params, 2)
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    assert all("last_grad" in optimizer.state[param] for param in params[:2])
    backward(params, 3)
    params[0].grad = None
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    assert "last_grad" not in optimizer.state[params[0]] and "last_grad" in optimizer.state[params[1]]


@pytest.mark.parametrize("reshards", [True, False])
def test_model_that_an_evaluation_has_gathered(alone, reshards):
    """FSDP2 leaves it so where `reshard_after_forward` is False; the exchange must reach what the next pass reads."""
    model = fully_shard(nn.Linear(6, 5), mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshards)
    optimizer, batch = mars_hf.create(model, **SETTINGS, is_approx=False), torch.randn(3, 6)

    @torch.no_grad()
    def evaluate() -> torch.Tensor:
        return model(batch)

    before = evaluate()
    model(batch).square().sum().backward()
    optimizer.step()
    after = evaluate()
    with optimizer.previous_params():
        assert torch.equal(evaluate(), before)
    assert torch.equal(evaluate(), after) and not torch.equal(after, before)
