"""The Triton kernel for symmetric products: in the interpreter, compiled for GPUs, and on one.

`test_gpu.py` runs this file in the interpreter.
"""

from __future__ import annotations

import logging
import re

import pytest
import torch
from contract import INTERPRETED
from helpers import on_a_gpu
from torch import nn

from mars_hf import Mars, kernels
from mars_hf.arithmetic import newton_schulz as ns

triton = pytest.importorskip("triton", reason="needs triton (extra `test`)")
from test_gpu import HOPPER, MI300, compiles, stack_of  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mars_hf.kernels import symmetric  # noqa: E402

gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
here = pytest.mark.parametrize("device", ["cpu"]) if INTERPRETED else gpu
# Of a result: rounded to nearest by a GPU, truncated to bfloat16 by the interpreter.
PRECISION = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(1, 1), (7, 5), (40, 3), (33, 130), (3, 20, 70), (2, 65, 17), (5, 16, 16)]


def stored(shape: tuple[int, ...], form: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return random matrices in rows, in columns, or with gaps between their rows."""
    generator = torch.Generator().manual_seed(0)
    *batch, rows, cols = shape
    if form == "columns":
        return torch.randn(*batch, cols, rows, generator=generator).to(device, dtype).mT
    wide = torch.randn(*batch, rows, cols + (3 if form == "gaps" else 0), generator=generator).to(device, dtype)
    return wide[..., :cols]


def assert_product(found: torch.Tensor, expected: torch.Tensor, *, exact: float) -> None:
    """Compare each element with float64, up to the rounding of sums in float32 and of the result."""
    assert found.shape == expected.shape and found.is_contiguous()
    bound = expected.abs() * PRECISION[found.dtype] + 2**-20 * exact
    assert ((found.double() - expected).abs() <= bound).all()


# Every shape in every form and dtype, and every form in every dtype.
PAIRS = [
    (shape, form, list(PRECISION)[(one + other) % 3])
    for one, shape in enumerate(SHAPES)
    for other, form in enumerate(("rows", "columns", "gaps"))
]


@here
@pytest.mark.parametrize(("shape", "form", "dtype"), PAIRS, ids=str)
def test_every_shape_and_order(shape, form, dtype, device):
    """In blocks of 16, so that there are many: X Xᵀ, and b A + c A A."""
    x = stored(shape, form, dtype, device)
    gram = symmetric.product(None, x, x.mT, alpha=0.5, block=16)
    wide = x.double()
    assert_product(gram, 0.5 * wide @ wide.mT, exact=float(wide.square().sum((-2, -1)).max()))
    gram = gram / gram.abs().amax()
    result = symmetric.product(gram, gram, gram, beta=-4.775, alpha=2.0315, block=16)
    wide = gram.double()
    assert_product(result, -4.775 * wide + 2.0315 * wide @ wide.mT, exact=10.0 * shape[-2])


@here
def test_one_triangle_is_mirrored(device):
    """With factors whose product is not symmetric the upper triangle shows where it comes from."""
    left, right = stored((40, 24), "rows", torch.float32, device), stored((24, 40), "rows", torch.float32, device) + 1
    found = symmetric.product(None, left, right, alpha=1.0, block=16)
    lower = torch.arange(40, device=device).unsqueeze(1) // 16 > torch.arange(40, device=device) // 16
    torch.testing.assert_close(found[lower], (left @ right)[lower], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.mT[lower], found[lower])


@here
@pytest.mark.parametrize("side", [1, 2, 7, 8, 9, 16, 21])
def test_blocks_of_a_triangle(side, device):
    """Each block of the lower triangle once; eight rows of blocks are gone through by columns."""
    import triton.language as tl

    @triton.jit
    def kernel(out, side, block_of: tl.constexpr, GROUP: tl.constexpr):
        row, column = block_of(tl.program_id(0), side, GROUP)
        tl.store(out + 2 * tl.program_id(0), row)
        tl.store(out + 2 * tl.program_id(0) + 1, column)

    out = torch.zeros(side * (side + 1) // 2, 2, dtype=torch.int32, device=device)
    kernel[(len(out),)](out, side, symmetric.block_of, symmetric.GROUP)
    blocks = [tuple(block) for block in out.tolist()]
    assert sorted(blocks) == [(row, column) for row in range(side) for column in range(row + 1)]
    if side == 21:
        assert blocks[36:52] == [(8 + number % 8, number // 8) for number in range(16)]


@here
def test_what_takes_the_kernel(device, monkeypatch):
    """From three blocks to a side on, whose addresses a GPU reads 16 bytes at a time."""
    taken = []
    monkeypatch.setattr(symmetric, "product", lambda added, left, right, **_: taken.append(left.shape) or left @ right)
    shapes = [(256, 512), (272, 512), (2, 272, 32), (300, 512), (272, 100)]
    for shape in shapes:
        x = torch.ones(shape, dtype=torch.bfloat16, device=device)
        gram = symmetric.multiply(x, x.mT)
        assert gram[..., 0, 0].eq(shape[-1]).all()
        symmetric.add(gram, gram, gram, beta=0.5, alpha=2.0)
    assert taken == [(272, 512), (272, 272), (2, 272, 32), (2, 272, 272), (272, 272)]


@here
@pytest.mark.parametrize("schedule", ns.SCHEDULES)
@pytest.mark.parametrize("shapes", [[(24, 40)], [(40, 24)], [(24, 40)] * 2, [(24, 56)], [(56, 24)] * 2], ids=str)
def test_newton_schulz_with_the_kernel(shapes, schedule, device, monkeypatch):
    """Every product that should be symmetric is, in both forms, one by one and in batches."""
    monkeypatch.setattr(ns, "HALF_DEVICES", (device,))
    calls = []

    class Products:
        @staticmethod
        def multiply(left, right):
            calls.append("multiply")
            return symmetric.product(None, left, right, alpha=1.0, block=16)

        @staticmethod
        def add(added, left, right, *, beta=1.0, alpha=1.0):
            calls.append("add")
            return symmetric.product(added, left, right, beta=beta, alpha=alpha, block=16)

    matrices = [stored(shape, "rows", torch.bfloat16, device) for shape in shapes]
    coefficients = ns.coefficients_of(schedule, 5)
    plain, found = (
        ns.orthogonalize(matrices, coefficients=coefficients, products=products) for products in (None, Products)
    )
    is_wide = max(shapes[0]) >= 2 * min(shapes[0])
    assert calls.count("multiply") == (2 if is_wide else 5) and calls.count("add") == (14 if is_wide else 5)
    for one, other in zip(plain, found, strict=True):
        # The truncation of the interpreter counts twice as much as rounding.
        one, other = one.float(), other.float()
        assert (one - other).norm() <= (0.01 if is_wide else 0.1) * one.norm()


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """Let kernels be checked anew, and forget what this test has found."""
    kernels._products_that_work.cache_clear()
    yield
    kernels._products_that_work.cache_clear()


@here
def test_kernels_are_chosen_after_a_check(device, fresh, monkeypatch, caplog):
    device, group = torch.device(device), {"fused": None}
    assert kernels.symmetric_products(group, device, torch.bfloat16) is symmetric
    assert kernels.symmetric_products(group, device, torch.float32) is None
    assert kernels.symmetric_products({"fused": False}, device, torch.bfloat16) is None
    assert not caplog.records
    kernels._products_that_work.cache_clear()
    right = symmetric.product
    monkeypatch.setattr(symmetric, "product", lambda *args, **settings: right(*args, **settings) * 1.02)
    for _ in range(2):
        assert kernels.symmetric_products(group, device, torch.bfloat16) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "Newton-Schulz takes PyTorch's products" in record.message


def test_without_triton_or_a_gpu(fresh, monkeypatch, caplog):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.symmetric_products({"fused": True}, torch.device("cpu"), torch.bfloat16) is None
    assert not caplog.records


def test_a_step_takes_the_kernels(fresh, monkeypatch):
    """Whatever is chosen reaches Newton-Schulz."""
    seen = []

    class Products:
        multiply = staticmethod(lambda left, right: seen.append(left.shape) or left @ right)
        add = staticmethod(torch.addmm)

    monkeypatch.setattr(kernels, "_products_that_work", lambda device: Products)
    for fused in (None, False):
        param = nn.Parameter(torch.randn(6, 8))
        param.grad = torch.randn(6, 8)
        Mars([param], mars_type="mars-m", ns_dtype="bfloat16", fused=fused).step()
    assert seen == [(6, 8)] * 5


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(target: GPUTarget, dtype: str, *, added: bool, columns: bool = False):
    """Compile what a launch with aligned operands compiles; `columns`: X is stored by columns."""
    kernel = symmetric.symmetric_product
    ones = {"left_row", "right_column"} if columns else {"left_column", "right_row"}
    if added:
        ones = {"left_column", "right_column", "added_column"}  # three matrices in rows
    constants = dict.fromkeys(ones, 1) | symmetric.constants(2) | ({} if added else {"added": None})
    signature = {name: "i32" for name in kernel.arg_names} | {"beta": "fp32", "alpha": "fp32"}
    signature |= dict.fromkeys(("left", "right", "added", "out"), f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    aligned = [name for name, kind in signature.items() if kind == "i32" or kind.startswith("*")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = symmetric.launch_options(target.backend == "hip")
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


@compiles
@pytest.mark.parametrize("target", [GPUTarget("cuda", 80, 32), HOPPER, MI300], ids=["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("dtype", "added", "columns"),
    [("bf16", False, False), ("bf16", False, True), ("bf16", True, False), ("fp16", True, False)],
    ids=str,
)
def test_compiles_without_spills(target, dtype, added, columns, tmp_path):
    """Tensor cores take the products, 16 bytes move at once, and operands fit the shared memory."""
    code = compiled(target, dtype, added=added, columns=columns)
    if target is MI300:
        assert re.search(r"\.private_segment_fixed_size: 0\b", code.asm["amdgcn"]) and "mfma" in code.asm["amdgcn"]
        assert code.metadata.shared <= 64 * 1024
        return
    assert stack_of(code, tmp_path) == 0
    ptx = code.asm["ptx"]
    assert ("wgmma.mma_async" if target is HOPPER else "mma.sync") in ptx
    assert "st.global.v4" in ptx and not re.search(r"st\.global\.b16", ptx)
    assert code.metadata.shared <= 99 * 1024  # also of an RTX 4090


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(768, 3072), (5, 1280, 1280), (3, 768, 768), (2, 2048, 8192)], ids=str)
def test_large_products_on_a_gpu(shape, dtype, device):
    """Twice the same bits, too."""
    x = stored(shape, "rows", dtype, device) / shape[-1] ** 0.5
    gram = symmetric.multiply(x, x.mT)
    assert torch.equal(gram, symmetric.multiply(x, x.mT))
    wide = x.double()
    assert_product(gram, wide @ wide.mT, exact=float(wide.square().sum((-2, -1)).max()))
