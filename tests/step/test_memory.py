"""Memory: all live bytes between steps are weights, states and gradients; within a step, a few copies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers import needs_compiler
from interleave import trace_memory
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

import mars_hf
from mars_hf.arithmetic import newton_schulz
from mars_hf.arithmetic.directions import NewtonSchulz, compute_directions, newton_schulz_of
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.distributed.exchange import MatrixPlanner

SHAPES = ((40, 30), (30, 40), (50,), (6, 5, 4), (7,))
LARGE = ((1001, 1000), (9,))  # above a million elements the compiled backend is the default
pytestmark = needs_compiler


@pytest.fixture(autouse=True, scope="module")
def set_apart():
    """Ignore objects that exist before these tests, which also makes the search quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Return the bytes of all storages that some tensor refers to, each once."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


# Bytes that settings keep per element of matrices and vectors, weights included.
FORMS: list[tuple[dict[str, Any], int, int]] = [
    ({}, 16, 12),
    ({"max_grad_norm": 0.1, "fused": True}, 16, 12),
    ({"amsgrad": True, "maximize": True}, 20, 16),
    ({"second_moment": "gradient"}, 16, 12),  # the norm that is clipped needs the last gradient
    ({"clip_threshold": None}, 16, 12),
    ({"optimize_1d": True, "fused": False}, 16, 16),
    ({"second_moment": "gradient", "clip_threshold": None}, 12, 12),  # AdamW's
    ({"mars_type": "mars-lion"}, 12, 12),
    ({"mars_type": "mars-lion", "clip_threshold": None, "fused": True}, 8, 12),  # Lion's
    ({"mars_type": "mars-shampoo"}, 12, 12),
    ({"mars_type": "mars-m", "clip_threshold": None, "amsgrad": True}, 8, 16),  # Muon's
    ({"mars_type": "mars-m", "max_grad_norm": 0.1}, 12, 12),
    ({"is_approx": False}, 16, 16),
    ({"state_dtype": "bfloat16"}, 10, 8),
    ({"dtype": torch.bfloat16, "rounding": "kahan"}, 16, 12),
    ({"dtype": torch.bfloat16, "rounding": "stochastic", "fused": True}, 14, 10),
]


@pytest.mark.parametrize(("shapes", "measured"), [(SHAPES, False), (SHAPES, True), (LARGE, False)], ids=str)
@pytest.mark.parametrize(("settings", "matrix", "vector"), FORMS, ids=str)
def test_bytes_held(settings, matrix, vector, shapes, measured):
    """Between steps, after them, and when the optimizer is gone; zeroed gradients count as long as they are there."""
    few_steps = {"ns_steps": 1} if settings.get("mars_type") in ("mars-m", "mars-shampoo") else {}
    settings = {**settings, **few_steps}
    dtype, before = settings.pop("dtype", torch.float32), live_bytes()
    params = [nn.Parameter(torch.full(shape, 0.01, dtype=dtype)) for shape in shapes]
    optimizer = mars_hf.Mars(params, **settings)
    optimizer.collect_metrics(measured)
    kept = sum(param.numel() * (matrix if param.ndim > 1 else vector) for param in params)
    allowed = 64 * len(params) + 512  # step counts, scales, norms, and PyTorch's own caches
    for step in range(6 if shapes is SHAPES else 3):
        if optimizer.has_previous_params:
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
        for param in params:
            param.grad = torch.full_like(param, 1.0 + step)
        optimizer.step()
        gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
        assert kept <= live_bytes() - before - gradients <= kept + allowed
        optimizer.pop_metrics()
        optimizer.zero_grad(set_to_none=step % 2 == 0 or settings.get("is_approx") is False)
    optimizer.zero_grad()
    assert kept <= live_bytes() - before <= kept + allowed
    del optimizer
    assert live_bytes() - before == sum(param.nbytes for param in params)


def test_parameters_taken_from_groups_are_freed():
    """accelerate swaps parameters this way, so that the unsharded model can be freed; so does a resized embedding."""
    model = nn.Linear(50, 40)
    before = live_bytes()
    optimizer = mars_hf.create(model, lr=3e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    weights = sum(param.nbytes for param in model.parameters())
    del model, param
    assert live_bytes() <= before - weights + 512


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_grad_norm": 1.0}, *({"mars_type": "mars-m", "ns_dtype": dtype} for dtype in ("bfloat16", "float32"))],
    ids=str,
)
def test_peak_memory(settings, fused):
    """A step holds a few copies of one parameter; kernels none; Newton-Schulz what the class documents."""
    params = [nn.Parameter(torch.randn(320, 320)) for _ in range(10)]  # too many elements for whole lists
    optimizer = mars_hf.Mars(params, **settings, fused=fused)
    for _ in range(3):  # the last one is measured
        for param in params:
            param.grad = torch.ones_like(param)
        _, peak = trace_memory(optimizer.step, torch.device("cpu"))
    one = params[0].numel() * 4
    of_matrices = {"bfloat16": 13 * 10 * params[0].numel(), "float32": 17 * 10 * params[0].numel()}
    assert 0 < peak <= of_matrices.get(settings.get("ns_dtype"), one // 2 if fused else 8 * one)


# --- Newton-Schulz on a GPU, by the tensors that it makes on the device "meta" ----------------------------------------


class LivePeak(TorchDispatchMode):
    """Count the most bytes that tensors held at once, of those that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._made = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        alive = [tensor for tensor in (made() for made in self._made) if tensor is not None]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in alive}
        self.peak = max(self.peak, sum(storages.values()))
        return returned


def peak_of_directions(shapes, settings, monkeypatch) -> int:
    """Return the peak of `compute_directions` on a GPU, first moments included."""
    monkeypatch.setattr(newton_schulz, "HALF_DEVICES", ("meta",))
    with LivePeak() as mode:
        pairs = zip(shapes, settings, strict=True)
        momenta = [torch.empty(shape, dtype=each.dtype, device="meta") for shape, each in pairs]
        compute_directions(momenta, settings, torch.float32)
    return mode.peak


@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (3072, 768), (512, 1024), (4096, 11008)], ids=str)
@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 8), (torch.float32, 16)], ids=str)
def test_bytes_of_directions(shape, dtype, each, monkeypatch):
    """For each element first moment, X, A, B and the next X; or in place of the last three the direction in float32."""
    coefficients = (newton_schulz.QUINTIC,) * 5
    setting = NewtonSchulz(newton_schulz.muon_scale, MatrixLayout(), coefficients, 1e-7, dtype)
    for count in (1, 7):
        room = count * (each * shape[0] * shape[1] + 4096)
        assert peak_of_directions([shape] * count, [setting] * count, monkeypatch) <= room


@pytest.mark.parametrize(("layers", "width"), [(12, 768), (24, 1024), (36, 1280)], ids=["small", "medium", "large"])
def test_peak_of_mars_m_by_arithmetic(layers, width, monkeypatch):
    """At most 18.5 bytes a parameter: 16 are weights, gradients and states."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64))
    optimizer = mars_hf.create(model, lr=6e-4, mars_type="mars-m")
    of_params = []
    for group in optimizer.param_groups:
        of_params += [(param, group) for param in group["params"]]
    for param, _ in of_params:
        param.grad = torch.empty_like(param)
    chunk_of = MatrixPlanner().assign(optimizer.param_groups, {}, optimizer._ranks.shards.shapes, None)
    numel = sum(param.numel() for param, _ in of_params)
    peaks = []
    for chunk in set(chunk_of.values()):
        members = [of_params[index] for index, of_chunk in chunk_of.items() if of_chunk == chunk]
        settings = [newton_schulz_of(group, torch.bfloat16) for _, group in members]
        assert sum(param.numel() for param, _ in members) <= max(2**25, numel / 8)
        peaks.append(peak_of_directions([param.shape for param, _ in members], settings, monkeypatch))
    assert len(peaks) >= 3 and 16 + max(peaks) / numel <= 18.5
