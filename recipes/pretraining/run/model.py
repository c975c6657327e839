"""Build GPT-2 from its configuration, with the settings of the papers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from pretraining.run.errors import one_line

if TYPE_CHECKING:
    from pretraining.run.arguments import ModelArguments


def build(arguments: ModelArguments, vocab_size: int, end_of_text: int) -> GPT2LMHeadModel:
    """Return a freshly initialized GPT-2.

    Args:
        arguments: sizes and settings.
        vocab_size: the tokenizer's size; `arguments.vocab_size` may be larger (padding for speed), not smaller.
        end_of_text: id of the end-of-text token.

    Raises:
        ValueError: the vocabulary does not fit, `n_head` does not divide `n_embd`, or a package is missing.
    """
    if arguments.vocab_size is not None and arguments.vocab_size < vocab_size:
        raise ValueError(
            f"vocab_size={arguments.vocab_size} is smaller than the tokenizer's {vocab_size}; leave it out to use that"
        )
    if arguments.n_embd % arguments.n_head:
        raise ValueError(f"n_embd={arguments.n_embd} is not a multiple of n_head={arguments.n_head}")
    config = GPT2Config(
        vocab_size=arguments.vocab_size or vocab_size,
        n_positions=arguments.block_size,
        n_layer=arguments.n_layer,
        n_head=arguments.n_head,
        n_embd=arguments.n_embd,
        activation_function=arguments.activation_function,
        scale_attn_by_inverse_layer_idx=arguments.scale_attn_by_inverse_layer_idx,
        resid_pdrop=arguments.dropout,
        embd_pdrop=arguments.dropout,
        attn_pdrop=arguments.dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    try:
        model = GPT2LMHeadModel._from_config(config, attn_implementation=arguments.attn_implementation)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"attn_implementation={arguments.attn_implementation}: {one_line(error)}; sdpa and eager need nothing"
        ) from error
    if not arguments.bias:
        freeze_biases(model)
    return model


@torch.no_grad()
def freeze_biases(model: nn.Module) -> None:
    """Reproduce `bias=False` on a model that always has biases: set every bias to zero and freeze it."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, Conv1D)) and module.bias is not None:
            module.bias.zero_()
            module.bias.requires_grad_(False)
