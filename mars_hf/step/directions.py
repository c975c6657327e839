"""From first moments to the directions of mars-shampoo and mars-m: orthogonalized matrices times their scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mars_hf.arithmetic.newton_schulz import MAX_ELEMENTS, Coefficients, muon_scale, orthogonalize, shampoo_scale
from mars_hf.groups import matrix_layouts
from mars_hf.groups.matrix_layouts import MatrixLayout
from mars_hf.groups.settings import ns_coefficients
from mars_hf.groups.values import dtype_of

_SCALES = {"mars-shampoo": shampoo_scale, "mars-m": muon_scale}
_MUON_EPS = 1e-7
# Temporary tensors of up to 32 MB are taken from memory that the process has; larger ones cost a page fault every 4 KB.
CHUNK_CPU = 2**22


@dataclass(frozen=True)
class Settings:
    """How the first moment of one parameter becomes its direction.

    Attributes:
        rule: `"mars-shampoo"` or `"mars-m"`, which have different scales.
        layout: of the parameter.
        coefficients: of Newton-Schulz, a triple a step.
        eps: added to the norm of each matrix.
        dtype: of the iteration.
    """

    rule: str
    layout: MatrixLayout
    coefficients: tuple[Coefficients, ...]
    eps: float
    dtype: torch.dtype


def settings_of(group: Mapping[str, Any], param: Tensor) -> Settings:
    """The settings of a parameter of one of the optimizer's groups.

    mars-shampoo orthogonalizes m / (1 - beta1); as only the norm's eps tells that from m, eps takes the factor.
    """
    rule = group["mars_type"]
    eps = _MUON_EPS if rule == "mars-m" else group["eps"] * (1 - group["betas"][0])
    layout = matrix_layouts.from_plain(group["layout"]) or matrix_layouts.of_shape(param.shape)
    return Settings(rule, layout, ns_coefficients(group), float(eps), iteration_dtype(group, param))


def iteration_dtype(group: Mapping[str, Any], param: Tensor) -> torch.dtype:
    """The dtype of the iteration: `ns_dtype`, or bfloat16, and float64 for float64 parameters."""
    if group["ns_dtype"] is not None:
        return dtype_of(group["ns_dtype"])
    return torch.float64 if param.dtype == torch.float64 else torch.bfloat16


def directions(
    momenta: Mapping[int, Tensor], settings: Mapping[int, Settings], *, out_dtype: torch.dtype = torch.float32
) -> dict[int, Tensor]:
    """Orthogonalize whole first moments and multiply them by their scale.

    All matrices of one shape, of whichever parameters, go through Newton-Schulz together where their settings agree, in
    the dtype these name, also inside autocast.

    Args:
        momenta: m of each parameter, by any key; shape of the parameter, any strides, floating point; not modified.
        settings: of the same keys.
        out_dtype: of the result; the scale is applied in it, so that the result of the iteration is rounded once.

    Returns:
        New tensors of the shapes and strides of `momenta`. At its peak this holds, besides those, their matrices in the
        iteration's dtype and what `orthogonalize` works on.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for key in momenta:
        own = settings[key]
        alike.setdefault((own.coefficients, own.eps, own.dtype), []).append(key)
    found = {}
    for (coefficients, eps, dtype), keys in alike.items():
        matrices = [matrix for key in keys for matrix in matrix_layouts.split(momenta[key], settings[key].layout)]
        how = {"steps": len(coefficients), "coefficients": coefficients, "eps": eps}
        with torch.autocast(matrices[0].device.type, enabled=False):
            results = iter(orthogonalize(matrices, dtype=dtype, out_dtype=dtype, **how))
        for key in keys:
            found[key] = torch.empty_like(momenta[key], dtype=out_dtype)
            for view in matrix_layouts.views(found[key], settings[key].layout):
                result = next(results)
                view.copy_(result.reshape(view.shape)).mul_(_SCALES[settings[key].rule](*result.shape[-2:]))
    return {key: found[key] for key in momenta}


def flops(shape: tuple[int, ...], layout: MatrixLayout, steps: int) -> float:
    """Multiplications and additions of Newton-Schulz on a parameter of this shape."""
    total = 0.0
    for matrix in matrix_layouts.matrix_shapes(shape, layout):
        small, large = sorted(matrix[-2:])
        count = matrix[0] if layout.batched else 1
        # x xᵀ and its product with x, and the square of a (small, small) matrix.
        total += count * steps * (4.0 * small * small * large + 2.0 * small**3)
    return total


class Chunks:
    """Sorts parameters into chunks to orthogonalize one after the other.

    In a chunk are parameters with matrices of the same shapes, from all groups, up to `limit` elements together: few
    calls of Newton-Schulz, and temporary memory that does not grow with the model.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start without any; `limit` is a number of elements, None for `MAX_ELEMENTS` or, on CPUs, `CHUNK_CPU`."""
        self._limit = limit
        self._sizes: dict[tuple[Any, ...], tuple[int, int]] = {}

    def of(self, group: Mapping[str, Any], param: Tensor) -> tuple[Any, ...]:
        """The chunk of the next parameter, told by a key."""
        layout = matrix_layouts.from_plain(group["layout"]) or matrix_layouts.of_shape(param.shape)
        shapes = frozenset(tuple(sorted(shape[-2:])) for shape in matrix_layouts.matrix_shapes(param.shape, layout))
        kind = (param.device, param.dtype, iteration_dtype(group, param), shapes)
        number, elements = self._sizes.get(kind, (0, 0))
        limit = self._limit or (CHUNK_CPU if param.device.type == "cpu" else MAX_ELEMENTS)
        if elements and elements + param.numel() > limit:
            number, elements = number + 1, 0
        self._sizes[kind] = number, elements + param.numel()
        return (*kind, number)
