"""The (out, in) matrices in a parameter: orthogonalization and its scale depend on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class MatrixLayout:
    """Describe the (out, in) matrices in a parameter of two or more dimensions.

    Attributes:
        transposed: the parameter is stored (in, out): Conv1D of transformers, transposed convolutions, some experts.
        parts: sizes of fused projections along the output dimension, each a matrix of its own; None for one matrix.
            If they add up to a fraction of that dimension, they repeat: (d, d, d) with 3 heads of d d d rows each is
            query, key and value of the first head, then of the second, and so on.
        batched: the first dimension counts matrices (experts). Otherwise all dimensions but the output merge: a
            convolution (out, in, height, width) is a matrix (out, in * height * width).
    """

    transposed: bool = False
    parts: tuple[int, ...] | None = None
    batched: bool = False


def to_plain(value: MatrixLayout | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a layout as parameter groups keep it: a dict of its fields, which any checkpoint can hold.

    Raises:
        TypeError: an unknown field.
        ValueError: a field with a value of another type.
    """
    if value is None:
        return None
    layout = value if isinstance(value, MatrixLayout) else MatrixLayout(**value)
    parts = None if layout.parts is None else tuple(layout.parts)
    flags_fit = isinstance(layout.transposed, bool) and isinstance(layout.batched, bool)
    parts_fit = parts is None or _are_sizes(parts)
    if not flags_fit or not parts_fit:
        raise ValueError(f"{layout}: transposed and batched are True or False, parts are sizes > 0")
    return {"transposed": layout.transposed, "parts": parts, "batched": layout.batched}


def _are_sizes(parts: tuple[Any, ...]) -> bool:
    if not parts:
        return False
    return all(isinstance(size, int) and size > 0 for size in parts)


def of_shape(shape: Sequence[int]) -> MatrixLayout:
    """Return the default layout for a shape: three dimensions are a batch of (out, in) matrices."""
    return MatrixLayout(batched=len(shape) == 3)


def check_shape(shape: Sequence[int], layout: MatrixLayout) -> None:
    """Raise ValueError unless a parameter of this shape can have this layout."""
    out_dim = int(layout.batched) + int(layout.transposed)
    if len(shape) < 2 + int(layout.batched):
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: too few dimensions")
    out = shape[out_dim]
    if layout.parts is not None and out % sum(layout.parts):
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: the parts do not fit its {out} outputs")


def matrix_shapes(shape: Sequence[int], layout: MatrixLayout) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter: (out, in), or (experts, out, in) if batched."""
    batch_dims = int(layout.batched)
    batch, rest = list(shape[:batch_dims]), list(shape[batch_dims:])
    if layout.transposed:
        rest[0], rest[1] = rest[1], rest[0]
    out, cols = rest[0], math.prod(rest[1:])
    if layout.parts is None:
        return [(*batch, out, cols)]
    repeats = out // sum(layout.parts)
    return [(*batch, repeats * size, cols) for size in layout.parts]


def count_rows(shape: Sequence[int], layout: MatrixLayout) -> int:
    """Return the number of rows, or outputs, of all matrices in a parameter."""
    return sum(math.prod(matrix[:-1]) for matrix in matrix_shapes(shape, layout))


def views(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """Return the parts of a parameter-shaped tensor as writable views.

    Returns:
        One view per part, with the elements of its matrix in order but unmerged dimensions: (experts, out, in),
        (out, in, height, width), and (repeats, size, in) for fused projections. `reshape` to one of `matrix_shapes`
        makes a matrix of it.
    """
    out_dim = int(layout.batched)
    if layout.transposed:
        tensor = tensor.transpose(out_dim, out_dim + 1)
    if layout.parts is None:
        return [tensor]
    rows = sum(layout.parts)
    repeats = tensor.shape[out_dim] // rows
    sequence = tensor.unflatten(out_dim, (repeats, rows))
    return list(sequence.split(layout.parts, dim=out_dim + 1))
