"""Know how modules of PyTorch, transformers and PEFT use their weights.

Orthogonalization suits weights that multiply activations. Types decide, then the tables below, then a module's code.
Any other weight uses AdamW.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from mars_hf import _compat

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# Names of a module's weight, also under the old weight_norm, spectral_norm and pruning.
_WEIGHTS = ("weight", "weight_v", "weight_orig")
_RECURRENT_WEIGHT = re.compile(r"weight_(?:ih|hh|hr)(?:_l\d+)?(?:_reverse)?")
_ATTENTION_WEIGHT = re.compile(r"(?:in|q|k|v)_proj_weight")

_LINEAR = re.compile(r"(?:(?:\w+\.)*(?:F|functional)\.)?linear")

Fields = Mapping[str, Any]


def _square(module: Any, shape: Sequence[int]) -> Fields | str:
    """Read (in, heads, size) unchanged if in == heads * size: its transpose has the same directions and scale."""
    return {} if shape[0] == shape[1] * shape[2] else "(in, heads, size) that is not square"


def _transposed(module: Any, shape: Sequence[int]) -> Fields:
    return {"transposed": True}


def _batched(module: Any, shape: Sequence[int]) -> Fields:
    return {"batched": True}


def _batched_transposed(module: Any, shape: Sequence[int]) -> Fields:
    return {"batched": True, "transposed": True}


# Parameters that multiply activations, by class and name, where neither type nor code shows it.
_MULTIPLIED: dict[tuple[str, str], Callable[[Any, Sequence[int]], Fields | str]] = {
    **{("XLNetRelativeAttention", leaf): _square for leaf in "qkvor"},
    ("FunnelRelMultiheadAttention", "r_kernel"): _square,
    ("Gemma3MultiModalProjector", "mm_input_projection_weight"): _transposed,
    ("T5Gemma2MultiModalProjector", "mm_input_projection_weight"): _transposed,
    ("XCLIPModel", "prompts_visual_projection"): _transposed,
    ("MoshiFlexibleLinear", "weight"): _batched,  # one projection per codebook
    # One dense projection per block of channels.
    ("ZambaMambaMixer", "x_proj_weight"): _batched,
    ("ZambaMambaMixer", "dt_proj_weight"): _batched,
    ("RecurrentGemmaRglru", "input_gate_weight"): _batched_transposed,
    ("RecurrentGemmaRglru", "recurrent_gate_weight"): _batched_transposed,
    ("DeepseekV4GroupedLinear", "weight"): lambda linear, shape: {"stacked": linear.n_groups},
    # Experts stacked below one another in two dimensions.
    ("DbrxExpertGLU", "w1"): lambda experts, shape: {"stacked": experts.moe_num_experts},
    ("DbrxExpertGLU", "v1"): lambda experts, shape: {"stacked": experts.moe_num_experts},
    ("DbrxExpertGLU", "w2"): lambda experts, shape: {"stacked": experts.moe_num_experts, "transposed": True},
}


def class_names(module: nn.Module) -> list[str]:
    """Return the names of a module's class and its bases: FSDP2 and parametrizations derive new classes."""
    return [base.__name__ for base in type(module).__mro__]


Places = list[tuple[str, nn.Module, str]]


def owners(model: nn.Module) -> dict[nn.Parameter, Places]:
    """Map each parameter to its places: the path of the owning module, the module, the name in it.

    The source tensor of a parametrization is at the place of the tensor that it produces.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Parameter, Places] = {}
    for path, module in modules.items():
        for leaf, param in _compat.own_parameters(module).items():
            if param is None:
                continue
            place = (path, module, leaf)
            outer, parametrized, tensor = path.rpartition(".parametrizations.")
            if not parametrized and path.startswith("parametrizations."):
                outer, parametrized, tensor = "", path, path.removeprefix("parametrizations.")
            if parametrized and "." not in tensor and _normalized(module) == leaf:
                place = (outer, modules[outer], tensor)
            found.setdefault(param, []).append(place)
    return found


def places_of(known: Mapping[nn.Parameter, Places], model: nn.Module, name: str, param: nn.Parameter) -> Places:
    """Return the places of a parameter, from `owners`.

    PEFT's adapters of nn.MultiheadAttention make its frozen weights anew whenever modules are listed. Those are found
    by name.
    """
    if param in known:
        return known[param]
    path, _, leaf = name.rpartition(".")
    return [(path, model.get_submodule(path), leaf)]


def _normalized(parametrizations: nn.Module) -> str | None:
    """Return the weight's name in a list of parametrizations; None unless it is one of torch's normalizations alone."""
    kinds = [type(module).__name__ for module in parametrizations.children()]
    if len(kinds) != 1 or kinds[0] not in _compat.NORMALIZED:
        return None
    return _compat.NORMALIZED[kinds[0]]


def reading(module: nn.Module, leaf: str, shape: Sequence[int]) -> Fields | str:
    """Return how a parameter of two or more dimensions multiplies activations.

    Args:
        module: the module that owns the parameter.
        leaf: the parameter's name in the module.
        shape: shape of the parameter.

    Returns:
        The fields of its `MatrixLayout`; a str that describes the parameter if it does not multiply activations.
    """
    names = class_names(module)
    for name in names:
        if (name, leaf) in _MULTIPLIED:
            return _MULTIPLIED[name, leaf](module, shape)
    is_weight = leaf in _WEIGHTS
    if is_weight and is_embedding(module):
        return "embedding"
    if is_weight and isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS)):
        if module.groups > 1:
            return "depthwise or grouped convolution"
        return {"transposed": isinstance(module, _TRANSPOSED_CONVOLUTIONS)}
    if is_weight and "Conv1D" in names:
        return {"transposed": True}
    if is_weight and (isinstance(module, (nn.Linear, nn.Bilinear)) or _is_like_linear(module, shape)):
        return {}
    if isinstance(module, nn.MultiheadAttention) and _ATTENTION_WEIGHT.fullmatch(leaf):
        return {}
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and _RECURRENT_WEIGHT.fullmatch(leaf):
        return {}
    if len(shape) == 3 and any(name.endswith("Experts") for name in names):
        transposed = getattr(module, "is_transposed", "Llama4TextExperts" in names)
        return {"batched": True, "transposed": bool(transposed)}
    if len(shape) == linear_weights(type(module)).get(leaf):  # type: ignore[arg-type]
        return {"batched": len(shape) == 3}
    if isinstance(module, ParametrizationList):
        return "part of a parametrized weight"
    return unknown(module)


def unknown(module: nn.Module) -> str:
    """Return the answer of `reading` for a parameter of unknown use."""
    return f"{type(module).__name__} is not known to multiply activations with it"


def adapters_of_experts(model: nn.Module) -> dict[int, str]:
    """Map the parameter ids of PEFT's adapters for expert stacks to a description.

    One tensor holds the adapters of all experts: side by side in lora_A, interleaved along the inputs in lora_B.
    """
    wrappers = [module for module in model.modules() if getattr(module, "num_experts", 1) > 1]
    wrappers = [wrapper for wrapper in wrappers if "ParamWrapper" in class_names(wrapper)]
    adapters = [getattr(wrapper, name) for wrapper in wrappers for name in ("lora_A", "lora_B")]
    return {id(param): "adapters of several experts" for adapter in adapters for param in adapter.parameters()}


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is a lookup table, judging by its type, then by the names of its classes."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS)):
        return False  # such as a PatchEmbedding that derives from a convolution
    return isinstance(module, _EMBEDDINGS) or any(name.endswith("Embedding") for name in class_names(module))


def _is_like_linear(module: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether a module states its weight's sizes, as linear layers of other libraries do."""
    return tuple(shape) == (getattr(module, "out_features", None), getattr(module, "in_features", None))


@functools.cache
def linear_weights(kind: type) -> Mapping[str, int]:
    """Map the parameters that a class's code passes to `torch.nn.functional.linear` to their number of dimensions.

    Two for `linear(x, self.weight)`, three for `linear(x, self.weight[expert])`. Empty without source code.
    """
    found: dict[str, int] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for function in vars(base).values():
            if inspect.isfunction(function):
                found.update(_linear_calls(function))
    return found


def _linear_calls(function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or "linear" not in code.co_names:
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _LINEAR.fullmatch(ast.unparse(node.func)):
            continue
        weights = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "weight")]
        for weight in weights:
            leaf = re.fullmatch(r"self\.(\w+)(\[\w+\])?(?:\.(?:to|float|type|type_as)\([^()]*\))?", ast.unparse(weight))
            if leaf:
                yield leaf[1], 3 if leaf[2] else 2


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


# Fused projection and its parent's class, to sizes along the output dimension. The class decides: one name stands for
# different orders in different models.
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
    ("qkv_proj", "CodeGenAttention"): lambda a, out: (out // 12,) * 3,  # in four blocks, one per logical TPU core
    ("Wqkv", "MptAttention"): _thirds,
    ("Wqkv", "ModernBertAttention"): _thirds,
    ("Wqkv", "DbrxAttention"): lambda a, out: _query_and_rest(a.hidden_size, out),
    ("att_proj", "BarkSelfAttention"): _thirds,
    ("in_proj", "DisentangledSelfAttention"): _thirds_of_each_head,
    ("Wi", "ModernBertMLP"): lambda mlp, out: (out // 2,) * 2,
    ("Wi", "ModernBertDecoderMLP"): lambda mlp, out: (out // 2,) * 2,
}


def fused_parts(
    modules: Mapping[str, nn.Module], path: str, leaf: str, matrix: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the sizes of the projections fused in a weight of shape `matrix`; None for a single one.

    LoRA's B has the outputs of the layer that it adapts, and is split as its weight.
    """
    out, cols = matrix[-2:]
    adapted, is_adapter, _ = path.rpartition(".lora_B.")
    if is_adapter:
        path, cols = adapted, getattr(modules[adapted], "in_features", cols)
    module = modules[path]
    weighted = getattr(module, "base_layer", None) if is_adapter else module if leaf == "in_proj_weight" else None
    if isinstance(weighted, nn.MultiheadAttention):
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
