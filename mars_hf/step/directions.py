"""Turn first moments into the directions of mars-shampoo and mars-m: orthogonalized matrices times their scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mars_hf import matrix_layouts
from mars_hf._compat import cpu_multiplies_bfloat16
from mars_hf.matrix_layouts import MatrixLayout
from mars_hf.newton_schulz import MAX_ELEMENTS, Coefficients, muon_scale, orthogonalize, shampoo_scale
from mars_hf.settings import dtype_of, ns_coefficients

_SCALES = {"mars-shampoo": shampoo_scale, "mars-m": muon_scale}
_MUON_EPS = 1e-7
# The allocator reuses memory for temporary tensors of up to 32 MB; larger ones cost a page fault every 4 KB.
CHUNK_CPU = 2**22


@dataclass(frozen=True)
class Settings:
    """Describe how one parameter's first moment becomes its direction.

    Attributes:
        rule: `"mars-shampoo"` or `"mars-m"`; their scales differ.
        layout: the parameter's layout.
        coefficients: Newton-Schulz coefficients, one triple per step.
        eps: added to the norm of each matrix.
        dtype: dtype of the iteration.
    """

    rule: str
    layout: MatrixLayout
    coefficients: tuple[Coefficients, ...]
    eps: float
    dtype: torch.dtype


def settings_of(group: Mapping[str, Any], param: Tensor) -> Settings:
    """Return the settings of a parameter in an optimizer's group.

    mars-shampoo orthogonalizes m / (1 - beta1). Newton-Schulz normalizes its input, so only eps sees the factor: eps is
    multiplied by 1 - beta1 instead.
    """
    rule = group["mars_type"]
    eps = {"mars-m": _MUON_EPS, "mars-shampoo": group["eps"] * (1 - group["betas"][0])}[rule]
    layout = matrix_layouts.from_plain(group["layout"]) or matrix_layouts.of_shape(param.shape)
    return Settings(rule, layout, ns_coefficients(group), float(eps), iteration_dtype(group, param))


def iteration_dtype(group: Mapping[str, Any], param: Tensor, device: torch.device | None = None) -> torch.dtype:
    """Return the dtype of the iteration: `ns_dtype`; left out, float64 for float64 parameters, else the device's.

    A CPU without bfloat16 instructions takes float32, every other device bfloat16. `device` does the work; None means
    the parameter's.
    """
    if group["ns_dtype"] is not None:
        return dtype_of(group["ns_dtype"])
    if param.dtype == torch.float64:
        return torch.float64
    emulates = (device or param.device).type == "cpu" and not cpu_multiplies_bfloat16()
    return torch.float32 if emulates else torch.bfloat16


def directions(
    momenta: Mapping[int, Tensor], settings: Mapping[int, Settings], *, out_dtype: torch.dtype = torch.float32
) -> dict[int, Tensor]:
    """Orthogonalize whole first moments and multiply them by their scale.

    Matrices of one shape and the same settings go through Newton-Schulz together, whichever parameters they belong to.
    The iteration uses the settings' dtype, also inside autocast.

    Args:
        momenta: m of each parameter, by any key: the parameter's shape, any strides, floating point; not modified.
        settings: settings under the same keys.
        out_dtype: dtype of the results; the scale is applied in it, so the iteration's result is rounded once.

    Returns:
        New tensors with the shapes and strides of `momenta`. Peak memory adds their matrices in the iteration's dtype
        and the temporaries of `orthogonalize`.
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
    """Return the multiplications and additions of Newton-Schulz on a parameter of this shape."""
    total = 0.0
    for matrix in matrix_layouts.matrix_shapes(shape, layout):
        small, large = sorted(matrix[-2:])
        count = matrix[0] if layout.batched else 1
        # x xᵀ, its product with x, and the square of a (small, small) matrix.
        total += count * steps * (4.0 * small * small * large + 2.0 * small**3)
    return total


class Chunks:
    """Sort parameters into chunks that are orthogonalized one after the other.

    A chunk holds parameters with matrices of the same shapes, from all groups, up to `limit` elements together. This
    keeps calls of Newton-Schulz few and temporary memory independent of the model's size.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start empty; `limit` is in elements, and None means `MAX_ELEMENTS`, or `CHUNK_CPU` on CPUs."""
        self._limit = limit
        self._sizes: dict[tuple[Any, ...], tuple[int, int]] = {}

    def of(self, group: Mapping[str, Any], param: Tensor) -> tuple[Any, ...]:
        """Return the key of the next parameter's chunk."""
        layout = matrix_layouts.from_plain(group["layout"]) or matrix_layouts.of_shape(param.shape)
        shapes = frozenset(tuple(sorted(shape[-2:])) for shape in matrix_layouts.matrix_shapes(param.shape, layout))
        kind = (param.device, param.dtype, iteration_dtype(group, param), shapes)
        number, elements = self._sizes.get(kind, (0, 0))
        limit = self._limit or (CHUNK_CPU if param.device.type == "cpu" else MAX_ELEMENTS)
        if elements and elements + param.numel() > limit:
            number, elements = number + 1, 0
        self._sizes[kind] = number, elements + param.numel()
        return (*kind, number)
