"""Tell embeddings and heads, by modules, names and the sizes of vocabularies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mars_hf.distributed.tensors import shape_of

# Layers that turn hidden states into scores, tokens, labels or boxes, by the last part of their path.
_HEAD_NAME = re.compile(
    r"(?:\w+_)?(?:classifier|head|predictor|pred)(?:_distill|_linear)?|heads|score|cls|qa_outputs|seq_relationship"
    r"|embed_out|(?:class|bbox)_embed|vocab_projector|ctc_proj|\w*logits_(?:proj|dense)"
)
# The layer before DistilBERT's classifier, points of reference in DETR, and the stem of a convolutional network.
_NO_HEAD_NAME = re.compile(r"pre_classifier|ref_point_head|resnet_head")
# Layers that repeat hold no head, whatever their sizes; a list of models is not in the middle of a path.
_IN_LAYERS = re.compile(r"\.\d+\.")
# Modules whose children are whole models, by the name of their class or of one that it is derived from.
_WRAPPERS = {"OptimizedModule", "DataParallel", "DistributedDataParallel", "AveragedModel", "LightningModule"}
# Names of settings that number tokens.
_IDS = re.compile(r"_ids?$")


def embeddings_and_heads(model: nn.Module) -> dict[nn.Parameter, str]:
    """Map parameters of embeddings and heads, tied ones included, to `"embedding"` or `"head"`.

    Heads are the model's own output embeddings or classifier, the last layer of each module with the name of a head,
    and matrices with a vocabulary on one side. Adapters of PEFT count as what they adapt.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    vocabularies = _vocabularies(modules.values())
    heads: list[nn.Module] = []
    embeddings: list[nn.Module] = []
    for path, module in modules.items():
        base = _without_adapters(module)
        if isinstance(base, (nn.Embedding, nn.EmbeddingBag)):
            embeddings.append(module)
        elif _has_vocabulary(base, vocabularies) and not _IN_LAYERS.search(path):
            heads.append(module)
        heads += _outputs(module)
        if _is_head(model, modules, path):
            heads += _last_layers(module)
    tables: dict[nn.Parameter, str] = {}
    for head in heads:
        tables |= dict.fromkeys(head.parameters(), "head")
    for embedding in embeddings:
        tables |= dict.fromkeys(embedding.parameters(), "embedding")
    return tables


def _is_named_as_head(name: str) -> bool:
    if _NO_HEAD_NAME.fullmatch(name):
        return False
    return _HEAD_NAME.fullmatch(name) is not None


def _is_head(model: nn.Module, modules: Mapping[str, nn.Module], path: str) -> bool:
    """Return whether a module is a head by its name: no `head` in attention, and an `fc` only at the end of a model."""
    parent, _, name = path.rpartition(".")
    if name == "fc":
        return _is_last_of_model(model, modules, path)
    is_attention = "Attention" in type(modules[path]).__name__
    is_in_attention = "Attention" in type(modules[parent]).__name__
    if is_attention or is_in_attention:
        return False
    return _is_named_as_head(name)


def _is_last_of_model(model: nn.Module, modules: Mapping[str, nn.Module], path: str) -> bool:
    """Return whether a module is the last child of a model, which may be one of a list, or in wrappers."""
    parent = holder = path.rpartition(".")[0]
    while holder:
        holder = holder.rpartition(".")[0]
        is_list = holder == "" and isinstance(model, nn.ModuleList)
        is_wrapper = any(base.__name__ in _WRAPPERS for base in type(modules[holder]).__mro__)
        if not is_list and not is_wrapper:
            return False
    return modules[path] is list(modules[parent].children())[-1]


def _vocabularies(modules: Iterable[Any]) -> set[int]:
    """Return the sizes of vocabularies, by the configurations of transformers, that are no other size of the model."""
    vocabularies: set[int] = set()
    others: set[int] = set()
    seen = set()
    for module in modules:
        config = getattr(module, "config", None)
        if id(config) in seen:
            continue
        seen.add(id(config))
        for name, value in getattr(config, "__dict__", {}).items():
            sizes = _integers_in(value)
            if name.endswith("vocab_size"):
                vocabularies.update(sizes)
            elif not _IDS.search(name):
                others.update(sizes)
    return vocabularies - others


def _integers_in(value: Any) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if type(each) is int]


def _has_vocabulary(module: Any, vocabularies: set[int]) -> bool:
    """Return whether a layer's matrix has a vocabulary on one side: as outputs, or transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return False
    sizes = list(shape_of(weight))
    if len(sizes) != 2:
        return False
    return len(vocabularies.intersection(sizes)) == 1 and sizes[0] != sizes[1]


def _without_adapters(module: nn.Module) -> nn.Module:
    """Return the layer that adapters of PEFT wrap; the module itself if there are none."""
    wrapped = getattr(module, "base_layer", None)
    if isinstance(wrapped, nn.Module):
        return _without_adapters(wrapped)
    return module


def _outputs(module: nn.Module) -> list[nn.Module]:
    """Return the output embeddings of a transformers model, or the classifier of a timm model."""
    for getter in ("get_output_embeddings", "get_classifier"):
        try:
            outputs = getattr(module, getter)()
        except (AttributeError, TypeError, NotImplementedError):  # none, or one with arguments of its own
            continue
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return [output for output in outputs if isinstance(output, nn.Module)]
    return []


def _last_layers(module: nn.Module) -> list[nn.Module]:
    """Return the last layer with weights, one called a head first; of a list or dict of modules, that of each."""
    children = {name: child for name, child in module.named_children() if _has_weights(child)}
    is_adapted = hasattr(module, "base_layer")
    if is_adapted or not children:
        return [module]
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        named = [child for name, child in children.items() if _is_named_as_head(name)]
        last = named[-1] if named else list(children.values())[-1]
        return _last_layers(last)
    layers = []
    for child in children.values():
        layers += _last_layers(child)
    return layers


def _has_weights(module: nn.Module) -> bool:
    dimensions = [len(shape_of(param)) for param in module.parameters()]
    return max(dimensions, default=0) > 1
