"""Say which (out, in) matrices each parameter of a model holds, and which parameters are no such matrices.

Types of modules decide, and for fused projections the table `_FUSED`. A parameter of any other module is not known to
multiply activations.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mars_hf.arithmetic.matrix_layouts import MatrixLayout, check_shape, matrix_shapes, of_shape
from mars_hf.distributed.tensors import shape_of

_GATES = ("gate", "gating", "wg")  # names of routers beside experts
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class LeftOut:
    """Say why a parameter of two or more dimensions is not orthogonalized."""

    reason: str


def of_model(
    model: nn.Module, split_fused: str | Mapping[str, Sequence[int]] = "auto"
) -> dict[nn.Parameter, MatrixLayout | LeftOut]:
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
    expert_adapters = _adapters_of_experts(modules.values())
    routers = _of_routers(modules)
    layouts: dict[nn.Parameter, MatrixLayout | LeftOut] = {}
    pattern_of: dict[str, str | None] = {}  # by name of parameter
    for path, module in modules.items():
        for leaf, param in module.named_parameters(recurse=False):
            shape = shape_of(param)
            if len(shape) < 2 or not param.requires_grad:
                continue
            if param in expert_adapters:
                layout: MatrixLayout | LeftOut = LeftOut("adapters of several experts")
            elif param in routers:
                layout = LeftOut("router")
            else:
                layout = _of_parameter(module, leaf, shape)
            name = f"{path}.{leaf}" if path else leaf
            pattern = _first_match(name, patterns)
            pattern_of[name] = pattern
            if pattern is not None:
                layout = _with_stated_parts(layout, shape, patterns[pattern])
            elif split_fused == "auto" and isinstance(layout, MatrixLayout):
                matrix = matrix_shapes(shape, layout)[0]
                layout = replace(layout, parts=_fused(modules, path, leaf, matrix))
            # A tied parameter comes at each of its places; one that multiplies activations counts.
            if not isinstance(layouts.get(param), MatrixLayout):
                layouts[param] = layout
    _check_patterns(patterns, pattern_of)
    return layouts


def _adapters_of_experts(modules: Iterable[Any]) -> set[nn.Parameter]:
    """Return PEFT's parameters that hold the adapters of several experts in one tensor.

    They are side by side in lora_A, and interleaved along the inputs in lora_B.
    """
    adapters: set[nn.Parameter] = set()
    for module in modules:
        if "ParamWrapper" in _classes(module) and getattr(module, "num_experts", 1) > 1:
            adapters.update(module.lora_A.parameters())
            adapters.update(module.lora_B.parameters())
    return adapters


def _of_routers(modules: Mapping[str, nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of routers: of modules called so, and of gates beside experts.

    A router's last layer scores experts, as a head scores tokens; what comes before it is small.
    """
    of_routers: set[nn.Parameter] = set()
    for path, module in modules.items():
        holder, _, name = path.rpartition(".")
        if "router" in name or (name in _GATES and _holds_experts(modules[holder])):
            of_routers.update(module.parameters())
    return of_routers


def _holds_experts(module: nn.Module) -> bool:
    return any(name == "experts" or _are_experts(child) for name, child in module.named_children())


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        if fnmatch.fnmatchcase(name, pattern):
            return pattern
    return None


def _with_stated_parts(layout: MatrixLayout | LeftOut, shape: Sequence[int], parts: Sequence[int]) -> MatrixLayout:
    """Return a layout with the parts that the user states, also for a parameter that would be left out."""
    whole = of_shape(shape) if isinstance(layout, LeftOut) else layout
    split = replace(whole, parts=tuple(parts))
    check_shape(shape, split)
    return split


def _check_patterns(patterns: Iterable[str], pattern_of: Mapping[str, str | None]) -> None:
    """Raise ValueError if some patterns are not the first match of any name; the error shows similar names."""
    used = set(pattern_of.values())
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        close = difflib.get_close_matches(unused[0].strip("*"), pattern_of, n=3, cutoff=0.0)
        near = ", ".join(repr(name) for name in close)
        shown = repr(unused)[:200]
        raise ValueError(f"split_fused: {shown} match no parameter of two or more dimensions; names are like {near}")


def _classes(module: Any) -> list[str]:
    """Return the names of a module's class and its bases: FSDP2 and parametrizations derive new classes."""
    return [base.__name__ for base in type(module).__mro__]


def _of_parameter(module: nn.Module, leaf: str, shape: Sequence[int]) -> MatrixLayout | LeftOut:
    """Return how a module multiplies activations with its parameter, or why that is not orthogonalized."""
    layout = _of_weight(module, shape) if leaf == "weight" else _of_attention(module, leaf)
    if layout is None:
        layout = _of_experts(module, shape)
    if layout is None:
        return LeftOut(f"{type(module).__name__} is not known to multiply activations with it")
    if isinstance(layout, MatrixLayout):
        rows, cols = matrix_shapes(shape, layout)[0][-2:]
        if min(rows, cols) <= 1:
            return LeftOut("a single row or column")
    return layout


def _of_weight(module: Any, shape: Sequence[int]) -> MatrixLayout | LeftOut | None:
    """Return the layout of a parameter called weight, or what it is; None for a module of an unknown class."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return LeftOut("embedding")
    if isinstance(module, _CONVOLUTIONS):
        if module.groups > 1:
            return LeftOut("depthwise or grouped convolution")
        return MatrixLayout(transposed=module.transposed)
    if "Conv1D" in _classes(module):  # of transformers
        return MatrixLayout(transposed=True)
    if isinstance(module, nn.Linear):
        return MatrixLayout()
    # Linear layers of other libraries.
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return MatrixLayout() if tuple(shape) == sizes else None


def _of_attention(module: nn.Module, leaf: str) -> MatrixLayout | None:
    """Return the layout of torch's in_proj_weight and so on, and of XLNet's tensors, (width, heads, head size)."""
    if isinstance(module, nn.MultiheadAttention) and leaf.endswith("proj_weight"):
        return MatrixLayout()
    if "XLNetRelativeAttention" in _classes(module) and leaf in ("q", "k", "v", "o", "r"):
        return MatrixLayout()
    return None


def _of_experts(module: nn.Module, shape: Sequence[int]) -> MatrixLayout | None:
    """Return the layout of the weights of all experts in one tensor."""
    if len(shape) != 3 or not _are_experts(module):
        return None
    is_transposed = getattr(module, "is_transposed", "Llama4TextExperts" in _classes(module))
    return MatrixLayout(batched=True, transposed=is_transposed)


def _are_experts(module: nn.Module) -> bool:
    return any(name.endswith("Experts") for name in _classes(module))


def _halves(module: Any, out: int) -> tuple[int, ...]:
    return (out // 2,) * 2


def _thirds(module: Any, out: int) -> tuple[int, ...]:
    return (out // 3,) * 3


def _thirds_of_each_head(attention: Any, out: int) -> tuple[int, ...]:
    heads = getattr(attention, "num_attention_heads", None) or getattr(attention, "num_heads", None)
    if not heads:
        heads = attention.config.num_attention_heads
    return _thirds(attention, out // heads)


def _thirds_of_each_core(attention: Any, out: int) -> tuple[int, ...]:
    return _thirds(attention, out // 4)  # in four blocks, one per logical TPU core


def _grouped_query(attention: Any, out: int) -> tuple[int, ...]:
    query = attention.config.num_attention_heads * attention.head_dim
    return (query, (out - query) // 2, (out - query) // 2)


def _of_qkv(attention: Any, out: int) -> tuple[int, ...]:
    """Return thirds, or in timm's attentions whose heads come first query, key and value of one head."""
    if getattr(attention, "head_first", False):  # MaxViT, CoAtNet
        return _thirds_of_each_head(attention, out)
    heads, key, value = [getattr(attention, name, 0) for name in ("num_heads", "key_dim", "val_dim")]
    if heads * (2 * key + value) == out:  # TinyViT, EfficientFormer
        return (key, key, value)
    return _thirds(attention, out)


def _of_gpt2(attention: Any, out: int) -> tuple[int, ...]:
    if attention.is_cross_attention:  # key and value
        return _halves(attention, out)
    return _thirds(attention, out)


# Fused projection and the class that holds it, to sizes along the output dimension. The class decides: one name stands
# for different orders in different models.
_FUSED: dict[tuple[str, str], Callable[[Any, int], tuple[int, ...]]] = {
    ("in_proj_weight", "MultiheadAttention"): _thirds,
    ("c_attn", "GPT2Attention"): _of_gpt2,
    ("query_key_value", "GPTNeoXAttention"): _thirds_of_each_head,
    ("query_key_value", "BloomAttention"): _thirds_of_each_head,
    ("qkv_proj", "Phi3Attention"): _grouped_query,
    ("qkv_proj", "CodeGenAttention"): _thirds_of_each_core,
    ("Wqkv", "MptAttention"): _thirds,
    ("Wqkv", "ModernBertAttention"): _thirds,
    ("Wi", "ModernBertMLP"): _halves,
    ("in_proj", "DisentangledSelfAttention"): _thirds_of_each_head,
}


def _fused(modules: Mapping[str, nn.Module], path: str, leaf: str, matrix: Sequence[int]) -> tuple[int, ...] | None:
    """Return the sizes of the projections fused in a weight of shape `matrix`; None for a single one.

    LoRA's B has the outputs of the layer that it adapts, and is split as its weight.
    """
    out, cols = matrix[-2:]
    if ".lora_B." in path:
        path = path.rpartition(".lora_B.")[0]
        adapted: Any = modules[path]
        cols = getattr(adapted, "in_features", cols)
        if isinstance(adapted.base_layer, nn.MultiheadAttention):
            leaf = "in_proj_weight"
    if leaf == "weight":  # of a layer of its own, which is called like the projection
        holder, _, projection = path.rpartition(".")
    else:
        holder, projection = path, leaf
    module = modules[holder]
    if projection == "gate_up_proj":
        is_concatenated = getattr(module, "is_concatenated", True)
        return _halves(module, out) if is_concatenated else (1, 1)
    if projection == "qkv" and out == 3 * cols:
        return _of_qkv(module, out)
    for class_name in _classes(module):
        if (projection, class_name) in _FUSED:
            sizes_of = _FUSED[projection, class_name]
            return sizes_of(module, out)
    return None
