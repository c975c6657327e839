"""Say which (out, in) matrices a parameter holds.

Orthogonalization and its scale depend on which dimension is the output, and on what counts as one matrix. Types of
modules decide, and for fused projections the table `_FUSED`. A parameter of any other module is not known to multiply
activations.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mars_hf.distributed.tensors import shape_of

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


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
    fits = parts is None or (parts and all(isinstance(size, int) and size > 0 for size in parts))
    if not (fits and isinstance(layout.transposed, bool) and isinstance(layout.batched, bool)):
        raise ValueError(f"{layout}: transposed and batched are True or False, parts are sizes > 0")
    return {"transposed": layout.transposed, "parts": parts, "batched": layout.batched}


def of_shape(shape: Sequence[int]) -> MatrixLayout:
    """Return the default layout for a shape: three dimensions are a batch of (out, in) matrices."""
    return MatrixLayout(batched=len(shape) == 3)


def check(shape: Sequence[int], layout: MatrixLayout) -> None:
    """Raise ValueError unless a parameter of this shape can have this layout."""
    if len(shape) < 2 + layout.batched:
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: too few dimensions")
    out = shape[layout.batched + layout.transposed]
    if layout.parts is not None and out % sum(layout.parts):
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: the parts do not fit its {out} outputs")


def matrix_shapes(shape: Sequence[int], layout: MatrixLayout) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices in a parameter: (out, in), or (experts, out, in) if batched."""
    batch, rest = list(shape[: int(layout.batched)]), list(shape[int(layout.batched) :])
    if layout.transposed:
        rest[0], rest[1] = rest[1], rest[0]
    parts = layout.parts or (rest[0],)
    repeats = rest[0] // sum(parts) if rest[0] else 0
    return [(*batch, repeats * rows, math.prod(rest[1:])) for rows in parts]


def views(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """Return the parts of a parameter-shaped tensor as writable views.

    Returns:
        One view per part, with the elements of its matrix in order but unmerged dimensions: (experts, out, in),
        (out, in, height, width), and (repeats, size, in) for fused projections. `reshape` to one of `matrix_shapes`
        makes a matrix of it.
    """
    out = int(layout.batched)
    if layout.transposed:
        tensor = tensor.transpose(out, out + 1)
    if layout.parts is None:
        return [tensor]
    sequence = tensor.unflatten(out, (tensor.shape[out] // sum(layout.parts), sum(layout.parts)))
    return list(sequence.split(layout.parts, dim=out + 1))


def of_model(
    model: nn.Module, split_fused: str | Mapping[str, Sequence[int]] = "auto"
) -> dict[nn.Parameter, MatrixLayout | str]:
    """Return the layout of each trainable parameter with two or more dimensions, or why it is not orthogonalized.

    Args:
        model: any module.
        split_fused: projections to split into their parts.

            - `"auto"`: those of the table `_FUSED`, any `qkv` with three times as many outputs as inputs, and gate and
              up in `gate_up_proj`, the way the model computes them. Anything else stays one matrix.
            - `"none"`: none, as in reference implementations.
            - a mapping of shell patterns of parameter names to sizes along the output dimension (see
              `MatrixLayout.parts`): these only, those of unknown modules too. The first match counts.

    Raises:
        ValueError: sizes that do not fit, or a pattern that matches nothing.
    """
    patterns = {} if isinstance(split_fused, str) else split_fused
    modules = dict(model.named_modules(remove_duplicate=False))
    # One tensor holds the adapters of all experts: side by side in lora_A, interleaved along the inputs in lora_B.
    of_experts = {
        param
        for module in modules.values()
        if "ParamWrapper" in _classes(module) and getattr(module, "num_experts", 1) > 1
        for param in (*module.lora_A.parameters(), *module.lora_B.parameters())
    }
    layouts: dict[nn.Parameter, MatrixLayout | str] = {}
    chosen: dict[str, str | None] = {}  # pattern of each parameter, by name
    for path, module in modules.items():
        for leaf, param in module.named_parameters(recurse=False):
            shape = shape_of(param)
            if len(shape) < 2 or not param.requires_grad:
                continue
            name = f"{path}.{leaf}" if path else leaf
            layout = "adapters of several experts" if param in of_experts else _of_parameter(module, leaf, shape)
            if isinstance(layout, MatrixLayout) and min(matrix_shapes(shape, layout)[0][-2:]) <= 1:
                layout = "a single row or column"
            pattern = chosen[name] = next((each for each in patterns if fnmatch.fnmatchcase(name, each)), None)
            if pattern is not None:
                layout = replace(of_shape(shape) if isinstance(layout, str) else layout, parts=tuple(patterns[pattern]))
                check(shape, layout)
            elif split_fused == "auto" and isinstance(layout, MatrixLayout):
                layout = replace(layout, parts=_fused(modules, path, leaf, matrix_shapes(shape, layout)[0]))
            if isinstance(layouts.get(param, ""), str):  # of tied places, one that multiplies activations counts
                layouts[param] = layout
    if unused := [pattern for pattern in patterns if pattern not in chosen.values()]:
        near = ", ".join(map(repr, difflib.get_close_matches(unused[0].strip("*"), chosen, n=3, cutoff=0.0)))
        raise ValueError(f"split_fused: {unused!r} match no parameter of two or more dimensions; names are like {near}")
    return layouts


def _classes(module: Any) -> list[str]:
    """Return the names of a module's class and its bases: FSDP2 and parametrizations derive new classes."""
    return [base.__name__ for base in type(module).__mro__]


def _of_parameter(module: nn.Module, leaf: str, shape: Sequence[int]) -> MatrixLayout | str:
    """Return how a module multiplies activations with its parameter, or what the parameter is."""
    classes = _classes(module)
    if leaf == "weight" and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if leaf == "weight" and isinstance(module, _CONVOLUTIONS):
        if module.groups > 1:
            return "depthwise or grouped convolution"
        return MatrixLayout(transposed=module.transposed)
    if leaf == "weight" and "Conv1D" in classes:  # of transformers
        return MatrixLayout(transposed=True)
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    is_linear = leaf == "weight" and (isinstance(module, nn.Linear) or tuple(shape) == sizes)  # sizes: other libraries
    if is_linear or (isinstance(module, nn.MultiheadAttention) and leaf.endswith("proj_weight")):
        return MatrixLayout()
    if len(shape) == 3 and any(name.endswith("Experts") for name in classes):
        return MatrixLayout(batched=True, transposed=getattr(module, "is_transposed", "Llama4TextExperts" in classes))
    return f"{type(module).__name__} is not known to multiply activations with it"


def _thirds(module: Any, out: int) -> tuple[int, ...]:
    return (out // 3,) * 3


def _thirds_of_each_head(attention: Any, out: int) -> tuple[int, ...]:
    heads = getattr(attention, "num_attention_heads", None) or getattr(attention, "num_heads", None)
    return (out // (3 * (heads or attention.config.num_attention_heads)),) * 3


def _grouped_query(attention: Any, out: int) -> tuple[int, ...]:
    query = attention.config.num_attention_heads * attention.head_dim
    return (query, (out - query) // 2, (out - query) // 2)


# Fused projection and the class that holds it, to sizes along the output dimension. The class decides: one name stands
# for different orders in different models.
_FUSED: dict[tuple[str, str], Callable[[Any, int], tuple[int, ...] | None]] = {
    ("in_proj_weight", "MultiheadAttention"): _thirds,
    ("c_attn", "GPT2Attention"): lambda a, out: (out // 2,) * 2 if a.is_cross_attention else _thirds(a, out),
    ("query_key_value", "GPTNeoXAttention"): _thirds_of_each_head,
    ("query_key_value", "BloomAttention"): _thirds_of_each_head,
    ("qkv_proj", "Phi3Attention"): _grouped_query,
    ("qkv_proj", "CodeGenAttention"): lambda a, out: (out // 12,) * 3,  # in four blocks, one per logical TPU core
    ("Wqkv", "MptAttention"): _thirds,
    ("Wqkv", "ModernBertAttention"): _thirds,
    ("Wi", "ModernBertMLP"): lambda mlp, out: (out // 2,) * 2,
    ("in_proj", "DisentangledSelfAttention"): _thirds_of_each_head,
}


def _fused(modules: Mapping[str, nn.Module], path: str, leaf: str, matrix: Sequence[int]) -> tuple[int, ...] | None:
    """Return the sizes of the projections fused in a weight of shape `matrix`; None for a single one.

    LoRA's B has the outputs of the layer that it adapts, and is split as its weight.
    """
    out, cols = matrix[-2:]
    adapted, is_adapter, _ = path.rpartition(".lora_B.")
    if is_adapter:
        path, cols = adapted, getattr(modules[adapted], "in_features", cols)
        leaf = "in_proj_weight" if isinstance(modules[path].base_layer, nn.MultiheadAttention) else leaf
    holder, _, projection = path.rpartition(".") if leaf == "weight" else (path, "", leaf)
    module = modules[holder]
    if projection == "gate_up_proj":
        return (out // 2,) * 2 if getattr(module, "is_concatenated", True) else (1, 1)
    if projection == "qkv" and out == 3 * cols:
        return _thirds(module, out)
    sizes = next((_FUSED[key] for kind in _classes(module) if (key := (projection, kind)) in _FUSED), None)
    return None if sizes is None else sizes(module, out)
