"""Newton-Schulz: move matrices towards the nearest ones with orthonormal rows (or columns).

For M = U S Vᵀ each step maps every singular value s to a s + b s³ + c s⁵ and uses matrix products only. The exact
limit, U Vᵀ, is the polar factor; `QUINTIC` stops within a factor of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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

# Largest batch, in elements; the iteration holds about three times as many, in its dtype. On an accelerator all of
# GPT-2 small fits; on a CPU, batches larger than the caches take up to a third longer.
MAX_ELEMENTS, MAX_ELEMENTS_CPU = 2**27, 2**18


def shampoo_scale(rows: int, cols: int) -> float:
    """Return MARS-Shampoo's factor for an orthogonalized (out, in) matrix: sqrt(max(1, rows / cols))."""
    return math.sqrt(max(1.0, rows / cols)) if cols else 1.0


def muon_scale(rows: int, cols: int) -> float:
    """Return MARS-M's factor for an orthogonalized (out, in) matrix; its entries then have an RMS of about 0.2."""
    return 0.2 * math.sqrt(max(rows, cols))


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
) -> Tensor:
    """Orthogonalize matrices by Newton-Schulz steps.

    Args:
        matrices: (..., rows, cols), floating point; not modified.
        steps: number of steps.
        coefficients: a triple (a, b, c), or one for each step.
        dtype: dtype of the iteration.
        eps: added to the Frobenius norm; each matrix is divided by the sum first.

    Returns:
        A tensor with the shape and dtype of `matrices`. Zeros stay zero; a matrix with a NaN or infinity becomes NaN.

    Raises:
        ValueError: the number of triples is not `steps`.
    """
    wide = _wide(matrices)
    result = _iterate(wide.to(dtype, copy=True), _per_step(coefficients, steps), eps)
    return _oriented(result.view(wide.shape), matrices).to(matrices.dtype)


def orthogonalize(
    matrices: Sequence[Tensor],
    *,
    steps: int = 5,
    coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    max_elements: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Apply `newton_schulz` to each matrix; matrices of one shape run as one batch.

    Args:
        matrices: each (..., rows, cols), any strides; not modified.
        steps: see `newton_schulz`.
        coefficients: see `newton_schulz`.
        dtype: see `newton_schulz`.
        eps: see `newton_schulz`.
        max_elements: largest batch, see `batches`.
        out_dtype: dtype of the results; None keeps each matrix's own; passing `dtype` saves the conversion.

    Returns:
        One tensor per matrix, with its shape. Results may share storage with each other, never with `matrices`.
    """
    per_step = _per_step(coefficients, steps)
    results: list[Tensor] = list(matrices)
    for indices in batches(matrices, max_elements):
        wide = [_wide(matrices[i]) for i in indices]
        # The stack has no name here, so that the iteration can free it.
        batch = _iterate(_stack(wide, dtype), per_step, eps).to(out_dtype or wide[0].dtype)
        for i, part in zip(indices, batch.split([_count(m) for m in wide]), strict=True):
            results[i] = _oriented(part, matrices[i])
    return results


def batches(matrices: Iterable[Tensor], max_elements: int | None = None) -> list[list[int]]:
    """Group matrices into batches of one shape (transposed or not), dtype and device.

    Args:
        matrices: each (..., rows, cols).
        max_elements: largest batch, in elements; a larger entry is a batch of its own. None uses `MAX_ELEMENTS`, or
            `MAX_ELEMENTS_CPU` on a CPU.

    Returns:
        One list of indices into `matrices` per batch; each index appears once, in order of first appearance.
    """
    full: list[list[int]] = []
    open_batches: dict[tuple[object, ...], list[int]] = {}
    elements: dict[tuple[object, ...], int] = {}
    for i, matrix in enumerate(matrices):
        key = (*sorted(matrix.shape[-2:]), matrix.dtype, matrix.device)
        limit = max_elements or (MAX_ELEMENTS_CPU if matrix.device.type == "cpu" else MAX_ELEMENTS)
        if key not in open_batches or elements[key] + matrix.numel() > limit:
            open_batches[key], elements[key] = [], 0
            full.append(open_batches[key])
        open_batches[key].append(i)
        elements[key] += matrix.numel()
    return full


def _per_step(coefficients: Coefficients | Sequence[Coefficients], steps: int) -> Sequence[Coefficients]:
    if not isinstance(coefficients[0], Sequence):
        return [coefficients] * steps  # type: ignore[list-item]
    if len(coefficients) != steps:
        raise ValueError(f"{len(coefficients)} triples of coefficients for {steps} steps")
    return coefficients  # type: ignore[return-value]


def _wide(matrices: Tensor) -> Tensor:
    """Reshape to (n, rows, cols), transposed if needed so that rows <= cols: the products are smaller."""
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    return matrices.reshape(_count(matrices), *matrices.shape[-2:])


def _oriented(wide: Tensor, like: Tensor) -> Tensor:
    """Undo `_wide`."""
    tall = like.shape[-2] > like.shape[-1]
    return (wide.mT if tall else wide).reshape(like.shape)


def _count(matrices: Tensor) -> int:
    return math.prod(matrices.shape[:-2])


def _stack(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(matrices) == 1:
        return matrices[0].to(dtype, copy=True)  # keeps its strides: no need to transpose it in memory
    counts = [_count(m) for m in matrices]
    stacked = torch.empty(sum(counts), *matrices[0].shape[1:], dtype=dtype, device=matrices[0].device)
    torch._foreach_copy_(list(stacked.split(counts)), list(matrices))
    return stacked


def _iterate(x: Tensor, coefficients: Iterable[Coefficients], eps: float) -> Tensor:
    """Iterate on x, a batch (n, rows, cols) with rows <= cols; overwrites `x`."""
    if len(x) == 1:
        return _iterate_one(x[0], coefficients, eps).unsqueeze(0)
    # X = M / (‖M‖_F + eps)
    x.div_(torch.linalg.vector_norm(_row_norms(x), dim=-2, keepdim=True) + eps)
    for a, b, c in coefficients:
        # A = X Xᵀ
        gram = torch.bmm(x, x.mT)
        # B = b A + c A²
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        # X = a X + B X
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def _iterate_one(x: Tensor, coefficients: Iterable[Coefficients], eps: float) -> Tensor:
    """Iterate on one matrix (rows, cols), faster than a batch of one; the result has the strides of `x`."""
    turned = not x.is_contiguous()  # then work on xᵀ: same Gram matrix, multiplied from the right
    x = x.mT if turned else x
    x.div_(torch.linalg.vector_norm(_row_norms(x)) + eps)
    for a, b, c in coefficients:
        gram = torch.mm(x.mT, x) if turned else torch.mm(x, x.mT)
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, x, gram, beta=a) if turned else torch.addmm(x, gram, x, beta=a)
    return x.mT if turned else x


def _row_norms(x: Tensor) -> Tensor:
    # PyTorch's CPU norm over millions of float32 at once is off by 4e-5.
    precise = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
