"""How a parameter becomes the matrices that are orthogonalized, and which parameters of a model do not.

Orthogonalization and its scale depend on which dimension is the output, and on what counts as one matrix. A
`MatrixLayout` says both; `of_model` finds it from the modules of a model.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# Modules whose parameters turn hidden states into scores, by the last part of their name.
_HEAD = re.compile(
    r"(?:\w*_)?classifier|(?:lm|qa|v|value|reward|classification|multiple_choice)_head|head|embed_out|score|qa_outputs"
    r"|seq_relationship"
)
# Plain parameters of modules other than projections, by the module's name and theirs: tables of positions and class
# tokens, and the state matrices of state-space models, which act elementwise.
_TABLE = re.compile(r"embed[^.]*\..*|.*\.[^.]*(?:embed|token|position|A_log)[^.]*")


@dataclass(frozen=True)
class MatrixLayout:
    """How a parameter of two or more dimensions becomes (out, in) matrices.

    Attributes:
        transposed: the parameter is stored (in, out): Conv1D of transformers, transposed convolutions, some experts.
        parts: sizes along the output dimension of the projections fused in it, each a matrix of its own; None for one
            matrix. Where they add up to a fraction of that dimension they repeat: (d, d, d) with 3 heads d d d rows
            each is query, key and value of the first head, then of the second, and so on.
        batched: the first dimension counts matrices (experts). Otherwise all dimensions but the output are one: a
            convolution (out, in, height, width) is a matrix (out, in * height * width).
    """

    transposed: bool = False
    parts: tuple[int, ...] | None = None
    batched: bool = False


def shape_of(param: Tensor) -> torch.Size:
    """The parameter's own shape, also where DeepSpeed's `zero.Init` has left an empty tensor in its place."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def to_plain(layout: MatrixLayout | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a parameter group keeps of a layout: a dict of its fields, which any checkpoint can hold."""
    found = from_plain(layout)
    return None if found is None else asdict(found)


def from_plain(value: MatrixLayout | Mapping[str, Any] | None) -> MatrixLayout | None:
    """The layout that `to_plain` has written; fields left out have their defaults.

    Raises:
        TypeError: an unknown field, or a value of another kind.
        ValueError: parts that are no sizes.
    """
    if value is None:
        return None
    layout = value if isinstance(value, MatrixLayout) else MatrixLayout(**value)
    if not isinstance(layout.transposed, bool) or not isinstance(layout.batched, bool):
        raise TypeError("transposed and batched are True or False")
    if layout.parts is None:
        return layout
    parts = tuple(layout.parts)
    if not parts or not all(isinstance(size, int) and size > 0 for size in parts):
        raise ValueError(f"parts={parts!r}: sizes > 0 are needed")
    return replace(layout, parts=parts)


def of_shape(shape: Sequence[int]) -> MatrixLayout:
    """The layout of a parameter of which nothing else is known: three dimensions are a batch of (out, in) matrices."""
    return MatrixLayout(batched=len(shape) == 3)


def check(shape: Sequence[int], layout: MatrixLayout) -> None:
    """Raise ValueError unless a parameter of this shape can have this layout."""
    if len(shape) < 2 + layout.batched:
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: too few dimensions")
    out = shape[layout.batched + layout.transposed]
    if layout.parts is not None and out % sum(layout.parts):
        raise ValueError(f"{layout} for a parameter of shape {tuple(shape)}: the parts do not fit its {out} outputs")


def views(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """The parts of a parameter-shaped tensor, as views to write to.

    Returns:
        One view a part, with the elements of `split`'s matrices in the same order, but dimensions not merged:
        (experts, out, in), (out, in, height, width), and (repeats, size, in) for fused projections.
    """
    out = int(layout.batched)
    if layout.transposed:
        tensor = tensor.transpose(out, out + 1)
    if layout.parts is None:
        return [tensor]
    sequence = tensor.unflatten(out, (tensor.shape[out] // sum(layout.parts), sum(layout.parts)))
    return list(sequence.split(layout.parts, dim=out + 1))


def matrix_shapes(shape: Sequence[int], layout: MatrixLayout) -> list[tuple[int, ...]]:
    """Shapes of the matrices in a parameter of this shape: (out, in), or (experts, out, in) if batched."""
    batch, rest = list(shape[: int(layout.batched)]), list(shape[int(layout.batched) :])
    if layout.transposed:
        rest[0], rest[1] = rest[1], rest[0]
    out, cols = rest[0], math.prod(rest[1:])
    parts = layout.parts or (out,)
    repeats = out // sum(parts) if out else 0
    return [(*batch, repeats * rows, cols) for rows in parts]


def split(tensor: Tensor, layout: MatrixLayout) -> list[Tensor]:
    """The matrices in a parameter-shaped tensor.

    Returns:
        One (out, in) matrix a part, or (experts, out, in) if batched: views where strides allow it, which is always
        but for parts that repeat and for some transposed or channels-last convolutions.
    """
    shapes = matrix_shapes(tensor.shape, layout)
    return [view.reshape(shape) for view, shape in zip(views(tensor, layout), shapes, strict=True)]


def of_model(
    model: nn.Module, *, split_fused: Literal["auto", "none"] | Mapping[str, Sequence[int]] = "auto"
) -> dict[str, MatrixLayout]:
    """Layouts of all parameters with two or more dimensions, embeddings included.

    Args:
        model: any module.
        split_fused: which projections are split into their parts.

            - `"auto"`: those known to be fused (the table is `_FUSED` in this file): query, key and value in
              transformers' GPT-2, GPTBigCode, GPT-NeoX, BLOOM, Falcon, Persimmon, CodeGen, MPT, DBRX, ModernBERT,
              Phi-3 and 4, MiniMax, Bark and DeBERTa, in any module's `qkv` with three times as many outputs as
              inputs, and in `nn.MultiheadAttention`; gate and up in `gate_up_proj`. Interleaved ones (a head's query,
              key and value side by side) are taken apart as they are computed. Anything unknown stays one matrix.
            - `"none"`: nothing, as reference implementations do.
            - shell patterns of parameter names to sizes along the output dimension, see `MatrixLayout.parts`: these
              and no others. The first match counts; each pattern must match a parameter.

    Returns:
        Names, as `model.named_parameters()` gives them, to layouts.

    Raises:
        ValueError: sizes that do not fit, a pattern that matches nothing, or a `split_fused` of another kind.
    """
    if isinstance(split_fused, str) and split_fused not in ("auto", "none"):
        raise ValueError(f"split_fused={split_fused!r}: 'auto', 'none' or a mapping of name patterns to sizes")
    patterns = {} if isinstance(split_fused, str) else split_fused
    modules = dict(model.named_modules())
    layouts: dict[str, MatrixLayout] = {}
    used: set[str] = set()
    for name, param in model.named_parameters():
        shape = shape_of(param)
        if len(shape) < 2:
            continue
        owner, parametrized, _ = name.partition(".parametrizations.")
        path, _, leaf = name.rpartition(".") if not parametrized else (owner, "", "weight")
        module = modules[path]
        layout = _whole(module, shape)
        parts: Sequence[int] | None = None
        if split_fused == "auto":
            parts = _fused_parts(modules, path, leaf, matrix_shapes(shape, layout)[0])
        matched = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        used.update(matched)
        if matched:
            parts = patterns[matched[0]]
        if parts is not None:
            _check_parts(name, parts, matrix_shapes(shape, layout)[0][-2])
        layouts[name] = replace(layout, parts=None if parts is None else tuple(parts))
    _reject_unused("split_fused", patterns, used, layouts)
    return layouts


def takes_adamw(model: nn.Module, *, orthogonalize_embeddings: bool = False, adamw: Sequence[str] = ()) -> set[str]:
    """Names of the parameters with two or more dimensions that are not to be orthogonalized.

    These are embeddings (also tables held as plain parameters: positions, class tokens), what the model calls its
    output embeddings, everything tied to those, and heads: modules named `classifier`, `score`, `qa_outputs`,
    `lm_head` and the like, with all that is in them.

    Args:
        model: any module.
        orthogonalize_embeddings: leave none of these out.
        adamw: shell patterns of further names; each must match a parameter.

    Raises:
        ValueError: a pattern matches nothing.
    """
    left_out = set() if orthogonalize_embeddings else _embeddings_and_heads(model)
    names = [(name, id(param)) for name, param in model.named_parameters() if len(shape_of(param)) >= 2]
    used = {pattern for pattern in adamw for name, _ in names if fnmatch.fnmatchcase(name, pattern)}
    _reject_unused("adamw", adamw, used, [name for name, _ in names])
    return {
        name
        for name, param_id in names
        if param_id in left_out or any(fnmatch.fnmatchcase(name, pattern) for pattern in adamw)
    }


def _embeddings_and_heads(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _EMBEDDINGS) or _HEAD.fullmatch(path.rpartition(".")[2]):
            found.update(map(id, module.parameters()))
        if callable(get := getattr(module, "get_output_embeddings", None)) and (output := get()) is not None:
            found.update(map(id, output.parameters()))
    projections = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS)
    for path, module in model.named_modules():
        if isinstance(module, projections) or _is_conv1d(module):
            continue
        for leaf, param in module.named_parameters(recurse=False):
            if _TABLE.fullmatch(f"{path.rpartition('.')[2]}.{leaf}"):
                found.add(id(param))
    return found


def _whole(module: nn.Module, shape: Sequence[int]) -> MatrixLayout:
    """The layout of a module's weight, not split."""
    if _is_conv1d(module) or isinstance(module, _TRANSPOSED_CONVOLUTIONS):
        return MatrixLayout(transposed=True)
    if len(shape) != 3 or isinstance(module, (*_CONVOLUTIONS, nn.Bilinear)):
        return MatrixLayout()
    transposed = getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts")
    return MatrixLayout(transposed=bool(transposed), batched=True)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _thirds(attention: Any, out: int) -> tuple[int, ...]:
    return (out // 3,) * 3


def _thirds_of_each_head(attention: Any, out: int) -> tuple[int, ...]:
    heads = getattr(attention, "num_attention_heads", None) or getattr(attention, "num_heads", None)
    return (out // (3 * (heads or attention.config.num_attention_heads)),) * 3


def _query_and_rest(query: int, out: int) -> tuple[int, ...]:
    return (query, (out - query) // 2, (out - query) // 2)


def _gpt2(attention: Any, out: int) -> tuple[int, ...]:
    return (out // 2,) * 2 if attention.is_cross_attention else _thirds(attention, out)


def _gpt_bigcode(attention: Any, out: int) -> tuple[int, ...] | None:
    if attention.is_cross_attention:
        return None
    if attention.multi_query:
        return _query_and_rest(attention.embed_dim, out)
    return _thirds_of_each_head(attention, out)


def _falcon(attention: Any, out: int) -> tuple[int, ...]:
    if attention.new_decoder_architecture:
        size = attention.head_dim
        return (attention.num_heads // attention.num_kv_heads * size, size, size)
    if attention.multi_query:
        return _query_and_rest(attention.hidden_size, out)
    return _thirds_of_each_head(attention, out)


# Names of a fused projection and of the class it is in, to sizes along its output dimension. The same name means other
# orders in other models, so the class decides.
_FUSED: dict[tuple[str, str], Callable[[Any, int], tuple[int, ...] | None]] = {
    ("c_attn", "GPT2Attention"): _gpt2,
    ("c_attn", "DecisionTransformerGPT2Attention"): _gpt2,
    ("c_attn", "ImageGPTAttention"): _gpt2,
    ("c_attn", "GPTBigCodeAttention"): _gpt_bigcode,
    ("query_key_value", "GPTNeoXAttention"): _thirds_of_each_head,
    ("query_key_value", "GPTNeoXJapaneseAttention"): _thirds_of_each_head,
    ("query_key_value", "BloomAttention"): _thirds_of_each_head,
    ("query_key_value", "PersimmonAttention"): _thirds_of_each_head,
    ("query_key_value", "FalconAttention"): _falcon,
    ("qkv_proj", "Phi3Attention"): lambda a, out: _query_and_rest(a.config.num_attention_heads * a.head_dim, out),
    ("qkv_proj", "Phi4MultimodalAttention"): lambda a, out: _query_and_rest(
        a.config.num_attention_heads * a.head_dim, out
    ),
    ("qkv_proj", "MiniMaxLightningAttention"): _thirds_of_each_head,
    ("qkv_proj", "CodeGenAttention"): lambda a, out: (out // 12,) * 3,  # in four blocks, one a logical TPU core
    ("Wqkv", "MptAttention"): _thirds,
    ("Wqkv", "ModernBertAttention"): _thirds,
    ("Wqkv", "DbrxAttention"): lambda a, out: _query_and_rest(a.hidden_size, out),
    ("att_proj", "BarkSelfAttention"): _thirds,
    ("in_proj", "DisentangledSelfAttention"): _thirds_of_each_head,
    ("Wi", "ModernBertMLP"): lambda mlp, out: (out // 2,) * 2,
    ("Wi", "ModernBertDecoderMLP"): lambda mlp, out: (out // 2,) * 2,
}


def _fused_parts(
    modules: Mapping[str, nn.Module], path: str, leaf: str, matrix: Sequence[int]
) -> tuple[int, ...] | None:
    """Sizes of the projections known to be fused in a weight of shape `matrix`; None if it is one."""
    module = modules[path]
    out, cols = matrix[-2:]
    if leaf == "in_proj_weight" and isinstance(module, nn.MultiheadAttention):
        return _thirds(module, out)
    parent_path, _, projection = path.rpartition(".") if leaf == "weight" else (path, "", leaf)
    parent = modules[parent_path]
    if projection == "gate_up_proj":
        return (out // 2,) * 2 if getattr(parent, "is_concatenated", True) else (1, 1)
    if projection == "qkv" and out == 3 * cols:
        return _thirds(parent, out)
    for base in type(parent).__mro__:
        if (projection, base.__name__) in _FUSED:
            return _FUSED[projection, base.__name__](parent, out)
    return None


def _check_parts(name: str, parts: Sequence[int], out: int) -> None:
    if not parts or min(parts) < 1 or out % sum(parts):
        raise ValueError(f"split_fused: sizes {tuple(parts)} do not fit the {out} outputs of {name!r}")


def _reject_unused(option: str, patterns: Iterable[str], used: set[str], names: Iterable[str]) -> None:
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        known = ", ".join(map(repr, list(names)[:3]))
        raise ValueError(f"{option}: {unused!r} match no parameter of two or more dimensions; names are like {known}")
