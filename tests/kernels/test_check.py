"""Kernels check themselves at first use, and `python -m mars_hf check` on request."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from contract import BACKENDS, every_kernel
from helpers import backend_names, newton_schulz_in
from torch import nn

from mars_hf import Mars
from mars_hf import kernels as backends
from mars_hf.__main__ import main


@pytest.fixture
def kernels(backend, device, monkeypatch):
    """Return the kernels of the backend, which take tensors of any size and are not checked yet."""
    module = BACKENDS[backend]().kernels
    monkeypatch.setattr(backends, "kernels_of", lambda device: module)
    monkeypatch.setattr(backends, "COMPILED_FROM", 0)
    monkeypatch.setattr(backends, "_failures", {})
    monkeypatch.setattr(module, "FLOATS", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(backends, "compare_with_plain", functools.cache(backends.compare_with_plain.__wrapped__))
    return module


def set_gradients(optimizer):
    generator = torch.Generator().manual_seed(0)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def train(device, **settings):
    """Return an optimizer of a matrix and a vector after two steps."""
    optimizer = Mars([nn.Parameter(torch.ones(shape, device=device)) for shape in ((6, 5), (5,))], **settings)
    for _ in range(2):
        set_gradients(optimizer)
        optimizer.step()
    return optimizer


def fail(*args, **settings):
    raise ValueError("no such\n\ninstruction")


def damaged(name, function):
    """Return a function that damages what another one has written or returned."""

    def call(*args, **settings):
        result = function(*args, **settings)
        written = {"sums": result, "params": args[0], "exp_avg": args[2]["exp_avg"] if name == "exp_avg" else None}
        values = written[name][-1]
        values[(-1,) * values.ndim if name == "params" else ...] *= torch.nan if name == "params" else 1.00001
        return result

    return call


@every_kernel
@pytest.mark.parametrize("name", ["sums", "exp_avg", "params", "ValueError: no such instruction"])
def test_broken_kernels(backend, device, kernels, name, monkeypatch, caplog):
    """The run goes on in plain PyTorch, after one warning; `fused=True` is an error instead."""
    target, calls = "sums" if name == "sums" else "update", []
    broken = fail if name.startswith("ValueError") else damaged(name, getattr(kernels, target))
    monkeypatch.setattr(kernels, target, lambda *args, **settings: calls.append(args) or broken(*args, **settings))
    expected = train(device, fused=False)
    with pytest.raises(RuntimeError, match=rf"fused=True, and {backend} kernels fail on .*{name}.*; use fused=None"):
        train(device, fused=True)
    assert not caplog.records
    optimizer = train(device)
    assert len(calls) == 1, "checks run once, and no kernel of the device after one has failed"
    ours, plain = (
        [p for group in of.param_groups for p in group["params"]] + [s["exp_avg"] for s in of.state.values()]
        for of in (optimizer, expected)
    )
    assert all(map(torch.equal, ours, plain)) and not {"compiled", "triton"} & set(backend_names(optimizer))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"fail on {ours[0].device} for adamw in float32" in record.message and name in record.message


@every_kernel
def test_check_leaves_no_trace(backend, device, kernels, monkeypatch):
    """It runs in every mode, once for each kind of list, and draws no number of the user's generators."""
    states = torch.random.get_rng_state(), torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True)
        with torch.enable_grad(), torch.autocast(device, dtype=torch.bfloat16):
            optimizer = train(device)
        backends.compare_with_plain.cache_clear()
        with torch.inference_mode():
            optimizer.step()
    finally:
        torch.set_deterministic_debug_mode(states[1])
    assert torch.equal(torch.random.get_rng_state(), states[0])
    set_gradients(optimizer)
    assert set(backend_names(optimizer)) == {backend} and not backends._failures
    assert backends.compare_with_plain.cache_info().misses == 2


@every_kernel
@pytest.mark.parametrize(("mars_type", "rule"), [("mars-lion", "lion"), ("mars-m", "momentum")])
def test_what_is_checked(backend, device, kernels, mars_type, rule, monkeypatch):
    """The dtypes of a list's tensors; of mars-m the momenta that Newton-Schulz takes, not the parameters."""
    seen = []
    monkeypatch.setattr(backends, "compare_with_plain", lambda _, device, *args: seen.append(args) or "")
    train(device, mars_type=mars_type, state_dtype="bfloat16", **newton_schulz_in("bfloat16", mars_type))
    written = torch.bfloat16 if mars_type == "mars-m" else torch.float32
    dtypes = ("params", written), ("grads", torch.float32), ("exp_avg", torch.bfloat16), ("last_grad", torch.bfloat16)
    assert seen[0] == (dtypes, rule, "corrected")


@every_kernel
def test_check_command(backend, device, kernels, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "FLOATS", (torch.float32,))
    monkeypatch.setattr(kernels, "ARITHMETICS", ("adamw",))
    row = 2 if device == "cpu" else 3  # after the versions, and behind the CPU's row
    for is_broken in (False, True):
        backends.compare_with_plain.cache_clear()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            if is_broken:
                patch.setattr(kernels, "update", fail)
            main(["check"])
        lines = capsys.readouterr().out.splitlines()
        assert (end.value.code, "differs" in lines[row]) == (int(is_broken), is_broken)
