"""Gradients: where they may come from, which are refused, and steps without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import equal, fused_and_plain, on_a_gpu
from torch import nn

from mars_hf import Mars

SHAPES = ((6, 5), (4, 4), (5,))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient(param: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + param.numel())
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def fresh(param, step):
    param.grad = gradient(param, step)


def set_to_none_in_turn(param, step):
    if step % 2 or param.grad is None:
        fresh(param, step)
    else:
        param.grad.zero_().add_(gradient(param, step))


def view_of_a_buffer(param, step):
    if not hasattr(param, "buffer"):
        param.buffer = torch.zeros(param.numel() + 3)  # like DDP's buckets, reused at every step
    param.buffer[1 : param.numel() + 1] = gradient(param, step).flatten()
    param.grad = param.buffer[1 : param.numel() + 1].view_as(param)


def view_of_all_of_a_buffer(param, step):
    if not hasattr(param, "buffer"):
        param.buffer = torch.zeros(param.numel())
    param.buffer.copy_(gradient(param, step).flatten())
    param.grad = param.buffer.view_as(param)


def detached_view(param, step):
    view_of_a_buffer(param, step)
    param.grad = param.grad.detach()  # a view that autograd does not mark as one


def with_a_graph(param, step):
    param.grad = gradient(param, step) * (param * 0 + 1)


def negated(param, step):
    param.grad = torch._neg_view(-gradient(param, step))


LOOPS = [fresh, set_to_none_in_turn, view_of_a_buffer, view_of_all_of_a_buffer, detached_view, with_a_graph, negated]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("loop", LOOPS)
@fused_and_plain
def test_sources_of_gradients(loop, max_grad_norm, fused):
    """However a loop makes its gradients, steps are those on fresh tensors, and no state has a graph."""
    runs = []
    for make in (loop, fresh):
        params = parameters()
        optimizer = Mars(params, lr=0.01, gamma=0.5, max_grad_norm=max_grad_norm, fused=fused)
        for step in range(5):
            for param in params:
                make(param, step)
            optimizer.step()
        assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())
        runs.append(params)
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strides", ["dense", "with gaps"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_negated_stale_gradients(dtype, strides):
    """PyTorch's copy of a dense one to another dtype loses its sign."""
    ends = []
    for negated in (False, True):
        param = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        param.grad = gradient(param, 0)
        if negated and strides == "dense":
            param.grad = torch._neg_view(-param.grad)
        elif negated:
            parts = torch.stack([torch.zeros_like(param.grad), -param.grad], -1)
            param.grad = torch.view_as_complex(parts).conj().imag
        assert param.grad.is_neg() == negated
        mars = Mars([param], is_approx=False, fused=False)
        mars.update_previous_grad()
        mars.update_last_grad()
        stale = mars.state[param]["last_grad"].clone()
        mars.step()
        ends.append([param.detach(), stale, mars.state[param]["exp_avg"]])
    assert equal(*ends)
    assert torch.equal(ends[0][1], gradient(param, 0).float())


RULES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.5}, {"clip_threshold": None}], ids=str)
@pytest.mark.parametrize("mars_type", RULES)
@fused_and_plain
def test_maximize_is_a_step_on_negated_gradients(mars_type, settings, fused):
    """To the bit, in parameters and states."""
    runs = []
    for maximize in (False, True):
        params = parameters()
        mars = Mars(params, mars_type=mars_type, maximize=maximize, weight_decay=0.1, fused=fused, **settings)
        for step in range(3):
            for param in params:
                param.grad = gradient(param, step) * (1 if maximize else -1)
            mars.step()
        runs.append([params, [dict(mars.state[param]) for param in params]])
    assert equal(*runs)


@fused_and_plain
def test_grad_norm_is_that_of_torch(fused):
    """Of all gradients together, before scaling, in one tensor for the optimizer's whole life; NaN before any."""
    params = parameters()
    mars = Mars(params, max_grad_norm=0.5, fused=fused)
    norm = mars.grad_norm
    assert norm.isnan() and norm.shape == ()
    for step in range(3):
        for param in params[step % 2 :]:  # some have none
            fresh(param, step)
        grads = [param.grad for param in params if param.grad is not None]
        expected = nn.utils.get_total_norm([grad.double() for grad in grads]).item()
        mars.step()
        assert mars.grad_norm is norm and norm.item() == pytest.approx(expected, rel=1e-6)
        mars.zero_grad()
    mars.max_grad_norm = None
    fresh(params[0], 9)
    mars.step()
    assert norm.item() == pytest.approx(expected, rel=1e-6)  # that of the last gradients that were clipped


# --- refused ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "sparse": (lambda p, m: setattr(p, "grad", torch.ones(6, 5).to_sparse()), "torch.sparse_coo.*sparse=False"),
    "expanded parameter": (lambda p, m: setattr(p, "data", torch.ones(6, 1).expand(6, 5)), "parameter.*expanded"),
    "expanded state": (lambda p, m: m.state[p].update(exp_avg=torch.zeros(6, 1).expand(6, 5)), "state.*expanded"),
    "state of another shape": (lambda p, m: m.state[p].update(exp_avg_sq=torch.zeros(5, 6)), r"\(6, 5\).*\(5, 6\)"),
    "negated state": (
        lambda p, m: m.state[p].update(exp_avg=torch.zeros(6, 5, dtype=torch.complex64).conj().imag),
        "state.*negated",
    ),
    "complex state": (lambda p, m: m.state[p].update(exp_avg=torch.zeros(6, 5, dtype=torch.complex64)), "complex64"),
    "state elsewhere": (lambda p, m: m.state[p].update(exp_avg=torch.zeros(6, 5, device="meta")), "exp_avg.*on meta"),
    "no tensor": (lambda p, m: m.state[p].update(exp_avg=1.0), "exp_avg of 1.0"),
    "bad step": (lambda p, m: m.state[p].update(step=torch.ones(2)), r"step=shape \(2,\)"),
    "no last gradient": (lambda p, m: m.state[p].pop("last_grad"), r"shape \(6, 5\).*no last gradient.*to_universal"),
    "parameter of another shape": (lambda p, m: setattr(p, "data", torch.ones(5, 6)), r"gradient of shape \(6, 5\)"),
    **{
        str(dtype): (
            lambda p, m, dtype=dtype: (setattr(p, "data", p.to(dtype)), setattr(p, "grad", torch.empty_like(p))),
            f"{dtype}.*MARS takes float16",
        )
        for dtype in (torch.float8_e4m3fn, torch.complex64)
    },
    "freed": (lambda p, m: p.untyped_storage().resize_(0), "has been freed"),
    "unknown rule": (lambda p, m: m.param_groups[0].update(mars_type="adamw"), "mars_type='adamw'.*accepted"),
    "name of create": (lambda p, m: m.param_groups[0].update(mars_type="muon"), "mars_type='muon'.*accepted"),
    "unknown role": (lambda p, m: m.param_groups[0].update(role="bias"), "role='bias'.*accepted"),
    "unknown rounding": (lambda p, m: m.param_groups[0].update(rounding="up"), "rounding='up'.*accepted"),
    "norms that differ": (lambda p, m: m.param_groups[0].update(max_grad_norm=2.0), "max_grad_norm"),
}


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=on_a_gpu)])
def test_state_on_another_device_than_its_parameter(where):
    """A state dict that somebody has put there by hand; `meta` above has no addresses, which would show by itself."""
    param = nn.Parameter(torch.ones(6, 5, device=where))
    mars = Mars([param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        mars.step()
    mars.state[param]["exp_avg"] = mars.state[param]["exp_avg"].cpu()
    with pytest.raises(RuntimeError, match=r"on cuda.* has exp_avg of .* on cpu"):
        mars.step()


@pytest.mark.parametrize("case", REFUSED)
@fused_and_plain
def test_refused_steps_change_nothing(case, fused):
    change, message = REFUSED[case]
    params = parameters()
    mars = Mars(params, fused=fused)
    for step in range(2):
        for param in params:
            fresh(param, step)
        mars.step()
    change(params[0], mars)
    before = copy.deepcopy([(param, mars.state[param]) for param in params[1:]])
    with pytest.raises((RuntimeError, ValueError), match=message):
        mars.step()
    assert equal(before, [(param, mars.state[param]) for param in params[1:]])


def test_flat_tensors_of_unknown_origin_are_refused():
    optimizer = Mars([nn.Parameter(torch.ones(3, 2))])
    flat = nn.Parameter(torch.ones(6))
    flat.grad = torch.ones(6)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match="unknown flat tensor of shape"):
        optimizer.step()


# --- missing ----------------------------------------------------------------------------------------------------------

FORMS = [
    {},
    {"max_grad_norm": 1.0},
    {"clip_threshold": None, "weight_decay": 0.1},
    {"mars_type": "mars-lion"},
    {"mars_type": "mars-shampoo"},
    {"mars_type": "mars-m"},
    {"is_approx": False, "max_grad_norm": 1.0},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@fused_and_plain
def test_step_without_gradients(form, fused):
    """It is a no-op that makes no state and leaves later steps as they were; so are empty groups and frozen tensors."""
    runs = []
    for idle in (False, True):
        params, frozen = parameters(), nn.Parameter(torch.ones(3, 4), requires_grad=False)
        groups = [{"params": []}, {"params": [*params, frozen]}] if idle else [{"params": params}]
        optimizer = Mars(groups, **form, fused=fused)
        for step in range(3):
            if idle:
                optimizer.collect_metrics(True)
                before = copy.deepcopy((params, optimizer.state_dict()))
                assert optimizer.step(lambda: 7.0) == 7.0
                assert optimizer.pop_metrics() == {}
                assert equal(before, (params, optimizer.state_dict()))
                optimizer.collect_metrics(False)
            for param in params:
                fresh(param, step)
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            optimizer.step()
            optimizer.zero_grad()
        assert set(optimizer.state) == set(params)
        assert torch.equal(frozen, torch.ones(3, 4))
        runs.append((params, [dict(optimizer.state[param]) for param in params]))
    assert equal(*runs)


def test_nothing_but_an_empty_group():
    optimizer = Mars([{"params": []}], max_grad_norm=1.0)
    assert optimizer.step() is None
    assert torch.isnan(optimizer.grad_norm)


def test_cuda_graph_capture_is_refused(monkeypatch):
    """Its replays would repeat the step's count; test_gpu.py captures one on a GPU."""
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = Mars([param])
    param.grad = torch.ones_like(param)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match=r"Capture forward and backward, and call step\(\) after each replay"):
        optimizer.step()
    assert not optimizer.state and torch.equal(param, torch.ones_like(param))
