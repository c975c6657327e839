"""Read ckpt.pt, the one file of a nanoGPT run; nothing in it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from pretraining.run.errors import one_line

NAME = "ckpt.pt"
# best_val_loss of a run that has not been evaluated.
NO_LOSS = 1e9
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
# Weights of linear maps: (out, in) here and (in, out) in transformers' GPT-2.
LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_SCALED = "scale_attn_by_inverse_layer_idx"
# What torch.compile and DistributedDataParallel put before names.
_PREFIXES = ("_orig_mod.", "module.")

Code = Literal["nanogpt", "mars"]
CODES: tuple[Code, ...] = ("nanogpt", "mars")
# The GELU that today's model.py computes; a checkpoint does not say it.
ACTIVATIONS: Mapping[Code, str] = {"nanogpt": "gelu", "mars": "gelu_new"}


class Sizes(NamedTuple):
    """The settings of a model, as in `model_args`.

    Args:
        n_layer: blocks.
        n_head: attention heads of a block.
        n_embd: width.
        block_size: rows of the position embedding.
        vocab_size: rows of the token embedding.
        bias: whether linear maps and LayerNorms have biases.
        dropout: of embeddings, attention and residuals.
        scaled: whether attention scores are divided by the number of the block; the official repository's models have
            this setting, nanoGPT's have not.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool
    dropout: float = 0.0
    scaled: bool = False

    def model_args(self, code: Code) -> dict[str, Any]:
        """Return the keywords of GPTConfig."""
        found = self._asdict()
        scaled = found.pop("scaled")
        return found | ({_SCALED: scaled} if code == "mars" else {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, in the order of `named_parameters()`; the tied head is left out."""
        width = self.n_embd
        found: dict[str, tuple[int, ...]] = {}

        def add(name: str, *shape: int) -> None:
            found[f"{name}.weight"] = shape
            if self.bias:
                found[f"{name}.bias"] = shape[:1]

        found[EMBEDDING] = (self.vocab_size, width)
        found["transformer.wpe.weight"] = (self.block_size, width)
        for block in (f"transformer.h.{index}" for index in range(self.n_layer)):
            add(f"{block}.ln_1", width)
            add(f"{block}.attn.c_attn", 3 * width, width)
            add(f"{block}.attn.c_proj", width, width)
            add(f"{block}.ln_2", width)
            add(f"{block}.mlp.c_fc", 4 * width, width)
            add(f"{block}.mlp.c_proj", width, 4 * width)
        add("transformer.ln_f", width)
        return found


class Checkpoint(NamedTuple):
    """What a ckpt.pt holds.

    Args:
        code: whose model.py wrote it.
        sizes: of the model.
        weights: by name, as in `sizes.shapes()`.
        step: optimizer steps made.
        best_loss: lowest validation loss so far.
        config: the run's settings; empty if the file has none.
        optimizer: `optimizer.state_dict()`; None if the file has none.
    """

    code: Code
    sizes: Sizes
    weights: dict[str, Tensor]
    step: int
    best_loss: float
    config: dict[str, Any]
    optimizer: dict[str, Any] | None


def read(path: Path, code: Code | None = None) -> Checkpoint:
    """Read a checkpoint; tensors stay on disk until they are used.

    Args:
        path: the file, or the out_dir that has it.
        code: whose model.py wrote it; None tells by `model_args`.

    Raises:
        ValueError: the file is missing, damaged, no checkpoint of nanoGPT's, or needs code to run.
    """
    path = path / NAME if path.is_dir() else path
    content = load(path)
    if not isinstance(content, dict) or not {"model", "model_args"} <= content.keys():
        keys = ", ".join(map(str, list(content)[:5])) if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{path} is no checkpoint of nanoGPT's: it holds {keys or 'nothing'}; one has model, optimizer, "
            "model_args, iter_num, best_val_loss and config"
        )
    model_args = _dict(path, content, "model_args")
    sizes = _sizes(path, model_args)
    optimizer = content.get("optimizer")
    return Checkpoint(
        code or ("mars" if _SCALED in model_args else "nanogpt"),
        sizes,
        _weights(path, _dict(path, content, "model"), sizes),
        int(_number(path, "iter_num", content.get("iter_num", 0))),
        _number(path, "best_val_loss", content.get("best_val_loss", NO_LOSS)),
        _dict(path, {"config": {}, **content}, "config"),
        None if optimizer is None else _dict(path, content, "optimizer"),
    )


def load(path: Path) -> Any:
    """Return what torch.save wrote to a file, without running anything in it.

    Raises:
        ValueError: the file is missing, damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        foreign = sorted(get_unsafe_globals_in_checkpoint(str(path)))
    except Exception as error:  # what a damaged or hostile file raises, no list covers
        raise ValueError(_damaged(path, error)) from None
    if foreign:
        raise ValueError(
            f"{path} holds {foreign[0]}, which may run code when it is read; accepted: tensors and plain values. If "
            "you trust the file, load it where it was made and save it again without that"
        )
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise ValueError(_damaged(path, error)) from None


def save(folder: Path, content: dict[str, Any]) -> Path:
    """Write a folder's ckpt.pt, which has its name only once it is whole; return its path.

    Raises:
        ValueError: the folder has one already.
    """
    path = folder / NAME
    if path.exists():
        raise ValueError(f"{path} exists already; choose another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{NAME}.partial-{os.getpid()}"
    try:
        torch.save(content, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def without_prefix(name: str) -> str:
    """Return a parameter's name as the bare model has it."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def _sizes(path: Path, model_args: dict[str, Any]) -> Sizes:
    given = {key: model_args[key] for key in Sizes._fields if key in model_args}
    given["scaled"] = model_args.get(_SCALED, False)
    missing = [key for key in Sizes._fields if key not in given and key not in Sizes._field_defaults]
    if missing:
        raise ValueError(f"{path}: model_args lacks {', '.join(missing)}; it has {', '.join(map(str, model_args))}")
    for key, value in given.items():
        if key in ("bias", "scaled"):
            fits, needed = isinstance(value, bool), "True or False"
        elif key == "dropout":
            fits, needed = isinstance(value, (int, float)) and 0 <= value < 1, "a number from 0 to below 1"
        else:
            fits, needed = type(value) is int and value > 0, "a whole number from 1 on"
        if not fits:
            raise ValueError(f"{path}: model_args has {key}={one_line(value, 40)}, which is not {needed}")
    sizes = Sizes(**given)
    if sizes.n_embd % sizes.n_head:
        raise ValueError(f"{path}: model_args has n_embd={sizes.n_embd}, not a multiple of n_head={sizes.n_head}")
    return sizes


def _weights(path: Path, saved: dict[str, Any], sizes: Sizes) -> dict[str, Tensor]:
    """Return the parameters under their bare names, each checked; the tied head and causal masks are left out."""
    found = {without_prefix(str(name)): value for name, value in saved.items()}
    head = found.pop(HEAD, None)
    shapes = sizes.shapes()
    for name in [name for name in found if name.endswith((".attn.bias", ".attn.masked_bias"))]:
        del found[name]
    for names, what in ((shapes.keys() - found.keys(), "lacks"), (found.keys() - shapes.keys(), "has an unknown")):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"{path} {what} {min(names)}{others}, with model_args of {sizes.n_layer} blocks and "
                f"bias={sizes.bias}; GPT-2 as in nanoGPT's model.py is accepted"
            )
    for name, shape in shapes.items():
        value = found[name]
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided):
            raise ValueError(f"{path}: {name} is {one_line(type(value).__name__)}, not a floating point tensor")
        if tuple(value.shape) != shape:
            raise ValueError(f"{path}: {name} has the shape {tuple(value.shape)}; model_args say {shape}")
    if head is not None and not (isinstance(head, Tensor) and torch.equal(head, found[EMBEDDING])):
        raise ValueError(f"{path}: {HEAD} differs from {EMBEDDING}; nanoGPT ties them, and so does this conversion")
    return {name: found[name] for name in shapes}


def _dict(path: Path, content: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(content[key], dict):
        raise ValueError(f"{path}: {key} is {type(content[key]).__name__}; nanoGPT saves a dict")
    return content[key]


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{path}: {key} is {one_line(value, 40)}; nanoGPT saves a number")
    return value


def _damaged(path: Path, error: Exception) -> str:
    # torch adds advice to read the file without protection; what it raised first says what was found.
    said = str(error.__context__ or error).strip() or type(error).__name__
    said = one_line(said.splitlines()[0], 150)
    return f"{path} is damaged, or not a file that torch.save writes ({said}); copy it again"
