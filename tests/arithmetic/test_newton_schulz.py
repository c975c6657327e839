"""Newton-Schulz against straight-line float64, and properties of its result."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from reference import newton_schulz_of_mars, newton_schulz_of_mars_m
from torch.utils._python_dispatch import TorchDispatchMode

from mars_hf.arithmetic import newton_schulz as ns

ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm, ATEN.bmm, ATEN.addmm, ATEN.baddbmm, ATEN.matmul)
# Singular values above these fractions of the Frobenius norm end in these ranges.
RANGES = {"quintic": (2e-3, 0.681, 1.203), "polar-express": (1e-3, 0.852, 1.124)}
SHAPES = [(32, 32), (32, 80), (80, 32), (1, 9), (9, 1), (1, 1)]


def per_step(schedule: str) -> list:
    coefficients = ns.SCHEDULES[schedule]
    return [coefficients] * 5 if schedule == "quintic" else list(coefficients)


def straight_line(matrix: torch.Tensor, coefficients: list, eps: float = 1e-7) -> torch.Tensor:
    return reference.newton_schulz(matrix, eps, coefficients)


def newton_schulz(matrix: torch.Tensor, schedule: str = "quintic", **settings) -> torch.Tensor:
    (result,) = ns.orthogonalize([matrix], coefficients=per_step(schedule), **settings)
    return result


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("schedule", ns.SCHEDULES)
@pytest.mark.parametrize("shape", [*SHAPES, (256, 2048)], ids=str)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2.5e-2)])
def test_newton_schulz_formulas(schedule, shape, dtype, bar):
    if schedule == "polar-express" and min(shape) == 1:
        bar *= 10  # a singular value of exactly 1, where these polynomials are steep
    matrix = torch.randn(shape)
    actual = newton_schulz(matrix.double(), schedule=schedule, dtype=dtype)
    assert actual.dtype == dtype
    assert distance(actual, straight_line(matrix, per_step(schedule))) < bar


@pytest.mark.parametrize("condition", [1, 1e2, 1e4, 1e6])
@pytest.mark.parametrize(("schedule", "steps"), [("quintic", 5), ("polar-express", 5), ("quintic", 8)])
def test_condition_numbers(schedule, steps, condition):
    """On the Gram matrix, whose condition number is the square; one to three segments of steps."""
    bases = [torch.linalg.qr(torch.randn(n, 48, dtype=torch.float64))[0] for n in (48, 200)]
    matrix = bases[0] * torch.logspace(0, -math.log10(condition), 48, dtype=torch.float64) @ bases[1].mT
    coefficients = (per_step(schedule) * 2)[:steps]
    (actual,) = ns.orthogonalize([matrix.float()], coefficients=coefficients, dtype=torch.float32)
    assert distance(actual, straight_line(matrix, coefficients)) < 1e-3


@pytest.mark.parametrize("official", [newton_schulz_of_mars, newton_schulz_of_mars_m])
@pytest.mark.parametrize("shape", [(32, 32), (80, 32), (128, 512)], ids=str)
def test_rounding_to_bf16(official, shape):
    matrix = torch.randn(shape)
    exact = straight_line(matrix, per_step("quintic"))
    assert distance(newton_schulz(matrix), exact) < 0.75 * distance(official(matrix, 1e-7), exact)


@pytest.mark.parametrize("cols", range(2, 40, 3))
def test_norm_is_not_rounded_to_bf16(cols):
    """One step that only divides by it: each element is the nearest bfloat16 to the quotient."""
    (found,) = ns.orthogonalize([torch.ones(1, cols)], coefficients=[(1.0, 0.0, 0.0)], dtype=torch.bfloat16, eps=0.0)
    assert torch.equal(found, torch.full((1, cols), 1 / math.sqrt(cols)).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_and_dtypes(dtype):
    matrix = torch.randn(4, 6, dtype=dtype)
    before = matrix.clone()
    assert newton_schulz(matrix.mT).shape == (6, 4)
    [result] = ns.orthogonalize([matrix], dtype=dtype)
    assert result.dtype == dtype
    result.zero_()
    torch.testing.assert_close(matrix, before, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ns.SCHEDULES)
def test_bounds_of_the_polynomials(schedule):
    share, low, high = RANGES[schedule]
    s = torch.logspace(math.log10(share), 0, 200_001, dtype=torch.float64)
    for a, b, c in per_step(schedule):
        s = a * s + b * s**3 + c * s**5
    assert low <= s.min() < low + 1e-3
    assert high - 1e-3 < s.max() <= high


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return the odd quintic nearest to 1 on [low, high] in the maximum norm, by Remez exchange."""
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    for _ in range(50):
        x = np.array([low, *inner, high])
        a, b, c, _ = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        inner = sorted(np.sqrt(np.roots([5 * c, 3 * b, a])))
    return np.array([a, b, c])


def test_polar_express_is_minimax():
    low, high, powers = 1e-3, 1.0, np.array([1, 3, 5])
    for step, stored in enumerate(ns.POLAR_EXPRESS):
        fitted = best_quintic(max(low, 0.02407327424182761 * high), high)
        ends = [fitted @ end**powers for end in (low, high)]
        fitted *= 2 / sum(ends)  # center the interval on 1 again
        low, high = fitted @ low**powers, fitted @ high**powers
        high = 2 - low
        safety = 1.01 if step < 4 else 1.0
        np.testing.assert_allclose(stored, fitted / safety**powers, rtol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_and_zero(bad):
    matrices = torch.randn(3, 4, 5)
    matrices[1, 2, 3], matrices[2] = bad, 0.0
    results = ns.orthogonalize(list(matrices))
    assert results[0].isfinite().all() and results[1].isnan().all() and not results[2].any()


def test_batches_are_one_by_one():
    base = torch.randn(40, 64)
    matrices = [
        torch.randn(16, 24),
        torch.randn(24, 16),
        torch.randn(24, 16).mT,
        base[::2, ::4][:, :16],
        torch.randn(3, 16, 24),
        torch.randn(2, 2, 24, 16),
        torch.randn(16, 24, dtype=torch.float64),
        torch.randn(7, 7),
        torch.randn(16, 24).mul_(1e-6),
    ]
    together = ns.orthogonalize(matrices, dtype=torch.float32)
    for matrix, result in zip(matrices, together, strict=True):
        assert result.shape == matrix.shape
        assert result.dtype == torch.float32
        alone = newton_schulz(matrix, dtype=torch.float32)
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
        each = torch.stack([straight_line(m, per_step("quintic")) for m in matrix.reshape(-1, *matrix.shape[-2:])])
        # 1e-7 shows if the matrix itself is as small as 1e-6.
        torch.testing.assert_close(result.double(), each.view(matrix.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("max_elements", "products"), [(2**18, 2), (48, 4), (1, 5)], ids=["two shapes", "two of a shape", "each alone"]
)
def test_batches_of_matrices(max_elements, products, monkeypatch):
    monkeypatch.setattr(ns, "BATCH_ELEMENTS_CPU", max_elements)
    matrices = [torch.randn(shape) for shape in [(4, 6), (5, 5), (6, 4), (4, 6), (2, 4, 6)]]
    counted = 0

    class CountProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal counted
            counted += func.overloadpacket in PRODUCTS
            return func(*args, **(kwargs or {}))

    with CountProducts():
        ns.orthogonalize(matrices)
    assert counted == products * 5 * 3


def spectrum(name: str, rows: int, cols: int) -> torch.Tensor:
    """Return a matrix with singular values as first moments have them, or worse."""
    matrix = torch.randn(rows, cols)
    bases = [torch.linalg.qr(torch.randn(n, rows))[0] for n in (rows, cols)]
    if name == "low rank":
        matrix = torch.randn(rows, rows // 16) @ torch.randn(rows // 16, cols) + 0.01 * matrix
    elif name == "one large value":
        matrix += 10 * torch.randn(rows, 1) @ torch.randn(1, cols)
    elif name == "one large element":
        matrix[3, 5] = 1e3
    elif name == "zeros":
        matrix[: rows // 2], matrix[:, ::3] = 0.0, 0.0
    elif name == "power law":
        matrix = bases[0] * torch.arange(1, rows + 1) ** -1.5 @ bases[1].mT
    elif name == "four decades":
        matrix = bases[0] * torch.logspace(0, -4, rows) @ bases[1].mT
    return matrix


SPECTRA = ["gaussian", "low rank", "one large value", "one large element", "zeros", "power law", "four decades"]


@pytest.mark.parametrize("schedule", ns.SCHEDULES)
@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (32, 512)], ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_gram_form_in_float16(name, shape, schedule, monkeypatch):
    """As GPUs take it: nearer to float64 than the plain form in bfloat16, by half at least."""
    matrix = spectrum(name, min(shape), max(shape)).bfloat16()
    matrix = matrix if shape[0] < shape[1] else matrix.mT
    exact = straight_line(matrix, per_step(schedule))
    monkeypatch.setattr(ns, "GRAM_RATIO", math.inf)
    plain = distance(newton_schulz(matrix, schedule), exact)
    monkeypatch.undo()
    monkeypatch.setattr(ns, "HALF_DEVICES", ("cpu",))
    together = ns.orthogonalize([matrix, matrix], coefficients=per_step(schedule))
    for found in (newton_schulz(matrix, schedule), *together):
        assert distance(found, exact) < (0.35 if name == "one large value" else 0.5) * plain < 0.4


@pytest.mark.parametrize("schedule", ns.SCHEDULES)
@pytest.mark.parametrize("name", SPECTRA)
def test_gram_form_in_float32(name, schedule):
    """From 3 to 1 on, and wherever bfloat16 rounds away more than ten times as much."""
    matrix = spectrum(name, 64, 192)
    found = newton_schulz(matrix, schedule, dtype=torch.float32)
    assert distance(found, straight_line(matrix, per_step(schedule))) < 1e-3


def test_small_elements_in_float16(monkeypatch):
    """One element that makes all others small: their singular values of 3e-4 grow 485 times, and keep three digits."""
    matrix = torch.randn(64, 512)
    matrix[0, 0] = 1e6
    exact = straight_line(matrix, per_step("quintic"))
    monkeypatch.setattr(ns, "HALF_DEVICES", ("cpu",))
    found = newton_schulz(matrix)
    assert distance(found[1:], exact[1:]) < 0.02


def test_gram_form_with_nan_and_zero(monkeypatch):
    monkeypatch.setattr(ns, "HALF_DEVICES", ("cpu",))
    matrices = [torch.randn(4, 9, dtype=torch.bfloat16) * scale for scale in (1e15, 1e-15, 0.0, math.nan)]
    large, small, zero, bad = ns.orthogonalize(matrices, eps=0.0)
    assert large.isfinite().all() and small.isfinite().all() and 0.9 < large.norm() / small.norm() < 1.1
    assert not zero.any() and bad.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "devices", "large"), [(torch.float32, (), 2), (torch.bfloat16, (), 12), (torch.bfloat16, ("cpu",), 4)]
)
def test_products_with_the_matrix_itself(dtype, devices, large, monkeypatch):
    """Float32 takes six slow steps on the Gram matrix, float16 two and four; bfloat16, less accurate, each on X."""
    monkeypatch.setattr(ns, "HALF_DEVICES", devices)
    seen = []

    class WatchProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in PRODUCTS:
                seen.append(max(max(arg.shape) for arg in args if isinstance(arg, torch.Tensor)))
            return func(*args, **(kwargs or {}))

    with WatchProducts():
        ns.orthogonalize([torch.randn(8, 64)], coefficients=[(1.5, -0.5, 0.0)] * 6, dtype=dtype)
    assert seen.count(64) == large


def test_chunks_by_key():
    kinds, sizes = "aabaab", [4, 4, 9, 4, 20, 1]
    assert ns.chunks_of(kinds, sizes, [8] * 6) == [("a", 0), ("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]
    assert ns.chunks_of([], [], []) == []


@pytest.mark.parametrize(
    ("rows", "cols", "shampoo", "muon"),
    [(4, 4, 1.0, 0.4), (16, 4, 2.0, 0.8), (4, 16, 1.0, 0.8), (1, 1, 1.0, 0.2), (4, 0, 1.0, 0.4)],
)
def test_scales_of_directions(rows, cols, shampoo, muon):
    assert ns.shampoo_scale(rows, cols) == pytest.approx(shampoo)
    assert ns.muon_scale(rows, cols) == pytest.approx(muon)
