"""Turn nanoGPT's weights into a GPT2LMHeadModel, and back; logits stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from pretraining.data import gpt2_tokenizer
from pretraining.nanogpt import nanogpt_file
from pretraining.nanogpt.nanogpt_file import Checkpoint, Code, Sizes
from pretraining.run.errors import one_line
from pretraining.run.model import freeze_biases

# What nanoGPT's model.py computes, and no setting of it changes.
_FIXED: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}


def turned(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape in the other library's layout, with memory of its own."""
    turns = name.endswith(nanogpt_file.LINEAR)
    return tensor.detach().t().clone(memory_format=torch.contiguous_format) if turns else tensor.detach().clone()


def to_gpt2(checkpoint: Checkpoint, activation: str) -> GPT2LMHeadModel:
    """Return the model; without biases it has zeros in their place, which are frozen.

    Args:
        checkpoint: the weights keep their dtype.
        activation: `gelu` or `gelu_new`.
    """
    sizes = checkpoint.sizes
    end = gpt2_tokenizer.END_OF_TEXT_ID if sizes.vocab_size > gpt2_tokenizer.END_OF_TEXT_ID else None
    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.block_size,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        n_embd=sizes.n_embd,
        activation_function=activation,
        scale_attn_by_inverse_layer_idx=sizes.scaled,
        resid_pdrop=sizes.dropout,
        embd_pdrop=sizes.dropout,
        attn_pdrop=sizes.dropout,
        bos_token_id=end,
        eos_token_id=end,
        **_FIXED,
    )
    config.dtype = checkpoint.weights[nanogpt_file.EMBEDDING].dtype
    with torch.device("meta"):  # the weights are there already
        model = GPT2LMHeadModel(config)
    weights = {name: turned(name, value) for name, value in checkpoint.weights.items()}
    weights[nanogpt_file.HEAD] = weights[nanogpt_file.EMBEDDING]
    for name, shape in sizes._replace(bias=True).shapes().items():
        if name not in weights:
            weights[name] = torch.zeros(shape, dtype=weights[name.replace(".bias", ".weight")].dtype)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if not sizes.bias:
        freeze_biases(model)
    return model.eval()


def read_gpt2(folder: Path) -> GPT2LMHeadModel:
    """Load the model of a folder; its weights keep their dtype.

    Raises:
        ValueError: the folder holds no GPT-2 with a head, or not all of its weights.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one with config.json and model.safetensors")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained or Trainer wrote")
    try:
        kind = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
        if kind != "gpt2":
            raise ValueError(f"{folder} holds a model of type {kind}; nanoGPT is gpt2")
        loaded: Any = GPT2LMHeadModel.from_pretrained(
            folder, local_files_only=True, dtype="auto", output_loading_info=True
        )
        model, found = loaded
    except ValueError:
        raise
    except Exception as error:  # what damaged files make json, safetensors and transformers raise
        raise ValueError(f"{folder} cannot be loaded: {one_line(error, 200)}") from None
    wrong = sorted(map(str, found["missing_keys"])) + sorted(map(str, found["mismatched_keys"]))
    if wrong:
        raise ValueError(f"{folder}: {wrong[0]} is missing from the weights, or of another shape than config.json says")
    return model.eval()


def sizes_of(model: GPT2LMHeadModel, folder: Path, code: Code, bias: bool | None) -> Sizes:
    """Return nanoGPT's settings for a model.

    Args:
        model: the model.
        folder: where it is from, for messages.
        code: whose model.py is to compute it.
        bias: True keeps the biases, False requires that all are zero; None keeps them unless all are zero.

    Raises:
        ValueError: that model.py computes something else.
    """
    config = model.config
    wanted = _FIXED | ({"scale_attn_by_inverse_layer_idx": False} if code == "nanogpt" else {})
    for name, value in wanted.items():
        if getattr(config, name) != value:
            remedy = "; --code mars has it" if name not in _FIXED else ""
            raise ValueError(f"{folder}: {name}={getattr(config, name)}, and nanoGPT's model.py has {value}{remedy}")
    if config.n_inner not in (None, 4 * config.n_embd):
        raise ValueError(f"{folder}: n_inner={config.n_inner}, and nanoGPT's model.py has {4 * config.n_embd}")
    moved = [name for name, value in model.named_parameters() if name.endswith(".bias") and value.any()]
    if bias is False and moved:
        raise ValueError(
            f"--bias false: {len(moved)} biases of {folder} are not zero, {moved[0]} the first; leave it out to keep "
            "the biases"
        )
    return Sizes(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        block_size=config.n_positions,
        vocab_size=config.vocab_size,
        bias=bool(moved) if bias is None else bias,
        dropout=float(config.resid_pdrop),
        scaled=config.scale_attn_by_inverse_layer_idx,
    )


def to_nanogpt(model: GPT2LMHeadModel, sizes: Sizes, code: Code) -> dict[str, Tensor]:
    """Return the state dict that nanoGPT's model loads."""
    parameters = dict(model.named_parameters())
    weights = {name: turned(name, parameters[name]) for name in sizes.shapes()}
    weights[nanogpt_file.HEAD] = weights[nanogpt_file.EMBEDDING]
    if code == "mars":  # its attention keeps the causal mask as a buffer, which load_state_dict requires
        mask = torch.ones(1, 1, sizes.block_size, sizes.block_size).tril()
        weights |= {f"transformer.h.{index}.attn.bias": mask for index in range(sizes.n_layer)}
    return weights
