#!/usr/bin/env python
"""Turn the weights in ckpt.pt, of nanoGPT or the official MARS repository, into a folder for transformers, and back.

    python recipes/convert_nanogpt.py out/ckpt.pt converted
    python recipes/convert_nanogpt.py runs/mine out --to_nanogpt

The folder holds a GPT2LMHeadModel with the same logits, and GPT-2's tokenizer if the Hub or its cache has it. A model
without biases gets zeros in their place; on the way back biases that are all zero are left out. Optimizer states do not
move. Nothing in a ckpt.pt is executed, and output has its name only once it is whole.

A checkpoint does not say which GELU its model.py computes: nanoGPT's is exact (gelu), that of the official repository
and of nanoGPT before May 2023 the tanh form (gelu_new). --activation_function states what is not so.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from pretraining import pretrained
from pretraining.run.errors import one_line_errors
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

# Weights of linear maps: (out, in) in nanoGPT and (in, out) in transformers' GPT-2.
LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
SCALED = "scale_attn_by_inverse_layer_idx"  # a setting of the official repository's model.py, not of nanoGPT's
GPT2_VOCABULARY = (50257, 50304)  # as it is, and padded to a multiple of 64


@one_line_errors("convert_nanogpt.py")
def main(argv: list[str] | None = None) -> None:
    """Convert; `argv` is the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="ckpt.pt or its folder; with --to_nanogpt a folder of transformers")
    parser.add_argument("output_dir", type=Path, help="folder to make; with --to_nanogpt it gets a ckpt.pt")
    parser.add_argument("--to_nanogpt", action="store_true", help="turn a folder of transformers into a ckpt.pt")
    parser.add_argument(
        "--activation_function",
        choices=["gelu", "gelu_new"],
        help=f"of the model.py that wrote ckpt.pt; default: gelu_new if model_args has {SCALED}, else gelu",
    )
    args = parser.parse_args(argv)
    if args.to_nanogpt and args.activation_function:
        raise ValueError("--activation_function is for reading a ckpt.pt; with --to_nanogpt the config states it")
    if args.to_nanogpt:
        to_nanogpt(args.source, args.output_dir)
    else:
        from_nanogpt(args.source, args.output_dir, args.activation_function)


def from_nanogpt(source: Path, output: Path, activation_function: str | None = None) -> None:
    """Write the folder of a checkpoint.

    Args:
        source: ckpt.pt, or the folder that has it.
        output: folder to make.
        activation_function: `gelu` or `gelu_new`; None for the usual one of the code that wrote the checkpoint.

    Raises:
        ValueError: the checkpoint is none of nanoGPT's, is damaged or holds code, or the folder is there.
    """
    if output.exists():
        raise ValueError(f"{output} exists already; choose another folder, or delete it first")
    path = source / "ckpt.pt" if source.is_dir() else source
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a ckpt.pt or the folder that has it")
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what a damaged or hostile file raises, no list covers
        raise ValueError(f"{path} is damaged, or holds more than tensors and plain values: {error!s:.200}") from error
    try:
        model = _to_gpt2(checkpoint["model_args"], checkpoint["model"], activation_function)
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a GPT-2 of nanoGPT's model.py: {type(error).__name__}: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{output.name}.partial-") as partial:
        folder = Path(partial) / "whole"
        model.save_pretrained(folder)
        print(f"model       {model.num_parameters():,} parameters, {model.config.activation_function}")
        if model.config.vocab_size in GPT2_VOCABULARY:
            try:
                tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2", trust_remote_code=False)
                tokenizer.save_pretrained(folder)
            except OSError as error:
                print(f"tokenizer   none: {' '.join(str(error).split())}")
        folder.rename(output)
    print(f"ready: {output}")


def _to_gpt2(model_args: dict[str, Any], weights: dict[str, torch.Tensor], activation: str | None) -> GPT2LMHeadModel:
    """Return the model; weights keep their dtype."""
    # torch.compile and DistributedDataParallel put prefixes before names; attn.bias is a causal mask.
    weights = {
        re.sub(r"^(_orig_mod\.|module\.)+", "", name): value.t().contiguous() if name.endswith(LINEAR) else value
        for name, value in weights.items()
        if not name.endswith(".attn.bias")
    }
    end_of_text = 50256 if model_args["vocab_size"] in GPT2_VOCABULARY else None
    config = GPT2Config(
        vocab_size=model_args["vocab_size"],
        n_positions=model_args["block_size"],
        n_layer=model_args["n_layer"],
        n_head=model_args["n_head"],
        n_embd=model_args["n_embd"],
        activation_function=activation or ("gelu_new" if SCALED in model_args else "gelu"),
        scale_attn_by_inverse_layer_idx=model_args.get(SCALED, False),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model_args.get("dropout", 0.0)),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        dtype=weights[EMBEDDING].dtype,
    )
    with torch.device("meta"):  # the weights are there already
        model = GPT2LMHeadModel(config)
    if not model_args["bias"]:
        biases = {name: param.shape for name, param in model.named_parameters() if name.endswith(".bias")}
        weights |= {name: torch.zeros(shape, dtype=weights[EMBEDDING].dtype) for name, shape in biases.items()}
    if not torch.equal(weights.setdefault(HEAD, weights[EMBEDDING]), weights[EMBEDDING]):
        raise ValueError(f"{HEAD} differs from {EMBEDDING}, and nanoGPT ties them")
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def to_nanogpt(source: Path, output: Path) -> None:
    """Write the ckpt.pt of a folder that save_pretrained or Trainer wrote: model and model_args, no optimizer.

    Args:
        source: the folder.
        output: folder for the ckpt.pt.

    Raises:
        ValueError: the folder holds something else than nanoGPT's model.py computes, or there is a ckpt.pt.
    """
    path = output / "ckpt.pt"
    if path.exists():
        raise ValueError(f"{path} exists already; choose another folder, or delete it first")
    model = pretrained.load(str(source.absolute()), dtype="auto")
    config = model.config
    if config.model_type != "gpt2":
        raise ValueError(f"{source} holds a model of type {config.model_type}; nanoGPT is gpt2")
    code = "nanogpt" if config.activation_function == "gelu" else "mars"  # whose model.py computes it
    for name, accepted in {
        "activation_function": ("gelu", "gelu_new"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
        "n_inner": (None, 4 * config.n_embd),
        SCALED: (False, True) if code == "mars" else (False,),
    }.items():
        if (value := getattr(config, name)) not in accepted:
            raise ValueError(f"{source} has {name}={value}; model.py of {code} has {' or '.join(map(str, accepted))}")
    weights = {
        name: (param.t() if name.endswith(LINEAR) else param).detach().contiguous()
        for name, param in model.named_parameters()
    }
    bias = any(value.any() for name, value in weights.items() if name.endswith(".bias"))
    if not bias:
        weights = {name: value for name, value in weights.items() if not name.endswith(".bias")}
    weights[HEAD] = weights[EMBEDDING]
    model_args = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    model_args |= {"block_size": config.n_positions, "bias": bias, "dropout": float(config.resid_pdrop)}
    if code == "mars":  # its attention keeps the causal mask as a buffer, which load_state_dict requires
        mask = torch.ones(1, 1, config.n_positions, config.n_positions).tril()
        weights |= {f"transformer.h.{index}.attn.bias": mask for index in range(config.n_layer)}
        model_args[SCALED] = getattr(config, SCALED)
    output.mkdir(parents=True, exist_ok=True)
    partial = path.with_name("ckpt.pt.partial")
    torch.save({"model": weights, "model_args": model_args, "iter_num": 0, "best_val_loss": 1e9, "config": {}}, partial)
    partial.replace(path)
    print(f"model       bias={bias}; its model.py must compute {config.activation_function}\nready: {path}")


if __name__ == "__main__":
    main()
