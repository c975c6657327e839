"""Matrix products whose results are known to be symmetric, on GPUs: one triangle of blocks, and its mirror image.

Newton-Schulz takes X Xᵀ, b A + c A A, and products of polynomials of one A. Half of the work is enough, plus what the
blocks on the diagonal have twice: with T blocks to a side, (T + 1) / 2T.

The module needs Triton, so only `kernels` imports it, at first use.

A program makes one block: a loop over the inner dimension, sums in float32, two writes. No block is added to by two
programs, and those on the diagonal are written once, so the bits are the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and columns of a block, and bytes of a row that an operand gives at once: 64 numbers of 16 bits. A stage of both
# operands is 32 KB, so three fit the shared memory of an A100 (163 KB), an RTX 4090 (99 KB) and an H100 (227 KB). Sums
# are 64 registers for each of 256 threads.
BLOCK, STEP_BYTES = 128, 128
# Rows of blocks of which neighbouring programs work on the same columns, so that operands are found in the L2 cache.
GROUP = 8
# With two blocks to a side a quarter of the work would be saved, for which vendors' products make up.
ROWS_FROM = 2 * BLOCK + 1


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, which must be symmetric; one matrix, or a batch of them."""
    if not _pays_off(left, right):
        return left @ right
    return product(None, left, right, alpha=1.0)


def add(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta added + alpha left @ right, all symmetric; one matrix, or a batch of them."""
    if not _pays_off(added, left, right):
        plain = torch.addmm if left.ndim == 2 else torch.baddbmm
        return plain(added, left, right, beta=beta, alpha=alpha)
    return product(added, left, right, beta=beta, alpha=alpha)


def _pays_off(*operands: Tensor) -> bool:
    """Return whether the kernel saves time: results are large enough, and a thread reads 16 bytes at once."""
    if operands[-1].shape[-1] < ROWS_FROM:
        return False
    for operand in operands:
        steps = (*operand.shape[-2:], *operand.stride())
        if 1 not in operand.stride()[-2:] or any(step % 16 for step in steps if step != 1) or operand.data_ptr() % 16:
            return False
    return True


def product(
    added: Tensor | None, left: Tensor, right: Tensor, *, beta: float = 0.0, alpha: float, block: int = BLOCK
) -> Tensor:
    """Return beta added + alpha left @ right by the kernel, at any size.

    Args:
        added: (..., n, n) and symmetric, or None.
        left: (..., n, k), any strides.
        right: (..., k, n), any strides.
        beta: of `added`.
        alpha: of the product.
        block: rows and columns of a block.
    """
    n, k = left.shape[-2:]
    out = torch.empty(*left.shape[:-1], n, dtype=left.dtype, device=left.device)
    side = triton.cdiv(n, block)
    programs = left.shape[:-2].numel() * (side * (side + 1) // 2)
    if not programs:
        return out
    operands: list[Tensor | None] = []
    strides: list[int] = []
    for operand in (left, right, added):
        batch = operand if operand is None or operand.ndim == 3 else operand.unsqueeze(0)
        operands.append(batch)
        strides += (0, 0, 0) if batch is None else batch.stride()
    with torch.cuda.device_of(out):
        symmetric_product[(programs,)](
            *operands, out, n, k, *strides, beta, alpha,
            **{**constants(left.itemsize), "BLOCK": block, "WIDEN": left.device.type == "cpu"},
            **launch_options(torch.version.hip is not None),
        )  # fmt: skip
    return out


def constants(itemsize: int) -> dict[str, int]:
    """Return the constants of a launch for elements of some bytes."""
    return {"BLOCK": BLOCK, "STEP": STEP_BYTES // itemsize, "GROUP": GROUP, "WIDEN": False}


def launch_options(is_amd: bool) -> dict[str, int]:
    """Return warps and stages: AMD's groups of 64 threads have 64 KB for operands, and keep a stage in registers."""
    return {"num_warps": 8, "num_stages": 2 if is_amd else 3}


def check(device: torch.device) -> None:
    """Raise AssertionError if the kernel computes something else than PyTorch: small products in both dtypes."""
    generator = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(2, 2 * BLOCK + 3, 72, dtype=torch.float32, device="cpu", generator=generator)
    for dtype in (torch.float16, torch.bfloat16):
        x = values.to(device, dtype)
        gram = product(None, x, x.mT, alpha=1 / 16)
        polynomial = product(gram, gram, gram, beta=-4.775, alpha=2.0315)
        for found, expected in (
            (gram, x.double() @ x.double().mT / 16),
            (polynomial, -4.775 * gram.double() + 2.0315 * gram.double() @ gram.double()),
        ):
            atol = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=atol)


@triton.jit
def triangle_row(number):
    """Return the row of an entry of a lower triangle, counted from the first one row by row."""
    row = ((tl.sqrt((8 * number + 1).to(tl.float32)) - 1) / 2).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)


@triton.jit
def block_of(number, side, GROUP: tl.constexpr):
    """Return row and column of a block of the lower triangle; `GROUP` rows of blocks are gone through by columns."""
    first = triangle_row(number) // GROUP * GROUP
    height = tl.minimum(GROUP, side - first)
    number -= first * (first + 1) // 2
    # The columns that all rows of the group have, then the triangle below and right of them.
    whole = height * (first + 1)
    rest = tl.maximum(number - whole, 0)
    below = triangle_row(rest)
    in_whole = number < whole
    row = tl.where(in_whole, first + number % height, first + 1 + below)
    column = tl.where(in_whole, number // height, first + 1 + rest - below * (below + 1) // 2)
    return row, column


@triton.jit(do_not_specialize=["beta", "alpha"])
def symmetric_product(
    left, right, added, out, n, k,
    left_batch, left_row, left_column, right_batch, right_row, right_column, added_batch, added_row, added_column,
    beta, alpha, BLOCK: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write one block of beta added + alpha left @ right, and its mirror image, into `out`, which is contiguous."""
    side = tl.cdiv(n, BLOCK)
    triangle = side * (side + 1) // 2
    batch = (tl.program_id(0) // triangle).to(tl.int64)
    block_row, block_column = block_of(tl.program_id(0) % triangle, side, GROUP)
    rows = block_row * BLOCK + tl.arange(0, BLOCK)
    columns = block_column * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, STEP)
    # Rows beyond the last one are others again, whose products are not written.
    left += batch * left_batch + (rows % n).to(tl.int64)[:, None] * left_row + inner[None, :] * left_column
    right += batch * right_batch + inner[:, None] * right_row + (columns % n).to(tl.int64)[None, :] * right_column
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, STEP):
        x = tl.load(left, mask=inner[None, :] < k - start, other=0.0)
        y = tl.load(right, mask=inner[:, None] < k - start, other=0.0)
        if WIDEN:  # the interpreter multiplies the bits of bfloat16
            x, y = x.to(tl.float32), y.to(tl.float32)
        sums = tl.dot(x, y, sums, input_precision="ieee")
        left += STEP * left_column
        right += STEP * right_row
    sums *= alpha
    mask = (rows < n)[:, None] & (columns < n)[None, :]
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    if added is not None:
        added += batch * added_batch + wide_rows[:, None] * added_row + wide_columns[None, :] * added_column
        sums += beta * tl.load(added, mask=mask, other=0.0).to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    out += batch * n * n
    tl.store(out + wide_rows[:, None] * n + wide_columns[None, :], result, mask=mask)
    if block_row != block_column:
        tl.store(out + wide_columns[:, None] * n + wide_rows[None, :], tl.trans(result), mask=tl.trans(mask))
