"""The choice of a bucket's backend; all backends give the same result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers import backend_names, mars_of, needs_compiler
from torch import nn

from mars_hf import Mars
from mars_hf import kernels as backends
from mars_hf.kernels import cpu as compiled

CPU = torch.device("cpu")
ORTHOGONAL = ("mars-shampoo", "mars-m")


def names(optimizer: Mars) -> list[str]:
    """Return the names of the backends of a step's buckets, in order."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    return backend_names(optimizer)


def two(numel: int = 64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel // 8, 8)), nn.Parameter(torch.zeros(7))]


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["for-loop", "for-loop"]),
        ({"fused": True}, ["compiled", "compiled"]),
        ({"fused": False}, ["for-loop", "for-loop"]),
        # Without kernels: the plain rules take over, also with fused=True.
        ({"fused": True, "amsgrad": True}, ["for-loop", "for-loop"]),
        ({"fused": True, "state_dtype": "float16"}, ["for-loop", "for-loop"]),
    ],
    ids=str,
)
def test_small_parameters(settings, expected):
    assert names(Mars(two(), **settings)) == expected


@needs_compiler
def test_large_parameters_are_compiled(monkeypatch):
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    assert names(Mars(two())) == ["compiled", "compiled"]
    assert names(Mars(two(56))) == ["for-loop", "for-loop"]


def test_without_a_compiler_the_rules_run(monkeypatch):
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    monkeypatch.setattr(compiled, "_library", lambda: None)
    assert names(Mars(two())) == ["for-loop", "for-loop"]
    with pytest.raises(RuntimeError, match=r"fused=True.*C\+\+ compiler.*fused=None"):
        names(Mars(two(), fused=True))


@needs_compiler
@pytest.mark.parametrize(("rounding", "expected"), [("stochastic", "compiled"), ("kahan", "for-loop")])
def test_rounding(rounding, expected):
    params = [nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))]
    assert names(Mars(params, fused=True, rounding=rounding)) == [expected]


def test_gaps_in_memory_go_to_the_rules():
    param = nn.Parameter(torch.zeros(4, 6)[:, :3])
    assert names(Mars([param], fused=True)) == ["for-loop"]


@pytest.mark.parametrize("make", [lambda: torch.zeros(6, 4).t(), lambda: torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2)])
@needs_compiler
def test_dense_parameters_in_another_order_are_compiled(make):
    assert names(Mars([nn.Parameter(make())], fused=True)) == ["compiled"]


@needs_compiler
@pytest.mark.parametrize("mars_type", ORTHOGONAL)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "compiled"), ({"fused": True}, "compiled"), ({"fused": False}, "for-loop")],
    ids=str,
)
def test_matrices_that_are_orthogonalized_have_the_backends_of_others(monkeypatch, settings, expected, mars_type):
    monkeypatch.setattr(backends, "COMPILED_FROM", 64)
    assert names(Mars(two(), mars_type=mars_type, **settings))[0] == expected
    assert names(Mars(two(56), mars_type=mars_type))[0] == "for-loop"


@needs_compiler
def test_backends_on_gpus_leave_whole_lists_to_the_rules(monkeypatch):
    monkeypatch.setattr("mars_hf.kernels.gpu.is_available", lambda device: True)
    group = {"fused": None, "amsgrad": False, "rounding": "nearest"}
    backend = backends.choose_backend(group, torch.device("cuda"), [torch.float32], 1, dense=True)
    assert backend.name == "triton" and backend.foreach
    backend = backends.choose_backend(group, CPU, [torch.float32], backends.COMPILED_FROM, dense=True)
    assert backend.name == "compiled" and not backend.foreach


SHAPES = ((40, 30), (128, 128), (0, 3), (1, 1), (7, 1), (3, 1365), (64, 64), (17, 241), (5,), (4096,), ())


# Newton-Schulz takes the time of these tests.
SMALL_SHAPES = ((24, 18), (32, 32), (0, 3), (1, 1), (7, 1), (3, 165), (16, 16), (9, 41), (5,), (4096,), ())


def make(dtype: torch.dtype, transposed: bool, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    params = []
    for index, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(shape, generator=generator).to(dtype)
        params.append(nn.Parameter(values.t().contiguous().t() if transposed and values.ndim == 2 else values))
    return params


def train(params: list[nn.Parameter], **settings) -> list[torch.Tensor]:
    optimizer = mars_of(params, **{"lr": 0.01, "weight_decay": 0.1, "clip_threshold": 0.5, **settings})
    for step in range(6):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + index)
            param.grad = (torch.randn(param.shape, generator=generator) * (0.01, 1.0)[step % 2]).to(param.dtype)
        optimizer.step()
    return [param.detach().double() for param in params]


def assert_alike(results: dict[str, list[torch.Tensor]], bar: float) -> None:
    """Check that each tensor is within `bar` of its largest entry."""
    for name, found in results.items():
        for a, b in zip(found, results["for-loop"], strict=True):
            if a.numel():
                assert (a - b).abs().max() <= bar * b.abs().max(), (name, tuple(a.shape))


PATHS = {
    "default": {},
    "for-loop": {"fused": False},
    "fused": {"fused": True},
}


@needs_compiler
@pytest.mark.parametrize(("optimize_1d", "transposed"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"mars_type": "mars-lion"}, {"amsgrad": True}, {"second_moment": "gradient"}),
        *({"maximize": True, "gamma": 0.5}, {"state_dtype": "bfloat16"}, {"clip_threshold": None}),
    ],
    ids=str,
)
def test_all_paths_give_one_result(settings, dtype, optimize_1d, transposed):
    settings = {"optimize_1d": optimize_1d, **settings}
    results = {name: train(make(dtype, transposed), **path, **settings) for name, path in PATHS.items()}
    # One unit in the last place of a rounded parameter: float32 results differ in their last place.
    bar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    if settings.get("mars_type") == "mars-lion":
        bar = max(bar, 1e-6)
    if settings.get("state_dtype") == "bfloat16":
        bar = max(bar, 1e-5)  # a moment may round the other way
    assert_alike(results, bar)


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mars_type", ORTHOGONAL)
@pytest.mark.parametrize(
    ("dtype", "settings", "bar"),
    [
        *((torch.float32, {}, 1e-5), (torch.float32, {"clip_threshold": None, "gamma": 0.5}, 1e-5)),
        (torch.float32, {"max_grad_norm": 0.3, "take_grad": True}, 1e-5),
        (torch.float32, {"maximize": True}, 1e-5),
        (torch.float32, {"state_dtype": "bfloat16"}, 2**-6),  # a moment may round the other way
        *((torch.float64, {"ns_dtype": None}, 1e-12), (torch.bfloat16, {}, 2**-7)),
        (torch.bfloat16, {"rounding": "kahan"}, 2**-7),
    ],
    ids=str,
)
def test_all_paths_give_one_orthogonalized_step(dtype, settings, bar, mars_type, transposed):
    """Steps are as large as the parameters; Newton-Schulz runs in float32, where differences grow less."""
    settings = {"mars_type": mars_type, "lr": 1.0, "lr_1d": 0.01, "ns_dtype": "float32", **settings}
    results = {name: train(make(dtype, transposed, SMALL_SHAPES), **path, **settings) for name, path in PATHS.items()}
    assert_alike(results, bar)


@needs_compiler
@pytest.mark.parametrize("mars_type", ORTHOGONAL)
def test_backends_share_a_chunk_of_matrices(mars_type):
    """Return matrices of one shape, orthogonalized together: whole, with memory gaps, transposed, other dtypes."""

    def mixed() -> list[nn.Parameter]:
        values = [torch.randn(9, 6, generator=torch.Generator().manual_seed(index)) for index in range(4)]
        gaps = torch.zeros(9, 11)[:, :6].copy_(values[1])
        return [nn.Parameter(x) for x in (values[0], gaps, values[2].t().contiguous().t(), values[3].double())]

    settings = {"mars_type": mars_type, "lr": 1.0, "ns_dtype": "float32"}
    assert names(Mars(mixed(), fused=True, **settings)) == ["compiled", "for-loop", "compiled"]
    assert_alike({name: train(mixed(), **path, **settings) for name, path in PATHS.items()}, 1e-5)


@needs_compiler
def test_gradients_in_another_order_than_the_parameter():
    results = []
    for fused in (True, False):
        param = nn.Parameter(torch.arange(12.0).view(3, 4))
        optimizer = Mars([param], fused=fused)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            param.grad = torch.randn(4, 3, generator=generator).t()
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@needs_compiler
def test_learning_rate_as_a_tensor():
    results = []
    for lr in (0.02, torch.tensor(0.02)):
        for fused in (True, False):
            params = two()
            optimizer = Mars(params, lr=lr, lr_1d=0.01, fused=fused)
            for step in range(3):
                for param in params:
                    param.grad = torch.full_like(param, 1.0 + step)
                optimizer.step()
            results.append(torch.cat([param.detach().flatten() for param in params]))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-6, atol=1e-8)


@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"fused": False}, {"fused": True}], ids=str)
def test_a_compiled_training_step(settings):
    """torch.compile traces up to the optimizer's step and calls that eagerly."""
    results = []
    for compiling in (False, True):
        params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))]
        optimizer = Mars(params, lr=torch.tensor(0.02), lr_1d=0.01, **settings)

        def train(x, params=params, optimizer=optimizer):
            optimizer.zero_grad()
            (x @ params[0] + params[1]).square().sum().backward()
            optimizer.step()

        function = torch.compile(train, backend="eager") if compiling else train
        for step in range(4):
            function(torch.randn(3, 6, generator=torch.Generator().manual_seed(step)))
        results.append([param.detach() for param in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fused": False},
        pytest.param({"fused": True}, marks=needs_compiler),
        pytest.param({"take_grad": True, "fused": True}, marks=needs_compiler),
    ],
    ids=str,
)
def test_autograd_notices_a_step(settings):
    param = nn.Parameter(torch.ones(40, 30))
    optimizer = mars_of([param], **settings)
    param.square().sum().backward()
    optimizer.step()
    loss = param.square().sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
