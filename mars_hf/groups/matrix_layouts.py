"""Turn parameters into the matrices to orthogonalize, and find the parameters of a model to leave out.

Orthogonalization and its scale depend on which dimension is the output, and on what counts as one matrix. A
`MatrixLayout` says both; `of_model` derives it from the modules of a model.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from mars_hf.distributed.placement import shape_of
from mars_hf.groups import heads, known_models


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
        stacked: the first dimension holds this many matrices below one another, (experts * out, in).
    """

    transposed: bool = False
    parts: tuple[int, ...] | None = None
    batched: bool = False
    stacked: int = 1


def to_plain(layout: MatrixLayout | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a layout as parameter groups keep it: a dict of its fields, which any checkpoint can hold."""
    found = from_plain(layout)
    if found is None:
        return None
    fields = asdict(found)
    if found.stacked == 1:
        del fields["stacked"]  # checkpoints older than this field lack it
    return fields


def from_plain(value: MatrixLayout | Mapping[str, Any] | None) -> MatrixLayout | None:
    """Return the layout that `to_plain` wrote; missing fields have their defaults.

    Raises:
        TypeError: an unknown field, or a value of another type.
        ValueError: `parts` are not sizes, or `stacked` is not a number of matrices.
    """
    if value is None:
        return None
    layout = value if isinstance(value, MatrixLayout) else MatrixLayout(**value)
    if not isinstance(layout.transposed, bool) or not isinstance(layout.batched, bool):
        raise TypeError("transposed and batched are True or False")
    if isinstance(layout.stacked, bool) or not isinstance(layout.stacked, int) or layout.stacked < 1:
        raise ValueError(f"stacked={layout.stacked!r}: an integer > 0 is needed")
    if layout.batched and layout.stacked > 1:
        raise ValueError(f"batched=True and stacked={layout.stacked!r} are two ways to hold several matrices; give one")
    if layout.parts is None:
        return layout
    parts = tuple(layout.parts)
    if not parts or not all(isinstance(size, int) and size > 0 for size in parts):
        raise ValueError(f"parts={parts!r}: sizes > 0 are needed")
    return replace(layout, parts=parts)


def of_shape(shape: Sequence[int]) -> MatrixLayout:
    """Return the default layout for a shape: three dimensions are a batch of (out, in) matrices."""
    return MatrixLayout(batched=len(shape) == 3)


def check(shape: Sequence[int], layout: MatrixLayout) -> None:
    """Raise ValueError unless a parameter of this shape can have this layout."""
    if len(shape) < 2 + layout.batched:
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: too few dimensions")
    if shape[0] % layout.stacked:
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: {shape[0]} is no multiple of `stacked`")
    shape, layout = _unstacked(shape, layout)
    out = shape[layout.batched + layout.transposed]
    if layout.parts is not None and out % sum(layout.parts):
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: the parts do not fit its {out} outputs")


def _unstacked(shape: Sequence[int], layout: MatrixLayout) -> tuple[Sequence[int], MatrixLayout]:
    """Return shape and layout of the same matrices, with a dimension that counts stacked ones."""
    if layout.stacked == 1:
        return shape, layout
    return (layout.stacked, shape[0] // layout.stacked, *shape[1:]), replace(layout, batched=True, stacked=1)


def views(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """Return the parts of a parameter-shaped tensor as writable views.

    Returns:
        One view per part, with the elements of `split`'s matrices in the same order but unmerged dimensions:
        (experts, out, in), (out, in, height, width), and (repeats, size, in) for fused projections.
    """
    shape, layout = _unstacked(tensor.shape, layout)
    if len(shape) > tensor.ndim:
        tensor = tensor.unflatten(0, shape[:2])
    out = int(layout.batched)
    if layout.transposed:
        tensor = tensor.transpose(out, out + 1)
    if layout.parts is None:
        return [tensor]
    sequence = tensor.unflatten(out, (tensor.shape[out] // sum(layout.parts), sum(layout.parts)))
    return list(sequence.split(layout.parts, dim=out + 1))


def matrix_shapes(shape: Sequence[int], layout: MatrixLayout) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter: (out, in), or (experts, out, in) if batched."""
    shape, layout = _unstacked(shape, layout)
    batch, rest = list(shape[: int(layout.batched)]), list(shape[int(layout.batched) :])
    if layout.transposed:
        rest[0], rest[1] = rest[1], rest[0]
    out, cols = rest[0], math.prod(rest[1:])
    parts = layout.parts or (out,)
    repeats = out // sum(parts) if out else 0
    return [(*batch, repeats * rows, cols) for rows in parts]


def split(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """Return the matrices in a parameter-shaped tensor.

    Returns:
        One (out, in) matrix per part, or (experts, out, in) if batched. They are views, except for parts that repeat
        and for some transposed or channels-last convolutions, whose strides do not allow it.
    """
    shapes = matrix_shapes(tensor.shape, layout)
    return [view.reshape(shape) for view, shape in zip(views(tensor, layout), shapes, strict=True)]


def of_model(
    model: nn.Module, *, split_fused: Literal["auto", "none"] | Mapping[str, Sequence[int]] = "auto"
) -> dict[str, MatrixLayout]:
    """Return the layouts of all parameters with two or more dimensions, embeddings included.

    Args:
        model: any module.
        split_fused: projections to split into their parts.

            - `"auto"`: known fused ones (table `_FUSED` in `known_models`). Query, key and value in transformers'
              GPT-2, GPTBigCode, GPT-NeoX, BLOOM, Falcon, Persimmon, CodeGen, MPT, DBRX, ModernBERT, Phi-3 and 4,
              MiniMax, Bark and DeBERTa, in any module's `qkv` with three times as many outputs as inputs, and in
              `nn.MultiheadAttention`; gate and up in `gate_up_proj`. Interleaved ones (a head's query, key and value
              side by side) are split the way the model computes them. Anything unknown stays one matrix.
            - `"none"`: none, as in reference implementations.
            - a mapping of shell patterns of parameter names to sizes along the output dimension (see
              `MatrixLayout.parts`): these only. The first match counts; each pattern must match a parameter.

    Returns:
        A mapping of names, as in `model.named_parameters()`, to layouts.

    Raises:
        ValueError: sizes that do not fit, a pattern that matches nothing, or a `split_fused` of another type.
    """
    if isinstance(split_fused, str) and split_fused not in ("auto", "none"):
        raise ValueError(f"split_fused={split_fused!r}: 'auto', 'none' or a mapping of name patterns to sizes")
    patterns = {} if isinstance(split_fused, str) else split_fused
    modules = dict(model.named_modules())
    places = known_models.owners(model)
    layouts: dict[str, MatrixLayout] = {}
    used: set[str] = set()
    for name, param in model.named_parameters():
        shape = shape_of(param)
        if len(shape) < 2:
            continue
        path, _, leaf, found = _reading(known_models.places_of(places, model, name, param), shape)
        layout = of_shape(shape) if isinstance(found, str) else MatrixLayout(**found)
        parts: Sequence[int] | None = None
        if split_fused == "auto":
            parts = known_models.fused_parts(modules, path, leaf, matrix_shapes(shape, layout)[0])
        matched = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        used.update(matched)
        if matched:
            parts = patterns[matched[0]]
        if parts is not None:
            _check_parts(name, parts, matrix_shapes(shape, layout)[0][-2])
        layouts[name] = replace(layout, parts=None if parts is None else tuple(parts))
    _reject_unused("split_fused", patterns, used, layouts)
    return layouts


def left_out(model: nn.Module, *, projections: Iterable[str] = ()) -> dict[str, str]:
    """Return the parameters of two or more dimensions that must not be orthogonalized, with reasons.

    Weights that multiply activations are orthogonalized: those of linear layers, ungrouped convolutions, attention,
    recurrent layers and experts (see `known_models.reading`). Everything else is left out: embeddings, tables of
    positions and tokens, scales, single rows and columns, and parameters of unknown modules. So are heads, which turn
    hidden states into scores, and parameters tied to a head or an embedding.

    Args:
        model: any module.
        projections: shell patterns of names to treat as weights if their module is unknown.

    Returns:
        A mapping of names, as in `model.named_parameters()`, to reasons.
    """
    outside = {**heads.embeddings_and_heads(model), **known_models.adapters_of_experts(model)}
    places = known_models.owners(model)
    reasons: dict[str, str] = {}
    for name, param in model.named_parameters():
        shape = shape_of(param)
        if len(shape) < 2:
            continue
        _, module, _, found = _reading(known_models.places_of(places, model, name, param), shape)
        stated = any(fnmatch.fnmatchcase(name, pattern) for pattern in projections)
        if stated and found == known_models.unknown(module):
            found = asdict(of_shape(shape))
        if id(param) in outside:
            reasons[name] = outside[id(param)]
        elif isinstance(found, str):
            reasons[name] = found
        elif any(min(matrix[-2:]) <= 1 for matrix in matrix_shapes(shape, MatrixLayout(**found))):
            reasons[name] = "a single row or column"
    return reasons


def _reading(
    places: Sequence[tuple[str, nn.Module, str]], shape: Sequence[int]
) -> tuple[str, nn.Module, str, known_models.Fields | str]:
    """Return the place where a parameter multiplies activations, and how; otherwise its first place and what it is."""
    readings = [(*place, known_models.reading(place[1], place[2], shape)) for place in places]
    return next((found for found in readings if not isinstance(found[-1], str)), readings[0])


def _check_parts(name: str, parts: Sequence[int], out: int) -> None:
    if not parts or min(parts) < 1 or out % sum(parts):
        raise ValueError(f"split_fused: sizes {tuple(parts)} do not fit the {out} outputs of {name!r}")


def _reject_unused(option: str, patterns: Iterable[str], used: set[str], names: Iterable[str]) -> None:
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        known = ", ".join(map(repr, list(names)[:3]))
        raise ValueError(f"{option}: {unused!r} match no parameter of two or more dimensions; names are like {known}")
