"""Find the heads of a model: layers that turn hidden states into scores, tokens, labels or boxes."""

from __future__ import annotations

import re
from inspect import Parameter, signature

from torch import nn

from mars_hf import _compat
from mars_hf.groups import known_models

# Names of heads: the last part of a module's path.
_HEAD = re.compile(
    r"(?:\w+_)?classifier(?:_\w+)?|heads?|score|itm_score|rank_output|qa_outputs|seq_relationship|embed_out"
    r"|(?:qa|v|value|reward|classification|multiple_choice|answer|video_grounding|ctc|iou_prediction|obj_score)_head"
    r"|(?:(?:enc|encoder|decoder|pred)_)?(?:class|box|bbox|score|objectness|presence)_head"
    r"|(?:\w+_)?(?:class|bbox|box)_(?:embed|predictor)|predict_(?:state|action|return)|action_out_proj"
    r"|(?:\w+_)?logits?_(?:proj|fc|dense|shift|scale)|(?:start|end)_logits|answer_class|sequence_summary"
    r"|ctc_proj|feat_out|prob_out"
)
# A single layer with such a name is a head; a larger module may not be.
_HEAD_LAYER = re.compile(
    r"(?!conv_)(?:\w+_)?heads?|lm_loss|vocab_projector|unembedding_projection|dense_prediction|cls|decoder_pred"
    r"|conv_score_b"
)
# Heads trained with the model: the layers before their last one are ordinary hidden layers.
_LANGUAGE_HEAD = re.compile(
    r"pred_layer|(?:lm|mim|mlm|mmm_image|mmm_text|obj_predict)_head|mlm_score|entity_predictions|generation_head"
)
# Heads with other names, and the class of their parent module.
_HEAD_OF = {
    ("final_layer", "PerceiverBasicDecoder"),
    ("output_projection", "FSMTDecoder"),
    ("dense", "MobileBertLMPredictionHead"),  # the rest of the output embeddings, stored (in, vocabulary)
}
# Not heads despite their names, by class of the module or of its parent: attention has heads too, routers classify
# tokens, pooling keeps the width, and SigLIP projects texts.
_NO_HEAD = re.compile(r"\w*Pooling\w*")
_NO_HEAD_IN = re.compile(r"\w*(?:Attention|Router)|Siglip2?Text(?:Model|Transformer)")


def embeddings_and_heads(model: nn.Module) -> dict[int, str]:
    """Map parameter ids of embeddings and heads, tied ones included, to `"embedding"` or `"head"`.

    Heads are the model's own output embeddings or classifier, and modules with the names of heads: the whole module if
    it is a few linear layers, otherwise its last layer. Adapters of PEFT count as what they adapt.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    embeddings = [module for module in modules.values() if known_models.is_embedding(module)]
    found = {id(param): "embedding" for module in embeddings for param in module.parameters(recurse=False)}
    wrappers = [module for module in modules.values() if _adapts_embedding(module)]
    found |= {id(param): "embedding" for module in wrappers for param in module.parameters()}
    outputs = {path: _outputs(module) for path, module in modules.items()}
    heads = [head for known in outputs.values() for head in known]
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        if name == "fc":
            heads += [module] if _ends_image_model(path, module, modules[parent]) else []
        elif _any_name(name) and _may_hold_head(module, modules[parent]):
            heads += _heads_of(name, module, modules[parent], bool(outputs[parent]))
        elif any((name, kind) in _HEAD_OF for kind in known_models.class_names(modules[parent])):
            heads.append(module)
        heads += [] if outputs[path] else _beside_backbone(module)
    for head in heads:
        for param in head.parameters():
            found.setdefault(id(param), "head")
    return found


def _adapts_embedding(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper around an embedding, or around such a wrapper."""
    base = getattr(module, "base_layer", None)
    return isinstance(base, nn.Module) and (known_models.is_embedding(base) or _adapts_embedding(base))


def _outputs(module: nn.Module) -> list[nn.Module]:
    """Return the output embeddings of a transformers model, or the classifier of a timm model."""
    found: list[nn.Module] = []
    for getter in ("get_output_embeddings", "get_classifier"):
        if not callable(get := getattr(module, getter, None)) or any(
            map(_is_required, signature(get).parameters.values())
        ):
            continue
        try:
            result = get()
        except NotImplementedError:  # older models of transformers without output embeddings
            continue
        parts = result if isinstance(result, (tuple, list)) else [result]
        found += [part for part in parts if isinstance(part, nn.Module)]
    return found


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind not in (
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    )


def _beside_backbone(model: nn.Module) -> list[nn.Module]:
    """Return linear layers beside a transformers model's backbone with one output per label or token.

    Only for models that do not name their outputs: any layer of two units looks like two labels.
    """
    backbone, config = getattr(model, "base_model_prefix", None), getattr(model, "config", None)
    if not backbone or backbone not in _compat.own_modules(model):
        return []
    sizes = {getattr(config, "num_labels", None), getattr(config, "vocab_size", None)}
    beside = [layer for name, layer in model.named_children() if name != backbone and isinstance(layer, nn.Linear)]
    return [layer for layer in beside if layer.out_features in sizes]


def _any_name(name: str) -> bool:
    return any(names.fullmatch(name) for names in (_HEAD, _HEAD_LAYER, _LANGUAGE_HEAD))


def _may_hold_head(module: nn.Module, parent: nn.Module) -> bool:
    return not (
        any(_NO_HEAD.fullmatch(name) for name in known_models.class_names(module))
        or any(_NO_HEAD_IN.fullmatch(name) for name in known_models.class_names(parent))
    )


def _heads_of(name: str, module: nn.Module, parent: nn.Module, knows_outputs: bool) -> list[nn.Module]:
    """Return the heads in a module, judging by its name.

    Args:
        name: the last part of the module's path.
        module: a module that may be or hold a head.
        parent: the parent module.
        knows_outputs: whether the parent names its own output embeddings.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [head for child in module.children() for head in _heads_of(name, child, parent, knows_outputs)]
    if _is_layer(module):
        return [module]
    if _LANGUAGE_HEAD.fullmatch(name) or name == "head":
        if knows_outputs:
            return []
        if name != "head":
            return _last_layers(module)
    if not _HEAD.fullmatch(name):
        return []
    return [module] if _is_few_linear_layers(module) else _last_layers(module)


def _has_matrix(module: nn.Module, recurse: bool = False) -> bool:
    """Return whether a module has a parameter of two or more dimensions, also if DeepSpeed's `zero.Init` emptied it."""
    return any(len(getattr(param, "ds_shape", param.shape)) > 1 for param in module.parameters(recurse))


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module has a weight of its own, or is PEFT's wrapper around one."""
    wraps = hasattr(module, "base_layer")
    return wraps or (_has_matrix(module) and not any(_has_matrix(child, True) for child in module.children()))


def _is_few_linear_layers(module: nn.Module) -> bool:
    parts = [part for part in module.modules() if _has_matrix(part)]
    attends = any("Attention" in name for part in module.modules() for name in known_models.class_names(part))
    return not attends and all(isinstance(part, nn.Linear) for part in parts)


def _ends_image_model(path: str, module: nn.Module, parent: nn.Module) -> bool:
    """Return whether a linear layer ends an image model: last weight beside Conv2d, outside numbered blocks."""
    if any(part.isdigit() for part in path.split(".")):
        return False
    children = [child for child in parent.children() if _has_matrix(child, True)]
    sees_images = any(isinstance(part, nn.Conv2d) for part in parent.modules())
    return children[-1:] == [module] and sees_images and _is_few_linear_layers(module)


def _last_layers(module: nn.Module) -> list[nn.Module]:
    """Return the last layer with a weight; for a list or dict of modules, the last of each."""
    children = [child for child in module.children() if _has_matrix(child, True)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [layer for child in children for layer in _last_layers(child)]
    return _last_layers(children[-1]) if children and not _is_layer(module) else [module]
