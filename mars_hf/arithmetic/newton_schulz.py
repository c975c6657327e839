"""Newton-Schulz: move matrices towards the nearest ones with orthonormal rows (or columns).

For M = U S Vᵀ each step maps every singular value s to a s + b s³ + c s⁵ and uses matrix products only. The exact
limit, U Vᵀ, is the polar factor; `QUINTIC` stops within a factor of it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# The official code and Muon use these. Steep at 0, so small singular values grow fast; does not converge. Maps singular
# values above 2e-3 of the Frobenius norm into [0.68, 1.21]; smaller ones grow by up to 485.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)

# Polar Express (arXiv 2505.16932), one triple per step: the best odd quintic, in the maximum norm, on the interval that
# the previous steps leave, starting from [1e-3, 1], with the paper's cushion 0.024 and safety factor 1.01. Maps
# singular values above 1e-3 of the Frobenius norm into [0.85, 1.13]; smaller ones grow by up to 986. On
# well-conditioned matrices its distance to the polar factor is about half QUINTIC's, at the same cost.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.205160414005572, -22.90193498705605, 16.46072491018031),
    (4.066395159942772, -2.8611540867551426, 0.5183995226694743),
    (3.909594904437914, -2.823351735039514, 0.5250369769390018),
    (3.2855640171986136, -2.4153019596359457, 0.485294065527909),
    (2.3006520199548186, -1.6689039845747504, 0.4188073119525672),
)

SCHEDULES: dict[str, Coefficients | Sequence[Coefficients]] = {"quintic": QUINTIC, "polar-express": POLAR_EXPRESS}

# Largest batch, in elements; the iteration holds about three times as many, in its dtype. A step gives fewer at once,
# see `exchange.CHUNK_ELEMENTS`. On a CPU, batches larger than the caches take up to a third longer.
MAX_ELEMENTS = 2**27
BATCH_ELEMENTS_CPU = 2**18
# From this ratio of columns to rows on, steps are taken on A = X Xᵀ, in 16 bits and in more. By products alone, 1.5
# would pay.
GRAM_RATIO, GRAM_RATIO_WIDE = 2, 3
# On GPUs, which multiply all 16-bit numbers equally fast, bfloat16 takes these steps in float16, which is exacter. Its
# numbers end at 6e-8: 16 X loses less of what is small.
HALF_DEVICES, HALF, HALF_SCALE = ("cuda",), torch.float16, 16.0


def shampoo_scale(rows: int, cols: int) -> float:
    """Return MARS-Shampoo's factor for an orthogonalized (out, in) matrix: sqrt(max(1, rows / cols))."""
    return math.sqrt(max(1.0, rows / cols)) if cols else 1.0


def muon_scale(rows: int, cols: int) -> float:
    """Return MARS-M's factor for an orthogonalized (out, in) matrix; its entries then have an RMS of about 0.2."""
    return 0.2 * math.sqrt(max(rows, cols))


def coefficients_of(schedule: Any, steps: int) -> tuple[Coefficients, ...]:
    """Return the coefficients of each step: of a name in `SCHEDULES`, one triple for all steps, or a triple for each.

    Raises:
        ValueError: another number of triples than steps.
    """
    triples: Any = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    if not isinstance(triples[0], (list, tuple)):  # one triple
        triples = [triples] * steps
    if len(triples) != steps:
        raise ValueError(
            f"ns_coefficients={schedule!r} is a schedule of {len(triples)} steps and ns_steps={steps}; give as many "
            "triples as steps, or one for all"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def orthogonalize(
    matrices: Sequence[Tensor],
    *,
    coefficients: Sequence[Coefficients] = (QUINTIC,) * 5,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    products: Any = None,
) -> list[Tensor]:
    """Orthogonalize each matrix; those of one shape (transposed or not) run together, in batches of `MAX_ELEMENTS`.

    On a CPU batches have `BATCH_ELEMENTS_CPU`. A larger matrix is a batch of its own.

    Args:
        matrices: each (..., rows, cols), floating point, any strides; not modified.
        coefficients: a triple (a, b, c) for each step.
        dtype: dtype of the iteration.
        eps: added to the Frobenius norm; each matrix is divided by the sum first.
        products: what has `multiply` and `add` for products that are symmetric, see `kernels/symmetric.py`; None takes
            PyTorch's.

    Returns:
        One tensor per matrix, with its shape, in the dtype that made it: `dtype`, or `HALF` in place of bfloat16. Zeros
        stay zero; a matrix with a NaN or infinity becomes NaN. Results may share storage with each other, never with
        `matrices`.
    """
    results: list[Tensor] = list(matrices)
    for indices in _batches(matrices):
        stacks = []
        for index in indices:
            matrix = matrices[index]
            # With rows <= cols the products are smaller.
            wide = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
            stacks.append(wide.reshape(wide.shape[:-2].numel(), *wide.shape[-2:]))
        batch = _iterate(stacks, coefficients, dtype, eps, products)
        parts = batch.split([len(stack) for stack in stacks])
        for index, part in zip(indices, parts, strict=True):
            rows, cols = matrices[index].shape[-2:]
            result = part.mT if rows > cols else part
            results[index] = result.reshape(matrices[index].shape)
    return results


def _batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the matrices in each batch."""
    keys: list[Hashable] = []
    limits = []
    for matrix in matrices:
        rows, cols = sorted(matrix.shape[-2:])
        keys.append((rows, cols, matrix.dtype, matrix.device))
        limits.append(BATCH_ELEMENTS_CPU if matrix.device.type == "cpu" else MAX_ELEMENTS)
    sizes = [matrix.numel() for matrix in matrices]
    batches: dict[Hashable, list[int]] = {}
    for index, chunk in enumerate(chunks_of(keys, sizes, limits)):
        batches.setdefault(chunk, []).append(index)
    return list(batches.values())


def chunks_of(keys: Iterable[Hashable], sizes: Iterable[int], limits: Iterable[int]) -> list[tuple[Hashable, int]]:
    """Return the chunk of each item: its key and a number; a chunk holds up to `limits`, or one item."""
    chunks = []
    last: dict[Hashable, tuple[int, int]] = {}  # number of a key's last chunk, and what that holds
    for key, size, limit in zip(keys, sizes, limits, strict=True):
        number, held = last.get(key, (0, 0))
        if held and held + size > limit:
            number, held = number + 1, 0
        last[key] = number, held + size
        chunks.append((key, number))
    return chunks


def _iterate(
    stacks: Sequence[Tensor], coefficients: Sequence[Coefficients], dtype: torch.dtype, eps: float, products: Any = None
) -> Tensor:
    """Iterate on matrices of one shape, each (n, rows, cols) with rows <= cols; returns them in one tensor."""
    x = _in_one_tensor(stacks, dtype)
    single = len(x) == 1
    turned = single and not x[0].is_contiguous()  # stored as xᵀ
    if single:
        x = x[0]  # faster than a batch of one
    if turned:
        x = x.mT  # same Gram matrix, multiplied from the right
    segments, dtype_of_steps = _segments(coefficients, dtype, x.device, *stacks[0].shape[1:])
    x = _normalized(x, eps, dtype_of_steps)
    multiply, add = (torch.mm, torch.addmm) if single else (torch.bmm, torch.baddbmm)
    # The same for products that are symmetric.
    multiply_alike, add_alike = (multiply, add) if products is None else (products.multiply, products.add)
    for steps in segments:
        if len(steps) > 1:
            # Held by the callee alone: small matrices end as soon as they can, which keeps the peak low.
            factor = _factor_of(_gram_of(x, turned, multiply_alike), steps, add_alike)
            x = multiply(x, factor) if turned else multiply(factor, x)
            del factor
        else:
            a, b, c = steps[0]
            gram = _gram_of(x, turned, multiply_alike)
            # B = b A + c A²
            gram = add_alike(gram, gram, gram, beta=b, alpha=c)
            # X = a X + B X
            x = add(x, x, gram, beta=a) if turned else add(x, gram, x, beta=a)
    if turned:
        x = x.mT
    return x.unsqueeze(0) if single else x


def _in_one_tensor(stacks: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a copy of all matrices, in the dtype of the iteration."""
    if len(stacks) == 1:
        return stacks[0].to(dtype, copy=True)  # keeps its strides: no need to transpose it in memory
    counts = [len(stack) for stack in stacks]
    x = torch.empty(sum(counts), *stacks[0].shape[1:], dtype=dtype, device=stacks[0].device)
    torch._foreach_copy_(list(x.split(counts)), list(stacks))
    return x


def _normalized(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Divide each matrix by its Frobenius norm, in place: X = M / (‖M‖_F + eps); for `HALF` return `HALF_SCALE` X."""
    # PyTorch's CPU norm over millions of float32 at once is off by 4e-5.
    row_norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    if x.ndim == 2:
        norms = torch.linalg.vector_norm(row_norms)
    else:
        norms = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True)
    if eps == 0:
        norms = norms.clamp_min(torch.finfo(norms.dtype).tiny)  # zeros stay zero
    norms = norms + eps
    if dtype == x.dtype:
        return x.div_(norms)
    # By a tensor of dimensions PyTorch divides in its dtype, and rounds once.
    norms = norms.view(-1, 1, 1) if x.ndim == 3 else norms.view(1, 1)
    return torch.div(x, norms / HALF_SCALE, out=torch.empty_like(x, dtype=dtype))


def _gram_of(x: Tensor, turned: bool, multiply: Any) -> Tensor:
    """Return A = X Xᵀ, also of a matrix that is stored as Xᵀ."""
    return multiply(x.mT, x) if turned else multiply(x, x.mT)


def _segments(
    coefficients: Sequence[Coefficients], dtype: torch.dtype, device: torch.device, rows: int, cols: int
) -> tuple[list[list[Coefficients]], torch.dtype]:
    """Divide the steps into those that one A = X Xᵀ serves, see `_factor_of`; without it, each stands alone.

    Returns:
        The steps, and their dtype.
    """
    is_half = dtype.itemsize == 2
    # In bfloat16 directions would be less accurate, and CPUs multiply float16 slowly.
    ratio = GRAM_RATIO if is_half else GRAM_RATIO_WIDE
    if cols < ratio * rows or (is_half and device.type not in HALF_DEVICES):
        return [[triple] for triple in coefficients], dtype
    # Errors of A are multiplied by the square of the product of all a. Float16 takes two steps at once, then three, as
    # one large singular value asks for; with five, directions would be off by half and more.
    limit = 50.0 if is_half else math.sqrt(0.1 / torch.finfo(dtype).eps)
    segments: list[list[Coefficients]] = []
    growth = 1.0
    for number, triple in enumerate(coefficients):
        a = abs(triple[0])
        growth *= a
        if not segments or growth > limit or (is_half and number == 2):
            segments.append([])
            growth = a
        segments[-1].append(triple)
    return (_scaled(segments), HALF) if is_half else (segments, dtype)


def flops(
    rows: int, cols: int, coefficients: Sequence[Coefficients], dtype: torch.dtype, device: torch.device
) -> float:
    """Return the multiplications and additions of the steps on one matrix, in the form that they take."""
    small, large = sorted((rows, cols))
    cube, long = 2.0 * small**3, 2.0 * small * small * large
    total = 0.0
    for steps in _segments(coefficients, dtype, device, small, large)[0]:
        # A, and the last product with X; B of each step; Q of all but the first, and both products of the next A.
        total += 2 * long + len(steps) * cube + 3 * (len(steps) - 1) * cube
    return total


def _scaled(segments: Sequence[Sequence[Coefficients]]) -> list[list[Coefficients]]:
    """Return the coefficients that take `HALF_SCALE` X through the same steps; the last one removes the scale."""
    square = HALF_SCALE**2
    scaled = [[(a, b / square, c / square**2) for a, b, c in steps] for steps in segments]
    a, b, c = scaled[-1][-1]
    scaled[-1][-1] = (a / HALF_SCALE, b / HALF_SCALE, c / HALF_SCALE)
    return scaled


def _factor_of(gram: Tensor, steps: Sequence[Coefficients], add: Any) -> Tensor:
    """Return Q such that Q X is the result of some steps, from A = X Xᵀ alone, with products of small square matrices.

    All matrices are polynomials of A, so they commute. Source: Gram Newton-Schulz, Dao-AILab/gram-newton-schulz.
    """
    factor = gram
    for number, (a, b, c) in enumerate(steps, start=1):
        # B = b A + c A²
        power = add(gram, gram, gram, beta=b, alpha=c)
        if number == 1:
            factor = power.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            # Q = a Q + B Q
            factor = add(factor, power, factor, beta=a)
        if number < len(steps):
            # A = (a I + B) A (a I + B)
            gram = add(gram, power, gram, beta=a)
            gram = add(gram, power, gram, beta=a)
    return factor
