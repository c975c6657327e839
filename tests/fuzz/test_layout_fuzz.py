"""Steps are right for every memory order, size and dtype of parameters, gradients and states, in every backend.

A case draws settings, parameters and, at each step, gradients with strides of their own; between steps states and
parameters move to other memory. Every step is compared with the float64 formulas, and NaN around every element exposes
stray accesses. Cases are numbered: a failure prints its number, and `run_case` repeats it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from guarded import READABLE, WRITABLE, Guarded, place
from helpers import mars_of, needs_compiler
from straight_step import Mirror, expect
from torch import Tensor, nn

from mars_hf import Mars
from mars_hf import kernels as backend_choice

BACKENDS: dict[str, dict[str, Any]] = {
    "compiled": {"fused": True},
    "for-loop": {"fused": False},
    "auto": {},
}
EXACT = {"ns_dtype": "float64"}
RECURSIVE = {"clip_threshold": None, "second_moment": "gradient"}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "amsgrad": {"amsgrad": True},
    "second moment of the gradient": {"second_moment": "gradient"},
    "lion": {"mars_type": "mars-lion"},
    "shampoo": {"mars_type": "mars-shampoo", **EXACT},
    "mars-m": {"mars_type": "mars-m", **EXACT},
    "recursive adamw": RECURSIVE,
    "recursive lion": {"mars_type": "mars-lion", **RECURSIVE},
    "recursive mars-m": {"mars_type": "mars-m", **EXACT, **RECURSIVE},
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EDGES = (
    *((4095,), (4096,), (4097,), (8193,), (1, 4097), (4096, 1), (64, 64), (64, 65), (17, 241), (3, 37, 37)),
    *((3, 5, 7, 39), (1, 1, 1, 4097), (1025, 4)),
)
MILLION = ((1024, 1024), (1_000_003,), (1_048_577, 1), (1, 1_000_000), (3, 349_526), (101, 99, 10, 10), (1_000_000,))
TRITON = os.environ.get("TRITON_INTERPRET") == "1"


# --- cases ----------------------------------------------------------------------------------------------------------


def draw_shape(random: Random, sizes: str) -> tuple[int, ...]:
    """Return a shape of 0 to 70 elements ("small"), about 4,096 ("edges") or about a million ("million")."""
    if sizes != "small":
        return random.choice(EDGES if sizes == "edges" else MILLION)
    while True:
        dims = random.choice((0, 1, 1, 2, 2, 2, 3, 4))
        shape = tuple(random.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65, 70)) for _ in range(dims))
        elements = torch.Size(shape).numel()
        if elements <= 70 and (elements or random.random() < 0.3):
            return shape


def draw_settings(random: Random, rule: str) -> dict[str, Any]:
    """Return the settings of a rule, with random ones that suit any rule."""
    settings = {
        "lr": 0.02,
        "weight_decay": random.choice((0.0, 0.1)),
        "weight_decay_1d": random.choice((0.0, 0.2)),
        "betas": random.choice(((0.95, 0.99), (0.5, 0.9))),
        "gamma": random.choice((0.025, 0.025, 0.5, 0.0)),
        "clip_threshold": random.choice((1.0, 0.05, 100.0, None)),
        "max_grad_norm": random.choice((None, None, 0.5, 1000.0)),
        "take_grad": random.random() < 0.3,
        "maximize": random.random() < 0.2,
        "optimize_1d": random.random() < 0.3,
        "rounding": random.choice(("nearest", "nearest", "stochastic", "kahan")),
        "state_dtype": random.choice((None, None, None, *DTYPES)),
    }
    return {**settings, **RULES[rule]}


def generator(random: Random) -> torch.Generator:
    return torch.Generator().manual_seed(random.randrange(2**31))


def draw_values(random: Random, shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator(random), dtype=torch.float64) * size


def draw_gradient(random: Random, param: nn.Parameter, dtype: torch.dtype) -> Guarded:
    """Return a random gradient with any strides; float16 values are small enough for their squares."""
    size = random.choice((0.01, 0.3, 3.0))
    return place(draw_values(random, tuple(param.shape), size), dtype, random.choice(READABLE), random)


def move_state(random: Random, optimizer: Mars, param: nn.Parameter) -> list[Guarded]:
    """Move a parameter's state, or its values, to other memory with other strides."""
    state = optimizer.state.get(param, {})
    key = random.choice(
        ["", *(key for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad") if key in state)]
    )
    old = state[key] if key else param.detach()
    guarded = place(old.double(), old.dtype, random.choice(WRITABLE), random)
    if not key:
        param.data = guarded.tensor
    elif random.random() < 0.5:
        state[key] = guarded.tensor
    else:
        state[key].data = guarded.tensor
    return [guarded]


def load_elsewhere(random: Random, optimizer: Mars) -> None:
    """Load the current state, from tensors with any strides."""
    saved = optimizer.state_dict()
    states = {
        index: {
            key: place(value.double(), value.dtype, random.choice(READABLE[:-5]), random).tensor
            if value.ndim
            else value
            for key, value in state.items()
        }
        for index, state in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": states})


@contextlib.contextmanager
def named(case: str) -> Iterator[None]:
    """Report which case failed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


def run_case(backend: str, rule: str, sizes: str, seed: int) -> None:
    """Take a few steps with random parameters, settings, gradients and strides."""
    random = Random(f"{rule} {sizes} {seed}")  # the same for all backends
    settings = draw_settings(random, rule)
    made = []
    for _ in range(1 if sizes == "million" else random.randint(1, 4)):
        shape = draw_shape(random, sizes)
        while "mars_type" in settings and settings["mars_type"] != "mars-lion" and max(shape, default=0) > 10_000:
            shape = draw_shape(random, sizes)  # Newton-Schulz of a very long matrix
        dtype = random.choice(DTYPES)
        made.append(place(draw_values(random, shape), dtype, random.choice(WRITABLE), random))
    if random.random() < 0.5:  # most buckets then have several tensors
        made = [place(guarded.tensor.double(), made[0].tensor.dtype, guarded.layout, random) for guarded in made]
    params = [nn.Parameter(guarded.tensor) for guarded in made]
    gradient_dtypes = [param.dtype if random.random() < 0.8 else random.choice(DTYPES) for param in params]
    for param in params:
        param.grad_dtype = None  # any
    layouts = [guarded.layout for guarded in made]
    optimizer = mars_of(params, **settings, **({} if backend == "triton" else BACKENDS[backend]))
    guards = [(f"parameter {index}", guarded) for index, guarded in enumerate(made)]
    what = f"run_case({backend!r}, {rule!r}, {sizes!r}, {seed})"
    for step in range(random.randint(3, 5)):
        given: dict[int, Tensor] = {}
        for index, (param, dtype) in enumerate(zip(params, gradient_dtypes, strict=True)):
            param.grad = None
            if random.random() < 0.9:
                guarded = draw_gradient(random, param, dtype)
                param.grad = guarded.tensor
                given[index] = guarded.tensor.clone()
                guards.append((f"gradient {index} of step {step}", guarded))
                layouts.append(f"{index}: {guarded.layout}")
        mirror = Mirror.of(optimizer)
        expected = expect(mirror)
        with named(f"{what}, step {step} (layouts {', '.join(layouts)}; {settings})"):
            optimizer.step()
            expected.check(optimizer, bfloat16=1.0 if backend == "triton" else 0.5)
            for name, guarded in guards:
                guarded.check(name)
            for index, gradient in given.items():
                grad = params[index].grad
                assert grad is not None or settings["take_grad"], f"gradient {index} is gone"
                assert grad is None or torch.equal(grad, gradient), f"gradient {index} has changed"
        layouts = []
        if random.random() < 0.1:
            load_elsewhere(random, optimizer)
        for index, param in enumerate(params):
            if random.random() < 0.3:
                moved = move_state(random, optimizer, param)
                guards += [(f"state of {index} after step {step}", guarded) for guarded in moved]
                layouts += [f"moved {index}: {guarded.layout}" for guarded in moved]


# --- tests ----------------------------------------------------------------------------------------------------------

backends = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_compiler if name == "compiled" else ()) for name in BACKENDS]
)
rules = pytest.mark.parametrize("rule", RULES)
not_interpreted = pytest.mark.skipif(TRITON, reason="Triton interprets: kernels alone")


@not_interpreted
@backends
@rules
def test_small(backend, rule):
    for seed in range(8):
        run_case(backend, rule, "small", seed)


@pytest.mark.slow
@not_interpreted
@backends
@rules
def test_edges(backend, rule):
    for seed in range(2):
        run_case(backend, rule, "edges", seed)


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "rule"), [("auto", "adamw")])
def test_a_million(backend, rule):
    run_case(backend, rule, "million", 0)


@pytest.mark.soak
@not_interpreted
@backends
@rules
def test_long(backend, rule):
    for seed in range(100, 180):
        run_case(backend, rule, "small", seed)
    for seed in range(100, 116):
        run_case(backend, rule, "edges", seed)
    run_case(backend, rule, "million", 100)


@pytest.mark.skipif(not TRITON, reason="test_triton_interpreted runs it in a process of its own")
@rules
def test_triton(rule, monkeypatch):
    from mars_hf.kernels import gpu as triton

    monkeypatch.setattr(backend_choice, "kernels_of", lambda device: triton)
    monkeypatch.setattr(backend_choice, "COMPILED_FROM", 0)
    for seed in range(5):
        run_case("triton", rule, "small", seed)
    run_case("triton", rule, "edges", 0)


@pytest.mark.slow
def test_triton_interpreted():
    """This file and test_edit_fuzz.py pass in Triton's interpreter."""
    pytest.importorskip("triton", minversion="3.7", reason="older interpreters, 3.6 for one, fail with NumPy 2.4")
    files = [str(Path(__file__).with_name(name)) for name in ("test_layout_fuzz.py", "test_edit_fuzz.py")]
    options = ["-q", "-p", "no:cacheprovider", "-k", "test_triton", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-20_000:] + finished.stderr[-2000:]
    assert "passed" in finished.stdout and "skipped" not in finished.stdout, finished.stdout


def test_a_stray_write_is_seen():
    """The guard detects stray writes."""
    guarded = place(torch.ones(3, 4, dtype=torch.float64), torch.float32, "every other", Random(0))
    guarded.check("x")
    guarded.tensor.as_strided((12,), (1,), guarded.tensor.storage_offset())[1] = 1.0
    with pytest.raises(AssertionError, match=r"x \(every other\): \d bytes beside the tensor"):
        guarded.check("x")


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "last_grad", "x"])
@pytest.mark.parametrize("rule", ["adamw", "mars-m"])
def test_a_wrong_element_is_seen(name, rule):
    """The bounds are far below the change of any element in a step."""
    param = nn.Parameter(draw_values(Random(1), (8, 8)).float())
    optimizer = Mars([param], lr=0.02, fused=False, **RULES[rule])
    for step in range(3):
        param.grad = draw_values(Random(2 + step), (8, 8), 0.3).float()
        expected = expect(Mirror.of(optimizer))
        optimizer.step()
    expected.check(optimizer)
    changed = param.data if name == "x" else optimizer.state[param].get(name)
    if changed is None:
        assert (name, rule) == ("exp_avg_sq", "mars-m")
        return
    changed[3, 3] += 0.01 * (0.02 if name == "x" else changed[3, 3])
    with pytest.raises(AssertionError, match="1 of 64 elements are wrong; the worst, element 27"):
        expected.check(optimizer)
