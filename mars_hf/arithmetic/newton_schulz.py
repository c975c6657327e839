"""Newton-Schulz: a matrix, or many at once, towards the nearest one with orthonormal rows (or columns).

For M = U S Vᵀ each step maps every singular value s to a s + b s³ + c s⁵, with matrix products only. The exact limit,
U Vᵀ, is the polar factor; `QUINTIC` stops within a factor of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# Of the official code and of Muon: steep at 0, so that small singular values grow fast, and not convergent. Maps those
# above 2e-3 of the Frobenius norm into [0.68, 1.21]; smaller ones grow by up to 485.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)

# One triple a step: each the best odd quintic, in the maximum norm, on the interval which the steps before leave
# (Polar Express, arXiv 2505.16932; from [1e-3, 1], with its cushion 0.024 and safety factor 1.01). Maps singular values
# above 1e-3 of the Frobenius norm into [0.85, 1.13]; smaller ones grow by up to 986. About half QUINTIC's distance to
# the polar factor on well-conditioned matrices, at the same cost.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.205160414005572, -22.90193498705605, 16.46072491018031),
    (4.066395159942772, -2.8611540867551426, 0.5183995226694743),
    (3.909594904437914, -2.823351735039514, 0.5250369769390018),
    (3.2855640171986136, -2.4153019596359457, 0.485294065527909),
    (2.3006520199548186, -1.6689039845747504, 0.4188073119525672),
)

SCHEDULES: dict[str, Coefficients | Sequence[Coefficients]] = {"quintic": QUINTIC, "polar-express": POLAR_EXPRESS}

# Elements worked on at once; memory is about three times this, in the iteration's dtype. On an accelerator all of GPT-2
# small fits; on a CPU batches that leave the caches take up to a third longer.
MAX_ELEMENTS, MAX_ELEMENTS_CPU = 2**27, 2**18


def shampoo_scale(rows: int, cols: int) -> float:
    """MARS-Shampoo's factor on an orthogonalized (out, in) matrix."""
    return math.sqrt(max(1.0, rows / cols)) if cols else 1.0


def muon_scale(rows: int, cols: int) -> float:
    """MARS-M's factor on an orthogonalized (out, in) matrix: its entries get a root mean square of about 0.2."""
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
        dtype: of the iteration.
        eps: added to the Frobenius norm by which each matrix is divided first.

    Returns:
        The shape and dtype of `matrices`. Zeros stay zeros; a matrix with a NaN or an infinity is NaN throughout.

    Raises:
        ValueError: a list of coefficients whose length is not `steps`.
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
    """`newton_schulz` of each matrix, those of one shape together.

    Args:
        matrices: each (..., rows, cols), any strides; not modified.
        steps: as `newton_schulz`.
        coefficients: as `newton_schulz`.
        dtype: as `newton_schulz`.
        eps: as `newton_schulz`.
        max_elements: of one batch, see `batches`.
        out_dtype: of the results; None for each matrix's own. `dtype` saves the conversion.

    Returns:
        One tensor for each matrix, of its shape. They may share storage with each other, never with `matrices`.
    """
    per_step = _per_step(coefficients, steps)
    results: list[Tensor] = list(matrices)
    for indices in batches(matrices, max_elements):
        wide = [_wide(matrices[i]) for i in indices]
        # Handed over without a name, so that the iteration can free what it starts from.
        batch = _iterate(_stack(wide, dtype), per_step, eps).to(out_dtype or wide[0].dtype)
        for i, part in zip(indices, batch.split([_count(m) for m in wide]), strict=True):
            results[i] = _oriented(part, matrices[i])
    return results


def batches(matrices: Iterable[Tensor], max_elements: int | None = None) -> list[list[int]]:
    """Which matrices to work on together: those of one shape, transposed ones too, of one dtype and device.

    Args:
        matrices: each (..., rows, cols).
        max_elements: most elements of a batch; a single entry larger than that is a batch of its own. None for
            `MAX_ELEMENTS`, or `MAX_ELEMENTS_CPU` on a CPU.

    Returns:
        Indices into `matrices`, a list a batch, each index once, in order of first appearance.
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
    """(n, rows, cols) with rows <= cols, where the products are smaller."""
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
        return matrices[0].to(dtype, copy=True)  # as it lies in memory: a transposed one need not be turned round
    counts = [_count(m) for m in matrices]
    stacked = torch.empty(sum(counts), *matrices[0].shape[1:], dtype=dtype, device=matrices[0].device)
    torch._foreach_copy_(list(stacked.split(counts)), list(matrices))
    return stacked


def _iterate(x: Tensor, coefficients: Iterable[Coefficients], eps: float) -> Tensor:
    """The iteration on (n, rows, cols), rows <= cols; `x` is overwritten."""
    if len(x) == 1:
        return _iterate_one(x[0], coefficients, eps).unsqueeze(0)
    x.div_(torch.linalg.vector_norm(_row_norms(x), dim=-2, keepdim=True) + eps)
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def _iterate_one(x: Tensor, coefficients: Iterable[Coefficients], eps: float) -> Tensor:
    """The same on (rows, cols), which is faster than a batch of one; the result lies in memory as `x` does."""
    turned = not x.is_contiguous()  # the transpose is as good: its gram matrix is the same, multiplied from the right
    x = x.mT if turned else x
    x.div_(torch.linalg.vector_norm(_row_norms(x)) + eps)
    for a, b, c in coefficients:
        gram = torch.mm(x.mT, x) if turned else torch.mm(x, x.mT)
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, x, gram, beta=a) if turned else torch.addmm(x, gram, x, beta=a)
    return x.mT if turned else x


def _row_norms(x: Tensor) -> Tensor:
    # In one go, PyTorch's CPU norm of millions of float32 is off by 4e-5.
    precise = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
