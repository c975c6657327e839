"""Build GPT-2 or Llama from the recipe's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pretraining.run.arguments import ModelArguments


def build(arguments: ModelArguments, vocab_size: int, end_of_text: int) -> PreTrainedModel:
    """Return a freshly initialized model.

    Args:
        arguments: sizes and settings.
        vocab_size: the tokenizer's size; `arguments.vocab_size` may be larger (padding for speed), not smaller.
        end_of_text: id of the end-of-text token.

    Raises:
        ValueError: the vocabulary does not fit, heads do not share keys evenly, or a setting is of another kind of
            model.
    """
    is_gpt2 = arguments.model_type == "gpt2"
    of_others = ("n_kv_head",) if is_gpt2 else ("activation_function", "scale_attn_by_inverse_layer_idx")
    for name in of_others:
        if getattr(arguments, name) != getattr(ModelArguments(), name):
            raise ValueError(f"{name}={getattr(arguments, name)} does nothing in {arguments.model_type}; remove it")
    if arguments.n_head % (arguments.n_kv_head or arguments.n_head):
        raise ValueError(f"n_head={arguments.n_head} is not a multiple of n_kv_head={arguments.n_kv_head}")
    if arguments.vocab_size is not None and arguments.vocab_size < vocab_size:
        raise ValueError(
            f"vocab_size={arguments.vocab_size} is smaller than the tokenizer's {vocab_size}; remove the setting"
        )
    shared: dict[str, Any] = {
        "vocab_size": arguments.vocab_size or vocab_size,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    config: Any
    if is_gpt2:
        config = GPT2Config(
            **shared,
            n_positions=arguments.block_size,
            n_layer=arguments.n_layer,
            n_head=arguments.n_head,
            n_embd=arguments.n_embd,
            n_inner=arguments.n_inner,
            activation_function=arguments.activation_function,
            scale_attn_by_inverse_layer_idx=arguments.scale_attn_by_inverse_layer_idx,
            resid_pdrop=arguments.dropout,
            embd_pdrop=arguments.dropout,
            attn_pdrop=arguments.dropout,
        )
    else:
        config = {"llama": LlamaConfig, "phi3": Phi3Config}[arguments.model_type](
            **shared,
            max_position_embeddings=arguments.block_size,
            num_hidden_layers=arguments.n_layer,
            num_attention_heads=arguments.n_head,
            num_key_value_heads=arguments.n_kv_head or arguments.n_head,
            hidden_size=arguments.n_embd,
            intermediate_size=arguments.n_inner or 4 * arguments.n_embd,
            attention_dropout=arguments.dropout,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=None,
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=arguments.attn_implementation, trust_remote_code=False
    )
    model.loss_type = "ForCausalLM"  # what GPT-2 takes; without its name transformers warns
    if not arguments.bias:
        freeze_biases(model)
    return model


def describe(arguments: ModelArguments) -> str:
    """Return the sizes of a model in a line."""
    return (
        f"{arguments.model_type}, {arguments.n_layer} layers of {arguments.n_head} heads, width {arguments.n_embd}, "
        f"context {arguments.block_size}"
    )


@torch.no_grad()
def freeze_biases(model: nn.Module) -> None:
    """Reproduce `bias=False` on a model that always has biases: set every bias to zero and freeze it."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, Conv1D)) and module.bias is not None:
            module.bias.zero_()
            module.bias.requires_grad_(False)
