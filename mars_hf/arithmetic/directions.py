"""Turn the first moments of whole matrices into directions: Newton-Schulz, its rows, and the scale of the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf._compat import cpu_multiplies_bfloat16
from mars_hf.arithmetic import matrix_layouts, newton_schulz
from mars_hf.arithmetic.formulas import parse_dtype
from mars_hf.arithmetic.matrix_layouts import MatrixLayout
from mars_hf.arithmetic.newton_schulz import coefficients_of, orthogonalize
from mars_hf.arithmetic.update_rules import update_rule


class NewtonSchulz(NamedTuple):
    """How one parameter's first moment becomes its direction; without a layout its shape decides."""

    update_scale: Callable[[int, int], float]
    layout: MatrixLayout | None
    coefficients: tuple[Any, ...]
    eps: float
    dtype: torch.dtype
    row_beta: float | None = None  # see `normalize_rows`; None leaves rows as they are
    products: Any = None  # see `newton_schulz.orthogonalize`


def newton_schulz_of(group: Mapping[str, Any], dtype: torch.dtype, products: Any = None) -> NewtonSchulz:
    """Return the settings for the parameters of a group, whose rule orthogonalizes."""
    rule = update_rule(group)
    assert rule.update_scale is not None
    layout = None if group["layout"] is None else MatrixLayout(**group["layout"])
    coefficients = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    row_beta = group["normalize_rows"]
    return NewtonSchulz(rule.update_scale, layout, coefficients, rule.norm_eps(group), dtype, row_beta, products)


def count_rows(group: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Return how many rows have a state, in a parameter of this shape; 0 if they are not normalized."""
    if group["normalize_rows"] is None or not update_rule(group).orthogonalizes:
        return 0
    layout = matrix_layouts.of_shape(shape) if group["layout"] is None else MatrixLayout(**group["layout"])
    return matrix_layouts.count_rows(shape, layout)


def iteration_dtype(group: Mapping[str, Any], param: Tensor, device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: `ns_dtype`; left out, float64 for float64 parameters, else the device's.

    Where bfloat16 is emulated, on CPUs without instructions for it and NVIDIA's GPUs before the A100, that is float32;
    else bfloat16. `device` does the work.
    """
    if group["ns_dtype"] is not None:
        return parse_dtype(group["ns_dtype"])
    if param.dtype == torch.float64:
        return torch.float64
    if device.type == "cpu":
        is_emulated = not cpu_multiplies_bfloat16()
    elif device.type == "cuda" and torch.version.hip is None:
        is_emulated = torch.cuda.get_device_capability(device) < (8, 0)
    else:
        is_emulated = False
    return torch.float32 if is_emulated else torch.bfloat16


def compute_directions(
    momenta: Sequence[Tensor],
    settings: Sequence[NewtonSchulz],
    out_dtype: torch.dtype,
    row_avg_sqs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Orthogonalize whole first moments, each with its settings, and multiply them by their scale.

    Matrices of one shape and the same settings go through Newton-Schulz together. The scale is applied in the dtype of
    the results, so the iteration's result is rounded once.

    Args:
        momenta: whole parameters' first moments; not modified.
        settings: one a moment.
        out_dtype: of the results.
        row_avg_sqs: running means of the squares of each one's rows, modified; empty tensors where rows are left, and
            none at all if all are.

    Returns:
        New tensors with the shapes and strides of `momenta`.
    """
    layouts = [each.layout or matrix_layouts.of_shape(m.shape) for m, each in zip(momenta, settings, strict=True)]
    by_iteration: dict[tuple[Any, ...], list[int]] = {}
    for position, setting in enumerate(settings):
        key = (setting.coefficients, setting.eps, setting.dtype, setting.products)
        by_iteration.setdefault(key, []).append(position)
    rows = row_avg_sqs or [torch.empty(0, device="cpu")] * len(momenta)
    results = list(momenta)
    for (coefficients, eps, dtype, products), positions in by_iteration.items():
        matrices: list[Tensor] = []
        for position in positions:
            matrices += _matrices_in(momenta[position], layouts[position])
        # Writing the directions converts: a second copy would be the peak of a step's memory.
        orthogonal = iter(orthogonalize(matrices, coefficients=coefficients, eps=eps, dtype=dtype, products=products))
        for position in positions:
            results[position] = torch.empty_like(momenta[position], dtype=out_dtype)
            views = matrix_layouts.views(results[position], layouts[position])
            _write_direction(views, orthogonal, settings[position], rows[position])
    return results


def _write_direction(
    views: Sequence[Tensor], orthogonal: Iterator[Tensor], setting: NewtonSchulz, row_avg_sq: Tensor
) -> None:
    """Write the next orthogonalized matrices, with their rows normalized if asked for and scaled, into views."""
    first_row = 0
    for view in views:
        matrix = next(orthogonal)
        scale = setting.update_scale(*matrix.shape[-2:])
        if setting.row_beta is not None:
            rows = matrix.shape[:-1]
            of_rows = row_avg_sq[first_row : first_row + rows.numel()]
            matrix = normalize_rows(matrix, of_rows.view(rows), setting.row_beta)
            first_row += rows.numel()
        view.copy_(matrix.reshape(view.shape)).mul_(scale)


def normalize_rows(matrix: Tensor, row_avg_sq: Tensor, beta: float) -> Tensor:
    """Divide each row by the root of a running mean of its squares, and bring the matrix back to its norm.

    Args:
        matrix: (..., rows, columns); not modified.
        row_avg_sq: (..., rows), the running means, in the dtype of the arithmetic; modified.
        beta: its decay rate.

    Source: Algorithm 1 of arXiv 2510.05491; the norm, which the paper sets to 0.2 sqrt(rows columns), as in its code.
    """
    wide = matrix.to(row_avg_sq.dtype)
    # v_t = β v_{t-1} + (1 - β) mean(O²), of each row; no correction of bias, which the norm would undo.
    row_avg_sq.lerp_(wide.square().mean(-1), 1 - beta)
    normalized = wide / (row_avg_sq.sqrt() + 1e-10).unsqueeze(-1)
    before = torch.linalg.matrix_norm(wide, keepdim=True)
    after = torch.linalg.matrix_norm(normalized, keepdim=True)
    return normalized * (before / after.clamp_min(1e-30))


def _matrices_in(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """Return the (out, in) matrices in a parameter-shaped tensor."""
    views = matrix_layouts.views(tensor, layout)
    shapes = matrix_layouts.matrix_shapes(tensor.shape, layout)
    return [view.reshape(shape) for view, shape in zip(views, shapes, strict=True)]


def flops(
    shape: Sequence[int],
    layout: MatrixLayout,
    coefficients: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the multiplications and additions of Newton-Schulz on a parameter of this shape."""
    total = 0.0
    for *batch, rows, columns in matrix_layouts.matrix_shapes(shape, layout):
        total += math.prod(batch) * newton_schulz.flops(rows, columns, coefficients, dtype, device)
    return total
